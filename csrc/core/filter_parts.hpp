// filter_parts.hpp - the memory of one filter, and what its configuration implies. filter.hpp has the algorithm.
#pragma once

#include "apart.hpp"
#include "arena.hpp"
#include "kbt.h"
#include "layer.hpp"
#include "narrow.hpp"
#include "noise.hpp"
#include "relu.hpp"

namespace kbt {

#ifdef KBT_ONLY_JOINT
constexpr bool kOnlyJoint = true;  // a firmware that leaves the code of apart.hpp and narrow.hpp out
#else
constexpr bool kOnlyJoint = false;
#endif

template <class T>
class FilterParts {
 public:
  // What is learned, then scratch. Without a base only the sizes are computed.
  void plan_learned(const kbt_config &config, int which, Arena &arena) {
    cfg_ = &config;
    kind_ = filter_kind(config, which);
    apart_ = outputs_apart(config);
    narrow_ = outputs_behind_few(config);
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      w.shape(config, i);
      w.mean = arena.take<T>(w.mean_count());
      w.u = arena.take<T>(w.u_count());
      w.d = arena.take<T>(w.d_count());  // right behind U: see project_group
    }
    noise_.kind = config.noise;
    noise_.n = outputs();
    noise_.equal = config.covariance == KBT_SHARED && !in_units_of_noise(config);
    noise_.values = arena.take<T>(NoiseModel<T>::capacity(config.noise, outputs()));
  }

  void plan_scratch(Arena &arena) {
    plan_layers(arena);
    plan_measurement(arena);
  }

  // Largest number of elements any single array takes, as a double: an overflow is seen before an integer could wrap.
  KBT_SELDOM static double largest_array(const kbt_config &cfg) {
    const double rows = cfg.max_rows;
    double rank = rows * cfg.widths[cfg.layers];
    if (outputs_apart(cfg)) {
      const double n = cfg.widths[1] + 8.0, m = cfg.widths[0] + 9.0, factors = cfg.covariance == KBT_SHARED ? 1.0 : n;
      return (factors * m + n) * (m + rows) + factors * rows * (m + rows);
    }
    const bool narrow = outputs_behind_few(cfg);
    if (narrow) rank = cfg.widths[cfg.layers - 1];
    double largest = rank * rank;
    for (int i = 0; i < cfg.layers; ++i) {
      const double n = cfg.widths[i + 1] + 8.0, m = cfg.widths[i] + 9.0;
      const double members = cfg.covariance == KBT_FULL ? n : 1.0, M = members * m, group = rows * members;
      const double square = narrow && i == cfg.layers - 1 ? n : rows * n * rows * n;
      const double sizes[] = {n / members * M * M, n * rows * M * members, (1 + rank) * rows * n, square,
                              rows * m * rows * m, rank * M * 8,           rank * rank * 8,       group * group * 8};
      for (const double size : sizes) largest = largest < size ? size : largest;
    }
    return largest;
  }

  Index layers() const { return cfg_->layers; }
  Index inputs() const { return cfg_->widths[0]; }
  Index outputs() const { return cfg_->widths[cfg_->layers]; }
  Posterior<T> &weights(Index layer) { return layers_[layer].w; }
  const Posterior<T> &weights(Index layer) const { return layers_[layer].w; }
  const NoiseModel<T> &noise() const { return noise_; }
  NoiseModel<T> &noise() { return noise_; }
  const T *input(Index row) const { return layers_[0].input(row); }  // h of the latest forward pass
  // Whether a prior in units of this noise, and with it D, stays in the range of T. A bank widens that of the last
  // layer by at most the number of its inputs.
  bool noise_in_range(const T *values, Index count) const {
    if (!in_units_of_noise(*cfg_)) return true;
    T widest = T(1);
    for (Index i = 0; i < layers(); ++i) {
      const T prior = layers_[i].w.prior_var * static_cast<T>(i == layers() - 1 ? kind_.last : kind_.hidden);
      widest = prior > widest ? prior : widest;
    }
    const bool square = noise_.is_matrix(count);
    for (Index i = 0; i < (square ? outputs() : count); ++i) {
      if (!(values[square ? i * (outputs() + 1) : i] < kLargest<T> / (widest * T(inputs() + 1)))) return false;
    }
    return true;
  }

