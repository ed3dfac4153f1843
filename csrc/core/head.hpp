// head.hpp - the head: members (one linear layer that watches its plant), or a bank of one or several filters. What
// both share is here. docs/method.md has the mathematics.
#pragma once

#include <new>

#include "bank.hpp"
#include "members.hpp"
#include "record.hpp"

namespace kbt {

// Firmware for one kind of head leaves the code of the other out.
#ifdef KBT_ONLY_MEMBERS
constexpr bool kOnlyMembers = true;
#else
constexpr bool kOnlyMembers = false;
#endif
#if defined(KBT_ONLY_BANK) || defined(KBT_ONLY_FILTER)
constexpr bool kOnlyBank = true;
#else
constexpr bool kOnlyBank = false;
#endif

template <class T>
class Head : public kbt_head {
 public:
  // ---- arena -------------------------------------------------------------------------------------------------------

  // Lays the head out behind itself. Without a base only the sizes are computed.
  KBT_SELDOM void plan(const kbt_config &config, Arena &arena) {
    cfg = config;
    const std::size_t start = arena.used();
    const Index rows = cfg.max_rows, noise = NoiseModel<T>::capacity(cfg.noise, outputs());
    if (has_members()) {
      store_ = MemberStore<T>(cfg);
      learned_ = arena.take<T>(store_.count());
      store_.place(learned_);
      noise_.kind = cfg.noise;
      noise_.n = outputs();
      noise_.values = arena.take<T>(noise);
      learned_bytes_ = arena.used() - start;
      members_.plan(arena, store_, rows);
      noise_.scratch = arena.take<T>(noise);
    } else {
      bank_.plan_learned(cfg, arena);
      learned_ = bank_.filter(0).weights(0).mean;
      learned_bytes_ = arena.used() - start;
      bank_.plan_scratch(arena);
    }
    candidate_ = arena.take<T>(noise);
    target_ = arena.take<T>(rows * outputs());
  }

  // Largest number of elements of any array, as a double: an overflow is seen before an integer could wrap.
  KBT_SELDOM static double largest_array(const kbt_config &cfg) {
    if (!kbt::has_members(cfg)) return Filter<T>::largest_array(cfg);
    const double rows = cfg.max_rows, rank = rows * cfg.widths[cfg.layers];
    return (rows + cfg.widths[0] + 1.0) * (cfg.widths[0] + rank + 1.0) * 16.0 + rank * rank * 16.0;
  }

  void start() {
    counters = {};
    if (has_members()) {
      members_.choose();
      noise_.matrix = false;
      for (Index i = 0; i < outputs(); ++i) noise_.values[i] = NoiseModel<T>::floored(static_cast<T>(cfg.noise_var));
      store_.set_noise(noise_.values);
      store_.reset();
    } else {
      bank_.start();
    }
    restart();
  }

  Index layers() const { return cfg.layers; }
  Index inputs() const { return cfg.widths[0]; }
  Index outputs() const { return cfg.widths[cfg.layers]; }
  bool has_members() const { return kOnlyMembers || (!kOnlyBank && kbt::has_members(cfg)); }
  bool watchful() const { return cfg.drift < 0.0; }
  const MemberStore<T> &store() const { return store_; }  // of a head with members
  Bank<T> &bank() { return bank_; }                       // of any other
  const Bank<T> &bank() const { return bank_; }
  NoiseModel<T> &noise() { return has_members() ? noise_ : bank_.filter(0).noise(); }
  const NoiseModel<T> &noise() const { return has_members() ? noise_ : bank_.filter(0).noise(); }
  // h of the latest forward pass
  const T *input(Index row) const { return has_members() ? members_.input(row) : bank_.input(row); }
  // All that learning changes, except the sample count and the kind of noise, as one piece: two heads of one
  // configuration have it in the same order.
  const T *learned() const { return learned_; }
  std::size_t learned_bytes() const { return learned_bytes_; }
  // From now on this head's learned numbers are these, in the order of learned(), with what belongs to them.
  void take_over(void *numbers, std::uint64_t its_samples, bool its_noise_is_matrix) {
    T *const to = static_cast<T *>(numbers);
    if (has_members()) {
      noise_.values = to + (noise_.values - learned_);
      noise_.matrix = its_noise_is_matrix;
      store_.place(to);
    } else {
      bank_.move(to - learned_);
      bank_.set_noise_is_matrix(its_noise_is_matrix);
    }
    learned_ = to;
    samples = its_samples;
    predicted_rows = 0;
  }

  // ---- prior and noise ---------------------------------------------------------------------------------------------

  KBT_SELDOM void set_prior(const T *weight, const T *bias, std::uint64_t seed) {
    if (has_members()) {
      set_first_weights([&](Index o, Index p) {
        return p < inputs() ? weight[o * inputs() + p] : (bias != nullptr ? bias[o] : T(0));
      });
    } else {
      bank_.set_prior(weight, bias, seed);
    }
    restart();
  }

