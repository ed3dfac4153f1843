// linear.hpp - one Bayesian linear layer: moments forward (METHOD section 2), adjoint backward (section 4), and the
// update of its weights (section 5).
#pragma once

#include "posterior.hpp"

namespace kbt {

template <class T>
struct Linear {
  Posterior<T> w;
  T *z;    // rows x z_stride, means of the inputs with the constant 1 last and zeros behind
  T *F;    // U^T z of every row, from the forward pass
  T *own;  // rows x rows x stride: z_a^T S_j z_b of every neuron, from the forward pass; not for several neurons of
           // `full`

  using Wide = typename Posterior<T>::Wide;
  using Alone = typename Posterior<T>::Alone;

  // Scratch shared by all layers; sizes from the *_count functions below.
  struct Work {
    T *vector;  // forward: diag(S), or columns of U; gain of the mean
    T *inner;   // forward: products with the input covariance
    T *step;    // rank-one steps
    T *H;       // joint updates: the measurement rows in U coordinates
    T *Q;       // joint updates: their noise
    T *B;       // joint updates: compressed factor of Lambda
    T *O;       // joint updates: orthonormal rows beside the compressed factor
  };

  // How many scalar steps one joint update of a group takes. Lambda over a group has at most rows * members dimensions,
  // so a longer B is compressed when all its columns have one sign (`fuse`).
  Index steps(Index rows, Index rank, bool fuse) const {
    const Index dimensions = rows * w.members();
    return fuse && rank > dimensions ? dimensions : rank;
  }
  static bool compressed(Index dimensions, Index rank, bool fuse) { return fuse && rank > dimensions; }
  Index vector_count() const {
    const Index group = padded(w.M() * w.width()) + (w.structure == KBT_FULL ? w.n * kLanes : 0);
    return w.structure == KBT_DIAGONAL && group < 3 * w.stride ? 3 * w.stride : group;
  }
  Index inner_count() const { return (w.M1 + kLanes) * (w.stride > kLanes ? w.stride : kLanes); }
  Index step_count() const { return w.abreast ? Wide::step_count(w.M1, kMostSets) : Alone::step_count(w.M()); }
  Index H_count(Index rows, Index rank, bool fuse) const { return steps(rows, rank, fuse) * w.length(); }
  Index Q_count(Index rows, Index rank, bool fuse) const {
    const Index k = steps(rows, rank, fuse);
    return k * k * w.width();
  }
  Index B_count(Index rows, Index rank, bool fuse) const {
    const Index k = rows * w.members();
    return compressed(k, rank, fuse) ? k * k * w.width() : 0;
  }

  // O of the compression; where the noise among others is wanted, also its product with the noise and with each B_k^T.
  Index O_count(Index rows, Index rank, bool fuse, bool separate) const {
    const Index k = rows * w.members();
    if (!compressed(k, rank, fuse)) return 0;
    return (k * rank + (separate ? k * rank + k * k : 0)) * w.width();
  }

  // ---- forward -------------------------------------------------------------------------------------------------

  // E u_aj = w_j^T z_a
  void mean_forward(Index rows, T *u) const {
    for (Index a = 0; a < rows; ++a) {
      T *ua = u + a * w.stride;
      const T *za = z + a * w.z_stride;
      if (w.stride == 1) {
        *ua = dot(w.mean, za, w.M1);
        continue;
      }
      Index j = 0;
      for (; kVectors && j + kSets * kLanes <= w.stride; j += kSets * kLanes) {
        Lanes<T> sum[kSets];
        for (Lanes<T> &x : sum) x = Lanes<T>::Zero();
        const T *mean = w.mean + j;
        for (Index p = 0; p < w.M1; ++p, mean += w.stride) {
          const Lanes<T> zp = Lanes<T>::Constant(za[p]);
          KBT_UNROLL_ALL
          for (int i = 0; i < kSets; ++i) sum[i] += lanes(mean + i * kLanes) * zp;
        }
        for (int i = 0; i < kSets; ++i) lanes(ua + j + i * kLanes) = sum[i];
      }
      for (; j + kLanes <= w.stride; j += kLanes) {
        Lanes<T> sum = Lanes<T>::Zero();
        for (Index p = 0; p < w.M1; ++p) sum += lanes(w.mean + p * w.stride + j) * za[p];
        lanes(ua + j) = sum;
      }
      for (; j < w.stride; ++j) {  // a narrow layer
        ua[j] = T(0);
        for (Index p = 0; p < w.M1; ++p) ua[j] += w.mean[p * w.stride + j] * za[p];
      }
    }
  }

