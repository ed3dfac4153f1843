"""The settings of a head: their types and defaults, and how they become a configuration of the core.

The core decides which settings are valid (``kbt_config_check``); this module converts them and explains errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, real_array, shape_error
from kbt_edge.errors import DtypeError, RangeError, ShapeError

__all__ = [
    "COVARIANCES",
    "DEFAULTS",
    "DTYPES",
    "NOISES",
    "OUTPUTS",
    "RULES",
    "Covariance",
    "Dtype",
    "HeadSettings",
    "Noise",
    "Output",
    "Rule",
    "checked_dtype",
    "described",
    "entries",
    "hidden_widths",
    "integer",
    "make_config",
    "noise_array",
]

# For type checkers. The core has the names, in the order of its enums.
Dtype = Literal["float32", "float64"]
Output = Literal["gaussian", "softmax"]
Covariance = Literal["full", "neuron", "diagonal", "shared"]
Rule = Literal["fuse", "replace"]
Noise = Literal["constant", "adaptive", "multinomial", "full", "matrix"]
DTYPES: Final = _core.DTYPES
OUTPUTS: Final = _core.OUTPUTS
COVARIANCES: Final = _core.COVARIANCES
RULES: Final = _core.RULES
NOISES: Final = _core.NOISES


class HeadSettings(TypedDict, total=False):
    """The keywords that ``Head`` and ``Head.from_means`` share. ``Head`` describes them."""

    prior_var: float | Sequence[float] | None
    noise_var: npt.ArrayLike | None
    output: Output
    covariance: Covariance | Literal["auto"]
    rule: Rule
    noise: Noise | None
    forgetting: float
    gate: float | None
    drift: float | Literal["auto"]
    max_rows: int
    dtype: npt.DTypeLike
    relu_order: int
    softmax_order: int
    input_var: float


DEFAULTS: Final[HeadSettings] = {
    "prior_var": None,
    "noise_var": None,
    "output": "gaussian",
    "covariance": "auto",
    "rule": "fuse",
    "noise": None,
    "forgetting": 1.0,
    "gate": None,
    "drift": "auto",
    "max_rows": 1,
    "dtype": "float32",
    "relu_order": 2,
    "softmax_order": 0,
    "input_var": 0.0,
}

_NOISE_VAR: Final = 1e-2  # noise starts at 10 % of an output of order one
_DRIFT_AUTO: Final = -1.0

# What the core accepts, for error messages.
_ACCEPTED: Final = {
    "max_rows": "1..1048576",
    "relu_order": "2..12",
    "softmax_order": "0, 1 or 2",
    "prior_var": "1e-30..1e+12 in every layer",
    "noise_var": "0..1e+12",
    "input_var": "0..1e+12",
    "forgetting": "0.001..1",
    "gate": "a positive number, or None",
    "drift": "'auto', or 0..1e+06",
}


def make_config(widths: list[int], settings: HeadSettings) -> tuple[_core.Config, Array]:
    """The core's configuration, accepted by it, and the noise as ``Core.set_noise`` takes it."""
    unknown = settings.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"Head: unexpected keyword argument {min(unknown)!r}")
    given: HeadSettings = {**DEFAULTS, **settings}
    if len(widths) - 1 > _core.MAX_LAYERS:
        raise RangeError(f"hidden: expected at most {_core.MAX_LAYERS - 1} layers, got {len(widths) - 2}")
    layers, output, rule, noise = len(widths) - 1, given["output"], given["rule"], given["noise"]
    config = _core.Config(widths[0], widths[-1])
    config.widths = widths
    config.dtype = DTYPES.index(checked_dtype(given["dtype"]).name)
    config.output = _choice("output", output, OUTPUTS)
    covariance = given["covariance"]
    config.covariance = _core.COVARIANCE_AUTO
    if covariance != "auto":
        config.covariance = _choice("covariance", covariance, COVARIANCES, or_else="auto")
    config.rule = _choice("rule", rule, RULES)
    if noise is None and given["noise_var"] is None:
        noise = "multinomial" if output == "softmax" else "adaptive" if rule == "fuse" else "constant"
    noise_var = _NOISE_VAR if given["noise_var"] is None else given["noise_var"]
    if noise is None:
        noise = "matrix" if np.ndim(noise_var) == 2 and output == "gaussian" else "constant"
    config.noise = _choice("noise", noise, NOISES)
    config.relu_order = _int32("relu_order", given["relu_order"])
    config.softmax_order = _int32("softmax_order", given["softmax_order"])
    config.max_rows = _int32("max_rows", given["max_rows"])
    prior_var = given["prior_var"]
    config.prior_var = [0.0] * layers if prior_var is None else _positive(_per_layer("prior_var", prior_var, layers))
    config.input_var = _number("input_var", given["input_var"])
    config.forgetting = _number("forgetting", given["forgetting"])
    gate = given["gate"]
    config.gate = 0.0 if gate is None else _number("gate", gate) or -1.0  # the core reads 0 as None
    drift = given["drift"]
    if isinstance(drift, str) and drift != "auto":
        raise RangeError(f"drift: expected 'auto' or a number >= 0, got {drift!r}")
    config.drift = _DRIFT_AUTO if drift == "auto" else abs(_number("drift", drift)) * (-2.0 if drift < 0 else 1.0)
    if drift == "auto" and noise == "matrix" and layers == 1:  # members know variances only
        config.drift = 0.0
    _check(config, given)
    variances = noise_array("noise_var", noise_var, config)
    if covariance == "auto" and noise == "constant" and config.drift >= 0 and (variances != variances[0]).any():
        config.covariance = COVARIANCES.index("neuron")
    config.noise_var = float(variances.flat[0]) if variances.size == 1 else 0.0
    _check(config, given)
    return config, variances


