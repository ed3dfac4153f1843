// member_store.hpp - what the members of a watchful head have learned, and the rules by which they are weighed,
// replaced and begun anew. method.md §9 has the rules and where the constants come from.
#pragma once

#include "algebra.hpp"
#include "kbt.h"
#include "noise.hpp"
#include "normal.hpp"

namespace kbt {

constexpr double kWide = 2e4;       // variance of an output before any data, in units of the noise
constexpr double kNarrow = 30.0;    // the same, of the member for noisy targets
constexpr double kHuber = 16.0;     // NIS per output that a sample counts as at most
constexpr double kSurprise = 16.0;  // NIS per output of the mixture at which the fresh member begins
constexpr double kCap = 2.0;        // nats of evidence that one sample may bring
constexpr double kProof = 16.0;     // nats of evidence that make a change
constexpr double kDoubt = 8.0;      // nats at which a challenger is as probable as the members
constexpr int kYoung = 120;  // samples for which a challenger must have been ahead before the plant counts as changed
constexpr int kLives = 3;    // the fresh member begins anew after 3 (d + 1) samples, and not before 3 times the above
constexpr int kMostReturns = 3;      // each return doubles the patience, up to eight times
constexpr double kLeadRate = 0.5;    // nats per sample by which it must have been ahead
constexpr double kMostProof = 24.0;  // nats: evidence beyond is not saved up for worse times
constexpr double kFade = 0.998;      // of log weights per sample: they remember 500 samples
constexpr double kShare = 1e-3;      // of the weights is spread evenly: nobody is forgotten
constexpr int kNoiseMemory = 100;    // samples that the learned noise remembers
constexpr int kBriefMemory = 10;     // the same, of the member for noisy targets
constexpr int kSizeMemory = 1000;    // samples that the mean of |z|^2 remembers

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

struct MemberEvent {
  int kind;         // KBT_NO_CHANGE, KBT_CHANGED, KBT_RETURNED
  int age;          // updates since then
  double evidence;  // nats
};

// The learned numbers, lane = member. All in one piece of memory, in this order.
template <class T>
struct MemberStore {
  static constexpr Index L = kLanes, kRegular = 6, kFresh = 6, kBefore = 7;

  Index M, O;   // inputs with the bias first; outputs
  bool matrix;  // R is a matrix
  bool learns_noise;
  T prior_var;                     // of a weight, in units of the noise; 0: from the size of the inputs
  T *first_weights, *first_noise;  // O x M; O, or O x O
  T *kept;                         // one member, as the best was when the fresh member began: W, d, u, R, age
  T *W;                            // O x M x 8
  T *d, *u;                        // LaneUD
  T *R;                            // O x 8, or O x O x 8
  T *log_weights, *ages;           // 8 each
  T *book;                         // what follows, kBook numbers
  enum {
    kSize,
    kSeen,
    kEvidence,
    kFreshAge,
    kSuspicious,
    kBeforeEvidence,
    kBeforeAge,
    kHasBefore,
    kReturns,
    kLead,
    kBeforeLead,
    kFreshUpdates,
    kBeforeUpdates,
    kBook
  };

  Index noise_count() const { return matrix ? O * O : O; }
  static Index count(Index M, Index O, bool matrix) {
    const Index noise = matrix ? O * O : O;
    return O * M + noise + (kept_count(M, O, matrix) + 1) * L + kept_count(M, O, matrix) + kBook;
  }
  // Numbers of one member.
  static Index kept_count(Index M, Index O, bool matrix) {
    return O * M + M + LaneUD<T>::u_count(M) / L + (matrix ? O * O : O) + 1;
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
    take(kept, kept_count(M, O, matrix));
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
    const Index u_count = LaneUD<T>::u_count(M) / L;
    all(kept, O * M, value);
    all(kept + O * M, M, variance);
    all(kept + O * M + M, u_count, value);
    all(kept + O * M + M + u_count, noise_count() + 1, value);
    all(book, kBook, value);
  }