  // The part of Cov(u) that the input covariance brings: w_j^T C_ab w_k + sum_pq S_jk[p,q] C_ab[p,q].
  void input_cov_forward(const Cov<T> &in, const Cov<T> &out, const Work &work) const {
    if (in.dense) {
      dense_input_means(in, out, work);
    } else {
      independent_input_means(in, out);
    }
    if (w.structure == KBT_FULL) {
      full_weights(in, out, work);
    } else {
      for (Index g = 0; g < w.groups(); ++g) own_weights(g, in, out, work);
    }
  }

  // The part that the weights bring: z_a^T S_jk z_b = F_aj D F_bk. Keeps F for the update.
  void weight_cov_forward(const Cov<T> &out, const Work &work) {
    const Index rows = out.rows;
    if (w.structure == KBT_DIAGONAL) {
      for (Index a = 0; a < rows; ++a) {
        for (Index b = 0; b < rows; ++b) {
          fill(work.vector, T(0), w.stride);
          for (Index p = 0; p < w.M1; ++p) {
            axpy(work.vector, z[a * w.z_stride + p] * z[b * w.z_stride + p], w.d + p * w.stride, w.stride);
          }
          for (Index j = 0; j < w.n; ++j) out.same(a, b, j) += work.vector[j];
        }
      }
    } else if (w.abreast) {
      wide_project(rows);
      if (rows == 1 && !out.dense) {  // the hidden layer of a control loop
        const Index length = w.M1 * kLanes;
        const T *f = F;
        Wide s = w.wide(0);
        for (Index j = 0; j < w.stride; j += kLanes, f += length, s.d += length) {
          const Lanes<T> x = s.weighted(f, f);
          lanes(out.data + j) += x;
          lanes(own + j) = x;
        }
        return;
      }
      for (Index block = 0; block < w.groups(); ++block) {
        const Wide s = w.wide(block);
        T *f = F + block * rows * w.M1 * kLanes;
        for (Index a = 0; a < rows; ++a) {
          for (Index b = 0; b <= a; ++b) {
            const Lanes<T> x = s.weighted(f + a * w.M1 * kLanes, f + b * w.M1 * kLanes);
            add_same(out, a, b, block, x);
            lanes(own + (a * rows + b) * w.stride + block * kLanes) = x;
            lanes(own + (b * rows + a) * w.stride + block * kLanes) = x;
          }
        }
      }
    } else {
      for (Index g = 0; g < w.groups(); ++g) alone_cov_forward(g, out);
    }
  }

  // ---- backward ------------------------------------------------------------------------------------------------

  // r_z = W r_u and B_z = W B_u, then through the ReLU before this layer: times Phi (METHOD section 4).
  void adjoint_backward(const Adjoint<T> &u, const Adjoint<T> &previous, const T *gates) const {
    for (Index c = 0; c <= u.rank; ++c) {
      for (Index a = 0; a < u.rows; ++a) {
        const T *from = u.data + (c * u.rows + a) * u.stride;
        T *to = previous.data + (c * u.rows + a) * previous.stride;
        const T *gate = gates + a * previous.stride;
        const Index m = w.M1 - 1;
        fill(to + m, T(0), previous.stride - m);
        if (w.stride == 1) {
          array(to, m) = array(w.mean, m) * *from * array(gate, m);
          continue;
        }
        for (Index i = 0; i < m; ++i) to[i] = dot(w.mean + i * w.stride, from, w.stride) * gate[i];
      }
    }
  }

  // w += Cov(w,u) r, S += Cov(w,u) Lambda Cov(u,w). `noise`, where the caller has it (the last layer), is what the
  // innovation holds beside these weights: I - B^T S_u B plus B^T (rest of S_u) B. From it comes Q of METHOD section 5
  // as a sum of positive terms, where I - H S H^T would cancel for a small R. Returns how many shares had to be
  // floored.
  int update(const Adjoint<T> &adjoint, bool fuse, const T *noise, const Work &work) {
    int floored = 0;
    if (w.structure == KBT_DIAGONAL) {
      floored = diagonal_update(adjoint, work);
    } else if (w.abreast) {
      Index block = 0;
      for (; adjoint.rows == 1 && block + kSets <= w.groups(); block += kSets) {
        floored += wide_update<kSets>(block, adjoint, fuse, noise, work);
      }
      for (; block < w.groups(); ++block) {
        floored += adjoint.rows == 1 ? wide_update<1>(block, adjoint, fuse, noise, work)
                                     : wide_joint_update(block, adjoint, fuse, noise, work);
      }
    } else {
      for (Index g = 0; g < w.groups(); ++g) floored += alone_update(g, adjoint, fuse, noise, work);
    }
    return floored;
  }

