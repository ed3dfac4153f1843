// kbt_flight.cpp - the flight recorder: what came in, as a log that replays to the same bits.
//
//   offset  0  "KBTF", u32 version, u64 length, u32 CRC-32 of everything from offset 24, u32 0      (as state.hpp)
//          24  u64 bytes of the base state, u64 records, u64 overwritten before, u64 checkpoint, u64 its hash,
//              u64 hash of the final state, u32 bytes of a record, u32 0
//          80  base state, a blob as of kbt_state_save
//              records: i32 kind, i32 given, i32 rows, i32 noise count, i32 status, i32 0, u64 samples, f64 nis,
//              max_rows x d numbers of h, max_rows x d_o of y (or labels in the same room), then the noise. What a
//              record does not use of its room is zero.
#include "kbt_flight.h"

#include "engine.hpp"
#include "state.hpp"

using kbt::as_head;
using kbt::ElementOf;
using kbt::Index;
using kbt::Posterior;
using kbt::Reader;
using kbt::Writer;

namespace {

constexpr std::uint32_t kMagic = 0x4654424BU;  // "KBTF"
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kFront = 80;  // bytes before the base state
enum { kGaveInput = 1, kGaveTarget = 2, kGaveNoise = 4, kGaveAll = 7 };

struct Record {  // followed by its numbers
  std::int32_t kind, given, rows, noise_count, status, spare;
  std::uint64_t samples;
  double nis;
};
static_assert(sizeof(Record) == 40, "the room of a record in a log");

// ---- room ---------------------------------------------------------------------------------------------------------

// Numbers of one record, for h, targets and noise.
struct Room {
  Index h, y, noise;
  std::size_t element;

  explicit Room(const kbt_config &cfg) {
    const Index n = cfg.widths[cfg.layers];
    h = static_cast<Index>(cfg.max_rows) * cfg.widths[0];
    y = cfg.max_rows * n;
    noise = cfg.noise == KBT_NOISE_MULTINOMIAL ? 0 : cfg.noise == KBT_NOISE_ADAPTIVE ? n : n * n;
    element = cfg.dtype == KBT_FLOAT64 ? sizeof(double) : sizeof(float);
  }
  std::size_t numbers() const { return static_cast<std::size_t>(h + y + noise); }
  std::size_t bytes() const { return sizeof(Record) + numbers() * element; }
};

// How much of its room a record uses: what the core may have read, and no more.
struct Used {
  Index rows, h, y, labels, noise;

  Used(const kbt_config &cfg, const Record &record) {
    const Index n = cfg.widths[cfg.layers], count = record.noise_count;
    const bool softmax = cfg.output == KBT_SOFTMAX, set_noise = record.kind == KBT_FLIGHT_SET_NOISE;
    const bool observe = record.kind == KBT_FLIGHT_OBSERVE || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
    const bool by_label = record.kind == KBT_FLIGHT_UPDATE_LABELS || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
    rows = !set_noise && record.rows >= 1 && record.rows <= cfg.max_rows ? record.rows : 0;
    h = observe || (record.given & kGaveInput) != 0 ? rows * cfg.widths[0] : 0;
    y = (record.given & kGaveTarget) != 0 && !by_label ? rows * n : 0;
    labels = (record.given & kGaveTarget) != 0 && by_label && softmax ? rows : 0;
    const bool allowed = count == 1 || count == n || (count == n * n && cfg.noise == KBT_NOISE_CONSTANT);
    noise = (record.given & kGaveNoise) != 0 && allowed && cfg.noise != KBT_NOISE_MULTINOMIAL ? count : 0;
  }
};

template <class T>
Posterior<T> shape_of(const kbt_config &cfg, Index layer) {
  Posterior<T> w;
  w.shape(cfg.widths[layer], cfg.widths[layer + 1], cfg.covariance, static_cast<T>(cfg.prior_var[layer]));
  return w;
}

// ---- what is kept --------------------------------------------------------------------------------------------------

struct Half {
  std::uint64_t samples;
  std::int32_t noise_count;
  std::uint32_t used;  // records
  bool begun;
  void *noise;
  void *mean[KBT_MAX_LAYERS], *d[KBT_MAX_LAYERS], *u[KBT_MAX_LAYERS];  // the posterior as it lies in the head
  unsigned char *records;
};

}  // namespace

