// head.hpp - the head: arena plan, prior, predict, update, in reading order. METHOD.md has the mathematics.
#pragma once

#include <cstdint>
#include <limits>
#include <new>
#include <utility>

#include "kbt.h"
#include "linear.hpp"
#include "measurement.hpp"
#include "relu.hpp"
#include "watch.hpp"

struct kbt_sample;

// Who wants to know of every change of a head: the flight recorder (kbt_flight.cpp). Called after the change.
struct kbt_tap {
  void (*learned)(kbt_tap *self, const kbt_sample &sample, std::int32_t rows, kbt_status status, double nis);
  void (*set_noise)(kbt_tap *self, const void *noise, std::int32_t count);
  void (*replaced)(kbt_tap *self);  // the whole state: a prior, means, or a blob
};

struct kbt_head {
  kbt_config cfg;
  kbt_counters counters;
  std::uint64_t samples;
  std::int32_t predicted_rows;  // rows whose forward pass lies in the scratch, waiting to be observed
  kbt_watch watch;
  kbt_tap *tap;  // null: nobody
};

// One sample as a caller of the C ABI gives it.
struct kbt_sample {
  bool predicted;  // learn at the rows of the latest prediction, not at h
  const void *h;   // rows x d
  std::int32_t rows;
  const void *y;               // rows x d_o, or null with
  const std::int32_t *labels;  // one per row
  const void *noise;           // noise_count numbers, or null for the head's own
  std::int32_t noise_count;
};

namespace kbt {

// Hands out aligned pieces of one block of memory. Without a base it only counts, so that the plan which measures is
// the plan which lays out.
class Arena {
 public:
  explicit Arena(void *base) : base_(static_cast<unsigned char *>(base)) {}

  template <class T>
  __attribute__((noinline)) T *take(Index count) {  // called often and once only: inlined it would fill kilobytes
    constexpr std::size_t kAlign = KBT_ARENA_ALIGN, kMax = std::numeric_limits<std::size_t>::max() / 2;
    const std::size_t limit = kMax / sizeof(T);
    if (count < 0 || static_cast<std::size_t>(count) > limit) overflow_ = true;
    const std::size_t bytes =
        overflow_ ? 0 : (static_cast<std::size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    if (used_ > kMax - bytes) overflow_ = true;
    T *piece = base_ != nullptr && !overflow_ ? reinterpret_cast<T *>(base_ + used_) : nullptr;
    if (!overflow_) used_ += bytes;
    return piece;
  }
  bool overflow() const { return overflow_; }
  std::size_t used() const { return used_; }

 private:
  unsigned char *base_;
  std::size_t used_ = 0;
  bool overflow_ = false;
};

template <class T>
class Head : public kbt_head {
 public:
  // ---- arena -------------------------------------------------------------------------------------------------------

  // Lays the head out behind itself. With arena.base == nullptr only the sizes are computed.
  void plan(const kbt_config &config, Arena &arena) {
    cfg = config;
    const Index rows = cfg.max_rows, rank = rows * outputs();
    const std::size_t start = arena.used();
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      w.shape(cfg.widths[i], cfg.widths[i + 1], cfg.covariance, static_cast<T>(cfg.prior_var[i]));
      w.mean = arena.take<T>(w.mean_count());
      w.u = arena.take<T>(w.u_count());
      w.d = arena.take<T>(w.d_count());  // right behind U: see Linear::full_project
    }
    noise_ = arena.take<T>(noise_capacity());
    learned_bytes_ = arena.used() - start;

    for (Index i = 0; i < layers(); ++i) {
      Linear<T> &layer = layers_[i];
      layer.z = arena.take<T>(rows * layer.w.z_stride);
      layer.F = arena.take<T>(layer.w.projection_count(rows));
      layer.own = arena.take<T>(cfg.covariance == KBT_DIAGONAL ? 0 : rows * rows * layer.w.stride);
      relu_[i].gates = arena.take<T>(rows * layer.w.stride);
      spread_[i] = arena.take<T>(rows * layer.w.stride);
      adjoint_[i] = arena.take<T>((1 + rank) * rows * layer.w.stride);
    }
    other_z_ = arena.take<T>(rows * layers_[0].w.z_stride);
    call_noise_ = arena.take<T>(noise_capacity());
    target_ = arena.take<T>(rank);