 private:
  void wide_project(Index rows) {
    const Index length = w.M1 * kLanes;
    for (Index a = 0; a < rows; ++a) {
      const auto project = [&](auto sets, Index block) {
        constexpr int P = decltype(sets)::value;
        T *u[P], *f[P];
        for (Index i = 0; i < P; ++i) {
          u[i] = w.wide(block + i).u;
          f[i] = F + ((block + i) * rows + a) * length;
        }
        Wide::template project_rows<P>(u, w.M1, z + a * w.z_stride, f);
      };
      Index block = 0;
      for (; block + kSets <= w.groups(); block += kSets) project(std::integral_constant<int, kSets>(), block);
      for (; block < w.groups(); ++block) project(std::integral_constant<int, 1>(), block);
    }
  }

  // ---- forward, by kind of input -----------------------------------------------------------------------------------

  static void add_same(const Cov<T> &out, Index a, Index b, Index block, const Lanes<T> &x) {
    if (!out.dense) {
      lanes(&out.same(a, b, block * kLanes)) += x;
      if (a != b) lanes(&out.same(b, a, block * kLanes)) += x;
      return;
    }
    for (Index l = 0; l < kLanes && block * kLanes + l < out.n; ++l) {
      const Index j = block * kLanes + l;
      out.same(a, b, j) += x[l];
      if (a != b) out.same(b, a, j) += x[l];
    }
  }

  // axpy for the three places below: inlined it would fill kilobytes.
  static __attribute__((noinline)) void add(T *y, T a, const T *x, Index n) { axpy(y, a, x, n); }

  void dense_input_means(const Cov<T> &in, const Cov<T> &out, const Work &work) const {
    const Index m = w.M1 - 1, n = w.n;
    T *X = work.inner;  // X = C_ab W, m x n
    for (Index a = 0; a < in.rows; ++a) {
      for (Index b = 0; b < in.rows; ++b) {
        fill(X, T(0), m * n);
        for (Index q = 0; kVectors && n == 1 && q < m; ++q) {  // all p side by side: C_ab[p,q] = C_ba[q,p] exactly
          add(X, w.mean[q], in.row(b, q) + a * m, m);
        }
        for (Index p = 0; !(kVectors && n == 1) && p < m; ++p) {
          const T *c = in.row(a, p) + b * m;
          for (Index q = 0; q < m; ++q) add(X + p * n, c[q], w.mean + q * w.stride, n);
        }
        for (Index j = 0; j < n; ++j) {
          for (Index p = 0; p < m; ++p) add(out.row(a, j) + b * n, w.mean[p * w.stride + j], X + p * n, n);
        }
      }
    }
  }

  void independent_input_means(const Cov<T> &in, const Cov<T> &out) const {
    const Index m = w.M1 - 1, n = w.n;
    for (Index a = 0; a < in.rows; ++a) {
      for (Index b = 0; b < in.rows; ++b) {
        const T *c = &in.same(a, b, 0);
        if (w.stride == 1) {
          out.same(a, b, 0) += quadratic(w.mean, c, m);
          continue;
        }
        for (Index j = 0; j < n; ++j) {
          for (Index p = 0; p < m; ++p) {
            const T *wp = w.mean + p * w.stride;
            axpy(out.row(a, j) + b * n, wp[j] * c[p], wp, n);
          }
        }
      }
    }
  }

  // sum_pq S_j[p,q] C_ab[p,q] for the neurons of one group of `neuron` or `diagonal`.
  void own_weights(Index g, const Cov<T> &in, const Cov<T> &out, const Work &work) const {
    if (w.structure == KBT_DIAGONAL) {
      for (Index a = 0; a < in.rows; ++a) {
        for (Index b = 0; b < in.rows; ++b) {
          T sum = T(0);
          for (Index p = 0; p + 1 < w.M1; ++p) sum += w.d[p * w.stride + g] * in.same(a, b, p);
          out.same(a, b, g) += sum;
        }
      }
    } else if (w.abreast) {
      weights_times_cov(w.wide(g), in, work, [&](Index a, Index b, const Lanes<T> &x) { add_same(out, a, b, g, x); });
    } else {
      weights_times_cov(w.alone(g), in, work, [&](Index a, Index b, T x) {
        out.same(a, b, g) += x;
        if (a != b) out.same(b, a, g) += x;
      });
    }
  }

