// arena.hpp - hands out aligned pieces of one block of memory. Without a base it only counts, so the plan that measures
// is the plan that lays out.
#pragma once

#include "kbt.h"
#include "views.hpp"

namespace kbt {

class Arena {
 public:
  explicit Arena(void *base) : base_(static_cast<unsigned char *>(base)) {}

  template <class T>
  T *take(Index count) {
    return static_cast<T *>(take_bytes(count, sizeof(T)));
  }
  bool overflow() const { return overflow_; }
  std::size_t used() const { return used_; }

 private:
  void *take_bytes(Index count, std::size_t size) {
    constexpr std::size_t kAlign = KBT_ARENA_ALIGN, kMax = std::numeric_limits<std::size_t>::max() / 2;
    if (count < 0 || static_cast<std::size_t>(count) > kMax / size) overflow_ = true;
    const std::size_t bytes = overflow_ ? 0 : (static_cast<std::size_t>(count) * size + kAlign - 1) / kAlign * kAlign;
    if (used_ > kMax - bytes) overflow_ = true;
    void *const piece = base_ != nullptr && !overflow_ ? base_ + used_ : nullptr;
    if (!overflow_) used_ += bytes;
    return piece;
  }

  unsigned char *base_;
  std::size_t used_ = 0;
  bool overflow_ = false;
};

}  // namespace kbt
