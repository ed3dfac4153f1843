// fuzz.hpp - turns the bytes of a fuzzer into the numbers that a machine in trouble hands to a filter; and what must
// hold whatever they are.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "kbt.h"

#define REQUIRE(fact)                                                         \
  do {                                                                        \
    if (!(fact)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: " #fact "\n", __FILE__, __LINE__); \
      std::abort();                                                           \
    }                                                                         \
  } while (0)

namespace fuzz {

struct Free {
  void operator()(void *memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

// Memory for a head, of exactly this size: the address sanitizer sees the first byte beyond.
inline Memory memory_of(std::size_t bytes) {
  void *memory = nullptr;
  REQUIRE(posix_memalign(&memory, KBT_ARENA_ALIGN, bytes) == 0);
  return Memory(memory);
}

class Bytes {
 public:
  Bytes(const std::uint8_t *data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const { return used_ >= size_; }
  std::uint8_t byte() { return used_ < size_ ? data_[used_++] : 0; }
  template <class U>
  U raw() {
    unsigned char bytes[sizeof(U)];
    for (unsigned char &b : bytes) b = byte();
    U value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  int below(int limit) { return byte() % limit; }
  bool rarely() { return byte() > 250; }  // bytes that are missing say no

  // Within +-8.
  template <class T>
  T sane() {
    return static_cast<T>(raw<std::int16_t>()) / T(4096);
  }

  // Mostly a reasonable number; otherwise one of those that break filters, or any bits at all.
  template <class T>
  T number() {
    using Limits = std::numeric_limits<T>;
    const int kind = byte();
    if (kind < 200) return sane<T>();
    if (kind < 210) return static_cast<T>(raw<std::int16_t>()) * Limits::denorm_min();
    if (kind < 220) return static_cast<T>(raw<std::int16_t>()) * T(1e10);
    if (kind < 230) {
      T any;
      const auto bits = raw<std::uint64_t>();
      std::memcpy(&any, &bits, sizeof any);
      return any;
    }
    const T special[] = {Limits::quiet_NaN(),
                         Limits::infinity(),
                         -Limits::infinity(),
                         Limits::max(),
                         Limits::lowest(),
                         Limits::min(),
                         T(3e38),
                         T(-3e38),
                         T(1e19),
                         std::sqrt(Limits::max()),  // its square is in range, and nothing more
                         T(0),
                         -T(0)};
    return special[below(12)];
  }

  // Positive and of some size between 1e-12 and 1e6, or whatever number() has.
  double scale() {
    if (rarely()) return number<double>();
    double x = 1e-12;
    for (int i = below(19); i > 0; --i) x *= 10.0;
    return x;
  }

 private:
  const std::uint8_t *data_;
  std::size_t size_, used_ = 0;
};

// ---- files with a header of 24 bytes: magic, version, length, CRC-32 of the rest, 0 ---------------------------------

constexpr std::size_t kHeader = 24;
constexpr std::uint32_t kState = 0x5354424BU, kFlight = 0x4654424BU;  // "KBTS", "KBTF"

inline std::uint32_t crc32(const std::uint8_t *bytes, std::size_t count) {  // bit by bit: not the core's own
  std::uint32_t crc = 0xFFFFFFFFU;
  for (std::size_t i = 0; i < count; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320U & (0U - (crc & 1U)));
  }
  return ~crc;
}

inline void little_endian(std::uint8_t *to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

// Makes the header right for whatever stands behind it. States keep their version, if there is one like it.
inline void repair(std::uint8_t *data, std::size_t size, std::uint32_t magic) {
  if (size < kHeader) return;
  const std::uint64_t version = magic == kState && data[4] >= 1 && data[4] <= 3 ? data[4] : 2;
  little_endian(data, magic, 4);
  little_endian(data + 4, version, 4);
  little_endian(data + 8, size, 8);
  little_endian(data + 16, crc32(data + kHeader, size - kHeader), 4);
  little_endian(data + 20, 0, 4);
}

}  // namespace fuzz
