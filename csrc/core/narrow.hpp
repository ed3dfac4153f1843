// narrow.hpp - the measurement of a gaussian head with more outputs than hidden units in front of them. Outputs are
// correlated through these units alone, so all that is solved has their number: method.md (10.2) to (10.4). One row.
#pragma once

#include "arena.hpp"
#include "dense.hpp"
#include "loops.hpp"
#include "moments.hpp"

namespace kbt {

template <class T>
struct Narrow {
  Index m, n, stride;       // units, outputs, and these padded
  T *traces;                // n: sum_pq S_o[p,q] C_pq
  T *own;                   // n: the variance that an output shares with no other
  T *roots, *errors, *row;  // n: 1 / sqrt(D), e / sqrt(D); scratch
  T *lambda, *share;        // n: -Lambda_oo, and what its step leaves of a variance
  T *O, *S;                 // m x stride: W^T D^-1/2 = F O, the rows of O orthonormal; L^-1 O
  T *F, *X, *L;             // m x m: X = C F, L L^T = I + F^T C F
  T *seen, *rho, *pull;     // m: O e / sqrt(D); L^-1 of it; r of the units
  T nis, log_density;

  KBT_SELDOM void plan(Index units, Index outputs, Index padded_outputs, Arena &arena) {
    m = units;
    n = outputs;
    stride = padded_outputs;
    for (T **x : {&traces, &own, &roots, &errors, &row, &lambda, &share}) *x = arena.take<T>(stride);
    for (T **x : {&O, &S}) *x = arena.take<T>(m * stride);
    for (T **x : {&F, &X, &L}) *x = arena.take<T>(m * m);
    for (T **x : {&seen, &rho, &pull}) *x = arena.take<T>(m);
  }

  // variance += w_o^T C w_o for every output
  void add_shared(const Loops<T> &loops, const T *W, const Cov<T> &C, T *variance) const {
    for (Index p = 0; p < m; ++p) {
      covary(loops, W, C, p);
      for (Index o = 0; o < n; ++o) variance[o] += W[p * stride + o] * row[o];
    }
  }
  // cov += weight times the epistemic covariance, n x n
  void add_cov(const Loops<T> &loops, const T *W, const Cov<T> &C, T weight, T *cov) const {
    for (Index p = 0; p < m; ++p) {
      covary(loops, W, C, p);
      for (Index o = 0; o < n; ++o) loops->axpy(cov + o * n, weight * W[p * stride + o], row, n);
    }
    for (Index o = 0; o < n; ++o) cov[o * n + o] += weight * own[o];
  }

  // What y tells, given the noise of each output. Leaves r, lambda and share of the outputs, and of the units pull,
  // their r, and the m columns of their B, which are b_stride apart.
  void measure(const Loops<T> &loops, const T *W, const Cov<T> &C, const T *mean, const T *y, const T *noise, T *r,
               T *B, Index b_stride) {
    T logs = scale(W, mean, y, noise);
    orthogonalise(loops);
    for (Index c = 0; c < m; ++c) seen[c] = rho[c] = dot(O + c * stride, errors, n);
    innovation(loops, C);
    for (Index c = 0; c < m; ++c) logs += log_positive(L[c * (m + 1)]);
    solve_lower(L, m, rho);
    for (Index c = 0; c < m; ++c) {  // B^T = L^-1 F^T
      T *const column = B + c * b_stride;
      fill(column, T(0), b_stride);
      for (Index p = c; p < m; ++p) column[p] = F[p * m + c];
    }
    solve_lower_rows(L, m, B, b_stride);
    fill(pull, T(0), m);
    for (Index c = 0; c < m; ++c) loops->axpy(pull, rho[c], B + c * b_stride, m);
    measure_outputs(loops, noise, r);
    log_density = T(-0.5) * nis - logs - T(0.9189385332046727) * T(n);
  }

