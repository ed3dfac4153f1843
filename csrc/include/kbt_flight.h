/* kbt_flight.h - a flight recorder: the latest samples of a head, for replay bit for bit elsewhere. C99, no heap.
 *
 * Once started, every kbt_update, kbt_observe and kbt_set_noise is recorded, rejected calls included. Memory is fixed:
 * two halves, each with its starting state and room for half of the samples. When a half is full, the other one is
 * overwritten, so the log always holds the latest samples / 2 to samples. A new prior or a loaded state restarts the
 * recording.
 *
 * A log is little-endian, versioned, with a CRC-32: the same bytes on every machine. It holds the state to start from,
 * the records, and the hash of the state that they must lead to.
 *
 * A record costs a copy of its numbers; starting a half costs a copy of the posterior (docs/flight.md has figures).
 */
#ifndef KBT_FLIGHT_H
#define KBT_FLIGHT_H

#include "kbt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kbt_flight kbt_flight;

/* Bytes that a recorder of `samples` (2 or more) needs; 0 when the configuration is rejected. */
KBT_API size_t kbt_flight_bytes(const kbt_config *cfg, uint32_t samples);
/* Record this head from now on, in `memory` (aligned to KBT_ARENA_ALIGN), which must live until kbt_flight_stop or as
 * long as the head. It replaces an earlier recorder of the head. */
KBT_API kbt_status kbt_flight_init(kbt_head *head, void *memory, size_t bytes, uint32_t samples, kbt_flight **flight);
/* Stop recording. Write the log first: it is gone afterwards. */
KBT_API kbt_status kbt_flight_stop(kbt_head *head);

/* The log, in order and in small pieces. Call it from the thread that owns the head, between two samples. */
KBT_API size_t kbt_flight_log_size(const kbt_flight *flight);
KBT_API kbt_status kbt_flight_log(const kbt_flight *flight, kbt_sink *sink, void *context);

/* ---- replay ----------------------------------------------------------------------------------------------------- */

enum { KBT_FLIGHT_UPDATE = 0, KBT_FLIGHT_UPDATE_LABELS = 1, KBT_FLIGHT_OBSERVE = 2, KBT_FLIGHT_OBSERVE_LABELS = 3 };
enum { KBT_FLIGHT_SET_NOISE = 4 };

/* The header of a log. */
typedef struct kbt_flight_info {
  kbt_config cfg;                        /* of the head that was recorded */
  uint64_t records;                      /* in the log */
  uint64_t before;                       /* recorded before these, and overwritten */
  uint64_t checkpoint;                   /* the state after this many records is in the log; 0: it is not */
  uint64_t checkpoint_hash;              /* FNV-1a over the bytes of that state */
  uint64_t final_hash;                   /* FNV-1a over the bytes of the state after the last record */
  uint64_t base_offset, base_bytes;      /* the state to start from, as kbt_state_load takes it */
  uint64_t records_offset, record_bytes; /* each record: kind, given, rows, noise_count, status, 0 (int32 each), samples
                                          * (uint64), nis (double), then room for h, targets and noise */
  uint64_t replay_bytes;                 /* memory that kbt_flight_replay needs */
} kbt_flight_info;

/* Checks every byte of the log. Takes time in proportion to its size, and no memory. */
KBT_API kbt_status kbt_flight_check(const void *log, size_t size, kbt_flight_info *info);

/* One record, and its result in the replay. */
typedef struct kbt_flight_step {
  uint64_t index;
  int32_t kind, rows;
  kbt_status recorded, status;
  uint64_t recorded_samples, samples;
  double recorded_nis, nis;
  int32_t same; /* 1: status, samples and every bit of nis are as recorded, and the state at a checkpoint */
} kbt_flight_step;
typedef void kbt_flight_visit(void *context, const kbt_flight_step *step);

typedef struct kbt_flight_outcome {
  uint64_t first_difference; /* index of the first record that was not the same; records: none */
  uint64_t final_hash;       /* of the state that was reached */
  int32_t reproduced;        /* 1: every record was the same, and so is the final state, bit for bit */
} kbt_flight_outcome;

/* Load the log's state into `head`, which has the log's configuration, and replay all records. `memory` is aligned to
 * KBT_ARENA_ALIGN. `visit` may be NULL. The head ends in the state that was reached. */
KBT_API kbt_status kbt_flight_replay(const void *log, size_t size, kbt_head *head, void *memory, size_t bytes,
                                     kbt_flight_visit *visit, void *context, kbt_flight_outcome *outcome);

#ifdef __cplusplus
}
#endif

#endif /* KBT_FLIGHT_H */
