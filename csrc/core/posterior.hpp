// posterior.hpp - the weights of one layer: means, and UD factors of their covariance. method.md §5
//
// Every change of S is a rank-one step on the factors that only multiplies entries of D by positive numbers, so no
// rounding makes S indefinite, and float32 is enough for any number of updates.
#pragma once

#include "algebra.hpp"
#include "kbt.h"
#include "settings.hpp"

namespace kbt {

// n neurons with m inputs and a bias. A group is a set of neurons whose weights are correlated: all of them (`full`),
// or each alone (`neuron`). From eight neurons on, those of `neuron` are interleaved: a group is then eight neurons,
// lane by lane in a LaneUD. `shared` has one group, of one neuron that stands for all of them.
template <class T>
struct Posterior {
  Index n, M1, stride;  // M1 = m + 1 inputs with the bias last; stride: n, padded to lanes from 8 neurons on
  Index z_stride;       // M1 padded to whole lanes: the distance between rows of the input
  int structure;        // KBT_FULL, KBT_NEURON, KBT_DIAGONAL, KBT_SHARED
  bool interleaved;
  T prior_var;
  T *mean;  // M1 x stride, neurons innermost
  T *d;     // interleaved: groups x M1 x 8; full, neuron: groups x padded(M); diagonal: M1 x stride
  T *u;     // interleaved, full, neuron: groups x u_count; diagonal: none

  void shape(const kbt_config &cfg, Index layer) {
    const int covariance = cfg.covariance;
    n = cfg.widths[layer + 1];
    M1 = cfg.widths[layer] + 1;
    structure = covariance;
    interleaved = covariance == KBT_NEURON && n >= kLanes;
    stride = n >= kLanes ? padded(n) : n;
    z_stride = padded(M1);
    const double given = cfg.prior_var[layer];
    prior_var = static_cast<T>(given > 0.0 ? given : automatic_prior(cfg, static_cast<int>(layer)));
  }

  Index members() const { return structure == KBT_FULL ? n : 1; }  // neurons in a group
  Index groups() const { return interleaved ? stride / kLanes : matrices(); }
  Index M() const { return members() * M1; }  // weights in a group
  Index width() const { return interleaved ? kLanes : 1; }
  Index mean_count() const { return M1 * stride; }
  Index length() const { return interleaved ? M1 * kLanes : padded(M()); }  // of a vector over the rows of U
  Index d_count() const { return structure == KBT_DIAGONAL ? M1 * stride : groups() * length(); }
  Index u_count() const {
    if (structure == KBT_DIAGONAL) return 0;
    return groups() * (interleaved ? LaneUD<T>::u_count(M1) : ColumnUD<T>::u_count(M()));
  }
  // Projections F = U^T z of every row, kept from the forward pass for the update; and one spare row.
  Index projection_count(Index rows) const {
    if (structure == KBT_DIAGONAL) return 0;
    return groups() * rows * members() * length() + (interleaved ? 0 : length());
  }

  LaneUD<T> lanes(Index block) const { return {M1, d + block * M1 * kLanes, u + block * LaneUD<T>::u_count(M1)}; }
  ColumnUD<T> column(Index group) const { return {M(), d + group * length(), u + group * ColumnUD<T>::u_count(M())}; }
  MatrixView<T> means() const { return matrix<T>(mean, M1, stride, stride); }

  // Entries of D and U by matrix, for code that reads or writes the state.
  Index matrices() const { return structure == KBT_FULL || structure == KBT_SHARED ? 1 : n; }
  // Neurons whose variances can differ, and the distance between rows of them.
  Index distinct() const { return structure == KBT_SHARED ? 1 : n; }
  Index var_stride() const { return structure == KBT_SHARED ? 1 : stride; }
  T &D(Index matrix, Index p) const {
    if (structure == KBT_DIAGONAL) return d[p * stride + matrix];
    if (interleaved) return lanes(matrix / kLanes).d[p * kLanes + matrix % kLanes];
    return column(matrix).d[p];
  }
  T &U(Index matrix, Index p, Index q) const {  // p < q
    if (interleaved) return lanes(matrix / kLanes).entry(p, q)[matrix % kLanes];
    return *column(matrix).entry(p, q);
  }
  T covariance(Index matrix, Index p, Index q) const {  // S_pq
    const Index low = p < q ? p : q, high = p < q ? q : p;
    if (structure == KBT_DIAGONAL) return low == high ? D(matrix, low) : T(0);
    T sum = (low == high ? T(1) : U(matrix, low, high)) * D(matrix, high);
    for (Index r = high + 1; r < M(); ++r) sum += U(matrix, low, r) * D(matrix, r) * U(matrix, high, r);
    return sum;
  }

  struct Range {
    T smallest, largest;
  };
  Range range_of_D() const {
    Range range{D(0, 0), D(0, 0)};
    for (Index g = 0; g < matrices(); ++g) {
      for (Index p = 0; p < M(); ++p) {
        const T x = D(g, p);
        range.smallest = x < range.smallest ? x : range.smallest;
        range.largest = x > range.largest ? x : range.largest;
      }
    }
    return range;
  }

  // f(neuron, D) for every entry of D; of `full` and `shared`, the neuron is 0.
  template <class F>
  void each_factor(F f) const {
    for (Index g = 0; g < matrices(); ++g) {
      for (Index p = 0; p < M(); ++p) f(g, D(g, p));
    }
  }
  template <class Prior>
  void reset_factors(Prior prior) const {
    fill(d, T(0), d_count());
    fill(u, T(0), u_count());
    for (Index g = 0; g < matrices(); ++g) {
      const T var = prior(g);
      for (Index p = 0; p < M(); ++p) D(g, p) = var;
    }
  }
  void copy(const Posterior &other) const {
    const auto take = [](T *to, const T *from, Index n) {
      for (Index i = 0; i < n; ++i) to[i] = from[i];
    };
    take(mean, other.mean, mean_count());
    take(d, other.d, d_count());
    take(u, other.u, u_count());
  }
};

}  // namespace kbt