def described(config: _core.Config) -> dict[str, Any]:
    """A configuration as the keywords of ``Head`` spell it, with ``widths`` instead of ``hidden``."""
    return {
        "widths": tuple(config.widths),
        "prior_var": tuple(config.prior_var) if any(config.prior_var) else None,
        "noise_var": config.noise_var,
        "output": OUTPUTS[config.output],
        "covariance": COVARIANCES[config.covariance],
        "rule": RULES[config.rule],
        "relu_order": config.relu_order,
        "softmax_order": config.softmax_order,
        "noise": NOISES[config.noise],
        "input_var": config.input_var,
        "forgetting": config.forgetting,
        "gate": config.gate if config.gate > 0 else None,
        "drift": "auto" if config.drift < 0 else config.drift,
        "max_rows": config.max_rows,
        "dtype": DTYPES[config.dtype],
    }


def noise_array(name: str, value: npt.ArrayLike, config: _core.Config) -> Array:
    """Noise for a head of this configuration: (1,) or (d_o,) variances, or a (d_o, d_o) matrix."""
    n = config.widths[-1]
    matrix_allowed = NOISES[config.noise] == "matrix"
    array = real_array(name, value, DTYPES[config.dtype])
    shapes: list[tuple[int, ...]] = [(), (1,), (n,)] + ([(n, n)] if matrix_allowed else [])
    if array.shape not in shapes:
        if array.shape == (n, n) and NOISES[config.noise] == "constant":
            raise ShapeError(f"{name}: a ({n}, {n}) matrix needs a head that was made with noise='matrix'")
        raise shape_error(name, f"a number, ({n},)" + (f" or ({n}, {n})" if matrix_allowed else ""), array)
    variances = np.diagonal(array) if array.ndim == 2 else np.atleast_1d(array)
    if (variances < 0).any():
        raise RangeError(f"{name}: expected variances >= 0, got {variances.min()}")
    known = NOISES[config.noise] == "constant" and config.drift >= 0  # the factor is not in units of the noise
    if known and config.covariance == _core.COVARIANCES.index("shared") and (variances != variances[0]).any():
        raise RangeError(
            f"{name}: expected the same variance for all outputs, which share a factor, got "
            f"{variances.min()} to {variances.max()}; covariance='neuron' takes one per output"
        )
    if array.ndim == 2:
        if not np.array_equal(array, array.T):
            raise RangeError(f"{name}: expected a symmetric matrix, got one that differs from its transpose")
        if n > 1 and np.linalg.eigvalsh(array.astype(np.float64)).min() < -1e-6 * variances.max():
            raise RangeError(f"{name}: expected a positive semi-definite matrix, got a negative eigenvalue")
        return array
    return array.reshape(-1)