  // add(a, b, sum_pq S[p,q] C_ab[p,q]) for b <= a. With independent inputs only diag(S) counts; with dense ones the sum
  // is taken column by column of U: sum_r D_r U_r^T C_ab U_r.
  template <class Factor, class Add>
  void weights_times_cov(const Factor &s, const Cov<T> &in, const Work &work, Add add) const {
    using Value = typename Factor::Value;
    const Index m = w.M1 - 1;
    if (!in.dense) {
      for (Index a = 0; a < in.rows; ++a) {
        for (Index b = 0; b <= a; ++b) {
          const T *c = &in.same(a, b, 0);
          add(a, b, s.diagonal_times(c, m, work.vector));  // the bias has no variance
        }
      }
      return;
    }
    T *column = work.vector;  // column r of U with its unit diagonal
    for (Index a = 0; a < in.rows; ++a) {
      for (Index b = 0; b <= a; ++b) {
        Value sum = Factor::constant(T(0));
        for (Index r = 0; r < s.M; ++r) {
          const Index used = r < m ? r + 1 : m;  // the bias has no variance
          for (Index p = 0; p < used && p < r; ++p) Factor::at(column, p) = Factor::at(s.entry(p, r), 0);
          if (r < m) Factor::at(column, r) = Factor::constant(T(1));
          Value quadratic = Factor::constant(T(0));
          for (Index p = 0; p < used; ++p) {
            const T *c = in.row(a, p) + b * m;
            Value inner = Factor::constant(T(0));
            for (Index q = 0; q < used; ++q) inner += Factor::at(column, q) * c[q];
            quadratic += Factor::at(column, p) * inner;
          }
          sum += Factor::at(s.d, r) * quadratic;
        }
        add(a, b, sum);
      }
    }
  }

  // The same for `full`: sum_pq S_jk[p,q] C_ab[p,q] for all pairs of neurons. `full` is only ever given dense inputs.
  //
  // Rows of C_ab are read in whole lanes, and the zeros that pad U_r multiply what lies behind a row. 0 * x is 0 for a
  // finite x only, so nothing that an earlier call has left may lie there: behind a row lies the next one, and behind
  // the last row lie zeros that Head::forward or fill_input_cov has written with the matrix.
  void full_weights(const Cov<T> &in, const Cov<T> &out, const Work &work) const {
    const Index m = w.M1 - 1, rows = in.rows, apart = rows * m, size = padded(m);
    const Alone s = w.alone(0);
    T *column = work.vector, *X = work.inner;  // column: U_r, each neuron's part padded with zeros; X[k] = C_ab U_r[k]
    const T *u = s.u;
    for (Index r = 0; r < s.M; u += padded(r), ++r) {
      const Index last = r / w.M1;  // neurons 0..last have entries in this column
      fill(column + last * size, T(0), size);
      for (Index k = 0; k <= last; ++k) {
        const Index used = k < last || r - k * w.M1 > m ? m : r - k * w.M1;
        for (Index p = 0; p < used; ++p) column[k * size + p] = u[k * w.M1 + p];
      }
      if (r - last * w.M1 < m) column[last * size + r - last * w.M1] = T(1);
      for (Index a = 0; a < rows; ++a) {
        for (Index b = 0; b < rows; ++b) {
          for (Index k = 0; k <= last; ++k) {
            const T *const part = column + k * size;
            Index p = 0;
            for (; p + 4 <= m; p += 4) {
              const T *const c = in.row(a, p) + b * m;
              four_dots(part, c, c + apart, c + 2 * apart, c + 3 * apart, size, X + k * size + p);
            }
            for (; p < m; ++p) X[k * size + p] = dot(in.row(a, p) + b * m, part, m);
            fill(X + k * size + m, T(0), size - m);
          }
          for (Index j = 0; j <= last; ++j) {
            for (Index k = 0; k <= last; ++k) {
              out.row(a, j)[b * w.n + k] += s.d[r] * dot(column + j * size, X + k * size, size);
            }
          }
        }
      }
    }
  }

  // Rows of F of a group that stands alone are (row a, member j). Their entries before j * M1 are zero, and what is
  // read of row i starts with the lanes of the first other one.
  Index first_lanes(Index i) const { return i % w.members() * w.M1 / kLanes * kLanes; }
  // The zeros before these need not be stored. A small machine stores and adds them: it saves code.
  Index first_stored(Index i) const { return kVectors ? first_lanes(i) : 0; }

  void alone_cov_forward(Index g, const Cov<T> &out) {
    const Index rows = out.rows, members = w.members(), length = w.length();
    const Alone s = w.alone(g);
    T *f = F + g * rows * members * length;
    if (members == 1) {
      for (Index a = 0; a < rows; ++a) s.project(z + a * w.z_stride, f + a * length);
      for (Index a = 0; a < rows; ++a) {
        for (Index b = 0; b <= a; ++b) {
          const T x = s.weighted(f + a * length, f + b * length);
          own[(a * rows + b) * w.stride + g] = own[(b * rows + a) * w.stride + g] = x;
          out.same(a, b, g) += x;
          if (a != b) out.same(b, a, g) += x;
        }
      }
      return;
    }
    for (Index a = 0; a < rows; ++a) full_project(s, z + a * w.z_stride, f + a * members * length);
    T *weighted = f + rows * members * length;  // one spare row behind F
    const Index count = rows * members;
    for (Index i = 0; i < count; ++i) {
      const Index start = first_lanes(i);
      for (Index q = start; q < length; q += kLanes) lanes(weighted + q) = lanes(s.d + q) * lanes(f + i * length + q);
      const auto add = [&](Index k, T x) {
        out.data[i * count + k] += x;
        if (i != k) out.data[k * count + i] += x;
      };
      Index k = 0;
      for (; k + 4 <= i + 1; k += 4) {
        const T *fk = f + k * length + start;
        T x[4];
        four_dots(weighted + start, fk, fk + length, fk + 2 * length, fk + 3 * length, length - start, x);
        for (Index c = 0; c < 4; ++c) add(k + c, x[c]);
      }
      for (; k <= i; ++k) add(k, dot(weighted + start, f + k * length + start, length - start));
    }
  }