 protected:
  Cov<T> input_cov(T *data, Index rows) const {
    return Cov<T>{data, cfg_->covariance == KBT_FULL, rows, inputs(), inputs()};
  }
  bool apart() const { return !kOnlyJoint && apart_; }
  bool narrow() const { return !kOnlyJoint && narrow_; }
  bool fuse() const { return cfg_->rule == KBT_FUSE; }
  bool softmax_output() const { return cfg_->output == KBT_SOFTMAX; }
  bool learns_noise() const { return cfg_->noise == KBT_NOISE_ADAPTIVE; }
  bool robust() const { return !softmax_output() && fuse() && (learns_noise() || cfg_->drift < 0.0); }

  // Neurons of a layer are correlated when their weights are (`full`), or through a shared uncertain input. The last
  // layer's covariance is kept dense, for the measurement.
  bool dense_output(Index i) const {
    if (apart()) return false;
    if (narrow() && i == layers() - 1) return false;
    return i == layers() - 1 || cfg_->covariance == KBT_FULL || i > 0 || cfg_->input_var > 0.0;
  }
  // Columns of B in the adjoint of a layer, for this many rows.
  Index rank_of(Index layer, Index rows) const {
    if (apart() || (narrow() && layer == layers() - 1)) return 1;
    return narrow() ? Index(cfg_->widths[layers() - 1]) : rows * outputs();
  }
  // All weights of the last layer are in one group, so its measurement noise is known without cancellation.
  bool whole_last_layer() const {
    return cfg_->covariance == KBT_FULL || (cfg_->covariance == KBT_NEURON && outputs() == 1);
  }
  // The same for independent neurons, each with the others as part of its noise. Worth its time where the noise can be
  // small beside the variances, which is the gaussian case.
  bool separate_last_layer() const {
    return cfg_->covariance == KBT_NEURON && outputs() > 1 && fuse() && cfg_->output == KBT_GAUSSIAN && !narrow();
  }
  bool noise_known() const { return !apart() && (whole_last_layer() || separate_last_layer()); }
  bool has_other_cov() const { return layers() > 1 || cfg_->input_var > 0.0 || !fuse(); }

  // Outputs have their own neurons in the last layer, and share the layers below.
  bool has_own_noise(Index layer) const { return layer == layers() - 1 && cfg_->covariance != KBT_FULL; }
  // A posterior that goes with the noise.
  bool scales_with_noise() const { return in_units_of_noise(*cfg_) && !relative_factor(*cfg_); }
  T mean_noise() const {
    T sum = T(0);
    for (Index o = 0; o < outputs(); ++o) sum += noise_.variance(o);
    return sum / T(outputs());
  }
  // Variance of the weights of neuron j before any data.
  T prior_of(Index layer, Index j) const {
    const T prior = layers_[layer].w.prior_var * static_cast<T>(layer == layers() - 1 ? kind_.last : kind_.hidden);
    if (!scales_with_noise()) return prior;
    return prior * (has_own_noise(layer) ? noise_.variance(j) : mean_noise());
  }

  Cov<T> cov_out(Index i, Index rows) const {
    const Posterior<T> &w = layers_[i].w;
    return {cov_[i % 2], dense_output(i), rows, w.distinct(), w.var_stride()};
  }
  T output_var(Index a, Index o) const {
    const Posterior<T> &w = layers_[layers() - 1].w;
    if (w.structure != KBT_SHARED) return variances_[layers() - 1][a * w.stride + o];
    return (relative_factor(*cfg_) ? noise_.variance(o) : T(1)) * variances_[0][a];
  }

  // ---- noise that is learned
  // ------------------------------------------------------------------------------------------

