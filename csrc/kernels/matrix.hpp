// matrix.hpp - lanes, and the little dense algebra the head needs, with every sum taken in a fixed order.
//
// Eigen supplies the vector types, element by element only: its products, reductions and decompositions choose their
// order (and fused multiply-adds) by the machine, which would cost us the same-bits promise.
#pragma once

#if defined(__arm__) && !defined(EIGEN_DONT_VECTORIZE)
#define EIGEN_DONT_VECTORIZE  // 32-bit NEON flushes subnormals and divides approximately
#endif
#define EIGEN_NO_IO
#define EIGEN_NO_DEBUG
#define EIGEN_FAST_MATH 0
#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace kbt {

using Index = std::ptrdiff_t;

constexpr Index kLanes = 8;  // neurons side by side; also the number of partial sums of a dot product

// A machine without vectors works on one set of lanes in plain loops, where code size counts. Others work on several
// sets at once, to hide the latency of one, and on rows and columns in fours. Either way the sums run in the same
// order.
#ifdef EIGEN_DONT_VECTORIZE
constexpr bool kVectors = false;
#define KBT_UNROLL
#define KBT_UNROLL_ALL
#else
constexpr bool kVectors = true;
#if defined(__clang__)
#define KBT_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#define KBT_SHUFFLE_WIDE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#define KBT_UNROLL _Pragma("unroll(2)")
#define KBT_UNROLL_ALL _Pragma("unroll")
#else
typedef int ShuffleMask __attribute__((vector_size(16)));
typedef int WideShuffleMask __attribute__((vector_size(32)));
#define KBT_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, ShuffleMask{__VA_ARGS__})
#define KBT_SHUFFLE_WIDE(x, y, ...) __builtin_shuffle(x, y, WideShuffleMask{__VA_ARGS__})
#define KBT_UNROLL _Pragma("GCC unroll 2")
#define KBT_UNROLL_ALL _Pragma("GCC unroll 32")
#endif
#endif
constexpr int kMostSets = 4;  // room in the arena, which is equally large everywhere
constexpr int kSets = kVectors ? kMostSets : 1;

