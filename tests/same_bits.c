/* same_bits.c - long streams into heads of every kind, and one hash for each of them and for all together.
 *
 * Built with different compilers, options and for different machines, it must print the same lines. Inputs come from an
 * integer generator and are exact in float32. The hash covers every innovation, every prediction and the final state.
 * The plant of a watchful head changes after a third of the samples and goes back after two; both must be noticed.
 * Plain C99; memory is static. -DKBT_UPDATES=n sets the length of the longest stream, the others take a fixed share.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kbt.h"

#ifndef KBT_UPDATES
#define KBT_UPDATES 100000
#endif

enum { MAX_INPUTS = 16, MAX_OUTPUTS = 3, MAX_ROWS = 3, MAX_TARGETS = MAX_ROWS * MAX_OUTPUTS };

static unsigned char memory[384 * 1024];
static unsigned char blob[64 * 1024];

/* ---- the stream ------------------------------------------------------------------------------------------------ */

static uint32_t lcg;

static int32_t draw(void) { /* 16 bits with sign */
  lcg = lcg * 1664525U + 1013904223U;
  return (int32_t)(lcg >> 16) - 32768;
}

/* to[i] = k / 2^15: exact in both types as long as |k| < 2^24. */
static void put(int32_t dtype, void *to, int i, int32_t k) {
  if (dtype == KBT_FLOAT32) {
    ((float *)to)[i] = (float)k * (1.0F / 32768.0F);
  } else {
    ((double *)to)[i] = (double)k * (1.0 / 32768.0);
  }
}

/* ---- the hash: FNV-1a over bytes, numbers as little-endian bit patterns ------------------------------------------ */

static uint64_t add_byte(uint64_t hash, unsigned byte) {
  return (hash ^ byte) * 1099511628211ULL;
}

static uint64_t add_bits(uint64_t hash, uint64_t bits, int bytes) {
  int i;
  for (i = 0; i < bytes; ++i) hash = add_byte(hash, (unsigned)(bits >> (8 * i) & 0xFFU));
  return hash;
}

static uint64_t add_double(uint64_t hash, double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return add_bits(hash, bits, 8);
}

static uint64_t add_numbers(uint64_t hash, int32_t dtype, const void *x, int count) {
  uint32_t bits;
  int i;
  for (i = 0; i < count; ++i) {
    if (dtype == KBT_FLOAT64) {
      hash = add_double(hash, ((const double *)x)[i]);
    } else {
      memcpy(&bits, (const float *)x + i, sizeof bits);
      hash = add_bits(hash, bits, 4);
    }
  }
  return hash;
}

/* ---- one head --------------------------------------------------------------------------------------------------- */

static const char *failed_at;

/* Learns `updates` samples of the head `cfg` describes. Returns the hash, or 0 with failed_at set. */
static uint64_t run(const kbt_config *cfg, long updates) {
  const int d = cfg->widths[0], outputs = cfg->widths[cfg->layers];
  unsigned char *arena = memory + (KBT_ARENA_ALIGN - (uintptr_t)memory % KBT_ARENA_ALIGN) % KBT_ARENA_ALIGN;
  const int watchful = cfg->drift < 0.0;
  kbt_change changes[KBT_MOST_CHANGES];
  int32_t noticed;
  const size_t room = sizeof memory - (size_t)(arena - memory);
  double h[MAX_ROWS * MAX_INPUTS], y[MAX_TARGETS], mean[MAX_TARGETS], cov[MAX_TARGETS * MAX_TARGETS];
  double total_var[MAX_TARGETS]; /* of the head's dtype: double is the larger one */
  int32_t labels[MAX_ROWS];
  uint64_t hash = 14695981039346656037ULL;
  kbt_result result;
  kbt_head *head;
  size_t size, k;
  long update;
  int a, i;

  failed_at = "kbt_init";
  if (kbt_init(cfg, arena, room, &head) != KBT_OK) return 0;
  lcg = 12345;
  for (i = 0; i < outputs * d; ++i) put(cfg->dtype, h, i, draw());
  for (i = 0; i < outputs; ++i) put(cfg->dtype, y, i, draw());
  failed_at = "kbt_set_prior";
  if (kbt_set_prior(head, h, y, 1) != KBT_OK) return 0;

  for (update = 0; update < updates; ++update) {
    const int rows = 1 + (int)(update % cfg->max_rows);
    kbt_status status;
    for (a = 0; a < rows; ++a) {
      int32_t sum[MAX_OUTPUTS] = {0, 0, 0};
      for (i = 0; i < d; ++i) {
        const int32_t x = draw();
        put(cfg->dtype, h, a * d + i, x);
        sum[i % outputs] += (i % 3 - 1) * x; /* linear in h; unless watchful, negative sums are halved */
      }
      labels[a] = 0;
      for (i = 0; i < outputs; ++i) {
        const int32_t target = (sum[i] < 0 && !watchful ? sum[i] / 2 : sum[i]) + draw() / 16;
        const int changed = watchful && update >= updates / 3 && update < 2 * (updates / 3);
        put(cfg->dtype, y, a * outputs + i, changed ? -target : target);
        if (sum[i] > sum[labels[a]]) labels[a] = i;
      }
    }
    if (update % 16 == 0) { /* predict and observe, and update, in turns */
      failed_at = "kbt_predict";
      if (kbt_predict(head, h, rows, mean, cov, total_var) != KBT_OK) return 0;
      hash = add_numbers(hash, cfg->dtype, mean, rows * outputs);
      hash = add_numbers(hash, cfg->dtype, cov, rows * outputs * rows * outputs);
      hash = add_numbers(hash, cfg->dtype, total_var, rows * outputs);
      failed_at = "kbt_observe";
      status = cfg->output == KBT_SOFTMAX ? kbt_observe_labels(head, labels, NULL, 0, &result)
                                          : kbt_observe(head, y, NULL, 0, &result);
    } else {
      failed_at = "kbt_update";
      status = cfg->output == KBT_SOFTMAX ? kbt_update_labels(head, h, rows, labels, NULL, 0, &result)
                                          : kbt_update(head, h, rows, y, NULL, 0, &result);
    }
    if (status != KBT_OK) return 0;
    hash = add_double(add_double(hash, result.nis), result.log_likelihood);
    if (watchful) hash = add_byte(hash, (unsigned)result.changed);
  }
  failed_at = "noticing that the plant changed and went back";
  if (kbt_get_changes(head, changes, KBT_MOST_CHANGES, &noticed) != KBT_OK) return 0;
  if (watchful && (noticed != 2 || changes[0].kind != KBT_CHANGED || changes[1].kind != KBT_RETURNED)) return 0;

  failed_at = "kbt_state_save";
  size = kbt_state_size(head);
  if (size > sizeof blob || kbt_state_save(head, blob, size) != KBT_OK) return 0;
  for (k = 0; k < size; ++k) hash = add_byte(hash, blob[k]);
  return hash;
}

