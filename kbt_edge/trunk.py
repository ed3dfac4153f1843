"""The trunk T1 (METHOD §1): a frozen ONNX file that turns a state, or token ids, into hidden rows h of width d.

    trunk = Trunk("trunk.onnx")
    h = trunk(x)                # (rows, d) float32

Two ways to run the same file. ``compiled``: C for exactly this network, made once on this machine and cached
(``_compiled.py``); the fast way for the small trunks of control loops, and it never touches the heap. ``onnxruntime``:
any operator, any provider, large trunks. ``auto`` compiles where it can, unless onnxruntime was clearly faster when it
did so, and says why in ``backend_reason``.

A trunk that reaches the constructor's end has been read without trusting it, has run once, and has fixed shapes; each
call checks its input, and its output before handing it over, so h is finite.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kbt_edge._compiled import CDEF, BackendError, CArray, MissingError, UnfitError, library
from kbt_edge._files import read_bounded
from kbt_edge._onnxfile import ELEMENT_TYPES, MAX_BYTES, OnnxModel, Value, read_onnx, token_limits
from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError

__all__ = ["BackendError", "TensorSpec", "Trunk"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

MAX_ELEMENTS: Final = 2**22  # of one input or output: a file of a few bytes can declare any shape
AGREEMENT: Final = 1e-4  # of a fresh library with onnxruntime, relative to the largest output; rounding stays far below
CLEARLY: Final = 1.5  # how much faster onnxruntime must have been for ``auto`` to take it
MAX_RUN_MEMORY: Final = 2**30  # of all trunks in onnxruntime together: a small file can multiply without end
FIRST_RUN_SECONDS: Final = 60
NO_ONNXRUNTIME: Final = ("armv7l", "armv6l")  # 32-bit ARM, for which it is not published

_C_TYPES: Final = {"float32": "float", "int64": "int64_t"}


@dataclass(frozen=True)
class TensorSpec:
    """A named input. For integer inputs ``limit`` is the number of valid ids 0 … limit-1, where the file tells."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32" or "int64"
    limit: int | None = None


