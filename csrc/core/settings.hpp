// settings.hpp - what a configuration implies: which kind of head it is, and the prior where none is given.
#pragma once

#include "kbt.h"

namespace kbt {

// A watchful head of one linear layer: members.hpp.
inline bool has_members(const kbt_config &cfg) {
  return cfg.drift < 0.0 && cfg.layers == 1 && cfg.output == KBT_GAUSSIAN && cfg.rule == KBT_FUSE &&
         cfg.noise != KBT_NOISE_MATRIX && !(cfg.input_var > 0.0) && cfg.covariance != KBT_DIAGONAL;
}
// Any other watchful head: bank.hpp.
inline bool has_bank(const kbt_config &cfg) {
  return cfg.drift < 0.0 && !has_members(cfg);
}

// Whether the posterior of a filter is held in units of the noise, method.md §8. That of members always is.
inline bool in_units_of_noise(const kbt_config &cfg) {
  return cfg.output == KBT_GAUSSIAN && (cfg.noise == KBT_NOISE_ADAPTIVE || cfg.drift < 0.0);
}

// One factor for all outputs, method.md §10: of one linear layer whose outputs see the same inputs with the same noise,
// or with a noise each in whose units the factor is.
inline bool can_share(const kbt_config &cfg) {
  return cfg.layers == 1 && cfg.rule == KBT_FUSE && !(cfg.input_var > 0.0) && cfg.noise != KBT_NOISE_MATRIX &&
         (cfg.output == KBT_GAUSSIAN || (cfg.noise == KBT_NOISE_MULTINOMIAL && cfg.softmax_order == 0));
}
inline int covariance_of(const kbt_config &cfg) {
  if (cfg.covariance != KBT_COVARIANCE_AUTO) return cfg.covariance;
  return can_share(cfg) && cfg.output == KBT_GAUSSIAN && cfg.widths[1] > 1 ? KBT_SHARED : KBT_NEURON;
}
// A shared factor of a gaussian head is the covariance over the noise of each output, (8.1), if that can differ.
inline bool relative_factor(const kbt_config &cfg) {
  return cfg.covariance == KBT_SHARED && in_units_of_noise(cfg);
}

// The moment softmax, method.md §11.
inline bool moment_softmax(const kbt_config &cfg) {
  return cfg.output == KBT_SOFTMAX && cfg.softmax_order == 0;
}
// It gives the covariance of the innovation, instead of adding that of the noise.
inline bool matches_moments(const kbt_config &cfg) {
  return moment_softmax(cfg) && cfg.noise == KBT_NOISE_MULTINOMIAL;
}
// Whether outputs are measured one by one, because nothing correlates them: apart.hpp.
inline bool outputs_apart(const kbt_config &cfg) {
  if (cfg.layers > 1 || cfg.rule != KBT_FUSE || cfg.input_var > 0.0) return false;
  if (cfg.covariance == KBT_FULL && cfg.widths[1] > 1) return false;
  return cfg.output == KBT_GAUSSIAN ? cfg.noise != KBT_NOISE_MATRIX : matches_moments(cfg);
}

// Whether outputs are correlated through fewer hidden units than there are of them, so that these are solved for:
// narrow.hpp.
inline bool outputs_behind_few(const kbt_config &cfg) {
  return cfg.layers > 1 && cfg.max_rows == 1 && cfg.rule == KBT_FUSE && cfg.output == KBT_GAUSSIAN &&
         cfg.noise != KBT_NOISE_MATRIX && cfg.covariance != KBT_FULL &&
         cfg.widths[cfg.layers] > cfg.widths[cfg.layers - 1];
}

// Variances of weights before any data, where none is given. In units of the noise, the last layer's is for inputs with
// |z|^2 equal to their number, and a bank follows the size that it finds. A few units settle a softmax: the variance of
// a logit, about d times that of a weight, stays below 16. Copies of h in hidden layers must stay below the signal.
constexpr double kReadoutVar = 10.0, kCopiesVar = 1e-6, kClassVar = 1.0, kLogitVar = 16.0;
constexpr double kWide = 2e4;            // variance of an output before any data, in units of the noise
constexpr double kRatioOfCopies = 1e-4;  // of a weight of a hidden layer, in units of the noise

inline double automatic_prior(const kbt_config &cfg, int layer) {
  const bool last = layer == cfg.layers - 1;
  const double M = cfg.widths[0] + 1.0, logits = kLogitVar / cfg.widths[0];
  if (cfg.output == KBT_SOFTMAX) return !last ? kCopiesVar : logits < kClassVar ? logits : kClassVar;
  if (!in_units_of_noise(cfg)) return last ? kReadoutVar : kCopiesVar;
  return last ? kWide / M : kRatioOfCopies;
}

// What the filters of a bank think of the plant: the prior, relative to the automatic one, and a random walk, as the
// variance that it gives outputs per sample (in units of the noise; of a softmax, that of logits).
struct FilterKind {
  double hidden, last, walk;
};
// still and as linear as before; still, with another prior; drifts; has changed
constexpr FilterKind kGaussianFilters[] = {{1.0, 1.0, 0.0}, {1e4, 1e-2, 0.0}, {1e4, 1e-2, 2e-2}, {1.0, 1.0, 0.0}};
constexpr FilterKind kSoftmaxFilters[] = {{1.0, 5.0, 0.0}, {1e5, 0.3, 0.0}, {1.0, 1.0, 1e-2}, {1.0, 5.0, 0.0}};
constexpr int kRegularFilters = 3, kMostFilters = 4;

inline FilterKind filter_kind(const kbt_config &cfg, int filter) {
  FilterKind kind = cfg.output == KBT_SOFTMAX ? kSoftmaxFilters[filter] : kGaussianFilters[filter];
  if (!has_bank(cfg)) return {1.0, 1.0, cfg.drift};
  for (int i = 0; i < cfg.layers; ++i) {
    if (cfg.prior_var[i] > 0.0) kind.hidden = kind.last = 1.0;  // a prior that is given is that of all
  }
  return kind;
}

}  // namespace kbt
