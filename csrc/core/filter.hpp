// filter.hpp - one Kalman filter over the weights of all layers: forward pass, measurement, update, in reading order.
// docs/method.md §1 to §5, and §8 for the noise that it learns.
#pragma once

#include <utility>

#include "filter_parts.hpp"
#include "prior.hpp"

namespace kbt {

template <class T>
class Filter : public FilterParts<T> {
  using Parts = FilterParts<T>;
  using Parts::adapts_, Parts::adjoint_, Parts::cfg_, Parts::cov_, Parts::kind_, Parts::layers_, Parts::log_likelihood_;
  using Parts::apart, Parts::narrow, Parts::through_, Parts::rank_of, Parts::cov_out, Parts::dense_output, Parts::fuse,
      Parts::has_other_cov, Parts::has_own_noise, Parts::input_cov, Parts::learns_noise;
  using Parts::judge_noise, Parts::mean_noise, Parts::noise_known, Parts::output_var, Parts::prior_of, Parts::robust,
      Parts::scales_with_noise, Parts::softmax_output;
  using Parts::measurement_, Parts::nis_, Parts::noise_, Parts::noise_given_, Parts::other_cov_, Parts::other_z_,
      Parts::relu_;
  using Parts::rows_, Parts::scale_with_noise, Parts::steps_in_range, Parts::take_noise, Parts::series_, Parts::u_,
      Parts::variances_, Parts::weight_, Parts::work_;

 public:
  using Parts::inputs, Parts::layers, Parts::noise_in_range, Parts::outputs;

  void start() {
    for (Index i = 0; i < layers(); ++i) layers_[i].loops.choose();
    noise_.matrix = false;
    for (Index i = 0; i < outputs(); ++i) noise_.values[i] = NoiseModel<T>::floored(static_cast<T>(cfg_->noise_var));
    reset();
  }

  // Weights zero with the prior's variances.
  void reset() {
    rows_ = 0;
    for (Index i = 0; i < layers(); ++i) fill(layers_[i].w.mean, T(0), layers_[i].w.mean_count());
    reset_factors(T(1));
  }
  // The prior's variances, `relative` times as large in the last layer.
  void reset_factors(T relative) {
    for (Index i = 0; i < layers(); ++i) {
      const T wide = i == layers() - 1 ? relative : T(1);
      layers_[i].w.reset_factors([&](Index j) { return wide * prior_of(i, j); });
    }
  }
  // Goes on from what a filter has learned that differs in its prior.
  void copy_learned(const Filter &other) {
    for (Index i = 0; i < layers(); ++i) layers_[i].w.copy(other.layers_[i].w);
    array(noise_.values, noise_.count()) = array(static_cast<const T *>(other.noise_.values), noise_.count());
    for (Index i = 0; kind_.hidden != other.kind_.hidden && i < layers() - 1; ++i) {
      layers_[i].w.reset_factors([&](Index j) { return prior_of(i, j); });
    }
  }

  // The learned numbers are elsewhere from now on.
  void move(std::ptrdiff_t by) {
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      for (T **piece : {&w.mean, &w.d, &w.u}) *piece += by;
    }
    noise_.values += by;
  }

  // ---- prior -------------------------------------------------------------------------------------------------------

  void set_prior(const T *weight, const T *bias, std::uint64_t seed) {
    reset();
    set_prior_means(layers_, layers(), weight, bias, seed);
  }

  KBT_SELDOM void set_means(const void *const *means) {
    reset();
    for (Index i = 0; i < layers(); ++i) {
      Posterior<T> &w = layers_[i].w;
      const T *from = static_cast<const T *>(means[i]);
      for (Index j = 0; j < w.n; ++j) {
        for (Index p = 0; p < w.M1; ++p) w.mean[p * w.stride + j] = from[j * w.M1 + p];
      }
    }
  }