class Trunk:
    """``Trunk(file)``, with ``file`` a path or the bytes of an ONNX file; then ``trunk(x)``, ``trunk(source, target)``.

    ``providers`` are onnxruntime's and therefore choose that backend; ``cache_dir`` is where compiled trunks are kept
    (default ``~/.cache/kbt_edge/trunks``). One object belongs to one thread, because its buffers are reused; make
    another for another thread.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | bytes,
        *,
        backend: str = "auto",
        providers: Sequence[Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if backend not in ("auto", "compiled", "onnxruntime"):
            raise RangeError(f"backend: expected 'auto', 'compiled' or 'onnxruntime', got {backend!r}")
        if backend == "compiled" and providers is not None:
            raise RangeError("providers belong to onnxruntime, but backend='compiled' was asked for")
        data = file if isinstance(file, bytes) else read_bounded(file, MAX_BYTES)
        model = read_onnx(data)
        self._sha256 = hashlib.sha256(data).hexdigest()
        self._operators = model.operators
        self._inputs = _inputs(model)
        self._output_name, self._output_shape = _output(model)
        self._rows = math.prod(self._output_shape[:-1])
        self._d = self._output_shape[-1]

        self._slots = tuple(map(_Slot, self._inputs))
        self._h: Float32 = np.zeros((self._rows, self._d), np.float32)
        self._runner, self._backend_reason = self._choose(data, model, backend, providers, cache_dir)
        self._backend = self._runner.name
        self._warm_up()

    def __call__(self, *inputs: npt.ArrayLike, copy: bool = False) -> Float32:
        """Run the trunk: one array per input → h, (rows, d).

        An input may leave out leading axes of length 1. The result is a buffer that the next call overwrites, unless
        ``copy``. A refused input leaves the previous h in place.
        """
        if len(inputs) != len(self._inputs):
            names = ", ".join(spec.name for spec in self._inputs)
            raise ShapeError(f"trunk: expected {len(self._inputs)} inputs ({names}), got {len(inputs)}")
        for slot, value in zip(self._slots, inputs, strict=True):
            slot.fill(value)
        if self._runner.run() != 0:
            raise self._refusal()
        return self._h.copy() if copy else self._h

    run = __call__

    def pipeline_ends(self) -> tuple[int, Float32, Float32] | None:
        """What the core needs to run a trunk of one float32 input by itself: the address of its C function (0 without
        one), its input buffer and h. They live as long as this object. None for other trunks."""
        if len(self._slots) != 1 or self._inputs[0].dtype != "float32":
            return None
        address = self._runner.address() if isinstance(self._runner, _Compiled) else 0
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
    def backend(self) -> str:
        return self._backend

    @property
    def backend_reason(self) -> str:
        """Why this backend, in words for a person."""
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
        backend: str,
        providers: Sequence[Any] | None,
        cache_dir: str | os.PathLike[str] | None,
    ) -> tuple[_Runner, str]:
        reason = "asked for" if backend == "onnxruntime" else "providers were given"
        compiled: tuple[_Runner, str] | None = None
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
                compiled = _Compiled(build.path, self._slots, self._h), str(build)
                slower = _slower(build.record)
                if backend == "compiled" or slower is None:
                    return compiled
                reason = slower
            except BackendError as error:
                if backend == "compiled":
                    raise
                reason = f"not compiled: {error}"
        try:
            return self._onnxruntime(data, providers), reason
        except BackendError as error:
            if compiled is not None:
                return compiled
            raise BackendError(f"{error} ({reason})") from None

    def _onnxruntime(self, data: bytes, providers: Sequence[Any] | None) -> _Onnxruntime:
        return _Onnxruntime(data, providers, self._slots, self._output_name, self._output_shape, self._h)

    def _warm_up(self) -> None:
        """Twice, so that memory is touched and planned now and not in the first step of a control loop."""
        statuses = []
        for value in (0, 1):  # a sound network may divide by zero on one of them, only a damaged one fails on both
            for slot in self._slots:
                slot.buffer.fill(value if slot.spec.limit != 1 else 0)
            statuses.append(self._runner.run())
        if statuses == [2, 2]:
            raise BundleError("trunk: its output is finite neither for zeros nor for ones; its weights are damaged")
        self._h.fill(0.0)

    def _compare_with_onnxruntime(self, data: bytes, path: Path) -> dict[str, Any]:
        """Run a freshly built library beside onnxruntime, where that is installed, and refuse it if they disagree.

        The times go on record too: sums in a fixed order are not vectorised, so large trunks run faster there.
        """
        try:
            reference = self._onnxruntime(data, None)
        except MissingError:
            return {"check": "onnxruntime is not installed"}
        compiled = _Compiled(path, self._slots, self._h)
        rng = np.random.default_rng(0)
        worst = 0.0
        times: dict[str, list[float]] = {reference.name: [], compiled.name: []}
        for _ in range(24):
            for slot in self._slots:
                if slot.spec.dtype == "float32":
                    slot.buffer[...] = rng.standard_normal(slot.spec.shape)
                else:
                    slot.buffer[...] = rng.integers(0, slot.spec.limit or 1, slot.spec.shape)
            h = {}
            for runner in (reference, compiled):
                start = time.perf_counter()
                status = runner.run()
                times[runner.name].append(time.perf_counter() - start)
                h[runner.name] = self._h.copy() if status == 0 else np.full_like(self._h, np.nan)
            expected = h[reference.name]
            if not np.isfinite(expected).all():
                continue  # not an input that this trunk can take
            difference = float(np.abs(h[compiled.name] - expected).max()) / max(float(np.abs(expected).max()), 1e-30)
            if not difference <= AGREEMENT:
                raise UnfitError(f"the compiled trunk differs from onnxruntime by {difference:.1e} of its output")
            worst = max(worst, difference)
        return {
            "check": f"onnxruntime {reference.version}: largest relative difference {worst:.1e}",
            **{f"{name}_us": round(1e6 * float(np.median(taken)), 1) for name, taken in times.items()},
        }

    def _refusal(self) -> KbtError:
        """The reason why the runner refused what is in the buffers now."""
        for slot in self._slots:
            error = slot.refusal()
            if error is not None:
                return error
        return NumericsError("trunk: its output is not finite; an input is too large for this network")


class _Runner(Protocol):
    """Runs the network on the trunk's input buffers. 0: h is written. 1: an input value, 2: an output is refused."""

    name: str

    def run(self) -> int: ...


