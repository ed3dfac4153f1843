// flight.cpp - bytes from anywhere as a flight log.
//
// A log that passes its check can be replayed: in memory of exactly the size that it asks for, to a state that is
// finite, and to the same state a second time. A mutator repairs the header, and that of the state inside, most of the
// time.
#include <cstdio>
#include <cstring>
#include <memory>

#include "fuzz.hpp"
#include "kbt_flight.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t *data, std::size_t size, std::size_t max_size);

namespace {

struct Tally {
  unsigned long long logs = 0, sound = 0, replayed = 0, records = 0, reproduced = 0;
  ~Tally() {
    std::fprintf(stderr, "flight: %llu logs, %llu sound, %llu replayed, %llu records, %llu reproduced\n", logs, sound,
                 replayed, records, reproduced);
  }
} tally;

constexpr std::size_t kFront = 80, kLargest = std::size_t{1} << 22;

void count_step(void *context, const kbt_flight_step *step) {
  auto &next = *static_cast<std::uint64_t *>(context);
  REQUIRE(step->index == next);
  ++next;
}

kbt_status replay(const std::uint8_t *log, std::size_t size, const kbt_flight_info &info, kbt_flight_outcome &outcome) {
  const std::size_t bytes = kbt_arena_bytes(&info.cfg);
  const fuzz::Memory arena = fuzz::memory_of(bytes);
  const fuzz::Memory room = fuzz::memory_of(static_cast<std::size_t>(info.replay_bytes));
  kbt_head *head = nullptr;
  REQUIRE(kbt_init(&info.cfg, arena.get(), bytes, &head) == KBT_OK);
  std::uint64_t steps = 0;
  const kbt_status status = kbt_flight_replay(log, size, head, room.get(), static_cast<std::size_t>(info.replay_bytes),
                                              count_step, &steps, &outcome);
  REQUIRE(steps == (status == KBT_OK ? info.records : 0));
  kbt_health health;
  REQUIRE(kbt_get_health(head, &health) == KBT_OK);
  REQUIRE(health.smallest_var >= 0.0 && health.largest_var - health.largest_var == 0.0);
  return status;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 4 == 0 || size < kFront) return size;
  std::uint64_t base = 0;
  for (int i = 7; i >= 0; --i) base = base << 8 | data[fuzz::kHeader + static_cast<std::size_t>(i)];
  if (base <= size - kFront) fuzz::repair(data + kFront, static_cast<std::size_t>(base), fuzz::kState);
  fuzz::repair(data, size, fuzz::kFlight);
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
  const std::unique_ptr<std::uint8_t[]> log(new std::uint8_t[size]);  // its own memory, so that a step beyond is seen
  std::memcpy(log.get(), data, size);
  ++tally.logs;
  kbt_flight_info info;
  if (size == 0 || kbt_flight_check(log.get(), size, &info) != KBT_OK) return 0;
  ++tally.sound;
  REQUIRE(info.base_offset + info.base_bytes == info.records_offset);
  REQUIRE(info.records_offset + info.records * info.record_bytes == size);
  REQUIRE(kbt_arena_bytes(&info.cfg) != 0);
  if (kbt_arena_bytes(&info.cfg) > kLargest || info.replay_bytes > kLargest) return 0;
  kbt_flight_outcome first{}, second{};
  const kbt_status status = replay(log.get(), size, info, first);
  REQUIRE(replay(log.get(), size, info, second) == status);
  if (status != KBT_OK) return 0;
  ++tally.replayed;
  tally.records += info.records;
  tally.reproduced += first.reproduced != 0;
  REQUIRE(first.final_hash == second.final_hash && first.first_difference == second.first_difference);
  REQUIRE(!first.reproduced || first.final_hash == info.final_hash);
  return 0;
}
