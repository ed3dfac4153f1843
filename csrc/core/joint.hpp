// joint.hpp - several rows or outputs at once: method.md (5.5), (5.6).
//
// With H = B^T A the measurement has innovation covariance diag(sign) and noise Q = diag(sign) - H S H^T. Measurements
// come before growth, so Q is quasi-definite and Q = L diag(q) L^T exists. The rows of L^-1 H are then independent, and
// each is one rank-one step that ends at share 1.
#pragma once

#include "structure.hpp"

namespace kbt {

// One group of neurons: W = 1, a ColumnUD over all members of the group; W = 8, the eight neurons of a LaneUD, each
// with a measurement of its own. `first` is the first neuron of the group.
template <class T, Index W>
class JointUpdate {
  using Value = Eigen::Array<T, W, 1>;  // a number for each lane

 public:
  JointUpdate(LayerParts<T> &layer, const UD<T, W> &factor, Index group, const Adjoint<T> &adjoint, const Work<T> &work)
      : layer_(layer),
        w_(layer.w),
        loops_(loops_of(layer)),
        s_(factor),
        adjoint_(adjoint),
        work_(work),
        first_(group * W),
        members_(W == 1 ? w_.members() : 1),
        dimensions_(adjoint.rows * members_),
        length_(UD<T, W>::vector_count(factor.M)),
        f_(layer.F + group * dimensions_ * length_),
        compressed_(!adjoint.may_grow() && adjoint.rank > dimensions_),
        count_(compressed_ ? dimensions_ : adjoint.rank) {}

  // Returns how many shares had to be floored.
  int run() {
    // A single step computes the gain of the mean on its way.
    const bool single = count_ == 1 && !compressed_ && adjoint_.rho != nullptr;
    if (!single) move_mean();
    if (compressed_) compress();
    measurement_rows();
    noise();
    int floored = decorrelate();
    for (Index k = 0; k < count_; ++k) {
      const Value sign = Value::Constant(sign_of(k));
      const Value share = kept_share(k, floored);
      loops_.rank_one(s_, H(k), sign.data(), share.data(), adjoint_.may_grow(), work_.step);
      for (Index i = k + 1; i < count_; ++i) loops_.advance(s_.M, H(i), work_.step);
    }
    if (single) add_to_mean(work_.step, adjoint_.rho[0]);
    return floored;
  }

  // One row and one dimension, with known noise: the share 1 - lambda z^T S z as a sum of positive terms.
  Value separate_share() {
    compress();
    noise_among_others();
    return at(work_.Q, 0);
  }

  static const FactorLoops<T, W> &loops_of(const LayerParts<T> &layer) {
    if constexpr (W == 1) {
      return layer.loops->column;
    } else {
      return layer.loops->lanes;
    }
  }

 private:
  static Value at_least(const Value &x, T floor, int &floored) {
    Value y;
    for (Index l = 0; l < W; ++l) {
      const bool low = !(x[l] >= floor);
      floored += low;
      y[l] = low ? floor : x[l];
    }
    return y;
  }

  // mean += scale * gain
  void add_to_mean(const T *gain, T scale) {
    if (W == 1 && w_.stride == 1) return axpy(w_.mean, scale, gain, w_.M1);
    for (Index j = 0; j < members_; ++j) {
      for (Index p = 0; p < w_.M1; ++p) at(w_.mean + p * w_.stride + first_ + j, 0) += at(gain, j * w_.M1 + p) * scale;
    }
  }

  static Eigen::Map<Value> at(T *x, Index i) { return Eigen::Map<Value>(x + i * W); }
  static Eigen::Map<const Value> at(const T *x, Index i) { return Eigen::Map<const Value>(x + i * W); }
  // Entry i of r (column 0) or of a column of B, for the neurons of this group.
  Eigen::Map<const Value> adjoint_at(Index column, Index i) const {
    const T *const from = adjoint_.column(column, i / members_);
    return at(from + first_ + i % members_, 0);
  }
  T *H(Index k) const { return work_.H + k * length_; }
  Eigen::Map<Value> Q(Index i, Index k) const { return at(work_.Q, i * count_ + k); }
  T sign_of(Index k) const { return compressed_ ? T(1) : adjoint_.signs[k]; }

