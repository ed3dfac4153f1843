// config.hpp - which configurations are valid, and the one form in which a head keeps its own.
#pragma once

#include <limits>

#include "settings.hpp"
#include "views.hpp"

namespace kbt {

inline bool within(double x, double low, double high) {
  return x >= low && x <= high;
}  // false for NaN

// Name of the first setting that is out of range or contradicts another; NULL if none.
KBT_SELDOM inline const char *bad_setting(const kbt_config &cfg) {
  constexpr int kWidest = 1 << 20;
  constexpr double kLargest = 1e12, kSmallest = 1e-30;
#ifdef KBT_NO_FLOAT64
  if (cfg.dtype != KBT_FLOAT32) return "dtype";
#else
  if (cfg.dtype != KBT_FLOAT32 && cfg.dtype != KBT_FLOAT64) return "dtype";
#endif
  if (cfg.layers < 1 || cfg.layers > KBT_MAX_LAYERS) return "layers";
#ifdef KBT_ONLY_MEMBERS
  if (!has_members(cfg)) return "drift";
#endif
#ifdef KBT_ONLY_BANK
  if (!has_bank(cfg)) return "drift";
#endif
#ifdef KBT_ONLY_FILTER
  if (cfg.drift < 0.0) return "drift";
#endif
#ifdef KBT_ONLY_JOINT
  if (cfg.layers == 1 || outputs_behind_few(cfg)) return "layers";
#endif
  for (int i = 0; i <= cfg.layers; ++i) {
    if (cfg.widths[i] < 1 || cfg.widths[i] > kWidest) return "widths";
  }
  if (cfg.max_rows < 1 || cfg.max_rows > kWidest) return "max_rows";
  if (cfg.output != KBT_GAUSSIAN && cfg.output != KBT_SOFTMAX) return "output";
  if (cfg.output == KBT_SOFTMAX && cfg.widths[cfg.layers] < 2) return "widths";
  if (cfg.covariance < KBT_COVARIANCE_AUTO || cfg.covariance > KBT_SHARED) return "covariance";
  if (cfg.rule != KBT_FUSE && cfg.rule != KBT_REPLACE) return "rule";
  if (cfg.rule == KBT_REPLACE && cfg.output == KBT_SOFTMAX) return "rule";
  if (cfg.noise < KBT_NOISE_CONSTANT || cfg.noise > KBT_NOISE_MATRIX) return "noise";
  if (cfg.covariance == KBT_SHARED && !can_share(cfg)) return "covariance";
  if (cfg.noise == KBT_NOISE_FULL && !has_members(cfg)) return "noise";
  if (cfg.noise == KBT_NOISE_ADAPTIVE && (cfg.output != KBT_GAUSSIAN || cfg.rule != KBT_FUSE)) return "noise";
  if (cfg.noise == KBT_NOISE_MULTINOMIAL && cfg.output != KBT_SOFTMAX) return "noise";
  if (cfg.relu_order < 2 || cfg.relu_order > 12) return "relu_order";
  if (cfg.softmax_order < 0 || cfg.softmax_order > 2) return "softmax_order";
  for (int i = 0; i < cfg.layers; ++i) {
    if (cfg.prior_var[i] != 0.0 && !within(cfg.prior_var[i], kSmallest, kLargest)) return "prior_var";
  }
  if (!within(cfg.noise_var, 0.0, kLargest)) return "noise_var";
  if (!within(cfg.input_var, 0.0, kLargest)) return "input_var";
  if (!within(cfg.forgetting, 1e-3, 1.0)) return "forgetting";
  if (cfg.drift != KBT_DRIFT_AUTO && !within(cfg.drift, 0.0, 1e6)) return "drift";
  if (!within(cfg.gate, 0.0, std::numeric_limits<double>::max())) return "gate";
  return nullptr;
}

// Unused entries of the fixed arrays are zeroed, so that equal configurations have equal bytes. Automatic settings are
// filled in.
KBT_SELDOM inline kbt_config canonical(const kbt_config &given) {
  kbt_config cfg = given;
  cfg.covariance = covariance_of(given);
  if (cfg.rule == KBT_REPLACE && cfg.drift < 0.0) cfg.drift = 0.0;  // its likelihood weighs nothing
  for (int i = 0; i < cfg.layers && cfg.drift >= 0.0; ++i) {
    if (!(cfg.prior_var[i] > 0.0)) cfg.prior_var[i] = automatic_prior(cfg, i);
  }
  for (int i = cfg.layers; i < KBT_MAX_LAYERS; ++i) {
    cfg.widths[i + 1] = 0;
    cfg.prior_var[i] = 0.0;
  }
  return cfg;
}

}  // namespace kbt
