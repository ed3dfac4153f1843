// normal.hpp - exp, log and the normal integrals of the ReLU: the same bits on every machine.
//
// The C library's exp and erfc differ in the last bit between platforms, so the core brings its own, built from IEEE
// additions, multiplications, divisions and square roots only.
#pragma once

#include "lanes.hpp"

namespace kbt::KBT_TARGET {

// The functions of one ReLU unit are written once for a number and for a Vec (V is either), with selections instead of
// branches: every unit takes the same time, and a Vec gives the same bits as its numbers one by one.
template <class T>
struct Bits {
  using Real = T;
  using Int = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  static constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  static constexpr Int kBias = sizeof(T) == 4 ? 127 : 1023;
};

#ifndef EIGEN_DONT_VECTORIZE
template <>
struct Bits<Vec<float>> : Bits<float> {
  using Int = Vec<std::int32_t>;
};

template <>
struct Bits<Vec<double>> : Bits<double> {
  using Int = Vec<std::int64_t>;
};
#endif

template <class V>
using RealOf = typename Bits<V>::Real;
template <class V>
using IntOf = typename Bits<V>::Int;
template <class V>
constexpr bool kIsNumber = sizeof(V) == sizeof(RealOf<V>);

template <class To, class From>
KBT_INLINE To converted(const From &x) {
  if constexpr (sizeof(From) > sizeof(double)) {
    return __builtin_convertvector(x, To);
  } else {
    return static_cast<To>(x);
  }
}
template <class V>
KBT_INLINE V root_of(const V &x) {
  if constexpr (kIsNumber<V>) {
    return std::sqrt(x);
  } else {
    V y;
    for (unsigned l = 0; l < sizeof x / sizeof x[0]; ++l) y[l] = std::sqrt(x[l]);
    return y;
  }
}

template <class V>
KBT_INLINE V power_of_two(const IntOf<V> &exponent) {  // for exponents of normal numbers
  const IntOf<V> bits = (exponent + Bits<RealOf<V>>::kBias) << Bits<V>::kMantissa;
  V value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ln 2 in two parts: multiples of the first by a small integer are exact.
template <class T>
struct Ln2;
template <>
struct Ln2<float> {
  static constexpr float kHigh = 0.693359375F, kLow = -2.12194440e-4F;
};
template <>
struct Ln2<double> {
  static constexpr double kHigh = 6.93147180369123816490e-01, kLow = 1.90821492927058770002e-10;
};

// e^x for x <= 0; exactly 0 where the result would be subnormal. Taylor series on |r| <= ln(2)/2.
template <class V>
KBT_INLINE V exp_negative(const V &x) {
  using T = RealOf<V>;
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr T kLowest = kSingle ? T(-87) : T(-708);
  constexpr int kTerms = kSingle ? 7 : 13;
  const V zero = V{}, lowest = zero + kLowest;
  const V clamped = x < lowest ? lowest : x;
  const IntOf<V> n = converted<IntOf<V>>(clamped * T(1.4426950408889634) - T(0.5));
  const V real = converted<V>(n);
  const V r = (clamped - real * Ln2<T>::kHigh) - real * Ln2<T>::kLow;
  V sum = zero + T(1);
  for (int k = kTerms; k >= 1; --k) sum = T(1) + r * sum * (T(1) / T(k));
  const V power = sum * power_of_two<V>(n);
  return x < lowest ? zero : power;
}

// Natural logarithm of a positive normal number: m 2^e with m in [sqrt(1/2), sqrt(2)), then 2 artanh((m-1)/(m+1)).
// A function of its own: inlined, it makes the loops over members larger and slower.
template <class T>
__attribute__((noinline)) T log_positive(T x) {
  using B = Bits<T>;
  constexpr int kTerms = sizeof(T) == 4 ? 5 : 11;
  typename B::Int bits;
  std::memcpy(&bits, &x, sizeof bits);
  int e = static_cast<int>((bits >> B::kMantissa) - B::kBias);
  bits = (bits & ((typename B::Int{1} << B::kMantissa) - 1)) | (B::kBias << B::kMantissa);
  T m;
  std::memcpy(&m, &bits, sizeof m);
  if (m > T(1.4142135623730951)) {
    m *= T(0.5);
    ++e;
  }
  const T s = (m - T(1)) / (m + T(1)), s2 = s * s;
  T sum = T(0);
  for (int k = kTerms; k >= 0; --k) sum = sum * s2 + T(1) / T(2 * k + 1);
  return (T(2) * s * sum + T(e) * Ln2<T>::kLow) + T(e) * Ln2<T>::kHigh;
}

// (t + 2) rho(t) as a polynomial in s = (t - 4)/(t + 4), lowest power first; tools/fit_normal.py made the tables.
template <class T>
struct RhoTable;

template <>
struct RhoTable<float> {  // largest relative error of rho on [0, 40] in float arithmetic: 1.7e-7
  static constexpr float kCoefficients[] = {2.59490252F,     -0.525226653F,   -0.35127157F,    0.371682495F,
                                            -0.00757791009F, -0.137172356F,   0.0293202493F,   0.0520231016F,
                                            -0.0182505585F,  -0.0204604678F,  0.00876535755F,  0.00800407119F,
                                            -0.00323529635F, -0.00270260358F, 0.000665890868F, 0.000542747148F};
};

template <>
struct RhoTable<double> {  // in double arithmetic: 2.7e-16
  static constexpr double kCoefficients[] = {
      2.5949024512387098,      -0.52522665011679071,    -0.3512715483795098,     0.37168279055441117,
      -0.0075793093900759865,  -0.13717715217785201,    0.029341042445041345,    0.05206013786364759,
      -0.018390341507843692,   -0.020628772922379912,   0.009263878256795607,    0.0084878567355102727,
      -0.0042395250565634285,  -0.0035860650964624286,  0.0018171885128299744,   0.0015327011981304821,
      -0.00073539879140222973, -0.00065238066975700695, 0.00027979497221955355,  0.00027251167276587157,
      -9.6829043055059468e-05, -0.0001092498135407163,  2.6928188688931284e-05,  3.9493182211154838e-05,
      -3.6587464533944044e-06, -1.1029360383720945e-05, -9.7658617007770184e-07, 1.6726792260120138e-06,
      4.422465250174992e-07};
};

// rho(t) = G_2(-t)/G_1(-t) for 0 <= t <= 40, where G_n(-t) = E max(0, x - t)^n for a standard normal x.
template <class V>
KBT_INLINE V rho(const V &t) {
  using T = RealOf<V>;
  const auto &c = RhoTable<T>::kCoefficients;
  const V s = (t - T(4)) / (t + T(4));
  constexpr int kLast = static_cast<int>(sizeof c / sizeof c[0]) - 1;
  V sum = c[kLast] - V{};
  for (int i = kLast - 1; i >= 0; --i) sum = sum * s + c[i];
  return sum / (t + T(2));
}

// Moments of z = max(0, u) for u ~ N(mu, var): method.md (2.4), (2.5).
template <class V>
struct ReluUnit {
  V mean;     // E z
  V var;      // Var z, exact and never negative
  V gate;     // Phi(alpha) = dE z / dmu
  V density;  // phi(alpha)
  V alpha;    // mu / sigma, clamped to +-40, beyond which the moments no longer change
  V sigma;
};

// The textbook form (mu^2 + s^2) Phi + mu s phi - (E z)^2 cancels catastrophically for alpha < 0. The recurrences
// G_2 = -t G_1 + G_0 and G_1 = -t G_0 + phi, read backwards from rho = G_2/G_1, have only sums of positive terms:
//   G_1 = phi / (1 + t^2 + t rho),   G_2 = rho G_1,   G_0 = (t + rho) G_1,
// and the positive side follows from max(0, u) = u + max(0, -u).
template <class V>
KBT_INLINE ReluUnit<V> relu_unit(const V &mu, const V &var) {
  using T = RealOf<V>;
  const V zero = V{}, edge = zero + T(40), tiny = zero + std::numeric_limits<T>::min();
  ReluUnit<V> z;
  z.sigma = root_of(var);
  const V ratio = mu / (z.sigma > tiny ? z.sigma : tiny), below = ratio > edge ? edge : ratio;
  z.alpha = below < -edge ? -edge : below;
  const V t = z.alpha < zero ? -z.alpha : z.alpha, r = rho(t);
  z.density = T(0.3989422804014327) * exp_negative<V>(T(-0.5) * t * t);
  const V g1 = T(1) / (T(1) + t * t + t * r), g2 = r * g1, g0 = (t + r) * g1;
  const V tail = z.density * g0, excess = z.density * g1;
  const V open = T(1) - tail, share_open = T(1) - z.density * (g2 + T(2) * t * g1 + excess * g1);
  const V share_shut = z.density * (g2 - excess * g1);
  z.gate = z.alpha >= zero ? open : tail;
  z.mean = (z.alpha >= zero ? mu : zero) + z.sigma * excess;
  z.var = var * (z.alpha >= zero ? share_open : share_shut);
  return z;
}

// A unit whose tail is below 1e-12 (double: 1e-100) is dead: all zero. It has no effect, but the product of two such
// tails is denormal, and an update would take up to twice as long.
template <class V>
KBT_INLINE ReluUnit<V> live_unit(const V &mu, const V &var) {
  using T = RealOf<V>;
  const V zero = V{}, edge = zero + (sizeof(T) == sizeof(float) ? T(7.4) : T(21.4));
  ReluUnit<V> unit = relu_unit<V>(mu, var);
  unit.mean = unit.alpha < -edge ? zero : unit.mean;
  unit.var = unit.alpha < -edge ? zero : unit.var;
  unit.gate = unit.alpha < -edge ? zero : unit.gate;
  unit.density = unit.alpha < -edge ? zero : unit.alpha > edge ? zero : unit.density;
  return unit;
}

// One number at a time. Large, so not inlined.
template <class T>
ReluUnit<T> one_unit(T mu, T var) {
  return live_unit<T>(mu, var > T(0) ? var : T(0));
}

// Units without correlations: means u and variances in, those of z and the gates out. From eight units on, arrays are
// padded to whole lanes; a unit of the padding has mean and variance zero, and stays so.
template <class T>
void relu_units(const ConstVectorView<T> &u, VectorView<T> &var, T *z, T *gate) {
  const Index n = u.size();
  const T *const mean = u.data();
  T *const variance = var.data();
  Index j = 0;
  if constexpr (kVectors) {
    for (; n >= kLanes && j < n; j += kVecSize<T>) {
      const Lanes<T, 1> mu = load_any<T, 1>(mean + j), spread = load_any<T, 1>(variance + j);
      const ReluUnit<Vec<T>> unit = live_unit<Vec<T>>(mu.v, spread.v > Vec<T>{} ? spread.v : Vec<T>{});
      store(z + j, Lanes<T, 1>{unit.mean});
      store(gate + j, Lanes<T, 1>{unit.gate});
      store(variance + j, Lanes<T, 1>{unit.var});
    }
  }
  for (; j < n; ++j) {
    const ReluUnit<T> unit = one_unit(mean[j], variance[j]);
    z[j] = unit.mean;
    gate[j] = unit.gate;
    variance[j] = unit.var;
  }
}

}  // namespace kbt::KBT_TARGET
