// layer.hpp - one Bayesian linear layer: moments forward, method.md §2, and the adjoint backward, §4. What depends on
// the posterior structure is in full.hpp, neuron.hpp, shared.hpp and diagonal.hpp.
#pragma once

#include "diagonal.hpp"
#include "full.hpp"
#include "neuron.hpp"
#include "shared.hpp"

namespace kbt {

template <class T>
struct Layer : LayerParts<T> {
  using LayerParts<T>::w;
  using LayerParts<T>::loops;

  // (2.1): E u_aj = w_j^T z_a
  void mean_forward(Index rows, T *u) const {
    for (Index a = 0; a < rows; ++a) {
      const T *const za = this->input(a);
      if (w.stride == 1) {
        u[a] = dot<T>(w.mean, za, w.M1);
      } else {
        VectorView<T> ua = array(u + a * w.stride, w.stride);
        loops->columns_times(w.means(), array(za, w.M1), ua);
      }
    }
  }

  // (2.2), the part that the input covariance brings: w_j^T C_ab w_k, with `means`, + sum_pq S_jk[p,q] C_ab[p,q]
  void input_cov_forward(const Cov<T> &in, const Cov<T> &out, bool means, const Work<T> &work) const {
    if (means && in.dense) dense_input_means(in, out, work);
    if (means && !in.dense) independent_input_means(in, out);
    with_structure([&](auto structure) { structure.input_cov(*this, in, out, work); });
  }

  // (2.2), the part that the weights bring: z_a^T S_jk z_b = F_aj D F_bk. Keeps F for the update.
  void weight_cov_forward(const Cov<T> &out, const Work<T> &work) {
    with_structure([&](auto structure) { structure.weight_cov(*this, out, work); });
  }

  // (4.3): r_z = W r_u and B_z = W B_u; then (4.4), through the ReLU before this layer: times Phi.
  void adjoint_backward(const Adjoint<T> &u, const Adjoint<T> &previous, const T *gates) const {
    const Index m = w.M1 - 1;
    const MatrixView<T> W = matrix<T>(w.mean, m, w.stride, w.stride);
    for (Index c = 0; c <= u.rank; ++c) {
      for (Index a = 0; a < u.rows; ++a) {
        VectorView<T> to = array(previous.column(c, a), m);
        if (m < previous.stride) fill(to.data() + m, T(0), previous.stride - m);
        loops->gated_rows_times(W, constant_view<T>(u.column(c, a), w.stride), array(gates + a * previous.stride, m),
                                to);
      }
    }
  }

  // (4.2). Returns how many shares had to be floored.
  int update(const Adjoint<T> &adjoint, const Work<T> &work) {
    if (w.structure == KBT_SHARED) return Shared<T>::update(*this, adjoint, work);
    int floored = 0;
    with_structure([&](auto structure) { floored = structure.update(*this, adjoint, work); });
    return floored;
  }

 private:
  // `shared` looks forward as a single neuron does.
  template <class F>
  void with_structure(F f) const {
    if (w.structure == KBT_DIAGONAL) return f(Diagonal<T>());
    if (w.structure == KBT_FULL) return f(Full<T>());
    if (w.interleaved) return f(Neurons<T, kLanes>());
    f(Neurons<T, 1>());
  }

  // w_j^T C_ab w_k for dense inputs
  void dense_input_means(const Cov<T> &in, const Cov<T> &out, const Work<T> &work) const {
    const Index m = w.M1 - 1, n = w.n;
    T *const X = work.inner;  // X = C_ab W, m x n
    for (Index a = 0; a < in.rows; ++a) {
      for (Index b = 0; b < in.rows; ++b) {
        fill(X, T(0), m * n);
        if (n == 1) {  // all p side by side: C_ab[p,q] = C_ba[q,p] exactly
          for (Index q = 0; q < m; ++q) loops->axpy(X, w.mean[q], in.row(b, q) + a * m, m);
        } else {
          for (Index p = 0; p < m; ++p) {
            const T *c = in.row(a, p) + b * m;
            for (Index q = 0; q < m; ++q) loops->axpy(X + p * n, c[q], w.mean + q * w.stride, n);
          }
        }
        for (Index j = 0; j < n; ++j) {
          for (Index p = 0; p < m; ++p) loops->axpy(out.row(a, j) + b * n, w.mean[p * w.stride + j], X + p * n, n);
        }
      }
    }
  }

  // The same for uncorrelated inputs: sum_p w_pj c_p w_pk
  void independent_input_means(const Cov<T> &in, const Cov<T> &out) const {
    const Index m = w.M1 - 1, n = w.n;
    for (Index a = 0; a < in.rows; ++a) {
      for (Index b = 0; b < in.rows; ++b) {
        const T *c = &in.same(a, b, 0);
        if (w.stride == 1) {
          out.same(a, b, 0) += weighted_dot<T>(w.mean, c, w.mean, m);
          continue;
        }
        for (Index j = 0; j < n; ++j) {
          for (Index p = 0; p < m; ++p) {
            const T *wp = w.mean + p * w.stride;
            loops->axpy(out.row(a, j) + b * n, wp[j] * c[p], wp, n);
          }
        }
      }
    }
  }
};

}  // namespace kbt