  // f[j][q] = sum_p U[(j,p),q] z_p, four columns q at a time over the neurons that all four have in common. The zeros
  // that pad z let a neuron's rows be read in whole lanes, a few numbers of the next neuron or column with them, and
  // behind the last column a few of D, which lies there. All of them are finite, as learned numbers always are.
  void full_project(const Alone &s, const T *z, T *f) const {
    const Index M = s.M, M1 = w.M1, length = w.length();
    for (Index j = 0; j < w.n; ++j) {  // what is read of each beside its own entries
      fill(f + j * length + first_stored(j), T(0), j * M1 - first_stored(j));
      fill(f + j * length + M, T(0), length - M);
    }
    const auto rest = [&](const T *column, Index q,
                          Index j) {  // from neuron j on, up to the weight's own unit diagonal
      for (; (j + 1) * M1 <= q; ++j) f[j * length + q] = dot(z, column + j * M1, M1);
      f[j * length + q] = dot(z, column + j * M1, q - j * M1) + z[q - j * M1];
    };
    const T *column = s.u;
    Index q = 0;
    for (; q + 4 <= M; q += 4) {
      const T *const c1 = column + padded(q), *const c2 = c1 + padded(q + 1), *const c3 = c2 + padded(q + 2);
      const Index common = q / M1;
      for (Index j = 0; j < common; ++j) {
        const Index at = j * M1;
        four_dots(z, column + at, c1 + at, c2 + at, c3 + at, padded(M1), f + j * length + q);
      }
      rest(column, q, common);
      rest(c1, q + 1, common);
      rest(c2, q + 2, common);
      rest(c3, q + 3, common);
      column = c3 + padded(q + 3);
    }
    for (; q < M; column += padded(q), ++q) rest(column, q, 0);
  }

  // ---- update, by structure ----------------------------------------------------------------------------------------

  // Cov(w,u) Lambda Cov(u,w) has the diagonal D_p^2 (z_p^T Lambda_j z_p), with z_p the column of input p over the rows.
  // What it takes of D_p is `shrink`, and `pull` moves the mean. A single neuron runs over its inputs, more run side by
  // side.
  int diagonal_update(const Adjoint<T> &adjoint, const Work &work) {
    const Index n = w.stride;
    T *pull = work.vector, *shrink = pull + n, *h = shrink + n;
    int floored = 0;
    if (adjoint.rows == 1) {
      T *lambda = h;
      fill(lambda, T(0), n);
      for (Index k = 0; k < adjoint.rank; ++k) {
        array(lambda, n) += adjoint.signs[k] * array(adjoint.B(k, 0), n) * array(adjoint.B(k, 0), n);
      }
      if (n == 1) return diagonal_run<true>(w.M1, z, adjoint.r(0), lambda, w.d, w.mean);
      for (Index p = 0; p < w.M1; ++p) {
        floored += diagonal_run<false>(n, z + p, adjoint.r(0), lambda, w.d + p * n, w.mean + p * n);
      }
      return floored;
    }
    const T one = T(1);
    for (Index p = 0; p < w.M1; ++p) {
      fill(pull, T(0), 2 * n);
      for (Index a = 0; a < adjoint.rows; ++a) axpy(pull, z[a * w.z_stride + p], adjoint.r(a), n);
      for (Index k = 0; k < adjoint.rank; ++k) {
        fill(h, T(0), n);
        for (Index a = 0; a < adjoint.rows; ++a) axpy(h, z[a * w.z_stride + p], adjoint.B(k, a), n);
        array(shrink, n) += adjoint.signs[k] * array(h, n) * array(h, n);
      }
      floored += diagonal_run<false>(n, &one, pull, shrink, w.d + p * n, w.mean + p * n);
    }
    return floored;
  }

  // mean += D z r and D <- D (1 - D z^2 lambda) over a run of inputs (z runs, r and lambda stand) or of neurons (the
  // reverse).
  template <bool kInputs>
  static int diagonal_run(Index count, const T *__restrict z, const T *__restrict r, const T *__restrict lambda,
                          T *__restrict d, T *__restrict mean) {
    int floored = 0;
    for (Index i = 0; i < count; ++i) {
      const T zi = kInputs ? z[i] : *z, ri = kInputs ? *r : r[i], li = kInputs ? *lambda : lambda[i];
      mean[i] += d[i] * (zi * ri);
      const T left = T(1) - d[i] * (zi * zi * li);
      const bool low = !(left >= smallest_share<T>());
      floored += low;
      d[i] *= low ? smallest_share<T>() : left;
    }
    return floored;
  }

