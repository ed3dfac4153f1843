/* Runs the generated trunk of the cart-pole over 200 inputs and prints every bit of what it gives, a row a line.
 *
 * Inputs come from an integer generator and are exact in float32. Built for different machines, it shows whether their
 * libm and compilers agree. Plain C99; tests/test_firmware.py compares the lines.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { INPUTS = 4, WIDTH = 16, RUNS = 200 };

int cartpole_trunk_run(const void *const *inputs, float *output);

int main(void) {
  uint32_t lcg = 1;
  int run, i;
  for (run = 0; run < RUNS; ++run) {
    float x[INPUTS], h[WIDTH];
    const void *inputs[1];
    for (i = 0; i < INPUTS; ++i) {
      lcg = lcg * 1664525U + 1013904223U;
      x[i] = (float)((int32_t)(lcg >> 16) - 32768) * (1.5F / 32768.0F);
    }
    inputs[0] = x;
    if (cartpole_trunk_run(inputs, h) != 0) return 1;
    for (i = 0; i < WIDTH; ++i) {
      uint32_t bits;
      memcpy(&bits, &h[i], sizeof bits);
      printf("%08lx%s", (unsigned long)bits, i == WIDTH - 1 ? "\n" : " ");
    }
  }
  return 0;
}
