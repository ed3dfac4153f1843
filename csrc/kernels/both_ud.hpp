// both_ud.hpp - loops over UD factors that are the same for LaneUD and ColumnUD.
#pragma once

#include "lanes.hpp"

namespace kbt::KBT_TARGET {

// What a loop takes at once from factors of W matrices: Lanes, or for a single matrix a number.
template <class T, Index W>
using Number = std::conditional_t<W == 1, T, Lanes<T>>;
template <class T, Index W>
constexpr Index kStep = W == 1 ? 1 : kWidth;
template <Index W, class T>
KBT_INLINE Number<T, W> get(const T *x) {
  if constexpr (W == 1) {
    return *x;
  } else {
    return load(x);
  }
}
template <Index W, class T>
KBT_INLINE Number<T, W> constant_of(T x) {
  if constexpr (W == 1) {
    return x;
  } else {
    return constant(x);
  }
}
template <Index W, class T>
KBT_INLINE void put(T *to, const Number<T, W> &x) {
  if constexpr (W == 1) {
    *to = x;
  } else {
    store(to, x);
  }
}

// lambda may be negative in some lanes: there alpha_q = 1 - lambda sum_{i>q} f_i v_i, summed from the far end, so that
// again only positive terms are added. Only `replace` needs it.
template <class T, Index W>
KBT_SELDOM void scale_with_growth(const UD<T, W> &s, const T *f, const T *lambda, const T *share,
                                  const Step<T, W> &step) {
  for (Index l = 0; l < W; ++l) {
    T *const v = step.v + l, *const k = step.k + l, *const alpha = step.alpha + l, *const d = s.d + l;
    alpha[0] = share[l];
    for (Index q = 0; q < s.M; ++q) {
      v[q * step.stride] = d[q * W] * f[q * W + l];
      alpha[(q + 1) * W] = alpha[q * W] + lambda[l] * f[q * W + l] * v[q * step.stride];
    }
    T rest = T(0);
    for (Index q = s.M; lambda[l] < T(0) && q >= 0; --q) {
      alpha[q * W] = T(1) - lambda[l] * rest;
      if (q > 0) rest += f[(q - 1) * W + l] * v[(q - 1) * step.stride];
    }
    for (Index q = 0; q < s.M; ++q) {
      k[q * step.stride] = -lambda[l] * f[q * W + l] / alpha[q * W];
      d[q * W] *= alpha[q * W] / alpha[(q + 1) * W];
    }
  }
}

// sum_pq S_pq C_pq for dense C, which has no row for the bias: sum_r D_r U_r^T C U_r, column by column of U. `column`:
// one vector over the rows of U.
template <class T, Index W>
void trace_times(const UD<T, W> &s, const MatrixView<T> &C, T *column, T *out) {
  const Index m = C.rows();
  for (Index l = 0; l < W; l += kStep<T, W>) {
    Number<T, W> sum = constant_of<W>(T(0));
    for (Index r = 0; r < s.M; ++r) {
      const Index used = r < m ? r + 1 : m;
      for (Index p = 0; p < used && p < r; ++p) put<W>(column + p * W, get<W>(s.entry(p, r) + l));
      if (r < m) put<W>(column + r * W, constant_of<W>(T(1)));
      Number<T, W> quadratic = constant_of<W>(T(0));
      for (Index p = 0; p < used; ++p) {
        const T *const c = C.data() + p * C.outerStride();
        Number<T, W> inner = constant_of<W>(T(0));
        for (Index q = 0; q < used; ++q) inner = inner + get<W>(column + q * W) * constant_of<W>(c[q]);
        quadratic = quadratic + get<W>(column + p * W) * inner;
      }
      sum = sum + get<W>(s.d + r * W + l) * quadratic;
    }
    put<W>(out + l, sum);
  }
}

// f' = U'^T a after a rank-one step, for any other a: U changed by k_q b^(q-1) in column q.
template <class T, Index W>
void advance(Index M, T *f, T *memory) {
  const Step<T, W> step(memory, M);
  for (Index l = 0; l < W; l += kStep<T, W>) {
    Number<T, W> sum = constant_of<W>(T(0));
    for (Index q = 0; q < M; ++q) {
      T *const fq = f + q * W + l;
      const Number<T, W> old = get<W>(fq);
      put<W>(fq, old + get<W>(step.k + q * step.stride + l) * sum);
      sum = sum + get<W>(step.v + q * step.stride + l) * old;
    }
  }
}

}  // namespace kbt::KBT_TARGET
