// measurement.hpp - one observation seen from the output: innovation, likelihood, and the adjoint it sends back:
// method.md §3 and §11.
#pragma once

#include "moments.hpp"
#include "noise.hpp"
#include "settings.hpp"
#include "softmax.hpp"

namespace kbt {

constexpr double kSmoothing = 1e-7;  // multinomial: smallest probability an outcome is granted

// Everything here is over K = rows * d_o numbers, (row, output) with outputs innermost. All three kinds of observation
// are one linear-Gaussian problem, with a map G per row, an innovation and its noise:
//   gaussian              G = I,    innovation e,           noise R
//   softmax, constant     G = J^T,  innovation e,           noise R
//   softmax, multinomial  G = F,    innovation e / sqrt(q), noise I      (F F^T = J = R; see below)
//   G^T S_u G + noise = L L^T,   B = G L^-T,   r = B L^-1 innovation,   Lambda = -B B^T,
// and what the observation does not explain, N = I - B^T S_u B = L^-1 noise L^-T, has no cancellation.
//
// Multinomial noise is the limit of R = J + tiny I for tiny -> 0, taken in closed form. With a finite `tiny`, a
// confidently wrong prediction (p_target < tiny) would send back almost nothing; in the limit r = e as S_u -> 0. The
// probabilities are smoothed, q = (p + tau)/(1 + d_o tau), so that e / sqrt(q) stays bounded.
//
// The moment softmax puts diag(kappa) before G. With multinomial noise it says what the innovation's covariance is
// instead of what the noise is: s I in each row's own block, (11.3). One row then needs no factorisation.
template <class T>
struct Measurement {
  Index rows, n;  // n = d_o
  T *mean;        // K: E of the observation
  T *p;           // K: softmax at the mean, first order; moment softmax: the mean, smoothed
  T *map;         // rows x n x n: G, softmax only
  T *innovation;  // K
  T *L;           // K x K
  T *X;           // K x K: L^-1 G^T, whose transpose is B
  T *N;           // K x K
  T *vectors;     // K x K: eigenvectors, `replace` only
  T *signs;       // K
  bool moment;    // the moment softmax, method.md §11
  T *kappa;       // K: its slopes
  T *scale;       // rows: its s; 1 with constant noise
  T *share;       // stride: what a row's step leaves of a variance; only where outputs are apart
  T nis, log_likelihood;
  int floored;  // pivots of L; -1: L is rounding alone

  static Index square_count(Index rows, Index n) { return rows * n * rows * n; }

  // Moments of the observation from those of u: mean (rows x stride) and cov.
  KBT_INLINE void predict(const T *u, Index stride, const Cov<T> &cov, const kbt_config &cfg) {
    moment = moment_softmax(cfg);
    if (cfg.output == KBT_SOFTMAX)
      return moment ? predict_moments(u, stride, cov, cfg) : predict_taylor(u, stride, cov, cfg);
    for (Index a = 0; a < rows; ++a) {
      for (Index i = 0; i < n; ++i) mean[a * n + i] = u[a * stride + i];
    }
  }
  // (2.7), (2.8)
  KBT_SELDOM void predict_taylor(const T *u, Index stride, const Cov<T> &cov, const kbt_config &cfg) {
    for (Index a = 0; a < rows; ++a) {
      T *const pa = p + a * n, *const to = mean + a * n;
      softmax(u + a * stride, n, pa);
      if (cfg.softmax_order == 1) {
        for (Index i = 0; i < n; ++i) to[i] = pa[i];
      } else {
        softmax_second_order(pa, cov.row(a, 0) + a * n, rows * n, n, to);
      }
    }
  }

  // The same for the moment softmax, (11.1) and (11.4).
  void predict_moments(const T *u, Index stride, const Cov<T> &cov, const kbt_config &cfg) {
    for (Index a = 0; a < rows; ++a) {
      T *const ka = kappa + a * n, *const pa = p + a * n;
      const bool one = cov.n == 1;  // variance for all
      for (Index i = 0; i < n; ++i) {
        ka[i] = one && i > 0 ? *ka : moment_slope(cov.same(a, a, i));
        pa[i] = ka[i] * u[a * stride + i];
      }
      softmax(pa, n, mean + a * n);
      smooth(mean + a * n, n, T(kSmoothing), pa);
      scale[a] = T(1);
      if (!matches_moments(cfg)) continue;
      scale[a] = cov.dense ? joint_moment_scale(pa, ka, cov.row(a, 0) + a * n, rows * n, n)
                           : moment_scale(pa, ka, &cov.same(a, a, 0), one, n);
    }
  }

