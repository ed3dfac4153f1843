// kbt.cpp - the C ABI: checks arguments, calls Head, returns a status.
#include "kbt.h"

#include "as_head.hpp"
#include "config.hpp"
#include "health.hpp"
#include "state.hpp"

using kbt::all_finite;
using kbt::as_head;
using kbt::ElementOf;
using kbt::Head;
using kbt::Index;

namespace {

// Every row non-negative with sum 1.
template <class T>
bool probabilities(const T *y, Index rows, Index n) {
  for (Index a = 0; a < rows; ++a) {
    T sum = T(0);
    for (Index i = 0; i < n; ++i) {
      if (y[a * n + i] < T(0)) return false;
      sum += y[a * n + i];
    }
    if (!(std::fabs(sum - T(1)) <= T(1e-4))) return false;
  }
  return true;
}

kbt_status reject(kbt_head *head, kbt_status status) {
  ++head->counters.rejected;
  return status;
}

// Predict at h, or keep the latest prediction; then learn the target.
kbt_status learn_untapped(kbt_head *head, const kbt_sample &sample, kbt_result *result) {
  if (head == nullptr) return KBT_E_NULL;
  if ((!sample.predicted && sample.h == nullptr) || (sample.y == nullptr && sample.labels == nullptr)) {
    return reject(head, KBT_E_NULL);
  }
  if (sample.noise == nullptr && sample.noise_count != 0) return reject(head, KBT_E_NOISE);
  if (!sample.predicted && (sample.rows < 1 || sample.rows > head->cfg.max_rows)) return reject(head, KBT_E_ROWS);
  if (sample.predicted && head->predicted_rows == 0) return reject(head, KBT_E_ORDER);
  const Index rows = sample.predicted ? head->predicted_rows : sample.rows;
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const Index d = self.inputs(), n = self.outputs();
    const T *h = static_cast<const T *>(sample.h), *y = static_cast<const T *>(sample.y);
    const T *noise = static_cast<const T *>(sample.noise);
    if (!sample.predicted && !all_finite(h, rows * d)) return reject(head, KBT_E_NONFINITE);
    if (sample.labels != nullptr) {
      if (self.cfg.output != KBT_SOFTMAX) return reject(head, KBT_E_LABEL);
      for (Index a = 0; a < rows; ++a) {
        if (sample.labels[a] < 0 || sample.labels[a] >= n) return reject(head, KBT_E_LABEL);
      }
      for (Index i = 0; i < rows * n; ++i) self.target()[i] = T(sample.labels[i / n] == i % n);
      y = self.target();
    } else {
      if (!all_finite(y, rows * n)) return reject(head, KBT_E_NONFINITE);
      if (self.cfg.output == KBT_SOFTMAX && !probabilities(y, rows, n)) return reject(head, KBT_E_LABEL);
    }
    if (noise != nullptr &&
        !(self.noise().count_allowed(sample.noise_count) && self.noise().valid(noise, sample.noise_count))) {
      return reject(head, KBT_E_NOISE);
    }
    kbt_status status = sample.predicted ? KBT_OK : self.forward(h, rows);
    if (status == KBT_OK) status = self.observe(y, noise, sample.noise_count, result);
    if (status == KBT_OK || status == KBT_GATED) return status;
    if (!sample.predicted) self.take_back();
    return reject(head, status);
  });
}

kbt_status learn(kbt_head *head, const kbt_sample &sample, kbt_result *result) {
  if (head == nullptr || head->tap == nullptr) return learn_untapped(head, sample, result);
  const std::int32_t rows = sample.predicted ? head->predicted_rows : sample.rows;
  kbt_result found{};
  const kbt_status status = learn_untapped(head, sample, &found);
  if (result != nullptr && (status == KBT_OK || status == KBT_GATED)) *result = found;
  head->tap->learned(head->tap, sample, rows, status, found.nis);
  return status;
}

// The whole state was replaced.
kbt_status replaced(kbt_head *head, kbt_status status) {
  if (status == KBT_OK && head->tap != nullptr) head->tap->replaced(head->tap);
  return status;
}

