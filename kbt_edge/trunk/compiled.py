"""Runs a trunk as compiled C."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kbt_edge.errors import BackendError, MissingError
from kbt_edge.trunk.inputs import Float32, Slot
from kbt_edge.trunk.source import CDEF

__all__ = ["Compiled"]


class Compiled:
    """A library made by ``build.py``, called through cffi. It checks values itself and allocates nothing."""

    name: Final = "compiled"

    def __init__(self, path: Path, slots: tuple[Slot, ...], h: Float32) -> None:
        try:
            import cffi
        except ImportError as error:
            raise MissingError("cffi is not installed (pip install cffi)") from error
        self._ffi: Any = cffi.FFI()
        ffi = self._ffi
        ffi.cdef(CDEF)
        try:
            self._library = ffi.dlopen(str(path))
            self._function = self._library.kbt_trunk_run
        except (OSError, AttributeError) as error:
            raise BackendError(f"the compiled trunk {path} cannot be loaded: {error}") from error
        self._views = [ffi.from_buffer(array) for array in (*(slot.buffer for slot in slots), h)]  # keep them alive
        self._pointers = ffi.new("const void *[]", self._views[:-1])
        self._h = ffi.cast("float *", self._views[-1])

    def run(self) -> int:
        status: int = self._function(self._pointers, self._h)
        return status

    def address(self) -> int:
        return int(self._ffi.cast("uintptr_t", self._function))
