/* balance.c - a head that learns a changed plant, in C: no heap, no Python, one header.
 *
 * The readout was trained for force = -2 x1 - 3 x2. The plant now needs -4 x1 - 6 x2 + 1. Each sample is predicted
 * first and learned afterwards, as in a control loop, so the prediction error shows the progress.
 *
 * Build with the Makefile (pkg-config) or the CMakeLists.txt in this folder.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "kbt.h"

enum { INPUTS = 2, SAMPLES = 200 };

static _Alignas(KBT_ARENA_ALIGN) unsigned char arena[16384];

static float noise(void) { /* -1 … 1 */
  static uint32_t state = 1;
  state = state * 1664525U + 1013904223U;
  return (float)(state >> 8) / 8388608.0F - 1.0F;
}

static int failed(const char *call, kbt_status status) {
  if (status == KBT_OK) return 0;
  fprintf(stderr, "%s: %s\n", call, kbt_status_str(status));
  return 1;
}

int main(void) {
  const float weight[INPUTS] = {-2.0F, -3.0F}, bias = 0.0F;
  float first = 0.0F, last = 0.0F, mean, variance, total;
  kbt_config cfg;
  kbt_head *head;
  int k;

  kbt_config_default(&cfg, INPUTS, 1);
  cfg.noise_var = 1e-2;
  if (kbt_arena_bytes(&cfg) > sizeof arena) return 1;
  if (failed("kbt_init", kbt_init(&cfg, arena, sizeof arena, &head))) return 1;
  if (failed("kbt_set_prior", kbt_set_prior(head, weight, &bias, 0))) return 1;

  for (k = 0; k < SAMPLES; ++k) {
    const float x[INPUTS] = {noise(), noise()};
    const float force = -4.0F * x[0] - 6.0F * x[1] + 1.0F;
    if (failed("kbt_predict", kbt_predict(head, x, 1, &mean, &variance, &total))) return 1;
    if (k < 10) first += fabsf(mean - force) / 10.0F;
    if (k >= SAMPLES - 10) last += fabsf(mean - force) / 10.0F;
    if (failed("kbt_observe", kbt_observe(head, &force, NULL, 0, NULL))) return 1;
  }
  printf("kbt ABI %d, %d bytes\n", (int)kbt_abi_version(), (int)kbt_arena_bytes(&cfg));
  printf("mean error of the first 10 predictions %.4f, of the last 10 %.4f\n", (double)first, (double)last);
  printf("last prediction %.4f, standard deviation %.4f\n", (double)mean, (double)sqrtf(total));
  return last < first / 10.0F ? 0 : 1;
}
