// structure.hpp - the numbers of one linear layer, as the posterior structures (full.hpp, neuron.hpp, diagonal.hpp) see
// them. Each structure has the same three functions:
//   weight_cov  adds z_a^T S_jk z_b to Cov(u), the first term of method.md (2.2)
//   input_cov   adds sum_pq S_jk[p,q] C_ab[p,q], the last term
//   update      method.md (4.2): w += Cov(w,u) r, S += Cov(w,u) Lambda Cov(u,w). Returns how many shares were floored.
#pragma once

#include "loops.hpp"
#include "moments.hpp"
#include "posterior.hpp"

namespace kbt {

// Smallest share of a variance that one step may leave: below it rounding error dominates.
template <class T>
constexpr T kSmallestShare = std::numeric_limits<T>::epsilon();

template <class T>
struct LayerParts {
  Posterior<T> w;
  Loops<T> loops;
  T *z;           // rows x z_stride, means of the inputs with the constant 1 last and zeros behind
  T *F;           // U^T z of every row, from the forward pass
  T *weight_var;  // rows x rows x var_stride: z_a^T S_j z_b of every neuron, from the forward pass; not for groups of
                  // `full`

  const T *input(Index a) const { return z + a * w.z_stride; }
  T *projection(Index i) const { return F + i * w.length(); }
};

// Scratch shared by all layers.
template <class T>
struct Work {
  T *vector;  // forward: diag(S), or columns of U; update: gain of the mean
  T *inner;   // forward: products with the input covariance; update: shares
  T *step;    // rank-one steps
  T *H;       // joint updates: the measurement rows in U coordinates
  T *Q;       // joint updates: their noise
  T *B;       // joint updates: compressed factor of Lambda
  T *O;       // joint updates: orthonormal rows beside the compressed factor
};

constexpr int kMostSets = 4;  // room for LaneUDs that are updated together; the same everywhere, so arenas are

// How many numbers of scratch one layer needs.
struct WorkSizes {
  Index vector, inner, step, H, Q, B, O;

  template <class T>
  static WorkSizes of_rows_apart(const Posterior<T> &w) {
    WorkSizes sizes{};
    sizes.vector = 3 * w.stride;
    sizes.inner = padded(w.M1);
    sizes.step = w.interleaved ? LaneUD<T>::step_count(w.M1, kMostSets) : ColumnUD<T>::step_count(w.M());
    return sizes;
  }
  template <class T>
  static WorkSizes of(const Posterior<T> &w, Index rows, Index rank, bool fuse, bool separate) {
    const Index dimensions = rows * w.members(), width = w.width();
    const bool compressed = fuse && rank > dimensions;  // see JointUpdate
    const Index steps = compressed ? dimensions : rank;
    WorkSizes sizes{};
    sizes.vector = padded(w.M() * width) + (w.structure == KBT_FULL ? w.n * kLanes : 0);
    if (w.structure == KBT_DIAGONAL && sizes.vector < 3 * w.stride) sizes.vector = 3 * w.stride;
    sizes.inner = (w.M1 + kLanes) * (w.stride > kLanes ? w.stride : kLanes);
    sizes.step = w.interleaved ? LaneUD<T>::step_count(w.M1, kMostSets) : ColumnUD<T>::step_count(w.M());
    sizes.H = steps * w.length();
    sizes.Q = steps * steps * width;
    sizes.B = compressed ? dimensions * dimensions * width : 0;
    const Index beside = separate ? dimensions * rank + dimensions * dimensions : 0;  // noise_among_others
    sizes.O = compressed ? (dimensions * rank + beside) * width : 0;
    return sizes;
  }
  void grow_to(const WorkSizes &other) {
    const auto at_least = [](Index &x, Index y) { x = x < y ? y : x; };
    at_least(vector, other.vector);
    at_least(inner, other.inner);
    at_least(step, other.step);
    at_least(H, other.H);
    at_least(Q, other.Q);
    at_least(B, other.B);
    at_least(O, other.O);
  }
};

}  // namespace kbt
