/* cost.c - learns a number of samples and nothing else, to be counted by callgrind.
 *
 *   cost <covariance> <d> <hidden> <outputs> <updates> [<samples of a flight recorder>]
 *
 * The head is float32, without a hidden layer if <hidden> is 0. With the covariance -1 it is the default head,
 * watchful. Its plant changes at update 204, and the number of updates after which the head noticed is written to the
 * standard output.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kbt.h"
#include "kbt_flight.h"

enum { MAX_D = 1024, MAX_OUTPUTS = 8000, CHANGE = 204 }; /* all inputs have been seen twelve times */

int main(int argc, char **argv) {
  static float weight[MAX_OUTPUTS * MAX_D], target[MAX_OUTPUTS];
  static float h[17][MAX_D]; /* the inputs repeat after 17 samples */
  kbt_config cfg;
  kbt_head *head;
  size_t bytes;
  void *arena;
  long update, updates, noticed = 0;
  int covariance, d, hidden, outputs, i;
  if (argc != 6 && argc != 7) return 2;
  covariance = atoi(argv[1]);
  d = atoi(argv[2]);
  hidden = atoi(argv[3]);
  outputs = atoi(argv[4]);
  updates = atol(argv[5]);
  if (d < 1 || d > MAX_D || outputs < 1 || outputs > MAX_OUTPUTS) return 2;
  kbt_config_default(&cfg, d, outputs);
  if (covariance >= 0) {
    kbt_config_single(&cfg, d, outputs);
    cfg.covariance = covariance;
  }
  if (hidden > 0) {
    cfg.layers = 2;
    cfg.widths[1] = hidden;
    cfg.widths[2] = outputs;
    cfg.prior_var[0] = 1e-5;
  }
  bytes = kbt_arena_bytes(&cfg);
  arena = bytes != 0 ? aligned_alloc(KBT_ARENA_ALIGN, bytes) : NULL;
  if (arena == NULL || kbt_init(&cfg, arena, bytes, &head) != KBT_OK) return 3;
  for (i = 0; i < outputs * d; ++i) weight[i] = 0.1F * (float)(i % d % 16);
  if (kbt_set_prior(head, weight, NULL, 0) != KBT_OK) return 3;
  if (argc == 7) { /* with a flight recorder of so many samples */
    const uint32_t samples = (uint32_t)atol(argv[6]);
    const size_t flight_bytes = kbt_flight_bytes(&cfg, samples);
    void *memory = flight_bytes != 0 ? aligned_alloc(KBT_ARENA_ALIGN, flight_bytes) : NULL;
    kbt_flight *flight;
    if (memory == NULL || kbt_flight_init(head, memory, flight_bytes, samples, &flight) != KBT_OK) return 3;
  }
  for (update = 0; update < 17; ++update) {
    for (i = 0; i < d; ++i) h[update][i] = (float)((update * 7 + i * 13) % 17) / 8.0F - 1.0F;
  }
  for (update = 0; update < updates; ++update) {
    const float *sample = h[update % 17], y = sample[d / 2];
    const float noise = covariance < 0 ? 0.01F * (float)(update * 37 % 11 - 5) : 0.0F;
    kbt_result result;
    for (i = 0; i < outputs; ++i) target[i] = (covariance < 0 && update >= CHANGE ? -y : y) + noise;
    if (kbt_update(head, sample, 1, target, NULL, 0, &result) != KBT_OK) return 4;
    if (result.changed != KBT_NO_CHANGE) noticed = update + 1;
  }
  if (covariance < 0) printf("%ld\n", noticed);
  return 0;
}
