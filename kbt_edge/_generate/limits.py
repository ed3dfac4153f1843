"""What a file may ask for."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BOOL",
    "DOUBLE",
    "FLOAT",
    "FOLDED",
    "INT64",
    "MAX_GROWTH",
    "MAX_MEMORY",
    "REJECTED",
    "TOO_LARGE",
    "TYPES",
    "RejectedError",
]

REJECTED: Final = 3  # exit code

FLOAT, INT32, INT64, BOOL, DOUBLE = 1, 6, 7, 9, 11
TYPES: Final = frozenset({FLOAT, INT32, INT64, BOOL, DOUBLE})  # of the elements of a value

MAX_MEMORY: Final = 2**20  # bytes on the stack: of one value, and of all that are needed at the same time
MAX_GROWTH: Final = 2**26  # bytes of all values between nodes, in addition to the size of the file
TOO_LARGE: Final = (
    f"a compiled trunk may use {MAX_MEMORY} bytes of stack, its values between nodes need more: too large"
)

# What is computed from constants alone by these is computed before the C is written. Exporters compute shapes, axes and
# indices so.
FOLDED: Final = frozenset(
    {
        *("Add", "And", "Cast", "Concat", "Equal", "Expand", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less"),
        *("LessOrEqual", "Mul", "Neg", "Not", "Or", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Transpose"),
        *("Unsqueeze", "Where"),
    }
)


class RejectedError(Exception):
    """This model cannot be translated."""
