// lane_ud.hpp - the loops over LaneUD, eight neurons side by side: projection, sums, and the rank-one step.
// method.md (5.2) to (5.4)
//
// All sums run in the order of the source, whatever the vector width of the machine.
#pragma once

#include "algebra.hpp"
#include "both_ud.hpp"

namespace kbt::KBT_TARGET {

// f = U^T z for P neighbouring factors with R vectors z. Four rows of U share each f_q, the factors share z, and what
// is read of a factor serves all z. f of the next factor is M * kLanes further on, that of the next z at f_stride.
template <int P, int R, class T>
KBT_INLINE void project_sets(const LaneUD<T> &first, Index set, const T *z, Index z_stride, T *f_first,
                             Index f_stride) {
  constexpr Index W = kLanes;
  const Index M = first.M, length = M * W;
  const T *row[P];
  T *f[P];
  for (int j = 0; j < P; ++j) {
    row[j] = first.u + (set + j) * LaneUD<T>::u_count(M);
    f[j] = f_first + j * length;
  }
  for (Index q = 0; q < M; ++q) {
    for (int r = 0; r < R; ++r) {
      const Lanes<T> zq = constant(z[r * z_stride + q]);
      for (Index l = 0; l < W; l += kWidth) {
        KBT_UNROLL_ALL
        for (int j = 0; j < P; ++j) store(f[j] + r * f_stride + q * W + l, zq);
      }
    }
  }
  Index p = 0;
  for (; kVectors && p + 4 < M; p += 4) {
    const Index count = (M - p - 4) * W;
    Lanes<T> z0[R], z1[R], z2[R], z3[R];
    KBT_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
      const T *const from = z + r * z_stride + p;
      z0[r] = constant(from[0]), z1[r] = constant(from[1]), z2[r] = constant(from[2]), z3[r] = constant(from[3]);
    }
    KBT_UNROLL_ALL
    for (int j = 0; j < P; ++j) {
      const T *const r0 = row[j] + 3 * W, *const r1 = r0 + count + 2 * W;
      const T *const r2 = r1 + count + W, *const r3 = r2 + count;
      T *const t = f[j] + 4 * W;
      KBT_UNROLL_ALL
      for (int r = 0; r < R; ++r) {
        T *const to = t + r * f_stride;
        store(to - 3 * W, load(to - 3 * W) + load(r0 - 3 * W) * z0[r]);
        store(to - 2 * W, (load(to - 2 * W) + load(r0 - 2 * W) * z0[r]) + load(r1 - 2 * W) * z1[r]);
        store(to - W, ((load(to - W) + load(r0 - W) * z0[r]) + load(r1 - W) * z1[r]) + load(r2 - W) * z2[r]);
      }
      KBT_UNROLL
      for (Index i = 0; i < count; i += W) {
        const Lanes<T> u0 = load(r0 + i), u1 = load(r1 + i), u2 = load(r2 + i), u3 = load(r3 + i);
        KBT_UNROLL_ALL
        for (int r = 0; r < R; ++r) {
          T *const to = t + r * f_stride + i;
          const Lanes<T> two = (load(to) + u0 * z0[r]) + u1 * z1[r];
          store(to, (two + u2 * z2[r]) + u3 * z3[r]);
        }
      }
      row[j] = r3 + count;
      f[j] = t;
    }
  }
  for (; p < M; ++p) {
    for (int j = 0; j < P; ++j) {
      f[j] += W;
      const Index count = (M - p - 1) * W;
      for (int r = 0; r < R; ++r) {
        const Lanes<T> zp = constant(z[r * z_stride + p]);
        T *const to = f[j] + r * f_stride;
        for (Index i = 0; i < count; i += kWidth) store(to + i, load(to + i) + load(row[j] + i) * zp);
      }
      row[j] += count;
    }
  }
}