    Index cov[2] = {0, 0}, u = 0, series = 0, vector = 0, inner = 0, step = 0, H = 0, Q = 0, B = 0, O = 0;
    const auto at_least = [](Index &x, Index y) { x = x < y ? y : x; };
    at_least(cov[1], input_cov(nullptr, rows).dense ? rows * inputs() * rows * inputs() : rows * rows * inputs());
    for (Index i = 0; i < layers(); ++i) {
      const Linear<T> &layer = layers_[i];
      at_least(cov[i % 2], Cov<T>::count(dense_output(i), rows, layer.w.n, layer.w.stride));
      at_least(u, rows * layer.w.stride);
      at_least(series, Relu<T>::series_count(rows, layer.w.stride, cfg.relu_order));
      at_least(vector, layer.vector_count());
      at_least(inner, layer.inner_count());
      at_least(step, layer.step_count());
      at_least(H, layer.H_count(rows, rank, fuse()));
      at_least(Q, layer.Q_count(rows, rank, fuse()));
      at_least(B, layer.B_count(rows, rank, fuse()));
      at_least(O, layer.O_count(rows, rank, fuse(), i == layers() - 1 && separate_last_layer()));
    }
    cov_[0] = arena.take<T>(cov[0] + kLanes);  // zeros behind it: see Linear::full_weights
    cov_[1] = arena.take<T>(cov[1] + kLanes);
    u_ = arena.take<T>(u);
    series_ = arena.take<T>(series);
    work_ = {arena.take<T>(vector), arena.take<T>(inner), arena.take<T>(step), arena.take<T>(H),
             arena.take<T>(Q),      arena.take<T>(B),     arena.take<T>(O)};

    const Index square = Measurement<T>::square_count(rows, outputs());
    const bool softmax_output = cfg.output == KBT_SOFTMAX;
    measurement_.mean = arena.take<T>(rank);
    measurement_.p = arena.take<T>(softmax_output ? rank : 0);
    measurement_.map = arena.take<T>(softmax_output ? rank * outputs() : 0);
    measurement_.innovation = arena.take<T>(rank);
    measurement_.L = arena.take<T>(square);
    measurement_.X = arena.take<T>(square);
    measurement_.N = arena.take<T>(!fuse() || noise_known() ? square : 0);
    measurement_.vectors = arena.take<T>(fuse() ? 0 : square);
    measurement_.signs = arena.take<T>(rank);
    rest_ = arena.take<T>(noise_known() ? square + 2 * rank : 0);
  }

  // Largest number of elements any single array of this configuration takes, as a double: what overflows is seen before
  // an integer could wrap.
  static double largest_array(const kbt_config &cfg) {
    const double rows = cfg.max_rows, rank = rows * cfg.widths[cfg.layers];
    double largest = rank * rank;
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
    reset();
    noise_matrix_ = false;
    for (Index i = 0; i < outputs(); ++i) noise_[i] = floored_noise(static_cast<T>(cfg.noise_var));
  }

  // Weights zero with the prior's variances, nothing learned, nothing predicted.
  void reset() {
    samples = 0;
    predicted_rows = 0;
    watch = {};
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
  const T *noise() const { return noise_; }
  // Everything that learning changes but the sample count and the kind of noise, as one piece: two heads of one
  // configuration have it in the same order.
  const void *learned() const { return layers_[0].w.mean; }
  std::size_t learned_bytes() const { return learned_bytes_; }
  bool noise_is_matrix() const { return noise_matrix_; }
  // From now on this head's learned numbers are these, in the order of learned(), with what goes with them.
  void take_over(void *numbers, std::uint64_t its_samples, bool its_noise_is_matrix) {
    T *const from = layers_[0].w.mean, *const to = static_cast<T *>(numbers);
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      for (T **piece : {&w.mean, &w.d, &w.u}) *piece = to + (*piece - from);
    }
    noise_ = to + (noise_ - from);
    samples = its_samples;
    noise_matrix_ = its_noise_is_matrix;
    predicted_rows = 0;
  }
  const T *input(Index row) const {
    return layers_[0].z + row * layers_[0].w.z_stride;
  }  // h of the latest forward pass
  Index noise_count() const { return noise_matrix_ ? outputs() * outputs() : outputs(); }

  // ---- prior (METHOD section 1) ------------------------------------------------------------------------------------