template <class T>
std::size_t planned_bytes(const kbt_config &cfg) {
  if (Head<T>::largest_array(kbt::canonical(cfg)) * sizeof(T) >
      static_cast<double>(std::numeric_limits<Index>::max()) / 4)
    return 0;
  Head<T> plan;
  kbt::Arena arena(nullptr);
  arena.take<Head<T>>(1);
  plan.plan(kbt::canonical(cfg), arena);
  return arena.overflow() ? 0 : arena.used();
}

std::size_t planned_bytes_of(const kbt_config &cfg) {
#ifndef KBT_NO_FLOAT64
  if (cfg.dtype == KBT_FLOAT64) return planned_bytes<double>(cfg);
#endif
  return planned_bytes<float>(cfg);
}

template <class T>
kbt_head *lay_out(const kbt_config &cfg, void *memory) {
  kbt::Arena arena(memory);
  auto *head = new (arena.take<Head<T>>(1)) Head<T>();
  head->plan(cfg, arena);
  head->start();
  return head;
}

}  // namespace

uint32_t kbt_abi_version(void) {
  return KBT_ABI_VERSION;
}

const char *kbt_status_str(kbt_status status) {
  switch (status) {
    case KBT_OK: return "ok";
    case KBT_GATED: return "the innovation gate rejected the sample";
    case KBT_E_NULL: return "a required pointer is NULL";
    case KBT_E_CONFIG: return "a setting is out of range or contradicts another";
    case KBT_E_SIZE: return "the configuration or the arena has an impossible size";
    case KBT_E_ALIGN: return "the arena is not aligned";
    case KBT_E_ROWS: return "rows outside 1..max_rows";
    case KBT_E_NONFINITE: return "an input holds NaN or Inf";
    case KBT_E_RANGE: return "an input is so large that the result would overflow or be mere rounding error";
    case KBT_E_NOISE: return "the noise has the wrong count, is negative, or is not allowed here";
    case KBT_E_LABEL: return "a class label is out of range, or the head is not a softmax";
    case KBT_E_ORDER: return "observe needs a prediction before it";
    case KBT_E_LAYER: return "no such layer";
    case KBT_E_BLOB_SHORT: return "the state blob is truncated";
    case KBT_E_BLOB_FOREIGN: return "not a state blob";
    case KBT_E_BLOB_VERSION: return "the state blob has a newer format";
    case KBT_E_BLOB_CRC: return "the state blob is damaged";
    case KBT_E_BLOB_CONFIG: return "the state blob is of another configuration";
    case KBT_E_BLOB_VALUE: return "the state blob holds impossible values";
    case KBT_E_TRUNK_INPUT: return "the network rejected an input";
    case KBT_E_TRUNK_OUTPUT: return "the network's output is not finite";
    case KBT_E_OWNER: return "the latest prediction was made by another policy, or by the head itself";
  }
  return "unknown status";
}

void kbt_config_default(kbt_config *cfg, int32_t d, int32_t d_o) {
  if (cfg == nullptr) return;
  *cfg = kbt_config{};
  cfg->layers = 1;
  cfg->widths[0] = d;
  cfg->widths[1] = d_o;
  cfg->max_rows = 1;
  cfg->covariance = KBT_COVARIANCE_AUTO;
  cfg->relu_order = 2;
  cfg->softmax_order = 0;
  cfg->noise = KBT_NOISE_ADAPTIVE;
  cfg->noise_var = 1e-2;
  cfg->forgetting = 1.0;
  cfg->drift = KBT_DRIFT_AUTO;
}

void kbt_config_single(kbt_config *cfg, int32_t d, int32_t d_o) {
  if (cfg == nullptr) return;
  kbt_config_default(cfg, d, d_o);
  for (double &var : cfg->prior_var) var = 1.0;
  cfg->noise = KBT_NOISE_CONSTANT;
  cfg->drift = 0.0;
  cfg->softmax_order = 1;
}

