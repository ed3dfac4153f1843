/* flash.c - what a board replaces by its own erase and write; docs/firmware.md shows how. */
#include "flash.h"

#include <string.h>

#include "board.h"

enum { kSlotBytes = 32 * 1024 };

static unsigned char slots[2][kSlotBytes] __attribute__((section(".store"), aligned(64)));
static uint32_t until_failure = UINT32_MAX;

/* Byte by byte, so that the power can fail between any two of them. */
static void change(unsigned char *to, const unsigned char *from, uint32_t count) {
  uint32_t i;
  for (i = 0; i < count; ++i) {
    if (until_failure != UINT32_MAX && until_failure-- == 0) board_reset();
    to[i] = from != NULL ? from[i] : 0xFF;
  }
}

static int erase(void *context, int slot) {
  (void)context;
  change(slots[slot], NULL, kSlotBytes);
  return 0;
}

static int write(void *context, int slot, uint32_t offset, const void *bytes, uint32_t count) {
  (void)context;
  change(slots[slot] + offset, bytes, count);
  return 0;
}

const kbt_store flash_store = {{slots[0], slots[1]}, kSlotBytes, erase, write, NULL};

void flash_start(void) {
  memset(slots, 0xFF, sizeof slots);
}

void flash_fail_after(uint32_t bytes) {
  until_failure = bytes;
}