 private:
  // row = Cov(z_p, u)
  void covary(const Loops<T> &loops, const T *W, const Cov<T> &C, Index p) const {
    fill(row, T(0), stride);
    for (Index q = C.dense ? 0 : p; q < (C.dense ? m : p + 1); ++q) {
      loops->axpy(row, C.data[C.dense ? p * m + q : p], W + q * stride, n);
    }
  }
  // O = W^T D^-1/2 at first. Returns the sum of log sqrt(D).
  T scale(const T *W, const T *mean, const T *y, const T *noise) {
    T logs = T(0);
    for (Index o = 0; o < n; ++o) {
      const T root = std::sqrt(own[o] + noise[o]);
      roots[o] = T(1) / root;
      errors[o] = (y[o] - mean[o]) / root;
      logs += log_positive(root);
    }
    for (Index p = 0; p < m; ++p) {
      for (Index o = 0; o < n; ++o) O[p * stride + o] = W[p * stride + o] * roots[o];
    }
    return logs;
  }
  // F O = O with F lower triangular and the new rows of O orthonormal: Gram-Schmidt, twice, which leaves them so to
  // rounding. A row without a direction of its own becomes zero.
  void orthogonalise(const Loops<T> &loops) {
    constexpr T kSmall = std::numeric_limits<T>::epsilon() * std::numeric_limits<T>::epsilon();
    fill(F, T(0), m * m);
    for (Index i = 0; i < m; ++i) {
      T *const x = O + i * stride;
      const T whole = dot(x, x, n);
      for (int pass = 0; pass < 2; ++pass) {
        for (Index k = 0; k < i; ++k) {
          const T part = dot(O + k * stride, x, n);
          F[i * m + k] += part;
          loops->axpy(x, -part, O + k * stride, n);
        }
      }
      const T left = dot(x, x, n), root = left > T(m) * kSmall * whole ? std::sqrt(left) : T(0);
      F[i * (m + 1)] = root;
      for (Index o = 0; o < n; ++o) x[o] = root > T(0) ? x[o] / root : T(0);
    }
  }
  // (10.3): L L^T = I + F^T C F
  void innovation(const Loops<T> &loops, const Cov<T> &C) {
    fill(X, T(0), m * m);
    for (Index p = 0; p < m; ++p) {
      for (Index q = C.dense ? 0 : p; q < (C.dense ? m : p + 1); ++q) {
        loops->axpy(X + p * m, C.data[C.dense ? p * m + q : p], F + q * m, q + 1);
      }
    }
    fill(L, T(0), m * m);
    for (Index p = 0; p < m; ++p) {
      for (Index i = 0; i <= p; ++i) loops->axpy(L + i * m, F[p * m + i], X + p * m, i + 1);
    }
    for (Index i = 0; i < m; ++i) L[i * (m + 1)] += T(1);
    cholesky(L, m, T(1));
  }
  // (10.4)
  void measure_outputs(const Loops<T> &loops, const T *noise, T *r) {
    for (Index i = 0; i < m * stride; ++i) S[i] = O[i];
    solve_lower_rows(L, m, S, stride);
    fill(lambda, T(0), stride);
    fill(share, T(0), stride);
    for (Index c = 0; c < m; ++c) {
      const T *const o_c = O + c * stride, *const s_c = S + c * stride;
      loops->axpy(errors, -seen[c], o_c, n);
      for (Index o = 0; o < n; ++o) {
        share[o] += o_c[o] * o_c[o];
        lambda[o] += s_c[o] * s_c[o];
      }
    }
    nis = dot(errors, errors, n) + dot(rho, rho, m);
    for (Index c = 0; c < m; ++c) loops->axpy(errors, rho[c], S + c * stride, n);
    for (Index o = 0; o < n; ++o) {
      const T inverse = roots[o] * roots[o], seen_by_units = share[o] < T(1) ? share[o] : T(1);
      const T told = seen_by_units > lambda[o] ? seen_by_units - lambda[o] : T(0);
      r[o] = errors[o] * roots[o];
      lambda[o] = (T(1) - told) * inverse;
      share[o] = (traces[o] + noise[o] + told * (own[o] - traces[o])) * inverse;
    }
    for (Index o = n; o < stride; ++o) share[o] = T(1);  // lanes without an output
  }
};

}  // namespace kbt