  LaneUD<T> factor() const { return {M, d, u}; }
  T &first(Index o, Index p) const { return first_weights[o * M + p]; }
  T noise(Index i, Index k, Index l) const {
    if (matrix) return R[(i * O + k) * L + l];
    return i == k ? R[i * L + l] : T(0);
  }
  bool begun() const { return book[kSeen] > T(0); }
  bool suspicious() const { return book[kSuspicious] > T(0); }
  T size() const { return book[kSize]; }

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
    fill(book, T(0), Index(kBook));
    even_weights();
    keep_best();
  }
  // The noise with which members begin, and that of all of them from now on: O variances.
  void set_noise(const T *values) {
    for (Index i = 0; i < noise_count(); ++i) {
      first_noise[i] = !matrix ? values[i] : i % (O + 1) == 0 ? values[i / (O + 1)] : T(0);
      for (Index l = 0; l < L; ++l) R[i * L + l] = first_noise[i];
      kept[kept_count(M, O, matrix) - 1 - noise_count() + i] = first_noise[i];
    }
  }
  void even_weights() {
    for (Index l = 0; l < L; ++l) log_weights[l] = l < kRegular ? T(-1.791759469228055) : T(0);  // log 1/6
  }

  // (9.1): the regular members by their evidence, a challenger by its odds against all of them.
  void weights(T *w) const {
    T sum = T(0);
    for (Index l = 0; l < kRegular; ++l) sum += w[l] = exp_negative(log_weights[l]);
    w[kFresh] = odds(book[kEvidence]);
    w[kBefore] = book[kHasBefore] > T(0) ? odds(book[kBeforeEvidence]) : T(0);
    const T whole = T(1) + w[kFresh] + w[kBefore];
    for (Index l = 0; l < kRegular; ++l) w[l] /= sum * whole;
    w[kFresh] /= whole;
    w[kBefore] /= whole;
  }
  static T odds(T evidence) {
    const T x = evidence - T(kDoubt);
    return x < T(0) ? exp_negative(x) : T(1) / exp_negative(x < T(50) ? -x : T(-50));
  }

  void note_size(T size) {
    const T seen = book[kSeen];
    book[kSize] += (size - book[kSize]) / (seen < T(kSizeMemory - 1) ? seen + T(1) : T(kSizeMemory));
    if (seen < T(kSizeMemory)) book[kSeen] = seen + T(1);
  }

