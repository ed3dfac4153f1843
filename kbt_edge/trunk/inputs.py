"""The inputs and the output that a trunk's file declares, and their buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.onnxfile import ELEMENT_TYPES, OnnxModel, Value, token_limits

__all__ = ["Float32", "Runner", "Slot", "TensorSpec", "declared_inputs", "declared_output"]

Float32 = npt.NDArray[np.float32]

MAX_ELEMENTS: Final = 2**22  # of one input or output: a file of a few bytes can declare any shape


@dataclass(frozen=True)
class TensorSpec:
    """A named input. For integer inputs ``limit`` is the number of valid ids 0 … limit-1, if the file determines it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32" or "int64"
    limit: int | None = None


def declared_inputs(model: OnnxModel) -> tuple[TensorSpec, ...]:
    if not model.graph.inputs:
        raise BundleError("trunk: the ONNX file has no inputs")
    limits = token_limits(model.graph)
    specs = []
    for value in model.graph.inputs:
        dtype = ELEMENT_TYPES.get(value.element_type, ("another type", 0))[0]
        if dtype not in ("float32", "int64"):
            raise BundleError(f"trunk: input {value.name!r} must be float32 or int64, the file declares {dtype}")
        specs.append(TensorSpec(value.name, _static_shape("input", value), dtype, limits.get(value.name)))
    return tuple(specs)


def declared_output(model: OnnxModel) -> tuple[str, tuple[int, ...]]:
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


class Slot:
    """The buffer of one input, and the checks of what is copied into it."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.buffer: npt.NDArray[Any] = np.zeros(spec.shape, spec.dtype)
        leading_ones = next((axis for axis, length in enumerate(spec.shape) if length != 1), len(spec.shape) - 1)
        self._shapes = {spec.shape[axis:] for axis in range(leading_ones + 1)}
        # float64 becomes float32, ids are converted without loss, booleans are rejected.
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
            with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, and are rejected by name
                self.buffer[...] = array
        else:
            self.buffer[...] = array

    def rejection(self) -> KbtError | None:
        """The error for the first invalid value, by the rules of the compiled library."""
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


class Runner(Protocol):
    """Runs the network on the trunk's input buffers. 0: h is written. 1: an input value, 2: an output is rejected."""

    @property
    def name(self) -> Literal["compiled", "onnxruntime"]: ...

    def run(self) -> int: ...