def _check(config: _core.Config, given: HeadSettings) -> None:
    """Let the core check the settings, and explain what is wrong."""
    status, field = config.check()
    if not status:
        return
    widths, output, rule = config.widths, OUTPUTS[config.output], RULES[config.rule]
    if status == _core.E_SIZE:
        message = f"hidden, max_rows: expected a head that fits into memory, got {widths}, {config.max_rows}"
    elif field in _ACCEPTED:
        message = f"{field}: expected {_ACCEPTED[field]}, got {given.get(field)}"
    elif field == "widths" and output == "softmax" and widths[-1] < 2:
        message = f"output: expected at least 2 outputs for a softmax, got {widths[-1]}"
    elif field == "widths":
        message = f"hidden: expected widths of 1..1048576, got {widths}"
    elif field == "rule":
        message = "rule: expected 'fuse' for a softmax, where 'replace' soon diverges, got 'replace'"
    elif field == "noise" and NOISES[config.noise] == "adaptive":
        message = f"noise: expected output 'gaussian' and rule 'fuse' for 'adaptive', got {output!r} and {rule!r}"
    elif field == "covariance":
        message = (
            "covariance: expected one linear layer, rule 'fuse', input_var 0, no noise matrix and, for a softmax, "
            "noise 'multinomial' and softmax_order 0 for 'shared', got another head; 'neuron' suits all heads"
        )
    elif field == "noise" and NOISES[config.noise] == "full":
        message = "noise: expected one linear layer, output 'gaussian' and drift 'auto' for 'full', got another head"
    elif field == "noise":
        message = f"noise: expected output 'softmax' for 'multinomial', got {output!r}"
    else:
        message = f"{field}: rejected: {_core.status_str(status)}"
    raise RangeError(message, status)


def checked_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES or not found.isnative:
        raise RangeError(f"dtype: expected 'float32' or 'float64', got {dtype!r}")
    return found


def _choice(name: str, value: object, allowed: tuple[str, ...], or_else: str | None = None) -> int:
    if value not in allowed:
        names = (*allowed, or_else) if or_else else allowed
        raise RangeError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")
    return allowed.index(str(value))


def integer(name: str, value: object, low: int, high: int) -> int:
    number = _integer(name, value)
    if not low <= number <= high:
        raise RangeError(f"{name}: expected {low}..{high}, got {number}")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DtypeError(f"{name}: expected an integer, got {value!r}")
    return int(value)


def _int32(name: str, value: object) -> int:
    """An integer whose range the core checks, clipped so that it fits into an int32."""
    most = (1 << 31) - 1
    return max(-most, min(most, _integer(name, value)))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise DtypeError(f"{name}: expected a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def entries(name: str, value: object) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise DtypeError(f"{name}: expected a sequence, got {value!r}")
    return list(value)


def hidden_widths(hidden: Sequence[int], d: int) -> list[int]:
    """Widths of the hidden layers of a head for inputs of width ``d``."""
    widths = [_int32(f"hidden[{i}]", n) for i, n in enumerate(entries("hidden", hidden))]
    for i, n in enumerate(widths):
        if n < 2 * d:
            raise RangeError(f"hidden[{i}]: expected at least 2 d = {2 * d} neurons for the copies of h, got {n}")
    return widths


def _positive(variances: list[float]) -> list[float]:
    """The core reads 0 as automatic; a 0 that was given is out of range."""
    return [variance or -1.0 for variance in variances]


def _per_layer(name: str, value: float | Sequence[float], layers: int) -> list[float]:
    if isinstance(value, (int, float, np.integer, np.floating)):
        return [_number(name, value)] * layers
    values = [_number(f"{name}[{i}]", x) for i, x in enumerate(entries(name, value))]
    if len(values) != layers:
        raise ShapeError(f"{name}: expected one number or one per layer ({layers}), got {len(values)}")
    return values
