#include "bench_loop.hpp"

#include <cerrno>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kbt::bench {

std::uint64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u + static_cast<std::uint64_t>(t.tv_nsec);
}

// The fences keep the processor from reading the counter before the work in front of it is done.
std::uint64_t counter() {
#if defined(__x86_64__)
  _mm_lfence();
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks = 0;
  asm volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(ticks) : : "memory");
  return ticks;
#else
  return monotonic_ns();
#endif
}

bool has_counter() {
#if defined(__x86_64__) || defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

// The control word of the floating-point unit, and its bits that flush denormal numbers to zero.
namespace {
#if defined(__x86_64__)
using Word = unsigned int;
constexpr Word kFlush = 0x8040;  // FTZ and DAZ
Word control_word() {
  return _mm_getcsr();
}
void set_control_word(Word word) {
  _mm_setcsr(word);
}
#elif defined(__aarch64__) || (defined(__arm__) && defined(__ARM_FP))
#if defined(__aarch64__)
using Word = std::uint64_t;
#define KBT_READ_CONTROL_WORD "mrs %0, fpcr"
#define KBT_WRITE_CONTROL_WORD "msr fpcr, %0"
#else
using Word = std::uint32_t;
#define KBT_READ_CONTROL_WORD "vmrs %0, fpscr"
#define KBT_WRITE_CONTROL_WORD "vmsr fpscr, %0"
#endif
constexpr Word kFlush = Word{1} << 24;
Word control_word() {
  Word word = 0;
  asm volatile(KBT_READ_CONTROL_WORD : "=r"(word));
  return word;
}
void set_control_word(Word word) {
  asm volatile(KBT_WRITE_CONTROL_WORD : : "r"(word));
}
#else
using Word = unsigned int;
constexpr Word kFlush = 0;  // no such mode
Word control_word() {
  return 0;
}
void set_control_word(Word) {}
#endif
}  // namespace

bool set_flush_to_zero(bool on) {
  set_control_word(on ? control_word() | kFlush : control_word() & ~kFlush);
  return !on || kFlush != 0;
}

void Recorder::pace(std::uint64_t epoch_ns, std::uint64_t period_ns, std::uint64_t spin_ns) {
  next_release_ = epoch_ns;
  period_ = period_ns;
  spin_ = spin_ns;
}

void Recorder::wait() {
  const std::uint64_t wake = next_release_ - spin_;
  if (monotonic_ns() < wake) {  // otherwise the kernel would still suspend the loop before waking it at once
    timespec until{};
    until.tv_sec = static_cast<time_t>(wake / 1000000000u);
    until.tv_nsec = static_cast<long>(wake % 1000000000u);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
    }
  }
  while (spin_ != 0 && monotonic_ns() < next_release_) {
  }
  next_release_ += period_;
}

void Recorder::watch(std::uint64_t duration_ns, std::uint64_t shortest_ns) {
  std::uint64_t before = monotonic_ns();
  for (const std::uint64_t end = before + duration_ns; before < end;) {
    const std::uint64_t now = monotonic_ns();
    if (now - before >= shortest_ns) {
      keep(before);
      keep(now);
    }
    before = now;
  }
}

namespace {

const void *x_of(const Samples &s, std::size_t i) {
  return s.x + i % s.count * s.x_bytes;
}
const void *y_of(const Samples &s, std::size_t i) {
  return s.y + i % s.count * s.y_bytes;
}

int run_one(const Step &step, const void *x, const void *y) {
  if (step.trunk != nullptr) {
    if (const int status = step.trunk(step.self, x)) return status;
  }
  if (const int status = step.predict(step.self, x)) return status;
  return step.observe(step.self, y);
}

}  // namespace

int run_stages(const Step &step, const Samples &samples, std::size_t first, std::size_t steps, Repeats repeats,
               Recorder &recorder) {
  for (std::size_t i = first; i < first + steps; ++i) {
    const void *x = x_of(samples, i), *y = y_of(samples, i);
    int status = 0;
    recorder.mark();
    if (step.trunk != nullptr) {
      for (std::size_t k = 0; k < repeats.trunk; ++k) status |= step.trunk(step.self, x);
    }
    recorder.mark();
    for (std::size_t k = 0; k < repeats.head; ++k) status |= step.predict(step.self, x);
    recorder.mark();
    status |= step.observe(step.self, y);
    for (std::size_t k = 1; k < repeats.head; ++k) {
      status |= step.predict(step.self, x);
      status |= step.observe(step.self, y);
    }
    recorder.mark();
    if (status != 0) return status;
  }
  return 0;
}

int run_steps(const Step &step, const Samples &samples, std::size_t first, std::size_t batches, std::size_t batch,
              Recorder &recorder) {
  for (std::size_t i = first; i < first + batches * batch; i += batch) {
    int status = 0;
    recorder.mark();
    for (std::size_t k = i; k < i + batch; ++k) status |= run_one(step, x_of(samples, k), y_of(samples, k));
    recorder.mark();
    if (status != 0) return status;
  }
  return 0;
}

int run_paced(const Step &step, const Samples &samples, std::size_t first, std::size_t steps, Recorder &recorder) {
  for (std::size_t i = first; i < first + steps; ++i) {
    recorder.wait();
    recorder.mark();
    if (const int status = run_one(step, x_of(samples, i), y_of(samples, i))) return status;
    recorder.mark();
  }
  return 0;
}

}  // namespace kbt::bench
