// mailbox.cpp - copies of a posterior between one writer and one reader. kbt_mailbox.h says why that is safe.
#include <atomic>

#include "as_head.hpp"
#include "kbt_mailbox.h"
#include "state.hpp"

namespace {

// Stored with each copy of the learned numbers.
struct Slot {
  std::uint64_t samples;
  bool noise_is_matrix;
};
constexpr std::uint32_t kFresh = 4;  // flag next to a slot number: posted and not yet taken
constexpr std::uint32_t kSlots = 3;

}  // namespace

// Constants, the learner's data, the shared index and each side's own index have their own cache lines, so that
// neither side slows the other down. The copies follow the struct.
struct kbt_mailbox {
  kbt_config cfg;
  std::size_t bytes;  // of a copy, a multiple of KBT_ARENA_ALIGN
  alignas(KBT_ARENA_ALIGN) Slot slots[kSlots];
  alignas(KBT_ARENA_ALIGN) std::atomic<std::uint32_t> middle;
  alignas(KBT_ARENA_ALIGN) std::uint32_t writers;
  alignas(KBT_ARENA_ALIGN) std::uint32_t readers;

  void *numbers(std::uint32_t slot) { return reinterpret_cast<unsigned char *>(this + 1) + slot * bytes; }
};
static_assert(sizeof(kbt_mailbox) % KBT_ARENA_ALIGN == 0, "the copies behind it are aligned as well");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "an exchange must not take a lock");

namespace {

std::size_t copy_bytes(const kbt_head *head) {
  return kbt::as_head(head, [](const auto &self) { return self.learned_bytes(); });
}

kbt_status check(const kbt_head *head, const kbt_mailbox *mailbox) {
  if (head == nullptr || mailbox == nullptr) return KBT_E_NULL;
  return kbt::same_config(head->cfg, mailbox->cfg) ? KBT_OK : KBT_E_CONFIG;
}

void fill(kbt_mailbox &box, std::uint32_t slot, const kbt_head *head) {
  kbt::as_head(head, [&](const auto &self) {
    std::memcpy(box.numbers(slot), self.learned(), box.bytes);
    box.slots[slot] = {self.samples, self.noise().matrix};
  });
}

}  // namespace

size_t kbt_mailbox_bytes(const kbt_head *head) {
  return head == nullptr ? 0 : sizeof(kbt_mailbox) + kSlots * copy_bytes(head);
}

kbt_status kbt_mailbox_init(const kbt_head *head, void *memory, size_t bytes, kbt_mailbox **mailbox) {
  if (head == nullptr || memory == nullptr || mailbox == nullptr) return KBT_E_NULL;
  *mailbox = nullptr;
  if (bytes < kbt_mailbox_bytes(head)) return KBT_E_SIZE;
  if (reinterpret_cast<std::uintptr_t>(memory) % KBT_ARENA_ALIGN != 0) return KBT_E_ALIGN;
  auto *box = new (memory) kbt_mailbox{};
  box->cfg = head->cfg;
  box->bytes = copy_bytes(head);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) fill(*box, slot, head);
  box->writers = 0;
  box->middle.store(1 | kFresh, std::memory_order_release);
  box->readers = 2;
  *mailbox = box;
  return KBT_OK;
}

kbt_status kbt_post(const kbt_head *head, kbt_mailbox *mailbox) {
  if (const kbt_status status = check(head, mailbox); status != KBT_OK) return status;
  fill(*mailbox, mailbox->writers, head);
  mailbox->writers = mailbox->middle.exchange(mailbox->writers | kFresh, std::memory_order_acq_rel) & ~kFresh;
  return KBT_OK;
}

kbt_status kbt_take(kbt_head *head, kbt_mailbox *mailbox) {
  if (const kbt_status status = check(head, mailbox); status != KBT_OK) return status;
  if ((mailbox->middle.load(std::memory_order_relaxed) & kFresh) == 0) return KBT_OK;
  mailbox->readers = mailbox->middle.exchange(mailbox->readers, std::memory_order_acq_rel) & ~kFresh;
  const Slot &slot = mailbox->slots[mailbox->readers];
  kbt::as_head(head, [&](auto &self) {
    self.take_over(mailbox->numbers(mailbox->readers), slot.samples, slot.noise_is_matrix);
  });
  if (head->tap != nullptr) head->tap->replaced(head->tap);
  return KBT_OK;
}
