// replay.cpp - checks a flight log, repeats its calls, and compares the results bit for bit.
#include "flight_log.hpp"

using kbt::as_head;
using kbt::ElementOf;
using kbt::FlightRecord;
using kbt::hash_of;
using kbt::Index;
using kbt::Reader;
using kbt::Room;
using kbt::Used;

namespace {

FlightRecord read_record(Reader &in) {
  FlightRecord record{};
  for (std::int32_t *x :
       {&record.kind, &record.given, &record.rows, &record.noise_count, &record.status, &record.spare}) {
    *x = in.i32();
  }
  record.samples = in.integer<std::uint64_t>();
  in.real(record.nis);
  return record;
}

// The numbers of a record, in the memory passed to kbt_flight_replay.
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
  void read(const kbt_config &cfg, const FlightRecord &record, const unsigned char *numbers) {
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

// The recorded call. A null pointer is null again; a pointer whose numbers the core never read may point anywhere.
template <class T>
kbt_status call_again(kbt_head *head, const FlightRecord &record, const Scratch<T> &room, kbt_result *result) {
  const bool by_label = record.kind == KBT_FLIGHT_UPDATE_LABELS || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
  const T *h = (record.given & kbt::kGaveInput) != 0 ? room.h : nullptr;
  const T *y = (record.given & kbt::kGaveTarget) != 0 ? room.y : nullptr;
  const T *noise = (record.given & kbt::kGaveNoise) != 0 ? room.noise : nullptr;
  const std::int32_t *labels = (record.given & kbt::kGaveTarget) != 0 ? room.labels : nullptr;
  if (record.kind == KBT_FLIGHT_SET_NOISE) return kbt_set_noise(head, noise, record.noise_count);
  if (record.kind == KBT_FLIGHT_UPDATE || record.kind == KBT_FLIGHT_UPDATE_LABELS) {
    return by_label ? kbt_update_labels(head, h, record.rows, labels, noise, record.noise_count, result)
                    : kbt_update(head, h, record.rows, y, noise, record.noise_count, result);
  }
  head->predicted_rows = 0;  // drop a prediction of an earlier record
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
  std::uint32_t version = 0;
  kbt_status status =
      kbt::check_header(bytes, size, kbt::kFlightMagic, kbt::kFlightVersion, kbt::kFlightVersion, version);
  if (status != KBT_OK) return status;
  if (size < kbt::kFlightFront) return KBT_E_BLOB_SHORT;
  Reader front(bytes + kbt::kHeaderBytes, kbt::kFlightFront - kbt::kHeaderBytes);
  kbt_flight_info found{};
  found.base_offset = kbt::kFlightFront;
  found.base_bytes = front.integer<std::uint64_t>();
  found.records = front.integer<std::uint64_t>();
  found.before = front.integer<std::uint64_t>();
  found.checkpoint = front.integer<std::uint64_t>();
  found.checkpoint_hash = front.integer<std::uint64_t>();
  found.final_hash = front.integer<std::uint64_t>();
  found.record_bytes = front.integer<std::uint32_t>();
  if (front.integer<std::uint32_t>() != 0 || found.base_bytes > size - kbt::kFlightFront) return KBT_E_BLOB_VALUE;
  const auto base_bytes = static_cast<std::size_t>(found.base_bytes);
  status = kbt_state_config(bytes + kbt::kFlightFront, base_bytes, &found.cfg);
  if (status != KBT_OK) return status;
  if (kbt_flight_bytes(&found.cfg, 2) == 0) return KBT_E_BLOB_VALUE;  // no recorder can have this configuration
  const Room room(found.cfg);
  const std::size_t rest = size - kbt::kFlightFront - base_bytes;
  if (found.record_bytes != room.bytes() || found.records != rest / room.bytes() || rest % room.bytes() != 0 ||
      found.checkpoint > found.records) {
    return KBT_E_BLOB_VALUE;
  }
  found.records_offset = kbt::kFlightFront + found.base_bytes;
  for (std::size_t at = kbt::kFlightFront + base_bytes; at < size; at += room.bytes()) {
    Reader in(bytes + at, room.bytes());
    const FlightRecord record = read_record(in);
    if (record.kind < KBT_FLIGHT_UPDATE || record.kind > KBT_FLIGHT_SET_NOISE || (record.given & ~kbt::kGaveAll) != 0 ||
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
      Reader in(at, sizeof(FlightRecord));
      const FlightRecord record = read_record(in);
      room.read(info.cfg, record, at + sizeof(FlightRecord));
      kbt_result result{};
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
