// member_store.hpp - what the members of a watchful linear head have learned. method.md §9; evidence.hpp weighs them.
#pragma once

#include "algebra.hpp"
#include "evidence.hpp"
#include "noise.hpp"
#include "settings.hpp"

namespace kbt {

constexpr double kNarrow = 30.0;  // variance of an output before any data, of the member for noisy targets
constexpr int kBriefMemory = 10;  // samples that the noise of the member for noisy targets remembers

template <class T>  // not double: a Cortex-M4F has no instructions for it
struct MemberKind {
  T prior;      // variance of an output before any data
  T walk;       // added to the variance of an output per sample, by a random walk of all weights
  T bias_walk;  // the same, of the bias alone
  int noise_memory;
};
// still, noisy, three random walks, an offset that walks, fresh, and the best member before the latest change
template <class T>
constexpr MemberKind<T> kMembers[kLanes] = {
    {T(kWide), T(0), T(0), kNoiseMemory},    {T(kNarrow), T(0), T(0), kBriefMemory},
    {T(kWide), T(2e-4), T(0), kNoiseMemory}, {T(kWide), T(5e-3), T(0), kNoiseMemory},
    {T(kWide), T(2e-1), T(0), kNoiseMemory}, {T(kWide), T(0), T(1e-2), kNoiseMemory},
    {T(kWide), T(0), T(0), kNoiseMemory},    {T(kWide), T(0), T(0), kNoiseMemory}};

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
  T *kept;                         // one member, as the best was when the fresh member began: W, d, u, R, age
  T *W;                            // O x M x 8
  T *d, *u;                        // LaneUD
  T *R;                            // O x 8, or O x O x 8
  T *ages;                         // 8

  Index noise_count() const { return matrix ? O * O : O; }
  Index count() const { return O * M + noise_count() + (kept_count() + 1) * L + kept_count() + kBook; }
  Index kept_count() const { return O * M + M + LaneUD<T>::u_count(M) / L + noise_count() + 1; }  // of one member
  void place(T *at) {
    if (at == nullptr) return;  // only sizes are planned
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
    take(kept, kept_count());
    take(book, kBook);
  }
  // Calls variance(x) for each number that cannot be negative, noise(x) for each variance of noise,
  // bounded(x, least, most) for those of a known range, and value(x) for the others.
  template <class Value, class Variance, class Noise, class Bounded>
  KBT_SELDOM void visit(Value value, Variance variance, Noise noise, Bounded bounded) const {
    const auto all = [](T *x, Index n, auto f) {
      for (Index i = 0; i < n; ++i) f(x[i]);
    };
    const auto noises = [&](T *x, Index width) {
      for (Index i = 0; i < noise_count(); ++i) {
        for (Index l = 0; l < width; ++l, ++x) {
          if (!matrix || i % (O + 1) == 0) {
            noise(*x);
          } else {
            value(*x);
          }
        }
      }
    };
    all(W, O * M * L, value);
    all(d, M * L, variance);
    all(u, LaneUD<T>::u_count(M), value);
    noises(R, L);
    for (Index l = 0; l < L; ++l) bounded(log_weights[l], kLeastLogWeight, 0.0);
    for (Index l = 0; l < L; ++l) bounded(ages[l], 0.0, double{kSizeMemory});
    all(first_weights, O * M, value);
    noises(first_noise, 1);
    const Index u_count = LaneUD<T>::u_count(M) / L;
    all(kept, O * M, value);
    all(kept + O * M, M, variance);
    all(kept + O * M + M, u_count, value);
    noises(kept + O * M + M + u_count, 1);
    variance(kept[kept_count() - 1]);
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
    const T kind = kMembers<T>[l].prior;
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
    keep_best();
  }
  // The noise with which members begin, and that of all of them from now on: O variances.
  void set_noise(const T *values) {
    for (Index i = 0; i < noise_count(); ++i) {
      first_noise[i] = !matrix ? values[i] : i % (O + 1) == 0 ? values[i / (O + 1)] : T(0);
      for (Index l = 0; l < L; ++l) R[i * L + l] = first_noise[i];
      kept[kept_count() - 1 - noise_count() + i] = first_noise[i];
    }
  }
  // (9.3): P + Q for the members that walk, never above the prior.
  void walk() {
    for (Index l = 0; l < kRegular; ++l) {
      const MemberKind<T> &kind = kMembers<T>[l];
      const bool all = kind.walk > T(0);
      if (!all && !(kind.bias_walk > T(0))) continue;
      const T most = prior_of(l, size()), step = all ? kind.walk / size() : kind.bias_walk;
      for (Index p = 0; p < (all ? M : 1); ++p) {
        T &x = d[p * L + l];
        const T limit = x > most ? x : most, raised = x + step;
        x = raised < limit ? raised : limit;
      }
    }
  }

  // (8.2), with the weight of the robust step.
  void learn_noise(const T *error, const T *weight, const T *c) {
    for (Index l = 0; l < kBefore; ++l) {
      const T age = ages[l], memory = T(kMembers<T>[l].noise_memory);
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
  KBT_SELDOM void read_cov(bool whole, T *to) const {
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

  // Calls visit(lanes, count, kept, first, otherwise) for the parts of a member: `count` numbers, and what begin_fresh
  // sets them to.
  template <class Visit>
  void each_part(Visit visit) {
    const Index u_count = LaneUD<T>::u_count(M) / L;
    T *at = kept;
    const auto part = [&](T *lanes, Index count, const T *first, T otherwise) {
      visit(lanes, count, at, first, otherwise);
      at += count;
    };
    const T *const none = nullptr;
    part(W, O * M, first_weights, T(0));
    part(d, M, none, this->begun() ? prior_of(kFresh, size()) : T(0));
    part(u, u_count, none, T(0));
    part(R, noise_count(), first_noise, T(0));
    part(ages, 1, none, T(0));
  }
  // The best regular member is kept as it is: a change that begins now will be noticed much later.
  void keep_best() {
    const Index best = this->best();
    each_part([&](const T *x, Index count, T *to, const T *, T) {
      for (Index i = 0; i < count; ++i) to[i] = x[i * L + best];
    });
  }
  void begin_fresh(bool suspicious) {
    keep_best();
    each_part([&](T *x, Index count, T *, const T *first, T otherwise) {
      for (Index i = 0; i < count; ++i) x[i * L + kFresh] = first != nullptr ? first[i] : otherwise;
    });
    Evidence<T, 6>::begin_fresh(suspicious);
  }

  // The regular members go on from member `from`. What was the best when the fresh member began is the one before.
  void replace_members(Index from) {
    each_part([&](T *x, Index count, const T *before, const T *, T) {
      for (Index i = 0; i < count; ++i, x += L) {
        const T value = x[from];
        for (Index l = 0; l < kRegular; ++l) x[l] = value;
        x[kBefore] = before[i];
      }
    });
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
