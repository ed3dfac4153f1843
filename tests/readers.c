/* One thread learns, others predict: torn predictions are counted, and how long a reader's call takes.
 *
 * A first run, alone, notes what a head predicts at one input after every update: the bits of mean and variance. Then a
 * thread learns the same stream and posts after every update, while the others take and predict as fast as they can.
 * Every prediction must have the bits noted for the number of updates that its head claims to know. The readers run by
 * themselves and beside the learner in turns, so that both meet the same moods of the machine.
 *
 * Usage: readers CALLS [PERIOD_US]. CALLS is what each thread does. With a period other than 0 the learner waits that
 * long between updates, as a control loop would. Prints one line of JSON, times as [p50, p99] of taking and predicting,
 * those of the first prediction from each new posterior apart as well; returns 0 only if nothing was torn.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kbt_mailbox.h"

enum { INPUTS = 16, HIDDEN = 32, READERS = 2, ROUNDS = 20, BUCKETS = 4096 };

static long calls, period_us;
static uint64_t *noted; /* by the number of updates */
static atomic_long torn;
static atomic_int learning; /* 1: may, 2: does */

static void *owned[2 + 2 * READERS]; /* freed at the end */
static int owned_count;

static void *aligned(size_t bytes) {
  void **memory = &owned[owned_count++];
  if (posix_memalign(memory, KBT_ARENA_ALIGN, bytes) != 0) abort();
  return *memory;
}

static kbt_head *new_head(void) {
  kbt_config cfg;
  kbt_head *head;
  float weight[INPUTS];
  int i;
  kbt_config_single(&cfg, INPUTS, 1);
  cfg.layers = 2;
  cfg.widths[1] = HIDDEN;
  cfg.widths[2] = 1;
  cfg.prior_var[0] = 1e-3;
  if (kbt_init(&cfg, aligned(kbt_arena_bytes(&cfg)), kbt_arena_bytes(&cfg), &head) != KBT_OK) abort();
  for (i = 0; i < INPUTS; ++i) weight[i] = 0.1F;
  if (kbt_set_prior(head, weight, NULL, 1) != KBT_OK) abort();
  return head;
}

static void learn(kbt_head *head, uint32_t *lcg) {
  float h[INPUTS], y = 0.0F;
  int i;
  for (i = 0; i < INPUTS; ++i) {
    *lcg = *lcg * 1664525U + 1013904223U;
    h[i] = (float)((int)(*lcg >> 16) - 32768) * (1.0F / 32768.0F);
    y += h[i] * (float)(i + 1) * 0.1F;
  }
  if (kbt_update(head, h, 1, &y, NULL, 0, NULL) != KBT_OK) abort();
}

