// record.hpp - what the C ABI knows of a head without its number type, and one call's sample.
#pragma once

#include "evidence.hpp"
#include "kbt.h"
#include "watch.hpp"

struct kbt_sample;

struct kbt_changes {  // the latest, in a ring; a diagnostic, not part of the saved state
  std::uint64_t count;
  kbt_change latest[KBT_MOST_CHANGES];
};

// Called after every change of a head: the flight recorder (abi/recorder.cpp).
struct kbt_tap {
  void (*learned)(kbt_tap *self, const kbt_sample &sample, std::int32_t rows, kbt_status status, double nis);
  void (*set_noise)(kbt_tap *self, const void *noise, std::int32_t count);
  void (*replaced)(kbt_tap *self);  // the whole state: a prior, means, or a blob
};

struct kbt_head {
  kbt_config cfg;
  kbt_counters counters;
  std::uint64_t samples;
  std::int32_t predicted_rows;  // rows whose forward pass is in the scratch, waiting to be observed
  kbt_watch watch;
  kbt_changes changes;
  kbt_tap *tap;  // null: no recorder
};

// One sample as a caller of the C ABI gives it.
struct kbt_sample {
  bool predicted;  // learn at the rows of the latest prediction, not at h
  const void *h;   // rows x d
  std::int32_t rows;
  const void *y;               // rows x d_o, or null with
  const std::int32_t *labels;  // one per row
  const void *noise;           // noise_count numbers, or null for the head's own
  std::int32_t noise_count;
};

namespace kbt {

inline void note_change(kbt_changes &changes, const MemberEvent &event, std::uint64_t samples) {
  const std::uint64_t age = static_cast<std::uint64_t>(event.age);
  changes.latest[changes.count++ % KBT_MOST_CHANGES] = {samples > age ? samples - age : 0, samples, event.evidence,
                                                        event.kind, 0};
}

}  // namespace kbt
