/* Cuts the power at every byte boundary of a save: of its erase as well as of its writes.
 *
 * After each cut the device starts anew and must find the old state or the new one, whole, and be able to go on: the
 * next save succeeds and is found. Prints how often which state was found. Returns 0 only if it was never neither, and
 * never the old one again once a shorter save had already been complete. Usage: power_cut INPUTS HIDDEN STRIDE, with 0
 * for no hidden layer; only every STRIDE-th boundary is tried.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kbt_store.h"

enum { ARENA = 128 * 1024, SLOT = 32 * 1024, MAX_INPUTS = 16 };

static unsigned char arena[ARENA] __attribute__((aligned(KBT_ARENA_ALIGN)));
static unsigned char old_state[SLOT], new_state[SLOT], found[SLOT], again[SLOT];
static size_t state_bytes;

/* ---- flash on a supply that fails ---------------------------------------------------------------------------------
 */

static unsigned char slots[2][SLOT], before[2][SLOT];
static uint32_t slot_bytes;
static long until_failure, changed;
static jmp_buf power_off;

static void change(unsigned char *to, const unsigned char *from, uint32_t count) {
  uint32_t i;
  for (i = 0; i < count; ++i, ++changed) {
    if (changed == until_failure) longjmp(power_off, 1);
    to[i] = from != NULL ? from[i] : 0xFF;
  }
}
static int erase(void *context, int slot) {
  (void)context;
  change(slots[slot], NULL, slot_bytes);
  return 0;
}
static int write(void *context, int slot, uint32_t offset, const void *bytes, uint32_t count) {
  (void)context;
  if (offset % KBT_STORE_UNIT != 0 || count % KBT_STORE_UNIT != 0 || offset + count > slot_bytes) abort();
  change(slots[slot] + offset, bytes, count);
  return 0;
}

/* ---- a head that learns --------------------------------------------------------------------------------------------
 */

static kbt_head *started(const kbt_config *cfg) {
  kbt_head *head;
  if (kbt_init(cfg, arena, sizeof arena, &head) != KBT_OK) abort();
  return head;
}
static void learn(kbt_head *head, int inputs, int samples) {
  static unsigned lcg = 1;
  while (samples-- > 0) {
    float h[MAX_INPUTS], y = 0.0F;
    int i;
    for (i = 0; i < inputs; ++i) {
      lcg = lcg * 1664525U + 1013904223U;
      h[i] = (float)((int)(lcg >> 16) - 32768) * (1.0F / 32768.0F);
      y += h[i];
    }
    if (kbt_update(head, h, 1, &y, NULL, 0, NULL) != KBT_OK) abort();
  }
}
static void copy_state(const kbt_head *head, unsigned char *to) {
  if (kbt_state_size(head) > SLOT || kbt_state_save(head, to, SLOT) != KBT_OK) abort();
}

static void save_until(long cut, const kbt_store *store, const kbt_head *head) {
  changed = 0;
  until_failure = cut;
  if (setjmp(power_off) == 0) kbt_store_save(store, head);
  until_failure = -1;
}

int main(int argc, char **argv) {
  kbt_store store = {{slots[0], slots[1]}, 0, erase, write, NULL};
  const int inputs = argc == 4 ? atoi(argv[1]) : 0, hidden = argc == 4 ? atoi(argv[2]) : 0;
  const int stride = argc == 4 ? atoi(argv[3]) : 0;
  float weight[MAX_INPUTS] = {1.0F};
  kbt_config cfg;
  kbt_head *head;
  long cut, times_old = 0, times_new = 0, last = 0;
  if (inputs < 1 || inputs > MAX_INPUTS || stride < 1) return 2;
  kbt_config_single(&cfg, inputs, 1);
  if (hidden > 0) {
    cfg.layers = 2;
    cfg.widths[1] = hidden;
    cfg.widths[2] = 1;
  }
  head = started(&cfg);
  state_bytes = kbt_state_size(head);
  store.slot_bytes = slot_bytes = (uint32_t)((KBT_STORE_HEADER + state_bytes + 63) / 64 * 64);
  if (slot_bytes > SLOT || kbt_set_prior(head, weight, NULL, 0) != KBT_OK) return 2;

  /* Two saves, so that the one to be cut replaces an older record. */
  memset(slots, 0xFF, sizeof slots);
  until_failure = -1;
  if (kbt_store_load(&store, head) != KBT_STORE_EMPTY) return 2;
  learn(head, inputs, 3);
  if (kbt_store_save(&store, head) != KBT_STORE_OK) return 2;
  learn(head, inputs, 3);
  if (kbt_store_save(&store, head) != KBT_STORE_OK) return 2;
  copy_state(head, old_state);
  memcpy(before, slots, sizeof slots);
  learn(head, inputs, 3);
  copy_state(head, new_state);
  changed = 0;
  if (kbt_store_save(&store, head) != KBT_STORE_OK) return 2;
  last = changed;

  for (cut = 0; cut <= last; cut += stride) {
    int is_old, is_new;
    memcpy(slots, before, sizeof slots);
    head = started(&cfg);
    if (kbt_state_load(head, new_state, state_bytes) != KBT_OK) return 2;
    save_until(cut, &store, head);

    head = started(&cfg); /* nothing of the RAM is left */
    if (kbt_store_load(&store, head) != KBT_STORE_OK) {
      printf("cut after %ld bytes: no state\n", cut);
      return 1;
    }
    copy_state(head, found);
    is_old = memcmp(found, old_state, state_bytes) == 0;
    is_new = memcmp(found, new_state, state_bytes) == 0;
    if (is_old == is_new || (is_old && times_new > 0)) {
      printf("cut after %ld bytes: old %d, new %d\n", cut, is_old, is_new);
      return 1;
    }
    times_old += is_old;
    times_new += is_new;
    if (cut % (97 * stride) == 0) { /* life goes on */
      learn(head, inputs, 1);
      copy_state(head, found);
      if (kbt_store_save(&store, head) != KBT_STORE_OK) return 1;
      head = started(&cfg);
      if (kbt_store_load(&store, head) != KBT_STORE_OK) return 1;
      copy_state(head, again);
      if (memcmp(again, found, state_bytes) != 0) return 1;
    }
  }
  printf("state %lu bytes, cuts %ld, old %ld, new %ld\n", (unsigned long)state_bytes, times_old + times_new, times_old,
         times_new);
  return times_old > 0 && times_new > 0 ? 0 : 1;
}