constexpr Index padded(Index n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

template <class T>
using Lanes = Eigen::Array<T, kLanes, 1>;

// Eight numbers in the arena, at a multiple of eight from an aligned start.
template <class T>
Eigen::Map<Lanes<T>, Eigen::Aligned16> lanes(T *x) {
  return Eigen::Map<Lanes<T>, Eigen::Aligned16>(x);
}
template <class T>
Eigen::Map<const Lanes<T>, Eigen::Aligned16> lanes(const T *x) {
  return Eigen::Map<const Lanes<T>, Eigen::Aligned16>(x);
}

template <class T>
Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> array(T *x, Index n) {
  return Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(x, n);
}
template <class T>
Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>> array(const T *x, Index n) {
  return Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>(x, n);
}

template <class T>
T sum_of(const Lanes<T> &x) {
  const Eigen::Array<T, 4, 1> half = x.template head<4>() + x.template tail<4>();
  return (half[0] + half[2]) + (half[1] + half[3]);
}

// sum_of four of them, into four neighbours. For float the sums are taken side by side, each in the order of sum_of.
template <class T>
inline __attribute__((always_inline)) void four_sums(const Lanes<T> &s0, const Lanes<T> &s1, const Lanes<T> &s2,
                                                     const Lanes<T> &s3, T *out) {
#ifdef __AVX__
  if constexpr (sizeof(T) == 4) {  // two sums in a register: read as halves, they would go through memory
    typedef T Eight __attribute__((vector_size(32)));
    Eight v0, v1, v2, v3;
    std::memcpy(&v0, s0.data(), sizeof v0);
    std::memcpy(&v1, s1.data(), sizeof v1);
    std::memcpy(&v2, s2.data(), sizeof v2);
    std::memcpy(&v3, s3.data(), sizeof v3);
    const Eight h01 =
        KBT_SHUFFLE_WIDE(v0, v1, 0, 1, 2, 3, 8, 9, 10, 11) + KBT_SHUFFLE_WIDE(v0, v1, 4, 5, 6, 7, 12, 13, 14, 15);
    const Eight h23 =
        KBT_SHUFFLE_WIDE(v2, v3, 0, 1, 2, 3, 8, 9, 10, 11) + KBT_SHUFFLE_WIDE(v2, v3, 4, 5, 6, 7, 12, 13, 14, 15);
    const Eight pairs =
        KBT_SHUFFLE_WIDE(h01, h23, 0, 1, 8, 9, 4, 5, 12, 13) + KBT_SHUFFLE_WIDE(h01, h23, 2, 3, 10, 11, 6, 7, 14, 15);
    const Eight sums =
        KBT_SHUFFLE_WIDE(pairs, pairs, 0, 2, 0, 2, 4, 6, 4, 6) + KBT_SHUFFLE_WIDE(pairs, pairs, 1, 3, 1, 3, 5, 7, 5, 7);
    const Eight ordered = KBT_SHUFFLE_WIDE(sums, sums, 0, 4, 1, 5, 0, 4, 1, 5);
    std::memcpy(out, &ordered, 4 * sizeof(T));
    return;
  }
#endif
  if constexpr (kVectors && sizeof(T) == 4) {
    typedef T Four __attribute__((vector_size(16)));
    const auto half = [](const Lanes<T> &s) {
      const Eigen::Array<T, 4, 1> sum = s.template head<4>() + s.template tail<4>();
      Four four;
      std::memcpy(&four, sum.data(), sizeof four);
      return four;
    };
    const Four h0 = half(s0), h1 = half(s1), h2 = half(s2), h3 = half(s3);
    const Four a = KBT_SHUFFLE(h0, h1, 0, 1, 4, 5) + KBT_SHUFFLE(h0, h1, 2, 3, 6, 7);
    const Four b = KBT_SHUFFLE(h2, h3, 0, 1, 4, 5) + KBT_SHUFFLE(h2, h3, 2, 3, 6, 7);
    const Four sums = KBT_SHUFFLE(a, b, 0, 2, 4, 6) + KBT_SHUFFLE(a, b, 1, 3, 5, 7);
    std::memcpy(out, &sums, sizeof sums);
  } else {
    out[0] = sum_of(s0);
    out[1] = sum_of(s1);
    out[2] = sum_of(s2);
    out[3] = sum_of(s3);
  }
}

// Sum of x_i y_i: eight partial sums, and what is left over one by one, whatever the vector width of the machine.
template <class T>
T dot(const T *x, const T *y, Index n) {
  using Map = Eigen::Map<const Lanes<T>>;
  T rest = T(0);
  Index i = 0;
  if (n >= kLanes) {
    Lanes<T> sums = Map(x) * Map(y);
    for (i = kLanes; i + kLanes <= n; i += kLanes) sums += Map(x + i) * Map(y + i);
    rest = sum_of(sums);
  }
  for (Index left = n % kLanes; left > 0; --left, ++i) rest += x[i] * y[i];
  return rest;
}

// Four of them with one x, which is loaded once; for an n of whole lanes.
template <class T>
inline __attribute__((always_inline)) void four_dots(const T *x, const T *y0, const T *y1, const T *y2, const T *y3,
                                                     Index n, T *out) {
  if (!kVectors) {
    out[0] = dot(x, y0, n);
    out[1] = dot(x, y1, n);
    out[2] = dot(x, y2, n);
    out[3] = dot(x, y3, n);
    return;
  }
  using Map = Eigen::Map<const Lanes<T>>;
  Lanes<T> s0 = Map(x) * Map(y0), s1 = Map(x) * Map(y1), s2 = Map(x) * Map(y2), s3 = Map(x) * Map(y3);
  for (Index i = kLanes; i < n; i += kLanes) {
    const Lanes<T> xi = Map(x + i);
    s0 += xi * Map(y0 + i);
    s1 += xi * Map(y1 + i);
    s2 += xi * Map(y2 + i);
    s3 += xi * Map(y3 + i);
  }
  four_sums(s0, s1, s2, s3, out);
}

// Sum of x_i^2 c_i, in the same order.
template <class T>
T quadratic(const T *x, const T *c, Index n) {
  T rest = T(0);
  Index i = 0;
  if (n >= kLanes) {
    using Map = Eigen::Map<const Lanes<T>>;
    Lanes<T> sums = Lanes<T>::Zero();
    for (; i + kLanes <= n; i += kLanes) sums += Map(x + i) * Map(c + i) * Map(x + i);
    rest = sum_of(sums);
  }
  for (Index left = n % kLanes; left > 0; --left, ++i) rest += x[i] * c[i] * x[i];
  return rest;
}

template <class T>
void axpy(T *y, T a, const T *x, Index n) {
  array(y, n) += a * array(x, n);
}

template <class T>
void fill(T *x, T value, Index n) {
  for (Index i = 0; i < n; ++i) x[i] = value;
}

template <class T>
bool all_finite(const T *x, Index n) {  // x - x is 0 for a finite number and NaN otherwise
  T rest = T(0);
  for (Index left = n % kLanes; left > 0; --left, ++x) rest += *x - *x;
  if (n >= kLanes) {
    Lanes<T> sums = Lanes<T>::Zero();
    for (Index i = 0; i + kLanes <= n; i += kLanes) {
      const Lanes<T> v = Eigen::Map<const Lanes<T>>(x + i);
      sums += v - v;
    }
    rest += sum_of(sums);
  }
  return rest == T(0);
}

// Of whole lanes, and of `largest`.
template <class T>
T largest_magnitude(const T *x, Index n, T largest) {
  if constexpr (kVectors) {
    Lanes<T> found = Lanes<T>::Constant(largest);
    for (Index i = 0; i < n; i += kLanes) found = found.max(lanes(x + i).abs());
    return found.maxCoeff();
  }
  for (Index i = 0; i < n; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  return largest;
}

// In place A = L L^T, lower triangle only. A pivot below `floor`, which exact arithmetic could not give, is raised to
// it, and so is one below the rounding of what it was left of: L^-1 would blow that up. Returns how many were, or -1
// for an A so far from positive definite that rounding alone made it.
template <class T>
int cholesky(T *A, Index n, T floor) {
  int floored = 0;
  bool lost = false;
  for (Index i = 0; i < n; ++i) {
    T *row = A + i * n;
    for (Index j = 0; j <= i; ++j) {
      const T rest = row[j] - dot(row, A + j * n, j);
      if (j < i) {
        row[j] = rest / A[j * n + j];
      } else {
        const T rounding = T(n) * std::numeric_limits<T>::epsilon() * row[i];
        const T least = rounding > floor ? rounding : floor;
        const bool low = !(rest >= least);
        floored += low;
        lost |= rest < -row[i];
        row[i] = std::sqrt(low ? least : rest);
      }
    }
  }
  return lost ? -1 : floored;
}

// x = L^-1 x
template <class T>
void solve_lower(const T *L, Index n, T *x) {
  for (Index i = 0; i < n; ++i) x[i] = (x[i] - dot(L + i * n, x, i)) / L[i * n + i];
}

// X = L^-1 X for a row-major X with `columns` columns.
template <class T>
void solve_lower_rows(const T *L, Index n, T *X, Index columns) {
  for (Index i = 0; i < n; ++i) {
    for (Index j = 0; j < i; ++j) axpy(X + i * columns, -L[i * n + j], X + j * columns, columns);
    array(X + i * columns, columns) *= T(1) / L[i * n + i];
  }
}

// Eigenvalues (on the diagonal of A) and orthonormal eigenvectors (columns of Q) of a symmetric A by cyclic Jacobi
// rotations: a fixed number of sweeps, so a fixed cost.
template <class T>
void symmetric_eigen(T *A, T *Q, Index n) {
  constexpr int kSweeps = 12;
  for (Index i = 0; i < n; ++i) {
    for (Index j = 0; j < n; ++j) Q[i * n + j] = T(i == j);
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (Index p = 0; p < n; ++p) {
      for (Index q = p + 1; q < n; ++q) {
        const T off = A[p * n + q];
        if (off == T(0)) continue;
        const T theta = (A[q * n + q] - A[p * n + p]) / (T(2) * off);
        const T size = std::fabs(theta);
        const T t = (theta < T(0) ? T(-1) : T(1)) / (size + std::sqrt(theta * theta + T(1)));
        const T c = T(1) / std::sqrt(t * t + T(1)), s = t * c;
        for (Index k = 0; k < n; ++k) {
          const T x = A[k * n + p], y = A[k * n + q];
          A[k * n + p] = c * x - s * y;
          A[k * n + q] = s * x + c * y;
        }
        for (Index k = 0; k < n; ++k) {
          const T x = A[p * n + k], y = A[q * n + k];
          A[p * n + k] = c * x - s * y;
          A[q * n + k] = s * x + c * y;
        }
        A[p * n + q] = A[q * n + p] = T(0);
        for (Index k = 0; k < n; ++k) {
          const T x = Q[k * n + p], y = Q[k * n + q];
          Q[k * n + p] = c * x - s * y;
          Q[k * n + q] = s * x + c * y;
        }
      }
    }
  }
}

}  // namespace kbt
