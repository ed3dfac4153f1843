// flight_log.hpp - the format of a flight log, which recorder.cpp writes and replay.cpp reads.
//
//   offset  0  "KBTF", u32 version, u64 length, u32 CRC-32 of everything from offset 24, u32 0      (as state.hpp)
//          24  u64 bytes of the base state, u64 records, u64 overwritten before, u64 checkpoint, u64 its hash,
//              u64 hash of the final state, u32 bytes of a record, u32 0
//          80  base state, a blob as of kbt_state_save
//              records: i32 kind, i32 given, i32 rows, i32 noise count, i32 status, i32 0, u64 samples, f64 nis,
//              max_rows x d numbers of h, max_rows x d_o of y (or labels in their place), then the noise. Unused
//              numbers of a record are zero.
#pragma once

#include "as_head.hpp"
#include "kbt_flight.h"
#include "state.hpp"

namespace kbt {

constexpr std::uint32_t kFlightMagic = 0x4654424BU;  // "KBTF"
constexpr std::uint32_t kFlightVersion = 2;
constexpr std::size_t kFlightFront = 80;  // bytes before the base state
enum { kGaveInput = 1, kGaveTarget = 2, kGaveNoise = 4, kGaveAll = 7 };

struct FlightRecord {  // followed by its numbers
  std::int32_t kind, given, rows, noise_count, status, spare;
  std::uint64_t samples;
  double nis;
};
static_assert(sizeof(FlightRecord) == 40, "the size of a record in a log");

// Numbers of one record, for h, targets and noise.
struct Room {
  Index h, y, noise;
  std::size_t element;

  explicit Room(const kbt_config &cfg) {
    const Index n = cfg.widths[cfg.layers];
    h = static_cast<Index>(cfg.max_rows) * cfg.widths[0];
    y = cfg.max_rows * n;
    noise = cfg.noise == KBT_NOISE_MULTINOMIAL ? 0 : cfg.noise == KBT_NOISE_MATRIX ? n * n : n;
    element = cfg.dtype == KBT_FLOAT64 ? sizeof(double) : sizeof(float);
  }
  std::size_t numbers() const { return static_cast<std::size_t>(h + y + noise); }
  std::size_t bytes() const { return sizeof(FlightRecord) + numbers() * element; }
};

// How many numbers of a record are used: only those that the core may have read.
struct Used {
  Index rows, h, y, labels, noise;

  Used(const kbt_config &cfg, const FlightRecord &record) {
    const Index n = cfg.widths[cfg.layers], count = record.noise_count;
    const bool softmax = cfg.output == KBT_SOFTMAX, set_noise = record.kind == KBT_FLIGHT_SET_NOISE;
    const bool observe = record.kind == KBT_FLIGHT_OBSERVE || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
    const bool by_label = record.kind == KBT_FLIGHT_UPDATE_LABELS || record.kind == KBT_FLIGHT_OBSERVE_LABELS;
    rows = !set_noise && record.rows >= 1 && record.rows <= cfg.max_rows ? record.rows : 0;
    h = observe || (record.given & kGaveInput) != 0 ? rows * cfg.widths[0] : 0;
    y = (record.given & kGaveTarget) != 0 && !by_label ? rows * n : 0;
    labels = (record.given & kGaveTarget) != 0 && by_label && softmax ? rows : 0;
    const bool allowed = count == 1 || count == n || (count == n * n && cfg.noise == KBT_NOISE_MATRIX);
    noise = (record.given & kGaveNoise) != 0 && allowed && cfg.noise != KBT_NOISE_MULTINOMIAL ? count : 0;
  }
};

constexpr std::uint64_t kHashStart = 14695981039346656037ULL;

// A sink whose context is a std::uint64_t: the FNV-1a hash of all bytes so far.
inline void add_to_hash(void *context, const void *bytes, std::size_t count) {
  auto &hash = *static_cast<std::uint64_t *>(context);
  for (std::size_t i = 0; i < count; ++i)
    hash = (hash ^ static_cast<const unsigned char *>(bytes)[i]) * 1099511628211ULL;
}

inline std::uint64_t hash_of(const kbt_head *head) {
  std::uint64_t hash = kHashStart;
  kbt_state_stream(head, add_to_hash, &hash);
  return hash;
}

}  // namespace kbt