  struct WideAdjoint {  // entry a of r (column 0) or of a column of B, for the neurons of one block
    const Adjoint<T> &adjoint;
    Index lane;
    Lanes<T> operator()(Index column, Index a) const {
      return lanes(adjoint.data + (column * adjoint.rows + a) * adjoint.stride + lane);
    }
  };

  int wide_joint_update(Index block, const Adjoint<T> &adjoint, bool fuse, const T *noise, const Work &work) {
    Wide s = w.wide(block);
    T *f = F + block * adjoint.rows * w.M1 * kLanes;
    const Index lane = block * kLanes;
    return joint_update(s, f, adjoint.rows, adjoint, fuse, noise, lane, s.step_in(work.step), work,
                        WideAdjoint{adjoint, lane}, [&](const T *gain, T scale) {
                          for (Index p = 0; p < w.M1; ++p) {
                            lanes(w.mean + p * w.stride + lane) += lanes(gain + p * kLanes) * scale;
                          }
                        });
  }

  // One row: a single rank-one step per neuron, for P blocks of neurons from `block` on.
  template <int P>
  int wide_update(Index block, const Adjoint<T> &adjoint, bool fuse, const T *noise, const Work &work) {
    int floored = 0;
    T *u[P];
    Lanes<T> r[P];
    for (Index i = 0; i < P; ++i) {
      Wide s = w.wide(block + i);
      const Index lane = (block + i) * kLanes;
      Lanes<T> lambda = Lanes<T>::Zero();
      for (Index c = 0; c < adjoint.rank; ++c) {
        const Lanes<T> b = lanes(adjoint.B(c, 0) + lane);
        lambda += adjoint.signs[c] * b * b;
      }
      Lanes<T> left = T(1) - lambda * lanes(own + lane);
      if (noise != nullptr) {
        compress<Wide>(work.B, work.O, 1, adjoint.rank, WideAdjoint{adjoint, lane});
        noise_among_others<Wide>(lane, adjoint, noise, work);
        left = lanes(work.Q);
      }
      const Lanes<T> share = Wide::at_least(left, smallest_share<T>(), floored);
      s.scale(F + (block + i) * w.M1 * kLanes, lambda, share, !fuse, s.step_in(work.step, i, P));
      u[i] = s.u;
      r[i] = lanes(adjoint.r(0) + lane);
    }
    T *const mean = w.mean + block * kLanes;
    const Index stride = w.stride;
    const T *const first = w.wide(block).step_in(work.step, 0, P).v;
    Wide::template pass_by_rows<P>(u, first, w.M1, [&](Index i, Index p, const Lanes<T> &b) {
      lanes(mean + p * stride + i * kLanes) += b * r[i];
    });
    return floored;
  }

  int alone_update(Index g, const Adjoint<T> &adjoint, bool fuse, const T *noise, const Work &work) {
    Alone s = w.alone(g);
    const typename Alone::Step step = s.step_in(work.step);
    const Index members = w.members(), dimensions = adjoint.rows * members;
    T *f = F + g * dimensions * w.length();
    const auto add_gain = [&](const T *gain, T scale) {
      if (w.stride == 1) return axpy(w.mean, scale, gain, w.M1);
      for (Index j = 0; j < members; ++j) {
        for (Index p = 0; p < w.M1; ++p) w.mean[p * w.stride + g + j] += gain[j * w.M1 + p] * scale;
      }
    };
    if (dimensions > 1) {
      return joint_update(
          s, f, dimensions, adjoint, fuse, noise, g, step, work,
          [&](Index column, Index i) {
            return adjoint.data[(column * adjoint.rows + i / members) * adjoint.stride + g + i % members];
          },
          add_gain);
    }
    int floored = 0;
    T lambda = T(0);
    for (Index k = 0; k < adjoint.rank; ++k) lambda += adjoint.signs[k] * adjoint.B(k, 0)[g] * adjoint.B(k, 0)[g];
    T left = T(1) - lambda * own[g];
    if (noise != nullptr && adjoint.rank == 1) {
      left = adjoint.signs[0] * *noise;
    } else if (noise != nullptr) {
      compress<Alone>(work.B, work.O, 1, adjoint.rank,
                      [&](Index column, Index) { return adjoint.data[column * adjoint.stride + g]; });
      noise_among_others<Alone>(g, adjoint, noise, work);
      left = *work.Q;
    }
    const T share = Alone::at_least(left, smallest_share<T>(), floored);
    s.rank_one(f, lambda, share, !fuse, step);
    add_gain(step.b, adjoint.r(0)[g]);
    return floored;
  }