  // (8.2): v e^2 / (1 + c) with c the variance of output i in units of its noise, averaged over rows.
  T squared_noise(const T *y, Index i) const {
    const Index n = outputs();
    const T R = noise_.values[i];
    T sum = T(0);
    for (Index a = 0; a < rows_; ++a) {
      const T e = y[a * n + i] - measurement_.mean[a * n + i], var = output_var(a, i);
      sum += weight_ * (e / (R + (var > T(0) ? var : T(0))) * e) * R;
    }
    return sum / T(rows_);
  }
  // Where the noise of an output grows by a ratio, D does.
  // What the outputs share goes with the mean of their noises, as its prior does. The mean of their ratios would not
  // do: where the noises fluctuate one by one it is above 1, and D would grow without end.
  void scale_with_noise(const T *before, const T *after) {
    T old_sum = T(0), new_sum = T(0);
    for (Index i = 0; i < outputs(); ++i) old_sum += before[i], new_sum += after[i];
    const T mean = new_sum / old_sum;
    for (Index i = 0; i < layers(); ++i) {
      const bool own = has_own_noise(i);
      layers_[i].w.each_factor([&](Index j, T &D) { D *= own ? after[j] / before[j] : mean; });
    }
  }
  kbt_status judge_noise(const T *y, const T *given, std::uint64_t age) {
    adapts_ = learns_noise() && given == nullptr;
    if (!adapts_) return KBT_OK;
    const bool adapted = noise_.adapt(age, [&](Index i) { return squared_noise(y, i); });
    return adapted && noise_in_range(noise_.scratch, outputs()) ? KBT_OK : KBT_E_RANGE;
  }
  void take_noise() {
    if (scales_with_noise()) scale_with_noise(noise_.values, noise_.scratch);
    noise_.take_adapted();
  }

  // A weight moves by at most sqrt(S_pp) sqrt(Var u) |r|. Rejects what could leave the range of T.
  bool steps_in_range(Index i, const Adjoint<T> &adj) const {
    if (!all_finite(adj.data, adj.count())) return false;
    return weighted_dot(adj.r(0), variances_[i], adj.r(0), adj.rows * adj.stride) < kLargest<T> &&
           (fuse() || growth_in_range(i, adj));
  }
  // Growth along b multiplies a variance by at most 1 + Var(b^T u); that of a weight is a sum of U^2 D, and the factors
  // of a step stay below the growth divided by the smallest D.
  bool growth_in_range(Index i, const Adjoint<T> &adj) const {
    const Posterior<T> &w = layers_[i].w;
    const Index count = adj.rows * adj.stride;
    T growth = T(1);
    for (Index k = 0; k < adj.rank; ++k) {
      if (adj.signs[k] < T(0)) growth *= T(1) + T(count) * weighted_dot(adj.B(k, 0), variances_[i], adj.B(k, 0), count);
    }
    if (growth == T(1)) return true;
    const typename Posterior<T>::Range D = w.range_of_D();
    const T steepest = largest_magnitude(w.u, w.u_count(), T(1));
    return growth * D.largest * steepest * steepest < kLargest<T> && growth < D.smallest * kLargest<T>;
  }

  const kbt_config *cfg_;
  FilterKind kind_;
  Layer<T> layers_[KBT_MAX_LAYERS];
  Relu<T> relu_[KBT_MAX_LAYERS];
  T *variances_[KBT_MAX_LAYERS];  // Var u before the ReLU, rows x stride
  T *adjoint_[KBT_MAX_LAYERS];    // (1 + rank) x rows x stride
  T *cov_[2];                     // covariance in and out of a layer, in turns
  T *other_z_;                    // z of the first layer, of the forward pass before the latest
  T *u_;                          // means of a layer's pre-activations, rows x stride
  T *series_;
  T *other_cov_;  // part of the output covariance that the last layer's weights do not cause, and scratch
  NoiseModel<T> noise_;
  Work<T> work_;
  Measurement<T> measurement_;
  Narrow<T> through_;
  Index rows_;  // of the latest forward pass
  T nis_, log_likelihood_, weight_;
  bool apart_;   // outputs are measured one by one: apart.hpp
  bool narrow_;  // outputs are correlated through few hidden units: narrow.hpp
  bool adapts_;
  bool noise_given_;  // the latest judge had noise of its own, which is in the scratch of noise_

