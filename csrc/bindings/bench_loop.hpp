// bench_loop.hpp - control loops that time themselves: `kbt-edge bench` without Python between two samples.
//
// A Recorder stores raw clock readings in preallocated memory; they are evaluated afterwards. The same loops drive a
// whole model (scaling, compiled trunk, head), a head alone, or an empty step, whose readings are the cost of the
// harness itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kbt::bench {

// Nanoseconds of CLOCK_MONOTONIC, on which a paced loop is released.
std::uint64_t monotonic_ns();
// The processor's counter, read in program order: cheaper, in ticks of a constant rate. monotonic_ns if the process
// cannot read one.
std::uint64_t counter();
bool has_counter();

// Flush denormal numbers to zero on this thread: faster, but other bits. False if the processor has no such mode.
bool set_flush_to_zero(bool on);

class Recorder {
 public:
  // Touches every page, so that the loop has no page faults.
  explicit Recorder(std::size_t capacity, bool use_counter) : stamps_(capacity, 1), use_counter_(use_counter) {}

  void mark() { keep(use_counter_ ? counter() : monotonic_ns()); }
  void clear() { used_ = 0; }
  std::size_t room() const { return stamps_.size() - used_; }
  const std::vector<std::uint64_t> &stamps() const { return stamps_; }
  std::size_t used() const { return used_; }

  // Release k of the loop is at epoch + k * period, whatever happened to the ones before.
  void pace(std::uint64_t epoch_ns, std::uint64_t period_ns, std::uint64_t spin_ns);
  // Sleep until spin_ns before the next release, and be busy until it comes. The interval before the reading that
  // follows is the delay of that release.
  void wait();
  // Read CLOCK_MONOTONIC in a tight loop for duration_ns. Each gap of at least shortest_ns between two readings, in
  // which this thread did not run, is kept as its two ends.
  void watch(std::uint64_t duration_ns, std::uint64_t shortest_ns);

 private:
  void keep(std::uint64_t stamp) {
    if (used_ < stamps_.size()) stamps_[used_++] = stamp;
  }

  std::vector<std::uint64_t> stamps_;
  std::size_t used_ = 0;
  bool use_counter_;
  std::uint64_t next_release_ = 0, period_ = 0, spin_ = 0;
};

// One step of a control loop, cut into its stages. A stage returns 0, or a status that ends the loop.
struct Step {
  void *self;
  int (*trunk)(void *self, const void *x);  // null for a head alone, whose sample x is h itself
  int (*predict)(void *self, const void *x);
  int (*observe)(void *self, const void *y);
};

// Samples for the loop, taken in turn, and started again from the first after the last.
struct Samples {
  const unsigned char *x, *y;
  std::size_t x_bytes, y_bytes, count;
};

// A stage that is too short for the clock runs several times between two readings.
struct Repeats {
  std::size_t trunk, head;
};

// Four readings a step: trunk, predict and observe lie between them. A prediction is learned once, so with head > 1 the
// last interval holds, for each observe but the first, a predict as well.
int run_stages(const Step &step, const Samples &samples, std::size_t first, std::size_t steps, Repeats repeats,
               Recorder &recorder);
// Two readings for each `batch` whole steps.
int run_steps(const Step &step, const Samples &samples, std::size_t first, std::size_t batches, std::size_t batch,
              Recorder &recorder);
// Two readings a step, when it started and when it was done, after waiting for its release.
int run_paced(const Step &step, const Samples &samples, std::size_t first, std::size_t steps, Recorder &recorder);

}  // namespace kbt::bench
