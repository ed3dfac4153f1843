// posterior.hpp - the weights of one layer: means, and UD factors of their covariance (METHOD section 5).
//
// S = U D U^T with U unit upper triangular. Every change of S is a rank-one step on the factors that can only multiply
// an entry of D by a positive number, so no rounding makes S indefinite. float32 is enough for ever.
#pragma once

#include <limits>
#include <type_traits>

#include "gaussian.hpp"
#include "kbt.h"
#include "matrix.hpp"

namespace kbt {

// Covariance of a layer's pre-activations or activations over (row a, neuron j). Either dense, or, where different
// neurons are known to be uncorrelated, only the rows x rows block of each neuron, neurons innermost.
template <class T>
struct Cov {
  T *data;
  bool dense;
  Index rows, n, stride;  // stride: n padded to whole lanes where the layer is wide enough

  static Index count(bool dense, Index rows, Index n, Index stride) {
    return dense ? rows * n * rows * n : rows * rows * stride;
  }
  T *row(Index a, Index j) const { return data + (a * n + j) * rows * n; }  // dense only
  T &same(Index a, Index b, Index j) const {                                // Cov(u_aj, u_bj)
    return dense ? row(a, j)[b * n + j] : data[(a * rows + b) * stride + j];
  }
};

// The adjoint of one layer's pre-activations (METHOD section 4): r and the columns of B with Lambda = -B diag(sign)
// B^T. Column 0 is r. Each column is rows x stride, neurons innermost.
template <class T>
struct Adjoint {
  T *data;
  const T *signs;  // +1: a measurement, variance shrinks; -1: variance grows. The measurements come first.
  const T *rho;    // r = B rho; null under `replace`, where r may leave the range of B
  Index rank, rows, stride;

  T *r(Index a) const { return data + a * stride; }
  T *B(Index k, Index a) const { return data + ((k + 1) * rows + a) * stride; }
};

// Smallest share of a variance that one step may leave: below it only rounding speaks.
template <class T>
constexpr T smallest_share() {
  return std::numeric_limits<T>::epsilon();
}

// UD factors of W symmetric M x M matrices. All the time goes into passes over U, so U lies the way its lanes run:
//   W = kLanes  eight neurons side by side, lane = neuron. Rows of U one after another, so that what a pass sums up
//   along a
//               row stays in registers.
//   W = 1       one matrix alone, lane = row of U. Columns one after another, each padded to whole lanes.
// Either way every sum is taken in the order of the source, whatever the vector width of the machine.
template <class T, Index W>
struct Factors {
  static_assert(W == 1 || W == kLanes, "a factor stands alone or in a full set of lanes");
  static constexpr Index kWidth = W;
  using Value = std::conditional_t<W == 1, T, Lanes<T>>;

  Index M;
  T *d;  // vector_count(M)
  T *u;  // W = kLanes: rows p of entries q > p, 8 numbers each. W = 1: columns q of padded(q) numbers.

  static Index u_count(Index M) { return W == 1 ? column_offset(M) : M * (M - 1) / 2 * W; }
  static Index column_offset(Index q) {  // W = 1: columns 1..8 take 8 numbers, 9..16 take 16, ...
    const Index full = (q - 1) / kLanes, rest = (q - 1) % kLanes;
    return q < 2 ? 0 : kLanes * (kLanes * full * (full + 1) / 2 + rest * (full + 1));
  }
  T *entry(Index p, Index q) const {  // U_pq, p < q
    return W == 1 ? u + column_offset(q) + p : u + (p * (2 * M - p - 1) / 2 + q - p - 1) * W;
  }
  // Length of a vector over the rows of U, in numbers. What pads it is zero.
  static constexpr Index vector_count(Index M) { return W == 1 ? padded(M) : M * W; }

