// algebra.hpp - vector and matrix products. Eight partial sums, whatever the vector width of the machine.
#pragma once

#include "lanes.hpp"

namespace kbt::KBT_TARGET {

// sum_i x_i y_i. What is left over after the last eight is added one by one.
template <class T>
T dot(const T *x, const T *y, Index n) {
  const Index whole = whole_lanes(n);
  T sum = T(0);
  if (whole > 0) {
    alignas(16) T eight[kLanes];
    for (Index l = 0; l < kLanes; l += kWidth) {
      Lanes<T> part = load_any(x + l) * load_any(y + l);
      for (Index i = l + kLanes; i < whole; i += kLanes) part = part + load_any(x + i) * load_any(y + i);
      if constexpr (kVectors) sum = sum_of(part);
      if constexpr (!kVectors) store(eight + l, part);
    }
    if constexpr (!kVectors) sum = sum_of_eight(eight);
  }
  for (Index i = whole; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// sum_i x_i c_i y_i, in the same order.
template <class T>
T weighted_dot(const T *x, const T *c, const T *y, Index n) {
  const Index whole = whole_lanes(n);
  T sum = T(0);
  if (whole > 0) {
    alignas(16) T eight[kLanes];
    for (Index l = 0; l < kLanes; l += kWidth) {
      Lanes<T> part = constant(T(0));
      for (Index i = l; i < whole; i += kLanes) part = part + load_any(x + i) * load_any(c + i) * load_any(y + i);
      if constexpr (kVectors) sum = sum_of(part);
      if constexpr (!kVectors) store(eight + l, part);
    }
    if constexpr (!kVectors) sum = sum_of_eight(eight);
  }
  for (Index i = whole; i < n; ++i) sum += x[i] * c[i] * y[i];
  return sum;
}

// Four dot products with one x, which is loaded once; for an n of whole lanes.
template <class T>
KBT_INLINE void four_dots(const T *x, const T *y0, const T *y1, const T *y2, const T *y3, Index n, T *out) {
  if constexpr (kVectors) {
    Lanes<T> xi = load_any(x);
    Lanes<T> s0 = xi * load_any(y0), s1 = xi * load_any(y1), s2 = xi * load_any(y2), s3 = xi * load_any(y3);
    for (Index i = kLanes; i < n; i += kLanes) {
      xi = load_any(x + i);
      s0 = s0 + xi * load_any(y0 + i);
      s1 = s1 + xi * load_any(y1 + i);
      s2 = s2 + xi * load_any(y2 + i);
      s3 = s3 + xi * load_any(y3 + i);
    }
    four_sums(s0, s1, s2, s3, out);
  } else {
    out[0] = dot(x, y0, n);
    out[1] = dot(x, y1, n);
    out[2] = dot(x, y2, n);
    out[3] = dot(x, y3, n);
  }
}

// columns_times for wide rows: they are read one behind the other, four at a time, as memory likes it.
template <class T>
KBT_INLINE void wide_columns_times(const MatrixView<T> &W, const ConstVectorView<T> &z, VectorView<T> &u) {
  const Index rows = W.rows(), columns = W.cols(), stride = W.outerStride();
  T *const to = u.data();
  for (Index j = 0; j < columns; j += kWidth) store(to + j, constant(T(0)));
  Index p = 0;
  for (; p + 4 <= rows; p += 4) {
    const T *const w0 = W.data() + p * stride, *const w1 = w0 + stride, *const w2 = w1 + stride,
                   *const w3 = w2 + stride;
    const Lanes<T> z0 = constant(z.data()[p]), z1 = constant(z.data()[p + 1]);
    const Lanes<T> z2 = constant(z.data()[p + 2]), z3 = constant(z.data()[p + 3]);
    for (Index j = 0; j < columns; j += kWidth) {
      const Lanes<T> two = (load(to + j) + load(w0 + j) * z0) + load(w1 + j) * z1;
      store(to + j, (two + load(w2 + j) * z2) + load(w3 + j) * z3);
    }
  }
  for (; p < rows; ++p) {
    const Lanes<T> zp = constant(z.data()[p]);
    for (Index j = 0; j < columns; j += kWidth) {
      store(to + j, load(to + j) + load(W.data() + p * stride + j) * zp);
    }
  }
}

// u_j = sum_p z_p W_pj, p in order. Columns come in whole lanes, or there are fewer than eight.
template <class T>
void columns_times(const MatrixView<T> &W, const ConstVectorView<T> &z, VectorView<T> &u) {
  const Index rows = W.rows(), columns = W.cols(), stride = W.outerStride();
  if (kVectors && columns >= kWideRow) return wide_columns_times(W, z, u);
  Index j = 0;
  for (; kVectors && j + kSets<T> * kLanes <= columns; j += kSets<T> * kLanes) {
    Lanes<T> sum[kSets<T>];
    KBT_UNROLL_ALL
    for (int i = 0; i < kSets<T>; ++i) sum[i] = constant(T(0));
    const T *row = W.data() + j;
    for (Index p = 0; p < rows; ++p, row += stride) {
      const Lanes<T> zp = constant(z.data()[p]);
      KBT_UNROLL_ALL
      for (int i = 0; i < kSets<T>; ++i) sum[i] = sum[i] + load(row + i * kLanes) * zp;
    }
    KBT_UNROLL_ALL
    for (int i = 0; i < kSets<T>; ++i) store(u.data() + j + i * kLanes, sum[i]);
  }
  for (; columns >= kLanes && j < columns; j += kWidth) {
    Lanes<T> sum = constant(T(0));
    for (Index p = 0; p < rows; ++p) sum = sum + load(W.data() + p * stride + j) * constant(z.data()[p]);
    store(u.data() + j, sum);
  }
  for (; j < columns; ++j) {
    T sum = T(0);
    for (Index p = 0; p < rows; ++p) sum += W.data()[p * stride + j] * z.data()[p];
    u.data()[j] = sum;
  }
}

// y_i = gate_i sum_j W_ij x_j
template <class T>
void gated_rows_times(const MatrixView<T> &W, const ConstVectorView<T> &x, const ConstVectorView<T> &gate,
                      VectorView<T> &y) {
  const Index rows = W.rows(), columns = W.cols();
  if (columns == 1) {
    const T *__restrict w = W.data(), *__restrict open = gate.data(), factor = x.data()[0];
    T *__restrict to = y.data();
    for (Index i = 0; i < rows; ++i) to[i] = w[i] * factor * open[i];
    return;
  }
  for (Index i = 0; i < rows; ++i) {
    y.data()[i] = dot(W.data() + i * W.outerStride(), x.data(), columns) * gate.data()[i];
  }
}

// Independent variances, method.md (5.1): mean += D z r and D <- D (1 - D z^2 lambda), for an input z with a number for
// each neuron in r and lambda (kInputs = false), or one neuron with all its inputs in z. Returns how many shares were
// below `least` and were raised to it.
template <bool kInputs, class T>
KBT_INLINE int variance_run(Index count, const T *__restrict z, const T *__restrict r, const T *__restrict lambda,
                            T least, T *__restrict d, T *__restrict mean) {
  int floored = 0;
  for (Index i = 0; i < count; ++i) {
    const T zi = kInputs ? z[i] : *z, ri = kInputs ? *r : r[i], li = kInputs ? *lambda : lambda[i];
    mean[i] += d[i] * (zi * ri);
    const T left = T(1) - d[i] * (zi * zi * li);
    const bool low = !(left >= least);
    floored += low;
    d[i] *= low ? least : left;
  }
  return floored;
}
template <class T>
int update_variances(const ConstVectorView<T> &z, const ConstVectorView<T> &r, const T *lambda, T least, T *d,
                     T *mean) {
  const Index n = r.size();
  if (n == 1) return variance_run<true>(z.size(), z.data(), r.data(), lambda, least, d, mean);
  int floored = 0;
  for (Index p = 0; p < z.size(); ++p) {
    floored += variance_run<false>(n, z.data() + p, r.data(), lambda, least, d + p * n, mean + p * n);
  }
  return floored;
}

// y += a x
template <class T>
void axpy(T *__restrict y, T a, const T *__restrict x, Index n) {
  for (Index i = 0; i < n; ++i) y[i] += a * x[i];
}

template <class T>
void fill(T *x, T value, Index n) {
  for (Index i = 0; i < n; ++i) x[i] = value;
}

template <class T>
bool is_finite(T x) {
  return std::fabs(x) <= std::numeric_limits<T>::max();
}

template <class T>
KBT_INLINE bool all_finite(const T *x, Index n) {  // x - x is 0 for a finite number and NaN otherwise
  T sum = T(0);
  Index i = 0;
  if (kVectors && n >= kLanes) {
    Lanes<T> part = constant(T(0));
    for (; i + kWidth <= n; i += kWidth) part = part + (load_any(x + i) - load_any(x + i));
    sum = sum_of_lanes(part);
  }
  for (; i < n; ++i) sum += x[i] - x[i];
  return sum == T(0);
}

// max(largest, max_i |x_i|)
template <class T>
T largest_magnitude(const T *x, Index n, T largest) {
  Index i = 0;
  if constexpr (kVectors) {
    Vec<T> found = largest - Vec<T>{};
    for (; i + kVecSize<T> <= n; i += kVecSize<T>) {
      const Vec<T> v = load_any<T, 1>(x + i).v, size = v < Vec<T>{} ? -v : v;
      found = size > found ? size : found;
    }
    for (Index l = 0; l < kVecSize<T>; ++l) largest = found[l] > largest ? found[l] : largest;
  }
  for (; i < n; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  return largest;
}

}  // namespace kbt::KBT_TARGET