  // (9.1) for one sample. Returns the log density of the regular members' mixture.
  T weigh_in(const T *log_density, bool new_update) {
    T best = log_density[0], top = log_weights[0] + log_density[0];
    for (Index l = 1; l < kRegular; ++l) {
      best = log_density[l] > best ? log_density[l] : best;
      const T x = log_weights[l] + log_density[l];
      top = x > top ? x : top;
    }
    T sum = T(0), whole = T(0);
    for (Index l = 0; l < kRegular; ++l) {
      sum += exp_negative(log_weights[l] + log_density[l] - top);
      whole += exp_negative(log_weights[l]);
    }
    const T mixture = top + log_positive(sum / whole);
    gain_evidence(log_density[kFresh] - mixture, log_density[kBefore] - mixture, T(new_update));

    const T least = best - T(kCap) * T(O);
    T highest = T(0);
    for (Index l = 0; l < kRegular; ++l) {
      log_weights[l] = T(kFade) * log_weights[l] + (log_density[l] > least ? log_density[l] : least) - best;
      highest = l == 0 || log_weights[l] > highest ? log_weights[l] : highest;
    }
    sum = T(0);
    for (Index l = 0; l < kRegular; ++l) sum += exp_negative(log_weights[l] - highest);
    for (Index l = 0; l < kRegular; ++l) {
      const T w = exp_negative(log_weights[l] - highest) / sum;
      log_weights[l] = log_positive(T(1 - kShare) * w + T(kShare) / T(kRegular));
    }
    return mixture;
  }
  // Evidence gives a challenger its weight and is not saved up for worse times; its lead is the whole sum.
  void gain_evidence(T fresh, T before, T new_update) {
    const auto capped = [](T x) { return x > T(kCap) ? T(kCap) : (x < T(-kCap) ? T(-kCap) : x); };
    const auto at_most = [](T x) { return x < T(kMostProof) ? x : T(kMostProof); };
    const T gain = capped(fresh), regain = capped(before);
    book[kEvidence] = at_most(book[kEvidence] + gain);
    book[kLead] += gain;
    book[kFreshUpdates] += book[kFreshAge] > T(0) ? new_update : T(1);
    book[kFreshAge] += T(1);
    const T sum = book[kHasBefore] > T(0) ? at_most(book[kBeforeEvidence] + regain) : T(0);
    const bool ahead = sum > T(0);
    book[kBeforeEvidence] = ahead ? sum : T(0);
    book[kBeforeLead] = ahead ? book[kBeforeLead] + regain : T(0);
    book[kBeforeUpdates] = ahead ? book[kBeforeUpdates] + (book[kBeforeAge] > T(0) ? new_update : T(1)) : T(0);
    book[kBeforeAge] = ahead ? book[kBeforeAge] + T(1) : T(0);
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

  // Moments of the weights over members with these weights.
  T mean(const T *w, Index o, Index p) const {
    T sum = T(0);
    for (Index l = 0; l < L; ++l) sum += w[l] * W[(o * M + p) * L + l];
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
    const int age = counted(kFreshAge), back = counted(kBeforeAge), returns = counted(kReturns);
    const T lead = book[kLead], before = book[kBeforeLead];
    const int patience = kYoung << (returns < kMostReturns ? returns : kMostReturns);
    if (back >= patience && before > T(kLeadRate) * T(back)) {
      const MemberEvent event{KBT_RETURNED, counted(kBeforeUpdates), static_cast<double>(before)};
      replace_members(kBefore);
      if (returns < kMostReturns) book[kReturns] += T(1);
      return event;
    }
    if (age >= patience && lead > T(kLeadRate) * T(age)) {
      const MemberEvent event{KBT_CHANGED, counted(kFreshUpdates), static_cast<double>(lead)};
      replace_members(kFresh);
      return event;
    }
    if ((age >= kLives * M && age >= kLives * patience) || book[kEvidence] < T(-kProof)) begin_fresh(false);
    return {KBT_NO_CHANGE, 0, 0.0};
  }
  int counted(int entry) const {  // a blob may hold any number
    const T x = book[entry];
    return x > T(0) ? static_cast<int>(x < T(1 << 20) ? x : T(1 << 20)) : 0;
  }

  // Calls visit(lanes, count, kept, first) for the parts of a member: `count` numbers, and those that begin_fresh sets.
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
    part(d, M, none, begun() ? prior_of(kFresh, size()) : T(0));
    part(u, u_count, none, T(0));
    part(R, noise_count(), first_noise, T(0));
    part(ages, 1, none, T(0));
  }
  // The best regular member is kept as it is: a change that begins now will be noticed much later.
  void keep_best() {
    Index best = 0;
    for (Index l = 1; l < kRegular; ++l) best = log_weights[l] > log_weights[best] ? l : best;
    each_part([&](const T *x, Index count, T *to, const T *, T) {
      for (Index i = 0; i < count; ++i) to[i] = x[i * L + best];
    });
  }
  void begin_fresh(bool suspicious) {
    keep_best();
    each_part([&](T *x, Index count, T *, const T *first, T otherwise) {
      for (Index i = 0; i < count; ++i) x[i * L + kFresh] = first != nullptr ? first[i] : otherwise;
    });
    book[kEvidence] = book[kLead] = book[kFreshAge] = book[kFreshUpdates] = T(0);
    book[kSuspicious] = T(suspicious);
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
    even_weights();
    begin_fresh(false);
    book[kHasBefore] = T(1);
    book[kBeforeEvidence] = book[kBeforeLead] = book[kBeforeAge] = book[kBeforeUpdates] = T(0);
  }
};

}  // namespace kbt
