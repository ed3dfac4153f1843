/* board.h - the little of a board that the demo needs: a line out, a way to stop, a counter, a reset. */
#ifndef BOARD_H
#define BOARD_H

#include <stddef.h>
#include <stdint.h>

void board_write(const char *text);
__attribute__((noreturn)) void board_exit(int code);
__attribute__((noreturn)) void board_reset(void); /* as pressing the button: RAM outside .noinit starts anew */

/* The most stack that was in use at any time since the start, in bytes. */
uint32_t board_stack_used(void);

/* Instructions since some moment, modulo 2^24 ticks; see board_counter_start. */
void board_counter_start(void);
uint32_t board_ticks(void);                              /* counts up, 24 bits */
uint32_t board_instructions(uint32_t from, uint32_t to); /* between two readings */

#endif /* BOARD_H */
