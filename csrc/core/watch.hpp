// watch.hpp - a running average of how far samples fell from what the head expected. health.hpp judges it.
//
// A diagnostic: not part of the saved state, and nothing is learned from it. An update pays a few dozen instructions.
//
// Each sample gives a number x whose mean, variance and third central moment are known if the head is right:
//   gaussian   x = NIS / K with K = rows * d_o degrees of freedom: chi-square, so 1, 2 / K and 8 / K^2
//   softmax    x = surprise - entropy in nats a row, -log p(y) + sum p log p: 0, and the moments of -log p under p.
//              NIS is no measure here: for a class of probability p it is about 1 / p, whatever the number of samples
// The average over the first kWindow samples is plain, then it forgets. Its own variance and third moment are carried
// along with the same weights, so that the band is right at any age and for any mixture of rows.
#pragma once

#include "normal.hpp"

struct kbt_watch {              // all zero: nothing seen yet
  std::uint64_t seen, offered;  // samples in the average; and all, those that the gate rejected as well
  float mean, variance, third;  // of x; then what the variance and the third moment of that mean should be
  float fast;                   // the mean with a shorter memory: is it growing?
  float gated;                  // recent share of samples that the gate rejected
  std::int32_t K;               // degrees of freedom of the latest sample
  // of a head with members
  float walking;               // recent weight of the members that walk
  float level, usual;          // log of the noise variance: recently, and in the long run
  std::uint32_t since_change;  // samples, up to kHold
  bool drifts, noisier;        // with hysteresis
};

namespace kbt {

constexpr int kWindow = 200;       // samples: remembered as long as the learned noise is (kNoiseMemory)
constexpr int kFastWindow = 50;    // samples
constexpr float kMostX = 1000.0F;  // larger says no more, and would be remembered for thousands of samples

inline float weight_of(std::uint64_t count, int window) {
  return 1.0F / static_cast<float>(count < static_cast<std::uint64_t>(window) ? static_cast<int>(count) : window);
}

// x, and the variance and third central moment it should have.
inline void note(kbt_watch &watch, float x, float variance, float third) {
  const std::uint64_t count = ++watch.seen;
  const float w = weight_of(count, kWindow), keep = 1.0F - w;
  const float bounded = x < kMostX ? x : kMostX;
  watch.mean += (bounded - watch.mean) * w;
  watch.fast += (bounded - watch.fast) * weight_of(count, kFastWindow);
  watch.variance = keep * keep * watch.variance + w * w * variance;
  watch.third = keep * keep * keep * watch.third + w * w * w * third;
}

inline void note_gate(kbt_watch &watch, bool rejected) {
  const float w = weight_of(++watch.offered, kWindow);
  watch.gated += ((rejected ? 1.0F : 0.0F) - watch.gated) * w;
}

inline void note_nis(kbt_watch &watch, float nis, Index K) {
  const float share = 1.0F / static_cast<float>(K);
  watch.K = static_cast<std::int32_t>(K);
  note(watch, nis * share, 2.0F * share, 8.0F * share * share);
}

// What the members think after a sample: the weight of those that walk, and the log of the noise variance.
constexpr std::uint32_t kHold = 200;  // samples for which a change is reported
constexpr int kLately = 1000;         // samples over which drift and noise are judged
constexpr int kUsual = 10000;         // samples that the usual level of noise remembers
constexpr float kDriftsFrom = 0.95F, kDriftsTo = 0.5F, kNoisierFrom = 1.386F, kNoisierTo = 0.693F;  // 4 and 2 times
constexpr float kMostNis = 32.0F;  // an outlier is no more than that to the average

inline void note_members(kbt_watch &watch, float walking, float level, bool changed) {
  const float w = weight_of(watch.seen, kLately);
  watch.walking += (walking - watch.walking) * w;
  watch.level += (level - watch.level) * w;
  if (changed) watch.since_change = 0;
  const bool settling = watch.since_change < kHold || watch.seen < static_cast<std::uint64_t>(kLately);
  watch.usual = settling ? watch.level : watch.usual + (watch.level - watch.usual) * (1.0F / kUsual);
  if (watch.since_change < kHold) ++watch.since_change;
  if (watch.seen == 1 && !changed) watch.since_change = kHold;
  watch.drifts = watch.walking > (watch.drifts ? kDriftsTo : kDriftsFrom);
  watch.noisier = watch.level - watch.usual > (watch.noisier ? kNoisierTo : kNoisierFrom);
}

// p: rows x n predicted probabilities.
template <class T>
void note_surprise(kbt_watch &watch, const T *p, Index rows, Index n, T log_likelihood) {
  T entropy = T(0), variance = T(0), third = T(0);
  const auto surprise = [](T x) { return -log_positive(x > T(1e-30) ? x : T(1e-30)); };
  for (Index a = 0; a < rows; ++a, p += n) {
    T mean = T(0);
    for (Index i = 0; i < n; ++i) mean += p[i] * surprise(p[i]);
    for (Index i = 0; i < n; ++i) {
      const T away = surprise(p[i]) - mean;
      variance += p[i] * away * away;
      third += p[i] * away * away * away;
    }
    entropy += mean;
  }
  const T share = T(1) / T(rows);
  note(watch, static_cast<float>((-log_likelihood - entropy) * share), static_cast<float>(variance * share * share),
       static_cast<float>(third * share * share * share));
}

}  // namespace kbt