struct kbt_flight : kbt_tap {
  kbt_head *head;
  std::uint32_t capacity;    // records of a half
  std::size_t record_bytes;  // in memory: a multiple of 8
  std::uint64_t before;
  int current;
  Half half[2];
};

namespace {

template <class T>
void plan_half(const kbt_config &cfg, Index records, std::size_t record_bytes, kbt::Arena &arena, Half &half) {
  const Index n = cfg.widths[cfg.layers];
  half.noise = arena.take<T>(cfg.noise == KBT_NOISE_CONSTANT ? n * n : n);
  for (Index i = 0; i < cfg.layers; ++i) {
    const Posterior<T> w = shape_of<T>(cfg, i);
    half.mean[i] = arena.take<T>(w.mean_count());
    half.d[i] = arena.take<T>(w.d_count());
    half.u[i] = arena.take<T>(w.u_count());
  }
  half.records = arena.take<unsigned char>(records * static_cast<Index>(record_bytes));
}

void plan(const kbt_config &cfg, std::uint32_t samples, kbt::Arena &arena, kbt_flight &flight) {
  const Room room(cfg);
  flight.capacity = samples / 2 + samples % 2;
  flight.record_bytes = (room.bytes() + 7) / 8 * 8;
  for (Half &half : flight.half) {
#ifndef KBT_NO_FLOAT64
    if (cfg.dtype == KBT_FLOAT64) {
      plan_half<double>(cfg, flight.capacity, flight.record_bytes, arena, half);
      continue;
    }
#endif
    plan_half<float>(cfg, flight.capacity, flight.record_bytes, arena, half);
  }
}

template <class T>
void copy(void *to, const T *from, Index count) {
  if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));  // `from` may be null otherwise
}

// Begin a half with the state the head has now.
void begin(kbt_flight &flight, int which) {
  Half &half = flight.half[which];
  if (half.begun) flight.before += half.used;
  flight.current = which;
  half.begun = true;
  half.used = 0;
  as_head(flight.head, [&](const auto &head) {
    half.samples = head.samples;
    half.noise_count = static_cast<std::int32_t>(head.noise_count());
    copy(half.noise, head.noise(), head.noise_count());
    for (Index i = 0; i < head.layers(); ++i) {
      const auto &w = head.weights(i);
      copy(half.mean[i], w.mean, w.mean_count());
      copy(half.d[i], w.d, w.d_count());
      copy(half.u[i], w.u, w.u_count());
    }
  });
}

unsigned char *next_record(kbt_flight &flight) {
  Half &half = flight.half[flight.current];
  return half.records + half.used++ * flight.record_bytes;
}
void turn_when_full(kbt_flight &flight) {
  if (flight.half[flight.current].used == flight.capacity) begin(flight, 1 - flight.current);
}

void learned(kbt_tap *self, const kbt_sample &sample, std::int32_t rows, kbt_status status, double nis) {
  auto &flight = *static_cast<kbt_flight *>(self);
  const kbt_config &cfg = flight.head->cfg;
  unsigned char *to = next_record(flight);
  Record record{};
  record.kind = (sample.predicted ? KBT_FLIGHT_OBSERVE : KBT_FLIGHT_UPDATE) + (sample.labels != nullptr ? 1 : 0);
  record.given = (sample.h != nullptr ? kGaveInput : 0) | (sample.noise != nullptr ? kGaveNoise : 0) |
                 (sample.y != nullptr || sample.labels != nullptr ? kGaveTarget : 0);
  record.rows = rows;
  record.noise_count = sample.noise_count;
  record.status = status;
  record.samples = flight.head->samples;
  record.nis = nis;
  std::memcpy(to, &record, sizeof record);
  to += sizeof record;

  const Room room(cfg);
  const Used used(cfg, record);
  as_head(flight.head, [&](const auto &head) {
    using T = ElementOf<decltype(head)>;
    if (sample.predicted) {
      for (Index a = 0; a < used.rows; ++a)
        copy(to + a * cfg.widths[0] * Index(sizeof(T)), head.input(a), cfg.widths[0]);
    } else {
      copy(to, static_cast<const T *>(sample.h), used.h);
    }
    to += room.h * Index(sizeof(T));
    copy(to, static_cast<const T *>(sample.y), used.y);
    copy(to, sample.labels, used.labels);
    copy(to + room.y * Index(sizeof(T)), static_cast<const T *>(sample.noise), used.noise);
  });
  turn_when_full(flight);
}

