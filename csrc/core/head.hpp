// head.hpp - the head: arena plan, forward pass, update, in reading order. docs/method.md has the mathematics.
#pragma once

#include <new>
#include <utility>

#include "arena.hpp"
#include "kbt.h"
#include "layer.hpp"
#include "measurement.hpp"
#include "members.hpp"
#include "noise.hpp"
#include "prior.hpp"
#include "record.hpp"
#include "relu.hpp"

namespace kbt {

template <class T>
class Head : public kbt_head {
 public:
  // ---- arena -------------------------------------------------------------------------------------------------------

  // Lays the head out behind itself. Without a base only the sizes are computed.
  void plan(const kbt_config &config, Arena &arena) {
    cfg = config;
    const std::size_t start = arena.used();
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      w.shape(cfg, i);
      w.mean = arena.take<T>(w.mean_count());
      w.u = arena.take<T>(w.u_count());
      w.d = arena.take<T>(w.d_count());  // right behind U: see project_group
    }
    noise_.kind = cfg.noise;
    noise_.n = outputs();
    noise_.values = arena.take<T>(NoiseModel<T>::capacity(cfg.noise, outputs()));
    learned_bytes_ = arena.used() - start;
    if (watchful()) return plan_members(arena);
    plan_layers(arena);
    plan_measurement(arena);
  }

  // Largest number of elements any single array of this configuration takes, as a double: an overflow is seen before
  // an integer could wrap.
  static double largest_array(const kbt_config &cfg) {
    const double rows = cfg.max_rows, rank = rows * cfg.widths[cfg.layers];
    double largest = rank * rank;
    if (has_members(cfg))
      return (rows + cfg.widths[0] + 1.0) * (cfg.widths[0] + rank + 1.0) * 16.0 + rank * rank * 16.0;
    for (int i = 0; i < cfg.layers; ++i) {
      const double n = cfg.widths[i + 1] + 8.0, m = cfg.widths[i] + 9.0;
      const double members = cfg.covariance == KBT_FULL ? n : 1.0, M = members * m, group = rows * members;
      const double sizes[] = {n / members * M * M, n * rows * M * members, (1 + rank) * rows * n, rows * n * rows * n,
                              rows * m * rows * m, rank * M * 8,           rank * rank * 8,       group * group * 8};
      for (const double size : sizes) largest = largest < size ? size : largest;
    }
    return largest;
  }

  void start() {
    counters = {};
    for (Index i = 0; i < layers(); ++i) layers_[i].loops.choose();
    members_.choose();
    noise_.matrix = false;
    for (Index i = 0; i < outputs(); ++i) noise_.values[i] = NoiseModel<T>::floored(static_cast<T>(cfg.noise_var));
    if (watchful()) store().set_noise(noise_.values);
    reset();
  }

  // Weights zero with the prior's variances, nothing learned, nothing predicted.
  void reset() {
    samples = 0;
    predicted_rows = 0;
    watch = {};
    changes = {};
    if (watchful()) return store().reset();
    for (Index i = 0; i < layers(); ++i) {
      fill(layers_[i].w.mean, T(0), layers_[i].w.mean_count());
      layers_[i].w.reset_factors();
    }
  }

