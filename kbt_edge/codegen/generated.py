"""Software in the loop: C that ``kbt-edge codegen`` wrote, compiled for this computer, with the methods of ``Model``.

    policy = load_generated("cartpole_c")
    p = policy.predict(x)
    policy.observe(y)

It runs the sources of the firmware, with the same operations in the same order.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, cast, labels_array, plain_array, shape_error
from kbt_edge._status import status_error
from kbt_edge.codegen import manifest
from kbt_edge.codegen.toolchain import build_objects, call, find_compiler
from kbt_edge.errors import BackendError, BundleError, DtypeError, RangeError, ShapeError
from kbt_edge.results import Prediction, Update, prediction

__all__ = ["Flash", "Generated", "load_generated"]


def load_generated(folder: str | os.PathLike[str]) -> Generated:
    """The policy in a folder that ``kbt-edge codegen`` wrote, compiled for this computer.

    It runs the C of that folder: as with any program, load only what you trust. Needs a C and a C++ compiler.
    """
    return Generated(Path(folder))


_BUILT: Final[dict[str, bytes]] = {}  # libraries that this process has built, by the SHA-256 of their sources


def _built(folder: Path) -> bytes:
    """The folder as a shared library of this computer."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".c", ".cpp", ".h", ".hpp"))
    digest = hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()
    if digest not in _BUILT:
        cc, cxx = find_compiler("CC", "cc", "gcc", "clang"), find_compiler("CXX", "c++", "g++", "clang++")
        with tempfile.TemporaryDirectory(prefix="kbt-generated-") as scratch:
            copy = Path(shutil.copytree(folder, Path(scratch) / "source"))
            objects = build_objects(copy, cc, cxx, ("-fPIC",), ("-O1",))
            call([*cxx, "-shared", "-o", str(copy / "policy.so"), *map(str, objects), "-lm"])
            _BUILT[digest] = (copy / "policy.so").read_bytes()
    return _BUILT[digest]


class Flash:
    """Two slots of simulated flash. ``budget``: how many more bytes change before the power fails; None: no failure."""

    def __init__(self, slot_bytes: int) -> None:
        self.slots = [bytearray(b"\xff" * slot_bytes) for _ in range(2)]
        self.budget: int | None = None

    def change(self, slot: int, offset: int, data: bytes) -> int:
        count = len(data) if self.budget is None else min(len(data), self.budget)
        if self.budget is not None:
            self.budget -= count
        self.slots[slot][offset : offset + count] = data[:count]
        return 0 if count == len(data) else 1