  static decltype(auto) at(T *x, Index i) {
    if constexpr (W == 1) {
      return (x[i]);
    } else {
      return lanes(x + i * W);
    }
  }
  static decltype(auto) at(const T *x, Index i) {
    if constexpr (W == 1) {
      return (x[i]);
    } else {
      return lanes(x + i * W);
    }
  }
  static Value constant(T x) {
    if constexpr (W == 1) {
      return x;
    } else {
      return Lanes<T>::Constant(x);
    }
  }
  static Value at_least(const Value &x, T floor, int &floored) {
    if constexpr (W == 1) {
      const bool low = !(x >= floor);
      floored += low;
      return low ? floor : x;
    } else {
      Lanes<T> y = x.max(Lanes<T>::Constant(floor));
      if (sum_of(Lanes<T>(y - x)) == T(0)) return y;
      for (Index l = 0; l < W; ++l) {
        const bool low = !(x[l] >= floor);
        floored += low;
        y[l] = low ? floor : x[l];
      }
      return y;
    }
  }

  // f = U^T z for one matrix alone; z is padded to whole lanes.
  void project(const T *z, T *f) const {
    static_assert(W == 1, "sets of lanes are projected by project_rows");
    const T *column = u;
    f[0] = z[0];
    for (Index q = 1; q < M;) {  // columns of one length, four at a time
      const Index length = padded(q), end = length < M - 1 ? length + 1 : M;
      for (; kVectors && q + 4 <= end; q += 4, column += 4 * length) {
        using Four = Eigen::Array<T, 4, 1>;
        Four sums;
        four_dots(z, column, column + length, column + 2 * length, column + 3 * length, length, sums.data());
        Eigen::Map<Four>(f + q) = sums + Eigen::Map<const Four>(z + q);
      }
      for (; q < end; ++q, column += length) f[q] = dot(z, column, length) + z[q];
    }
  }

  // The same for P sets of lanes with one z. Four rows of U share each f_q, and the sets share z.
  template <int P>
  static void project_rows(T *const *u, Index M, const T *z, T *const *f) {
    const T *row[P];
    T *to[P];
    for (int j = 0; j < P; ++j) {
      row[j] = u[j];
      to[j] = f[j];
    }
    for (Index i = 0; i < M * W; i += W, ++z) {
      const Lanes<T> zq = Lanes<T>::Constant(*z);
      for (int j = 0; j < P; ++j) lanes(to[j] + i) = zq;
    }
    z -= M;
    Index p = 0;
    for (; kVectors && p + 4 < M; p += 4) {
      const Index count = (M - p - 4) * W;
      const Lanes<T> z0 = Lanes<T>::Constant(z[p]), z1 = Lanes<T>::Constant(z[p + 1]);
      const Lanes<T> z2 = Lanes<T>::Constant(z[p + 2]), z3 = Lanes<T>::Constant(z[p + 3]);
      KBT_UNROLL_ALL
      for (int j = 0; j < P; ++j) {
        const T *const r0 = row[j] + 3 * W, *const r1 = r0 + count + 2 * W;
        const T *const r2 = r1 + count + W, *const r3 = r2 + count;
        T *const t = to[j] + 4 * W;
        lanes(t - 3 * W) += lanes(r0 - 3 * W) * z0;
        lanes(t - 2 * W) = (lanes(t - 2 * W) + lanes(r0 - 2 * W) * z0) + lanes(r1 - 2 * W) * z1;
        lanes(t - W) = ((lanes(t - W) + lanes(r0 - W) * z0) + lanes(r1 - W) * z1) + lanes(r2 - W) * z2;
        KBT_UNROLL
        for (Index i = 0; i < count; i += W) {
          const Lanes<T> two = (lanes(t + i) + lanes(r0 + i) * z0) + lanes(r1 + i) * z1;
          lanes(t + i) = (two + lanes(r2 + i) * z2) + lanes(r3 + i) * z3;
        }
        row[j] = r3 + count;
        to[j] = t;
      }
    }
    for (; p < M; ++p) {
      for (int j = 0; j < P; ++j) {
        to[j] += W;
        for (Index i = 0; i < (M - p - 1) * W; i += W, row[j] += W) lanes(to[j] + i) += lanes(row[j]) * z[p];
      }
    }
  }