  KBT_SELDOM void set_means(const void *const *means) {
    if (has_members()) {
      const T *from = static_cast<const T *>(means[0]);
      set_first_weights([&](Index o, Index p) { return from[o * (inputs() + 1) + p]; });
    } else {
      bank_.set_means(means);
    }
    restart();
  }

  bool noise_in_range(const T *values, Index count) const {
    return has_members() || bank_.noise_in_range(values, count);
  }
  KBT_SELDOM void set_noise(const T *values, Index count) {
    if (has_members()) {
      noise_.set(values, count);
      for (Index i = 0; i < outputs(); ++i) noise_.values[i] = noise_.variance(i);  // a matrix counts by its variances
      noise_.matrix = false;
      store_.set_noise(noise_.values);
      if (predicted_rows > 0 && members_.mix(store_) != KBT_OK) predicted_rows = 0;
    } else {
      bank_.set_noise(values, count);
      if (predicted_rows > 0 && bank_.forward_again() != KBT_OK) predicted_rows = 0;
    }
    watch = {};  // it was compared with the old noise
  }

  // Back to the prior, of a watchful head.
  KBT_SELDOM void reset() {
    if (has_members()) {
      store_.reset();
    } else {
      bank_.forget_all();
    }
    restart();
  }
  KBT_SELDOM void suppose_changed() {
    if (samples == 0) return;
    if (has_members()) {
      store_.begin_fresh(false);
      store_.replace_members(MemberStore<T>::kFresh);
    } else {
      bank_.suppose_changed();
    }
    predicted_rows = 0;
    note_change(changes, {KBT_CHANGED, 0, 0.0}, samples);
  }

  // ---- predict -----------------------------------------------------------------------------------------------------

  // Changes scratch only. Without h: at the input of the pass before the latest, which is kept for take_back.
  kbt_status forward(const T *h, Index rows) {
    rows_before_ = predicted_rows;
    predicted_rows = 0;
    const kbt_status status =
        has_members() ? members_.forward(store_, h, rows, kFlushBelow<T>) : bank_.forward(h, rows);
    if (status == KBT_OK) predicted_rows = static_cast<std::int32_t>(rows);
    return status;
  }

  // The call that made the latest forward pass is rejected: the rows predicted before it wait to be observed again. No
  // weight has changed since, so their pass gives the same bits as before.
  void take_back() { forward(nullptr, rows_before_); }

  // Results of the latest forward pass. total_var may be null.
  void read_prediction(T *mean, T *total_var) {
    if (has_members()) return members_.read_prediction(mean, total_var);
    bank_.read_prediction(mean, total_var);
  }
  void read_var(T *var) {  // epistemic
    if (has_members()) return members_.read_var(store_, var);
    bank_.read_var(var);
  }
  void read_cov(T *cov) {
    if (has_members()) return members_.read_cov(store_, cov);
    bank_.read_cov(cov);
  }

  // ---- update ------------------------------------------------------------------------------------------------------

  // Learns y (rows x d_o) at the rows of the latest forward pass. Every check comes before the first change.
  kbt_status observe(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    const kbt_status status =
        has_members() ? observe_members(y, noise, noise_count, result) : observe_bank(y, noise, noise_count, result);
    if (status == KBT_OK && samples != kMostSamples) ++samples;
    if (status == KBT_OK && event_.kind != KBT_NO_CHANGE) note_change(changes, event_, samples);
    return status;
  }

  // What a head knows, for those who ask. Members are mixed; of a bank the filter of the largest weight answers.
  void belief(double *weight) const {
    T w[KBT_MEMBERS];
    weight[KBT_STILL] = 1.0;
    if (has_members()) {
      store_.weights(w);
      for (int i = 0; i < KBT_MEMBERS; ++i) weight[i] = static_cast<double>(w[i]);
    } else if (watchful()) {
      bank_.weights(w);
      weight[KBT_STILL] = static_cast<double>(w[0] + w[1]);
      weight[KBT_DRIFTS] = static_cast<double>(w[Bank<T>::kDrifts]);
      weight[KBT_HAS_CHANGED] = static_cast<double>(w[Bank<T>::kFresh]);
    }
  }
  void read_mean(Index layer, T *mean) const {
    if (has_members()) return store_.read_mean(mean);
    const Posterior<T> &w = bank_.leading().weights(layer);
    for (Index j = 0; j < w.n; ++j) {
      for (Index p = 0; p < w.M1; ++p) mean[j * w.M1 + p] = w.mean[p * w.stride + j];
    }
  }
  KBT_SELDOM void read_cov(Index layer, T *cov) const {
    if (has_members()) return store_.read_cov(cfg.covariance == KBT_FULL, cov);
    const Posterior<T> &w = bank_.leading().weights(layer);
    const bool shared = w.structure == KBT_SHARED;
    for (Index g = 0; g < (shared ? w.n : w.matrices()); ++g) {
      const T unit = relative_factor(cfg) ? bank_.leading().noise().values[g] : T(1);
      for (Index p = 0; p < w.M(); ++p) {
        if (w.structure == KBT_DIAGONAL) {
          *cov++ = w.D(g, p);
        } else {
          for (Index q = 0; q < w.M(); ++q) *cov++ = unit * w.covariance(shared ? 0 : g, p, q);
        }
      }
    }
  }
  Index read_noise(T *noise) const {  // returns its count
    if (has_members()) return store_.read_noise(noise);
    const NoiseModel<T> &leading = bank_.leading().noise();
    for (Index i = 0; i < leading.count(); ++i) noise[i] = leading.values[i];
    return leading.count();
  }

