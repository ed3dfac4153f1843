// gaussian.hpp - exp, log and the normal integrals of the ReLU: the same bits on every machine.
//
// The C library's exp and erfc differ in the last bit between platforms, so the core brings its own, built from IEEE
// additions, multiplications, divisions and square roots only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__FAST_MATH__)
#error "kbt must not be built with -ffast-math: it promises the same bits on every machine"
#endif

namespace kbt {

template <class T>
struct Bits;

template <>
struct Bits<float> {
  using Int = std::int32_t;
  static constexpr int kMantissa = 23;
  static constexpr Int kBias = 127;
};

template <>
struct Bits<double> {
  using Int = std::int64_t;
  static constexpr int kMantissa = 52;
  static constexpr Int kBias = 1023;
};

template <class T>
T power_of_two(int exponent) {  // for exponents of normal numbers
  using B = Bits<T>;
  const typename B::Int bits = (static_cast<typename B::Int>(exponent) + B::kBias) << B::kMantissa;
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
bool is_finite(T x) {
  return std::fabs(x) <= std::numeric_limits<T>::max();
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
template <class T>
T exp_negative(T x) {
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr T kLowest = kSingle ? T(-87) : T(-708);
  constexpr int kTerms = kSingle ? 7 : 13;
  const T clamped = x < kLowest ? kLowest : x;
  const int n = static_cast<int>(clamped * T(1.4426950408889634) - T(0.5));
  const T r = (clamped - T(n) * Ln2<T>::kHigh) - T(n) * Ln2<T>::kLow;
  T sum = T(1);
  for (int k = kTerms; k >= 1; --k) sum = T(1) + r * sum * (T(1) / T(k));
  return x < kLowest ? T(0) : sum * power_of_two<T>(n);
}

// Natural logarithm of a positive normal number: m 2^e with m in [sqrt(1/2), sqrt(2)), then 2 artanh((m-1)/(m+1)).
template <class T>
T log_positive(T x) {
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

// (t + 2) rho(t) as a polynomial in s = (t - 4)/(t + 4), lowest power first; tools/fit_gaussian.py made the tables.
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
template <class T>
T rho(T t) {
  const auto &c = RhoTable<T>::kCoefficients;
  const T s = (t - T(4)) / (t + T(4));
  T sum = T(0);
  for (int i = static_cast<int>(sizeof c / sizeof c[0]) - 1; i >= 0; --i) sum = sum * s + c[i];
  return sum / (t + T(2));
}

// Moments of z = max(0, u) for u ~ N(mu, var): METHOD section 2.
template <class T>
struct ReluUnit {
  T mean;     // E z
  T var;      // Var z, exact and never negative
  T gate;     // Phi(alpha) = dE z / dmu
  T density;  // phi(alpha)
  T alpha;    // mu / sigma, held within +-40 where nothing changes any more
  T sigma;
};

// The textbook form (mu^2 + s^2) Phi + mu s phi - (E z)^2 cancels catastrophically for alpha < 0. The recurrences
// G_2 = -t G_1 + G_0 and G_1 = -t G_0 + phi, read backwards from rho = G_2/G_1, have only sums of positive terms:
//   G_1 = phi / (1 + t^2 + t rho),   G_2 = rho G_1,   G_0 = (t + rho) G_1,
// and the positive side follows from max(0, u) = u + max(0, -u).
template <class T>
inline __attribute__((always_inline)) ReluUnit<T> relu_unit(T mu, T var) {
  constexpr T kEdge = T(40);
  ReluUnit<T> z;
  z.sigma = std::sqrt(var);
  const T ratio = mu / (z.sigma > std::numeric_limits<T>::min() ? z.sigma : std::numeric_limits<T>::min());
  z.alpha = ratio > kEdge ? kEdge : (ratio < -kEdge ? -kEdge : ratio);
  const T t = std::fabs(z.alpha), r = rho(t);
  z.density = T(0.3989422804014327) * exp_negative(T(-0.5) * t * t);
  const T g1 = T(1) / (T(1) + t * t + t * r), g2 = r * g1, g0 = (t + r) * g1;
  const T tail = z.density * g0, excess = z.density * g1;
  const bool on = z.alpha >= T(0);
  z.gate = on ? T(1) - tail : tail;
  z.mean = (on ? mu : T(0)) + z.sigma * excess;
  z.var = var * (on ? T(1) - z.density * (g2 + T(2) * t * g1 + excess * g1) : z.density * (g2 - excess * g1));
  return z;
}

}  // namespace kbt
