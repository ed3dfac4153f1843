/* kbt_store.h - a head's state in flash memory that survives a power cut at any moment. C99, no heap.
 *
 * Two slots are written alternately. A record is a header (magic, sequence number, length, CRC-32) and the state blob;
 * the header is written last. At start-up the newest record with a correct CRC is used. While one slot is being erased
 * and written, the other holds the latest complete state, so there is always the old state or the new one.
 *
 * The board supplies two functions, for a part of its flash that can be read like memory.
 */
#ifndef KBT_STORE_H
#define KBT_STORE_H

#include "kbt.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KBT_STORE_HEADER 64 /* bytes of a slot before the state */
#define KBT_STORE_UNIT 64   /* writes start at a multiple of this and have at most this many bytes */

typedef enum kbt_store_status {
  KBT_STORE_OK = 0,
  KBT_STORE_EMPTY = 1,   /* neither slot holds a complete record: a new device */
  KBT_STORE_E_STATE = 2, /* a complete record, but of another configuration: the firmware has changed */
  KBT_STORE_E_SIZE = 3,  /* the state does not fit into a slot; nothing was touched */
  KBT_STORE_E_FLASH = 4  /* erase or write failed, or what was written reads differently; the old record is intact */
} kbt_store_status;

typedef struct kbt_store {
  const void *slot[2]; /* where each slot can be read, 4-byte aligned; each in erase sectors of its own */
  uint32_t slot_bytes; /* at least KBT_STORE_HEADER + kbt_state_size(), a multiple of KBT_STORE_UNIT */
  /* Make every byte of a slot 0xFF. Returns 0, or anything else if that failed. */
  int (*erase)(void *context, int slot);
  /* Write `count` bytes at `offset` of an erased slot. Offset and count are multiples of KBT_STORE_UNIT. */
  int (*write)(void *context, int slot, uint32_t offset, const void *bytes, uint32_t count);
  void *context; /* handed to both */
} kbt_store;

/* Write the head's state to the slot that does not hold the newest record. */
kbt_store_status kbt_store_save(const kbt_store *store, const kbt_head *head);
/* Read the newest record into the head. Any status but KBT_STORE_OK leaves the head unchanged. */
kbt_store_status kbt_store_load(const kbt_store *store, kbt_head *head);

#ifdef __cplusplus
}
#endif

#endif /* KBT_STORE_H */
