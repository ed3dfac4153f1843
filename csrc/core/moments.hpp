// moments.hpp - what passes between layers: covariances forward, the adjoint backward.
#pragma once

#include "views.hpp"

namespace kbt {

// Inputs below this count as zero. Beside the constant input 1 they have no effect, but their products would be
// denormal, which makes an update up to forty times slower.
template <class T>
constexpr T kFlushBelow = sizeof(T) == sizeof(float) ? T(1e-12) : T(1e-100);

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
  Index count() const { return count(dense, rows, n, stride); }
  T *row(Index a, Index j) const { return data + (a * n + j) * rows * n; }  // dense only
  T &same(Index a, Index b, Index j) const {                                // Cov(u_aj, u_bj)
    return dense ? row(a, j)[b * n + j] : data[(a * rows + b) * stride + j];
  }
  MatrixView<T> block(Index a, Index b) const { return matrix(row(a, 0) + b * n, n, n, rows * n); }  // C_ab, dense only
  // Cov(u_aj, u_bj) += x, and its mirror image.
  void add_same(Index a, Index b, Index j, T x) const {
    same(a, b, j) += x;
    if (a != b) same(b, a, j) += x;
  }
};

// The adjoint of one layer's pre-activations, method.md §4: r, and B with Lambda = -B diag(sign) B^T. Column 0 of the
// data is r, the others are B. Each column is rows x stride, neurons innermost.
template <class T>
struct Adjoint {
  T *data;
  const T *signs;  // +1: a measurement, variance shrinks; -1: variance grows. The measurements come first.
  const T *rho;    // r = B rho; null under `replace`, where r may leave the range of B
  const T *noise;  // last layer: N of Measurement, where it is known without cancellation; else null
  T *share;        // one row of outputs that are apart: what its step leaves of their variances, where that is known
  Index rank, rows, stride;

  T *column(Index c, Index a) const { return data + (c * rows + a) * stride; }
  T *r(Index a) const { return column(0, a); }
  T *B(Index k, Index a) const { return column(k + 1, a); }
  bool may_grow() const { return rho == nullptr; }  // only `replace` lets variances grow
  Index count() const { return (1 + rank) * rows * stride; }
};

}  // namespace kbt
