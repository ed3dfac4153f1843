"""The trunk T1 (method.md §1): a frozen ONNX file that turns a state, or token ids, into hidden rows h of width d.

    trunk = Trunk("trunk.onnx")
    h = trunk(x)                # (rows, d) float32

Two backends run the same file. ``compiled``: C for exactly this network, built once on this machine and cached
(``build.py``); the fastest for most trunks of control loops, without heap. ``onnxruntime``: any operator, any
provider, large trunks. ``auto`` takes the one that was faster in a comparison at build time; ``backend_reason`` says
why.

The constructor checks the file, fixes all shapes and runs the trunk once. Each call checks its input and its output, so
h is always finite.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from kbt_edge._files import read_bounded
from kbt_edge.errors import (
    BackendError,
    BundleError,
    KbtError,
    MissingError,
    NumericsError,
    RangeError,
    ShapeError,
    UnfitError,
)
from kbt_edge.onnxfile import MAX_BYTES, OnnxModel, read_onnx
from kbt_edge.trunk.build import library
from kbt_edge.trunk.compiled import Compiled
from kbt_edge.trunk.inputs import Float32, Runner, Slot, TensorSpec, declared_inputs, declared_output
from kbt_edge.trunk.onnxruntime import Onnxruntime
from kbt_edge.trunk.source import CArray

__all__ = ["Backend", "Trunk"]

Backend = Literal["auto", "compiled", "onnxruntime"]

AGREEMENT: Final = 1e-4  # of a fresh library with onnxruntime, relative to the largest output; rounding stays far below
# A fresh library is compared, and both are timed, in at least COMPARED runs; then for COMPARE_SECONDS, or TIMED runs.
COMPARED: Final = 24
TIMED: Final = 400
COMPARE_SECONDS: Final = 0.5
# Ratio of medians up to which the two count as equally fast, and the library without heap is taken. A repeated
# comparison moves by 2 % (tools/trunks.py).
EQUAL: Final = 1.05

_C_TYPES: Final = {"float32": "float", "int64": "int64_t"}


class Trunk:
    """``Trunk(file)``, with ``file`` a path or the bytes of an ONNX file; then ``trunk(x)``, ``trunk(source, target)``.

    ``providers`` are onnxruntime's and therefore choose that backend; ``cache_dir`` is where compiled trunks are kept
    (default ``~/.cache/kbt_edge/trunks``). A file of more than ``max_bytes`` is rejected; raise it for a large network
    that you trust. One object belongs to one thread, because its buffers are reused; make another for another thread.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | bytes,
        *,
        backend: Backend = "auto",
        providers: Sequence[Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if backend not in get_args(Backend):
            raise RangeError(f"backend: expected 'auto', 'compiled' or 'onnxruntime', got {backend!r}")
        if backend == "compiled" and providers is not None:
            raise RangeError("providers are onnxruntime's; they cannot be combined with backend='compiled'")
        data = file if isinstance(file, bytes) else read_bounded(file, max_bytes, "max_bytes")
        model = read_onnx(data, max_bytes)
        self._sha256 = hashlib.sha256(data).hexdigest()
        self._operators = model.operators
        self._inputs = declared_inputs(model)
        self._output_name, self._output_shape = declared_output(model)
        self._rows = math.prod(self._output_shape[:-1])
        self._d = self._output_shape[-1]

        self._slots = tuple(map(Slot, self._inputs))
        self._h: Float32 = np.zeros((self._rows, self._d), np.float32)
        self._runner, self._backend_reason = self._choose(data, model, backend, providers, cache_dir)
        self._backend = self._runner.name
        self._warm_up()

    def __call__(self, *inputs: npt.ArrayLike, copy: bool = False) -> Float32:
        """Run the trunk: one array per input → h, (rows, d).

        An input may leave out leading axes of length 1. The result is a buffer that the next call overwrites, unless
        ``copy``. A rejected input leaves the previous h in place.
        """
        if len(inputs) != len(self._inputs):
            names = ", ".join(spec.name for spec in self._inputs)
            raise ShapeError(f"trunk: expected {len(self._inputs)} inputs ({names}), got {len(inputs)}")
        for slot, value in zip(self._slots, inputs, strict=True):
            slot.fill(value)
        if self._runner.run() != 0:
            raise self._rejection()
        return self._h.copy() if copy else self._h

    def pipeline_ends(self) -> tuple[int, Float32, Float32] | None:
        """For a trunk of one float32 input: the address of its C function (0 if it has none), its input buffer and h.

        The core runs the trunk with these. They live as long as this object. None for other trunks.
        """
        if len(self._slots) != 1 or self._inputs[0].dtype != "float32":
            return None
        address = self._runner.address() if isinstance(self._runner, Compiled) else 0
        return address, self._slots[0].buffer, self._h

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def d(self) -> int:
        return self._d

    @property
    def backend(self) -> Literal["compiled", "onnxruntime"]:
        return self._backend

    @property
    def backend_reason(self) -> str:
        """Why this backend was chosen."""
        return self._backend_reason

    @property
    def operators(self) -> dict[str, int]:
        """Operator → how often the file uses it, sorted by name."""
        return dict(self._operators)

    @property
    def sha256(self) -> str:
        """Of the ONNX file, in hexadecimal."""
        return self._sha256

    def __repr__(self) -> str:
        inputs = ", ".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in self._inputs)
        return f"Trunk({inputs} -> ({self._rows}, {self._d}), backend={self._backend!r}, sha256={self._sha256[:12]})"

    # Choosing and starting a backend.

    def _choose(
        self,
        data: bytes,
        model: OnnxModel,
        backend: Backend,
        providers: Sequence[Any] | None,
        cache_dir: str | os.PathLike[str] | None,
    ) -> tuple[Runner, str]:
        reason = "asked for" if backend == "onnxruntime" else "providers were given"
        compiled: tuple[Runner, str] | None = None
        if backend == "compiled" or (backend == "auto" and providers is None):
            try:
                build = library(
                    data,
                    model,
                    [CArray(spec.shape, _C_TYPES[spec.dtype], spec.limit) for spec in self._inputs],
                    CArray(self._output_shape, "float"),
                    None if cache_dir is None else Path(cache_dir),
                    check=lambda path: self._compare_with_onnxruntime(data, path),
                )
                compiled = Compiled(build.path, self._slots, self._h), str(build)
                slower = _slower(build.record)
                if backend == "compiled" or slower is None:
                    return compiled
                reason = slower
            except BackendError as error:
                if backend == "compiled":
                    raise
                reason = f"not compiled: {error}"
        try:
            return self._run_onnxruntime(data, providers), reason
        except BackendError as error:
            if compiled is not None:
                return compiled
            raise BackendError(f"{error} ({reason})") from None

    def _run_onnxruntime(self, data: bytes, providers: Sequence[Any] | None) -> Onnxruntime:
        return Onnxruntime(data, providers, self._slots, self._output_name, self._output_shape, self._h)

    def _warm_up(self) -> None:
        """Run twice, so that memory is allocated before the first step of a control loop."""
        statuses = []
        for value in (0, 1):  # a valid network may divide by zero in one of them; only a damaged one fails in both
            for slot in self._slots:
                slot.buffer.fill(value if slot.spec.limit != 1 else 0)
            statuses.append(self._runner.run())
        if statuses == [2, 2]:
            raise BundleError("trunk: its output is finite neither for zeros nor for ones; its weights are damaged")
        self._h.fill(0.0)

    def _compare_with_onnxruntime(self, data: bytes, path: Path) -> dict[str, Any]:
        """Compare a freshly built library with onnxruntime, if installed, and reject it if they disagree.

        The times are recorded too, of runs that take turns, so that whatever else the machine does slows both down.
        """
        try:
            reference = self._run_onnxruntime(data, None)
        except MissingError:
            return {"check": "onnxruntime is not installed"}
        compiled = Compiled(path, self._slots, self._h)
        rng = np.random.default_rng(0)
        worst = 0.0
        times: dict[str, list[float]] = {reference.name: [], compiled.name: []}
        begun = time.perf_counter()
        for turn in range(TIMED):
            if turn >= COMPARED and time.perf_counter() - begun > COMPARE_SECONDS:
                break
            for slot in self._slots:
                if slot.spec.dtype == "float32":
                    slot.buffer[...] = rng.standard_normal(slot.spec.shape)
                else:
                    slot.buffer[...] = rng.integers(0, slot.spec.limit or 1, slot.spec.shape)
            h = {}
            for runner in (reference, compiled) if turn % 2 else (compiled, reference):
                start = time.perf_counter()
                status = runner.run()
                times[runner.name].append(time.perf_counter() - start)
                h[runner.name] = self._h.copy() if status == 0 else np.full_like(self._h, np.nan)
            expected = h[reference.name]
            if not np.isfinite(expected).all():
                continue  # not a valid input of this trunk
            difference = float(np.abs(h[compiled.name] - expected).max()) / max(float(np.abs(expected).max()), 1e-30)
            if not difference <= AGREEMENT:
                raise UnfitError(f"the compiled trunk differs from onnxruntime by {difference:.1e} of its output")
            worst = max(worst, difference)
        return {
            "check": f"onnxruntime {reference.version}: largest relative difference {worst:.1e}",
            **{f"{name}_us": round(1e6 * float(np.median(taken)), 1) for name, taken in times.items()},
        }

    def _rejection(self) -> KbtError:
        """Why the runner rejected the values now in the buffers."""
        for slot in self._slots:
            error = slot.rejection()
            if error is not None:
                return error
        return NumericsError("trunk: its output is not finite; an input is too large for this network")


def _slower(record: Mapping[str, Any]) -> str | None:
    """The reason to prefer onnxruntime, if it was faster when the library was built on this machine."""
    compiled, other = record.get("compiled_us"), record.get("onnxruntime_us")
    if isinstance(compiled, float) and isinstance(other, float) and compiled > EQUAL * other:
        return f"compiled, this trunk took {compiled} µs, onnxruntime {other} µs"
    return None