void set_noise(kbt_tap *self, const void *noise, std::int32_t count) {
  auto &flight = *static_cast<kbt_flight *>(self);
  const Room room(flight.head->cfg);
  unsigned char *to = next_record(flight);
  Record record{};
  record.kind = KBT_FLIGHT_SET_NOISE;
  record.given = kGaveNoise;
  record.noise_count = count;
  record.samples = flight.head->samples;
  std::memcpy(to, &record, sizeof record);
  to += sizeof record + static_cast<std::size_t>(room.h + room.y) * room.element;
  std::memcpy(to, noise, static_cast<std::size_t>(count) * room.element);
  turn_when_full(flight);
}

// What was recorded cannot lead to this state.
void replaced(kbt_tap *self) {
  auto &flight = *static_cast<kbt_flight *>(self);
  Half &other = flight.half[1 - flight.current];
  if (other.begun) flight.before += other.used;
  other.begun = false;
  begin(flight, flight.current);
}

// ---- the log -------------------------------------------------------------------------------------------------------

constexpr std::uint64_t kHashStart = 14695981039346656037ULL;

// A sink that keeps the FNV-1a hash of what went by in a std::uint64_t.
void add_to_hash(void *context, const void *bytes, std::size_t count) {
  auto &hash = *static_cast<std::uint64_t *>(context);
  for (std::size_t i = 0; i < count; ++i)
    hash = (hash ^ static_cast<const unsigned char *>(bytes)[i]) * 1099511628211ULL;
}

std::uint64_t hash_of(const kbt_head *head) {
  std::uint64_t hash = kHashStart;
  kbt_state_stream(head, add_to_hash, &hash);
  return hash;
}

// The state a half began from, as the bytes kbt_state_save would have written then.
template <class T>
void write_base(const kbt::Head<T> &head, const Half &half, Writer &out) {
  const auto body = [&](Writer &to) {
    kbt::write_numbers(to, head.cfg, half.samples, static_cast<const T *>(half.noise), half.noise_count, [&](Index i) {
      Posterior<T> w = head.weights(i);
      w.mean = static_cast<T *>(half.mean[i]);
      w.d = static_cast<T *>(half.d[i]);
      w.u = static_cast<T *>(half.u[i]);
      return w;
    });
  };
  std::uint32_t crc = 0;
  Writer judge(kbt::add_to_crc, &crc);
  body(judge);
  judge.flush();
  kbt::write_header(out, kbt::kStateMagic, kbt::kStateVersion, judge.used(), crc);
  body(out);
}

template <class T>
void write_record(const kbt_config &cfg, const unsigned char *from, Writer &out) {
  Record record;
  std::memcpy(&record, from, sizeof record);
  from += sizeof record;
  for (const std::int32_t x :
       {record.kind, record.given, record.rows, record.noise_count, record.status, record.spare}) {
    out.i32(x);
  }
  out.integer(record.samples);
  out.real(record.nis);
  const Room room(cfg);
  const Used used(cfg, record);
  const auto put = [&](Index count, Index all) {
    for (Index i = 0; i < all; ++i) {
      T x = T(0);
      if (i < count) std::memcpy(&x, from + i * Index(sizeof(T)), sizeof x);
      out.real(x);
    }
    from += all * Index(sizeof(T));
  };
  put(used.h, room.h);
  if (used.labels == 0) {
    put(used.y, room.y);
  } else {  // int32 in the room of y, which is at least as large: a softmax has two outputs or more
    for (Index a = 0; a < used.labels; ++a) {
      std::int32_t label;
      std::memcpy(&label, from + a * Index(sizeof label), sizeof label);
      out.i32(label);
    }
    for (std::size_t i = static_cast<std::size_t>(used.labels) * 4; i < static_cast<std::size_t>(room.y) * sizeof(T);
         ++i) {
      out.integer(std::uint8_t{0});
    }
    from += room.y * Index(sizeof(T));
  }
  put(used.noise, room.noise);
}

