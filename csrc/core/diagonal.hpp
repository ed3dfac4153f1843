// diagonal.hpp - a posterior of independent weights: variances only.
#pragma once

#include "structure.hpp"

namespace kbt {

template <class T>
struct Diagonal {
  KBT_INLINE static void weight_cov(const LayerParts<T> &layer, const Cov<T> &out, const Work<T> &work) {
    const Posterior<T> &w = layer.w;
    const MatrixView<T> D = matrix<T>(w.d, w.M1, w.stride, w.stride);
    VectorView<T> squares = array(work.inner, w.M1), sums = array(work.vector, w.stride);
    for (Index a = 0; a < out.rows; ++a) {
      for (Index b = 0; b < out.rows; ++b) {
        squares = array(layer.input(a), w.M1) * array(layer.input(b), w.M1);
        layer.loops->columns_times(D, constant_view<T>(squares.data(), w.M1), sums);
        if (out.dense) {
          for (Index j = 0; j < w.n; ++j) out.same(a, b, j) += sums[j];
        } else {
          array(&out.same(a, b, 0), w.stride) += sums;
        }
      }
    }
  }

  static void input_cov(const LayerParts<T> &layer, const Cov<T> &in, const Cov<T> &out, const Work<T> &) {
    const Posterior<T> &w = layer.w;
    for (Index j = 0; j < w.n; ++j) {
      for (Index a = 0; a < in.rows; ++a) {
        for (Index b = 0; b < in.rows; ++b) {
          T sum = T(0);
          for (Index p = 0; p + 1 < w.M1; ++p) sum += w.D(j, p) * in.same(a, b, p);
          out.same(a, b, j) += sum;
        }
      }
    }
  }

  // Cov(w,u) Lambda Cov(u,w) has the diagonal D_p^2 (z_p^T Lambda_j z_p), with z_p the column of input p over the rows.
  static int update(LayerParts<T> &layer, const Adjoint<T> &adjoint, const Work<T> &work) {
    Posterior<T> &w = layer.w;
    const Index n = w.stride;
    VectorView<T> pull = array(work.vector, n), shrink = array(work.vector + n, n), h = array(work.vector + 2 * n, n);
    const auto update = [&](Index p, Index inputs, const T *z, const T *r) {
      return layer.loops->update_variances(array(z, inputs), array(r, n), shrink.data(), kSmallestShare<T>, w.d + p * n,
                                           w.mean + p * n);
    };
    if (adjoint.rows == 1) {
      shrink.setZero();
      for (Index k = 0; k < adjoint.rank; ++k) add_squares(adjoint.signs[k], array(adjoint.B(k, 0), n), shrink);
      return update(0, w.M1, layer.z, adjoint.r(0));
    }
    int floored = 0;
    const T one = T(1);
    for (Index p = 0; p < w.M1; ++p) {
      pull.setZero();
      shrink.setZero();
      for (Index a = 0; a < adjoint.rows; ++a) pull += layer.input(a)[p] * array(adjoint.r(a), n);
      for (Index k = 0; k < adjoint.rank; ++k) {
        h.setZero();
        for (Index a = 0; a < adjoint.rows; ++a) h += layer.input(a)[p] * array(adjoint.B(k, a), n);
        add_squares(adjoint.signs[k], h, shrink);
      }
      floored += update(p, 1, &one, pull.data());
    }
    return floored;
  }

 private:
  template <class X>
  static void add_squares(T sign, const X &x, VectorView<T> &sum) {
    sum += sign * x * x;
  }
};

}  // namespace kbt