  Index layers() const { return cfg.layers; }
  Index inputs() const { return cfg.widths[0]; }
  Index outputs() const { return cfg.widths[cfg.layers]; }
  Posterior<T> &weights(Index layer) { return layers_[layer].w; }
  const Posterior<T> &weights(Index layer) const { return layers_[layer].w; }
  const NoiseModel<T> &noise() const { return noise_; }
  NoiseModel<T> &noise() { return noise_; }
  // h of the latest forward pass
  const T *input(Index row) const { return watchful() ? members_.input(row) : layers_[0].input(row); }
  bool watchful() const { return layers_[0].w.watchful; }
  MemberStore<T> store() const { return layers_[0].w.store(); }
  // All that learning changes, except the sample count and the kind of noise, as one piece: two heads of one
  // configuration have it in the same order.
  const void *learned() const { return layers_[0].w.mean; }
  std::size_t learned_bytes() const { return learned_bytes_; }
  // From now on this head's learned numbers are these, in the order of learned(), with what belongs to them.
  void take_over(void *numbers, std::uint64_t its_samples, bool its_noise_is_matrix) {
    T *const from = layers_[0].w.mean, *const to = static_cast<T *>(numbers);
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      for (T **piece : {&w.mean, &w.d, &w.u}) *piece = to + (*piece - from);
    }
    noise_.values = to + (noise_.values - from);
    noise_.matrix = its_noise_is_matrix;
    samples = its_samples;
    predicted_rows = 0;
  }

  // ---- prior and noise ---------------------------------------------------------------------------------------------

  void set_prior(const T *weight, const T *bias, std::uint64_t seed) {
    if (watchful()) {
      set_first_weights([&](Index o, Index p) {
        return p < inputs() ? weight[o * inputs() + p] : (bias != nullptr ? bias[o] : T(0));
      });
      return reset();
    }
    reset();
    set_prior_means(layers_, layers(), weight, bias, seed);
  }

  void set_means(const void *const *means) {
    if (watchful()) {
      const T *from = static_cast<const T *>(means[0]);
      set_first_weights([&](Index o, Index p) { return from[o * (inputs() + 1) + p]; });
      return reset();
    }
    reset();
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      const T *from = static_cast<const T *>(means[i]);
      for (Index j = 0; j < w.n; ++j) {
        for (Index p = 0; p < w.M1; ++p) w.mean[p * w.stride + j] = from[j * w.M1 + p];
      }
    }
  }

  void set_noise(const T *values, Index count) {
    noise_.set(values, count);
    if (watchful()) store().set_noise(noise_.values);
    watch = {};  // it was compared with the old noise
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // Moments through every layer, method.md §2. Changes scratch only. Without h: at the input of the pass before the
  // latest, which is kept for take_back.
  kbt_status forward(const T *h, Index rows) {
    rows_before_ = predicted_rows;
    predicted_rows = 0;
    if (watchful()) {
      const kbt_status status = members_.forward(store(), h, rows, kFlushBelow);
      if (status == KBT_OK) predicted_rows = static_cast<std::int32_t>(rows);
      return status;
    }
    std::swap(layers_[0].z, other_z_);
    if (h != nullptr) set_input(h, rows);
    Cov<T> in = input_cov(cov_[1], rows);
    bool certain = !(cfg.input_var > 0.0);
    if (!certain) fill_input_cov(in);
    for (Index i = 0; i < layers(); ++i) {
      Layer<T> &layer = layers_[i];
      const Cov<T> out{cov_[i % 2], dense_output(i), rows, layer.w.n, layer.w.stride};
      const bool last = i == layers() - 1;
      layer.mean_forward(rows, u_);
      fill(out.data, T(0), out.count() + kLanes);
      if (!certain) layer.input_cov_forward(in, out, work_);
      if (last && noise_known()) keep_other_cov(out);
      layer.weight_cov_forward(out, work_);
      if (!all_finite(u_, rows * layer.w.stride) || !all_finite(out.data, out.count())) return KBT_E_RANGE;
      keep_variances(out, variances_[i]);
      if (last && !outputs_in_range(rows)) return KBT_E_RANGE;
      if (!last) {
        const Layer<T> &next = layers_[i + 1];
        relu_[i].forward(layer.loops, u_, out, cfg.relu_order, next.z, next.w.z_stride, series_);
      }
      in = out;
      certain = false;
    }
    measurement_.rows = rows;
    measurement_.n = outputs();
    measurement_.predict(u_, layers_[layers() - 1].w.stride, in.data, cfg);
    predicted_rows = static_cast<std::int32_t>(rows);
    return KBT_OK;
  }

  // The call that made the latest forward pass is rejected: the rows predicted before it wait to be observed again. No
  // weight has changed since, so their pass gives the same bits as before.
  void take_back() { forward(nullptr, rows_before_); }

  // Results of the latest forward pass. cov and total_var may be null. Where nearly equal variances cancel, as those of
  // two classes do that move together, rounding error is left and can be negative: it counts as zero, and so do its
  // covariances. The noise can be the largest number there is, so the total saturates.
  void read_prediction(T *mean, T *cov, T *total_var) {
    if (watchful()) return members_.read_prediction(store(), mean, cov, total_var);
    const Index K = predicted_rows * outputs();
    for (Index i = 0; i < K; ++i) mean[i] = measurement_.mean[i];
    if (cov == nullptr && total_var == nullptr) return;
    const T *epistemic = output_cov();
    if (softmax_output()) {
      measurement_.softmax_cov(epistemic, measurement_.L, measurement_.X);
      epistemic = measurement_.L;
    }
    const auto known = [&](Index i) { return epistemic[i * K + i] > T(0); };
    for (Index i = 0; i < K; ++i) {
      const T *row = epistemic + i * K;
      for (Index k = 0; cov != nullptr && k < K; ++k) cov[i * K + k] = known(i) && known(k) ? row[k] : T(0);
      if (total_var == nullptr) continue;
      const T total = (known(i) && !matches_moments(cfg) ? row[i] : T(0)) + observation_noise(i);
      total_var[i] = is_finite(total) ? total : std::numeric_limits<T>::max();
    }
  }

  // ---- update ------------------------------------------------------------------------------------------------------

  // Learns y (rows x d_o) at the rows of the latest forward pass. Every check comes before the first change.
  kbt_status observe(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    if (watchful()) return observe_members(y, noise, noise_count, result);
    const Index rows = predicted_rows, rank = rows * outputs(), last = layers() - 1;
    Adjoint<T> adjoints[KBT_MAX_LAYERS];
    for (Index i = 0; i <= last; ++i) adjoints[i] = adjoint(i, rows, only_variances(cfg, rows) ? 1 : rank);
    const Adjoint<T> &top = adjoints[last];
    measure(y, noise_.of_call(noise, noise_count), top);
    const T nis = measurement_.nis;
    if (measurement_.floored < 0) return KBT_E_RANGE;
    if (!is_finite(nis) || !is_finite(measurement_.log_likelihood)) return KBT_E_RANGE;
    for (Index i = last; i > 0; --i) layers_[i].adjoint_backward(adjoints[i], adjoints[i - 1], relu_[i - 1].gates);
    for (Index i = 0; i <= last; ++i) {
      if (!steps_in_range(i, adjoints[i])) return KBT_E_RANGE;
    }
    const bool adapts = cfg.noise == KBT_NOISE_ADAPTIVE && noise == nullptr;
    const auto expected = [&](Index i, T R) { return measurement_.expected_noise(top, i, R); };
    if (adapts && !noise_.adapt(samples, expected)) return KBT_E_RANGE;

    if (result != nullptr) *result = {static_cast<double>(nis), static_cast<double>(measurement_.log_likelihood), 0, 0};
    const bool rejected = cfg.gate > 0.0 && static_cast<double>(nis) > cfg.gate;
    observed(nis, rejected, rank);
    predicted_rows = 0;
    if (rejected) {
      ++counters.gated;
      return KBT_GATED;
    }
    int floored = measurement_.floored;
    if (noise_known() && has_other_cov()) measurement_.add_other_cov(other_cov_, top, other_cov_ + rank * rank);
    for (Index i = 0; i <= last; ++i) {
      floored += layers_[i].update(adjoints[i], work_);
      layers_[i].w.forget(static_cast<T>(cfg.forgetting));
    }
    if (adapts) noise_.take_adapted();
    counters.floored += static_cast<std::uint64_t>(floored);
    if (samples != kMostSamples) ++samples;
    return KBT_OK;
  }

  void suppose_changed() {
    MemberStore<T> s = store();
    if (!s.begun()) return;
    s.begin_fresh(false);
    s.replace_members(MemberStore<T>::kFresh);
    predicted_rows = 0;
    note_change(changes, {KBT_CHANGED, 0, 0.0}, samples);
  }
  // Mean of the weights over the members, n x (m + 1) with the bias last; their covariance, blocks of the outputs or,
  // for `full`, all of it; and the noise. Returns its count.
  void member_mean(T *mean) const {
    const MemberStore<T> s = store();
    T w[kLanes];
    s.weights(w);
    for (Index o = 0; o < s.O; ++o) {
      for (Index p = 0; p < s.M; ++p) mean[o * s.M + (p == 0 ? s.M - 1 : p - 1)] = s.mean(w, o, p);
    }
  }
  void member_cov(T *cov) const {
    const MemberStore<T> s = store();
    T w[kLanes];
    s.weights(w);
    const Index all = s.O * s.M;
    const auto place = [&](Index p) { return p == 0 ? s.M - 1 : p - 1; };
    for (Index i = 0; i < all; ++i) {
      for (Index k = 0; k < all; ++k) {
        const Index o = i / s.M, p = i % s.M, b = k / s.M, q = k % s.M;
        if (cfg.covariance != KBT_FULL && o != b) continue;
        T *const row =
            cfg.covariance == KBT_FULL ? cov + (o * s.M + place(p)) * all + b * s.M : cov + (o * s.M + place(p)) * s.M;
        row[place(q)] = s.covariance(w, o, p, b, q);
      }
    }
  }
  Index member_noise(T *noise) const {
    const MemberStore<T> s = store();
    T w[kLanes];
    s.weights(w);
    for (Index i = 0; i < s.noise_count(); ++i) {
      noise[i] = T(0);
      for (Index l = 0; l < kLanes; ++l) noise[i] += w[l] * s.R[i * kLanes + l];
    }
    return s.noise_count();
  }

  T *noise_candidate() { return watchful() ? candidate_ : measurement_.L; }  // scratch for a noise to be checked
  T *target() { return target_; }  // rank numbers of scratch for targets made from labels

 private:
  // ---- arena, continued --------------------------------------------------------------------------------------------

  struct Piece {  // of the arena: where its address goes, and how many numbers it has
    T **at;
    Index count;
  };
  template <std::size_t n>
  static void take(Arena &arena, const Piece (&pieces)[n]) {
    for (const Piece &piece : pieces) *piece.at = arena.take<T>(piece.count);
  }

  void plan_layers(Arena &arena) {
    const Index rows = cfg.max_rows, rank = rows * outputs();
    for (Index i = 0; i < layers(); ++i) {
      Layer<T> &layer = layers_[i];
      const Posterior<T> &w = layer.w;
      take(arena, {{&layer.z, rows * w.z_stride},
                   {&layer.F, w.projection_count(rows)},
                   {&layer.weight_var, cfg.covariance == KBT_DIAGONAL ? 0 : rows * rows * w.stride},
                   {&relu_[i].gates, rows * w.stride},
                   {&variances_[i], rows * w.stride},
                   {&adjoint_[i], (1 + rank) * rows * w.stride}});
    }
    Index cov[2] = {0, input_cov(nullptr, rows).count()}, u = 0, series = 0;
    WorkSizes sizes{};
    const auto at_least = [](Index &x, Index y) { x = x < y ? y : x; };
    for (Index i = 0; i < layers(); ++i) {
      const Posterior<T> &w = layers_[i].w;
      at_least(cov[i % 2], Cov<T>::count(dense_output(i), rows, w.n, w.stride));
      at_least(u, rows * w.stride);
      at_least(series, Relu<T>::series_count(rows, w.stride, cfg.relu_order));
      sizes.grow_to(WorkSizes::of(w, rows, rank, fuse(), i == layers() - 1 && separate_last_layer()));
    }
    take(arena, {{&other_z_, rows * layers_[0].w.z_stride},
                 {&noise_.scratch, NoiseModel<T>::capacity(cfg.noise, outputs())},
                 {&target_, rank},
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

  void plan_measurement(Arena &arena) {
    const Index rows = cfg.max_rows, rank = rows * outputs();
    const Index square = Measurement<T>::square_count(rows, outputs());
    take(arena, {{&measurement_.mean, rank},
                 {&measurement_.p, softmax_output() ? rank : 0},
                 {&measurement_.map, softmax_output() ? rank * outputs() : 0},
                 {&measurement_.innovation, rank},
                 {&measurement_.L, square},
                 {&measurement_.X, square},
                 {&measurement_.N, !fuse() || noise_known() ? square : 0},
                 {&measurement_.vectors, fuse() ? 0 : square},
                 {&measurement_.signs, rank},
                 {&measurement_.kappa, moment_softmax(cfg) ? rank : 0},
                 {&measurement_.scale, moment_softmax(cfg) ? rows : 0},
                 {&other_cov_, noise_known() ? square + 2 * rank : 0}});
  }

  void plan_members(Arena &arena) {
    const Index rows = cfg.max_rows, noise = NoiseModel<T>::capacity(cfg.noise, outputs());
    members_.plan(arena, store(), rows);
    take(arena, {{&noise_.scratch, noise}, {&candidate_, noise}, {&target_, rows * outputs()}});
  }

  // ---- members -----------------------------------------------------------------------------------------------------

  // first(output, input) with the bias as the last input, as the C ABI has it.
  template <class First>
  void set_first_weights(First first) {
    const MemberStore<T> s = store();
    for (Index o = 0; o < s.O; ++o) {
      for (Index p = 0; p < s.M; ++p) s.first(o, p) = first(o, p == 0 ? s.M - 1 : p - 1);
    }
  }

  kbt_status observe_members(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    const Index rows = predicted_rows, count = rows * outputs();
    MemberStore<T> s = store();
    if (!members_.target_in_range(y, count)) return KBT_E_RANGE;
    const T nis = members_.nis(s, y);
    const bool rejected = cfg.gate > 0.0 && static_cast<double>(nis) > cfg.gate;
    predicted_rows = 0;
    if (rejected) {
      note_gate(watch, true);
      ++counters.gated;
      if (result != nullptr)
        *result = {static_cast<double>(nis), static_cast<double>(members_.log_density(s, y)), 0, 0};
      return KBT_GATED;
    }
    const T *given = nullptr;
    if (noise != nullptr) {  // a matrix counts by its variances
      const Noise<T> R = noise_.of_call(noise, noise_count);
      for (Index i = 0; i < outputs(); ++i) candidate_[i] = R.at(i, i, outputs());
      given = candidate_;
    }
    MemberEvent event;
    const typename Members<T>::Judged judged = members_.learn(s, y, given, event);
    if (cfg.gate > 0.0) note_gate(watch, false);
    const float share = static_cast<float>(judged.nis) / static_cast<float>(count);
    note_nis(watch, (share < kMostNis ? share : kMostNis) * static_cast<float>(count), count);
    note_members(watch, s.walking(), s.noise_level(), event.kind != KBT_NO_CHANGE);
    if (samples != kMostSamples) ++samples;
    if (event.kind != KBT_NO_CHANGE) note_change(changes, event, samples);
    if (result != nullptr) {
      *result = {static_cast<double>(judged.nis), static_cast<double>(judged.log_density), event.kind, 0};
    }
    return KBT_OK;
  }

  // ---- what the configuration implies ------------------------------------------------------------------------------

  bool fuse() const { return cfg.rule == KBT_FUSE; }
  bool softmax_output() const { return cfg.output == KBT_SOFTMAX; }

  // Neurons of a layer are correlated when their weights are (`full`), or through a shared uncertain input. The last
  // layer's covariance is kept dense, for the measurement.
  bool dense_output(Index i) const {
    return i == layers() - 1 || cfg.covariance == KBT_FULL || i > 0 || cfg.input_var > 0.0;
  }
  // All weights of the last layer are in one group, so its measurement noise is known without cancellation.
  bool whole_last_layer() const {
    return cfg.covariance == KBT_FULL || (cfg.covariance == KBT_NEURON && outputs() == 1);
  }
  // The same for independent neurons, each with the others as part of its noise. Worth its time where the noise can be
  // small beside the variances, which is the gaussian case.
  bool separate_last_layer() const {
    return cfg.covariance == KBT_NEURON && outputs() > 1 && fuse() && cfg.output == KBT_GAUSSIAN;
  }
  bool noise_known() const { return whole_last_layer() || separate_last_layer(); }
  bool has_other_cov() const { return layers() > 1 || cfg.input_var > 0.0 || !fuse(); }

  // ---- forward, in parts -------------------------------------------------------------------------------------------

  // Inputs below this count as zero. Beside the constant input 1 they have no effect, but their products would be
  // denormal, which makes an update up to forty times slower.
  static constexpr T kFlushBelow = sizeof(T) == sizeof(float) ? T(1e-12) : T(1e-100);

  void set_input(const T *h, Index rows) {
    for (Index a = 0; a < rows; ++a) {
      T *z = layers_[0].z + a * layers_[0].w.z_stride;
      for (Index p = 0; p < inputs(); ++p) {
        const T x = h[a * inputs() + p];
        z[p] = std::fabs(x) < kFlushBelow ? T(0) : x;
      }
      z[inputs()] = T(1);
    }
  }
  Cov<T> input_cov(T *data, Index rows) const {
    return Cov<T>{data, cfg.covariance == KBT_FULL, rows, inputs(), inputs()};
  }
  void fill_input_cov(const Cov<T> &in) const {
    fill(in.data, T(0), in.count() + kLanes);
    for (Index a = 0; a < in.rows; ++a) {
      for (Index p = 0; p < in.n; ++p) in.same(a, a, p) = static_cast<T>(cfg.input_var);
    }
  }
  // The part of the output covariance that the last layer's weights do not cause.
  void keep_other_cov(const Cov<T> &out) {
    const Index K = out.rows * outputs();
    for (Index k = 0; k < K * K; ++k) other_cov_[k] = out.data[k];
    for (Index k = 0; !fuse() && k < K; ++k) other_cov_[k * K + k] += T(kNoiseFloor);
  }
  static void keep_variances(const Cov<T> &out, T *variances) {
    for (Index a = 0; a < out.rows; ++a, variances += out.stride) {
      if (out.dense) {
        for (Index j = 0; j < out.n; ++j) variances[j] = out.same(a, a, j);
      } else {
        std::memcpy(variances, &out.same(a, a, 0), static_cast<std::size_t>(out.stride) * sizeof(T));
      }
    }
  }
  // Variances of the outputs are still to be multiplied by derivatives of the softmax and added to the noise.
  bool outputs_in_range(Index rows) const {
    const Index stride = layers_[layers() - 1].w.stride;
    for (Index a = 0; a < rows; ++a) {
      for (Index j = 0; j < outputs(); ++j) {
        if (!(variances_[layers() - 1][a * stride + j] < kLargest<T>)) return false;
      }
    }
    return true;
  }

  const T *output_cov() const { return cov_[(layers() - 1) % 2]; }
  T observation_noise(Index i) const {  // (3.6)
    if (!fuse()) return T(0);
    const Index o = i % outputs();
    if (cfg.noise == KBT_NOISE_MULTINOMIAL) {
      return measurement_.p[i] * complement(measurement_.p + (i - o), outputs(), o);
    }
    return noise_.variance(o);
  }

  // ---- update, in parts --------------------------------------------------------------------------------------------

  static constexpr std::uint64_t kMostSamples = std::numeric_limits<std::uint64_t>::max();  // where the count stops

  Adjoint<T> adjoint(Index i, Index rows, Index rank) const {
    const T *rho = fuse() ? measurement_.innovation : nullptr;  // whitened by then
    const T *N = i == layers() - 1 && noise_known() ? measurement_.N : nullptr;
    return Adjoint<T>{adjoint_[i], measurement_.signs, rho, N, rank, rows, layers_[i].w.stride};
  }
  void measure(const T *y, const Noise<T> &R, const Adjoint<T> &top) {
    fill(top.data, T(0), top.count());
    if (fuse()) {
      measurement_.fuse(output_cov(), y, R, cfg.output, cfg.noise, noise_known(), top);
    } else {
      measurement_.replace(output_cov(), y, R, top);
    }
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

  // For the watch. A gaussian average leaves out what the gate rejects: it judges what was learned, knows where it was
  // cut off, and the share of rejected samples is judged beside it. A softmax average takes all samples, because a cut
  // at some NIS does not tell which surprises are left.
  void observed(T nis, bool rejected, Index K) {
    if (cfg.gate > 0.0) note_gate(watch, rejected);
    if (softmax_output()) {
      note_surprise(watch, measurement_.mean, measurement_.rows, outputs(), measurement_.log_likelihood);
    } else if (!rejected) {
      note_nis(watch, nis < T(1e30) ? static_cast<float>(nis) : 1e30F, K);
    }
  }

  Layer<T> layers_[KBT_MAX_LAYERS];
  Members<T> members_;  // one layer with drift KBT_DRIFT_AUTO
  T *candidate_;
  Relu<T> relu_[KBT_MAX_LAYERS];
  T *variances_[KBT_MAX_LAYERS];  // Var u before the ReLU, rows x stride
  T *adjoint_[KBT_MAX_LAYERS];    // (1 + rank) x rows x stride
  T *cov_[2];                     // covariance in and out of a layer, in turns
  T *other_z_;                    // z of the first layer, of the forward pass before the latest
  T *u_;                          // means of a layer's pre-activations, rows x stride
  T *series_;
  T *other_cov_;  // part of the output covariance that the last layer's weights do not cause, and scratch
  T *target_;
  NoiseModel<T> noise_;
  std::int32_t rows_before_;  // predicted_rows before the latest forward pass
  std::size_t learned_bytes_;
  Work<T> work_;
  Measurement<T> measurement_;
};

}  // namespace kbt