// Everything behind the header.
template <class T>
void write_log(const kbt_flight &flight, const kbt::Head<T> &head, Writer &out) {
  const Half &last = flight.half[flight.current], &older = flight.half[1 - flight.current];
  const Half &base = older.begun ? older : last;
  std::uint64_t checkpoint_hash = 0;
  if (older.begun) {
    checkpoint_hash = kHashStart;
    Writer hasher(add_to_hash, &checkpoint_hash);
    write_base(head, last, hasher);
    hasher.flush();
  }
  const Room room(head.cfg);
  out.integer(static_cast<std::uint64_t>(kbt::state_bytes(head.cfg, base.noise_count)));
  out.integer(std::uint64_t{last.used} + (older.begun ? older.used : 0));
  out.integer(flight.before);
  out.integer(std::uint64_t{older.begun ? older.used : 0});
  out.integer(checkpoint_hash);
  out.integer(hash_of(&head));
  out.integer(static_cast<std::uint32_t>(room.bytes()));
  out.integer(std::uint32_t{0});
  write_base(head, base, out);
  for (const Half *half : {&older, &last}) {
    for (std::uint32_t i = 0; half->begun && i < half->used; ++i) {
      write_record<T>(head.cfg, half->records + i * flight.record_bytes, out);
    }
  }
}

}  // namespace

size_t kbt_flight_bytes(const kbt_config *cfg, uint32_t samples) {
  if (kbt_config_check(cfg, nullptr) != KBT_OK || samples < 2 || samples > (1U << 30)) return 0;
  const double room = static_cast<double>(cfg->max_rows) * (cfg->widths[0] + cfg->widths[cfg->layers]) +
                      static_cast<double>(cfg->widths[cfg->layers]) * cfg->widths[cfg->layers];
  if (room * 8.0 > 2e9 || (room * 8.0 + 48.0) * samples > static_cast<double>(std::numeric_limits<Index>::max()) / 4)
    return 0;
  kbt_flight flight{};
  kbt::Arena arena(nullptr);
  arena.take<kbt_flight>(1);
  plan(*cfg, samples, arena, flight);
  return arena.overflow() ? 0 : arena.used();
}

kbt_status kbt_flight_init(kbt_head *head, void *memory, size_t bytes, uint32_t samples, kbt_flight **flight) {
  if (head == nullptr || memory == nullptr || flight == nullptr) return KBT_E_NULL;
  *flight = nullptr;
  const std::size_t needed = kbt_flight_bytes(&head->cfg, samples);
  if (needed == 0 || bytes < needed) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(memory) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  kbt::Arena arena(memory);
  auto *made = new (arena.take<kbt_flight>(1)) kbt_flight();
  made->learned = learned;
  made->set_noise = set_noise;
  made->replaced = replaced;
  made->head = head;
  plan(head->cfg, samples, arena, *made);
  begin(*made, 0);
  head->tap = made;
  *flight = made;
  return KBT_OK;
}

kbt_status kbt_flight_stop(kbt_head *head) {
  if (head == nullptr) return KBT_E_NULL;
  head->tap = nullptr;
  return KBT_OK;
}

size_t kbt_flight_log_size(const kbt_flight *flight) {
  if (flight == nullptr || flight->head->tap != flight) return 0;
  const Half &last = flight->half[flight->current], &older = flight->half[1 - flight->current];
  const std::size_t base =
      static_cast<std::size_t>(kbt::state_bytes(flight->head->cfg, older.begun ? older.noise_count : last.noise_count));
  return kFront + base + (last.used + (older.begun ? older.used : 0)) * Room(flight->head->cfg).bytes();
}

kbt_status kbt_flight_log(const kbt_flight *flight, kbt_sink *sink, void *context) {
  if (flight == nullptr || sink == nullptr) return KBT_E_NULL;
  if (flight->head->tap != flight) return KBT_E_ORDER;
  as_head(flight->head, [&](const auto &head) {  // twice, as the CRC comes first
    std::uint32_t crc = 0;
    Writer judge(kbt::add_to_crc, &crc), header(sink, context), body(sink, context);
    write_log(*flight, head, judge);
    judge.flush();
    kbt::write_header(header, kMagic, kVersion, judge.used(), crc);
    header.flush();
    write_log(*flight, head, body);
    body.flush();
  });
  return KBT_OK;
}