  // Epistemic covariance of a softmax, J S_u J^T or (11.5), K x K; or its diagonal alone. In scratch.
  KBT_SELDOM const T *softmax_cov(const T *cov) const {
    const Index K = rows * n;
    for (Index a = 0; a < rows; ++a) {
      for (Index b = 0; b <= a; ++b) {
        const SoftmaxBlock block = softmax_block(cov, a, b);
        for (Index i = 0; i < n; ++i) {
          for (Index k = 0; k < (a == b ? i + 1 : n); ++k) {
            L[(a * n + i) * K + b * n + k] = L[(b * n + k) * K + a * n + i] = block.at(i, k);
          }
        }
      }
    }
    return L;
  }
  KBT_SELDOM const T *softmax_var(const T *cov) const {
    for (Index a = 0; a < rows; ++a) {
      const SoftmaxBlock block = softmax_block(cov, a, a);
      for (Index i = 0; i < n; ++i) L[a * n + i] = block.at(i, i);
    }
    return L;
  }

  // `fuse`: a Kalman update. Writes r and B into `adjoint` (whose rank is K), and N where it is wanted.
  void fuse(const T *cov, const T *y, const Noise<T> &noise, int output, int noise_kind, bool want_N,
            const Adjoint<T> &adjoint) {
    const Index K = rows * n;
    const bool multinomial = noise_kind == KBT_NOISE_MULTINOMIAL;
    innovate(y);
    if (K == 1) return fuse_number(*cov, *noise.values, want_N, adjoint);
    const bool matched = moment && multinomial;
    if (matched && rows == 1) return fuse_moment_row(cov, y, want_N, adjoint);
    if (output == KBT_SOFTMAX) set_map(multinomial);
    if (output == KBT_SOFTMAX) {
      sandwich(cov, X, L);
    } else {
      for (Index i = 0; i < K * K; ++i) L[i] = cov[i];
    }
    if (matched && want_N) fill(N, T(0), K * K);
    for (Index a = 0; a < rows; ++a) {
      for (Index i = 0; i < n; ++i) {
        for (Index k = 0; k < n; ++k) {
          const Index at = (a * n + i) * K + a * n + k;
          if (matched) {
            const T whole = i == k ? scale[a] : T(0);
            if (want_N) N[at] = whole - L[at];
            L[at] = whole;
          } else {
            L[at] += multinomial ? T(i == k) : noise.at(i, k, n);
          }
        }
      }
    }
    floored = cholesky(L, K, matched ? T(1 - kMostExplained) / T(2) : multinomial ? T(1) : T(kNoiseFloor));

    // X = L^-1 G^T, then r = X^T L^-1 innovation
    for (Index i = 0; i < K * K; ++i) X[i] = T(0);
    for (Index a = 0; a < rows; ++a) {
      for (Index i = 0; i < n; ++i) {
        for (Index k = 0; k < n; ++k) {
          X[(a * n + i) * K + a * n + k] = output == KBT_SOFTMAX ? map[(a * n + k) * n + i] : T(i == k);
        }
      }
    }
    solve_lower_rows(L, K, X, K);
    solve_lower(L, K, innovation);
    nis = dot(innovation, innovation, K);
    log_likelihood = output == KBT_SOFTMAX ? log_probability(y) : log_density(K);
    for (Index k = 0; k < K; ++k) signs[k] = T(1);
    for (Index i = 0; i < K; ++i) {
      T r = T(0);
      for (Index k = 0; k < K; ++k) {
        adjoint.B(k, i / n)[i % n] = X[k * K + i];
        r += X[k * K + i] * innovation[k];
      }
      adjoint.r(i / n)[i % n] = r;
    }

    if (want_N) {
      whiten([&](Index i, Index k) {
        return matched ? N[k * K + i] : multinomial ? T(i == k) : noise_at(noise, i, k);
      });
    }
  }

  // One row of a moment softmax, method.md (11.3), in closed form.
  void fuse_moment_row(const T *cov, const T *y, bool want_N, const Adjoint<T> &adjoint) {
    const T s = *scale, root = T(1) / std::sqrt(s);
    floored = 0;
    for (Index i = 0; i < n; ++i) {
      adjoint.r(0)[i] = kappa[i] * innovation[i] / s;
      innovation[i] = innovation[i] / std::sqrt(p[i]) * root;
    }
    nis = dot(innovation, innovation, n);
    log_likelihood = log_probability(y);
    for (Index k = 0; k < adjoint.rank; ++k) signs[k] = T(1);
    softmax_root(p, n, map);
    scale_map(0, root);
    for (Index k = 0; k < n; ++k) {
      for (Index i = 0; i < n; ++i) adjoint.B(k, 0)[i] = map[i * n + k];
    }
    if (!want_N) return;
    sandwich(cov, X, N);
    for (Index i = 0; i < n; ++i) {
      for (Index k = 0; k < n; ++k) N[i * n + k] = T(i == k) - N[i * n + k];
    }
  }