  // A posterior in units of the noise goes with it.
  KBT_SELDOM void set_noise(const T *values, Index count) {
    const bool scales = scales_with_noise() && !noise_.matrix;
    if (scales) array(noise_.scratch, outputs()) = array(static_cast<const T *>(noise_.values), outputs());
    noise_.set(values, count);
    if (scales && !noise_.matrix) scale_with_noise(noise_.scratch, noise_.values);
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // The input of the next forward pass. Without h: that of the pass before the latest.
  void take_input(const T *h, Index rows) {
    std::swap(layers_[0].z, other_z_);
    if (h != nullptr) set_input(h, rows);
  }
  // Moments through every layer, method.md §2. Changes scratch only.
  kbt_status forward(Index rows) {
    rows_ = 0;
    Cov<T> in = input_cov(cov_[1], rows);
    bool certain = !(cfg_->input_var > 0.0);
    if (!certain) fill_input_cov(in);
    for (Index i = 0; i < layers(); ++i) {
      Layer<T> &layer = layers_[i];
      const Cov<T> out = cov_out(i, rows);
      const bool last = i == layers() - 1;
      forward_layer(layer, certain ? nullptr : &in, out, last);
      if (!all_finite(u_, rows * layer.w.stride) || !all_finite(out.data, out.count())) return KBT_E_RANGE;
      keep_variances(out, variances_[i]);
      if (last && !outputs_in_range(rows)) return KBT_E_RANGE;
      if (!last) {
        const Layer<T> &next = layers_[i + 1];
        relu_[i].forward(layer.loops, u_, out, cfg_->relu_order, next.z, next.w.z_stride, series_);
      }
      in = out;
      certain = false;
    }
    measurement_.rows = rows;
    measurement_.n = outputs();
    measurement_.predict(u_, layers_[layers() - 1].w.stride, in, *cfg_);
    rows_ = rows;
    return KBT_OK;
  }

  // Results of the latest forward pass; total_var may be null. The noise can be the largest number there is, so the
  // total saturates.
  void read_prediction(T *mean, T *total_var) {
    const Index K = rows_ * outputs();
    for (Index i = 0; i < K; ++i) mean[i] = measurement_.mean[i];
    if (total_var == nullptr) return;
    const bool of_labels = matches_moments(*cfg_);  // then the noise is all of the variance
    const T *const classes = softmax_output() && !of_labels ? measurement_.softmax_var(output_cov()) : nullptr;
    for (Index i = 0; i < K; ++i) {
      T own = T(0);
      if (!of_labels) own = classes != nullptr ? classes[i] : output_var(i / outputs(), i % outputs());
      const T total = (own > T(0) ? own : T(0)) + observation_noise(i);
      total_var[i] = is_finite(total) ? total : std::numeric_limits<T>::max();
    }
  }
  // Adds `weight` times the epistemic covariance. Where nearly equal variances cancel, as those of two classes do that
  // move together, rounding error is left and can be negative: it counts as zero, and so do its covariances.
  void add_cov(T weight, T *cov) {
    if (apart()) return add_cov_apart(weight, cov);
    if (narrow()) {
      const Layer<T> &layer = layers_[layers() - 1];
      return through_.add_cov(layer.loops, layer.w.mean, units_cov(), weight, cov);
    }
    const Index K = rows_ * outputs();
    const T *const dense = softmax_output() ? measurement_.softmax_cov(output_cov()) : output_cov();
    const auto known = [&](Index i) { return dense[i * K + i] > T(0); };
    for (Index i = 0; i < K; ++i) {
      for (Index k = 0; known(i) && k < K; ++k) cov[i * K + k] += known(k) ? weight * dense[i * K + k] : T(0);
    }
  }
  // The same of its diagonal alone.
  void add_var(T weight, T *var) {
    const Index n = outputs();
    const bool labels = apart() && softmax_output();
    const T *const classes = softmax_output() && !labels ? measurement_.softmax_var(output_cov()) : nullptr;
    const Cov<T> own = cov_out(0, rows_);
    const Apart<T> seen = outputs_at(own);
    for (Index a = 0; a < rows_; ++a) {
      typename Apart<T>::Others rest{};
      if (labels) rest = seen.others(a, a);
      for (Index i = 0; i < n; ++i) {
        const T x = labels               ? seen.label_cov(a, i, a, i, rest)
                    : classes != nullptr ? classes[a * n + i]
                                         : output_var(a, i);
        var[a * n + i] += weight * (x > T(0) ? x : T(0));
      }
    }
  }
  // ---- update ------------------------------------------------------------------------------------------------------

  // Judges y (rows x d_o) at the rows of the latest forward pass, and prepares the step. Changes scratch only: every
  // check of a call comes before its first change. `age` is how many samples the noise was learned from.
  kbt_status judge(const T *y, const T *given, Index given_count, std::uint64_t age) {
    if (apart()) return judge_apart(y, given, given_count, age);
    const Index rank = rows_ * outputs(), last = layers() - 1;
    Adjoint<T> adjoints[KBT_MAX_LAYERS];
    set_adjoints(adjoints);
    const Noise<T> R = noise_.of_call(given, given_count);
    measure(y, R, adjoints);
    nis_ = measurement_.nis;
    log_likelihood_ = measurement_.log_likelihood;
    if (measurement_.floored < 0) return KBT_E_RANGE;
    if (!is_finite(nis_) || !is_finite(log_likelihood_)) return KBT_E_RANGE;
    weight_ = T(1);
    if (robust() && nis_ > T(kHuber) * T(rank)) {  // (8.3)
      weight_ = T(kHuber) * T(rank) / nis_;
      measure(y, noise_.scaled(R, T(1) / weight_), adjoints);
      if (measurement_.floored < 0 || !is_finite(measurement_.nis)) return KBT_E_RANGE;
    }
    for (Index i = narrow() ? last - 1 : last; i > 0; --i) {
      layers_[i].adjoint_backward(adjoints[i], adjoints[i - 1], relu_[i - 1].gates);
    }
    for (Index i = 0; i <= last; ++i) {
      if (!steps_in_range(i, adjoints[i])) return KBT_E_RANGE;
    }
    return judge_noise(y, given, age);
  }
  T nis() const { return nis_; }  // of the latest judge, before any robust step
  T log_likelihood() const { return log_likelihood_; }
  const T *probabilities() const { return measurement_.mean; }

  // Takes the step that judge has prepared. Returns how many factors were floored.
  int learn(const T *y) {
    if (apart()) return learn_apart(y);
    Adjoint<T> adjoints[KBT_MAX_LAYERS];
    set_adjoints(adjoints);
    const Index rank = rows_ * outputs(), last = layers() - 1;
    int floored = measurement_.floored;
    if (noise_known() && has_other_cov())
      measurement_.add_other_cov(other_cov_, adjoints[last], other_cov_ + rank * rank);
    for (Index i = 0; i <= last; ++i) floored += layers_[i].update(adjoints[i], work_);
    if (adapts_) take_noise();
    for (Index i = 0; lets_go() && i <= last; ++i) let_go(i);
    return floored;
  }

 private:
  // ---- forward, in parts -------------------------------------------------------------------------------------------

  void set_input(const T *h, Index rows) {
    for (Index a = 0; a < rows; ++a) {
      T *z = layers_[0].z + a * layers_[0].w.z_stride;
      for (Index p = 0; p < inputs(); ++p) {
        const T x = h[a * inputs() + p];
        z[p] = std::fabs(x) < kFlushBelow<T> ? T(0) : x;
      }
      z[inputs()] = T(1);
    }
  }
  void fill_input_cov(const Cov<T> &in) const {
    fill(in.data, T(0), in.count() + kLanes);
    for (Index a = 0; a < in.rows; ++a) {
      for (Index p = 0; p < in.n; ++p) in.same(a, a, p) = static_cast<T>(cfg_->input_var);
    }
  }
  // Mean and covariance of a layer's pre-activations: u_ and out. `in` is null where the inputs are certain.
  void forward_layer(Layer<T> &layer, const Cov<T> *in, const Cov<T> &out, bool last) {
    const bool few = last && narrow();
    layer.mean_forward(out.rows, u_);
    fill(out.data, T(0), out.count() + kLanes);
    if (in != nullptr) layer.input_cov_forward(*in, out, !few, work_);
    if (few) std::memcpy(through_.traces, out.data, static_cast<std::size_t>(outputs()) * sizeof(T));
    if (last && noise_known()) keep_other_cov(out);
    layer.weight_cov_forward(out, work_);
    if (few) add_units(layer, *in, out);
  }
  // Of the last layer behind few units: its variances alone, which are `out` without what the units bring.
  __attribute__((noinline)) void add_units(const Layer<T> &layer, const Cov<T> &in, const Cov<T> &out) {
    std::memcpy(through_.own, out.data, static_cast<std::size_t>(outputs()) * sizeof(T));
    through_.add_shared(layer.loops, layer.w.mean, in, out.data);
  }
  Cov<T> units_cov() const { return cov_out(layers() - 2, 1); }

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
    for (Index a = 0; a < rows; ++a) {
      for (Index j = 0; j < outputs(); ++j) {
        if (!(output_var(a, j) < kLargest<T>)) return false;
      }
    }
    return true;
  }