  // f^T D g
  Value weighted(const T *f, const T *g) const {
    const Index count = vector_count(M);
    Lanes<T> sum = Lanes<T>::Zero();
    KBT_UNROLL
    for (Index i = 0; i < count; i += kLanes) sum += lanes(f + i) * lanes(d + i) * lanes(g + i);
    if constexpr (W == 1) {
      return sum_of(sum);
    } else {
      return sum;
    }
  }

  // b = U D f, which is S a for f = U^T a.
  void gain(const T *f, T *b) const {
    if constexpr (W == 1) {
      fill(b, T(0), vector_count(M));
      const T *column = u;
      for (Index q = 0; q < M; column += padded(q), ++q) {
        const T v = d[q] * f[q];
        for (Index i = 0; i < q; i += kLanes) lanes(b + i) += lanes(column + i) * v;
        b[q] += v;
      }
    } else {
      const T *row = u;
      for (Index p = 0; p < M; ++p) {
        Lanes<T> sum = lanes(d + p * W) * lanes(f + p * W);
        for (Index q = p + 1; q < M; ++q, row += W) sum += lanes(row) * (lanes(d + q * W) * lanes(f + q * W));
        lanes(b + p * W) = sum;
      }
    }
  }

  // sum_p S_pp c_p over the first `count` weights, for a c shared by all lanes. `scratch`: vector_count(M).
  Value diagonal_times(const T *c, Index count, T *scratch) const {
    if constexpr (W == 1) {
      for (Index i = 0; i < M; i += kLanes) lanes(scratch + i) = lanes(d + i);
      const T *column = u;
      for (Index q = 1; q < M;) {  // columns of one length, four at a time
        const Index length = padded(q), end = length < M - 1 ? length + 1 : M;
        for (; kVectors && q + 4 <= end; q += 4, column += 4 * length) {
          const Lanes<T> d0 = Lanes<T>::Constant(d[q]), d1 = Lanes<T>::Constant(d[q + 1]);
          const Lanes<T> d2 = Lanes<T>::Constant(d[q + 2]), d3 = Lanes<T>::Constant(d[q + 3]);
          const T *const c1 = column + length, *const c2 = c1 + length, *const c3 = c2 + length;
          for (Index i = 0; i < length; i += kLanes) {
            const Lanes<T> u0 = lanes(column + i), u1 = lanes(c1 + i), u2 = lanes(c2 + i), u3 = lanes(c3 + i);
            const Lanes<T> two = (lanes(scratch + i) + u0 * u0 * d0) + u1 * u1 * d1;
            lanes(scratch + i) = (two + u2 * u2 * d2) + u3 * u3 * d3;
          }
        }
        for (; q < end; ++q, column += length) {
          for (Index i = 0; i < length; i += kLanes) {
            lanes(scratch + i) += lanes(column + i) * lanes(column + i) * d[q];
          }
        }
      }
      return dot(scratch, c, count);
    } else {
      Value sum = constant(T(0));
      const T *row = u;
      for (Index p = 0; p < count; ++p) {  // sum_p c_p (D_p + sum_q U_pq^2 D_q)
        Lanes<T> inner = lanes(d + p * W);
        for (Index q = p + 1; q < M; ++q, row += W) inner += lanes(row) * lanes(row) * lanes(d + q * W);
        sum += inner * c[p];
      }
      return sum;
    }
  }

  // Scratch of one rank-one step: vectors over the rows of U, and one number more for alpha. W = 1: v and k one after
  // the other. Else they alternate, so that the pass runs along one array; with P sets, all v and all k of a row do.
  struct Step {
    T *b, *v, *k, *alpha;
    Index apart;  // from v_q to v_q+1, and from k_q to k_q+1
  };
  static constexpr Index step_count(Index M, Index sets = 1) { return (2 + 2 * sets) * vector_count(M) + kLanes; }
  Step step_in(T *memory, Index set = 0, Index sets = 1) const {
    const Index each = vector_count(M);
    T *const runs = memory + each, *const alpha = runs + 2 * sets * each;
    if (W == 1) return {memory, runs, runs + each, alpha, 1};
    return {memory, runs + set * W, runs + (sets + set) * W, alpha, 2 * sets * W};
  }