kbt_status kbt_config_check(const kbt_config *cfg, const char **field) {
  if (field != nullptr) *field = "";
  if (cfg == nullptr) return KBT_E_NULL;
  const char *bad = kbt::bad_setting(*cfg);
  if (field != nullptr && bad != nullptr) *field = bad;
  if (bad != nullptr) return KBT_E_CONFIG;
  if (planned_bytes_of(*cfg) != 0) return KBT_OK;
  if (field != nullptr) *field = "widths";
  return KBT_E_SIZE;
}

size_t kbt_arena_bytes(const kbt_config *cfg) {
  return cfg != nullptr && kbt::bad_setting(*cfg) == nullptr ? planned_bytes_of(*cfg) : 0;
}

size_t kbt_record_bytes(int32_t dtype) {
  return dtype == KBT_FLOAT64 ? sizeof(kbt::Head<double>) : sizeof(kbt::Head<float>);
}

kbt_status kbt_init(const kbt_config *cfg, void *arena, size_t arena_bytes, kbt_head **head) {
  if (cfg == nullptr || arena == nullptr || head == nullptr) return KBT_E_NULL;
  *head = nullptr;
  const kbt_status status = kbt_config_check(cfg, nullptr);
  if (status != KBT_OK) return status;
  if (arena_bytes < planned_bytes_of(*cfg)) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(arena) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  std::memset(arena, 0, planned_bytes_of(*cfg));
#ifndef KBT_NO_FLOAT64
  if (cfg->dtype == KBT_FLOAT64) {
    *head = lay_out<double>(kbt::canonical(*cfg), arena);
    return KBT_OK;
  }
#endif
  *head = lay_out<float>(kbt::canonical(*cfg), arena);
  return KBT_OK;
}

kbt_status kbt_set_prior(kbt_head *head, const void *weight, const void *bias, uint64_t seed) {
  if (head == nullptr) return KBT_E_NULL;
  if (weight == nullptr) return reject(head, KBT_E_NULL);
  for (int i = 1; i < head->cfg.layers; ++i) {
    if (head->cfg.widths[i] < 2 * head->cfg.widths[0]) return reject(head, KBT_E_CONFIG);
  }
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const T *w = static_cast<const T *>(weight), *b = static_cast<const T *>(bias);
    if (!all_finite(w, self.inputs() * self.outputs())) return reject(head, KBT_E_NONFINITE);
    if (b != nullptr && !all_finite(b, self.outputs())) return reject(head, KBT_E_NONFINITE);
    self.set_prior(w, b, seed);
    return replaced(head, KBT_OK);
  });
}

kbt_status kbt_set_means(kbt_head *head, const void *const *means) {
  if (head == nullptr) return KBT_E_NULL;
  if (means == nullptr) return reject(head, KBT_E_NULL);
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    for (Index i = 0; i < self.layers(); ++i) {
      const Index count = Index(head->cfg.widths[i + 1]) * (head->cfg.widths[i] + 1);
      if (means[i] == nullptr) return reject(head, KBT_E_NULL);
      if (!all_finite(static_cast<const T *>(means[i]), count)) return reject(head, KBT_E_NONFINITE);
    }
    self.set_means(means);
    return replaced(head, KBT_OK);
  });
}

kbt_status kbt_set_noise(kbt_head *head, const void *noise, int32_t count) {
  if (head == nullptr) return KBT_E_NULL;
  if (noise == nullptr) return reject(head, KBT_E_NULL);
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const T *values = static_cast<const T *>(noise);
    if (!self.noise().count_allowed(count) || !self.noise().valid(values, count)) {
      return reject(head, KBT_E_NOISE);
    }
    if (!self.noise_in_range(values, count)) return reject(head, KBT_E_RANGE);
    self.set_noise(values, count);
    if (head->tap != nullptr) head->tap->set_noise(head->tap, noise, count);
    return KBT_OK;
  });
}

