// blob.cpp - bytes from anywhere as a state blob, and as the flash memory that a device starts from.
//
// A blob that is accepted must be the blob that its head saves: equal in every byte, and so in meaning. One of an older
// version may be saved as a newer one: the same behind its configuration, and from then on equal in every byte. Its
// head then predicts finite numbers or rejects, and may learn. A mutator repairs length and checksum most of the time;
// without it nearly every input would end at the first check.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz.hpp"
#include "kbt.h"
#include "kbt_store.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t *data, std::size_t size, std::size_t max_size);

namespace {

struct Tally {
  unsigned long long blobs = 0, sound = 0, accepted = 0;
  ~Tally() {
    std::fprintf(stderr, "blob: %llu blobs, %llu with a sound header and checksum, %llu accepted\n", blobs, sound,
                 accepted);
  }
} tally;

constexpr std::size_t kLargestArena = std::size_t{1} << 22;

// What a head has saved that has loaded `blob`.
void is_the_blob(const std::vector<std::uint8_t> &saved, const std::uint8_t *blob, std::size_t size,
                 const kbt_config &cfg) {
  const std::size_t config = sizeof cfg - (blob[4] == 1 ? sizeof cfg.drift : 0);  // it has no padding
  const std::size_t learned = size - fuzz::kHeader - config;
  REQUIRE(saved.size() > learned);
  REQUIRE(std::memcmp(saved.data() + (saved.size() - learned), blob + (size - learned), learned) == 0);
  REQUIRE(saved[4] != blob[4] || (saved.size() == size && std::memcmp(saved.data(), blob, size) == 0));
  kbt_config again;
  REQUIRE(kbt_state_config(saved.data(), saved.size(), &again) == KBT_OK && std::memcmp(&again, &cfg, sizeof cfg) == 0);
}

template <class T>
void predicts_finite_numbers_or_rejects(kbt_head *head, const kbt_config &cfg) {
  const std::size_t d = static_cast<std::size_t>(cfg.widths[0]), n = static_cast<std::size_t>(cfg.widths[cfg.layers]);
  std::vector<T> h(d, T(0.5)), mean(n), cov(n * n), var(n);
  if (kbt_predict(head, h.data(), 1, mean.data(), cov.data(), var.data()) != KBT_OK) return;
  for (std::size_t i = 0; i < n; ++i) REQUIRE(mean[i] - mean[i] == T(0) && var[i] - var[i] == T(0) && var[i] >= T(0));
  if (cfg.output == KBT_SOFTMAX) return;
  kbt_observe(head, mean.data(), nullptr, 0, nullptr);  // whatever it says, nothing breaks
  kbt_suppose_changed(head);
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t *data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 4 != 0) fuzz::repair(data, size, fuzz::kState);
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
  const std::unique_ptr<std::uint8_t[]> blob(new std::uint8_t[size]);  // its own memory, so that a step beyond is seen
  std::memcpy(blob.get(), data, size);
  kbt_config cfg;
  ++tally.blobs;
  if (size == 0 || kbt_state_config(blob.get(), size, &cfg) != KBT_OK) return 0;
  ++tally.sound;
  const std::size_t bytes = kbt_arena_bytes(&cfg);
  REQUIRE(bytes != 0);
  if (bytes > kLargestArena) return 0;
  const fuzz::Memory arena = fuzz::memory_of(bytes);
  kbt_head *head = nullptr;
  REQUIRE(kbt_init(&cfg, arena.get(), bytes, &head) == KBT_OK);
  std::vector<std::uint8_t> before(kbt_state_size(head)), after(before.size());
  REQUIRE(kbt_state_save(head, before.data(), before.size()) == KBT_OK);

  if (kbt_state_load(head, blob.get(), size) != KBT_OK) {
    REQUIRE(kbt_state_save(head, after.data(), after.size()) == KBT_OK && after == before);
    return 0;
  }
  ++tally.accepted;
  after.resize(kbt_state_size(head));
  REQUIRE(kbt_state_save(head, after.data(), after.size()) == KBT_OK);
  is_the_blob(after, blob.get(), size, cfg);
  REQUIRE(kbt_state_load(head, after.data(), after.size()) == KBT_OK);
  std::vector<std::uint8_t> twice(kbt_state_size(head));
  REQUIRE(kbt_state_save(head, twice.data(), twice.size()) == KBT_OK && twice == after);
  if (cfg.dtype == KBT_FLOAT64) {
    predicts_finite_numbers_or_rejects<double>(head, cfg);
  } else {
    predicts_finite_numbers_or_rejects<float>(head, cfg);
  }
  return 0;
}
