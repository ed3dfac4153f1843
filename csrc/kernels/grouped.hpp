// grouped.hpp - the loops of a layer whose neurons are correlated (`full`): one ColumnUD over n neurons of M1 weights.
//
// Row (a, j) of F is U^T applied to z_a in the place of neuron j: zero before entry j * M1.
#pragma once

#include "column_ud.hpp"

namespace kbt::KBT_TARGET {

// Where the whole lanes of neuron j begin, and from where the zeros before them are stored. A small machine stores and
// adds all zeros: it saves code.
constexpr Index first_lanes(Index j, Index M1) {
  return whole_lanes(j * M1);
}
constexpr Index first_stored(Index j, Index M1) {
  return kVectors ? first_lanes(j, M1) : 0;
}

// Column q of F for the neurons from j on, up to the weight's own unit diagonal.
template <class T>
KBT_INLINE void project_entry(const T *z, const T *column, Index q, Index j, Index M1, Index length, T *f) {
  for (; (j + 1) * M1 <= q; ++j) f[j * length + q] = dot(z, column + j * M1, M1);
  f[j * length + q] = dot(z, column + j * M1, q - j * M1) + z[q - j * M1];
}

// f[j][q] = sum_p U[(j,p),q] z_p, four columns q at a time over the neurons that all four have in common. The zeros
// that pad z let a neuron's rows be read in whole lanes: a few numbers of the next neuron or column with them, and
// behind the last column a few of D, which follows U. All of these are finite, as learned numbers always are.
template <class T>
void project_group(const ColumnUD<T> &s, Index n, const T *z, T *f) {
  const Index M = s.M, M1 = M / n, length = padded(M);
  for (Index j = 0; j < n; ++j) {  // what is read of each besides its own entries
    fill(f + j * length + first_stored(j, M1), T(0), j * M1 - first_stored(j, M1));
    fill(f + j * length + M, T(0), length - M);
  }
  const T *column = s.u;
  Index q = 0;
  for (; q + 4 <= M; q += 4) {
    const T *const c1 = column + padded(q), *const c2 = c1 + padded(q + 1), *const c3 = c2 + padded(q + 2);
    const Index common = q / M1;
    for (Index j = 0; j < common; ++j) {
      const Index at = j * M1;
      four_dots(z, column + at, c1 + at, c2 + at, c3 + at, padded(M1), f + j * length + q);
    }
    project_entry(z, column, q, common, M1, length, f);
    project_entry(z, c1, q + 1, common, M1, length, f);
    project_entry(z, c2, q + 2, common, M1, length, f);
    project_entry(z, c3, q + 3, common, M1, length, f);
    column = c3 + padded(q + 3);
  }
  for (; q < M; column += padded(q), ++q) project_entry(z, column, q, 0, M1, length, f);
}

template <class T>
KBT_INLINE void add_symmetric(T *out, Index count, Index i, Index k, T x) {
  out[i * count + k] += x;
  if (i != k) out[k * count + i] += x;
}

// out += F D F^T over `count` rows of F, (row, neuron). `weighted`: padded(M) numbers of scratch.
template <class T>
void weigh_group(const ColumnUD<T> &s, Index n, const T *f, Index count, T *weighted, T *out) {
  const Index M1 = s.M / n, length = padded(s.M);
  for (Index i = 0; i < count; ++i) {
    const Index start = first_lanes(i % n, M1);
    for (Index q = start; q < length; q += kWidth) store(weighted + q, load(s.d + q) * load(f + i * length + q));
    Index k = 0;
    for (; k + 4 <= i + 1; k += 4) {
      const T *fk = f + k * length + start;
      T x[4];
      four_dots(weighted + start, fk, fk + length, fk + 2 * length, fk + 3 * length, length - start, x);
      KBT_UNROLL_ALL
      for (Index c = 0; c < 4; ++c) add_symmetric(out, count, i, k + c, x[c]);
    }
    for (; k <= i; ++k) {
      add_symmetric(out, count, i, k, dot(weighted + start, f + k * length + start, length - start));
    }
  }
}

// out[(a,j),(b,k)] += sum_pq S_jk[p,q] C_ab[p,q], the last term of (2.2): sum_r D_r U_r[j]^T C_ab U_r[k] column by
// column of U. C is (rows m)^2 over (row, input) without the bias, which has no variance.
//
// Rows of C_ab are read in whole lanes, and the zeros that pad U_r multiply what follows a row. 0 * x is 0 only for a
// finite x, so nothing left by an earlier call may follow: after a row comes the next one, and after the last row come
// zeros written with the matrix (Head::forward, Head::fill_input_cov).
template <class T>
void input_group(const ColumnUD<T> &s, Index n, const T *C, Index rows, T *column, T *X, T *out) {
  const Index M1 = s.M / n, m = M1 - 1, stride = rows * m, size = padded(m);
  const T *u = s.u;
  for (Index r = 0; r < s.M; u += padded(r), ++r) {
    const Index last = r / M1;  // neurons 0..last have entries in this column
    fill(column + last * size, T(0), size);
    for (Index k = 0; k <= last; ++k) {
      const Index used = k < last || r - k * M1 > m ? m : r - k * M1;
      for (Index p = 0; p < used; ++p) column[k * size + p] = u[k * M1 + p];
    }
    if (r - last * M1 < m) column[last * size + r - last * M1] = T(1);
    for (Index a = 0; a < rows; ++a) {
      for (Index b = 0; b < rows; ++b) {
        for (Index k = 0; k <= last; ++k) {  // X[k] = C_ab U_r[k]
          const T *const part = column + k * size;
          const T *c = C + a * m * stride + b * m;
          Index p = 0;
          for (; p + 4 <= m; p += 4, c += 4 * stride) {
            four_dots(part, c, c + stride, c + 2 * stride, c + 3 * stride, size, X + k * size + p);
          }
          for (; p < m; ++p, c += stride) X[k * size + p] = dot(c, part, m);
          fill(X + k * size + m, T(0), size - m);
        }
        for (Index j = 0; j <= last; ++j) {
          for (Index k = 0; k <= last; ++k) {
            out[(a * n + j) * rows * n + b * n + k] += s.d[r] * dot(column + j * size, X + k * size, size);
          }
        }
      }
    }
  }
}

}  // namespace kbt::KBT_TARGET
