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

namespace kbt {

using Index = std::ptrdiff_t;

constexpr Index kLanes = 8;  // neurons side by side; also the number of partial sums of a dot product

#if defined(__clang__)
#define KBT_UNROLL _Pragma("unroll(2)")
#else
#define KBT_UNROLL _Pragma("GCC unroll 2")
#endif

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

// Sum of x_i y_i: eight partial sums, and what is left over one by one, whatever the vector width of the machine.
template <class T>
T dot(const T *x, const T *y, Index n) {
  T rest = T(0);
  Index i = 0;
  if (n >= kLanes) {
    Lanes<T> sums = Lanes<T>::Zero();
    for (; i + kLanes <= n; i += kLanes) {
      sums += Eigen::Map<const Lanes<T>>(x + i) * Eigen::Map<const Lanes<T>>(y + i);
    }
    rest = sum_of(sums);
  }
  for (; i < n; ++i) rest += x[i] * y[i];
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
  Lanes<T> sums = Lanes<T>::Zero();
  Index i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes<T> v = Eigen::Map<const Lanes<T>>(x + i);
    sums += v - v;
  }
  for (; i < n; ++i) sums[0] += x[i] - x[i];
  return sum_of(sums) == T(0);
}

// In place A = L L^T, lower triangle only. A pivot below `floor`, which exact arithmetic could not give, is raised to
// it. Returns how many were.
template <class T>
int cholesky(T *A, Index n, T floor) {
  int floored = 0;
  for (Index i = 0; i < n; ++i) {
    T *row = A + i * n;
    for (Index j = 0; j <= i; ++j) {
      const T rest = row[j] - dot(row, A + j * n, j);
      if (j < i) {
        row[j] = rest / A[j * n + j];
      } else {
        const bool low = !(rest >= floor);
        floored += low;
        row[i] = std::sqrt(low ? floor : rest);
      }
    }
  }
  return floored;
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