  // Leaves out, by f = 0 and alpha_0 = 1, the steps that rounding has made: alpha_M is 1 in exact arithmetic, and
  // theirs is far from it. Numbers that differ by more orders of magnitude than T has digits do that.
  Value keep_steps(T *f, T lambda, Value alpha_0, int &left_out) const {
    const Value variance = weighted(f, f);
    const auto keep = [&](T x, T &alpha, Index lane) {
      if (std::fabs(alpha + lambda * x) - T(0.5) * x <= T(4)) return;
      for (Index q = 0; q < M; ++q) f[q * W + lane] = T(0);
      alpha = T(1);
      ++left_out;
    };
    if constexpr (W == 1) {
      keep(variance, alpha_0, 0);
    } else {
      for (Index l = 0; l < W; ++l) keep(variance[l], alpha_0[l], l);
    }
    return alpha_0;
  }

  // S <- S - (lambda / alpha_M) (S a)(S a)^T for f = U^T a, where alpha_0 is what the step leaves of the variance of
  // a^T w, as a share: alpha_0 = 1 - lambda a^T S a, alpha_M = alpha_0 + lambda a^T S a = 1. On return step.b = S a
  // with the old S.
  //
  // lambda > 0 is Bierman's measurement update. lambda < 0 adds variance; it is Agee and Turner's rank-one addition
  // written in the same recursion, with alpha_q = 1 - lambda sum_{i>q} f_i v_i summed from the far end, so that again
  // only positive terms are added.
  void rank_one(const T *f, const Value &lambda, const Value &alpha_0, bool may_grow, const Step &step) {
    scale(f, lambda, alpha_0, may_grow, step);
    if constexpr (W == 1) {
      pass_by_columns(step.b, step.v, step.k);
    } else {
      pass_by_rows<1>(&u, step.v, M, [&](Index, Index p, const Lanes<T> &b) { lanes(step.b + p * W) = b; });
    }
  }

  // Its first half: v = D f, k_q = -lambda f_q / alpha_{q-1}, D_q <- D_q alpha_{q-1} / alpha_q.
  void scale(const T *f, const Value &lambda, const Value &alpha_0, bool may_grow, const Step &step) {
    if (may_grow) {
      scale_with_growth(f, lambda, alpha_0, step);
    } else {
      scale_down(f, lambda, alpha_0, step);
    }
  }

  // The second half of rank_one, for P sets of lanes at once, because one alone would wait for its own sum b_p. For
  // each q the v of all sets and then the k of all sets lie in one run.
  //   U_pq <- U_pq + k_q b_p,  b_p <- b_p + (old U_pq) v_q  for q = p+1, p+2, ..., starting from b_p = v_p.
  // done(set, p, b_p) takes (S a)_p.
  template <int P, class Done>
  static void pass_by_rows(T *const *u, const T *v, Index M, Done done) {
    constexpr Index kRun = 2 * P * W;
    T *row[P];
    for (int j = 0; j < P; ++j) row[j] = u[j];
    for (Index p = 0; p < M; ++p) {
      Lanes<T> b[P];
      for (int j = 0; j < P; ++j) b[j] = lanes(v + j * W);
      v += kRun;
      const T *vq = v;
      const Index count = (M - p - 1) * W;
      KBT_UNROLL
      for (Index i = 0; i < count; i += W, vq += kRun) {
        KBT_UNROLL_ALL
        for (int j = 0; j < P; ++j) {
          const Lanes<T> old = lanes(row[j] + i);
          lanes(row[j] + i) = lanes(vq + (P + j) * W) * b[j] + old;
          b[j] += old * lanes(vq + j * W);
        }
      }
      for (int j = 0; j < P; ++j) {
        row[j] += count;
        done(j, p, b[j]);
      }
    }
  }

  // f' = U'^T a after a rank-one step, for any other a: U changed by k_q b^(q-1) in column q.
  void advance(T *f, const Step &step) const {
    Value sum = constant(T(0));
    for (Index q = 0; q < M; ++q) {
      const Value old = at(f, q);
      at(f, q) = old + at(step.k + q * step.apart, 0) * sum;
      sum += at(step.v + q * step.apart, 0) * old;
    }
  }

