// noise.hpp - the noise R of the targets: given, or learned (adaptive): method.md §3.
#pragma once

#include "dense.hpp"
#include "kbt.h"

namespace kbt {

constexpr double kNoiseFloor = 1e-9;  // R_min: no observation is more certain than this
constexpr int kAdaptStart = 10;       // learned noise: weight of the initial R, in samples
constexpr int kNoiseMemory = 100;     // learned noise: memory, in samples
constexpr double kHuber = 16.0;       // NIS per output that a sample counts as at most, (8.3)

// Sums of a few numbers below this stay in the range of T.
template <class T>
constexpr T kLargest = std::numeric_limits<T>::max() * T(1e-8);

// R of one row: d_o variances, or a d_o x d_o matrix.
template <class T>
struct Noise {
  const T *values;
  bool matrix;
  T at(Index i, Index k, Index n) const {
    if (matrix) return values[i * n + k];
    return i == k ? values[i] : T(0);
  }
};

// The noise of a head, and scratch for that of one call.
template <class T>
struct NoiseModel {
  int kind;    // KBT_NOISE_*
  Index n;     // d_o
  T *values;   // n variances, or an n x n matrix
  T *scratch;  // as large
  bool matrix;
  bool equal;  // all outputs have the same noise, because they share a factor that is not in units of it

  static Index capacity(int kind, Index n) { return kind == KBT_NOISE_MATRIX ? n * n : n; }
  static T floored(T x) { return x > T(kNoiseFloor) ? x : T(kNoiseFloor); }

  Index count() const { return matrix ? n * n : n; }
  T variance(Index i) const { return values[matrix ? i * n + i : i]; }

  bool count_allowed(Index given) const {
    if (kind == KBT_NOISE_MULTINOMIAL) return false;
    if (given == 1 || given == n) return true;
    return given == n * n && kind == KBT_NOISE_MATRIX;
  }
  bool is_matrix(Index given) const { return given == n * n && n > 1; }

  // Finite, not negative; a matrix symmetric and positive semidefinite (to rounding). Uses the scratch.
  bool valid(const T *given, Index size) {
    if (!all_finite(given, size)) return false;
    const bool square = is_matrix(size);
    T largest = T(0);
    for (Index i = 0; i < (square ? n : size); ++i) {
      const T var = given[square ? i * n + i : i];
      if (var < T(0) || (equal && var != given[0])) return false;
      largest = var > largest ? var : largest;
    }
    if (!square) return true;
    for (Index i = 0; i < n; ++i) {
      for (Index k = 0; k < n; ++k) {
        if (given[i * n + k] != given[k * n + i]) return false;
        scratch[i * n + k] = given[i * n + k];
      }
      scratch[i * n + i] += T(n) * T(16) * std::numeric_limits<T>::epsilon() * largest;
    }
    return cholesky(scratch, n, T(0)) == 0;
  }

  // One number, n variances or a matrix, into `to` with the variances floored. Returns whether it is a matrix.
  bool copy(const T *given, Index size, T *to) const {
    const bool square = is_matrix(size);
    for (Index i = 0; i < (square ? n * n : n); ++i) {
      const T x = given[size == 1 ? 0 : i];
      to[i] = !square || i % (n + 1) == 0 ? floored(x) : x;
    }
    return square;
  }
  void restore(const T *given, Index size) {  // as it was saved
    matrix = is_matrix(size);
    for (Index i = 0; i < size; ++i) values[i] = given[i];
  }
  void set(const T *given, Index size) { matrix = copy(given, size, values); }

  // The noise of one call, or that of the head.
  Noise<T> of_call(const T *given, Index size) {
    if (given == nullptr) return {values, matrix};
    return {scratch, copy(given, size, scratch)};
  }

  // Noise in units of another, averaged over the outputs.
  static T mean_ratio(const T *noise, const T *unit, Index n) {
    T sum = T(0);
    for (Index i = 0; i < n; ++i) sum += noise[i] / unit[i];
    return sum / T(n);
  }

  // The noise of a call times a factor.
  Noise<T> scaled(const Noise<T> &R, T factor) {
    for (Index i = 0; i < (R.matrix ? n * n : n); ++i) scratch[i] = R.values[i] * factor;
    return {scratch, R.matrix};
  }

  // (8.2), into the scratch; found(i) is the squared noise of output i in this sample, and `age` the number of samples
  // before it. False if that would leave the range.
  template <class Found>
  bool adapt(std::uint64_t age, Found found) {
    constexpr int kGrowing = kNoiseMemory - kAdaptStart;  // a blob may hold any number of samples: no sum before this
    const T rate = T(1) / T(age < kGrowing ? static_cast<int>(age) + kAdaptStart : kNoiseMemory);
    for (Index i = 0; i < n; ++i) {
      const T R = values[i] + (found(i) - values[i]) * rate;
      if (!(R < kLargest<T>)) return false;
      scratch[i] = floored(R);
    }
    return true;
  }
  void take_adapted() { array(values, n) = array(scratch, n); }
};

}  // namespace kbt