static uint64_t predicted(kbt_head *head) {
  float h[INPUTS], mean, var;
  uint32_t bits[2];
  int i;
  for (i = 0; i < INPUTS; ++i) h[i] = 0.5F;
  if (kbt_predict(head, h, 1, &mean, &var, NULL) != KBT_OK) abort();
  memcpy(bits, &mean, 4);
  memcpy(bits + 1, &var, 4);
  return (uint64_t)bits[0] << 32 | bits[1];
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

typedef long Lengths[BUCKETS]; /* calls by their length, 10 ns each; the last one for everything longer */

typedef struct Reader {
  pthread_t thread;
  kbt_head *head;
  kbt_mailbox *mailbox;
  Lengths again, first; /* first from a posterior, or not */
} Reader;

static void *read_on(void *argument) {
  Reader *reader = argument;
  uint64_t last = kbt_samples(reader->head);
  long i;
  for (i = 0; i < calls / ROUNDS; ++i) {
    const int64_t start = now_ns();
    uint64_t bits;
    int64_t took;
    if (kbt_take(reader->head, reader->mailbox) != KBT_OK) abort();
    bits = predicted(reader->head);
    took = (now_ns() - start) / 10;
    ++(kbt_samples(reader->head) != last ? reader->first : reader->again)[took < BUCKETS ? took : BUCKETS - 1];
    if (bits != noted[kbt_samples(reader->head)]) ++torn;
    last = kbt_samples(reader->head);
  }
  return NULL;
}

static Reader readers[READERS];

static void *learn_on(void *argument) {
  static uint32_t lcg = 1;
  kbt_head *head = argument;
  int k;
  int64_t release = now_ns();
  learning = 2;
  while (learning != 0 && kbt_samples(head) < (uint64_t)calls) {
    learn(head, &lcg);
    for (k = 0; k < READERS; ++k) {
      if (kbt_post(head, readers[k].mailbox) != KBT_OK) abort();
    }
    if (period_us > 0) {
      struct timespec until;
      release += period_us * 1000;
      until.tv_sec = release / 1000000000;
      until.tv_nsec = release % 1000000000;
      clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
  }
  return NULL;
}

/* One round of all readers. What they counted is added to `all`, and to `first`. */
static void run_readers(Lengths all, Lengths first) {
  int i, k;
  for (k = 0; k < READERS; ++k) {
    memset(readers[k].again, 0, sizeof(Lengths));
    memset(readers[k].first, 0, sizeof(Lengths));
    if (pthread_create(&readers[k].thread, NULL, read_on, &readers[k]) != 0) abort();
  }
  for (k = 0; k < READERS; ++k) pthread_join(readers[k].thread, NULL);
  for (k = 0; k < READERS; ++k) {
    for (i = 0; i < BUCKETS; ++i) {
      all[i] += readers[k].again[i] + readers[k].first[i];
      first[i] += readers[k].first[i];
    }
  }
}

static long total(const Lengths lengths) {
  long sum = 0;
  int i;
  for (i = 0; i < BUCKETS; ++i) sum += lengths[i];
  return sum;
}

static double percentile_us(const Lengths lengths, double fraction) {
  const double wanted = fraction * (double)total(lengths);
  double so_far = 0.0;
  int i;
  for (i = 0; i < BUCKETS - 1; ++i) {
    so_far += (double)lengths[i];
    if (so_far >= wanted) break;
  }
  return (i + 1) * 0.01;
}

static void print_us(const char *name, const Lengths lengths) {
  printf(", \"%s_us\": [%.2f, %.2f]", name, percentile_us(lengths, 0.5), percentile_us(lengths, 0.99));
}

int main(int argc, char **argv) {
  static Lengths alone, writing, first, unused;
  kbt_head *head = new_head();
  pthread_t learner;
  uint32_t lcg = 1;
  long i;
  int k;
  calls = argc > 1 ? atol(argv[1]) : 0;
  period_us = argc > 2 ? atol(argv[2]) : 0;
  if (calls < ROUNDS) return 2;
  noted = malloc((size_t)(calls + 1) * sizeof *noted);
  if (noted == NULL) return 2;
  for (i = 0; i <= calls; ++i) {
    noted[i] = predicted(head);
    learn(head, &lcg);
  }
  head = new_head();
  for (k = 0; k < READERS; ++k) {
    readers[k].head = new_head();
    if (kbt_mailbox_init(head, aligned(kbt_mailbox_bytes(head)), kbt_mailbox_bytes(head), &readers[k].mailbox) !=
        KBT_OK)
      abort();
  }
  for (i = 0; i < ROUNDS; ++i) {
    run_readers(alone, unused);
    learning = 1;
    if (pthread_create(&learner, NULL, learn_on, head) != 0) abort();
    while (learning == 1) sched_yield();
    run_readers(writing, first);
    learning = 0;
    pthread_join(learner, NULL);
  }
  printf("{\"reads\": %ld, \"updates\": %llu, \"versions_seen\": %ld, \"torn\": %ld", total(writing),
         (unsigned long long)kbt_samples(head), total(first), (long)torn);
  print_us("alone", alone);
  print_us("writing", writing);
  print_us("first", first);
  printf("}\n");
  while (owned_count > 0) free(owned[--owned_count]);
  free(noted);
  return torn != 0;
}