  const T *output_cov() const { return cov_[(layers() - 1) % 2]; }
  T observation_noise(Index i) const {  // (3.5)
    if (!fuse()) return T(0);
    const Index o = i % outputs();
    if (cfg_->noise == KBT_NOISE_MULTINOMIAL) {
      return measurement_.p[i] * complement(measurement_.p + (i - o), outputs(), o);
    }
    return noise_.variance(o);
  }

  // ---- update, in parts --------------------------------------------------------------------------------------------

  void set_adjoints(Adjoint<T> *adjoints) const {
    const T *rho = fuse() ? measurement_.innovation : nullptr;  // whitened by then
    for (Index i = 0; i < layers(); ++i) {
      const bool last = i == layers() - 1;
      const T *N = last && noise_known() ? measurement_.N : nullptr;
      T *const share = last && narrow() ? through_.share : nullptr;
      adjoints[i] = {adjoint_[i], measurement_.signs, rho, N, share, rank_of(i, rows_), rows_, layers_[i].w.stride};
    }
  }
  void measure(const T *y, const Noise<T> &R, const Adjoint<T> *adjoints) {
    const Adjoint<T> &top = adjoints[layers() - 1];
    fill(top.data, T(0), top.count());
    if (narrow()) return measure_narrow(y, R, top, adjoints[layers() - 2]);
    if (fuse()) {
      measurement_.fuse(output_cov(), y, R, cfg_->output, cfg_->noise, noise_known(), top);
    } else {
      measurement_.replace(output_cov(), y, R, top);
    }
  }
  // The adjoint of the last layer, and of the units in front of it, behind their ReLU.
  __attribute__((noinline)) void measure_narrow(const T *y, const Noise<T> &R, const Adjoint<T> &top,
                                                const Adjoint<T> &units) {
    const Layer<T> &layer = layers_[layers() - 1];
    const Index m = units.rank;
    const T *const gates = relu_[layers() - 2].gates;
    fill(units.data, T(0), units.count());
    through_.measure(layer.loops, layer.w.mean, units_cov(), measurement_.mean, y, R.values, top.r(0), units.B(0, 0),
                     units.stride);
    for (Index p = 0; p < m; ++p) units.r(0)[p] = through_.pull[p];
    for (Index c = 0; c <= m; ++c) array(units.column(c, 0), m) *= array(gates, m);
    for (Index o = 0; o < outputs(); ++o) top.B(0, 0)[o] = std::sqrt(through_.lambda[o]);
    for (Index c = 0; c < m; ++c) {
      measurement_.signs[c] = T(1);
      measurement_.innovation[c] = through_.rho[c];
    }
    measurement_.floored = 0;
    measurement_.nis = through_.nis;
    measurement_.log_likelihood = through_.log_density;
  }
  // ---- update where outputs are apart: apart.hpp -------------------------------------------------------------------