  void set_prior(const T *weight, const T *bias, std::uint64_t seed) {
    const Index d = inputs(), L = layers();
    reset();
    for (Index i = 0; i < L; ++i) {
      Posterior<T> &w = layers_[i].w;
      const auto at = [&](Index j, Index p) -> T & { return w.mean[p * w.stride + j]; };
      // Input p of the original h: h itself before the first layer, and the merged pair (+h) - (-h) behind it.
      const auto set = [&](Index j, Index p, T value) {
        at(j, p) = value;
        if (i > 0) at(j, d + p) = -value;
      };
      if (i == L - 1) {
        for (Index j = 0; j < w.n; ++j) {
          for (Index p = 0; p < d; ++p) set(j, p, weight[j * d + p]);
          at(j, w.M1 - 1) = bias != nullptr ? bias[j] : T(0);
        }
        continue;
      }
      for (Index p = 0; p < d; ++p) {
        set(p, p, T(1));
        set(d + p, p, T(-1));
      }
      const T scale = std::sqrt(T(3) / T(d));  // uniform on +-sqrt(3/d) has standard deviation 1/sqrt(d)
      for (Index j = 2 * d; j < w.n; ++j) {
        for (Index p = 0; p < d; ++p) set(j, p, scale * uniform(seed));
        at(j, w.M1 - 1) = scale * uniform(seed);
      }
    }
  }

  void set_means(const void *const *means) {
    reset();
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      const T *from = static_cast<const T *>(means[i]);
      for (Index j = 0; j < w.n; ++j) {
        for (Index p = 0; p < w.M1; ++p) w.mean[p * w.stride + j] = from[j * w.M1 + p];
      }
    }
  }

  // ---- noise -------------------------------------------------------------------------------------------------------

  bool noise_count_allowed(Index count) const {
    if (cfg.noise == KBT_NOISE_MULTINOMIAL) return false;
    if (count == 1 || count == outputs()) return true;
    return count == outputs() * outputs() && cfg.noise == KBT_NOISE_CONSTANT;
  }

  // Finite, not negative; a matrix symmetric and positive semi-definite (to rounding). Uses the noise scratch.
  bool noise_valid(const T *values, Index count) {
    const Index n = outputs();
    if (!all_finite(values, count)) return false;
    const bool matrix = count == n * n && n > 1;
    T largest = T(0);
    for (Index i = 0; i < (matrix ? n : count); ++i) {
      const T var = values[matrix ? i * n + i : i];
      if (var < T(0)) return false;
      largest = var > largest ? var : largest;
    }
    if (!matrix) return true;
    for (Index i = 0; i < n; ++i) {
      for (Index k = 0; k < n; ++k) {
        if (values[i * n + k] != values[k * n + i]) return false;
        call_noise_[i * n + k] = values[i * n + k];
      }
      call_noise_[i * n + i] += T(n) * T(16) * std::numeric_limits<T>::epsilon() * largest;
    }
    return cholesky(call_noise_, n, T(0)) == 0;
  }

  // Floors the variances. Returns whether the result is a matrix.
  bool copy_noise(const T *values, Index count, T *to) const {
    const Index n = outputs();
    const bool matrix = count == n * n && n > 1;
    for (Index i = 0; i < (matrix ? n * n : n); ++i) {
      const T x = values[count == 1 ? 0 : i];
      to[i] = !matrix || i % (n + 1) == 0 ? floored_noise(x) : x;
    }
    return matrix;
  }