// f = U^T z for all factors, whose f are f_stride apart.
template <class T>
void project_lanes(const LaneUD<T> &first, Index blocks, const T *z, T *f, Index f_stride) {
  Index b = 0;
  for (; kSets < T >> 1 && b + kSets<T> <= blocks && f_stride == first.M * kLanes; b += kSets<T>) {
    project_sets<kSets<T>, 1>(first, b, z, 0, f + b * f_stride, 0);
  }
  for (; b < blocks; ++b) project_sets<1, 1>(first, b, z, 0, f + b * f_stride, 0);
}

// f = U^T z of one factor for several z, one f behind the other.
template <class T>
void project_rows(const LaneUD<T> &s, Index rows, const T *z, Index z_stride, T *f) {
  constexpr int R = kMany<T> ? 2 : 1;
  const Index length = s.M * kLanes;
  Index a = 0;
  for (; R > 1 && a + R <= rows; a += R) project_sets<1, R>(s, 0, z + a * z_stride, z_stride, f + a * length, length);
  for (; a < rows; ++a) project_sets<1, 1>(s, 0, z + a * z_stride, 0, f + a * length, 0);
}

// f^T D g of one factor
template <class T>
void weigh_lanes(const LaneUD<T> &s, const T *f, const T *g, T *out) {
  for (Index l = 0; l < kLanes; l += kWidth) {
    Lanes<T> sum = constant(T(0));
    KBT_UNROLL
    for (Index i = l; i < s.M * kLanes; i += kLanes) sum = sum + load(f + i) * load(s.d + i) * load(g + i);
    store(out + l, sum);
  }
}

// f = U^T z and var = f^T D f of every block, for a sample of one row; out += var.
template <class T>
void forward_lanes(const LaneUD<T> &first, Index blocks, const T *z, T *f, T *var, T *out) {
  const Index length = first.M * kLanes;
  project_lanes(first, blocks, z, f, length);
  LaneUD<T> s = first;
  for (Index b = 0; b < blocks; ++b, f += length, s.d += length, var += kLanes, out += kLanes) {
    weigh_lanes(s, f, f, var);
    for (Index l = 0; l < kLanes; l += kWidth) store(out + l, load(out + l) + load(var + l));
  }
}

// b = U D f, which is S a for f = U^T a.
template <class T>
void gain_lanes(const LaneUD<T> &s, const T *f, T *b) {
  for (Index l = 0; l < kLanes; l += kWidth) {
    const T *row = s.u + l, *const d = s.d + l, *const fl = f + l;
    for (Index p = 0; p < s.M; ++p) {
      Lanes<T> sum = load(d + p * kLanes) * load(fl + p * kLanes);
      for (Index q = p + 1; q < s.M; ++q, row += kLanes) {
        sum = sum + load(row) * (load(d + q * kLanes) * load(fl + q * kLanes));
      }
      store(b + p * kLanes + l, sum);
    }
  }
}

// sum_p S_pp c_p over the first c.size() weights, for a c shared by all lanes: sum_p c_p (D_p + sum_q U_pq^2 D_q)
template <class T>
void diagonal_times_lanes(const LaneUD<T> &s, const ConstVectorView<T> &c, T *, T *out) {
  for (Index l = 0; l < kLanes; l += kWidth) {
    const T *row = s.u + l, *const d = s.d + l;
    Lanes<T> sum = constant(T(0));
    for (Index p = 0; p < c.size(); ++p) {
      Lanes<T> inner = load(d + p * kLanes);
      for (Index q = p + 1; q < s.M; ++q, row += kLanes) inner = inner + load(row) * load(row) * load(d + q * kLanes);
      sum = sum + inner * constant(c.data()[p]);
    }
    store(out + l, sum);
  }
}