class _Compiled:
    """A library of ``_compiled.py`` behind cffi. It checks values itself and keeps its temporaries on the stack."""

    name = "compiled"

    def __init__(self, path: Path, slots: tuple[_Slot, ...], h: Float32) -> None:
        self.path = path
        cffi: Any = _import("cffi")
        self._ffi = ffi = cffi.FFI()
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


class _Onnxruntime:
    """One thread, all optimisations, inputs and output bound to fixed memory: the fastest way at batch 1."""

    name = "onnxruntime"

    def __init__(
        self,
        data: bytes,
        providers: Sequence[Any] | None,
        slots: tuple[_Slot, ...],
        output_name: str,
        output_shape: tuple[int, ...],
        h: Float32,
    ) -> None:
        ort: Any = _import("onnxruntime")
        self.version = str(ort.__version__)
        wanted = list(providers) if providers is not None else ["CPUExecutionProvider"]
        names = [provider if isinstance(provider, str) else provider[0] for provider in wanted]
        for provider in names:
            if provider not in ort.get_available_providers():
                raise RangeError(f"providers: expected some of {ort.get_available_providers()}, got {provider!r}")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4  # what is wrong is raised; nothing is written to a terminal
        # The bytes that were read here, as what they were read as, and in bounded memory. Constants are not computed
        # before the first run: kept side by side, those of a file of a few bytes can fill any memory.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        if _bounded_arena(ort):
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session = ort.InferenceSession(
                data, options, providers=wanted, disabled_optimizers=["ConstantFolding"]
            )
            self._binding = self._session.io_binding()
        except Exception as error:  # onnxruntime has a dozen exception types for a file it cannot run
            raise BundleError(f"onnxruntime refuses this trunk: {error}") from error
        self._slots, self._h = slots, h
        # A refused output must not reach h, so the network writes beside it.
        self._output: Float32 = np.zeros(output_shape, np.float32)
        self._rows: Float32 = self._output.reshape(h.shape)
        self._binding.bind_output(output_name, "cpu", 0, np.float32, output_shape, self._output.ctypes.data)
        self._bind_inputs()
        # On the CPU a bound input is read in place; for another device binding is what copies it there.
        self._bind_every_time = any(provider != "CPUExecutionProvider" for provider in names)
        self._run_once(ort.RunOptions())

    def _run_once(self, options: Any) -> None:
        """The first run, which is ended if it takes too long. Without loops no other takes much longer."""
        timer = threading.Timer(FIRST_RUN_SECONDS, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            self._session.run_with_iobinding(self._binding, options)
        except Exception as error:
            if not timer.is_alive():
                raise BundleError(f"the trunk did not finish within {FIRST_RUN_SECONDS} s") from None
            raise BackendError(f"onnxruntime failed to run the trunk: {error}") from error
        finally:
            timer.cancel()

    def _bind_inputs(self) -> None:
        for slot in self._slots:
            spec, buffer = slot.spec, slot.buffer
            self._binding.bind_input(spec.name, "cpu", 0, buffer.dtype, spec.shape, buffer.ctypes.data)

    def run(self) -> int:
        if any(slot.refusal() is not None for slot in self._slots):
            return 1
        try:
            if self._bind_every_time:
                self._bind_inputs()
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"onnxruntime failed to run the trunk: {error}") from error
        if not np.isfinite(self._rows).all():
            return 2
        np.copyto(self._h, self._rows)
        return 0


def _slower(record: Mapping[str, Any]) -> str | None:
    """The reason to prefer onnxruntime, if it was clearly faster when the library was built on this machine."""
    compiled, other = record.get("compiled_us"), record.get("onnxruntime_us")
    if isinstance(compiled, float) and isinstance(other, float) and compiled > CLEARLY * other:
        return f"compiled, this trunk took {compiled} µs, onnxruntime {other} µs"
    return None


@functools.cache
def _bounded_arena(ort: Any) -> bool:
    """Give the trunks of this process one limited arena. False where this onnxruntime has none to give."""
    try:
        place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": MAX_RUN_MEMORY}))
    except Exception:  # of the types of onnxruntime; without the limit everything works as well
        return False
    return True