  // y += F_i a, without the zeros that F_i begins with.
  void add_projection(T *y, Index i, const Value &a) {
    const Index start = W == 1 ? first_stored(i % members_, w_.M1) : 0;
    loops_.add(s_.M - start, y + start, a.data(), f_ + i * length_ + start);
  }

  // w += S A^T r
  void move_mean() {
    T *const sum = work_.vector;
    fill(sum, T(0), length_);
    for (Index i = 0; i < dimensions_; ++i) add_projection(sum, i, adjoint_at(0, i));
    loops_.gain(s_, sum, work_.step);
    add_to_mean(work_.step, T(1));
  }

  // H = B^T A in U coordinates
  void measurement_rows() {
    fill(work_.H, T(0), count_ * length_);
    for (Index k = 0; k < count_; ++k) {
      for (Index i = 0; i < dimensions_; ++i) {
        add_projection(H(k), i, compressed_ ? Value(at(work_.B, i * dimensions_ + k)) : Value(adjoint_at(k + 1, i)));
      }
    }
  }

  // The lower triangle of Q
  void noise() {
    if (adjoint_.noise != nullptr && compressed_) return noise_among_others();
    for (Index i = 0; i < count_; ++i) {
      for (Index k = 0; k <= i; ++k) {
        if (adjoint_.noise != nullptr) {
          Q(i, k).setConstant(adjoint_.noise[i * count_ + k]);
        } else {
          Value explained;
          loops_.weigh(s_, H(i), H(k), explained.data());
          Q(i, k) = T(i == k) * sign_of(i) - explained;
        }
      }
    }
  }

  // Q = L diag(q) L^T in place, and H <- L^-1 H on the way
  int decorrelate() {
    int floored = 0;
    for (Index k = 0; k < count_; ++k) {
      const T sign = sign_of(k);
      const Value pivot = sign * at_least(sign * Q(k, k), kSmallestShare<T>, floored);
      Q(k, k) = pivot;
      for (Index i = k + 1; i < count_; ++i) {
        const Value l = Q(i, k) / pivot;
        for (Index j = k + 1; j <= i; ++j) Q(i, j) -= l * (j == i ? l : Value(Q(j, k))) * pivot;
        Q(i, k) = l;
        const Value minus = -l;
        loops_.add(s_.M, H(i), minus.data(), H(k));
      }
    }
    return floored;
  }

  // alpha_0 of step k. A step that consists of rounding error is skipped, by f = 0 and alpha_0 = 1: alpha_M is 1 in
  // exact arithmetic, and there it is far from it. Numbers that differ by more orders of magnitude than T has digits do
  // that.
  Value kept_share(Index k, int &floored) {
    const T lambda = sign_of(k);
    Value share = lambda * Q(k, k), variance;
    loops_.weigh(s_, H(k), H(k), variance.data());
    for (Index l = 0; l < W; ++l) {
      if (std::fabs(share[l] + lambda * variance[l]) - T(0.5) * variance[l] <= T(4)) continue;
      for (Index q = 0; q < s_.M; ++q) H(k)[q * W + l] = T(0);
      share[l] = T(1);
      ++floored;
    }
    return share;
  }

