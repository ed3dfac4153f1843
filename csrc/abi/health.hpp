// health.hpp - the verdict: are the errors as large as predicted? watch.hpp keeps the average.
#pragma once

#include "head.hpp"

namespace kbt {

constexpr double kBandZ = 3.2905;      // two-sided 99.9 % of a normal variable
constexpr double kBandSlack = 0.01;    // nats: the band of a completely uncertain softmax would have zero width
constexpr std::uint64_t kFewest = 30;  // samples before there is a verdict
constexpr double kOutliers = 0.1;      // share of rejected samples that is normal for a gate
constexpr double kFarRatio = 9.0;      // far beyond the band: errors of three times the deviation
constexpr double kFarNats = 2.302585;  // softmax: labels ten times less probable than predicted
constexpr double kGrowth = 1.5;        // ratio of the recent average to the whole one
constexpr double kBlownUp = 100.0;     // times the largest variance of prior and noise

// Quantile of a variable with mean 0 and these moments: a shifted gamma distribution with its chi-square quantile after
// Wilson and Hilferty. `z` is that of a normal variable.
inline double quantile(double z, double variance, double third) {
  if (!(variance > 0.0)) return 0.0;
  const double deviation = std::sqrt(variance), skew = third / (variance * deviation);
  if (skew < 0.0) return -quantile(-z, variance, -third);
  if (skew < 1e-3) return z * deviation;
  const double dof = 8.0 / (skew * skew), c = 2.0 / (9.0 * dof), root = 1.0 - c + z * std::sqrt(c);
  const double cube = root > 0.0 ? root * root * root : 0.0;
  return deviation * std::sqrt(0.5 * dof) * (cube - 1.0);
}

// A chi-square variable with K degrees of freedom, cut off at a gate: the probability above the gate, and mean and
// variance of the rest relative to the whole. E x^n below the gate is that of K + 2n degrees, and tail(K + 2) = tail(K)
// + term(K).
struct Truncated {
  double rejected = 0.0, mean = 1.0, variance = 1.0;
  KBT_SELDOM Truncated(double gate, Index K) {
    if (!(gate > 0.0) || gate > 1400.0 || K < 1) return;  // beyond, exp(-gate / 2) underflows
    const bool even = K % 2 == 0;
    const double density = exp_negative(-0.5 * gate);
    double tail = even ? density : 2.0 * relu_unit(-std::sqrt(gate), 1.0).gate;
    double term = even ? 0.5 * gate * density : std::sqrt(gate * 0.6366197723675814) * density;
    for (Index k = even ? 2 : 1; k < K; k += 2) {
      tail += term;
      term *= gate / static_cast<double>(k + 2);
    }
    rejected = tail;
    const double left = 1.0 - tail, dof = static_cast<double>(K);
    if (left < 1e-3) return;  // a gate that rejects everything
    mean = 1.0 - term / left;
    const double next = mean - term * gate / (dof + 2.0) / left;
    variance = 0.5 * ((dof + 2.0) * next - dof * mean * mean);
    if (!(variance > 0.0)) variance = 0.0;
  }
};

template <class T>
void measure_variances(const Head<T> &head, kbt_health &health) {
  health.smallest_var = std::numeric_limits<double>::max();
  for (Index i = 0; i < head.layers(); ++i) {
    const typename Posterior<T>::Range D = head.bank().leading().weights(i).range_of_D();
    const double smallest = static_cast<double>(D.smallest), largest = static_cast<double>(D.largest);
    if (smallest < health.smallest_var) health.smallest_var = smallest;
    if (largest > health.largest_var) health.largest_var = largest;
  }
}

// The same over the members, whose D is in units of their noise.
template <class T>
void measure_members(const Head<T> &head, kbt_health &health) {
  const MemberStore<T> &s = head.store();
  const double most = std::numeric_limits<double>::max();
  health.smallest_var = most;
  for (Index i = 0; i < s.M * kLanes; ++i) {
    const double product = static_cast<double>(s.d[i]) * static_cast<double>(s.noise(0, 0, i % kLanes));
    const double var = product < most ? product : most;
    if (i % kLanes >= s.kRegular) continue;
    if (var < health.smallest_var) health.smallest_var = var;
    if (var > health.largest_var) health.largest_var = var;
  }
}

// The largest variance in prior and noise.
template <class T>
double variance_scale(const Head<T> &head) {
  double prior = 0.0, noise = 0.0;
  for (int i = 0; i < head.cfg.layers; ++i) prior = head.cfg.prior_var[i] > prior ? head.cfg.prior_var[i] : prior;
  for (Index i = 0; i < head.noise().count(); ++i) {
    const double x = static_cast<double>(head.noise().values[i]);
    noise = x > noise ? x : noise;
  }
  if (in_units_of_noise(head.cfg)) return (prior > 1.0 ? prior : 1.0) * noise;
  return prior > noise ? prior : noise;
}

inline kbt_verdict verdict(const kbt_config &cfg, const kbt_watch &watch, const kbt_health &health,
                           double expected_gated, double scale) {
  if (health.largest_var > kBlownUp * scale) return KBT_DIVERGING;  // under `fuse` no variance exceeds its prior
  if (cfg.rule == KBT_REPLACE) return KBT_NO_BAND;
  if (watch.seen < kFewest && watch.offered < kFewest) return KBT_TOO_FEW;

  // The share of rejected samples among those that a consistent head would accept.
  const double passing = 1.0 - expected_gated;
  const double rejected = passing > 0.0 ? (health.gated - expected_gated) / passing : 0.0;
  const double offered = static_cast<double>(watch.offered < kWindow ? watch.offered : 2 * kWindow - 1);
  const double allowed =
      kOutliers + kBandZ * std::sqrt(kOutliers * (1.0 - kOutliers) / (offered > 1.0 ? offered : 1.0));
  if (watch.offered >= kFewest && rejected > 0.5) return KBT_DIVERGING;
  if (watch.seen < kFewest) return KBT_TOO_FEW;

  const bool softmax = cfg.output == KBT_SOFTMAX;
  const double fast = static_cast<double>(watch.fast), mean = health.average;
  const bool far = softmax ? mean > health.high + kFarNats : mean > kFarRatio * health.high;
  if (far && (fast > kGrowth * mean || mean > 0.5 * static_cast<double>(kMostX))) return KBT_DIVERGING;
  if (mean > health.high || (watch.offered >= kFewest && rejected > allowed)) return KBT_OVERCONFIDENT;
  return mean < health.low ? KBT_UNDERCONFIDENT : KBT_CONSISTENT;
}

// With members: the same evidence by which the head itself goes.
inline kbt_verdict members_verdict(const kbt_watch &watch, const kbt_health &health) {
  if (watch.offered >= kFewest && health.gated > 0.5) return KBT_DIVERGING;
  if (watch.seen < kFewest) return KBT_TOO_FEW;
  if (watch.since_change < kHold) return KBT_JUST_CHANGED;
  if (health.average > kFarRatio) return KBT_DIVERGING;  // a third of the samples are surprises
  if (watch.noisier) return KBT_NOISIER;
  return watch.drifts ? KBT_DRIFTING : KBT_CONSISTENT;
}

template <class T>
KBT_SELDOM kbt_health judge(const Head<T> &head) {
  const kbt_watch &watch = head.watch;
  const bool softmax = head.cfg.output == KBT_SOFTMAX;
  const Truncated kept(softmax ? 0.0 : head.cfg.gate, watch.K);
  const double expected = softmax ? 0.0 : kept.mean, slack = softmax ? kBandSlack : 0.0;
  const double variance = static_cast<double>(watch.variance) * kept.variance;
  const double third = static_cast<double>(watch.third) * kept.variance * std::sqrt(kept.variance);  // the same skew
  kbt_health health{};
  health.counters = head.counters;
  health.seen = watch.seen;
  health.average = static_cast<double>(watch.mean);
  health.low = expected + quantile(-kBandZ, variance, third) - slack;
  health.high = expected + quantile(kBandZ, variance, third) + slack;
  if (head.cfg.rule == KBT_REPLACE) {  // its output covariance is not that of its error: the average has no known mean
    health.low = 0.0;
    health.high = std::numeric_limits<double>::infinity();
  }
  health.gated = static_cast<double>(watch.gated);
  if (head.has_members()) {
    measure_members(head, health);
  } else {
    measure_variances(head, health);
  }
  if (head.watchful()) {
    health.verdict = members_verdict(watch, health);
    return health;
  }
  health.verdict = verdict(head.cfg, watch, health, kept.rejected, variance_scale(head));
  return health;
}

}  // namespace kbt
