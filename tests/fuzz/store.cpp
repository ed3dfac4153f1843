// store.cpp - a device that starts from flash memory in which anything may stand.
//
// Whatever the two slots hold, loading ends, and gives a whole state or leaves the head as it was. Saving then works,
// and is found by the next load.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz.hpp"
#include "kbt_store.h"

namespace {

constexpr std::uint32_t kSlot = 1024;
alignas(64) unsigned char slots[2][kSlot];
alignas(KBT_ARENA_ALIGN) unsigned char arena[16384];

int erase(void *, int slot) {
  std::memset(slots[slot], 0xFF, kSlot);
  return 0;
}
int write(void *, int slot, std::uint32_t offset, const void *bytes, std::uint32_t count) {
  REQUIRE(slot >= 0 && slot < 2 && offset <= kSlot && count <= kSlot - offset);
  std::memcpy(slots[slot] + offset, bytes, count);
  return 0;
}

std::vector<unsigned char> state_of(const kbt_head *head) {
  std::vector<unsigned char> blob(kbt_state_size(head));
  REQUIRE(kbt_state_save(head, blob.data(), blob.size()) == KBT_OK);
  return blob;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
  fuzz::Bytes in(data, size);
  kbt_config cfg;
  kbt_config_single(&cfg, 1 + in.below(3), 1);
  kbt_head *head = nullptr;
  REQUIRE(kbt_init(&cfg, arena, sizeof arena, &head) == KBT_OK);
  const kbt_store store = {{slots[0], slots[1]}, kSlot, erase, write, nullptr};
  erase(nullptr, 0);
  erase(nullptr, 1);
  const float weight[] = {1.0F, 2.0F, 3.0F};
  for (int saves = in.below(4); saves > 0; --saves) {  // a device that has lived
    REQUIRE(kbt_set_prior(head, weight, nullptr, 0) == KBT_OK);
    REQUIRE(kbt_store_save(&store, head) == KBT_STORE_OK);
  }
  while (!in.empty()) {  // changed by a fault in the meantime
    const std::size_t at = in.raw<std::uint16_t>() % sizeof slots;
    (&slots[0][0])[at] = in.byte();
  }
  REQUIRE(kbt_init(&cfg, arena, sizeof arena, &head) == KBT_OK);
  const std::vector<unsigned char> fresh = state_of(head);
  if (kbt_store_load(&store, head) != KBT_STORE_OK) REQUIRE(state_of(head) == fresh);
  REQUIRE(kbt_set_prior(head, weight, nullptr, 0) == KBT_OK);
  const std::vector<unsigned char> wanted = state_of(head);
  REQUIRE(kbt_store_save(&store, head) == KBT_STORE_OK);
  REQUIRE(kbt_init(&cfg, arena, sizeof arena, &head) == KBT_OK);
  REQUIRE(kbt_store_load(&store, head) == KBT_STORE_OK && state_of(head) == wanted);
  return 0;
}