/* ---- all heads -------------------------------------------------------------------------------------------------- */

/* Widths end at the first 0. */
static kbt_config with_widths(int32_t a, int32_t b, int32_t c, int32_t e) {
  const int32_t widths[] = {a, b, c, e};
  kbt_config cfg;
  int i;
  kbt_config_single(&cfg, a, b);
  for (i = 2; i < 4 && widths[i] != 0; ++i) {
    cfg.widths[i] = widths[i];
    cfg.layers = i;
    cfg.prior_var[i - 2] = 1e-3;
  }
  return cfg;
}

static uint64_t all = 14695981039346656037ULL;
static int failures = 0;

static void report(const char *name, kbt_config cfg, long updates) {
  const uint64_t hash = run(&cfg, updates);
  if (hash == 0) {
    printf("%s: %s failed\n", name, failed_at);
    ++failures;
    return;
  }
  printf("%s %ld %08lx%08lx\n", name, updates, (unsigned long)(hash >> 32), (unsigned long)(hash & 0xFFFFFFFFUL));
  all = add_bits(all, hash, 8);
}

int main(void) {
  const long n = KBT_UPDATES;
  kbt_config cfg;

  report("neuron", with_widths(16, 32, 1, 0), n);

  cfg = with_widths(16, 32, 1, 0);
  cfg.covariance = KBT_DIAGONAL;
  report("diagonal", cfg, n / 10);

  cfg = with_widths(4, 9, 2, 0);
  cfg.covariance = KBT_FULL;
  report("full", cfg, n / 50);

  cfg = with_widths(3, 7, 6, 2);
  cfg.covariance = KBT_FULL;
  cfg.relu_order = 5;
  cfg.input_var = 1e-2;
  cfg.max_rows = 2;
  report("full-deep", cfg, n / 200);

  cfg = with_widths(4, 11, 3, 0);
  cfg.output = KBT_SOFTMAX;
  cfg.noise = KBT_NOISE_MULTINOMIAL;
  cfg.softmax_order = 2;
  cfg.max_rows = 3;
  report("multinomial", cfg, n / 50);

  cfg = with_widths(4, 8, 3, 0);
  cfg.output = KBT_SOFTMAX;
  cfg.covariance = KBT_DIAGONAL;
  report("softmax", cfg, n / 50);

  cfg = with_widths(5, 10, 2, 0);
  cfg.rule = KBT_REPLACE;
  cfg.noise_var = 0.5;
  cfg.max_rows = 2;
  report("replace", cfg, n / 50);

  cfg = with_widths(16, 2, 0, 0);
  cfg.noise = KBT_NOISE_ADAPTIVE;
  cfg.forgetting = 0.99;
  report("adaptive", cfg, n / 10);

  cfg = with_widths(4, 11, 3, 0);
  cfg.output = KBT_SOFTMAX;
  cfg.noise = KBT_NOISE_MULTINOMIAL;
  cfg.softmax_order = 0;
  cfg.max_rows = 2;
  report("moment", cfg, n / 50);

  cfg = with_widths(7, 3, 0, 0);
  cfg.noise = KBT_NOISE_ADAPTIVE;
  cfg.max_rows = 3;
  report("shared", cfg, n / 10);

  cfg = with_widths(7, 3, 0, 0);
  cfg.output = KBT_SOFTMAX;
  cfg.noise = KBT_NOISE_MULTINOMIAL;
  cfg.softmax_order = 0;
  cfg.covariance = KBT_SHARED;
  cfg.max_rows = 2;
  report("shared-classes", cfg, n / 10);

  cfg = with_widths(1, 2, 3, 0);
  cfg.noise = KBT_NOISE_ADAPTIVE;
  report("behind-few", cfg, n / 50);

  kbt_config_default(&cfg, 16, 1);
  report("watchful", cfg, n);

  kbt_config_default(&cfg, 5, 3);
  cfg.noise = KBT_NOISE_FULL;
  cfg.max_rows = 3;
  report("watchful-full", cfg, n);

#ifndef KBT_NO_FLOAT64
  kbt_config_default(&cfg, 4, 2);
  cfg.dtype = KBT_FLOAT64;
  cfg.noise = KBT_NOISE_CONSTANT;
  cfg.max_rows = 2;
  report("watchful-float64", cfg, n);

  cfg = with_widths(16, 32, 1, 0);
  cfg.dtype = KBT_FLOAT64;
  report("float64", cfg, n / 10);
#endif

  printf("all %08lx%08lx\n", (unsigned long)(all >> 32), (unsigned long)(all & 0xFFFFFFFFUL));
  return failures != 0;
}
