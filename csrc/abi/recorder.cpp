// recorder.cpp - the flight recorder: records calls and writes them as a log that replays to the same bits.
#include "config.hpp"
#include "flight_log.hpp"

using kbt::as_head;
using kbt::ElementOf;
using kbt::FlightRecord;
using kbt::Head;
using kbt::Index;
using kbt::Room;
using kbt::Used;
using kbt::Writer;

namespace {

// ---- memory --------------------------------------------------------------------------------------------------------

struct Half {
  std::uint64_t samples;
  std::uint32_t used;  // records
  bool begun, noise_is_matrix;
  void *learned;  // the state it starts from, in the layout of the head
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
  Head<T> head;
  kbt::Arena nowhere(nullptr);
  head.plan(cfg, nowhere);
  half.learned = arena.take<unsigned char>(static_cast<Index>(head.learned_bytes()));
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

// Start a half with the present state of the head.
void begin(kbt_flight &flight, int which) {
  Half &half = flight.half[which];
  if (half.begun) flight.before += half.used;
  flight.current = which;
  half.begun = true;
  half.used = 0;
  as_head(flight.head, [&](const auto &head) {
    half.samples = head.samples;
    half.noise_is_matrix = head.noise().matrix;
    std::memcpy(half.learned, head.learned(), head.learned_bytes());
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
  FlightRecord record{};
  record.kind = (sample.predicted ? KBT_FLIGHT_OBSERVE : KBT_FLIGHT_UPDATE) + (sample.labels != nullptr ? 1 : 0);
  record.given = (sample.h != nullptr ? kbt::kGaveInput : 0) | (sample.noise != nullptr ? kbt::kGaveNoise : 0) |
                 (sample.y != nullptr || sample.labels != nullptr ? kbt::kGaveTarget : 0);
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
  FlightRecord record{};
  record.kind = KBT_FLIGHT_SET_NOISE;
  record.given = kbt::kGaveNoise;
  record.noise_count = count;
  record.samples = flight.head->samples;
  std::memcpy(to, &record, sizeof record);
  to += sizeof record + static_cast<std::size_t>(room.h + room.y) * room.element;
  std::memcpy(to, noise, static_cast<std::size_t>(count) * room.element);
  turn_when_full(flight);
}

// The state was replaced: earlier records cannot lead to it.
void replaced(kbt_tap *self) {
  auto &flight = *static_cast<kbt_flight *>(self);
  Half &other = flight.half[1 - flight.current];
  if (other.begun) flight.before += other.used;
  other.begun = false;
  begin(flight, flight.current);
}

// ---- the log -------------------------------------------------------------------------------------------------------

template <class T>
Head<T> as_it_was(const Head<T> &head, const Half &half) {
  Head<T> then = head;
  then.take_over(half.learned, half.samples, half.noise_is_matrix);
  return then;
}

// The starting state of a half, as the bytes that kbt_state_save would have written.
template <class T>
void write_base(const Head<T> &head, const Half &half, Writer &out) {
  const Head<T> then = as_it_was(head, half);
  std::uint32_t crc = 0;
  Writer judge(kbt::add_to_crc, &crc);
  kbt::write_body(then, judge);
  kbt::write_header(out, kbt::kStateMagic, kbt::version_of(head.cfg), judge.used(), crc);
  kbt::write_body(then, out, false);
}

template <class T>
void write_record(const kbt_config &cfg, const unsigned char *from, Writer &out) {
  FlightRecord record;
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
  } else {  // int32 in place of y, which is at least as large: a softmax has two or more outputs
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

std::size_t state_bytes(const kbt_config &cfg, const Half &half) {
  const double n = cfg.widths[cfg.layers];
  return static_cast<std::size_t>(kbt::state_bytes(cfg, half.noise_is_matrix ? n * n : n, kbt::version_of(cfg)));
}

// Everything after the header.
template <class T>
void write_log(const kbt_flight &flight, const Head<T> &head, Writer &out) {
  const Half &last = flight.half[flight.current], &older = flight.half[1 - flight.current];
  const Half &base = older.begun ? older : last;
  std::uint64_t checkpoint_hash = 0;
  if (older.begun) {
    checkpoint_hash = kbt::kHashStart;
    Writer hasher(kbt::add_to_hash, &checkpoint_hash);
    write_base(head, last, hasher);
    hasher.flush();
  }
  const Room room(head.cfg);
  out.integer(static_cast<std::uint64_t>(state_bytes(head.cfg, base)));
  out.integer(std::uint64_t{last.used} + (older.begun ? older.used : 0));
  out.integer(flight.before);
  out.integer(std::uint64_t{older.begun ? older.used : 0});
  out.integer(checkpoint_hash);
  out.integer(kbt::hash_of(&head));
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
  plan(kbt::canonical(*cfg), samples, arena, flight);
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
  const std::size_t base = state_bytes(flight->head->cfg, older.begun ? older : last);
  return kbt::kFlightFront + base + (last.used + (older.begun ? older.used : 0)) * Room(flight->head->cfg).bytes();
}

kbt_status kbt_flight_log(const kbt_flight *flight, kbt_sink *sink, void *context) {
  if (flight == nullptr || sink == nullptr) return KBT_E_NULL;
  if (flight->head->tap != flight) return KBT_E_ORDER;
  as_head(flight->head, [&](const auto &head) {  // twice, as the CRC comes first
    std::uint32_t crc = 0;
    Writer judge(kbt::add_to_crc, &crc), header(sink, context), body(sink, context);
    write_log(*flight, head, judge);
    judge.flush();
    kbt::write_header(header, kbt::kFlightMagic, kbt::kFlightVersion, judge.used(), crc);
    header.flush();
    write_log(*flight, head, body);
    body.flush();
  });
  return KBT_OK;
}
