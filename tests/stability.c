/* One long stream into two heads that differ in nothing but their precision.
 *
 *   stability <scenario> <covariance> <layers> <outputs> <updates> <file>
 *
 * Writes the final states to <file>.float32 and <file>.float64. Fails at the first update that is rejected or gives a
 * non-finite result, and when it finds a non-finite mean or a negative or non-finite factor (looked for every 1000
 * updates). Prints the average NIS of the float32 head. The target is linear in h, with noise of the variance R that
 * the head is told. Scenarios: plain       nothing else; R = 1e-2 drift       the truth walks; R = 1e-2, forgetting
 * 0.99 correlated  inputs that are one signal with small differences, after a ReLU; R = 1e-6 steady      always the
 * same input; R = 1e-2, forgetting 0.999 floor       R = 0, which the core raises to its floor outliers    every 100th
 * target is off by 10^6; R = 1e-2
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kbt.h"

enum { D = 4, HIDDEN = 8, OUTPUTS = 2, CHECK_EVERY = 1000 }; /* OUTPUTS: at most */

static uint64_t lcg = 1;

/* Uniform on (-1, 1), 12 bits, so that sums of a few stay exact in float32. */
static double uniform(void) {
  lcg = lcg * 6364136223846793005ULL + 1442695040888963407ULL;
  return ((double)(lcg >> 52) + 0.5) / 2048.0 - 1.0;
}

static void fail(const char *what, long update) {
  fprintf(stderr, "update %ld: %s\n", update, what);
  exit(1);
}

static kbt_head *make(const kbt_config *cfg) {
  const size_t bytes = kbt_arena_bytes(cfg);
  void *arena = aligned_alloc(KBT_ARENA_ALIGN, bytes);
  kbt_head *head = NULL;
  const float weight32[OUTPUTS * D] = {0.5F, -0.25F, 1.0F, 0.125F, 1.0F, 0.5F, 0.0F, -1.0F};
  const double weight64[OUTPUTS * D] = {0.5, -0.25, 1.0, 0.125, 1.0, 0.5, 0.0, -1.0};
  const int single = cfg->dtype == KBT_FLOAT32;
  if (kbt_init(cfg, arena, bytes, &head) != KBT_OK) fail("kbt_init", 0);
  if (kbt_set_prior(head, single ? (const void *)weight32 : weight64, NULL, 0)) fail("kbt_set_prior", 0);
  return head;
}

static double learn(kbt_head *head, int single, const double *h, const double *y, long update) {
  float h32[D], y32[OUTPUTS];
  kbt_result result;
  int i;
  for (i = 0; i < D; ++i) h32[i] = (float)h[i];
  for (i = 0; i < OUTPUTS; ++i) y32[i] = (float)y[i];
  if (kbt_update(head, single ? (const void *)h32 : h, 1, single ? (const void *)y32 : y, NULL, 0, &result)) {
    fail("kbt_update rejected", update);
  }
  if (!isfinite(result.nis) || !isfinite(result.log_likelihood)) fail("result is not finite", update);
  return result.nis;
}

static void check(const kbt_head *head, const kbt_config *cfg, int single, long update) {
  kbt_health health;
  union {
    float f[HIDDEN * (HIDDEN + 1)];
    double d[HIDDEN * (HIDDEN + 1)];
  } mean;
  int i, k;
  kbt_get_health(head, &health);
  if (!(health.smallest_var >= 0.0) || !isfinite(health.largest_var)) fail("factor out of range", update);
  for (i = 0; i < cfg->layers; ++i) {
    const int count = cfg->widths[i + 1] * (cfg->widths[i] + 1);
    kbt_get_mean(head, i, &mean);
    for (k = 0; k < count; ++k) {
      if (!isfinite(single ? (double)mean.f[k] : mean.d[k])) fail("mean is not finite", update);
    }
  }
}

static void save(const kbt_head *head, const char *file, const char *suffix) {
  const size_t size = kbt_state_size(head);
  void *blob = malloc(size);
  char name[4096];
  FILE *out;
  snprintf(name, sizeof name, "%s.%s", file, suffix);
  if (blob == NULL || kbt_state_save(head, blob, size) != KBT_OK) fail("kbt_state_save", -1);
  out = fopen(name, "wb");
  if (out == NULL || fwrite(blob, 1, size, out) != size || fclose(out) != 0) fail(name, -1);
  free(blob);
}

int main(int argc, char **argv) {
  double truth[OUTPUTS][D] = {{1.0, 0.5, -0.75, 0.25}, {-0.5, 0.25, 1.0, 0.75}};
  const char *scenario = argc == 7 ? argv[1] : "";
  const int correlated = strcmp(scenario, "correlated") == 0, steady = strcmp(scenario, "steady") == 0,
            outliers = strcmp(scenario, "outliers") == 0, drift = strcmp(scenario, "drift") == 0,
            plain = strcmp(scenario, "plain") == 0;
  kbt_config cfg;
  kbt_head *single, *twice;
  double nis = 0.0;
  long update, updates;
  int i, o, outputs;
  if (!(correlated || steady || outliers || drift || plain || strcmp(scenario, "floor") == 0)) fail("usage", 0);
  outputs = atoi(argv[4]) == 2 ? 2 : 1;
  kbt_config_single(&cfg, D, outputs);
  cfg.covariance =
      strcmp(argv[2], "full") == 0 ? KBT_FULL : (strcmp(argv[2], "neuron") == 0 ? KBT_NEURON : KBT_DIAGONAL);
  cfg.layers = atoi(argv[3]);
  updates = atol(argv[5]);
  if (cfg.layers == 2) {
    cfg.widths[1] = HIDDEN;
    cfg.widths[2] = outputs;
    cfg.prior_var[0] = 1e-5;
  }
  cfg.noise_var = correlated ? 1e-6 : (strcmp(scenario, "floor") == 0 ? 0.0 : 1e-2);
  if (steady) cfg.forgetting = 0.999;
  if (drift) cfg.forgetting = 0.99;
  cfg.dtype = KBT_FLOAT32;
  single = make(&cfg);
  cfg.dtype = KBT_FLOAT64;
  twice = make(&cfg);

  for (update = 1; update <= updates; ++update) {
    double h[D], y[OUTPUTS] = {0.25, -0.5};
    const double common = uniform();
    for (i = 0; i < D; ++i) {
      const double own = uniform();
      h[i] = correlated ? common + own / 64.0 : own;
      if (correlated && h[i] < 0.0) h[i] = 0.0;
      if (steady) h[i] = 0.25 * (i + 1);
      for (o = 0; o < OUTPUTS; ++o) {
        if (drift) truth[o][i] += 1e-3 * (uniform() - 1e-2 * truth[o][i]);
        y[o] += truth[o][i] * h[i];
      }
    }
    for (o = 0; o < OUTPUTS; ++o) {
      y[o] += uniform() * sqrt(3.0 * cfg.noise_var);
      if (outliers && update % 100 == 0) y[o] += update % 200 == 0 ? 1e6 : -1e6;
      y[o] = (double)(float)y[o]; /* the same target for both */
    }
    nis += learn(single, 1, h, y, update);
    learn(twice, 0, h, y, update);
    if (update % CHECK_EVERY == 0 || update == updates) {
      check(single, &cfg, 1, update);
      check(twice, &cfg, 0, update);
    }
  }
  printf("%.9g\n", nis / (double)updates);
  save(single, argv[6], "float32");
  save(twice, argv[6], "float64");
  return 0;
}
