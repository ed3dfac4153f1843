/* compare_peers.c - times every single call of the C ABI, without Python around it. Loaded by compare_peers.py. */
#define _POSIX_C_SOURCE 200112L
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "kbt.h"

enum { PREDICT = 0, UPDATE = 1 };

/* A head in memory of its own, in the state that `blob` holds; NULL if that fails. Lives until the process ends. */
kbt_head *open_head(const void *blob, size_t size) {
  kbt_config cfg;
  kbt_head *head;
  size_t bytes;
  void *arena;
  if (kbt_state_config(blob, size, &cfg) != KBT_OK) return NULL;
  bytes = kbt_arena_bytes(&cfg);
  arena = bytes != 0 ? aligned_alloc(KBT_ARENA_ALIGN, (bytes + KBT_ARENA_ALIGN - 1) / KBT_ARENA_ALIGN * KBT_ARENA_ALIGN)
                     : NULL;
  if (arena == NULL || kbt_init(&cfg, arena, bytes, &head) != KBT_OK) return NULL;
  return kbt_state_load(head, blob, size) == KBT_OK ? head : NULL;
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* h: calls x d, y: calls x 1, ns: how long each call took. Returns the first status that is not KBT_OK. */
int time_calls(kbt_head *head, int verb, const float *h, const float *y, int d, int calls, int64_t *ns) {
  int i;
  for (i = 0; i < calls; ++i) {
    float mean, variance, total;
    kbt_result result;
    kbt_status status;
    const int64_t started = now();
    status = verb == UPDATE ? kbt_update(head, h + (ptrdiff_t)i * d, 1, y + i, NULL, 0, &result)
                            : kbt_predict(head, h + (ptrdiff_t)i * d, 1, &mean, &variance, &total);
    ns[i] = now() - started;
    if (status != KBT_OK) return (int)status;
  }
  return 0;
}
