// apart.hpp - the measurement of a head whose outputs are independent: every output is measured alone, and rows are
// learned one after another. No array has more than rows x rows or rows x outputs numbers. method.md §10
#pragma once

#include "measurement.hpp"

namespace kbt {

// The variance of output i is unit_i c_i, and its noise unit_i kept_i. A shared factor has one c and one kept; its
// units are the noises, or 1.
template <class T>
struct Apart {
  Measurement<T> &m;
  Cov<T> c;  // of the rows; one for all outputs that share a factor
  bool shared;
  const T *units;  // null: 1
  const T *noise;  // one for each output; null: kept_all
  T kept_all;
  T weight;  // of the robust step

  T unit(Index i) const { return units != nullptr ? units[i] : T(1); }
  T kept(Index i) const { return (noise != nullptr ? noise[i] : kept_all) / weight; }
  T variance(Index a, Index b, Index i) const { return c.same(a, b, shared ? 0 : i); }

  // ---- gaussian ----------------------------------------------------------------------------------------------------

  // NIS and log density of all rows, jointly.
  void judge(const T *y) {
    m.innovate(y);
    m.floored = 0;
    m.nis = T(0);
    T logs = T(0);
    if (c.rows == 1) {
      for (Index i = 0; i < m.n; ++i) {
        const T root = std::sqrt(unit(i) * (variance(0, 0, i) + kept(i))), e = m.innovation[i] / root;
        m.nis += e * e;
        logs += log_positive(root);
      }
    } else {
      for (Index i = 0; i < m.n; ++i) {
        if (i == 0 || !shared) factorise(i);
        judge_output(i, logs);
      }
    }
    m.log_likelihood = T(-0.5) * m.nis - logs - T(0.9189385332046727) * T(c.rows * m.n);
  }

  // What the step of row a, the only one of c, does: B, r, and the share of the variance that it leaves.
  void gaussian_row(const T *y, const T *mean, const Adjoint<T> &adjoint) const {
    for (Index i = 0; i < m.n; ++i) {
      const T e = y[i] - mean[i], sum = variance(0, 0, i) + kept(i), root = std::sqrt(sum), inverse = T(1) / root;
      adjoint.r(0)[i] = inverse * (e / root);
      if (shared && i > 0) continue;
      adjoint.B(0, 0)[i] = inverse;
      adjoint.share[i] = kept(i) / root / root;
    }
    for (Index i = m.n; !shared && i < adjoint.stride; ++i) adjoint.share[i] = T(1);  // of lanes without an output
  }

  // ---- softmax -----------------------------------------------------------------------------------------------------

  // As if the rows were independent.
  void judge_labels(const T *y) {
    m.innovate(y);
    m.floored = 0;
    m.nis = T(0);
    for (Index a = 0; a < c.rows; ++a) {
      for (Index i = a * m.n; i < (a + 1) * m.n; ++i) {
        const T e = m.innovation[i] / std::sqrt(m.p[i]) / std::sqrt(m.scale[a]);
        m.nis += e * e;
      }
    }
    m.log_likelihood = m.log_probability(y);
  }

  // (11.3) of a prediction of one row. A shared factor takes the mean of the steps of all classes, (10.5).
  void label_row(const T *y, const Adjoint<T> &adjoint) const {
    const T s = *m.scale, root = T(1) / std::sqrt(s);
    T curvature = T(0);
    for (Index i = 0; i < m.n; ++i) {
      adjoint.r(0)[i] = m.kappa[i] * (y[i] - m.mean[i]) / s;
      const T own = bernoulli_variance(m.p, m.n, i);
      if (shared) {
        curvature += own;
      } else {
        adjoint.B(0, 0)[i] = m.kappa[i] * std::sqrt(own) * root;
      }
    }
    if (shared) *adjoint.B(0, 0) = *m.kappa * std::sqrt(curvature / T(m.n)) * root;
  }

  // Epistemic covariance of the probabilities of class i of row a and class k of row b, (11.5): J diag(x) J' with x the
  // covariances of the logits times their slopes. The sum over the other classes leaves out the likeliest one, which
  // would cancel the rest of it.
  struct Others {
    Index likeliest;
    T sum;
  };
  Others others(Index a, Index b) const {
    const T *const pa = m.p + a * m.n, *const pb = m.p + b * m.n;
    Others found{0, T(0)};
    for (Index j = 1; j < m.n; ++j) found.likeliest = pa[j] > pa[found.likeliest] ? j : found.likeliest;
    for (Index j = 0; j < m.n; ++j) found.sum += j == found.likeliest ? T(0) : pa[j] * pb[j] * slope_cov(a, b, j);
    return found;
  }
  T label_cov(Index a, Index i, Index b, Index k, const Others &rest) const {
    const T *const pa = m.p + a * m.n, *const pb = m.p + b * m.n;
    const auto both = [&](Index j) { return pa[j] * pb[j] * slope_cov(a, b, j); };
    const Index top = rest.likeliest;
    T sum = rest.sum - (i == top ? T(0) : both(i)) - (k == top || k == i ? T(0) : both(k));
    if (i != top && k != top) sum += both(top);
    const T not_i = not_class(pa, i), not_k = not_class(pb, k);
    if (i == k) return pa[i] * pb[i] * (not_i * not_k * slope_cov(a, b, i) + (a == b && sum < T(0) ? T(0) : sum));
    return pa[i] * pb[k] * (sum - not_i * pb[i] * slope_cov(a, b, i) - pa[k] * not_k * slope_cov(a, b, k));
  }

 private:
  // L of output i: rows x rows, in its units
  void factorise(Index i) const {
    const Index rows = c.rows;
    for (Index a = 0; a < rows; ++a) {
      for (Index b = 0; b <= a; ++b) m.L[a * rows + b] = variance(a, b, i) + (a == b ? kept(i) : T(0));
    }
    cholesky(m.L, rows, T(kNoiseFloor));
  }
  void judge_output(Index i, T &logs) const {
    T *const e = m.X;
    const T root = std::sqrt(unit(i));
    for (Index a = 0; a < c.rows; ++a) e[a] = m.innovation[a * m.n + i] / root;
    solve_lower(m.L, c.rows, e);
    m.nis += dot(e, e, c.rows);
    for (Index a = 0; a < c.rows; ++a) logs += log_positive(m.L[a * (c.rows + 1)]);
    logs += T(c.rows) * log_positive(root);
  }
  T not_class(const T *p, Index i) const { return p[i] > T(0.5) ? complement(p, m.n, i) : T(1) - p[i]; }
  T slope_cov(Index a, Index b, Index j) const {
    const T s = std::sqrt(m.scale[a]) * std::sqrt(m.scale[b]);
    return m.kappa[a * m.n + j] * m.kappa[b * m.n + j] * variance(a, b, j) / s;
  }
};

}  // namespace kbt
