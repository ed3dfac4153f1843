// bank.hpp - a head as one filter, or as four that are weighed by what each of them predicted: the watchful head with
// hidden layers or a softmax. method.md §9
#pragma once

#include "evidence.hpp"
#include "filter.hpp"

namespace kbt {

#ifdef KBT_ONLY_FILTER
constexpr bool kOnlyFilter = true;  // a firmware that leaves the code of a bank out
#else
constexpr bool kOnlyFilter = false;
#endif
constexpr double kSurpriseNats = 4.0;  // of a row of a softmax: the fresh filter begins

template <class T>
class Bank {
 public:
  static constexpr Index kRegular = kRegularFilters, kDrifts = 2, kFresh = 3, kMost = kMostFilters;
  using Weights = Evidence<T, kRegular>;

  struct Judged {  // y under the mixture, before it is learned
    T nis, log_density;
  };

  // ---- arena -------------------------------------------------------------------------------------------------------

  KBT_SELDOM void plan_learned(const kbt_config &cfg, Arena &arena) {
    cfg_ = &cfg;
    count_ = has_bank(cfg) ? kMost : 1;
    for (Index k = 0; k < count_; ++k) filters_[k].plan_learned(cfg, static_cast<int>(k), arena);
    if (several()) place(arena.take<T>(extra_count()));
  }
  void plan_scratch(Arena &arena) {
    const Index rank = Index(cfg_->max_rows) * outputs();
    for (Index k = 0; k < count_; ++k) filters_[k].plan_scratch(arena);
    if (!several()) return;
    means_ = arena.take<T>(kMost * rank);
    totals_ = arena.take<T>(kMost * rank);
    mean_ = arena.take<T>(rank);
    total_ = arena.take<T>(rank);
  }
  void start() {
    for (Index k = 0; k < count_; ++k) filters_[k].start();
    if (several()) array(first_noise_, outputs()) = array(filters_[0].noise().values, outputs());
    reset();
  }

  bool several() const { return !kOnlyFilter && count_ > 1; }
  Index count() const { return count_; }
  Filter<T> &filter(Index k) { return filters_[k]; }
  const Filter<T> &filter(Index k) const { return filters_[k]; }
  // The one to ask about weights and noise.
  const Filter<T> &leading() const { return filters_[leading_index()]; }
  const T *input(Index row) const { return filters_[0].input(row); }
  const Weights &evidence() const { return evidence_; }
  void weights(T *w) const { evidence_.weights(w); }
  void move(std::ptrdiff_t by) {
    for (Index k = 0; k < count_; ++k) filters_[k].move(by);
    if (several()) place(evidence_.log_weights + by);
  }
  void set_noise_is_matrix(bool matrix) {
    for (Index k = 0; k < count_; ++k) filters_[k].noise().matrix = matrix;
  }

  // ---- prior and noise ---------------------------------------------------------------------------------------------

