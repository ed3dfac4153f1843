// fuzz.hpp - turns the bytes of a fuzzer into the numbers that a machine in trouble hands to a filter; and what must
// hold whatever they are.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#define REQUIRE(fact)                                                         \
  do {                                                                        \
    if (!(fact)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: " #fact "\n", __FILE__, __LINE__); \
      std::abort();                                                           \
    }                                                                         \
  } while (0)

namespace fuzz {

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

  // Mostly a reasonable number; otherwise one of those that break filters, or any bits at all.
  template <class T>
  T number() {
    using Limits = std::numeric_limits<T>;
    const int kind = byte();
    if (kind < 200) return static_cast<T>(raw<std::int16_t>()) / T(4096);
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
                         T(0),
                         -T(0)};
    return special[below(10)];
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

}  // namespace fuzz
