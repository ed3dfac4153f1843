/* cost.c - learns a number of samples and nothing else, to be counted by callgrind.
 *
 *   cost <covariance> <d> <hidden> <updates> [<samples of a flight recorder>]    a d -> hidden -> 1 float32 head
 *
 * Without a hidden layer (0) it is the default head, watchful. Its plant changes at update 204, and the number of
 * updates after which the head noticed is written to the standard output.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kbt.h"
#include "kbt_flight.h"

enum { MAX_D = 1024, CHANGE = 204 }; /* all inputs have been seen twelve times */

int main(int argc, char **argv) {
  static float weight[MAX_D], h[17][MAX_D]; /* the inputs repeat after 17 samples */
  const float bias = 0.0F;
  kbt_config cfg;
  kbt_head *head;
  size_t bytes;
  void *arena;
  long update, updates, noticed = 0;
  int d, i, hidden;
  if (argc != 5 && argc != 6) return 2;
  d = atoi(argv[2]);
  updates = atol(argv[4]);
  if (d < 1 || d > MAX_D) return 2;
  hidden = atoi(argv[3]);
  kbt_config_default(&cfg, d, 1);
  if (hidden > 0) {
    kbt_config_single(&cfg, d, 1);
    cfg.covariance = atoi(argv[1]);
    cfg.layers = 2;
    cfg.widths[1] = hidden;
    cfg.widths[2] = 1;
    cfg.prior_var[0] = 1e-5;
  }
  bytes = kbt_arena_bytes(&cfg);
  arena = bytes != 0 ? aligned_alloc(KBT_ARENA_ALIGN, bytes) : NULL;
  if (arena == NULL || kbt_init(&cfg, arena, bytes, &head) != KBT_OK) return 3;
  for (i = 0; i < d; ++i) weight[i] = 0.1F * (float)(i % 16);
  if (kbt_set_prior(head, weight, &bias, 0) != KBT_OK) return 3;
  if (argc == 6) { /* with a flight recorder of so many samples */
    const uint32_t samples = (uint32_t)atol(argv[5]);
    const size_t flight_bytes = kbt_flight_bytes(&cfg, samples);
    void *memory = flight_bytes != 0 ? aligned_alloc(KBT_ARENA_ALIGN, flight_bytes) : NULL;
    kbt_flight *flight;
    if (memory == NULL || kbt_flight_init(head, memory, flight_bytes, samples, &flight) != KBT_OK) return 3;
  }
  for (update = 0; update < 17; ++update) {
    for (i = 0; i < d; ++i) h[update][i] = (float)((update * 7 + i * 13) % 17) / 8.0F - 1.0F;
  }
  for (update = 0; update < updates; ++update) {
    const float *sample = h[update % 17];
    if (hidden > 0) {
      if (kbt_update(head, sample, 1, &sample[d / 2], NULL, 0, NULL) != KBT_OK) return 4;
    } else {
      const float noise = 0.01F * (float)(update * 37 % 11 - 5), y = sample[d / 2];
      const float target = (update < CHANGE ? y : -y) + noise;
      kbt_result result;
      if (kbt_update(head, sample, 1, &target, NULL, 0, &result) != KBT_OK) return 4;
      if (result.changed != KBT_NO_CHANGE) noticed = update + 1;
    }
  }
  if (hidden == 0) printf("%ld\n", noticed);
  return 0;
}