  T *noise_candidate() { return candidate_; }  // scratch for a noise to be checked
  T *target() { return target_; }              // rank numbers of scratch for targets made from labels

 private:
  static constexpr std::uint64_t kMostSamples = std::numeric_limits<std::uint64_t>::max();  // where the count stops

  void restart() {
    samples = 0;
    predicted_rows = 0;
    watch = {};
    changes = {};
  }

  // first(output, input) with the bias as the last input, as the C ABI has it.
  template <class First>
  void set_first_weights(First first) {
    for (Index o = 0; o < store_.O; ++o) {
      for (Index p = 0; p < store_.M; ++p) store_.first(o, p) = first(o, p == 0 ? store_.M - 1 : p - 1);
    }
    store_.reset();
  }

  kbt_status observe_members(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    const Index count = predicted_rows * outputs();
    if (!members_.target_in_range(y, count)) return KBT_E_RANGE;
    const T nis = members_.nis(store_, y);
    predicted_rows = 0;
    if (gated(nis)) {
      if (result != nullptr) *result = found(nis, members_.log_density(store_, y), KBT_NO_CHANGE);
      return KBT_GATED;
    }
    const T *given = nullptr;
    if (noise != nullptr) {  // a matrix counts by its variances
      const Noise<T> R = noise_.of_call(noise, noise_count);
      for (Index i = 0; i < outputs(); ++i) candidate_[i] = R.at(i, i, outputs());
      given = candidate_;
    }
    const typename Members<T>::Judged judged = members_.learn(store_, y, given, event_);
    watch_members(judged.nis, count, store_.walking(), store_.noise_level());
    if (result != nullptr) *result = found(judged.nis, judged.log_density, event_.kind);
    return KBT_OK;
  }

  kbt_status observe_bank(const T *y, const T *noise, Index noise_count, kbt_result *result) {
    const Index rows = predicted_rows, K = rows * outputs();
    typename Bank<T>::Judged judged;
    const kbt_status status = bank_.judge(y, noise, noise_count, samples, judged);
    if (status != KBT_OK) return status;
    predicted_rows = 0;
    const bool rejected = gated(judged.nis), softmax = cfg.output == KBT_SOFTMAX;
    // For the watch. A gaussian average leaves out what the gate rejects: it judges what was learned, knows where it
    // was cut off, and the share of rejected samples is judged beside it. A softmax average takes all samples, because
    // a cut at some NIS does not tell which surprises are left.
    if (softmax) note_surprise(watch, bank_.probabilities(), rows, outputs(), judged.log_density);
    if (!softmax && !rejected && !watchful()) {
      note_nis(watch, judged.nis < T(1e30) ? static_cast<float>(judged.nis) : 1e30F, K);
    }
    if (rejected) {
      bank_.put_back();
      if (result != nullptr) *result = found(judged.nis, judged.log_density, KBT_NO_CHANGE);
      return KBT_GATED;
    }
    counters.floored += static_cast<std::uint64_t>(bank_.learn(y, judged, event_));
    if (watchful()) {
      if (softmax) {
        note_members(watch, bank_.walking(), 0.0F, event_.kind != KBT_NO_CHANGE);
      } else {
        watch_members(judged.nis, K, bank_.walking(), bank_.noise_level());
      }
    }
    if (result != nullptr) *result = found(judged.nis, judged.log_density, event_.kind);
    return KBT_OK;
  }

  bool gated(T nis) {
    if (!(cfg.gate > 0.0)) return false;
    const bool rejected = static_cast<double>(nis) > cfg.gate;
    note_gate(watch, rejected);
    if (rejected) ++counters.gated;
    return rejected;
  }
  void watch_members(T nis, Index count, float walking, float noise_level) {
    const float share = static_cast<float>(nis) / static_cast<float>(count);
    note_nis(watch, (share < kMostNis ? share : kMostNis) * static_cast<float>(count), count);
    note_members(watch, walking, noise_level, event_.kind != KBT_NO_CHANGE);
  }
  static kbt_result found(T nis, T log_density, int changed) {
    return {static_cast<double>(nis), static_cast<double>(log_density), changed, 0};
  }

  MemberStore<T> store_;
  Members<T> members_;
  NoiseModel<T> noise_;  // of a head with members: what they begin with
  Bank<T> bank_;
  T *learned_;
  T *candidate_, *target_;
  std::size_t learned_bytes_;
  MemberEvent event_;         // of the latest sample
  std::int32_t rows_before_;  // predicted_rows before the latest forward pass
};

}  // namespace kbt
