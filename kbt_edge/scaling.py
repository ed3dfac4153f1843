"""The scaling of a model's inputs and outputs: checks of the arguments.

The trunk gets (x - mean) / scale, and the head's output u means y = offset + scale · u. The arithmetic itself is in
csrc/abi/policy.c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge import bundle as bundles
from kbt_edge._arrays import Array, real_array, shape_error
from kbt_edge.bundle import BundleInput
from kbt_edge.errors import NumericsError, RangeError
from kbt_edge.trunk import TensorSpec

__all__ = [
    "ScaledInput",
    "Scaling",
    "check_scaled",
    "log_scale_of",
    "numbers",
    "per_output",
    "scaled_inputs",
    "scaled_noise",
]

Scaling = npt.ArrayLike | Mapping[str, npt.ArrayLike]  # one for all inputs, or by the name of the input


def scaled_inputs(specs: tuple[TensorSpec, ...], mean: Scaling, scale: Scaling) -> list[ScaledInput]:
    """The inputs of a trunk with their scaling, as ``Model`` takes it."""
    means, scales = _by_input("input_mean", mean, specs, 0.0), _by_input("input_scale", scale, specs, 1.0)
    return [ScaledInput(spec, means[spec.name], scales[spec.name]) for spec in specs]


class ScaledInput:
    """One input of the trunk: its scaling, and the buffer for the scaled numbers. Token ids are not scaled."""

    def __init__(self, spec: TensorSpec, mean: npt.ArrayLike, scale: npt.ArrayLike) -> None:
        self.spec, self.name, self.is_real = spec, f"input {spec.name!r}", spec.dtype == "float32"
        self.mean: Array = numbers(f"input_mean of {spec.name!r}", mean, spec.shape[-1], -bundles.MAX_MAGNITUDE)
        self.scale: Array = numbers(f"input_scale of {spec.name!r}", scale, spec.shape[-1], 1 / bundles.MAX_MAGNITUDE)
        self.buffer: Array = np.zeros(spec.shape, np.float32)
        ones = next((axis for axis, length in enumerate(spec.shape) if length != 1), len(spec.shape) - 1)
        self.shapes = {spec.shape[axis:] for axis in range(ones + 1)}  # leading axes of length 1 may be left out

    def for_policy(self) -> tuple[Array | None, list[float], list[float]]:
        if not self.is_real:
            return None, [], []
        mean, scale = (np.broadcast_to(values, self.spec.shape[-1:]).tolist() for values in (self.mean, self.scale))
        return self.buffer, mean, scale

    def described(self) -> BundleInput:
        spec = self.spec
        if not self.is_real:
            return BundleInput(spec.name, spec.shape, spec.dtype)
        return BundleInput(spec.name, spec.shape, spec.dtype, tuple(self.mean.tolist()), tuple(self.scale.tolist()))


def per_output(scale: npt.ArrayLike, outputs: int) -> Array:
    """``output_scale`` as one number for each output."""
    return np.broadcast_to(numbers("output_scale", scale, outputs, 1 / bundles.MAX_MAGNITUDE), (outputs,))


def scaled_noise(noise_var: npt.ArrayLike, scales: Array) -> Array:
    """A variance, variances or covariance matrix of y as those of u, for one scale per output."""
    array = real_array("noise_var", noise_var, np.float64)
    n = len(scales)
    if array.shape not in ((), (1,), (n,), (n, n)):
        raise shape_error("noise_var", f"a number, ({n},) or ({n}, {n})", array)
    variances = np.diagonal(array) if array.ndim == 2 else array
    if (variances < 0).any():
        raise RangeError(f"noise_var: expected variances >= 0, got {variances.min()}")
    return _core.scale_noise(array, scales)


def log_scale_of(scale: Sequence[float], rows: int) -> float:
    """The difference of a log density in physical units: the logarithm of every scale, once per row."""
    return sum(rows * math.log(value) for value in scale)


def check_scaled(name: str, value: Array, scaled: Array) -> None:
    if not np.isfinite(scaled).all():
        worst = value.flat[int(np.argmax(~np.isfinite(scaled)))]
        raise NumericsError(f"{name}: expected numbers that fit into {scaled.dtype.name} after scaling, got {worst}")


def numbers(name: str, value: npt.ArrayLike, features: int, low: float) -> Array:
    """One number, or one per feature, each from ``low`` to 1e30."""
    array = np.atleast_1d(real_array(name, value, np.float64))
    if array.shape not in ((1,), (features,)):
        raise shape_error(name, f"a number or ({features},)", array)
    if not ((array >= low) & (array <= bundles.MAX_MAGNITUDE)).all():
        raise RangeError(f"{name}: expected numbers from {low:g} to {bundles.MAX_MAGNITUDE:g}, got {array}")
    return array


def _by_input(name: str, value: Scaling, specs: tuple[TensorSpec, ...], neutral: float) -> dict[str, npt.ArrayLike]:
    """The scaling of each input. A single number is for all inputs of real numbers."""
    scalable = [spec.name for spec in specs if spec.dtype == "float32"]
    if isinstance(value, Mapping):
        given = dict(value)
    elif len(scalable) == 1 or (scalable and np.ndim(value) == 0):
        given = dict.fromkeys(scalable, value)
    elif not scalable and np.ndim(value) == 0 and value == neutral:
        given = {}
    else:
        raise RangeError(f"{name}: expected a dict with some of the inputs {scalable}, got {value!r}")
    unknown = sorted(set(map(str, given)) - set(scalable))
    if unknown:
        raise RangeError(f"{name}: expected some of the inputs {scalable}, got {unknown}")
    return {spec.name: given.get(spec.name, neutral) for spec in specs}
