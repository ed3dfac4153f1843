// member_store.hpp - what the members of a watchful linear head have learned. method.md §9; evidence.hpp weighs them.
#pragma once

#include "algebra.hpp"
#include "evidence.hpp"
#include "noise.hpp"
#include "settings.hpp"

namespace kbt {

constexpr double kNarrow = 30.0;  // variance of an output before any data, of the member for noisy targets
constexpr int kBriefMemory = 10;  // samples that the noise of the member for noisy targets remembers

struct MemberKind {
  double prior;      // variance of an output before any data
  double walk;       // added to the variance of an output per sample, by a random walk of all weights
  double bias_walk;  // the same, of the bias alone
  int noise_memory;
};
// still, noisy, three random walks, an offset that walks, fresh, and the best member before the latest change
constexpr MemberKind kMembers[kLanes] = {{kWide, 0.0, 0.0, kNoiseMemory},  {kNarrow, 0.0, 0.0, kBriefMemory},
                                         {kWide, 2e-4, 0.0, kNoiseMemory}, {kWide, 5e-3, 0.0, kNoiseMemory},
                                         {kWide, 2e-1, 0.0, kNoiseMemory}, {kWide, 0.0, 1e-2, kNoiseMemory},
                                         {kWide, 0.0, 0.0, kNoiseMemory},  {kWide, 0.0, 0.0, kNoiseMemory}};

// The learned numbers, lane = member. All in one piece of memory, in this order.
template <class T>
struct MemberStore : Evidence<T, 6> {
  static constexpr Index L = kLanes, kRegular = 6, kFresh = 6, kBefore = 7;
  using Evidence<T, 6>::log_weights;
  using Evidence<T, 6>::book;
  using Evidence<T, 6>::kBook;
  using Evidence<T, 6>::size;

  MemberStore() = default;
  explicit MemberStore(const kbt_config &cfg)
      : M(cfg.widths[0] + 1),
        O(cfg.widths[1]),
        matrix(cfg.noise == KBT_NOISE_FULL),
        learns_noise(cfg.noise != KBT_NOISE_CONSTANT),
        prior_var(static_cast<T>(cfg.prior_var[0])) {}

  Index M, O;   // inputs with the bias first; outputs
  bool matrix;  // R is a matrix
  bool learns_noise;
  T prior_var;                     // of a weight, in units of the noise; 0: from the size of the inputs
  T *first_weights, *first_noise;  // O x M; O, or O x O
  T *W;                            // O x M x 8
  T *d, *u;                        // LaneUD
  T *R;                            // O x 8, or O x O x 8
  T *ages;  // 8

  Index noise_count() const { return matrix ? O * O : O; }
  Index count() const {
    return (O * M + noise_count()) * (1 + L) + M * L + LaneUD<T>::u_count(M) + 2 * L + kBook;
  }
  void place(T *at) {
    const auto take = [&](T *&piece, Index count) {
      piece = at;
      at += count;
    };
    take(W, O * M * L);  // the lanes first: they are aligned
    take(d, M * L);
    take(u, LaneUD<T>::u_count(M));
    take(R, noise_count() * L);
    take(log_weights, L);
    take(ages, L);
    take(first_weights, O * M);
    take(first_noise, noise_count());
    take(book, kBook);
  }
  // Calls value(x) for each number and variance(x) for those that cannot be negative.
  template <class Value, class Variance>
  void visit(Value value, Variance variance) const {
    const auto all = [](T *x, Index n, auto f) {
      for (Index i = 0; i < n; ++i) f(x[i]);
    };
    all(W, O * M * L, value);
    all(d, M * L, variance);
    all(u, LaneUD<T>::u_count(M), value);
    all(R, noise_count() * L, value);
    all(log_weights, L, value);
    all(ages, L, variance);
    all(first_weights, O * M, value);
    all(first_noise, noise_count(), value);
    all(book, kBook, value);
  }