  // D <- min(D / forgetting, max(D, prior)): METHOD section 5.
  void forget(T forgetting, T prior) {
    for (Index i = 0; i < M * W; ++i) {
      const T limit = d[i] > prior ? d[i] : prior, raised = d[i] / forgetting;
      d[i] = raised < limit ? raised : limit;
    }
  }

 private:
  // As pass_by_rows, for eight columns at a time. The rows above them stand in whole lanes, which keep their b in
  // registers; the last eight rows join one by one.
  void pass_by_columns(T *b, const T *v, const T *k) {
    constexpr int kMany = kVectorBytes / 4;  // sets of lanes in half of the registers
    T *column = u;
    Index first = 0;
    for (; first + 1 < M; first += kLanes) {
      const Index length = first + kLanes, count = M - first - 1 < kLanes ? M - first - 1 : kLanes;
      const T *const vq = v + first + 1, *const kq = k + first + 1;
      Index i = 0;
      for (; kVectors && i + kMany * kLanes <= first; i += kMany * kLanes) {
        rectangle_pass<kMany>(column + i, length, count, vq, kq, b + i);
      }
      for (; kVectors && i + 2 * kLanes <= first; i += 2 * kLanes) {
        rectangle_pass<2>(column + i, length, count, vq, kq, b + i);
      }
      for (; i < first; i += kLanes) rectangle_pass<1>(column + i, length, count, vq, kq, b + i);
      triangle_pass(column + first, length, count, v + first, k + first, b + first);
      column += count * length;
    }
    if (first < M) b[first] = v[first];  // the last row has no column behind it
  }

  template <int P>
  static void rectangle_pass(T *column, Index length, Index count, const T *v, const T *k, T *b) {
    Lanes<T> sum[P];
    for (int j = 0; j < P; ++j) sum[j] = lanes(b + j * kLanes);
    for (Index c = 0; c < count; ++c, column += length) {
      const Lanes<T> vc = Lanes<T>::Constant(v[c]), kc = Lanes<T>::Constant(k[c]);
      KBT_UNROLL_ALL
      for (int j = 0; j < P; ++j) {
        const Lanes<T> old = lanes(column + j * kLanes);
        lanes(column + j * kLanes) = kc * sum[j] + old;
        sum[j] += old * vc;
      }
    }
    for (int j = 0; j < P; ++j) lanes(b + j * kLanes) = sum[j];
  }

  // Row p starts with b_p = v_p and takes part from column p + 1 on. Columns count from 1 here. What pads a column is
  // zero and stays zero.
  static void triangle_pass(T *column, Index length, Index count, const T *v, const T *k, T *b) {
    if constexpr (kVectors) {
      triangle_vectors<Vector<T>>(column, length, count, v, k, b);
    } else {
      for (Index p = 0; p < kLanes; ++p) b[p] = v[p];
      for (Index c = 1; c <= count; ++c, column += length) {
        for (Index p = 0; p < c; ++p) {
          const T old = column[p];
          column[p] = k[c] * b[p] + old;
          b[p] += old * v[c];
        }
      }
    }
  }
  template <class V>
  static KBT_INLINE void triangle_vectors(T *column, Index length, Index count, const T *v, const T *k, T *b) {
    constexpr int kStep = sizeof(V) / sizeof(T), kParts = kLanes / kStep;
    V sum[kParts];
    IntOf<V> row[kParts];
    std::memcpy(sum, v, sizeof sum);
    for (int l = 0; l < kLanes; ++l) row[l / kStep][l % kStep] = l;
    for (Index c = 1; c <= count; ++c, column += length) {
      for (int j = 0; j < kParts; ++j) {
        V old;
        std::memcpy(&old, column + j * kStep, sizeof old);
        const V now = (row[j] < static_cast<int>(c) ? sum[j] : V{}) * k[c] + old;
        sum[j] = row[j] < static_cast<int>(c) ? sum[j] + old * v[c] : sum[j];
        std::memcpy(column + j * kStep, &now, sizeof now);
      }
    }
    std::memcpy(b, sum, sizeof sum);
  }