kbt_status kbt_predict(kbt_head *head, const void *h, int32_t rows, void *mean, void *cov, void *total_var) {
  if (head == nullptr) return KBT_E_NULL;
  if (h == nullptr || mean == nullptr) return reject(head, KBT_E_NULL);
  if (rows < 1 || rows > head->cfg.max_rows) return reject(head, KBT_E_ROWS);
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    const T *input = static_cast<const T *>(h);
    if (!all_finite(input, rows * self.inputs())) return reject(head, KBT_E_NONFINITE);
    const kbt_status status = self.forward(input, rows);
    if (status == KBT_OK) {
      self.read_prediction(static_cast<T *>(mean), static_cast<T *>(total_var));
      if (cov != nullptr) self.read_cov(static_cast<T *>(cov));
      return status;
    }
    self.take_back();
    return reject(head, status);
  });
}

kbt_status kbt_predicted(kbt_head *head, void *var, void *cov) {
  if (head == nullptr) return KBT_E_NULL;
  if (head->predicted_rows == 0) return reject(head, KBT_E_ORDER);
  return as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    if (var != nullptr) self.read_var(static_cast<T *>(var));
    if (cov != nullptr) self.read_cov(static_cast<T *>(cov));
    return KBT_OK;
  });
}

kbt_status kbt_update(kbt_head *head, const void *h, int32_t rows, const void *y, const void *noise,
                      int32_t noise_count, kbt_result *result) {
  return learn(head, {false, h, rows, y, nullptr, noise, noise_count}, result);
}
kbt_status kbt_observe(kbt_head *head, const void *y, const void *noise, int32_t noise_count, kbt_result *result) {
  return learn(head, {true, nullptr, 0, y, nullptr, noise, noise_count}, result);
}
kbt_status kbt_update_labels(kbt_head *head, const void *h, int32_t rows, const int32_t *labels, const void *noise,
                             int32_t noise_count, kbt_result *result) {
  return learn(head, {false, h, rows, nullptr, labels, noise, noise_count}, result);
}
kbt_status kbt_observe_labels(kbt_head *head, const int32_t *labels, const void *noise, int32_t noise_count,
                              kbt_result *result) {
  return learn(head, {true, nullptr, 0, nullptr, labels, noise, noise_count}, result);
}

kbt_status kbt_get_config(const kbt_head *head, kbt_config *cfg) {
  if (head == nullptr || cfg == nullptr) return KBT_E_NULL;
  *cfg = head->cfg;
  return KBT_OK;
}

kbt_status kbt_get_counters(const kbt_head *head, kbt_counters *counters) {
  if (head == nullptr || counters == nullptr) return KBT_E_NULL;
  *counters = head->counters;
  return KBT_OK;
}

kbt_status kbt_get_health(const kbt_head *head, kbt_health *health) {
  if (head == nullptr || health == nullptr) return KBT_E_NULL;
  as_head(head, [&](const auto &self) { *health = kbt::judge(self); });
  return KBT_OK;
}

kbt_status kbt_get_belief(const kbt_head *head, kbt_belief *belief) {
  if (head == nullptr || belief == nullptr) return KBT_E_NULL;
  *belief = kbt_belief{};
  belief->changes = head->changes.count;
  as_head(head, [&](const auto &self) { self.belief(belief->weight); });
  return KBT_OK;
}

kbt_status kbt_get_changes(const kbt_head *head, kbt_change *changes, int32_t room, int32_t *count) {
  if (head == nullptr || count == nullptr || (changes == nullptr && room > 0)) return KBT_E_NULL;
  const std::uint64_t all = head->changes.count, kept = all < KBT_MOST_CHANGES ? all : KBT_MOST_CHANGES;
  const std::uint64_t given = room < 0 ? 0 : kept < static_cast<std::uint64_t>(room) ? kept : std::uint64_t(room);
  for (std::uint64_t i = 0; i < given; ++i) changes[i] = head->changes.latest[(all - given + i) % KBT_MOST_CHANGES];
  *count = static_cast<int32_t>(given);
  return KBT_OK;
}

kbt_status kbt_suppose_changed(kbt_head *head) {
  if (head == nullptr) return KBT_E_NULL;
  return replaced(head, as_head(head, [&](auto &self) {
                    if (!self.watchful()) return reject(head, KBT_E_CONFIG);
                    self.suppose_changed();
                    return KBT_OK;
                  }));
}

