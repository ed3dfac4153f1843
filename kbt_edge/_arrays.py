"""Converts arguments to the plain arrays that the core reads, or raises an error that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kbt_edge.errors import DtypeError, NumericsError, RangeError, ShapeError

Array = npt.NDArray[Any]


def plain_array(name: str, value: object) -> Array:
    """``value`` as an array of whatever dtype it has."""
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name}: expected a plain array, got a masked array")
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DtypeError(f"{name}: expected an array of numbers, got {type(value).__name__} ({error})") from None


def check_real(name: str, given: Array) -> None:
    if given.dtype.kind not in "fiu":
        raise DtypeError(f"{name}: expected real numbers, got an array of dtype {given.dtype}")


def cast(name: str, given: Array, dtype: npt.DTypeLike) -> Array:
    """A C-contiguous array of ``dtype``. Integers and other float widths are converted, nothing else is.

    Numbers that do not fit become infinite; ``check_finite`` tells them from those that were not finite before.
    """
    check_real(name, given)
    wanted = np.dtype(dtype)
    with np.errstate(all="ignore"):
        array = np.ascontiguousarray(given, dtype=wanted).reshape(given.shape)  # ascontiguousarray makes 0-d into 1-d
    return array if array.flags.aligned and array.dtype is wanted else array.astype(wanted)


def check_finite(name: str, given: Array, array: Array) -> None:
    """Name the first number of ``given`` that is not finite, or whose conversion in ``array`` is not."""
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(given))[0])
        place = f" at index {where if len(where) != 1 else where[0]}" if where else ""
        raise NumericsError(f"{name}: expected finite numbers, got {given[where]}{place}")
    if not np.isfinite(array).all():
        worst = given.flat[int(np.argmax(~np.isfinite(array)))]
        raise NumericsError(f"{name}: expected numbers that fit into {array.dtype.name}, got {worst}")


def real_array(name: str, value: object, dtype: npt.DTypeLike) -> Array:
    """``cast`` of ``value``, which must be finite."""
    given = plain_array(name, value)
    array = cast(name, given, dtype)
    check_finite(name, given, array)
    return array


def labels_array(name: str, value: object, classes: int) -> npt.NDArray[np.int32]:
    """Class labels as int32, each within 0..classes-1."""
    given = plain_array(name, value)
    if given.dtype.kind not in "iu":
        raise DtypeError(f"{name}: expected integer class labels, got an array of dtype {given.dtype}")
    outside = (given < 0) | (given >= classes)
    if outside.any():
        bad = given[outside].flat[0]
        raise RangeError(f"{name}: expected class labels in 0..{classes - 1}, got {bad}")
    return cast(name, given, np.int32)


def shape_error(name: str, expected: str, array: Array) -> ShapeError:
    return ShapeError(f"{name}: expected shape {expected}, got {array.shape}")