// (5.3) for lanes l.. of one factor: v = D f, k_q = -lambda f_q / alpha_{q-1}, D_q <- D_q alpha_{q-1} / alpha_q, for
// lambda > 0 and alpha_0 = share.
template <class T>
KBT_INLINE void scale_lanes(const LaneUD<T> &s, Index l, const T *f, const Lanes<T> &lambda, const Lanes<T> &share,
                            const Step<T, kLanes> &step) {
  const Lanes<T> one = constant(T(1)), minus_lambda = -lambda;
  const Index k_from_v = step.k - step.v;
  Lanes<T> before = share, inverse = one / before;
  T *v = step.v + l;
  for (Index i = l; i < s.M * kLanes; i += kLanes, v += step.stride) {
    const Lanes<T> fi = load(f + i), di = load(s.d + i), vi = di * fi, lf = minus_lambda * fi;
    const Lanes<T> after = before - lf * vi;
    store(v, vi);
    store(v + k_from_v, lf * inverse);
    inverse = one / after;
    store(s.d + i, di * (before / after));  // not before * inverse: over 10^6 steps that rounding adds up
    before = after;
  }
}

// (5.4) for the first rows of what is left of a factor, `left` rows: as pass_lanes. Returns the row behind them. With
// kNext, the projection of the next z goes on too, while the new rows are at hand: z and f start at the first row.
template <bool kMean, bool kNext, class T>
KBT_INLINE T *pass_rows(T *u, Index left, const T *v, const Lanes<T> &rate, T *to, Index to_stride, const T *z, T *f) {
  constexpr Index W = kLanes, kRun = 2 * W;
  T *row[kRows];
  Lanes<T> b[kRows], zi[kRows];
  KBT_UNROLL_ALL
  for (Index i = 0; i < kRows; ++i) {
    row[i] = u;
    u += (left - i - 1) * W;
    b[i] = load(v + i * kRun);
    if (kNext) zi[i] = constant(z[i]);
  }
  KBT_UNROLL_ALL
  for (Index i = 0; i < kRows; ++i) {
    KBT_UNROLL_ALL
    for (Index q = i + 1; q < kRows; ++q, row[i] += W) {
      const Lanes<T> old = load(row[i]), next = load(v + q * kRun + W) * b[i] + old;
      store(row[i], next);
      b[i] = b[i] + old * load(v + q * kRun);
      if (kNext) store(f + q * W, load(f + q * W) + next * zi[i]);
    }
  }
  const T *vq = v + kRows * kRun;
  const Index count = (left - kRows) * W;
  if (kNext) f += kRows * W;
  for (Index n = 0; n < count; n += W, vq += kRun) {
    const Lanes<T> v_n = load(vq), k_n = load(vq + W);
    Lanes<T> sum = kNext ? load(f + n) : v_n;
    KBT_UNROLL_ALL
    for (Index i = 0; i < kRows; ++i) {
      const Lanes<T> old = load(row[i] + n), next = k_n * b[i] + old;
      store(row[i] + n, next);
      b[i] = b[i] + old * v_n;
      if (kNext) sum = sum + next * zi[i];
    }
    if (kNext) store(f + n, sum);
  }
  KBT_UNROLL_ALL
  for (Index i = 0; i < kRows; ++i, to += to_stride) store(to, kMean ? load(to) + b[i] * rate : b[i]);
  return u;
}

