// views.hpp - the arguments of the loops: Eigen views of numbers in the arena, and UD factors.
//
// Nothing here depends on the instruction set. The folder's other headers are compiled once per instruction set, each
// time in a namespace of its own (KBT_TARGET), and are reached through the table in table.hpp.
#pragma once

#if defined(__arm__) && !defined(EIGEN_DONT_VECTORIZE)
#define EIGEN_DONT_VECTORIZE  // 32-bit NEON flushes subnormals and divides approximately
#endif
#define EIGEN_NO_IO
#define EIGEN_NO_DEBUG
#define EIGEN_FAST_MATH 0
#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__FAST_MATH__)
#error "kbt must not be built with -ffast-math: it promises the same bits on every machine"
#endif

#define KBT_INLINE inline __attribute__((always_inline))
#define KBT_SELDOM __attribute__((cold, noinline))  // not once per sample: small rather than fast

namespace kbt {

#ifdef KBT_TARGET_AVX2
#define KBT_TARGET avx2
namespace avx2 {}
#else
#define KBT_TARGET baseline
namespace baseline {}
using namespace baseline;
#endif

using Index = std::ptrdiff_t;

constexpr Index kLanes = 8;  // neurons side by side; also the number of partial sums of a dot product

constexpr Index whole_lanes(Index n) {  // n rounded down to whole lanes
  return n & -kLanes;
}
constexpr Index padded(Index n) {  // and up
  return whole_lanes(n + kLanes - 1);
}

template <class T>
using VectorView = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>
using ConstVectorView = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>  // rows one after another, at an outer stride
using MatrixView =
    Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, 0, Eigen::OuterStride<>>;

template <class T>
VectorView<T> array(T *x, Index n) {
  return VectorView<T>(x, n);
}
template <class T>
ConstVectorView<T> array(const T *x, Index n) {
  return ConstVectorView<T>(x, n);
}
template <class T>
ConstVectorView<T> constant_view(const T *x, Index n) {
  return ConstVectorView<T>(x, n);
}
template <class T>
MatrixView<T> matrix(const T *x, Index rows, Index columns, Index stride) {
  return MatrixView<T>(x, rows, columns, Eigen::OuterStride<>(stride));
}

// UD factors of W symmetric M x M matrices, S = U D U^T with U unit upper triangular: method.md (5.2). The layout
// follows the loops:
//   W = kLanes  LaneUD: eight neurons side by side, lane = neuron. Rows of U one after another, eight numbers an entry,
//               so that the sums of a pass along a row stay in registers.
//   W = 1       ColumnUD: one matrix, lane = row of U. Columns one after another, each padded to whole lanes with
//   zeros.
template <class T, Index W>
struct UD {
  static_assert(W == 1 || W == kLanes, "a factor is stored alone or in a full set of lanes");

  Index M;
  T *d;  // vector_count(M)
  T *u;  // u_count(M)

  static constexpr Index vector_count(Index M) { return W == 1 ? padded(M) : M * W; }  // a vector over the rows of U
  static constexpr Index u_count(Index M) { return W == 1 ? column_offset(M) : M * (M - 1) / 2 * W; }
  static constexpr Index column_offset(Index q) {  // W = 1: columns 1..8 take 8 numbers, 9..16 take 16, ...
    const Index full = (q - 1) / kLanes, rest = (q - 1) % kLanes;
    return q < 2 ? 0 : kLanes * (kLanes * full * (full + 1) / 2 + rest * (full + 1));
  }
  T *entry(Index p, Index q) const {  // U_pq, p < q
    return W == 1 ? u + column_offset(q) + p : u + (p * (2 * M - p - 1) / 2 + q - p - 1) * W;
  }
  // Scratch of rank-one steps on `sets` neighbouring factors: S a, then v and k of each set, then alpha.
  static constexpr Index step_count(Index M, Index sets = 1) { return (2 + 2 * sets) * vector_count(M) + kLanes; }
};
template <class T>
using LaneUD = UD<T, kLanes>;
template <class T>
using ColumnUD = UD<T, 1>;

// What a rank-one step leaves in its scratch. LaneUD: v and k of all sets alternate, so that a pass reads one array.
template <class T, Index W>
struct Step {
  T *gain;       // S a
  T *v, *k;      // method.md (5.3), (5.4)
  T *alpha;      // W = 1, or growth
  Index stride;  // from v_q to v_q+1, and from k_q to k_q+1

  Step(T *memory, Index M, Index set = 0, Index sets = 1) {
    const Index length = UD<T, W>::vector_count(M);
    T *const runs = memory + length;
    gain = memory;
    alpha = runs + 2 * sets * length;
    v = W == 1 ? runs : runs + set * W;
    k = W == 1 ? runs + length : runs + (sets + set) * W;
    stride = W == 1 ? 1 : 2 * sets * W;
  }
};

// What one row of a sample changes in a layer of independent neurons: a rank-one step each, method.md (5.1).
template <class T>
struct RowUpdate {
  const T *f;         // U^T z of every factor
  MatrixView<T> B;    // rank x neurons, with Lambda = -B^T diag(signs) B
  const T *signs;     // rank
  const T *variance;  // z^T S z of every neuron
  const T *share;     // what the step leaves of it, where that is known better than 1 - lambda z^T S z; else null
  T least;            // smallest share that is allowed
  const T *r;
  bool may_grow;  // some signs are -1
  T *mean;        // M x stride
  Index stride;
  T *memory;  // scratch: Step
};

}  // namespace kbt