// ---- on the desk ---------------------------------------------------------------------------------------------------

namespace {

Record read_record(Reader &in) {
  Record record{};
  for (std::int32_t *x :
       {&record.kind, &record.given, &record.rows, &record.noise_count, &record.status, &record.spare}) {
    *x = in.i32();
  }
  record.samples = in.integer<std::uint64_t>();
  in.real(record.nis);
  return record;
}

// The numbers of a record, in memory that the caller of replay gave.
template <class T>
struct Scratch {
  T *h, *y, *noise, *mean;
  std::int32_t *labels;

  Scratch(const kbt_config &cfg, kbt::Arena &arena) {
    const Room room(cfg);
    h = arena.take<T>(room.h);
    y = arena.take<T>(room.y);
    noise = arena.take<T>(room.noise > 0 ? room.noise : 1);
    mean = arena.take<T>(room.y);
    labels = arena.take<std::int32_t>(cfg.max_rows);
  }
  void read(const kbt_config &cfg, const Record &record, const unsigned char *numbers) {
    const Room room(cfg);
    const Used used(cfg, record);
    const auto take = [&](T *to, Index count, Index all) {
      Reader in(numbers, static_cast<std::size_t>(all) * sizeof(T));
      for (Index i = 0; i < count; ++i) in.real(to[i]);
    };
    take(h, used.h, room.h);
    numbers += room.h * Index(sizeof(T));
    take(y, used.y, room.y);
    Reader in(numbers, static_cast<std::size_t>(room.y) * sizeof(T));
    for (Index a = 0; a < used.labels; ++a) labels[a] = in.i32();
    numbers += room.y * Index(sizeof(T));
    take(noise, used.noise, room.noise);
  }
};

// The call that a record stands for. A pointer that was null is null again; one whose numbers the core never read may
// point anywhere.
template <class T>
kbt_status call_again(kbt_head *head, const Record &record, const Scratch<T> &room, kbt_result *result) {
  const bool by_label = record.kind == KBT_FLIGHT_UPDATE_LABELS || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
  const T *h = (record.given & kGaveInput) != 0 ? room.h : nullptr;
  const T *y = (record.given & kGaveTarget) != 0 ? room.y : nullptr;
  const T *noise = (record.given & kGaveNoise) != 0 ? room.noise : nullptr;
  const std::int32_t *labels = (record.given & kGaveTarget) != 0 ? room.labels : nullptr;
  if (record.kind == KBT_FLIGHT_SET_NOISE) return kbt_set_noise(head, noise, record.noise_count);
  if (record.kind == KBT_FLIGHT_UPDATE || record.kind == KBT_FLIGHT_UPDATE_LABELS) {
    return by_label ? kbt_update_labels(head, h, record.rows, labels, noise, record.noise_count, result)
                    : kbt_update(head, h, record.rows, y, noise, record.noise_count, result);
  }
  head->predicted_rows = 0;  // what another record has left behind
  if (record.rows != 0) {
    const kbt_status status = kbt_predict(head, room.h, record.rows, room.mean, nullptr, nullptr);
    if (status != KBT_OK) return status;
  }
  return by_label ? kbt_observe_labels(head, labels, noise, record.noise_count, result)
                  : kbt_observe(head, y, noise, record.noise_count, result);
}

template <class T>
std::size_t scratch_bytes(const kbt_config &cfg) {
  kbt::Arena arena(nullptr);
  Scratch<T>(cfg, arena);
  return arena.used();
}

}  // namespace