def _import(name: str) -> Any:
    if name == "onnxruntime":  # its threads would report to its maker over the network, from within a control loop
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        machine = platform.machine()
        if name == "onnxruntime" and machine in NO_ONNXRUNTIME:
            way = "backend='compiled' runs the trunk without it, from a library built here or found in the cache"
            raise MissingError(f"onnxruntime does not exist for {machine}; {way}") from error
        raise MissingError(f"{name} is not installed (pip install {name})") from error


# The file and what it declares.


def _inputs(model: OnnxModel) -> tuple[TensorSpec, ...]:
    if not model.graph.inputs:
        raise BundleError("trunk: the ONNX file has no inputs")
    limits = token_limits(model.graph)
    specs = []
    for value in model.graph.inputs:
        dtype = ELEMENT_TYPES.get(value.element_type, ("another type", 0))[0]
        if dtype not in _C_TYPES:
            raise BundleError(f"trunk: input {value.name!r} must be float32 or int64, the file declares {dtype}")
        specs.append(TensorSpec(value.name, _static_shape("input", value), dtype, limits.get(value.name)))
    return tuple(specs)


def _output(model: OnnxModel) -> tuple[str, tuple[int, ...]]:
    if len(model.graph.outputs) != 1:
        raise BundleError(f"trunk: expected one output, the hidden rows, the file has {len(model.graph.outputs)}")
    value = model.graph.outputs[0]
    shape = _static_shape("output", value)
    if value.element_type != 1 or len(shape) > 3 or (len(shape) == 3 and shape[0] != 1):
        dtype = ELEMENT_TYPES.get(value.element_type, ("another type", 0))[0]
        raise BundleError(
            f"trunk: output {value.name!r} must be float32 of shape (d,), (rows, d) or (1, rows, d), "
            f"the file declares {dtype} {shape}"
        )
    return value.name, shape


def _static_shape(kind: str, value: Value) -> tuple[int, ...]:
    shape = tuple(length for length in value.shape or () if isinstance(length, int) and length > 0)
    if not shape or len(shape) != len(value.shape or ()):
        raise BundleError(
            f"trunk: {kind} {value.name!r} must have a fixed shape without empty axes, "
            f"the file declares {value.shape}; export it with static shapes"
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise BundleError(f"trunk: {kind} {value.name!r} of shape {shape} has more than {MAX_ELEMENTS} elements")
    return shape


# The input of one call.


class _Slot:
    """The buffer of one input and what may be copied into it."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.buffer: Array = np.zeros(spec.shape, spec.dtype)
        leading_ones = next((axis for axis, length in enumerate(spec.shape) if length != 1), len(spec.shape) - 1)
        self._shapes = {spec.shape[axis:] for axis in range(leading_ones + 1)}
        # float64 states become float32; ids never lose a bit; a truth value is neither.
        casting: Literal["same_kind", "safe"] = "same_kind" if spec.dtype == "float32" else "safe"
        self._types = {np.dtype(kind).type for kind in "bBhHiIlLqQefdg" if np.can_cast(kind, spec.dtype, casting)}

    def fill(self, value: npt.ArrayLike) -> None:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ShapeError(f"trunk input {self.spec.name!r}: expected shape {self.spec.shape}: {error}") from None
        if array.dtype.type not in self._types:
            raise DtypeError(f"trunk input {self.spec.name!r}: expected {self.spec.dtype}, got {array.dtype}")
        if array.shape not in self._shapes:
            raise ShapeError(f"trunk input {self.spec.name!r}: expected shape {self.spec.shape}, got {array.shape}")
        if array.dtype.itemsize > self.buffer.dtype.itemsize:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused by name
                self.buffer[...] = array
        else:
            self.buffer[...] = array

    def refusal(self) -> KbtError | None:
        """The error for the first value that this input cannot take; the compiled library judges alike."""
        buffer, limit = self.buffer, self.spec.limit
        if self.spec.dtype == "float32":
            good, expected = np.isfinite(buffer), "finite values"
        elif limit is not None:
            good, expected = (buffer >= 0) & (buffer < limit), f"ids from 0 to {limit - 1}"
        else:
            return None
        if good.all():
            return None
        where = np.unravel_index(int(good.argmin()), buffer.shape)
        message = (
            f"trunk input {self.spec.name!r}: expected {expected}, got {buffer[where]} at {tuple(map(int, where))}"
        )
        return NumericsError(message) if self.spec.dtype == "float32" else RangeError(message)
