/* board_qemu.c - board.h for QEMU: semihosting in place of a UART, and SysTick as a counter of instructions.
 *
 * With -icount shift=0 one instruction takes one nanosecond of simulated time, so SysTick counts instructions, in ticks
 * of 1/frequency. How many instructions a tick is worth is measured when the counter is started, on a loop whose length
 * is known. They are instructions, not cycles: what a board needs in time only a board can tell.
 */
#include <stdarg.h>
#include <stdio.h>

#include "board.h"

enum { kSysWrite0 = 0x04, kSysExitExtended = 0x20, kApplicationExit = 0x20026 };

static int semihosting(int operation, const void *argument) {
  register int r0 __asm__("r0") = operation;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

void board_write(const char *text) {
  semihosting(kSysWrite0, text);
}

void board_exit(int code) {
  const uint32_t block[2] = {kApplicationExit, (uint32_t)code};
  semihosting(kSysExitExtended, block);
  for (;;) {
  }
}

void board_reset(void) {
  *(volatile uint32_t *)0xE000ED0CU = 0x05FA0004U; /* AIRCR: SYSRESETREQ */
  for (;;) {
  }
}

/* ---- the counter ------------------------------------------------------------------------------------------------ */

static volatile uint32_t *const kSysTick = (volatile uint32_t *)0xE000E010U; /* control, reload, value */
static uint32_t known_ticks;                                                 /* that the known loop took */

enum { kKnownInstructions = 2000000, kMask = 0xFFFFFF };

uint32_t board_ticks(void) {
  return kMask - kSysTick[2];
}

void board_counter_start(void) {
  uint32_t rounds = kKnownInstructions / 2, start;
  kSysTick[1] = kMask;
  kSysTick[2] = 0;
  kSysTick[0] = 5; /* on, from the processor's clock, without interrupt */
  start = board_ticks();
  __asm__ volatile("1: subs %0, #1\n bne 1b" : "+r"(rounds) : : "cc");
  known_ticks = (board_ticks() - start) & kMask;
}

uint32_t board_instructions(uint32_t from, uint32_t to) {
  const uint64_t ticks = (to - from) & kMask;
  return known_ticks == 0 ? 0 : (uint32_t)((ticks * kKnownInstructions + known_ticks / 2) / known_ticks);
}

/* ---- printf: of the C library's only what is needed here, as its own wants a heap ---------------------------------
 */

static void put(char c) {
  static char line[120];
  static size_t used;
  line[used++] = c;
  if (c == '\n' || used == sizeof line - 1) {
    line[used] = '\0';
    board_write(line);
    used = 0;
  }
}

static void put_padded(const char *text, int length, int width, char pad) {
  for (; width > length; --width) put(pad);
  while (length-- > 0) put(*text++);
}

/* Digits of `value`, written backwards so that they end at `end`. Returns where they begin. */
static char *digits(char *end, uint64_t value, unsigned base) {
  do {
    *--end = "0123456789abcdef"[value % base];
    value /= base;
  } while (value != 0);
  return end;
}

/* %s %d %u %x with l, and %f, all with width, 0 and .n; a minus sign in the width is not known. */
int printf(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  for (; *format != '\0'; ++format) {
    char buffer[40], *end = buffer + sizeof buffer, *begin = end, pad = ' ';
    int width = 0, decimals = 6, is_long = 0, negative = 0;
    if (*format != '%') {
      put(*format);
      continue;
    }
    if (*++format == '0') pad = '0';
    for (; *format >= '0' && *format <= '9'; ++format) width = 10 * width + *format - '0';
    if (*format == '.') {
      for (decimals = 0, ++format; *format >= '0' && *format <= '9'; ++format) decimals = 10 * decimals + *format - '0';
    }
    for (; *format == 'l'; ++format) is_long = 1;
    if (*format == 's') {
      const char *text = va_arg(arguments, const char *);
      int length = 0;
      while (text[length] != '\0') ++length;
      put_padded(text, length, width, ' ');
      continue;
    }
    if (*format == 'f') {
      double value = va_arg(arguments, double), unit = 1.0;
      int i;
      negative = value < 0.0;
      for (i = 0; i < decimals; ++i) unit *= 10.0;
      value = (negative ? -value : value) * unit + 0.5;
      if (!(value < 1e18)) { /* NaN too */
        put_padded("?", 1, width, ' ');
        continue;
      }
      begin = digits(end, (uint64_t)value, 10);
      while (end - begin <= decimals) *--begin = '0';
      if (decimals > 0) { /* make room for the point */
        for (i = 0, --begin; i < end - begin - 1 - decimals; ++i) begin[i] = begin[i + 1];
        end[-decimals - 1] = '.';
      }
    } else if (*format == 'd') {
      const long value = is_long ? va_arg(arguments, long) : va_arg(arguments, int);
      negative = value < 0;
      begin = digits(end, negative ? 0UL - (unsigned long)value : (unsigned long)value, 10);
    } else {
      const unsigned long value = is_long ? va_arg(arguments, unsigned long) : va_arg(arguments, unsigned);
      begin = digits(end, value, *format == 'x' ? 16 : 10);
    }
    if (negative) *--begin = '-';
    put_padded(begin, (int)(end - begin), width, pad);
  }
  va_end(arguments);
  return 0;
}
