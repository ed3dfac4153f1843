// readout.cpp - kbt_readout.h over core/readout.hpp.
#include "readout.hpp"

#include <cmath>
#include <cstring>
#include <new>

#include "state.hpp"

struct kbt_readout : kbt::Readout {};

namespace {

using kbt::Index;
using kbt::Reader;
using kbt::Writer;

constexpr std::uint32_t kMagic = 0x5254424BU;  // "KBTR"
constexpr std::uint32_t kVersion = 1;
constexpr float kWidestWeight = 1e24F;  // variance of a weight in a state: then P z stays in range

std::size_t planned(const kbt_readout_config &cfg) {
  kbt_readout plan;
  kbt::Arena arena(nullptr);
  arena.take<kbt_readout>(1);
  plan.plan(cfg, arena);
  return arena.overflow() ? 0 : arena.used();
}

// Of the numbers that were learned on.
std::uint32_t readout_crc(const kbt_readout &r) {
  std::uint32_t crc = 0;
  Writer sum(kbt::add_to_crc, &crc);
  for (Index i = 0; i < r.classes() * r.cfg.d; ++i) sum.real(r.weight()[i]);
  for (Index c = 0; r.bias() != nullptr && c < r.classes(); ++c) sum.real(r.bias()[c]);
  sum.flush();
  return crc;
}

void write_body(const kbt_readout &r, std::uint32_t of_readout, Writer &out) {
  for (const std::int32_t x : {r.cfg.d, r.cfg.classes, r.cfg.top, r.cfg.held}) out.i32(x);
  out.real(r.cfg.prior_var);
  out.integer(of_readout);
  out.integer(r.samples);
  out.integer(r.dropped);
  out.i32(static_cast<std::int32_t>(r.held));
  r.each_factor([&](float x, float) { out.real(x); });
  for (Index s = 0; s < r.held; ++s) {
    out.i32(r.class_at(s));
    out.real(r.moved(s));
    for (Index p = 0; p < r.width(); ++p) out.real(r.row(s)[p]);
  }
  out.flush();
}

// Whether the body can be a state of this readout; with `commit`, it becomes the state.
kbt_status read_body(kbt_readout &r, std::uint32_t of_readout, Reader in, bool commit) {
  kbt_readout_config cfg{};
  for (std::int32_t *x : {&cfg.d, &cfg.classes, &cfg.top, &cfg.held}) *x = in.i32();
  in.real(cfg.prior_var);
  const bool same = cfg.d == r.cfg.d && cfg.classes == r.cfg.classes && cfg.top == r.cfg.top &&
                    cfg.held == r.cfg.held && cfg.prior_var == r.cfg.prior_var;
  if (in.truncated()) return KBT_E_BLOB_SHORT;
  if (!same || in.integer<std::uint32_t>() != of_readout) return KBT_E_BLOB_CONFIG;
  const auto samples = in.integer<std::uint64_t>(), dropped = in.integer<std::uint64_t>();
  const Index held = in.i32();
  if (held < 0 || held > r.held_room()) return KBT_E_BLOB_VALUE;
  bool valid = true;
  const auto take = [&](float &to, float least) {
    float x;
    in.real(x);
    valid = valid && kbt::is_finite(x) && x >= least && x <= kWidestWeight;
    if (commit) to = x;
  };
  r.each_factor(take);
  for (Index s = 0; s < held && !in.truncated(); ++s) {
    const std::int32_t c = in.i32();
    valid = valid && c >= 0 && c < r.cfg.classes;
    if (commit) r.class_at(s) = c;
    float unused = 0.0F;
    take(commit ? r.moved(s) : unused, 0.0F);
    for (Index p = 0; p < r.width(); ++p) take(commit ? r.row(s)[p] : unused, -kWidestWeight);
  }
  if (!in.complete() || !valid) return KBT_E_BLOB_VALUE;
  if (commit) {
    r.held = held;
    r.samples = samples;
    r.dropped = dropped;
    r.predicted = false;
    r.index_rows();
  }
  return KBT_OK;
}

}  // namespace

const char *kbt_readout_check(const kbt_readout_config *cfg) {
  if (cfg == nullptr || cfg->d < 1 || cfg->d > (1 << 20)) return "d";
  if (cfg->classes < 2 || cfg->classes > (1 << 20)) return "classes";
  if (cfg->top < 1 || cfg->top > cfg->classes) return "top";
  if (cfg->held > cfg->classes || (cfg->held <= cfg->top && cfg->held != cfg->classes)) return "held";
  if (!(cfg->prior_var >= 1e-30 && cfg->prior_var <= 1e12)) return "prior_var";
  return nullptr;
}