// (5.4) for P neighbouring factors at once, or for one and several of its rows, because one row alone would wait for
// its own sum b_p:
//   U_pq <- U_pq + k_q b_p,  b_p <- b_p + (old U_pq) v_q  for q = p+1, p+2, ..., starting from b_p = v_p.
// to_p = b_p = (S a)_p, or with kMean, to_p += b_p r.
template <int P, bool kMean, class T>
KBT_INLINE void pass_lanes(const LaneUD<T> &first, Index set, const T *v_first, const T *r, T *to, Index to_stride) {
  constexpr Index W = kLanes, kRun = 2 * P * W;
  for (Index l = 0; l < kLanes; l += kWidth) {
    const T *v = v_first + l;
    T *row[P];
    Lanes<T> rate[P];
    for (int j = 0; j < P; ++j) {
      row[j] = first.u + (set + j) * LaneUD<T>::u_count(first.M) + l;
      rate[j] = kMean ? load_any(r + j * W + l) : constant(T(0));
    }
    Index p = 0;
    if constexpr (P == 1 && kMany<T>) {
      for (; p + kRows < first.M; p += kRows, v += kRows * kRun) {
        row[0] = pass_rows<kMean, false, T>(row[0], first.M - p, v, rate[0], to + p * to_stride, to_stride, nullptr,
                                            nullptr);
      }
    }
    for (; p < first.M; ++p) {
      Lanes<T> b[P];
      KBT_UNROLL_ALL
      for (int j = 0; j < P; ++j) b[j] = load(v + j * W);
      v += kRun;
      const T *vq = v;
      const Index count = (first.M - p - 1) * W;
      KBT_UNROLL
      for (Index i = 0; i < count; i += W, vq += kRun) {
        KBT_UNROLL_ALL
        for (int j = 0; j < P; ++j) {
          const Lanes<T> old = load(row[j] + i);
          store(row[j] + i, load(vq + (P + j) * W) * b[j] + old);
          b[j] = b[j] + old * load(vq + j * W);
        }
      }
      KBT_UNROLL_ALL
      for (int j = 0; j < P; ++j) {
        T *const target = to + p * to_stride + j * W + l;
        row[j] += count;
        store(target, kMean ? load(target) + b[j] * rate[j] : b[j]);
      }
    }
  }
}

// One step on one factor; the gain S a of the old S is left in the scratch.
template <class T>
void rank_one_lanes(const LaneUD<T> &s, const T *f, const T *lambda, const T *share, bool may_grow, T *memory) {
  const Step<T, kLanes> step(memory, s.M);
  if (may_grow) {
    scale_with_growth(s, f, lambda, share, step);
  } else {
    for (Index l = 0; l < kLanes; l += kWidth) {
      scale_lanes(s, l, f, load_any(lambda + l), load_any(share + l), step);
    }
  }
  pass_lanes<1, false>(s, 0, step.v, f, step.gain, kLanes);
}

// The same with all lambda >= 0, and with next_f = U^T next_z of the new factor in the same pass, unless next_z is
// null.
template <class T>
void rank_one_before(const LaneUD<T> &s, const T *f, const T *lambda, const T *share, T *memory, const T *next_z,
                     T *next_f) {
  if (!kMany<T> || next_z == nullptr) {
    rank_one_lanes(s, f, lambda, share, false, memory);
    if (next_z != nullptr) project_sets<1, 1>(s, 0, next_z, 0, next_f, 0);
    return;
  }
  constexpr Index W = kLanes, kRun = 2 * W;
  const Step<T, W> step(memory, s.M);
  scale_lanes(s, 0, f, load_any(lambda), load_any(share), step);
  for (Index q = 0; q < s.M; ++q) store(next_f + q * W, constant(next_z[q]));
  const Lanes<T> unused = constant(T(0));
  T *row = s.u;
  Index p = 0;
  for (; p + kRows < s.M; p += kRows) {
    row = pass_rows<false, true>(row, s.M - p, step.v + p * kRun, unused, step.gain + p * W, W, next_z + p,
                                 next_f + p * W);
  }
  for (; p < s.M; ++p) {
    Lanes<T> b = load(step.v + p * kRun);
    const Lanes<T> zp = constant(next_z[p]);
    for (Index q = p + 1; q < s.M; ++q, row += W) {
      const T *const vq = step.v + q * kRun;
      const Lanes<T> old = load(row), next = load(vq + W) * b + old;
      store(row, next);
      b = b + old * load(vq);
      store(next_f + q * W, load(next_f + q * W) + next * zp);
    }
    store(step.gain + p * W, b);
  }
}

