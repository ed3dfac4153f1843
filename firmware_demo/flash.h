/* flash.h - two slots of simulated flash that keep their content over a reset, and a power supply that can fail. */
#ifndef FLASH_H
#define FLASH_H

#include "kbt/kbt_store.h"

extern const kbt_store flash_store;

void flash_start(void);                /* once in the life of the device: all bytes erased */
void flash_fail_after(uint32_t bytes); /* the power fails when this many more bytes have changed */

#endif /* FLASH_H */