  LaneUD<T> factor() const { return {M, d, u}; }
  T &first(Index o, Index p) const { return first_weights[o * M + p]; }
  T noise(Index i, Index k, Index l) const {
    if (matrix) return R[(i * O + k) * L + l];
    return i == k ? R[i * L + l] : T(0);
  }

  // Prior variance of a weight of member l when inputs have this |z|^2.
  T prior_of(Index l, T size) const {
    const T kind = T(kMembers[l].prior);
    return prior_var > T(0) ? prior_var * (kind / T(kWide)) : kind / size;
  }

  // Nothing learned: all members have the first weights. D is set by the first sample.
  void reset() {
    for (Index i = 0; i < O * M * L; ++i) W[i] = first_weights[i / L];
    fill(d, T(0), M * L);
    fill(u, T(0), LaneUD<T>::u_count(M));
    for (Index i = 0; i < noise_count() * L; ++i) R[i] = first_noise[i / L];
    fill(ages, T(0), L);
    Evidence<T, 6>::reset();
  }
  // The noise with which members begin, and that of all of them from now on: O variances.
  void set_noise(const T *values) {
    for (Index i = 0; i < noise_count(); ++i) {
      first_noise[i] = !matrix ? values[i] : i % (O + 1) == 0 ? values[i / (O + 1)] : T(0);
      for (Index l = 0; l < L; ++l) R[i * L + l] = first_noise[i];
    }
  }
  // (9.3): P + Q for the members that walk, never above the prior.
  void walk() {
    for (Index l = 0; l < kRegular; ++l) {
      const MemberKind &kind = kMembers[l];
      if (!(kind.walk > 0.0) && !(kind.bias_walk > 0.0)) continue;
      const T most = prior_of(l, size()), every = T(kind.walk) / size();
      for (Index p = 0; p < (kind.walk > 0.0 ? M : 1); ++p) {
        T &x = d[p * L + l];
        const T limit = x > most ? x : most, raised = x + (kind.walk > 0.0 ? every : T(kind.bias_walk));
        x = raised < limit ? raised : limit;
      }
    }
  }

  // (8.2), with the weight of the robust step.
  void learn_noise(const T *error, const T *weight, const T *c) {
    for (Index l = 0; l < kBefore; ++l) {
      const T age = ages[l], memory = T(kMembers[l].noise_memory);
      const T rate = T(1) / (age + T(kAdaptStart) < memory ? age + T(kAdaptStart) : memory),
              scale = weight[l] / (T(1) + c[l]);
      if (age < T(kSizeMemory)) ages[l] = age + T(1);
      if (!learns_noise) continue;
      for (Index i = 0; i < O; ++i) {
        for (Index k = matrix ? 0 : i; k <= i; ++k) {
          T &r = R[(matrix ? i * O + k : i) * L + l];
          const T found = scale * error[i * L + l] * error[k * L + l];
          const T next = r + (found - r) * rate;
          r = i == k ? (next < kLargest<T> ? NoiseModel<T>::floored(next) : r) : next;
          if (matrix) R[(k * O + i) * L + l] = r;
        }
      }
    }
  }

  // Moments of the weights over the members: n x (m + 1) means with the bias last; their covariance, all of it or the
  // blocks of the outputs; and the noise, whose count is returned.
  void read_mean(T *to) const {
    T w[L];
    this->weights(w);
    for (Index o = 0; o < O; ++o) {
      for (Index p = 0; p < M; ++p) to[o * M + place(p)] = mean(w, o, p);
    }
  }
  void read_cov(bool whole, T *to) const {
    T w[L];
    this->weights(w);
    for (Index o = 0; o < O; ++o) {
      for (Index b = whole ? 0 : o; b < (whole ? O : o + 1); ++b) {
        T *const block = whole ? to + o * M * O * M + b * M : to + o * M * M;
        for (Index p = 0; p < M; ++p) {
          for (Index q = 0; q < M; ++q) block[place(p) * (whole ? O * M : M) + place(q)] = covariance(w, o, p, b, q);
        }
      }
    }
  }
  Index read_noise(T *to) const {
    T w[L];
    this->weights(w);
    for (Index i = 0; i < noise_count(); ++i) {
      to[i] = T(0);
      for (Index l = 0; l < L; ++l) to[i] += w[l] * R[i * L + l];
    }
    return noise_count();
  }