  void scale_down(const T *f, const Value &lambda, const Value &alpha_0, const Step &step) {
    T *v = step.v, *k = step.k, *const diagonal = d;
    if constexpr (W == 1) {
      T *const alpha = step.alpha;
      T *const loss = step.b;  // alpha_{q-1} - alpha_q
      const Index count = padded(M);
      for (Index i = 0; i < count; i += kLanes) {
        const Lanes<T> lf = lanes(f + i) * -lambda, vi = lanes(diagonal + i) * lanes(f + i);
        lanes(v + i) = vi;
        lanes(k + i) = lf;
        lanes(loss + i) = lf * vi;
      }
      T before = alpha_0;
      Index q = 0;
      for (; kVectors && q + kLanes <= M; q += kLanes) {
        KBT_UNROLL_ALL
        for (Index l = 0; l < kLanes; ++l) {
          alpha[q + l] = before;
          before -= loss[q + l];
        }
      }
      for (; q < M; ++q) {
        alpha[q] = before;
        before -= loss[q];
      }
      fill(alpha + q, before, count + 1 - q);
      for (Index i = 0; i < count; i += kLanes) {
        const Lanes<T> here = lanes(alpha + i), next = Eigen::Map<const Lanes<T>>(alpha + i + 1);
        lanes(k + i) *= T(1) / here;
        lanes(diagonal + i) *= here / next;
      }
    } else {
      Value before = alpha_0, inverse = T(1) / alpha_0;
      const Value minus_lambda = -lambda;
      const Index end = M * W;
      for (Index i = 0; i < end; i += W, v += step.apart, k += step.apart) {
        const Value fi = lanes(f + i), di = lanes(diagonal + i), vi = di * fi, lf = minus_lambda * fi;
        const Value after = before - lf * vi;
        lanes(v) = vi;
        lanes(k) = lf * inverse;
        inverse = T(1) / after;
        lanes(diagonal + i) = di * (before / after);  // not before * inverse: over 10^6 steps that rounding adds up
        before = after;
      }
    }
  }

  // The same where lambda may be negative in some lanes.
  __attribute__((noinline)) void scale_with_growth(const T *f, const Value &lambda, const Value &alpha_0,
                                                   const Step &step) {
    const auto v = [&](Index q) -> decltype(auto) { return at(step.v + q * step.apart, 0); };
    const auto k = [&](Index q) -> decltype(auto) { return at(step.k + q * step.apart, 0); };
    at(step.alpha, 0) = alpha_0;
    for (Index q = 0; q < M; ++q) {
      v(q) = at(d, q) * at(f, q);
      at(step.alpha, q + 1) = at(step.alpha, q) + lambda * at(f, q) * v(q);
    }
    Value rest = constant(T(0));
    for (Index q = M; q >= 0; --q) {
      const Value grown = T(1) - lambda * rest;
      if constexpr (W == 1) {
        if (lambda < T(0)) step.alpha[q] = grown;
      } else {
        lanes(step.alpha + q * W) = (lambda < T(0)).select(grown, lanes(step.alpha + q * W));
      }
      if (q > 0) rest += at(f, q - 1) * v(q - 1);
    }
    for (Index q = 0; q < M; ++q) {
      k(q) = -lambda * at(f, q) / at(step.alpha, q);
      at(d, q) *= at(step.alpha, q) / at(step.alpha, q + 1);
    }
  }
};

// The weights of one layer: n neurons with m inputs and a bias. A group is a set of neurons whose weights are
// correlated: all of them (`full`), or each alone (`neuron`), eight of those abreast where there are enough.
template <class T>
struct Posterior {
  Index n, M1, stride;  // M1 = m + 1 inputs with the bias last; stride: n, padded to lanes from 8 neurons on
  Index z_stride;       // M1 padded to whole lanes: how far the rows of the input lie apart
  int structure;        // KBT_FULL, KBT_NEURON, KBT_DIAGONAL
  bool abreast;         // neuron, n >= 8: lanes are neurons
  T prior_var;
  T *mean;  // M1 x stride, neurons innermost
  T *d;     // abreast: blocks x M1 x 8; full, neuron: groups x padded(M); diagonal: M1 x stride
  T *u;     // abreast: blocks x u_count; full, neuron: groups x u_count; diagonal: none

