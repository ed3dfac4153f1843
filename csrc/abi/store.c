/* kbt_store.c - two slots of flash, written alternately. kbt_store.h says why that is safe. */
#include <string.h>

#include "kbt_store.h"

static const uint32_t kMagic = 0x3153424BU; /* "KBS1" */

enum { kMagicAt = 0, kSequenceAt = 4, kLengthAt = 8, kCrcAt = 12, kHeaderUsed = 16 };

static uint32_t read_u32(const unsigned char *from) {
  return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void put_u32(unsigned char *to, uint32_t value) {
  int i;
  for (i = 0; i < 4; ++i) to[i] = (unsigned char)(value >> (8 * i) & 0xFFU);
}

/* CRC-32 of `count` bytes after others whose CRC is `crc`. */
static uint32_t crc32(uint32_t crc, const unsigned char *bytes, uint32_t count) {
  static const uint32_t table[16] = {/* reflected polynomial 0xEDB88320, four bits at a time */
                                     0x00000000U, 0x1DB71064U, 0x3B6E20C8U, 0x26D930ACU, 0x76DC4190U, 0x6B6B51F4U,
                                     0x4DB26158U, 0x5005713CU, 0xEDB88320U, 0xF00F9344U, 0xD6D6A3E8U, 0xCB61B38CU,
                                     0x9B64C2B0U, 0x86D3D2D4U, 0xA00AE278U, 0xBDBDF21CU};
  crc = ~crc;
  while (count-- > 0) {
    crc ^= *bytes++;
    crc = (crc >> 4) ^ table[crc & 15U];
    crc = (crc >> 4) ^ table[crc & 15U];
  }
  return ~crc;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

typedef struct Record {
  int slot; /* -1: there is none */
  uint32_t sequence, length;
} Record;

static Record record_in(const kbt_store *store, int slot) {
  const unsigned char *bytes = store->slot[slot];
  Record none = {-1, 0, 0}, record = {slot, 0, 0};
  uint32_t crc;
  if (store->slot_bytes < KBT_STORE_HEADER) return none;
  record.sequence = read_u32(bytes + kSequenceAt);
  record.length = read_u32(bytes + kLengthAt);
  if (read_u32(bytes + kMagicAt) != kMagic || record.length > store->slot_bytes - KBT_STORE_HEADER) return none;
  crc = crc32(crc32(0, bytes, kCrcAt), bytes + KBT_STORE_HEADER, record.length);
  return crc == read_u32(bytes + kCrcAt) ? record : none;
}

static Record newest(const kbt_store *store) {
  const Record first = record_in(store, 0), second = record_in(store, 1);
  if (first.slot < 0) return second;
  if (second.slot < 0) return first;
  return (int32_t)(second.sequence - first.sequence) > 0 ? second : first; /* correct even if the number wraps around */
}

kbt_store_status kbt_store_load(const kbt_store *store, kbt_head *head) {
  const Record record = newest(store);
  const unsigned char *state;
  if (record.slot < 0) return KBT_STORE_EMPTY;
  state = (const unsigned char *)store->slot[record.slot] + KBT_STORE_HEADER;
  return kbt_state_load(head, state, record.length) == KBT_OK ? KBT_STORE_OK : KBT_STORE_E_STATE;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

typedef struct Pen {
  const kbt_store *store;
  int slot;
  uint32_t offset, crc, filled;
  int failed;
  unsigned char unit[KBT_STORE_UNIT];
} Pen;

/* Writes the unit, its rest as if erased. */
static void write_unit(Pen *pen) {
  memset(pen->unit + pen->filled, 0xFF, KBT_STORE_UNIT - pen->filled);
  if (!pen->failed) {
    pen->failed = pen->store->write(pen->store->context, pen->slot, pen->offset, pen->unit, KBT_STORE_UNIT) != 0;
  }
  pen->offset += KBT_STORE_UNIT;
  pen->filled = 0;
}

static void append(void *context, const void *bytes, size_t count) {
  Pen *pen = context;
  const unsigned char *from = bytes;
  pen->crc = crc32(pen->crc, from, (uint32_t)count);
  while (count-- > 0) {
    pen->unit[pen->filled++] = *from++;
    if (pen->filled == KBT_STORE_UNIT) write_unit(pen);
  }
}

kbt_store_status kbt_store_save(const kbt_store *store, const kbt_head *head) {
  const size_t size = kbt_state_size(head);
  const Record old = newest(store);
  unsigned char header[kHeaderUsed];
  Record written;
  Pen pen = {store, 0, KBT_STORE_HEADER, 0, 0, 0, {0}};
  if (size == 0 || store->slot_bytes < KBT_STORE_HEADER) return KBT_STORE_E_SIZE;
  if (size > (store->slot_bytes - KBT_STORE_HEADER) / KBT_STORE_UNIT * KBT_STORE_UNIT) return KBT_STORE_E_SIZE;
  pen.slot = old.slot == 0 ? 1 : 0;
  put_u32(header + kMagicAt, kMagic);
  put_u32(header + kSequenceAt, old.slot < 0 ? 1U : old.sequence + 1U);
  put_u32(header + kLengthAt, (uint32_t)size);
  pen.crc = crc32(0, header, kCrcAt);

  if (store->erase(store->context, pen.slot) != 0) return KBT_STORE_E_FLASH;
  kbt_state_stream(head, append, &pen);
  if (pen.filled != 0) write_unit(&pen);
  put_u32(header + kCrcAt, pen.crc);
  memcpy(pen.unit, header, kHeaderUsed);
  pen.filled = kHeaderUsed;
  pen.offset = 0;
  write_unit(&pen);
  if (pen.failed) return KBT_STORE_E_FLASH;
  written = record_in(store, pen.slot);
  return written.slot == pen.slot && read_u32((const unsigned char *)store->slot[pen.slot] + kCrcAt) == pen.crc
             ? KBT_STORE_OK
             : KBT_STORE_E_FLASH;
}