  // Several dimensions (rows of a sample, members of a group) at once: METHOD section 5.
  // With H = B^T A the measurement has innovation covariance diag(sign) and noise Q = diag(sign) - H S H^T.
  // Measurements come before growth, so Q is quasi-definite and Q = L diag(q) L^T exists; the rows L^-1 H are then
  // independent, and each is one rank-one step that ends at share 1. adjoint_at(column, i): entry i of r (column 0) or
  // of a column of B, for the neurons of this group.
  template <class Factor, class AdjointAt, class AddGain>
  int joint_update(Factor &s, const T *f, Index dimensions, const Adjoint<T> &adjoint, bool fuse, const T *noise,
                   Index first, const typename Factor::Step &step, const Work &work, AdjointAt adjoint_at,
                   AddGain add_gain) {
    using Value = typename Factor::Value;
    const Index M = s.M, length = Factor::vector_count(M);
    int floored = 0;
    const auto first_entry = [&](Index i) { return Factor::kWidth == 1 ? first_stored(i) : 0; };

    const bool shorter = compressed(dimensions, adjoint.rank, fuse);
    const Index count = shorter ? dimensions : adjoint.rank;
    const bool single = count == 1 && !shorter && adjoint.rho != nullptr;  // its step computes the gain of the mean
    if (!single) {
      T *sum = work.vector;
      fill(sum, T(0), length);
      for (Index i = 0; i < dimensions; ++i) {
        const Value r = adjoint_at(0, i);
        for (Index q = first_entry(i); q < M; ++q) Factor::at(sum, q) += Factor::at(f + i * length, q) * r;
      }
      s.gain(sum, step.b);
      add_gain(step.b, T(1));
    }
    if (shorter) compress<Factor>(work.B, work.O, dimensions, adjoint.rank, adjoint_at);
    T *H = work.H;
    fill(H, T(0), count * length);
    for (Index k = 0; k < count; ++k) {
      for (Index i = 0; i < dimensions; ++i) {
        const Value b = shorter ? Value(Factor::at(work.B, i * dimensions + k)) : adjoint_at(k + 1, i);
        for (Index q = first_entry(i); q < M; ++q) Factor::at(H + k * length, q) += Factor::at(f + i * length, q) * b;
      }
    }

    T *Q = work.Q;
    if (noise != nullptr && shorter) noise_among_others<Factor>(first, adjoint, noise, work);
    for (Index i = 0; i < count && !(noise != nullptr && shorter); ++i) {
      for (Index k = 0; k <= i; ++k) {
        if (noise != nullptr) {
          Factor::at(Q, i * count + k) = Factor::constant(noise[i * count + k]);
        } else {
          const T sign = shorter ? T(1) : adjoint.signs[i];
          Factor::at(Q, i * count + k) = T(i == k) * sign - s.weighted(H + i * length, H + k * length);
        }
      }
    }
    for (Index k = 0; k < count; ++k) {  // Q = L diag(q) L^T in place, and H <- L^-1 H on the way
      const T sign = shorter ? T(1) : adjoint.signs[k];
      const Value pivot = sign * Factor::at_least(sign * Factor::at(Q, k * count + k), smallest_share<T>(), floored);
      Factor::at(Q, k * count + k) = pivot;
      for (Index i = k + 1; i < count; ++i) {
        const Value l = Factor::at(Q, i * count + k) / pivot;
        for (Index j = k + 1; j <= i; ++j) {
          const Value lj = j == i ? l : Value(Factor::at(Q, j * count + k));
          Factor::at(Q, i * count + j) -= l * lj * pivot;
        }
        Factor::at(Q, i * count + k) = l;
        for (Index q = 0; q < M; ++q) Factor::at(H + i * length, q) -= l * Factor::at(H + k * length, q);
      }
    }
    for (Index k = 0; k < count; ++k) {
      const T sign = shorter ? T(1) : adjoint.signs[k];
      const Value share = s.keep_steps(H + k * length, sign, sign * Factor::at(Q, k * count + k), floored);
      s.rank_one(H + k * length, Factor::constant(sign), share, !fuse, step);
      for (Index i = k + 1; i < count; ++i) s.advance(H + i * length, step);
    }
    if (single) add_gain(step.b, adjoint.rho[0]);
    return floored;
  }

