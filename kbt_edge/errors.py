"""The errors of kbt_edge. Each message says what is wrong, what was expected, and what to do."""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BundleError",
    "DtypeError",
    "KbtError",
    "MissingError",
    "NumericsError",
    "RangeError",
    "ShapeError",
    "UnfitError",
]


class KbtError(Exception):
    """Base of every error raised on purpose by this package.

    ``status`` is the number that the C core returned, or 0 when the call was rejected before it reached the core.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ShapeError(KbtError, ValueError):
    """An array has the wrong number of dimensions or the wrong length."""


class RangeError(KbtError, ValueError):
    """A number or a choice is out of range, or two settings contradict each other."""


class DtypeError(KbtError, TypeError):
    """An argument has a type that cannot be converted without losing meaning."""


class NumericsError(KbtError, ArithmeticError):
    """An input is NaN or infinite, or so large that the result would be."""


class BundleError(KbtError, OSError):
    """A file or a state blob is missing, damaged, foreign, or does not belong to this model."""


class BackendError(KbtError, RuntimeError):
    """This trunk cannot run in the requested way on this machine: something is not installed or not supported."""


class MissingError(BackendError):
    """A required package is not installed."""


class UnfitError(BackendError):
    """This trunk cannot be compiled here, and trying again will not help."""