  Apart<T> outputs_at(const Cov<T> &cov) {
    const bool shared = cfg_->covariance == KBT_SHARED, relative = relative_factor(*cfg_);
    const T *const noise = noise_given_ ? noise_.scratch : noise_.values, *const R = noise_.values;
    T kept = T(1);
    if (softmax_output()) return {measurement_, cov, shared, nullptr, nullptr, kept, T(1)};
    if (!shared) return {measurement_, cov, false, nullptr, noise, kept, weight_};
    if (!relative) return {measurement_, cov, true, nullptr, nullptr, *noise, weight_};
    if (noise_given_) kept = NoiseModel<T>::mean_ratio(noise, R, outputs());
    return {measurement_, cov, true, R, nullptr, kept, weight_};
  }
  kbt_status judge_apart(const T *y, const T *given, Index given_count, std::uint64_t age) {
    noise_.of_call(given, given_count);
    noise_given_ = given != nullptr;
    weight_ = T(1);
    Apart<T> outputs_seen = outputs_at(cov_out(0, rows_));
    if (softmax_output()) {
      outputs_seen.judge_labels(y);
    } else {
      outputs_seen.judge(y);
    }
    nis_ = measurement_.nis;
    log_likelihood_ = measurement_.log_likelihood;
    // No weight moves by more than sqrt(S_pp NIS), whatever the number of rows that are learned.
    if (!(nis_ < kLargest<T>) || !is_finite(log_likelihood_)) return KBT_E_RANGE;
    const T most = T(kHuber) * T(rows_ * outputs());
    if (robust() && nis_ > most) weight_ = most / nis_;  // (8.3)
    return judge_noise(y, given, age);
  }
  // The rows one after another, which is exact for a gaussian.
  int learn_apart(const T *y) {
    const Index rows = rows_, n = outputs();
    Layer<T> layer = layers_[0];
    const Cov<T> cov = cov_out(0, 1);
    const T one = T(1), *const mean = measurement_.mean;
    const Adjoint<T> adjoint{
        adjoint_[0], &one, measurement_.innovation, nullptr, softmax_output() ? nullptr : measurement_.share,
        1,           1,    layer.w.stride};
    int floored = 0;
    for (Index a = 0; a < rows; ++a) {
      if (rows > 1) forward_row(a, layer, cov);
      fill(adjoint.data, T(0), adjoint.count());
      const Apart<T> seen = outputs_at(cov);
      if (softmax_output()) {
        seen.label_row(y + a * n, adjoint);
      } else {
        seen.gaussian_row(y + a * n, mean, adjoint);
      }
      floored += layer.update(adjoint, work_);
    }
    if (adapts_) take_noise();
    if (lets_go()) let_go(0);
    return floored;
  }
  // Row a alone, after the rows before it were learned.
  void forward_row(Index a, Layer<T> &layer, const Cov<T> &cov) {
    layer.z = layers_[0].z + a * layer.w.z_stride;
    forward_layer(layer, nullptr, cov, true);
    measurement_.rows = 1;
    measurement_.predict(u_, layer.w.stride, cov, *cfg_);
    measurement_.rows = rows_;
  }
  KBT_SELDOM void add_cov_apart(T weight, T *cov) {
    const Index n = outputs(), K = rows_ * n;
    const Cov<T> own = cov_out(0, rows_);
    const Apart<T> seen = outputs_at(own);
    for (Index a = 0; a < rows_; ++a) {
      for (Index b = 0; b < rows_; ++b) {
        T *const block = cov + a * n * K + b * n;
        typename Apart<T>::Others rest{};
        if (softmax_output()) rest = seen.others(a, b);
        for (Index i = 0; i < n; ++i) {
          if (!softmax_output()) {
            block[i * (K + 1)] += weight * (seen.unit(i) * seen.variance(a, b, i));
            continue;
          }
          for (Index k = 0; k < n; ++k) block[i * K + k] += weight * seen.label_cov(a, i, b, k, rest);
        }
      }
    }
  }

  // (5.7), and (9.3) with a walk that moves outputs at the latest input. Neither raises D above the prior.
  bool lets_go() const { return forgetting() < T(1) || kind_.walk > 0.0; }
  T forgetting() const { return has_bank(*cfg_) ? T(1) : static_cast<T>(cfg_->forgetting); }
  void let_go(Index i) {
    const T forgetting = this->forgetting(), drift = static_cast<T>(kind_.walk);
    T size = T(0);
    for (Index a = 0; a < rows_; ++a) size += dot(layers_[i].input(a), layers_[i].input(a), layers_[i].w.M1);
    const T noise = softmax_output() || relative_factor(*cfg_) ? T(1) : mean_noise(),
            step = size > T(0) ? drift * noise * (T(rows_) / size) : T(0);
    Index neuron = -1;
    T prior = T(0);
    layers_[i].w.each_factor([&](Index j, T &D) {
      if (j != neuron) prior = prior_of(i, neuron = j);
      const T limit = D > prior ? D : prior, raised = D / forgetting + step;
      D = raised < limit ? raised : limit;
    });
  }
};

}  // namespace kbt