  // Q of a neuron that stands apart from the others of the last layer, into work.Q. With B_j = C O, where C (in work.B)
  // is the compressed factor and the rows of O are orthonormal, I - C^T G_j C = O (noise + sum_{k != j} B_k^T G_k B_k)
  // O^T, with G_k = `own` of neuron k: positive terms only. `first` is the neuron, or the one in lane 0.
  template <class Factor>
  void noise_among_others(Index first, const Adjoint<T> &adjoint, const T *noise, const Work &work) const {
    using Value = typename Factor::Value;
    const Index y = adjoint.rows, r = adjoint.rank, size = y * r * Factor::kWidth;
    const T *C = work.B, *O = work.O;
    T *Q = work.Q, *X = work.O + size, *Y = X + size;
    for (Index i = 0; i < y; ++i) {  // Q = O noise O^T, and 1 in null directions
      for (Index c = 0; c < r; ++c) {
        Value sum = Factor::constant(T(0));
        for (Index e = 0; e < r; ++e) sum += Factor::at(O, i * r + e) * noise[e * r + c];
        Factor::at(X, i * r + c) = sum;
      }
      for (Index k = 0; k <= i; ++k) {
        Value sum = Factor::constant(T(0));
        for (Index c = 0; c < r; ++c) sum += Factor::at(X, i * r + c) * Factor::at(O, k * r + c);
        Factor::at(Q, i * y + k) = sum;
      }
      Factor::at(Q, i * y + i) += one_if_zero(Value(Factor::at(C, i * y + i)));
    }
    for (Index m = 0; m < w.n; ++m) {
      Value others = Factor::constant(T(1));  // 0 for the neuron itself
      if constexpr (Factor::kWidth == 1) {
        if (m == first) continue;
      } else {
        if (m >= first && m < first + kLanes) others[m - first] = T(0);
      }
      for (Index i = 0; i < y; ++i) {
        for (Index a = 0; a < y; ++a) {
          Value sum = Factor::constant(T(0));
          for (Index c = 0; c < r; ++c) sum += Factor::at(O, i * r + c) * adjoint.B(c, a)[m];
          Factor::at(Y, i * y + a) = sum;
        }
      }
      for (Index i = 0; i < y; ++i) {
        for (Index k = 0; k <= i; ++k) {
          Value sum = Factor::constant(T(0));
          for (Index a = 0; a < y; ++a) {
            for (Index b = 0; b < y; ++b) {
              sum += Factor::at(Y, i * y + a) * own[(a * y + b) * w.stride + m] * Factor::at(Y, k * y + b);
            }
          }
          Factor::at(Q, i * y + k) += sum * others;
        }
      }
    }
  }

  // B_j = C O with C lower triangular and the rows of O orthonormal (modified Gram-Schmidt), so that C C^T = B_j B_j^T
  // has lost no digits to squaring. Null directions are zero in both.
  template <class Factor, class AdjointAt>
  static void compress(T *C, T *O, Index dimensions, Index rank, AdjointAt adjoint_at) {
    using Value = typename Factor::Value;
    const auto inner = [&](Index i, Index k) {
      Value sum = Factor::constant(T(0));
      for (Index c = 0; c < rank; ++c) sum += Factor::at(O, i * rank + c) * Factor::at(O, k * rank + c);
      return sum;
    };
    for (Index i = 0; i < dimensions; ++i) {
      for (Index c = 0; c < rank; ++c) Factor::at(O, i * rank + c) = adjoint_at(c + 1, i);
      const Value whole = inner(i, i);
      for (Index k = 0; k < dimensions; ++k) {
        const Value part = k < i ? inner(i, k) : Factor::constant(T(0));
        Factor::at(C, i * dimensions + k) = part;
        for (Index c = 0; k < i && c < rank; ++c) Factor::at(O, i * rank + c) -= part * Factor::at(O, k * rank + c);
      }
      const Value root = root_or_zero(inner(i, i), whole, T(rank) * smallest_share<T>() * smallest_share<T>());
      Factor::at(C, i * dimensions + i) = root;
      for (Index c = 0; c < rank; ++c) {
        Factor::at(O, i * rank + c) = divide_or_zero(Value(Factor::at(O, i * rank + c)), root);
      }
    }
  }

  static T one_if_zero(T x) { return x > T(0) ? T(0) : T(1); }
  static Lanes<T> one_if_zero(const Lanes<T> &x) {
    Lanes<T> out;
    for (Index l = 0; l < kLanes; ++l) out[l] = one_if_zero(x[l]);
    return out;
  }
  static T divide_or_zero(T x, T y) { return y > T(0) ? x / y : T(0); }
  static T root_or_zero(T x, T whole, T share) { return x > whole * share ? std::sqrt(x) : T(0); }
  static Lanes<T> divide_or_zero(const Lanes<T> &x, const Lanes<T> &y) {
    Lanes<T> out;
    for (Index l = 0; l < kLanes; ++l) out[l] = divide_or_zero(x[l], y[l]);
    return out;
  }
  static Lanes<T> root_or_zero(const Lanes<T> &x, const Lanes<T> &whole, T share) {
    Lanes<T> out;
    for (Index l = 0; l < kLanes; ++l) out[l] = root_or_zero(x[l], whole[l], share);
    return out;
  }
};

}  // namespace kbt