  // The same where every matrix is a number: one row, one output, the common control loop.
  void fuse_number(T cov, T noise, bool want_N, const Adjoint<T> &adjoint) {
    const T sum = cov + noise, floor = T(kNoiseFloor);
    floored = !(sum >= floor);
    *L = std::sqrt(floored ? floor : sum);
    *X = T(1) / *L;
    *innovation /= *L;
    nis = *innovation * *innovation;
    log_likelihood = log_density(1);
    *signs = T(1);
    *adjoint.B(0, 0) = *X;
    *adjoint.r(0) = *X * *innovation;
    if (want_N) *N = noise / *L / *L;
  }

  // `replace`, the paper's rule: the output becomes y with covariance `noise`, Lambda = V (noise - S) V with V = S^-1.
  // In the basis where S = I and noise = diag(l), Lambda = diag(l - 1): variance shrinks where l < 1 and grows
  // elsewhere.
  KBT_SELDOM void replace(const T *cov, const T *y, const Noise<T> &noise, const Adjoint<T> &adjoint) {
    const Index K = rows * n;
    innovate(y);
    for (Index i = 0; i < K * K; ++i) L[i] = cov[i];
    for (Index i = 0; i < K; ++i) L[i * K + i] += T(kNoiseFloor);
    floored = cholesky(L, K, T(kNoiseFloor));
    whiten([&](Index i, Index k) { return noise_at(noise, i, k); });
    symmetric_eigen(N, vectors, K);

    for (Index i = 0; i < K * K; ++i) X[i] = T(0);
    for (Index i = 0; i < K; ++i) X[i * K + i] = T(1);
    solve_lower_rows(L, K, X, K);  // L^-1
    solve_lower(L, K, innovation);
    nis = dot(innovation, innovation, K);
    log_likelihood = log_density(K);
    for (Index i = 0; i < K; ++i) {  // r = L^-T L^-1 e
      T sum = T(0);
      for (Index k = i; k < K; ++k) sum += X[k * K + i] * innovation[k];
      adjoint.r(i / n)[i % n] = sum;
    }
    Index next = 0;
    for (const T sign : {T(1), T(-1)}) {  // measurements first
      for (Index e = 0; e < K; ++e) {
        const T l = N[e * K + e] > T(0) ? N[e * K + e] : T(0);
        if ((l < T(1)) != (sign > T(0))) continue;
        const T scale = std::sqrt(std::fabs(T(1) - l));
        for (Index i = 0; i < K; ++i) {  // column of L^-T times eigenvector
          T sum = T(0);
          for (Index k = i; k < K; ++k) sum += X[k * K + i] * vectors[k * K + e];
          adjoint.B(next, i / n)[i % n] = sum * scale;
        }
        signs[next] = sign;
        innovation[next] = sign * l;  // the innovation is spent: its place keeps the new diagonal of N
        ++next;
      }
    }
    for (Index i = 0; i < K * K; ++i) N[i] = T(0);
    for (Index i = 0; i < K; ++i) N[i * K + i] = innovation[i];
  }

  // N <- Q = N + B^T other_cov B: the noise of a measurement of the last layer's weights alone, when `other_cov` (K x
  // K) is the part of S_u that does not come from them. A sum of positive terms where I - B^T A S A^T B would cancel.
  void add_other_cov(const T *other_cov, const Adjoint<T> &adjoint, T *scratch) {
    const Index K = rows * n;
    if (K == 1) return add_other_number(*other_cov, *adjoint.B(0, 0));
    for (Index k = 0; k < K; ++k) {
      for (Index i = 0; i < K; ++i) scratch[i] = adjoint.B(k, i / n)[i % n];
      for (Index i = 0; i < K; ++i) scratch[K + i] = dot(other_cov + i * K, scratch, K);
      for (Index l = 0; l < K; ++l) {
        T sum = T(0);
        for (Index i = 0; i < K; ++i) sum += adjoint.B(l, i / n)[i % n] * scratch[K + i];
        N[l * K + k] += sum;
      }
    }
  }

  void add_other_number(T other_cov, T b) { *N += b * (other_cov * b); }

  void innovate(const T *y) {
    for (Index i = 0; i < rows * n; ++i) innovation[i] = y[i] - mean[i];
  }
  T log_probability(const T *y) const {
    T sum = T(0);
    for (Index i = 0; i < rows * n; ++i) sum += y[i] * log_positive(mean[i] > T(1e-30) ? mean[i] : T(1e-30));
    return sum;
  }

