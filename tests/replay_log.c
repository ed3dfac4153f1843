/* replay_log.c - replays a flight log and says whether it led to the recorded state, on whatever machine this runs.
 *
 *   replay_log FILE...    prints "FILE hash reproduced" for each; plain C99, memory is static.
 */
#include <stdio.h>

#include "kbt_flight.h"

static unsigned char log_bytes[64 * 1024], memory[2 * 1024 * 1024];

static unsigned char *aligned(unsigned char *from) {
  return from + (KBT_ARENA_ALIGN - (size_t)from % KBT_ARENA_ALIGN) % KBT_ARENA_ALIGN;
}

static int replay(const char *path) {
  kbt_flight_info info;
  kbt_flight_outcome outcome;
  kbt_head *head;
  unsigned char *arena = aligned(memory), *room;
  size_t size, bytes;
  FILE *file = fopen(path, "rb");
  if (file == NULL) return 1;
  size = fread(log_bytes, 1, sizeof log_bytes, file);
  fclose(file);
  if (kbt_flight_check(log_bytes, size, &info) != KBT_OK) return 2;
  bytes = kbt_arena_bytes(&info.cfg);
  if (bytes + info.replay_bytes + 3 * KBT_ARENA_ALIGN > sizeof memory) return 3;
  room = aligned(arena + bytes);
  if (kbt_init(&info.cfg, arena, bytes, &head) != KBT_OK) return 4;
  if (kbt_flight_replay(log_bytes, size, head, room, (size_t)info.replay_bytes, NULL, NULL, &outcome) != KBT_OK)
    return 5;
  printf("%s %08lx%08lx %d\n", path, (unsigned long)(outcome.final_hash >> 32),
         (unsigned long)(outcome.final_hash & 0xFFFFFFFFUL), (int)outcome.reproduced);
  return outcome.reproduced ? 0 : 6;
}

int main(int argc, char **argv) {
  int i, code = 0;
  for (i = 1; i < argc && code == 0; ++i) code = replay(argv[i]);
  return code;
}
