"""Statuses of the core, and the errors they become."""

from __future__ import annotations

from typing import Final

from kbt_edge import _core
from kbt_edge.errors import BundleError, KbtError, NumericsError, RangeError, ShapeError

__all__ = ["blob_error", "status_error"]


_ERRORS: Final[dict[int, type[KbtError]]] = {
    _core.E_CONFIG: RangeError,
    _core.E_SIZE: RangeError,
    _core.E_ROWS: ShapeError,
    _core.E_NONFINITE: NumericsError,
    _core.E_RANGE: NumericsError,
    _core.E_NOISE: RangeError,
    _core.E_LABEL: RangeError,
    _core.E_ORDER: RangeError,
    _core.E_TRUNK_INPUT: NumericsError,
    _core.E_TRUNK_OUTPUT: NumericsError,
    _core.E_OWNER: RangeError,
}

_BLOBS: Final[dict[int, str]] = {
    _core.E_BLOB_SHORT: "truncated {what}",
    _core.E_BLOB_FOREIGN: "not a {what}",
    _core.E_BLOB_VERSION: "{what} of a newer format than this version reads; upgrade kbt-edge",
    _core.E_BLOB_CRC: "damaged {what}: its checksum is wrong",
    _core.E_BLOB_CONFIG: "{what} of another configuration",
    _core.E_BLOB_VALUE: "{what} with impossible values",
}


def status_error(status: int) -> KbtError:
    """The error for a status, without details of the call."""
    return _ERRORS.get(status, KbtError)(_core.status_str(status), status)


def blob_error(name: str, what: str, status: int) -> KbtError:
    """The error for bytes named ``name`` that should be ``what``, such as "flight log"."""
    if status not in _BLOBS:
        return BundleError(f"{name}: {_core.status_str(status)}", status)
    return BundleError(f"{name}: {_BLOBS[status].format(what=what)}", status)