  using Wide = Factors<T, kLanes>;
  using Alone = Factors<T, 1>;

  void shape(Index inputs, Index neurons, int covariance, T prior) {
    n = neurons;
    M1 = inputs + 1;
    structure = covariance;
    abreast = covariance == KBT_NEURON && n >= kLanes;
    stride = n >= kLanes ? padded(n) : n;
    z_stride = padded(M1);
    prior_var = prior;
  }

  Index members() const { return structure == KBT_FULL ? n : 1; }  // neurons in a group
  Index groups() const { return abreast ? stride / kLanes : (structure == KBT_FULL ? 1 : n); }
  Index M() const { return members() * M1; }  // weights in a group
  Index width() const { return abreast ? kLanes : 1; }
  Index mean_count() const { return M1 * stride; }
  Index length() const { return abreast ? Wide::vector_count(M1) : Alone::vector_count(M()); }  // of a vector over U
  Index d_count() const { return structure == KBT_DIAGONAL ? M1 * stride : groups() * length(); }
  __attribute__((noinline)) Index u_count() const {  // asked for seldom, and long
    if (structure == KBT_DIAGONAL) return 0;
    return groups() * (abreast ? Wide::u_count(M1) : Alone::u_count(M()));
  }
  // Projections F = U^T z of every row, kept from the forward pass for the update.
  Index projection_count(Index rows) const {
    if (structure == KBT_DIAGONAL) return 0;
    return groups() * rows * members() * length() + (abreast ? 0 : length());  // alone: one spare row behind
  }

  Wide wide(Index block) const { return Wide{M1, d + block * M1 * kLanes, u + block * Wide::u_count(M1)}; }
  Alone alone(Index group) const { return Alone{M(), d + group * length(), u + group * Alone::u_count(M())}; }

  // D and U entries by neuron and input, for whoever reads or writes the state.
  T &D(Index group, Index p) const {
    if (structure == KBT_DIAGONAL) return d[p * stride + group];
    if (abreast) return wide(group / kLanes).d[p * kLanes + group % kLanes];
    return alone(group).d[p];
  }
  T &U(Index group, Index p, Index q) const {  // p < q
    if (abreast) return wide(group / kLanes).entry(p, q)[group % kLanes];
    return *alone(group).entry(p, q);
  }
  Index matrices() const { return structure == KBT_FULL ? 1 : n; }  // as D and U count groups

  struct Range {
    T smallest, largest;
  };
  __attribute__((noinline, cold)) Range range_of_D() const {  // for checks and diagnostics: one small copy will do
    Range range{D(0, 0), D(0, 0)};
    for (Index g = 0; g < matrices(); ++g) {
      for (Index p = 0; p < M(); ++p) {
        const T x = D(g, p);
        range.smallest = x < range.smallest ? x : range.smallest;
        range.largest = x > range.largest ? x : range.largest;
      }
    }
    return range;
  }

  void reset_factors() {
    fill(d, T(0), d_count());
    fill(u, T(0), u_count());
    for (Index g = 0; g < matrices(); ++g) {
      for (Index p = 0; p < M(); ++p) D(g, p) = prior_var;
    }
  }

  T covariance(Index group, Index p, Index q) const {  // S_pq of one group
    const Index low = p < q ? p : q, high = p < q ? q : p;
    if (structure == KBT_DIAGONAL) return low == high ? D(group, low) : T(0);
    T sum = (low == high ? T(1) : U(group, low, high)) * D(group, high);
    for (Index r = high + 1; r < M(); ++r) sum += U(group, low, r) * D(group, r) * U(group, high, r);
    return sum;
  }

  void forget(T forgetting) {
    if (forgetting < T(1)) Alone{d_count(), d, nullptr}.forget(forgetting, prior_var);
  }
};

}  // namespace kbt