kbt_status kbt_flight_check(const void *log, size_t size, kbt_flight_info *info) {
  if (log == nullptr || info == nullptr) return KBT_E_NULL;
  const auto *bytes = static_cast<const unsigned char *>(log);
  kbt_status status = kbt::check_header(bytes, size, kMagic, kVersion);
  if (status != KBT_OK) return status;
  if (size < kFront) return KBT_E_BLOB_SHORT;
  Reader front(bytes + kbt::kHeaderBytes, kFront - kbt::kHeaderBytes);
  kbt_flight_info found{};
  found.base_offset = kFront;
  found.base_bytes = front.integer<std::uint64_t>();
  found.records = front.integer<std::uint64_t>();
  found.before = front.integer<std::uint64_t>();
  found.checkpoint = front.integer<std::uint64_t>();
  found.checkpoint_hash = front.integer<std::uint64_t>();
  found.final_hash = front.integer<std::uint64_t>();
  found.record_bytes = front.integer<std::uint32_t>();
  if (front.integer<std::uint32_t>() != 0 || found.base_bytes > size - kFront) return KBT_E_BLOB_VALUE;
  const auto base_bytes = static_cast<std::size_t>(found.base_bytes);
  status = kbt_state_config(bytes + kFront, base_bytes, &found.cfg);
  if (status != KBT_OK) return status;
  if (kbt_flight_bytes(&found.cfg, 2) == 0) return KBT_E_BLOB_VALUE;  // no recorder has this configuration
  const Room room(found.cfg);
  const std::size_t rest = size - kFront - base_bytes;
  if (found.record_bytes != room.bytes() || found.records != rest / room.bytes() || rest % room.bytes() != 0 ||
      found.checkpoint > found.records) {
    return KBT_E_BLOB_VALUE;
  }
  found.records_offset = kFront + found.base_bytes;
  for (std::size_t at = kFront + base_bytes; at < size; at += room.bytes()) {
    Reader in(bytes + at, room.bytes());
    const Record record = read_record(in);
    if (record.kind < KBT_FLIGHT_UPDATE || record.kind > KBT_FLIGHT_SET_NOISE || (record.given & ~kGaveAll) != 0 ||
        record.status < KBT_OK || record.status > KBT_E_LAYER || record.spare != 0) {
      return KBT_E_BLOB_VALUE;
    }
  }
  found.replay_bytes = scratch_bytes<double>(found.cfg);  // enough for either type
  *info = found;
  return KBT_OK;
}

kbt_status kbt_flight_replay(const void *log, size_t size, kbt_head *head, void *memory, size_t bytes,
                             kbt_flight_visit *visit, void *context, kbt_flight_outcome *outcome) {
  if (head == nullptr || memory == nullptr || outcome == nullptr) return KBT_E_NULL;
  kbt_flight_info info;
  kbt_status status = kbt_flight_check(log, size, &info);
  if (status != KBT_OK) return status;
  if (bytes < info.replay_bytes) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(memory) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  const unsigned char *at = static_cast<const unsigned char *>(log) + info.base_offset;
  status = kbt_state_load(head, at, static_cast<std::size_t>(info.base_bytes));
  if (status != KBT_OK) return status;
  at += info.base_bytes;

  outcome->first_difference = info.records;
  as_head(head, [&](auto &self) {
    using T = ElementOf<decltype(self)>;
    kbt::Arena arena(memory);
    Scratch<T> room(info.cfg, arena);
    for (std::uint64_t i = 0; i < info.records; ++i, at += info.record_bytes) {
      Reader in(at, sizeof(Record));
      const Record record = read_record(in);
      room.read(info.cfg, record, at + sizeof(Record));
      kbt_result result{0.0, 0.0};
      kbt_flight_step step{};
      step.index = i;
      step.kind = record.kind;
      step.rows = record.rows;
      step.recorded = static_cast<kbt_status>(record.status);
      step.recorded_samples = record.samples;
      step.recorded_nis = record.nis;
      step.status = call_again(head, record, room, &result);
      step.samples = head->samples;
      step.nis = result.nis;
      step.same = step.status == step.recorded && step.samples == step.recorded_samples &&
                  std::memcmp(&step.nis, &step.recorded_nis, sizeof step.nis) == 0 &&
                  (i + 1 != info.checkpoint || hash_of(head) == info.checkpoint_hash);
      if (step.same == 0 && outcome->first_difference == info.records) outcome->first_difference = i;
      if (visit != nullptr) visit(context, &step);
    }
  });
  outcome->final_hash = hash_of(head);
  outcome->reproduced = outcome->first_difference == info.records && outcome->final_hash == info.final_hash;
  return KBT_OK;
}