 private:
  // Rows of J sum to zero, so only differences of logits count. D is S_u, times the slopes, of the differences from the
  // likeliest class of each row: nothing cancels where one class is nearly certain, or where all move together.
  struct SoftmaxBlock {
    Index n;
    const T *q_a, *q_b, *D, *left, *right;  // left = D q_b, right = D^T q_a
    T whole;                                // q_a^T D q_b
    T at(Index i, Index k) const { return q_a[i] * q_b[k] * (D[i * n + k] - left[i] - right[k] + whole); }
  };
  __attribute__((noinline)) SoftmaxBlock softmax_block(const T *cov, Index a, Index b) const {
    const T *const q_a = p + a * n, *const q_b = p + b * n;
    const Index top_a = likeliest(q_a), top_b = likeliest(q_b);
    T *const D = map, *const left = X, *const right = a == b ? left : X + n;
    for (Index i = 0; i < n; ++i) {
      VectorView<T> row = array(D + i * n, n);
      row = constant_view<T>(cov + (a * n + i) * rows * n + b * n, n);
      if (moment) row *= constant_view<T>(kappa + b * n, n);
      row -= T(row[top_b]);
      if (moment) row *= kappa[a * n + i] / (std::sqrt(scale[a]) * std::sqrt(scale[b]));
    }
    for (Index i = 0; i < n; ++i) {
      if (i != top_a) axpy(D + i * n, T(-1), D + top_a * n, n);
    }
    fill(D + top_a * n, T(0), n);
    if (a != b) fill(right, T(0), n);
    T whole = T(0);
    for (Index i = 0; i < n; ++i) {
      left[i] = dot(D + i * n, q_b, n);
      whole += q_a[i] * left[i];
      if (a != b) axpy(right, q_a[i], D + i * n, n);
    }
    return {n, q_a, q_b, D, left, right, whole};
  }
  Index likeliest(const T *q) const {
    Index best = 0;
    for (Index i = 1; i < n; ++i) best = q[i] > q[best] ? i : best;
    return best;
  }

  void set_map(bool multinomial) {
    for (Index a = 0; a < rows; ++a) {
      const T *pa = p + a * n;
      T *G = map + a * n * n, *q = X;  // X is free until the solve
      if (!multinomial) {
        softmax_jacobian(pa, n, G);
        if (moment) scale_map(a, T(1));
        continue;
      }
      smooth(pa, n, moment ? T(0) : T(kSmoothing), q);
      softmax_root(q, n, G);
      if (moment) scale_map(a, T(1));
      for (Index i = 0; i < n; ++i) innovation[a * n + i] /= std::sqrt(q[i]);
    }
  }

  // G of row a <- factor diag(kappa) G
  void scale_map(Index a, T factor) const {
    for (Index i = a * n; i < (a + 1) * n; ++i) array(map + i * n, n) *= kappa[i] * factor;
  }

  // out = G^T cov G, block by block.
  void sandwich(const T *cov, T *scratch, T *out) const {
    const Index K = rows * n;
    for (Index i = 0; i < K; ++i) {  // scratch = cov G
      for (Index b = 0; b < rows; ++b) {
        T *to = scratch + i * K + b * n;
        fill(to, T(0), n);
        for (Index k = 0; k < n; ++k) axpy(to, cov[i * K + b * n + k], map + (b * n + k) * n, n);
      }
    }
    for (Index i = 0; i < K * K; ++i) out[i] = T(0);
    for (Index a = 0; a < rows; ++a) {
      for (Index k = 0; k < n; ++k) {
        for (Index i = 0; i < n; ++i) {
          axpy(out + (a * n + i) * K, map[(a * n + k) * n + i], scratch + (a * n + k) * K, K);
        }
      }
    }
  }

  T noise_at(const Noise<T> &noise, Index i, Index k) const {  // block diagonal over rows
    return i / n == k / n ? noise.at(i % n, k % n, n) : T(0);
  }

  // N = L^-1 A L^-T for a symmetric A given by its entries.
  template <class Entry>
  void whiten(Entry entry) {
    const Index K = rows * n;
    for (Index k = 0; k < K; ++k) {
      for (Index i = 0; i < K; ++i) N[k * K + i] = entry(i, k);
      solve_lower(L, K, N + k * K);
    }
    for (Index i = 0; i < K; ++i) {
      for (Index k = 0; k < i; ++k) {
        const T x = N[i * K + k];
        N[i * K + k] = N[k * K + i];
        N[k * K + i] = x;
      }
    }
    for (Index k = 0; k < K; ++k) solve_lower(L, K, N + k * K);
  }

  T log_density(Index K) const {  // log N(e; 0, L L^T)
    T sum = T(0);
    for (Index i = 0; i < K; ++i) sum += log_positive(L[i * K + i]);
    return T(-0.5) * nis - sum - T(0.9189385332046727) * T(K);
  }
};

}  // namespace kbt
