// dense.hpp - small dense matrices: Cholesky, triangular solves, symmetric eigenvalues, every sum in a fixed order.
//
// Eigen's own products, reductions and decompositions choose their order (and fused multiply-adds) by the machine, so
// they would not give the same bits everywhere.
#pragma once

#include "algebra.hpp"

namespace kbt {

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
KBT_SELDOM void symmetric_eigen(T *A, T *Q, Index n) {
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