size_t kbt_readout_bytes(const kbt_readout_config *cfg) {
  return kbt_readout_check(cfg) == nullptr ? planned(*cfg) : 0;
}

kbt_status kbt_readout_init(const kbt_readout_config *cfg, const float *weight, const float *bias, void *memory,
                            size_t bytes, kbt_readout **readout) {
  if (cfg == nullptr || weight == nullptr || memory == nullptr || readout == nullptr) return KBT_E_NULL;
  *readout = nullptr;
  if (kbt_readout_check(cfg) != nullptr) return KBT_E_CONFIG;
  const std::size_t needed = planned(*cfg);
  if (needed == 0 || bytes < needed) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(memory) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  if (!kbt::all_finite(weight, Index(cfg->classes) * cfg->d)) return KBT_E_NONFINITE;
  if (bias != nullptr && !kbt::all_finite(bias, cfg->classes)) return KBT_E_NONFINITE;
  kbt::Arena arena(memory);
  auto *made = new (arena.take<kbt_readout>(1)) kbt_readout();
  made->plan(*cfg, arena);
  made->start(weight, bias);
  *readout = made;
  return KBT_OK;
}

kbt_status kbt_readout_predict(kbt_readout *r, const float *h, float *p, float *var) {
  if (r == nullptr || h == nullptr) return KBT_E_NULL;
  if (!kbt::all_finite(h, r->cfg.d)) return KBT_E_NONFINITE;
  const kbt_status status = r->forward(h);
  if (status != KBT_OK) {
    r->take_back();
    return status;
  }
  for (Index c = 0; p != nullptr && c < r->classes(); ++c) p[c] = r->probabilities()[c];
  if (var != nullptr) *var = r->var();
  return KBT_OK;
}

kbt_status kbt_readout_observe(kbt_readout *r, int32_t label, kbt_readout_result *result) {
  if (r == nullptr) return KBT_E_NULL;
  if (!r->predicted) return KBT_E_ORDER;
  if (label < 0 || label >= r->cfg.classes) return KBT_E_LABEL;
  r->learn(label, result);
  return KBT_OK;
}

kbt_status kbt_readout_update(kbt_readout *r, const float *h, int32_t label, kbt_readout_result *result) {
  if (r == nullptr || h == nullptr) return KBT_E_NULL;
  if (label < 0 || label >= r->cfg.classes) return KBT_E_LABEL;
  const kbt_status status = kbt_readout_predict(r, h, nullptr, nullptr);
  return status == KBT_OK ? kbt_readout_observe(r, label, result) : status;
}

uint64_t kbt_readout_samples(const kbt_readout *r) {
  return r == nullptr ? 0 : r->samples;
}
uint64_t kbt_readout_dropped(const kbt_readout *r) {
  return r == nullptr ? 0 : r->dropped;
}
int32_t kbt_readout_held(const kbt_readout *r) {
  return r == nullptr ? 0 : static_cast<int32_t>(r->held);
}
kbt_status kbt_readout_reset(kbt_readout *r) {
  if (r == nullptr) return KBT_E_NULL;
  r->reset();
  return KBT_OK;
}

size_t kbt_readout_state_size(const kbt_readout *r) {
  if (r == nullptr) return 0;
  Writer count;
  write_body(*r, 0, count);
  return kbt::kHeaderBytes + count.used();
}

kbt_status kbt_readout_state_write(const kbt_readout *r, kbt_sink *sink, void *context) {
  if (r == nullptr || sink == nullptr) return KBT_E_NULL;
  const std::uint32_t of_readout = readout_crc(*r);
  std::uint32_t crc = 0;
  Writer judge(kbt::add_to_crc, &crc);
  write_body(*r, of_readout, judge);
  Writer header(sink, context), body(sink, context);
  kbt::write_header(header, kMagic, kVersion, judge.used(), crc);
  header.flush();
  write_body(*r, of_readout, body);
  return KBT_OK;
}

kbt_status kbt_readout_state_load(kbt_readout *r, const void *blob, size_t size) {
  if (r == nullptr || blob == nullptr) return KBT_E_NULL;
  const auto *bytes = static_cast<const unsigned char *>(blob);
  std::uint32_t version = 0;
  const kbt_status status = kbt::check_header(bytes, size, kMagic, kVersion, kVersion, version);
  if (status != KBT_OK) return status;
  const std::uint32_t of_readout = readout_crc(*r);
  const Reader body(bytes + kbt::kHeaderBytes, size - kbt::kHeaderBytes);
  const kbt_status found = read_body(*r, of_readout, body, false);
  return found == KBT_OK ? read_body(*r, of_readout, body, true) : found;
}
