// loops.hpp - the table of loops that a head uses.
#pragma once

#include "table.hpp"

namespace kbt {

#ifdef KBT_AVX2  // chosen when the head is made
template <class T>
class Loops {
 public:
  void choose() {
    table_ = &kTable<T>;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (avx2_table() != nullptr) table_ = avx2_table();
    }
  }
  const Table<T> *operator->() const { return table_; }

 private:
  const Table<T> *table_;
};
#else  // one instruction set: calls through the table are direct
template <class T>
struct Loops {
  void choose() {}
  constexpr const Table<T> *operator->() const { return &kTable<T>; }
};
#endif

}  // namespace kbt
