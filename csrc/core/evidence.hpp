// evidence.hpp - what speaks for each member of a watchful head, and the rules by which members are weighed, replaced
// and begun anew. method.md §9 has the rules and where the constants come from.
#pragma once

#include "algebra.hpp"
#include "kbt.h"
#include "normal.hpp"
#include "views.hpp"

namespace kbt {

constexpr double kSurprise = 16.0;  // NIS per output of the mixture at which the fresh member begins
constexpr double kCap = 2.0;        // nats of evidence that one sample may bring
constexpr double kProof = 16.0;     // nats of evidence that make a change
constexpr double kDoubt = 8.0;      // nats at which a challenger is as probable as the members
constexpr int kYoung = 120;  // samples for which a challenger must have been ahead before the plant counts as changed
constexpr int kLives = 3;    // the fresh member begins anew after 3 (d + 1) samples, and not before 3 times the above
constexpr int kMostReturns = 3;            // each return doubles the patience, up to eight times
constexpr double kLeadRate = 0.5;          // nats per sample by which it must have been ahead
constexpr double kMostProof = 24.0;        // nats: evidence beyond is not saved up for worse times
constexpr double kFade = 0.998;            // of log weights per sample: they remember 500 samples
constexpr double kShare = 1e-3;            // of the weights is spread evenly, so that no member is lost
constexpr double kLeastLogWeight = -20.0;  // log weights stay above it, because of kShare
constexpr int kSizeMemory = 1000;          // samples that the mean of |z|^2 remembers, and where ages stop

struct MemberEvent {
  int kind;         // KBT_NO_CHANGE, KBT_CHANGED, KBT_RETURNED
  int age;          // updates since then
  double evidence;  // nats
};

// Members 0 to kRegular - 1 are regular, the next one is fresh, the one behind it is the best before the latest change.
template <class T, Index kRegular>
struct Evidence {
  static constexpr Index kFresh = kRegular, kBefore = kRegular + 1, kAll = kRegular + 2;

  T *log_weights;  // of the regular members
  T *book;         // what follows, kBook numbers
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

  bool begun() const { return book[kSeen] > T(0); }
  bool suspicious() const { return book[kSuspicious] > T(0); }
  T size() const { return book[kSize] > T(1) ? book[kSize] : T(1); }  // of (1, h), so not below 1

  void reset() {
    fill(book, T(0), Index(kBook));
    even_weights();
  }
  void even_weights() {
    const T log_share = -log_positive(T(kRegular));
    for (Index l = 0; l < kRegular; ++l) log_weights[l] = log_share;
  }
  void begin_fresh(bool suspicious) {
    book[kEvidence] = book[kLead] = book[kFreshAge] = book[kFreshUpdates] = T(0);
    book[kSuspicious] = T(suspicious);
  }
  bool just_began() const { return !(book[kFreshAge] > T(0)); }  // the fresh member: nothing was learned since
  void begin_before() {
    book[kHasBefore] = T(1);
    book[kBeforeEvidence] = book[kBeforeLead] = book[kBeforeAge] = book[kBeforeUpdates] = T(0);
  }
  Index best() const {
    Index best = 0;
    for (Index l = 1; l < kRegular; ++l) best = log_weights[l] > log_weights[best] ? l : best;
    return best;
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
  // Against evidence there are no odds: a member that has just begun is wide, and would widen the mixture.
  static T odds(T evidence) {
    if (!(evidence > T(0))) return T(0);
    const T x = evidence - T(kDoubt), none = exp_negative(T(-kDoubt));
    return (x < T(0) ? exp_negative(x) : T(1) / exp_negative(x < T(50) ? -x : T(-50))) - none;
  }

  void note_size(T size) {
    const T seen = book[kSeen];
    book[kSize] += (size - book[kSize]) / (seen < T(kSizeMemory - 1) ? seen + T(1) : T(kSizeMemory));
    if (seen < T(kSizeMemory)) book[kSeen] = seen + T(1);
  }

  // (9.1) for one sample of `outputs` numbers, from the members' log densities. An update of several rows may be
  // several samples; the first of them begins a new update.
  void weigh_in(const T *log_density, Index outputs, bool new_update) {
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

    const T least = best - T(kCap) * T(outputs);
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

  // After a sample: has the plant changed, or gone back?
  MemberEvent decide() {
    const int age = counted(kFreshAge), back = counted(kBeforeAge), returns = counted(kReturns);
    const T lead = book[kLead], before = book[kBeforeLead];
    if (back >= patience() && before > T(kLeadRate) * T(back)) {
      if (returns < kMostReturns) book[kReturns] += T(1);
      return {KBT_RETURNED, counted(kBeforeUpdates), static_cast<double>(before)};
    }
    if (age >= patience() && lead > T(kLeadRate) * T(age)) {
      return {KBT_CHANGED, counted(kFreshUpdates), static_cast<double>(lead)};
    }
    return {KBT_NO_CHANGE, 0, 0.0};
  }
  int patience() const {
    const int returns = counted(kReturns);
    return kYoung << (returns < kMostReturns ? returns : kMostReturns);
  }
  // The fresh member, of a head with M inputs, has lived long enough or has been proved wrong.
  bool fresh_is_due(Index M) const {
    const int age = counted(kFreshAge);
    return (age >= kLives * M && age >= kLives * patience()) || book[kEvidence] < T(-kProof);
  }

 private:
  int counted(int entry) const {  // a blob may hold any number
    const T x = book[entry];
    return x > T(0) ? static_cast<int>(x < T(1 << 20) ? x : T(1 << 20)) : 0;
  }
};

// log sum_l w_l p_l of n members
template <class T>
T mixed_density(const T *w, const T *log_density, Index n) {
  T top = log_density[0], sum = T(0);
  for (Index l = 1; l < n; ++l) top = log_density[l] > top ? log_density[l] : top;
  for (Index l = 0; l < n; ++l) sum += w[l] * exp_negative(log_density[l] - top);
  return top + log_positive(sum > T(1e-30) ? sum : T(1e-30));
}

}  // namespace kbt
