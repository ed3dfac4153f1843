// column_ud.hpp - the loops over ColumnUD, one matrix with the rows of U in the lanes: projection, sums, and the
// rank-one step. method.md (5.2) to (5.4)
//
// All sums run in the order of the source, whatever the vector width of the machine.
#pragma once

#include "algebra.hpp"
#include "both_ud.hpp"

namespace kbt::KBT_TARGET {

// f = U^T z; z is padded to whole lanes.
template <class T>
void project_column(const ColumnUD<T> &s, const T *z, T *f) {
  const T *column = s.u;
  f[0] = z[0];
  for (Index q = 1; q < s.M;) {  // columns of one length, four at a time
    const Index length = padded(q), end = length < s.M - 1 ? length + 1 : s.M;
    for (; kVectors && q + 4 <= end; q += 4, column += 4 * length) {
      alignas(16) T sums[4];
      four_dots(z, column, column + length, column + 2 * length, column + 3 * length, length, sums);
      KBT_UNROLL_ALL
      for (int i = 0; i < 4; ++i) sums[i] += z[q + i];
      std::memcpy(f + q, sums, sizeof sums);
    }
    for (; q < end; ++q, column += length) f[q] = dot(z, column, length) + z[q];
  }
}

template <class T>
void weigh_column(const ColumnUD<T> &s, const T *f, const T *g, T *out) {
  *out = weighted_dot(f, s.d, g, padded(s.M));
}

template <class T>
void gain_column(const ColumnUD<T> &s, const T *f, T *b) {
  fill(b, T(0), padded(s.M));
  const T *column = s.u;
  for (Index q = 0; q < s.M; column += padded(q), ++q) {
    const T v = s.d[q] * f[q];
    for (Index i = 0; i < q; i += kWidth) store(b + i, load(b + i) + load(column + i) * constant(v));
    b[q] += v;
  }
}

// `scratch`: padded(M) numbers, becomes diag(S).
template <class T>
void diagonal_times_column(const ColumnUD<T> &s, const ConstVectorView<T> &c, T *scratch, T *out) {
  for (Index i = 0; i < s.M; i += kWidth) store(scratch + i, load(s.d + i));
  const T *column = s.u;
  for (Index q = 1; q < s.M;) {  // columns of one length, four at a time
    const Index length = padded(q), end = length < s.M - 1 ? length + 1 : s.M;
    for (; kVectors && q + 4 <= end; q += 4, column += 4 * length) {
      const Lanes<T> d0 = constant(s.d[q]), d1 = constant(s.d[q + 1]);
      const Lanes<T> d2 = constant(s.d[q + 2]), d3 = constant(s.d[q + 3]);
      const T *const c1 = column + length, *const c2 = c1 + length, *const c3 = c2 + length;
      for (Index i = 0; i < length; i += kLanes) {
        const Lanes<T> u0 = load(column + i), u1 = load(c1 + i), u2 = load(c2 + i), u3 = load(c3 + i);
        const Lanes<T> two = (load(scratch + i) + u0 * u0 * d0) + u1 * u1 * d1;
        store(scratch + i, (two + u2 * u2 * d2) + u3 * u3 * d3);
      }
    }
    for (; q < end; ++q, column += length) {
      for (Index i = 0; i < length; i += kWidth) {
        store(scratch + i, load(scratch + i) + load(column + i) * load(column + i) * constant(s.d[q]));
      }
    }
  }
  *out = dot(scratch, c.data(), c.size());
}

template <class T>
void scale_column(const ColumnUD<T> &s, const T *f, T lambda, T share, const Step<T, 1> &step) {
  const Index M = s.M, count = padded(M);
  T *const alpha = step.alpha, *const loss = step.gain;  // loss_q = alpha_{q-1} - alpha_q
  const Lanes<T> minus_lambda = constant(-lambda), one = constant(T(1));
  for (Index i = 0; i < count; i += kWidth) {
    const Lanes<T> lf = load(f + i) * minus_lambda, vi = load(s.d + i) * load(f + i);
    store(step.v + i, vi);
    store(step.k + i, lf);
    store(loss + i, lf * vi);
  }
  T before = share;
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
  for (Index i = 0; i < count; i += kWidth) {
    const Lanes<T> here = load(alpha + i), next = load_any(alpha + i + 1);
    store(step.k + i, load(step.k + i) * (one / here));
    store(s.d + i, load(s.d + i) * (here / next));
  }
}

// P sets of rows of a block of columns; their sums b stay in registers.
template <int P, class T>
KBT_INLINE void rectangle_pass(T *column, Index length, Index count, const T *v, const T *k, T *b) {
  constexpr Index W = kWidth;
  Lanes<T> sum[P];
  KBT_UNROLL_ALL
  for (int j = 0; j < P; ++j) sum[j] = load(b + j * W);
  for (Index c = 0; c < count; ++c, column += length) {
    const Lanes<T> vc = constant(v[c]), kc = constant(k[c]);
    KBT_UNROLL_ALL
    for (int j = 0; j < P; ++j) {
      const Lanes<T> old = load(column + j * W);
      store(column + j * W, kc * sum[j] + old);
      sum[j] = sum[j] + old * vc;
    }
  }
  KBT_UNROLL_ALL
  for (int j = 0; j < P; ++j) store(b + j * W, sum[j]);
}

// Row p starts with b_p = v_p and takes part from column p + 1 on. Columns count from 1 here. What pads a column is
// zero and stays zero.
template <class T>
KBT_INLINE void triangle_pass(T *column, Index length, Index count, const T *v, const T *k, T *b) {
  if constexpr (kVectors) {
    constexpr Index W = kVecSize<T>;
    Vec<T> sum[kLanes / W];
    std::memcpy(sum, v, sizeof sum);
    for (Index c = 1; c <= count; ++c, column += length) {
      KBT_UNROLL_ALL
      for (Index j = 0; j < kLanes / W; ++j) {
        const Vec<T> old = load<T, 1>(column + j * W).v;
        const auto above = lane_numbers<T>() < static_cast<int>(c - j * W);
        store(column + j * W, Lanes<T, 1>{(above ? sum[j] : Vec<T>{}) * k[c] + old});
        sum[j] = above ? sum[j] + old * v[c] : sum[j];
      }
    }
    std::memcpy(b, sum, sizeof sum);
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

// As pass_lanes, for eight columns at a time. The rows above them are in whole lanes; the last eight join one by one.
template <class T>
void pass_columns(const ColumnUD<T> &s, T *b, const T *v, const T *k) {
  constexpr int kMany = kVectors ? kVectorBytes / 4 : 1;  // sets of lanes in half of the registers
  constexpr Index W = kWidth;
  T *column = s.u;
  Index first = 0;
  for (; first + 1 < s.M; first += kLanes) {
    const Index length = first + kLanes, count = s.M - first - 1 < kLanes ? s.M - first - 1 : kLanes;
    const T *const vq = v + first + 1, *const kq = k + first + 1;
    Index i = 0;
    for (; kMany > 2 && i + kMany * W <= first; i += kMany * W) {
      rectangle_pass<kMany>(column + i, length, count, vq, kq, b + i);
    }
    for (; kMany > 1 && i + 2 * W <= first; i += 2 * W) rectangle_pass<2>(column + i, length, count, vq, kq, b + i);
    for (; i < first; i += W) rectangle_pass<1>(column + i, length, count, vq, kq, b + i);
    triangle_pass(column + first, length, count, v + first, k + first, b + first);
    column += count * length;
  }
  if (first < s.M) b[first] = v[first];  // the last row has no column behind it
}

template <class T>
void rank_one_column(const ColumnUD<T> &s, const T *f, const T *lambda, const T *share, bool may_grow, T *memory) {
  const Step<T, 1> step(memory, s.M);
  if (may_grow) {
    scale_with_growth(s, f, lambda, share, step);
  } else {
    scale_column(s, f, *lambda, *share, step);
  }
  pass_columns(s, step.gain, step.v, step.k);
}

template <class T>
void add_column(Index M, T *y, const T *a, const T *x) {
  for (Index i = 0; i < padded(M); i += kWidth) store(y + i, load(y + i) + load(x + i) * constant(*a));
}

}  // namespace kbt::KBT_TARGET
