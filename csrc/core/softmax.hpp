// softmax.hpp - moments of the softmax of one row: Taylor, method.md (2.7) to (2.9), and for logits of any variance,
// method.md §11.
#pragma once

#include "dense.hpp"
#include "normal.hpp"

namespace kbt {

// p = softmax(u), the row maximum subtracted first.
template <class T>
void softmax(const T *u, Index n, T *p) {
  T top = u[0], sum = T(0);
  for (Index i = 1; i < n; ++i) top = u[i] > top ? u[i] : top;
  for (Index i = 0; i < n; ++i) {
    p[i] = exp_negative(u[i] - top);
    sum += p[i];
  }
  for (Index i = 0; i < n; ++i) p[i] /= sum;
}

// Second order: mean_i = p_i + p_i/2 [(e_i - p)^T S (e_i - p) - (sum_k p_k S_kk - p^T S p)], held to a probability.
// S is the n x n covariance of u with leading dimension ld. mean may not alias p. Where S is so large that rounding
// leaves nothing of the series, the mean is p.
template <class T>
KBT_SELDOM void softmax_second_order(const T *p, const T *S, Index ld, Index n, T *mean) {
  T own = T(0), whole = T(0);
  for (Index i = 0; i < n; ++i) {
    mean[i] = dot(S + i * ld, p, n);  // (S p)_i, for the moment
    own += p[i] * S[i * ld + i];
    whole += p[i] * mean[i];
  }
  T sum = T(0);
  for (Index i = 0; i < n; ++i) {
    const T bend = S[i * ld + i] - T(2) * mean[i] + whole;
    const T value = p[i] + T(0.5) * p[i] * (bend - (own - whole));
    mean[i] = value > T(0) ? value : T(0);
    sum += mean[i];
  }
  for (Index i = 0; i < n; ++i) mean[i] = sum > T(0) ? mean[i] / sum : p[i];
}

// 1 - p_i as the sum of the others: a confident p_i near 1 has lost it.
template <class T>
T complement(const T *p, Index n, Index i) {
  T sum = T(0);
  for (Index k = 0; k < n; ++k) sum += k == i ? T(0) : p[k];
  return sum;
}

// J = diag(p) - p p^T, which is its own transpose.
template <class T>
void softmax_jacobian(const T *p, Index n, T *J) {
  for (Index i = 0; i < n; ++i) {
    for (Index k = 0; k < n; ++k) J[i * n + k] = -p[i] * p[k];
    J[i * n + i] = p[i] * complement(p, n, i);
  }
}

// Multinomial noise needs a root of J: F F^T = J with F = diag(sqrt(q)) - q sqrt(q)^T.
template <class T>
void softmax_root(const T *q, Index n, T *F) {
  for (Index k = 0; k < n; ++k) {
    const T root = std::sqrt(q[k]);
    for (Index i = 0; i < n; ++i) F[i * n + k] = -q[i] * root;
    F[k * n + k] = root * complement(q, n, k);
  }
}

// kappa of (11.1), from the variance of a logit.
template <class T>
T moment_slope(T var) {
  return T(1) / std::sqrt(T(1) + T(0.39269908169872414) * (var > T(0) ? var : T(0)));  // pi / 8
}

// q = (p + tau) / (1 + n tau): no probability is zero. May be in place.
template <class T>
void smooth(const T *p, Index n, T tau, T *q) {
  const T sum = T(1) + T(n) * tau;
  for (Index i = 0; i < n; ++i) q[i] = (p[i] + tau) / sum;
}

// q_i (1 - q_i), without cancellation. Only one complement of a row has to be summed up.
template <class T>
T bernoulli_variance(const T *q, Index n, Index i) {
  return q[i] * (q[i] > T(0.5) ? complement(q, n, i) : T(1) - q[i]);
}

constexpr double kMostExplained = 0.9;  // how much of the innovation's covariance the logits may claim

// s of (11.4). With M = diag(kappa) S diag(kappa) and J <= diag(q), the largest eigenvalue of J M is at most the
// largest of the sums over k of |M_ik| q_k. S has leading dimension ld.
template <class T>
T joint_moment_scale(const T *q, const T *kappa, const T *S, Index ld, Index n) {
  T largest = T(kMostExplained);
  for (Index i = 0; i < n; ++i) {
    const T *row = S + i * ld;
    T sum = T(0);
    for (Index k = 0; k < n; ++k) sum += kappa[k] * q[k] * std::fabs(row[k]);
    sum *= kappa[i];
    largest = sum > largest ? sum : largest;
  }
  return largest / T(kMostExplained);
}
// The same for uncorrelated logits with these variances, or with one.
template <class T>
T moment_scale(const T *q, const T *kappa, const T *var, bool one, Index n) {
  T largest = T(kMostExplained);
  for (Index i = 0; i < n; ++i) {
    const T share = kappa[i] * q[i] * std::fabs(var[one ? 0 : i]) * kappa[i];
    largest = share > largest ? share : largest;
  }
  return largest / T(kMostExplained);
}

}  // namespace kbt