  void set_noise(const T *values, Index count) {
    noise_matrix_ = copy_noise(values, count, noise_);
    watch = {};  // what was expected before is not what is expected now
  }
  void restore_noise(const T *values, bool matrix) {
    noise_matrix_ = matrix;
    for (Index i = 0; i < noise_count(); ++i) noise_[i] = values[i];
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // Moments through every layer (METHOD section 2). Touches scratch only. Without h, at the input of the pass before
  // the latest, which is kept for take_back.
  kbt_status forward(const T *h, Index rows) {
    rows_before_ = predicted_rows;
    predicted_rows = 0;
    std::swap(layers_[0].z, other_z_);
    for (Index a = 0; h != nullptr && a < rows; ++a) {
      T *z = layers_[0].z + a * layers_[0].w.z_stride;
      for (Index p = 0; p < inputs(); ++p) {
        const T x = h[a * inputs() + p];
        z[p] = std::fabs(x) < kSilent ? T(0) : x;
      }
      z[inputs()] = T(1);
    }
    Cov<T> in = input_cov(cov_[1], rows);
    bool certain = !(cfg.input_var > 0.0);
    if (!certain) fill_input_cov(in);
    for (Index i = 0; i < layers(); ++i) {
      Linear<T> &layer = layers_[i];
      const Cov<T> out{cov_[i % 2], dense_output(i), rows, layer.w.n, layer.w.stride};
      const Index count = Cov<T>::count(out.dense, rows, out.n, out.stride);
      layer.mean_forward(rows, u_);
      fill(out.data, T(0), count + kLanes);
      if (!certain) layer.input_cov_forward(in, out, work_);
      const bool last = i == layers() - 1;
      if (last && noise_known()) {
        for (Index k = 0; k < count; ++k) rest_[k] = out.data[k];
        for (Index k = 0; !fuse() && k < rows * outputs(); ++k) rest_[k * rows * outputs() + k] += T(kNoiseFloor);
      }
      layer.weight_cov_forward(out, work_);
      if (!all_finite(u_, rows * layer.w.stride) || !all_finite(out.data, count)) return KBT_E_RANGE;
      for (Index a = 0; a < rows; ++a) {
        T *spread = spread_[i] + a * out.stride;
        if (out.dense) {
          for (Index j = 0; j < out.n; ++j) spread[j] = out.same(a, a, j);
        } else {
          array(spread, out.stride) = array(&out.same(a, a, 0), out.stride);
        }
      }
      if (last && !outputs_in_range(rows)) return KBT_E_RANGE;
      if (!last) relu_[i].forward(u_, out, cfg.relu_order, layers_[i + 1].z, layers_[i + 1].w.z_stride, series_);
      in = out;
      certain = false;
    }
    measurement_.rows = rows;
    measurement_.n = outputs();
    measurement_.predict(u_, layers_[layers() - 1].w.stride, in.data, softmax_output(), cfg.softmax_order);
    predicted_rows = static_cast<std::int32_t>(rows);
    return KBT_OK;
  }

  // The call that made the latest forward pass is refused: the rows that were predicted before it wait to be observed
  // again. No weight has changed since, so that their pass gives what it gave then, bit by bit.
  void take_back() { forward(nullptr, rows_before_); }

  // Results of the latest forward pass. cov and total_var may be null. What is left of a variance where nearly equal
  // ones have cancelled, as those of two classes do that move together, is rounding and can be negative: it counts as
  // zero, and so do its covariances. The noise can be the largest number there is, and nothing is larger.
  void read_prediction(T *mean, T *cov, T *total_var) {
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
      const T total = (known(i) ? row[i] : T(0)) + observation_noise(i);
      total_var[i] = is_finite(total) ? total : std::numeric_limits<T>::max();
    }
  }

  // ---- update ------------------------------------------------------------------------------------------------------

  // Learns y (rows x d_o) at the rows of the latest forward pass. Every check comes before the first change.
  kbt_status observe(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    const Index rows = predicted_rows, rank = rows * outputs(), last = layers() - 1;
    Noise<T> R{noise_, noise_matrix_};
    if (noise != nullptr) R = Noise<T>{call_noise_, copy_noise(noise, noise_count, call_noise_)};

    const Adjoint<T> top = adjoint(last, rows, rank);
    fill(top.data, T(0), (1 + rank) * rows * top.stride);
    if (fuse()) {
      measurement_.fuse(output_cov(), y, R, cfg.output, cfg.noise, noise_known(), top);
    } else {
      measurement_.replace(output_cov(), y, R, top);
    }
    const T nis = measurement_.nis;
    if (measurement_.floored < 0) return KBT_E_RANGE;
    if (!is_finite(nis) || !is_finite(measurement_.log_likelihood)) return KBT_E_RANGE;
    for (Index i = last; i > 0; --i) {
      layers_[i].adjoint_backward(adjoint(i, rows, rank), adjoint(i - 1, rows, rank), relu_[i - 1].gates);
    }
    for (Index i = 0; i <= last; ++i) {
      if (!steps_in_range(i, rows, rank)) return KBT_E_RANGE;
    }
    const bool adapts = cfg.noise == KBT_NOISE_ADAPTIVE && noise == nullptr;
    if (adapts && !adapt_noise(top, call_noise_)) return KBT_E_RANGE;
    if (result != nullptr) *result = {static_cast<double>(nis), static_cast<double>(measurement_.log_likelihood)};
    const bool rejected = cfg.gate > 0.0 && static_cast<double>(nis) > cfg.gate;
    observed(nis, rejected, rank);
    if (rejected) {
      predicted_rows = 0;
      ++counters.gated;
      return KBT_GATED;
    }

    predicted_rows = 0;
    int floored = measurement_.floored;
    if (noise_known() && has_rest()) measurement_.add_rest(rest_, top, rest_ + rank * rank);
    for (Index i = 0; i <= last; ++i) {
      const T *known_noise = i == last && noise_known() ? measurement_.N : nullptr;
      floored += layers_[i].update(adjoint(i, rows, rank), fuse(), known_noise, work_);
      layers_[i].w.forget(static_cast<T>(cfg.forgetting));
    }
    for (Index i = 0; adapts && i < outputs(); ++i) noise_[i] = call_noise_[i];
    counters.floored += static_cast<std::uint64_t>(floored);
    if (samples != kMostSamples) ++samples;
    return KBT_OK;
  }

