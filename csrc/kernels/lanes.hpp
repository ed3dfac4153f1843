// lanes.hpp - the vector vocabulary of the loops.
//
// Vec<T>    what the machine computes at once: a vector, or one number where there are none.
// Lanes<T>  kWidth numbers made of Vecs: all eight lanes, or some of them where there are no vectors. A loop over lanes
//           then runs several times, and its sums still stay in registers.
// Every operation is element by element, so the width of the machine's vectors does not change a bit.
#pragma once

#include "views.hpp"

#ifdef EIGEN_DONT_VECTORIZE
#define KBT_UNROLL
#define KBT_UNROLL_ALL
#elif defined(__clang__)
#define KBT_UNROLL _Pragma("unroll(2)")
#define KBT_UNROLL_ALL _Pragma("unroll")
#define KBT_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define KBT_UNROLL _Pragma("GCC unroll 2")
#define KBT_UNROLL_ALL _Pragma("GCC unroll 32")
#define KBT_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, ShuffleMask{__VA_ARGS__})
#endif

namespace kbt::KBT_TARGET {

#ifdef EIGEN_DONT_VECTORIZE
constexpr bool kVectors = false;  // one set of lanes at a time, in plain loops: code size counts
#else
constexpr bool kVectors = true;  // several sets at once, to hide the latency of one, and rows and columns in fours
#endif
#if defined(KBT_TARGET_AVX2) || defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
// Factors or sets of lanes that one loop works on.
template <class T>
constexpr int kSets = kVectors ? (sizeof(T) == sizeof(float) ? 4 : 2) : 1;
constexpr Index kWideRow = 512;  // columns from which on a matrix is read row by row
constexpr Index kRows = 4;       // rows of one factor that one loop works on, where T is float
template <class T>
constexpr bool kMany = kVectors && sizeof(T) == sizeof(float);

// ---- Vec -----------------------------------------------------------------------------------------------------------

template <class T, bool vectors = kVectors>
struct VecOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  typedef T Memory __attribute__((vector_size(kVectorBytes), aligned(16), may_alias));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <class T>
struct VecOf<T, false> {
  using Type = T;
  using Memory = T;
  using Unaligned = T;
};
template <class T>
using Vec = typename VecOf<T>::Type;

// ---- Lanes ---------------------------------------------------------------------------------------------------------

constexpr Index kWidth = kVectors ? kLanes : 4;  // on a Cortex-M, eight cost 3 kB of flash and save no instructions
template <class T>
constexpr int kParts = static_cast<int>(kWidth *Index(sizeof(T)) / Index(sizeof(Vec<T>)));

template <class T, int P = kParts<T>>
struct Lanes {
  Lanes<T, P / 2> low, high;
};
template <class T>
struct Lanes<T, 1> {
  Vec<T> v;
};

template <class T>
constexpr Index kVecSize = sizeof(Vec<T>) / sizeof(T);

template <class T, int P = kParts<T>>
KBT_INLINE Lanes<T, P> constant(T x) {
  if constexpr (P == 1) {
    return {x - Vec<T>{}};  // x in every lane, -0 included
  } else {
    return {constant<T, P / 2>(x), constant<T, P / 2>(x)};
  }
}
template <class T, int P = kParts<T>>
KBT_INLINE Lanes<T, P> load(const T *x) {  // at a multiple of eight numbers from an aligned start
  if constexpr (P == 1) {
    return {*reinterpret_cast<const typename VecOf<T>::Memory *>(x)};
  } else {
    return {load<T, P / 2>(x), load<T, P / 2>(x + P / 2 * kVecSize<T>)};
  }
}
template <class T, int P = kParts<T>>
KBT_INLINE Lanes<T, P> load_any(const T *x) {
  if constexpr (P == 1) {
    return {*reinterpret_cast<const typename VecOf<T>::Unaligned *>(x)};
  } else {
    return {load_any<T, P / 2>(x), load_any<T, P / 2>(x + P / 2 * kVecSize<T>)};
  }
}
template <class T, int P>
KBT_INLINE void store(T *to, const Lanes<T, P> &x) {
  if constexpr (P == 1) {
    *reinterpret_cast<typename VecOf<T>::Memory *>(to) = x.v;
  } else {
    store(to, x.low);
    store(to + P / 2 * kVecSize<T>, x.high);
  }
}

#define KBT_LANE_OPERATOR(op)                                                      \
  template <class T, int P>                                                        \
  KBT_INLINE Lanes<T, P> operator op(const Lanes<T, P> &x, const Lanes<T, P> &y) { \
    if constexpr (P == 1) {                                                        \
      return {x.v op y.v};                                                         \
    } else {                                                                       \
      return {x.low op y.low, x.high op y.high};                                   \
    }                                                                              \
  }
KBT_LANE_OPERATOR(+)
KBT_LANE_OPERATOR(-)
KBT_LANE_OPERATOR(*)
KBT_LANE_OPERATOR(/)
#undef KBT_LANE_OPERATOR

template <class T, int P>
KBT_INLINE Lanes<T, P> operator-(const Lanes<T, P> &x) {
  if constexpr (P == 1) {
    return {-x.v};
  } else {
    return {-x.low, -x.high};
  }
}

// ---- sums of eight -------------------------------------------------------------------------------------------------

// The sum of eight partial sums, always in this order.
template <class T>
KBT_INLINE T sum_of_eight(const T *x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
template <class T>
KBT_INLINE T sum_of(const Lanes<T> &x) {
  alignas(32) T eight[kLanes];
  store(eight, x);
  return sum_of_eight(eight);
}

// 0, 1, 2, ... in integers as long as T
template <class T>
KBT_INLINE auto lane_numbers() {
  using Int = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  Vec<Int> numbers;
  for (Index l = 0; l < kVecSize<T>; ++l) numbers[l] = static_cast<Int>(l);
  return numbers;
}

// max(x, least), and least for NaN. Counts in `raised` the lanes where that is not x.
template <class T, int P>
KBT_INLINE Lanes<T, P> at_least(const Lanes<T, P> &x, T least, Lanes<T, P> &raised) {
  if constexpr (P > 1) {
    return {at_least(x.low, least, raised.low), at_least(x.high, least, raised.high)};
  } else {
    const Vec<T> zero{};
    raised.v += x.v >= least ? zero : T(1) - zero;
    return {x.v >= least ? x.v : least - zero};
  }
}

#ifndef EIGEN_DONT_VECTORIZE
typedef float Four __attribute__((vector_size(16)));
typedef int ShuffleMask __attribute__((vector_size(16)));

KBT_INLINE Four folded(const Lanes<float> &x) {  // x_0..3 + x_4..7
  Four half[2];
  std::memcpy(half, &x, sizeof half);
  return half[0] + half[1];
}
// sum_of four of them, side by side and in the same order.
KBT_INLINE void four_sums(const Lanes<float> &s0, const Lanes<float> &s1, const Lanes<float> &s2,
                          const Lanes<float> &s3, float *out) {
  const Four h0 = folded(s0), h1 = folded(s1), h2 = folded(s2), h3 = folded(s3);
  const Four a = KBT_SHUFFLE(h0, h1, 0, 1, 4, 5) + KBT_SHUFFLE(h0, h1, 2, 3, 6, 7);
  const Four b = KBT_SHUFFLE(h2, h3, 0, 1, 4, 5) + KBT_SHUFFLE(h2, h3, 2, 3, 6, 7);
  const Four sums = KBT_SHUFFLE(a, b, 0, 2, 4, 6) + KBT_SHUFFLE(a, b, 1, 3, 5, 7);
  std::memcpy(out, &sums, sizeof sums);
}
KBT_INLINE float sum_of(const Lanes<float> &x) {
  const Four half = folded(x), pairs = half + KBT_SHUFFLE(half, half, 2, 3, 0, 1);
  return pairs[0] + pairs[1];
}
KBT_INLINE void four_sums(const Lanes<double> &s0, const Lanes<double> &s1, const Lanes<double> &s2,
                          const Lanes<double> &s3, double *out) {
  out[0] = sum_of(s0);
  out[1] = sum_of(s1);
  out[2] = sum_of(s2);
  out[3] = sum_of(s3);
}
#endif

template <class T>
KBT_INLINE T sum_of_lanes(const Lanes<T> &x) {  // of those that there are, in any order
  alignas(16) T numbers[kWidth];
  store(numbers, x);
  T sum = T(0);
  for (const T number : numbers) sum += number;
  return sum;
}

}  // namespace kbt::KBT_TARGET