  // Nothing learned: the weights zero, or the first ones that a bank has kept.
  void reset() {
    for (Index k = 0; k < count_; ++k) filters_[k].reset();
    if (several()) begin();
  }
  void set_prior(const T *weight, const T *bias, std::uint64_t seed) {
    for (Index k = 0; k < count_; ++k) filters_[k].set_prior(weight, bias, seed);
    if (several()) keep_first_means(), begin();
  }
  void set_means(const void *const *means) {
    for (Index k = 0; k < count_; ++k) filters_[k].set_means(means);
    if (several()) keep_first_means(), begin();
  }
  // Back to the prior.
  void forget_all() {
    if (!several()) return;
    for (Index k = 0; k < count_; ++k) begin_again(k, T(1));
    begin();
  }
  bool noise_in_range(const T *values, Index count) const {
    bool found = true;
    for (Index k = 0; k < count_; ++k) found = found && filters_[k].noise_in_range(values, count);
    return found;
  }
  KBT_SELDOM void set_noise(const T *values, Index count) {
    for (Index k = 0; k < count_; ++k) filters_[k].set_noise(values, count);
    if (!several()) return;
    const NoiseModel<T> &noise = filters_[0].noise();
    array(first_noise_, noise.count()) = array(noise.values, noise.count());
    for (Index k = 0; k < kMost && !evidence_.begun(); ++k) filters_[k].reset_factors(T(1));  // as put_back does
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  kbt_status forward(const T *h, Index rows) {
    for (Index k = 0; k < count_; ++k) filters_[k].take_input(h, rows);
    rows_ = rows;
    return forward_again();
  }
  // The same at the input of the latest pass.
  kbt_status forward_again() {
    kbt_status status = KBT_OK;
    for (Index k = 0; k < count_; ++k) {
      if (filters_[k].forward(rows_) != KBT_OK) status = KBT_E_RANGE;
    }
    if (status == KBT_OK && several()) return input_size() < kLargest<T> ? mix() : KBT_E_RANGE;
    return status;
  }

  void read_prediction(T *mean, T *total_var) {
    const Index K = rows_ * outputs();
    if (!several()) return filters_[0].read_prediction(mean, total_var);
    for (Index i = 0; i < K; ++i) mean[i] = mean_[i];
    if (total_var != nullptr) array(total_var, K) = array(total_, K);
  }
  void read_var(T *var) {
    const Index K = rows_ * outputs();
    fill(var, T(0), K);
    if (!several()) return filters_[0].add_var(T(1), var);
    for (Index k = 0; k < kMost; ++k) {
      const T *const own = means_ + k * K;
      filters_[k].add_var(weights_[k], var);
      for (Index i = 0; i < K; ++i) var[i] += weights_[k] * ((own[i] - mean_[i]) * (own[i] - mean_[i]));
    }
  }
  void read_cov(T *cov) {
    const Index K = rows_ * outputs();
    fill(cov, T(0), K * K);
    if (!several()) return filters_[0].add_cov(T(1), cov);
    for (Index k = 0; k < kMost; ++k) {  // (9.2)
      const T *const own = means_ + k * K;
      filters_[k].add_cov(weights_[k], cov);
      for (Index i = 0; i < K; ++i) {
        for (Index j = 0; j < K; ++j) cov[i * K + j] += weights_[k] * ((own[i] - mean_[i]) * (own[j] - mean_[j]));
      }
    }
  }
  // What each class was predicted, of a softmax.
  const T *probabilities() const { return several() ? mean_ : filters_[0].probabilities(); }

  // ---- learn -------------------------------------------------------------------------------------------------------

  // Judges y, and prepares the step of every filter. A rejected call leaves what was learned as it was.
  kbt_status judge(const T *y, const T *noise, Index noise_count, std::uint64_t samples, Judged &judged) {
    const bool first = several() && !evidence_.begun() && automatic();
    kbt_status status = KBT_OK;
    if (first) status = set_first_factors(T(Index(cfg_->widths[0]) + 1) / input_size());
    for (Index k = 0; k < count_ && status == KBT_OK; ++k) {
      const std::uint64_t age = several() ? static_cast<std::uint64_t>(ages_[k]) : samples;
      status = filters_[k].judge(y, noise, noise_count, age);
      log_density_[k] = filters_[k].log_likelihood();
    }
    judged = {filters_[0].nis(), log_density_[0]};
    if (status == KBT_OK && several()) {
      judged = {mixed_nis(y), mixed_density(weights_, log_density_, kMost)};
      if (!is_finite(judged.nis)) status = KBT_E_RANGE;
    }
    if (first && status != KBT_OK) set_first_factors(T(1));
    return status;
  }
  // The gate rejects what was judged: as if it had not been.
  void put_back() {
    if (several() && !evidence_.begun() && automatic()) set_first_factors(T(1));
  }

  // Takes the steps. Returns how many factors were floored; `event` says whether the plant has changed.
  int learn(const T *y, const Judged &judged, MemberEvent &event) {
    int floored = 0;
    event = {KBT_NO_CHANGE, 0, 0.0};
    for (Index k = 0; k < count_; ++k) floored += filters_[k].learn(y);
    if (several()) weigh_in(judged, event);
    return floored;
  }
  void suppose_changed() {
    begin_fresh(false);
    change();
  }

  // For the watch: the weight of the filter that walks, and the log of the mean noise variance.
  float walking() const { return static_cast<float>(exp_negative(evidence_.log_weights[kDrifts])); }
  float noise_level() const {
    if (cfg_->output == KBT_SOFTMAX) return 0.0F;
    T sum = T(0);
    for (Index o = 0; o < outputs(); ++o) sum += leading().noise().variance(o);
    return static_cast<float>(log_positive(sum / T(outputs())));
  }

  // As MemberStore::visit, for each number that a bank keeps beside its filters, none of which is a variance of
  // weights. `matrix`: whether its noise is one, which a bank that is being read does not know yet.
  template <class Value, class Noise, class Bounded>
  KBT_SELDOM void visit_extra(bool matrix, Value value, Noise noise, Bounded bounded) const {
    for (Index k = 0; k < kRegular; ++k) bounded(evidence_.log_weights[k], kLeastLogWeight, 0.0);
    for (Index i = 0; i < Weights::kBook; ++i) value(evidence_.book[i]);
    for (Index k = 0; k < kMost; ++k) bounded(ages_[k], 0.0, double{kSizeMemory});
    const Index n = outputs();
    for (Index i = 0; i < noise_capacity(); ++i) {
      if (matrix ? i % (n + 1) == 0 : i < n) {
        noise(first_noise_[i]);
      } else {
        value(first_noise_[i]);
      }
    }
    T *first = first_means_;
    for (Index i = 0; i < cfg_->layers; ++i) {
      const Posterior<T> &w = filters_[0].weights(i);
      for (Index j = 0; j < w.n; ++j) {
        for (Index p = 0; p < w.M1; ++p) value(first[p * w.stride + j]);
      }
      first += w.mean_count();
    }
  }
  // How many those are, as a double.
  static double extra_numbers(const kbt_config &cfg) {
    const double n = cfg.widths[cfg.layers];
    double sum = kRegular + Weights::kBook + kMost + (cfg.noise == KBT_NOISE_MATRIX ? n * n : n);
    for (int i = 0; i < cfg.layers; ++i) sum += cfg.widths[i + 1] * (cfg.widths[i] + 1.0);
    return sum;
  }

 private:
  Index outputs() const { return cfg_->widths[cfg_->layers]; }
  bool automatic() const { return !(cfg_->prior_var[cfg_->layers - 1] > 0.0); }
  Index noise_capacity() const { return NoiseModel<T>::capacity(cfg_->noise, outputs()); }
  Index leading_index() const {
    if (!several()) return 0;
    T w[Weights::kAll];
    evidence_.weights(w);
    Index best = 0;
    for (Index k = 1; k < kMost; ++k) best = w[k] > w[best] ? k : best;
    return best;
  }

  Index extra_count() const {
    Index means = 0;
    for (Index i = 0; i < cfg_->layers; ++i) means += filters_[0].weights(i).mean_count();
    return kRegular + Weights::kBook + kMost + noise_capacity() + means;
  }
  void place(T *at) {
    if (at == nullptr) return;  // only sizes are planned
    evidence_.log_weights = at;
    evidence_.book = evidence_.log_weights + kRegular;
    ages_ = evidence_.book + Weights::kBook;
    first_noise_ = ages_ + kMost;
    first_means_ = first_noise_ + noise_capacity();
  }

  void begin() {
    evidence_.reset();
    fill(ages_, T(0), kMost);
  }
  void keep_first_means() {
    T *to = first_means_;
    for (Index i = 0; i < cfg_->layers; ++i) {
      const Posterior<T> &w = filters_[0].weights(i);
      for (Index p = 0; p < w.mean_count(); ++p) *to++ = w.mean[p];
    }
  }
  // Filter k has the first weights and noise again, with `relative` times the prior's variances in the last layer.
  void begin_again(Index k, T relative) {
    const T *from = first_means_;
    for (Index i = 0; i < cfg_->layers; ++i) {
      const Posterior<T> &w = filters_[k].weights(i);
      for (Index p = 0; p < w.mean_count(); ++p) w.mean[p] = *from++;
    }
    NoiseModel<T> &noise = filters_[k].noise();
    array(noise.values, noise.count()) = array(static_cast<const T *>(first_noise_), noise.count());
    filters_[k].reset_factors(relative);
    ages_[k] = T(0);
  }
  void begin_fresh(bool suspicious) {
    const T nominal = T(Index(cfg_->widths[0]) + 1);
    begin_again(kFresh, automatic() && evidence_.begun() ? nominal / evidence_.size() : T(1));
    evidence_.begin_fresh(suspicious);
  }
  // The regular filters go on from the fresh one, which begins anew.
  void change() {
    const Filter<T> &fresh = filters_[kFresh];
    for (Index k = 0; k < kRegular; ++k) {
      filters_[k].copy_learned(fresh);
      ages_[k] = ages_[kFresh];
    }
    evidence_.even_weights();
    begin_fresh(false);
  }
  void weigh_in(const Judged &judged, MemberEvent &event) {
    const bool softmax = cfg_->output == KBT_SOFTMAX;
    const Index numbers = softmax ? rows_ : rows_ * outputs();
    log_density_[kFresh + 1] = log_density_[kFresh];  // there is no member for the plant as it was before
    evidence_.note_size(input_size());
    evidence_.weigh_in(log_density_, numbers, true);
    for (Index k = 0; k < kMost; ++k) ages_[k] += ages_[k] < T(kSizeMemory) ? T(1) : T(0);
    event = evidence_.decide();
    const bool surprised =
        softmax ? judged.log_density < T(-kSurpriseNats) * T(numbers) : judged.nis > T(kSurprise) * T(numbers);
    if (event.kind != KBT_NO_CHANGE) {
      change();
    } else if (evidence_.fresh_is_due(Index(cfg_->widths[0]) + 1)) {
      begin_fresh(false);
    } else if (surprised && !evidence_.suspicious()) {
      begin_fresh(true);
    }
  }
  // Before the first sample is learned, the prior is made as wide as its input asks for.
  kbt_status set_first_factors(T relative) {
    for (Index k = 0; k < kMost; ++k) filters_[k].reset_factors(relative);
    return forward_again();
  }
  // |z|^2 of the latest forward pass, averaged over rows.
  T input_size() const {
    const Index M = Index(cfg_->widths[0]) + 1;
    T sum = T(0);
    for (Index a = 0; a < rows_; ++a) sum += dot(input(a), input(a), M);
    return sum / T(rows_);
  }

  // (9.2). Rejects predictions so far apart that their covariance could leave the range.
  kbt_status mix() {
    const Index K = rows_ * outputs();
    T w[Weights::kAll];
    evidence_.weights(w);
    for (Index k = 0; k < kMost; ++k) {
      weights_[k] = w[k];
      filters_[k].read_prediction(means_ + k * K, totals_ + k * K);
    }
    kbt_status status = KBT_OK;
    for (Index i = 0; i < K; ++i) {
      T mean = T(0), total = T(0);
      for (Index k = 0; k < kMost; ++k) mean += weights_[k] * means_[k * K + i];
      for (Index k = 0; k < kMost; ++k) {
        const T apart = means_[k * K + i] - mean;
        total += weights_[k] * (totals_[k * K + i] + apart * apart);
        if (!(apart * apart < kLargest<T>)) status = KBT_E_RANGE;
      }
      mean_[i] = mean;
      total_[i] = is_finite(total) ? total : std::numeric_limits<T>::max();
    }
    return status;
  }
  // Of a softmax as for its rows alone: sum e^2 / p.
  T mixed_nis(const T *y) const {
    T sum = T(0);
    for (Index i = 0; i < rows_ * outputs(); ++i) {
      const T e = y[i] - mean_[i];
      const T var = cfg_->output == KBT_SOFTMAX ? mean_[i] + T(kSmoothing) : total_[i];
      sum += e / var * e;
    }
    return sum;
  }

  const kbt_config *cfg_;
  Index count_, rows_;
  Filter<T> filters_[kMost];
  Weights evidence_;
  T *ages_, *first_noise_, *first_means_;
  T *means_, *totals_;  // kMost x rank: of each filter
  T *mean_, *total_;    // of the mixture
  T weights_[kMost], log_density_[Weights::kAll];
};

}  // namespace kbt
