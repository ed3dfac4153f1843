"""The arrays of one sample as the core reads them, and the error when it rejects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, cast, check_finite, labels_array, shape_error
from kbt_edge._status import blob_error, status_error
from kbt_edge.errors import NumericsError, RangeError, ShapeError
from kbt_edge.settings import DTYPES, NOISES, OUTPUTS, noise_array

__all__ = ["must_be_latest", "raise_rejection", "rows_of_h", "sample_noise", "targets"]


def rows_of_h(h: Array, config: _core.Config) -> Array:
    """h of shape (d,) or (rows, d), in the head's dtype."""
    array, d = cast("h", h, DTYPES[config.dtype]), config.widths[0]
    if array.ndim not in (1, 2) or array.shape[-1] != d or array.size == 0:
        raise shape_error("h", f"({d},) or (rows, {d})", array)
    if array.ndim == 2 and array.shape[0] > config.max_rows:
        raise ShapeError(f"h: expected at most max_rows = {config.max_rows} rows, got {array.shape[0]}")
    return array


def targets(y: Array, lead: tuple[int, ...], config: _core.Config) -> Array:
    """Targets of shape (*lead, d_o), with lead = () or (rows,); or int32 labels of shape lead."""
    expected = (*lead, config.widths[-1])
    if OUTPUTS[config.output] == "softmax" and y.dtype.kind in "iu" and y.shape != expected:
        labels = labels_array("y", y, config.widths[-1])
        if labels.shape != lead:
            raise shape_error("y", f"{lead} class labels or {expected} probabilities", labels)
        return labels
    array = cast("y", y, DTYPES[config.dtype])
    if array.shape == () and set(expected) == {1}:
        return array.reshape(expected)
    if array.shape != expected:
        raise shape_error("y", f"{expected}" + " or a number" * (set(expected) == {1}), array)
    return array


def sample_noise(name: str, value: npt.ArrayLike, config: _core.Config) -> Array:
    """The noise of one sample, instead of the head's."""
    if NOISES[config.noise] == "multinomial":
        raise RangeError(f"{name}: expected None, as noise='multinomial' has no variance, got {value!r}")
    return noise_array(name, value, config)


def must_be_latest(ticket: int, core: _core.Core) -> None:
    """Check that the head was not used while arguments were converted, which can run any code."""
    if core.ticket != ticket:
        raise RangeError(
            "observe: the head was used while y or noise_var was being converted to an array, so the latest "
            "prediction is another one now; pass NumPy arrays",
            _core.E_ORDER,
        )


def raise_rejection(status: int, arguments: Mapping[str, object], config: _core.Config) -> NoReturn:
    """Raise the error that explains ``status`` by the arguments of the call, without calling the core again."""
    given = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    if status == _core.E_NONFINITE:
        for name, value in given.items():
            check_finite(name, value, cast(name, value, DTYPES[config.dtype]))
    if status == _core.E_ROWS:
        rows_of_h(given["h"], config)
    if status == _core.E_NOISE and "noise_var" in given:
        sample_noise("noise_var", given["noise_var"], config)
    if status == _core.E_LABEL:
        raise RangeError("y: expected class labels, or rows of probabilities that sum to 1, got other numbers", status)
    if status == _core.E_ORDER:
        raise RangeError("observe: no prediction is waiting; call predict first, one observe per prediction", status)
    if status == _core.E_OWNER:
        raise RangeError(
            "observe: the latest prediction was made by a Model, in its own units; call the model's observe, "
            "or predict with the head first",
            _core.E_ORDER,
        )
    if status == _core.E_RANGE:
        sizes = ", ".join(f"|{name}| up to {np.abs(value).max():.3g}" for name, value in given.items())
        raise NumericsError(
            f"{', '.join(given)}: expected numbers whose result neither overflows nor is lost in rounding, got {sizes}",
            status,
        )
    if _core.E_BLOB_SHORT <= status <= _core.E_BLOB_VALUE:
        raise blob_error("blob", "head state", status)
    raise status_error(status)
