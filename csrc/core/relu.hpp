// relu.hpp - moments of max(0, u) for a Gaussian vector u: method.md (2.4) to (2.6).
#pragma once

#include "loops.hpp"
#include "moments.hpp"

namespace kbt {

template <class T>
struct Relu {
  T *gates;  // rows x stride: Phi(alpha), kept for the backward pass

  // What the off-diagonal series needs of one unit: 1/sigma, and q_n = sigma phi(alpha) He_{n-2}(alpha) / sqrt(n!) for
  // n = 2..order, so that Cov(z_j, z_k) = Phi_j S_jk Phi_k + sum_n rho_jk^n q_n(j) q_n(k).
  static Index series_count(Index rows, Index stride, int order) { return rows * stride * order; }

  // In: means u (rows x stride) and their covariance. Out: that covariance becomes the one of z, in place, and the
  // means go to z (rows x z_stride, a constant 1 behind each row).
  void forward(const Loops<T> &loops, const T *u, const Cov<T> &cov, int order, T *z, Index z_stride, T *series) const {
    if (!cov.dense && cov.rows == 1) {  // no pairs: one run over the units
      VectorView<T> var = array(cov.data, cov.n);
      loops->relu_units(array(u, cov.n), var, z, gates);
      z[cov.n] = T(1);
      return;
    }
    for (Index a = 0; a < cov.rows; ++a) {
      for (Index j = 0; j < cov.n; ++j) {
        T &var = cov.same(a, a, j);
        const ReluUnit<T> unit = one_unit(u[a * cov.stride + j], var);
        z[a * z_stride + j] = unit.mean;
        gates[a * cov.stride + j] = unit.gate;
        var = unit.var;
        series_of(unit, order, series + (a * cov.stride + j) * order);
      }
      z[a * z_stride + cov.n] = T(1);
    }
    if (cov.dense) {
      dense_pairs(cov, order, series);
    } else {
      row_pairs(cov, order, series);
    }
  }

 private:
  static void series_of(const ReluUnit<T> &unit, int order, T *series) {
    series[0] = unit.sigma > std::numeric_limits<T>::min() ? T(1) / unit.sigma : T(0);
    T hermite = T(1), before = T(0), scale = unit.sigma * unit.density;
    for (int n = 2; n <= order; ++n) {
      scale /= std::sqrt(T(n));  // sqrt(1!) = 1
      series[n - 1] = scale * hermite;
      const T next = unit.alpha * hermite - T(n - 2) * before;
      before = hermite;
      hermite = next;
    }
  }

  T pair(T cov, Index i, Index k, int order, const T *series) const {
    const T *si = series + i * order, *sk = series + k * order;
    T rho = cov * si[0] * sk[0];
    rho = rho > T(1) ? T(1) : (rho < T(-1) ? T(-1) : rho);
    T sum = gates[i] * cov * gates[k], power = rho;
    for (int n = 2; n <= order; ++n) {
      power *= rho;
      sum += power * si[n - 1] * sk[n - 1];
    }
    return sum;
  }

  void dense_pairs(const Cov<T> &cov, int order, const T *series) const {
    const Index count = cov.rows * cov.n;
    for (Index i = 0; i < count; ++i) {
      const Index unit = i / cov.n * cov.stride + i % cov.n;
      for (Index b = 0, k = 0; k < i; ++b) {
        for (Index j = 0; j < cov.n && k < i; ++j, ++k) {
          T &value = cov.data[i * count + k];
          value = pair(value, unit, b * cov.stride + j, order, series);
          cov.data[k * count + i] = value;
        }
      }
    }
  }

  void row_pairs(const Cov<T> &cov, int order, const T *series) const {
    for (Index a = 0; a < cov.rows; ++a) {
      for (Index b = 0; b < a; ++b) {
        for (Index j = 0; j < cov.n; ++j) {
          T &value = cov.same(a, b, j);
          value = pair(value, a * cov.stride + j, b * cov.stride + j, order, series);
          cov.same(b, a, j) = value;
        }
      }
    }
  }
};

}  // namespace kbt