class Generated:
    """Generated C with the methods of ``Model``. Each object has its own memory and belongs to one thread."""

    def __init__(self, folder: Path) -> None:
        self._about = about = manifest.read(folder)
        self._name = about["name"]
        cffi: Any = importlib.import_module("cffi")
        self._ffi = ffi = cffi.FFI()
        ffi.cdef(_declarations(about))
        with tempfile.TemporaryDirectory(prefix="kbt-generated-") as scratch:
            library = Path(scratch) / "policy.so"  # its own file: a file loaded twice would share its memory
            library.write_bytes(_built(folder))
            try:
                self._library: Any = ffi.dlopen(str(library))
            except OSError as error:
                raise BackendError(f"{folder}: the compiled policy cannot be loaded: {error}") from error
        self._rows, self._outputs = int(about["rows"]), int(about["outputs"])
        self._shape = (self._outputs,) if self._rows == 1 else (self._rows, self._outputs)
        self._calls = 0  # calls that may replace the latest prediction
        self._must(self._function("init")())
        self._head = self._function("head")()
        self.flash = Flash(int(about["slot_bytes"]))
        self._store = self._make_store()

    def predict(self, *x: npt.ArrayLike) -> Prediction:
        """As ``Model.predict``, one array per input."""
        specs = self._about["inputs"]
        if len(x) != len(specs):
            raise ShapeError(f"x: expected {len(specs)} inputs, got {len(x)}")
        arrays = [self._input(spec, value) for spec, value in zip(specs, x, strict=True)]
        count = self._rows * self._outputs
        mean, cov, total_var = np.empty(self._shape), np.empty((count, count)), np.empty(self._shape)
        self._calls += 1
        self._must(self._function("predict")(*map(self._pointer, (*arrays, mean, cov, total_var))))
        return prediction(mean, np.diagonal(cov).reshape(self._shape), total_var, cov)

    def observe(self, y: npt.ArrayLike) -> Update:
        """As ``Model.observe``: the target of the latest prediction; for a softmax class labels or probabilities."""
        calls = self._calls
        given = plain_array("y", y)  # converting can run any code, and with it this policy
        if self._calls != calls:
            raise RangeError(
                "observe: the policy was used while y was being converted to an array, so the latest prediction is "
                "another one now; pass a NumPy array",
                _core.E_ORDER,
            )
        result = self._ffi.new("kbt_result *")
        labels = () if self._rows == 1 else (self._rows,)
        if self._about["output"] == "softmax" and given.dtype.kind in "iu" and given.shape == labels:
            verb, target = "observe_labels", labels_array("y", given, self._outputs)
        else:
            verb, target = "observe", cast("y", given, np.float64)
            if target.shape != self._shape and not (target.shape == () and self._shape == (1,)):
                raise shape_error("y", str(self._shape) + " or a number" * (self._shape == (1,)), target)
        self._calls += 1
        status = self._function(verb)(self._pointer(target), result)
        if status != _core.GATED:
            self._must(status)
        return Update(
            "gated" if status == _core.GATED else "ok", result.nis, result.log_likelihood, bool(result.changed)
        )

    def update(self, x: npt.ArrayLike | tuple[npt.ArrayLike, ...], y: npt.ArrayLike) -> Update:
        """``predict`` and ``observe``; several inputs as a tuple."""
        self.predict(*(x if isinstance(x, tuple) else (x,)))
        return self.observe(y)

    @property
    def samples(self) -> int:
        """How many samples the head has learned."""
        return int(self._library.kbt_samples(self._head))

    def to_bytes(self) -> bytes:
        """The head's state, as ``Model.head.to_bytes``."""
        blob = self._ffi.new("unsigned char[]", int(self._library.kbt_state_size(self._head)))
        self._must(self._library.kbt_state_save(self._head, blob, len(blob)))
        return bytes(self._ffi.buffer(blob))

    def restart(self) -> None:
        """As after power on: the state that the folder holds. The simulated flash stays as it is."""
        self._calls += 1
        self._must(self._function("init")())

    def save(self) -> None:
        """The state to the simulated flash, as the firmware does it."""
        self._stored(self._function("save")(self._store))

    def load(self) -> None:
        """The newest complete state from the simulated flash."""
        self._calls += 1
        self._stored(self._function("load")(self._store))

    def __repr__(self) -> str:
        return f"Generated({self._name}, {self.samples} samples)"

    def _function(self, verb: str) -> Any:
        return getattr(self._library, f"{self._name}_{verb}")

    def _input(self, spec: Mapping[str, Any], value: npt.ArrayLike) -> Array:
        name, shape = f"input {spec['name']!r}", tuple(spec["shape"])
        given = plain_array(name, value)
        if spec["dtype"] == "int64" and given.dtype.kind not in "iu":
            raise DtypeError(f"{name}: expected integer ids, got {given.dtype}")
        array = cast(name, given, np.int64 if spec["dtype"] == "int64" else np.float64)
        if array.size != math.prod(shape) or array.shape != shape[len(shape) - array.ndim :]:
            raise shape_error(name, str(shape), array)
        return array

    def _pointer(self, array: Array) -> Any:
        kinds = {"f8": "double *", "i8": "int64_t *", "i4": "int32_t *"}
        return self._ffi.cast(kinds[array.dtype.str[1:]], array.ctypes.data)

    def _must(self, status: int) -> None:
        if status != _core.OK:
            raise status_error(status)

    def _make_store(self) -> Any:
        ffi, flash = self._ffi, self.flash

        def erase(_: Any, slot: int) -> int:
            return flash.change(slot, 0, b"\xff" * len(flash.slots[slot]))

        def write(_: Any, slot: int, offset: int, data: Any, count: int) -> int:
            return flash.change(slot, offset, bytes(ffi.buffer(data, count)))

        self._callbacks = (
            ffi.callback("int(void *, int)", erase),
            ffi.callback("int(void *, int, uint32_t, const void *, uint32_t)", write),
        )
        self._views = [ffi.from_buffer(slot) for slot in flash.slots]
        return ffi.new("kbt_store *", [self._views, len(flash.slots[0]), *self._callbacks, ffi.NULL])

    def _stored(self, status: int) -> None:
        if status != 0:
            raise BundleError(f"flash: {_STORE_WORDS.get(status, 'unknown status')}", status)


_STORE_WORDS: Final = {
    1: "neither slot holds a complete record",
    2: "the newest record is of another configuration",
    3: "the state does not fit into a slot",
    4: "erase or write failed",
}


def _declarations(about: Mapping[str, Any]) -> str:
    """The functions of NAME.h and of the core that ``Generated`` calls."""
    name = about["name"]
    inputs = ", ".join("const int64_t *" if spec["dtype"] == "int64" else "const double *" for spec in about["inputs"])
    labels = f"int {name}_observe_labels(const int32_t *, kbt_result *);" if about["output"] == "softmax" else ""
    return f"""
        typedef struct kbt_head kbt_head;
        typedef struct {{ double nis, log_likelihood; int32_t changed, spare; }} kbt_result;
        typedef struct {{
            const void *slot[2]; uint32_t slot_bytes; int (*erase)(void *, int);
            int (*write)(void *, int, uint32_t, const void *, uint32_t); void *context;
        }} kbt_store;
        int {name}_init(void);
        int {name}_predict({inputs}, double *, double *, double *);
        int {name}_observe(const double *, kbt_result *);
        {labels}
        int {name}_save(const kbt_store *);
        int {name}_load(const kbt_store *);
        kbt_head *{name}_head(void);
        uint64_t kbt_samples(const kbt_head *);
        size_t kbt_state_size(const kbt_head *);
        int kbt_state_save(const kbt_head *, void *, size_t);
    """