  // B_j = C O with C lower triangular and the rows of O orthonormal (modified Gram-Schmidt), so that C C^T = B_j B_j^T
  // has lost no digits to squaring. Null directions are zero in both.
  void compress() {
    const Index rank = adjoint_.rank;
    T *const C = work_.B, *const O = work_.O;
    const auto inner = [&](Index i, Index k) {
      Value sum = Value::Zero();
      for (Index c = 0; c < rank; ++c) sum += at(O, i * rank + c) * at(O, k * rank + c);
      return sum;
    };
    for (Index i = 0; i < dimensions_; ++i) {
      for (Index c = 0; c < rank; ++c) at(O, i * rank + c) = adjoint_at(c + 1, i);
      const Value whole = inner(i, i);
      for (Index k = 0; k < dimensions_; ++k) {
        const Value part = k < i ? inner(i, k) : Value(Value::Zero());
        at(C, i * dimensions_ + k) = part;
        for (Index c = 0; k < i && c < rank; ++c) at(O, i * rank + c) -= part * at(O, k * rank + c);
      }
      const Value left = inner(i, i);
      const T share = T(rank) * kSmallestShare<T> * kSmallestShare<T>;
      for (Index l = 0; l < W; ++l) {
        const T root = left[l] > whole[l] * share ? std::sqrt(left[l]) : T(0);
        C[(i * dimensions_ + i) * W + l] = root;
        for (Index c = 0; c < rank; ++c) {
          T &o = O[(i * rank + c) * W + l];
          o = root > T(0) ? o / root : T(0);
        }
      }
    }
  }

  // Q of a neuron that is uncorrelated with the others of the last layer. With B_j = C O from compress(),
  // I - C^T G_j C = O (noise + sum_{k != j} B_k^T G_k B_k) O^T, with G_k = weight_var of neuron k: positive terms only.
  void noise_among_others() {
    const Index y = adjoint_.rows, r = adjoint_.rank, size = y * r * W;
    const T *C = work_.B, *O = work_.O, *noise = adjoint_.noise;
    T *const X = work_.O + size, *const Y = X + size;
    const auto Q = [&](Index i, Index k) { return at(work_.Q, i * y + k); };
    for (Index i = 0; i < y; ++i) {  // Q = O noise O^T, and 1 in null directions
      for (Index c = 0; c < r; ++c) {
        Value sum = Value::Zero();
        for (Index e = 0; e < r; ++e) sum += at(O, i * r + e) * noise[e * r + c];
        at(X, i * r + c) = sum;
      }
      for (Index k = 0; k <= i; ++k) {
        Value sum = Value::Zero();
        for (Index c = 0; c < r; ++c) sum += at(X, i * r + c) * at(O, k * r + c);
        Q(i, k) = sum;
      }
      for (Index l = 0; l < W; ++l) Q(i, i)[l] += C[(i * y + i) * W + l] > T(0) ? T(0) : T(1);
    }
    for (Index m = 0; m < w_.n; ++m) {
      Value others = Value::Ones();  // 0 for the neuron itself
      if (m >= first_ && m < first_ + W) others[m - first_] = T(0);
      if (W == 1 && m == first_) continue;
      for (Index i = 0; i < y; ++i) {
        for (Index a = 0; a < y; ++a) {
          Value sum = Value::Zero();
          for (Index c = 0; c < r; ++c) sum += at(O, i * r + c) * adjoint_.B(c, a)[m];
          at(Y, i * y + a) = sum;
        }
      }
      for (Index i = 0; i < y; ++i) {
        for (Index k = 0; k <= i; ++k) {
          Value sum = Value::Zero();
          for (Index a = 0; a < y; ++a) {
            for (Index b = 0; b < y; ++b) {
              sum += at(Y, i * y + a) * layer_.weight_var[(a * y + b) * w_.stride + m] * at(Y, k * y + b);
            }
          }
          Q(i, k) += sum * others;
        }
      }
    }
  }

  LayerParts<T> &layer_;
  Posterior<T> &w_;
  const FactorLoops<T, W> &loops_;
  const UD<T, W> s_;
  const Adjoint<T> &adjoint_;
  const Work<T> &work_;
  const Index first_, members_, dimensions_, length_;
  const T *const f_;
  // Lambda over a group has at most `dimensions` dimensions, so a longer B whose signs are all +1 is compressed.
  const bool compressed_;
  const Index count_;  // steps
};

}  // namespace kbt
