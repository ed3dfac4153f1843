/* startup.c - from reset to main: vectors, stack paint, memory, FPU. The same for every Cortex-M with an FPU. */
#include "board.h"

extern uint32_t data_start[], data_end[], data_load[], bss_start[], bss_end[], stack_bottom[], stack_top[];
extern void (*const init_array_start[])(void), (*const init_array_end[])(void);

int main(void);
void reset_handler(void);

enum { kPaint = 0x5AA55AA5 };

static void fault(void) {
  board_write("fault\n");
  board_exit(2);
}

/* The stack, the start, and 14 exceptions, none of which this program expects. */
__attribute__((section(".vectors"), used)) static void (*const vectors[16])(void) = {
    (void (*)(void))(uintptr_t)stack_top,
    reset_handler,
    [2 ... 15] = fault,
};

/* Without the FPU until it is on, so nothing here may use floating point. */
void reset_handler(void) {
  uint32_t *to;
  const uint32_t *from = data_load;
  void (*const *constructor)(void);
  *(volatile uint32_t *)0xE000ED88U |= 0xFU << 20; /* CPACR: full access to the FPU */
  __asm__ volatile("dsb\n isb" ::: "memory");
  __asm__ volatile("mov %0, sp" : "=r"(to));
  while (to > stack_bottom) *--to = kPaint; /* downwards from here: what is above is in use */
  for (to = data_start; to < data_end;) *to++ = *from++;
  for (to = bss_start; to < bss_end;) *to++ = 0;
  for (constructor = init_array_start; constructor < init_array_end; ++constructor) (*constructor)();
  board_exit(main());
}

uint32_t board_stack_used(void) {
  const uint32_t *mark = stack_bottom;
  while (mark < stack_top && *mark == kPaint) ++mark;
  return (uint32_t)((const char *)stack_top - (const char *)mark);
}