  T *noise_candidate() { return measurement_.L; }  // scratch for a noise that is still to be judged
  T *target() { return target_; }                  // rank numbers of scratch for targets made from labels

 private:
  bool fuse() const { return cfg.rule == KBT_FUSE; }
  bool softmax_output() const { return cfg.output == KBT_SOFTMAX; }

  // Neurons of a layer are correlated when their weights are (`full`), or through a shared uncertain input. The last
  // layer's covariance is kept dense, for the measurement.
  bool dense_output(Index i) const {
    return i == layers() - 1 || cfg.covariance == KBT_FULL || i > 0 || cfg.input_var > 0.0;
  }
  // All weights of the last layer stand in one group, so that its measurement noise is known without cancellation.
  bool whole_last_layer() const {
    return cfg.covariance == KBT_FULL || (cfg.covariance == KBT_NEURON && outputs() == 1);
  }
  // The same for neurons that stand apart, each with the others as part of its noise. Worth its time where the noise
  // can be small beside the variances, which is the gaussian case.
  bool separate_last_layer() const {
    return cfg.covariance == KBT_NEURON && outputs() > 1 && fuse() && cfg.output == KBT_GAUSSIAN;
  }
  bool noise_known() const { return whole_last_layer() || separate_last_layer(); }
  bool has_rest() const { return layers() > 1 || cfg.input_var > 0.0 || !fuse(); }
  Index noise_capacity() const { return cfg.noise == KBT_NOISE_CONSTANT ? outputs() * outputs() : outputs(); }
  static T floored_noise(T x) { return x > T(kNoiseFloor) ? x : T(kNoiseFloor); }

  Cov<T> input_cov(T *data, Index rows) const {
    return Cov<T>{data, cfg.covariance == KBT_FULL, rows, inputs(), inputs()};
  }
  void fill_input_cov(const Cov<T> &in) const {
    fill(in.data, T(0), Cov<T>::count(in.dense, in.rows, in.n, in.stride) + kLanes);
    for (Index a = 0; a < in.rows; ++a) {
      for (Index p = 0; p < in.n; ++p) in.same(a, a, p) = static_cast<T>(cfg.input_var);
    }
  }
  const T *output_cov() const { return cov_[(layers() - 1) % 2]; }
  Adjoint<T> adjoint(Index i, Index rows, Index rank) const {
    const T *rho = fuse() ? measurement_.innovation : nullptr;  // whitened by then
    return Adjoint<T>{adjoint_[i], measurement_.signs, rho, rank, rows, layers_[i].w.stride};
  }

  T observation_noise(Index i) const {
    if (!fuse()) return T(0);  // METHOD section 3: under `replace` the output covariance is already the data's
    const Index o = i % outputs();
    if (cfg.noise == KBT_NOISE_MULTINOMIAL) {
      return measurement_.p[i] * complement(measurement_.p + (i - o), outputs(), o);
    }
    return noise_[noise_matrix_ ? o * outputs() + o : o];
  }

  // Inputs below this count as zero. Beside the constant input 1 they say nothing, but their products would be
  // denormal, which makes an update up to forty times slower.
  static constexpr T kSilent = sizeof(T) == sizeof(float) ? T(1e-12) : T(1e-100);
  static constexpr std::uint64_t kMostSamples = std::numeric_limits<std::uint64_t>::max();  // where the count stays
  // Sums of a few numbers below this stay in the range of T.
  static constexpr T kLargest = std::numeric_limits<T>::max() * T(1e-8);

