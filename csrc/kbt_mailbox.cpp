// kbt_mailbox.cpp - three copies of a posterior between one writer and one reader. kbt_mailbox.h says why that is safe.
#include "kbt_mailbox.h"

#include <atomic>

#include "engine.hpp"
#include "state.hpp"

namespace {

struct Slot {
  void *numbers;  // learned_bytes
  std::uint64_t samples;
  bool noise_is_matrix;
};
constexpr std::uint32_t kFresh = 4;  // beside the number of a slot: posted and not yet taken

template <class H>
void fill_slot(const H &head, Slot &slot) {
  std::memcpy(slot.numbers, head.learned(), head.learned_bytes());
  slot.samples = head.samples;
  slot.noise_is_matrix = head.noise_is_matrix();
}

}  // namespace

// Each side's own number stands apart from what both touch, so that neither slows the other down.
struct kbt_mailbox {
  kbt_config cfg;
  Slot slots[3];
  alignas(KBT_ARENA_ALIGN) std::atomic<std::uint32_t> middle;
  alignas(KBT_ARENA_ALIGN) std::uint32_t writers;
  alignas(KBT_ARENA_ALIGN) std::uint32_t readers;
};
static_assert(sizeof(kbt_mailbox) % KBT_ARENA_ALIGN == 0, "the copies behind it are aligned as well");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "an exchange must not take a lock");

size_t kbt_mailbox_bytes(const kbt_head *head) {
  if (head == nullptr) return 0;
  return sizeof(kbt_mailbox) + 3 * kbt::as_head(head, [](const auto &self) { return self.learned_bytes(); });
}

kbt_status kbt_mailbox_init(const kbt_head *head, void *memory, size_t bytes, kbt_mailbox **mailbox) {
  if (head == nullptr || memory == nullptr || mailbox == nullptr) return KBT_E_NULL;
  *mailbox = nullptr;
  if (bytes < kbt_mailbox_bytes(head)) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(memory) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  auto *box = new (memory) kbt_mailbox{};
  box->cfg = head->cfg;
  kbt::as_head(head, [&](const auto &self) {
    auto *copies = static_cast<unsigned char *>(memory) + sizeof(kbt_mailbox);
    for (Slot &slot : box->slots) {
      slot.numbers = copies;
      copies += self.learned_bytes();
      fill_slot(self, slot);
    }
  });
  box->writers = 0;
  box->middle.store(1 | kFresh, std::memory_order_release);
  box->readers = 2;
  *mailbox = box;
  return KBT_OK;
}

kbt_status kbt_post(const kbt_head *head, kbt_mailbox *mailbox) {
  if (head == nullptr || mailbox == nullptr) return KBT_E_NULL;
  if (!kbt::same_config(head->cfg, mailbox->cfg)) return KBT_E_CONFIG;
  kbt::as_head(head, [&](const auto &self) { fill_slot(self, mailbox->slots[mailbox->writers]); });
  mailbox->writers = mailbox->middle.exchange(mailbox->writers | kFresh, std::memory_order_acq_rel) & ~kFresh;
  return KBT_OK;
}

kbt_status kbt_take(kbt_head *head, kbt_mailbox *mailbox) {
  if (head == nullptr || mailbox == nullptr) return KBT_E_NULL;
  if (!kbt::same_config(head->cfg, mailbox->cfg)) return KBT_E_CONFIG;
  if ((mailbox->middle.load(std::memory_order_relaxed) & kFresh) == 0) return KBT_OK;
  mailbox->readers = mailbox->middle.exchange(mailbox->readers, std::memory_order_acq_rel) & ~kFresh;
  const Slot &slot = mailbox->slots[mailbox->readers];
  kbt::as_head(head, [&](auto &self) { self.take_over(slot.numbers, slot.samples, slot.noise_is_matrix); });
  if (head->tap != nullptr) head->tap->replaced(head->tap);
  return KBT_OK;
}