 private:
  struct Piece {  // of the arena: where its address goes, and how many numbers it has
    T **at;
    Index count;
  };
  template <std::size_t n>
  static void take(Arena &arena, const Piece (&pieces)[n]) {
    for (const Piece &piece : pieces) *piece.at = arena.take<T>(piece.count);
  }

  KBT_SELDOM void plan_layers(Arena &arena) {
    const Index rows = cfg_->max_rows;
    for (Index i = 0; i < layers(); ++i) {
      Layer<T> &layer = layers_[i];
      const Posterior<T> &w = layer.w;
      take(arena, {{&layer.z, rows * w.z_stride},
                   {&layer.F, w.projection_count(rows)},
                   {&layer.weight_var, cfg_->covariance == KBT_DIAGONAL ? 0 : rows * rows * w.var_stride()},
                   {&relu_[i].gates, apart() ? 0 : rows * w.stride},
                   {&variances_[i], rows * w.var_stride()},
                   {&adjoint_[i], (1 + rank_of(i, rows)) * (apart() ? 1 : rows) * w.stride}});
    }
    Index cov[2] = {0, cfg_->input_var > 0.0 ? input_cov(nullptr, rows).count() : 0}, u = 0, series = 0;
    WorkSizes sizes{};
    const auto at_least = [](Index &x, Index y) { x = x < y ? y : x; };
    for (Index i = 0; i < layers(); ++i) {
      const Posterior<T> &w = layers_[i].w;
      at_least(cov[i % 2], Cov<T>::count(dense_output(i), rows, w.distinct(), w.var_stride()));
      at_least(u, rows * w.stride);
      if (!apart()) at_least(series, Relu<T>::series_count(rows, w.stride, cfg_->relu_order));
      sizes.grow_to(apart()
                        ? WorkSizes::of_rows_apart(w)
                        : WorkSizes::of(w, rows, rank_of(i, rows), fuse(), i == layers() - 1 && separate_last_layer()));
    }
    take(arena, {{&other_z_, rows * layers_[0].w.z_stride},
                 {&noise_.scratch, NoiseModel<T>::capacity(cfg_->noise, outputs())},
                 {&cov_[0], cov[0] + kLanes},  // zeros behind it: see input_group
                 {&cov_[1], cov[1] + kLanes},
                 {&u_, u},
                 {&series_, series},
                 {&work_.vector, sizes.vector},
                 {&work_.inner, sizes.inner},
                 {&work_.step, sizes.step},
                 {&work_.H, sizes.H},
                 {&work_.Q, sizes.Q},
                 {&work_.B, sizes.B},
                 {&work_.O, sizes.O}});
  }

  KBT_SELDOM void plan_measurement(Arena &arena) {
    const Index rows = cfg_->max_rows, rank = rows * outputs();
    const Index square = apart() ? rows * rows : narrow() ? 0 : Measurement<T>::square_count(rows, outputs());
    take(arena, {{&measurement_.mean, rank},
                 {&measurement_.p, softmax_output() ? rank : 0},
                 {&measurement_.map, softmax_output() && !apart() ? rank * outputs() : 0},
                 {&measurement_.innovation, rank},
                 {&measurement_.L, square},
                 {&measurement_.X, square},
                 {&measurement_.N, !fuse() || noise_known() ? square : 0},
                 {&measurement_.vectors, fuse() ? 0 : square},
                 {&measurement_.signs, rank},
                 {&measurement_.kappa, moment_softmax(*cfg_) ? rank : 0},
                 {&measurement_.scale, moment_softmax(*cfg_) ? rows : 0},
                 {&measurement_.share, apart() ? layers_[0].w.stride : 0},
                 {&other_cov_, noise_known() ? square + 2 * rank : 0}});
    if (narrow()) through_.plan(cfg_->widths[layers() - 1], outputs(), layers_[layers() - 1].w.stride, arena);
  }
};

}  // namespace kbt