  // Variances of the outputs are still to be multiplied by derivatives of the softmax and added to the noise.
  bool outputs_in_range(Index rows) const {
    const Index stride = layers_[layers() - 1].w.stride;
    for (Index a = 0; a < rows; ++a) {
      for (Index j = 0; j < outputs(); ++j) {
        if (!(spread_[layers() - 1][a * stride + j] < kLargest)) return false;
      }
    }
    return true;
  }
  // A weight moves by at most sqrt(S_pp) sqrt(Var u) |r|. Refuse what could leave the range of T.
  bool steps_in_range(Index i, Index rows, Index rank) const {
    const Adjoint<T> adj = adjoint(i, rows, rank);
    if (!all_finite(adj.data, (1 + rank) * rows * adj.stride)) return false;
    return quadratic(adj.data, spread_[i], rows * adj.stride) < kLargest &&  // column 0 is r
           (fuse() || growth_in_range(i, adj));
  }
  // Only `replace` lets variances grow. Growth along b multiplies a variance by at most 1 + Var(b^T u); that of a
  // weight is a sum of U^2 D, and the factors of a step stay below the growth divided by the smallest D.
  __attribute__((cold)) bool growth_in_range(Index i, const Adjoint<T> &adj) const {
    const Posterior<T> &w = layers_[i].w;
    const Index count = adj.rows * adj.stride;
    T growth = T(1);
    for (Index k = 0; k < adj.rank; ++k) {
      if (adj.signs[k] < T(0)) growth *= T(1) + T(count) * quadratic(adj.B(k, 0), spread_[i], count);
    }
    if (growth == T(1)) return true;
    const typename Posterior<T>::Range D = w.range_of_D();
    const T steepest = largest_magnitude(w.u, w.u_count(), T(1));
    return growth * D.largest * steepest * steepest < kLargest && growth < D.smallest * kLargest;
  }

  // For the watch. The gate hides what it rejects from a gaussian average, which judges what was learned and knows
  // where it was cut off; the share of rejected samples is judged beside it. A softmax average takes all of them, as a
  // cut at some NIS does not say which surprises are left.
  void observed(T nis, bool rejected, Index K) {
    if (cfg.gate > 0.0) note_gate(watch, rejected);
    if (softmax_output()) {
      note_surprise(watch, measurement_.mean, measurement_.rows, outputs(), measurement_.log_likelihood);
    } else if (!rejected) {
      note_nis(watch, nis < T(1e30) ? static_cast<float>(nis) : 1e30F, K);
    }
  }

  // R_i += (r_i - R_i) / min(n0 + samples, window), floored. False if that would leave the range of T.
  bool adapt_noise(const Adjoint<T> &top, T *to) const {
    constexpr int kGrowing = kAdaptWindow - kAdaptStart;  // a blob may hold any number of samples: no sum before this
    const T weight = T(1) / T(samples < kGrowing ? static_cast<int>(samples) + kAdaptStart : kAdaptWindow);
    for (Index i = 0; i < outputs(); ++i) {
      const T R = noise_[i] + (measurement_.expected_noise(top, i, noise_[i]) - noise_[i]) * weight;
      if (!(R < kLargest)) return false;
      to[i] = floored_noise(R);
    }
    return true;
  }

  static T uniform(std::uint64_t &state) {  // SplitMix64, mapped to (-1, 1)
    state += 0x9E3779B97F4A7C15ULL;
    std::uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
    const std::int32_t top = static_cast<std::int32_t>(x >> 40) - (1 << 23);  // 24 bits: exact in float
    return T(top) * T(1.1920928955078125e-7);
  }

  Linear<T> layers_[KBT_MAX_LAYERS];
  Relu<T> relu_[KBT_MAX_LAYERS];
  T *spread_[KBT_MAX_LAYERS];   // Var u before the ReLU, rows x stride
  T *adjoint_[KBT_MAX_LAYERS];  // (1 + rank) x rows x stride
  T *cov_[2];                   // covariance in and out of a layer, in turns
  T *other_z_;                  // z of the first layer, of the forward pass before the latest
  T *u_;                        // means of a layer's pre-activations, rows x stride
  T *series_;
  T *rest_;                 // part of the output covariance that the last layer's weights do not cause, and scratch
  T *noise_, *call_noise_;  // R of the head, and of one call
  T *target_;
  std::int32_t rows_before_;  // predicted_rows before the latest forward pass
  bool noise_matrix_;
  std::size_t learned_bytes_;
  typename Linear<T>::Work work_;
  Measurement<T> measurement_;
};

}  // namespace kbt
