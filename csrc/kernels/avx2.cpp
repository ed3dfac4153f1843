// avx2.cpp - the loops once more, for float32 on x86-64 with AVX2.
//
// Libraries are included for the baseline; only this project's loops, in a namespace of their own, are compiled inside
// the target region. So no inline function has two definitions that the linker could mix up. The bits are the same as
// the baseline's (tests/core/test_same_bits.py).
#define KBT_TARGET_AVX2
#include "views.hpp"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#include "table.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const kbt::Table<float> *kbt::avx2_table() {
  return __builtin_cpu_supports("avx2") ? &kbt::avx2::kTable<float> : nullptr;
}
