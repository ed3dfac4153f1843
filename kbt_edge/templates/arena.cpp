// @name@_arena.cpp - the memory in which the head learns, of exactly the size that kbt_init asks for.
//
// It begins with a record that holds pointers, so its size is this machine's affair. Behind it are arrays of numbers:
// @arena_array_bytes@ bytes on every machine. @name@_init compares the sum with kbt_arena_bytes.
#include "kbt/head.hpp"

constexpr std::size_t kRecord = (sizeof(kbt::Head<@real@>) + KBT_ARENA_ALIGN - 1) / KBT_ARENA_ALIGN * KBT_ARENA_ALIGN;

extern "C" {
extern const std::size_t @name@_arena_bytes;
alignas(KBT_ARENA_ALIGN) unsigned char @name@_arena[kRecord + @arena_array_bytes@];
const std::size_t @name@_arena_bytes = sizeof @name@_arena;
}
