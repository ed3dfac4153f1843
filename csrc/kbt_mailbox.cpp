// kbt_mailbox.cpp - copies of a posterior between one writer and one reader. kbt_mailbox.h says why that is safe.
#include "kbt_mailbox.h"

#include <atomic>
#include <utility>

#include "engine.hpp"
#include "state.hpp"

namespace {

// What belongs to a copy of the learned numbers.
struct Slot {
  std::uint64_t samples;
  bool noise_is_matrix;
};
constexpr std::uint32_t kFresh = 4;  // beside the number of a slot: posted and not yet taken
constexpr std::uint32_t kSlots = 4;
constexpr std::uint32_t kParts = 16;  // in which kbt_follow asks for a copy: one arrives while the head predicts

}  // namespace

// What never changes, what the learner writes, what changes hands and each side's own stand apart, so that neither side
// slows the other down. Behind it lie the copies.
struct kbt_mailbox {
  kbt_config cfg;
  std::size_t bytes;  // of a copy, a multiple of KBT_ARENA_ALIGN
  alignas(KBT_ARENA_ALIGN) Slot slots[kSlots];
  alignas(KBT_ARENA_ALIGN) std::atomic<std::uint32_t> middle;
  alignas(KBT_ARENA_ALIGN) std::uint32_t writers;
  alignas(KBT_ARENA_ALIGN) std::uint32_t readers;
  std::uint32_t next;   // the reader's too: what it takes next, if it is
  bool coming;          // and else a copy without use
  std::uint32_t asked;  // parts of what is coming

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
    box.slots[slot] = {self.samples, self.noise_is_matrix()};
  });
}

bool posted(const kbt_mailbox &box) {
  return (box.middle.load(std::memory_order_relaxed) & kFresh) != 0;
}

// What was posted is the reader's from now on, in exchange for a copy that it has no use for.
void fetch(kbt_mailbox &box) {
  box.next = box.middle.exchange(box.next, std::memory_order_acq_rel) & ~kFresh;
  box.coming = true;
  box.asked = 0;
}

void take_next(kbt_head *head, kbt_mailbox &box) {
  std::swap(box.readers, box.next);
  box.coming = false;
  const Slot &slot = box.slots[box.readers];
  kbt::as_head(head, [&](auto &self) { self.take_over(box.numbers(box.readers), slot.samples, slot.noise_is_matrix); });
  if (head->tap != nullptr) head->tap->replaced(head->tap);
}

// Towards the second cache of this core: the first one holds what the reader predicts with meanwhile. Inlined, because
// a compiler may leave out the call of a function that, but for prefetching, does nothing.
KBT_INLINE void ask_for_next(kbt_mailbox &box) {
  const std::size_t bytes = box.bytes / kParts;
  const auto *numbers = static_cast<const unsigned char *>(box.numbers(box.next)) + box.asked++ * bytes;
  for (std::size_t i = 0; i < bytes; i += KBT_ARENA_ALIGN) __builtin_prefetch(numbers + i, 0, 2);
  __builtin_prefetch(box.slots + box.next, 0, 2);
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
  box->next = 3;
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
  if (posted(*mailbox)) fetch(*mailbox);
  if (mailbox->coming) take_next(head, *mailbox);
  return KBT_OK;
}

kbt_status kbt_follow(kbt_head *head, kbt_mailbox *mailbox) {
  if (const kbt_status status = check(head, mailbox); status != KBT_OK) return status;
  if (!mailbox->coming && posted(*mailbox)) fetch(*mailbox);
  if (!mailbox->coming) return KBT_OK;
  if (mailbox->asked < kParts) {
    ask_for_next(*mailbox);
  } else {
    take_next(head, *mailbox);
  }
  return KBT_OK;
}
