// prior.hpp - prior means with which the head is the readout: method.md (1.2).
#pragma once

#include "layer.hpp"

namespace kbt {

template <class T>
T uniform(std::uint64_t &state) {  // SplitMix64, mapped to (-1, 1)
  state += 0x9E3779B97F4A7C15ULL;
  std::uint64_t x = state;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  x ^= x >> 31;
  const std::int32_t top = static_cast<std::int32_t>(x >> 40) - (1 << 23);  // 24 bits: exact in float
  return T(top) * T(1.1920928955078125e-7);
}

// weight: d_o x d, bias: d_o or null; spare hidden neurons are drawn from `seed`.
template <class T>
KBT_SELDOM void set_prior_means(Layer<T> *layers, Index count, const T *weight, const T *bias, std::uint64_t seed) {
  const Index d = layers[0].w.M1 - 1;
  for (Index i = 0; i < count; ++i) {
    Posterior<T> &w = layers[i].w;
    const auto at = [&](Index j, Index p) -> T & { return w.mean[p * w.stride + j]; };
    // Input p of the original h: h itself before the first layer, and the merged pair (+h) - (-h) behind it.
    const auto set = [&](Index j, Index p, T value) {
      at(j, p) = value;
      if (i > 0) at(j, d + p) = -value;
    };
    if (i == count - 1) {
      for (Index j = 0; j < w.n; ++j) {
        for (Index p = 0; p < d; ++p) set(j, p, weight[j * d + p]);
        at(j, w.M1 - 1) = bias != nullptr ? bias[j] : T(0);
      }
      continue;
    }
    for (Index p = 0; p < d; ++p) {
      set(p, p, T(1));
      set(d + p, p, T(-1));
    }
    const T scale = std::sqrt(T(3) / T(d));  // uniform on +-sqrt(3/d) has standard deviation 1/sqrt(d)
    for (Index j = 2 * d; j < w.n; ++j) {
      for (Index p = 0; p < d; ++p) set(j, p, scale * uniform<T>(seed));
      at(j, w.M1 - 1) = scale * uniform<T>(seed);
    }
  }
}

}  // namespace kbt