  // For the watch: the weight of the members that walk, and the log of the mean noise variance.
  float walking() const {
    T sum = T(0);
    for (Index l = KBT_DRIFTS_SLOWLY; l <= KBT_OFFSET_DRIFTS; ++l) sum += exp_negative(log_weights[l]);
    return static_cast<float>(sum);
  }
  float noise_level() const {
    T sum = T(0);
    for (Index l = 0; l < kRegular; ++l) {
      T mean = T(0);
      for (Index o = 0; o < O; ++o) mean += noise(o, o, l);
      sum += exp_negative(log_weights[l]) * mean;
    }
    return static_cast<float>(log_positive(sum / T(O)));
  }

  // After a sample: has the plant changed, or gone back? Otherwise the fresh member may be due to begin again.
  MemberEvent decide() {
    const MemberEvent event = Evidence<T, 6>::decide();
    if (event.kind != KBT_NO_CHANGE) {
      replace_members(event.kind == KBT_RETURNED ? kBefore : kFresh);
    } else if (this->fresh_is_due(M)) {
      begin_fresh(false);
    }
    return event;
  }

  void begin_fresh(bool suspicious) {
    const T prior = prior_of(kFresh, size());
    for (Index p = 0; p < M; ++p) d[p * L + kFresh] = prior;
    for (Index i = kFresh; i < LaneUD<T>::u_count(M); i += L) u[i] = T(0);
    for (Index i = 0; i < O * M; ++i) W[i * L + kFresh] = first_weights[i];
    for (Index i = 0; i < noise_count(); ++i) R[i * L + kFresh] = first_noise[i];
    ages[kFresh] = T(0);
    Evidence<T, 6>::begin_fresh(suspicious);
  }

  // The regular members go on from member `from`; the best of them is kept as it was.
  void replace_members(Index from) {
    const Index best = this->best();
    const auto each = [&](T *x, Index n) {
      for (Index i = 0; i < n; ++i, x += L) {
        const T value = x[from], kept = x[best];
        for (Index l = 0; l < kRegular; ++l) x[l] = value;
        x[kBefore] = kept;
      }
    };
    each(W, O * M);
    each(d, M);
    each(u, LaneUD<T>::u_count(M) / L);
    each(R, noise_count());
    each(ages, 1);
    this->even_weights();
    begin_fresh(false);
    this->begin_before();
  }

 private:
  Index place(Index p) const { return p == 0 ? M - 1 : p - 1; }  // where an input is when the bias is the last
  T mean(const T *w, Index o, Index p) const {
    const T *const each = W + (o * M + p) * L;
    T sum = each[0];  // exact where all members agree
    for (Index l = 1; l < L; ++l) sum += w[l] * (each[l] - each[0]);
    return sum;
  }
  T covariance(const T *w, Index o, Index p, Index b, Index q) const {
    const Index low = p < q ? p : q, high = p < q ? q : p;
    const T mean_p = mean(w, o, p), mean_q = mean(w, b, q);
    T sum = T(0);
    for (Index l = 0; l < L; ++l) {
      T P = (low == high ? T(1) : factor().entry(low, high)[l]) * d[high * L + l];
      for (Index r = high + 1; r < M; ++r) P += factor().entry(low, r)[l] * d[r * L + l] * factor().entry(high, r)[l];
      sum += w[l] * (noise(o, b, l) * P + (W[(o * M + p) * L + l] - mean_p) * (W[(b * M + q) * L + l] - mean_q));
    }
    return sum < kLargest<T> ? (sum > -kLargest<T> ? sum : -kLargest<T>) : kLargest<T>;
  }
};

}  // namespace kbt