kbt_status kbt_reset(kbt_head *head) {
  if (head == nullptr) return KBT_E_NULL;
  return replaced(head, as_head(head, [&](auto &self) {
                    if (!self.watchful()) return reject(head, KBT_E_CONFIG);
                    self.reset();
                    return KBT_OK;
                  }));
}

uint64_t kbt_samples(const kbt_head *head) {
  return head != nullptr ? head->samples : 0;
}
int32_t kbt_predicted_rows(const kbt_head *head) {
  return head != nullptr ? head->predicted_rows : 0;
}

kbt_status kbt_get_noise(const kbt_head *head, void *noise, int32_t *count) {
  if (head == nullptr || noise == nullptr || count == nullptr) return KBT_E_NULL;
  return as_head(head, [&](const auto &self) {
    using T = ElementOf<decltype(self)>;
    *count = static_cast<int32_t>(self.read_noise(static_cast<T *>(noise)));
    return KBT_OK;
  });
}

kbt_status kbt_get_mean(const kbt_head *head, int32_t layer, void *mean) {
  if (head == nullptr || mean == nullptr) return KBT_E_NULL;
  if (layer < 0 || layer >= head->cfg.layers) return KBT_E_LAYER;
  as_head(head, [&](const auto &self) { self.read_mean(layer, static_cast<ElementOf<decltype(self)> *>(mean)); });
  return KBT_OK;
}

kbt_status kbt_get_cov(const kbt_head *head, int32_t layer, void *cov) {
  if (head == nullptr || cov == nullptr) return KBT_E_NULL;
  if (layer < 0 || layer >= head->cfg.layers) return KBT_E_LAYER;
  as_head(head, [&](const auto &self) { self.read_cov(layer, static_cast<ElementOf<decltype(self)> *>(cov)); });
  return KBT_OK;
}

size_t kbt_state_size(const kbt_head *head) {
  if (head == nullptr) return 0;
  return as_head(head, [](const auto &self) { return kbt::state_size(self); });
}

kbt_status kbt_state_save(const kbt_head *head, void *blob, size_t size) {
  if (head == nullptr || blob == nullptr) return KBT_E_NULL;
  if (size < kbt_state_size(head)) return KBT_E_SIZE;
  unsigned char *to = static_cast<unsigned char *>(blob);
  return kbt_state_stream(
      head,
      [](void *cursor, const void *bytes, size_t count) {
        auto &at = *static_cast<unsigned char **>(cursor);
        std::memcpy(at, bytes, count);
        at += count;
      },
      &to);
}

kbt_status kbt_state_stream(const kbt_head *head, kbt_sink *sink, void *context) {
  if (head == nullptr || sink == nullptr) return KBT_E_NULL;
  as_head(head, [&](const auto &self) { kbt::write_state(self, sink, context); });
  return KBT_OK;
}

kbt_status kbt_state_load(kbt_head *head, const void *blob, size_t size) {
  if (head == nullptr || blob == nullptr) return KBT_E_NULL;
  return replaced(head, as_head(head, [&](auto &self) {
                    return kbt::read_state(self, static_cast<const unsigned char *>(blob), size);
                  }));
}

kbt_status kbt_state_config(const void *blob, size_t size, kbt_config *cfg) {
  if (blob == nullptr || cfg == nullptr) return KBT_E_NULL;
  kbt_config found{};
  std::uint32_t version = 0;
  const kbt_status status = kbt::read_header(static_cast<const unsigned char *>(blob), size, found, version);
  if (status != KBT_OK) return status;
  if (kbt_config_check(&found, nullptr) != KBT_OK) return KBT_E_BLOB_VALUE;
  if (!kbt::same_config(found, kbt::canonical(found))) return KBT_E_BLOB_VALUE;
  const double n = found.widths[found.layers], bytes = static_cast<double>(size);
  if (bytes != kbt::state_bytes(found, n, version) && bytes != kbt::state_bytes(found, n * n, version)) {
    return KBT_E_BLOB_VALUE;
  }
  *cfg = found;
  return KBT_OK;
}
