"""The two slots of flash memory (csrc/abi/store.c) on flash that fails: the old state stays, and the caller is told."""

from __future__ import annotations

from typing import Any

import cffi
import numpy as np
import pytest
from cabi import CSRC, compiler, installed, run

pytestmark = pytest.mark.host_only("compiles C; the power cuts of test_codegen.py run on the board as well")

DECLARED = """
typedef struct kbt_head kbt_head;
typedef struct kbt_store {
  const void *slot[2];
  uint32_t slot_bytes;
  int (*erase)(void *context, int slot);
  int (*write)(void *context, int slot, uint32_t offset, const void *bytes, uint32_t count);
  void *context;
} kbt_store;
int kbt_store_save(const kbt_store *store, const kbt_head *head);
int kbt_store_load(const kbt_store *store, kbt_head *head);
kbt_head *new_head(int inputs);
int learn(kbt_head *head, float target);
size_t kbt_state_size(const kbt_head *head);
int kbt_state_save(const kbt_head *head, void *blob, size_t bytes);
"""
HELPERS = """
#include <stdlib.h>
#include "kbt_store.h"
kbt_head *new_head(int inputs) {
  kbt_config cfg;
  kbt_head *head;
  kbt_config_single(&cfg, inputs, 1);
  return kbt_init(&cfg, aligned_alloc(64, (kbt_arena_bytes(&cfg) + 63) / 64 * 64), kbt_arena_bytes(&cfg), &head)
             ? NULL : head;
}
int learn(kbt_head *head, float target) {
  const float h[4] = {1, 2, 3, 4};
  return kbt_update(head, h, 1, &target, NULL, 0, NULL);
}
"""
OK, EMPTY, E_STATE, E_SIZE, E_FLASH = range(5)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[cffi.FFI, Any]:
    cc = compiler("cc", "gcc", "clang")
    if cc is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("store")
    (folder / "helpers.c").write_text(HELPERS)
    core = installed("lib/libkbt.so")
    options = ("-std=c11", "-O1", "-fPIC", "-shared", f"-I{CSRC}/include", f"-Wl,-rpath,{core.parent}")
    run(cc, *options, folder / "helpers.c", CSRC / "abi/store.c", core, "-o", folder / "store.so")
    ffi = cffi.FFI()
    ffi.cdef(DECLARED)
    return ffi, ffi.dlopen(str(folder / "store.so"))


class Flash:
    """Two slots that do what flash does, and what it should not."""

    def __init__(self, ffi: cffi.FFI, C: Any, slot_bytes: int = 1024) -> None:
        self.ffi, self.C = ffi, C
        self.slots = [np.full(1024, 0xFF, np.uint8) for _ in range(2)]
        self.erase_fails = False
        self.writes_left = 10**6  # until one fails
        self.stuck = False  # a bit that silently cannot be written
        self._erase = ffi.callback("int(void *, int)", self.erase)
        self._write = ffi.callback("int(void *, int, uint32_t, const void *, uint32_t)", self.write)
        self.store = ffi.new("kbt_store *", {"slot_bytes": slot_bytes, "erase": self._erase, "write": self._write})
        for i, slot in enumerate(self.slots):
            self.store.slot[i] = ffi.cast("void *", slot.ctypes.data)

    def erase(self, _: Any, slot: int) -> int:
        if self.erase_fails:
            return 1
        self.slots[slot][:] = 0xFF
        return 0

    def write(self, _: Any, slot: int, offset: int, data: Any, count: int) -> int:
        self.writes_left -= 1
        if self.writes_left < 0:
            return 5
        self.slots[slot][offset : offset + count] = np.frombuffer(self.ffi.buffer(data, count), np.uint8)
        if self.stuck and offset > 0:
            self.slots[slot][offset] ^= 1
        return 0

    def save(self, head: Any) -> int:
        return int(self.C.kbt_store_save(self.store, head))

    def load(self, head: Any) -> int:
        return int(self.C.kbt_store_load(self.store, head))


@pytest.fixture
def flash(library: tuple[cffi.FFI, Any]) -> Flash:
    return Flash(*library)


def state(flash: Flash, head: Any) -> bytes:
    blob = flash.ffi.new("char[]", flash.C.kbt_state_size(head))
    assert flash.C.kbt_state_save(head, blob, len(blob)) == 0
    return bytes(flash.ffi.buffer(blob))


def test_a_new_device_is_empty_and_keeps_its_head(flash: Flash) -> None:
    head = flash.C.new_head(4)
    before = state(flash, head)
    assert flash.load(head) == EMPTY
    assert state(flash, head) == before


@pytest.mark.parametrize("slot_bytes", [0, 63, 64, 128])
def test_a_slot_that_is_too_small_is_never_touched(library: tuple[cffi.FFI, Any], slot_bytes: int) -> None:
    flash = Flash(*library, slot_bytes)
    head = flash.C.new_head(4)
    assert flash.save(head) == E_SIZE
    assert flash.load(head) == EMPTY
    assert all((slot == 0xFF).all() for slot in flash.slots)


def test_no_head_is_rejected(flash: Flash) -> None:
    assert flash.save(flash.ffi.NULL) == E_SIZE


def fails_to_erase(flash: Flash) -> None:
    flash.erase_fails = True


def fails_to_write_at_once(flash: Flash) -> None:
    flash.writes_left = 0


def fails_to_write_the_header(flash: Flash) -> None:
    flash.writes_left = -(-flash.C.kbt_state_size(flash.C.new_head(4)) // 64)


def writes_a_wrong_bit(flash: Flash) -> None:
    flash.stuck = True


@pytest.mark.parametrize(
    "fault", [fails_to_erase, fails_to_write_at_once, fails_to_write_the_header, writes_a_wrong_bit]
)
def test_flash_that_fails_is_reported_and_the_old_state_stays(flash: Flash, fault: Any) -> None:
    head, again = flash.C.new_head(4), flash.C.new_head(4)
    assert flash.C.learn(head, 1.0) == 0
    assert flash.save(head) == OK
    old = state(flash, head)
    assert flash.C.learn(head, 2.0) == 0
    fault(flash)
    assert flash.save(head) == E_FLASH
    assert flash.load(again) == OK
    assert state(flash, again) == old
    flash.erase_fails, flash.writes_left, flash.stuck = False, 10**6, False
    assert flash.save(head) == OK
    assert flash.load(again) == OK
    assert state(flash, again) == state(flash, head) != old


def test_a_state_of_another_configuration_is_rejected_and_changes_nothing(flash: Flash) -> None:
    head, other = flash.C.new_head(4), flash.C.new_head(3)
    assert flash.save(head) == OK
    before = state(flash, other)
    assert flash.load(other) == E_STATE
    assert state(flash, other) == before