// lambda = sum_k sign_k B_k^2 of the neurons from j on.
template <class T>
KBT_INLINE Lanes<T> lambda_of(const RowUpdate<T> &row, Index j) {
  Lanes<T> sum = constant(T(0));
  for (Index k = 0; k < row.B.rows(); ++k) {
    const Lanes<T> Bk = load(row.B.data() + k * row.B.outerStride() + j);
    sum = sum + constant(row.signs[k]) * Bk * Bk;
  }
  return sum;
}

template <int P, class T>
KBT_INLINE void update_sets(const LaneUD<T> &first, Index set, const RowUpdate<T> &row, Lanes<T> &floored) {
  const Index M = first.M, length = M * kLanes;
  for (int i = 0; i < P; ++i) {
    const LaneUD<T> s{M, first.d + (set + i) * length, nullptr};
    const Step<T, kLanes> step(row.memory, M, i, P);
    const T *const f = row.f + (set + i) * length;
    alignas(32) T lambdas[kLanes], shares[kLanes];
    for (Index l = 0; l < kLanes; l += kWidth) {
      const Index j = (set + i) * kLanes + l;
      const Lanes<T> lambda = lambda_of(row, j);
      Lanes<T> share = row.share != nullptr ? load(row.share + j) : constant(T(1)) - lambda * load(row.variance + j);
      share = at_least(share, row.least, floored);
      if (!row.may_grow) scale_lanes(s, l, f, lambda, share, step);
      if (row.may_grow) store(lambdas + l, lambda), store(shares + l, share);
    }
    if (row.may_grow) scale_with_growth(s, f, lambdas, shares, step);
  }
  const Index j = set * kLanes;
  pass_lanes<P, true>(first, set, Step<T, kLanes>(row.memory, M, 0, P).v, row.r + j, row.mean + j, row.stride);
}

// One row: a step on each of the factors, and mean += S a r. Returns how many shares were floored.
template <class T>
int update_lanes(const LaneUD<T> &first, Index blocks, const RowUpdate<T> &row) {
  Lanes<T> floored = constant(T(0));
  Index b = 0;
  for (; kSets < T >> 1 && b + kSets<T> <= blocks; b += kSets<T>) update_sets<kSets<T>>(first, b, row, floored);
  for (; b < blocks; ++b) update_sets<1>(first, b, row, floored);
  return static_cast<int>(sum_of_lanes(floored));
}

// out = sum_p x_p z_p lane by lane for P neighbouring x of M * kLanes numbers, p in order.
template <int P, class T>
KBT_INLINE void dot_sets(Index M, const T *x, const T *z, T *out) {
  for (Index l = 0; l < kLanes; l += kWidth) {
    Lanes<T> sum[P];
    KBT_UNROLL_ALL
    for (int j = 0; j < P; ++j) sum[j] = constant(T(0));
    for (Index p = 0; p < M; ++p) {
      const Lanes<T> zp = constant(z[p]);
      KBT_UNROLL_ALL
      for (int j = 0; j < P; ++j) sum[j] = sum[j] + load(x + (j * M + p) * kLanes + l) * zp;
    }
    KBT_UNROLL_ALL
    for (int j = 0; j < P; ++j) store(out + j * kLanes + l, sum[j]);
  }
}
template <class T>
void dot_lanes(Index M, Index count, const T *x, const T *z, T *out) {
  Index o = 0;
  for (; kSets < T >> 1 && o + kSets<T> <= count; o += kSets<T>) {
    dot_sets<kSets<T>>(M, x + o * M * kLanes, z, out + o * kLanes);
  }
  for (; o < count; ++o) dot_sets<1>(M, x + o * M * kLanes, z, out + o * kLanes);
}

// y += a x lane by lane
template <class T>
void add_lanes(Index M, T *y, const T *a, const T *x) {
  for (Index l = 0; l < kLanes; l += kWidth) {
    const Lanes<T> al = load_any(a + l);
    for (Index i = l; i < M * kLanes; i += kLanes) store(y + i, load(y + i) + load(x + i) * al);
  }
}

}  // namespace kbt::KBT_TARGET
