"""Arrays that are not needed at the same time share memory.

The generator declares every value between nodes as an array of its own, and calls one function per node. A value is
needed from the first call that names it to the last one. Here all values of one element type get a place in one array:
the largest first, each at the lowest offset where no value that is needed at the same time lies. An array per type, so
that no memory holds two types, which C does not allow.

``-DKBT_APART`` leaves the arrays apart, and not on the stack, which their sum can exceed. The first run, with the
address sanitizer, is built so: within one array it would not notice that a node writes beyond its own part.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from .limits import MAX_MEMORY, TOO_LARGE, RejectedError

__all__ = ["Value", "packed", "place"]

ALIGN: Final = 64  # bytes, of the memory and of every value of that size or more: a line of a cache
BYTES: Final = {"float": 4, "double": 8, "int32_t": 4, "int64_t": 8, "_Bool": 1, "bool": 1}

DECLARED = re.compile(r"    (\w+) (\w+)((?:\[\d+\])+);")
VIEW = re.compile(r"    (\w+) \(\*const (\w+)\)((?:\[\d+\])*) = \(\w+ \(\*\)(?:\[\d+\])*\)(\w+);")
CALL = re.compile(r"    \w+\(([\w, ]*)\);")


@dataclass(frozen=True)
class Value:
    """An array that is needed from line ``first`` to line ``last``."""

    name: str
    size: int
    first: int
    last: int


def place(values: list[Value]) -> dict[str, int]:
    """Name → offset, such that values that are needed at the same time do not overlap."""
    placed: list[tuple[int, Value]] = []
    for value in sorted(values, key=lambda value: (-value.size, value.first)):
        offset = 0
        rivals = [other for other in placed if other[1].first <= value.last and value.first <= other[1].last]
        for start, rival in sorted(rivals, key=lambda other: other[0]):
            if start - offset >= value.size:
                break
            offset = max(offset, _aligned(start + rival.size, value.size))
        placed.append((offset, value))
    return {value.name: offset for offset, value in placed}


def _aligned(offset: int, size: int) -> int:
    step = min(ALIGN, 1 << (max(size, 8) - 1).bit_length())
    return -(-offset // step) * step


def packed(source: str, name: str) -> str:
    """``source`` with the arrays of the function ``name`` in one."""
    found = re.search(rf"^void {name}\(.*\) {{\n((?:    .*\n)*)}}$", source, flags=re.M)
    if found is None:
        raise RejectedError("this version of emx-onnx-cgen writes its entry function in an unknown form")
    lines = found[1].splitlines()
    declared: dict[str, tuple[str, list[int]]] = {}  # name → type and shape
    base: dict[str, str] = {}  # name of an array, or of a view of it → the array
    used: dict[str, list[int]] = {}
    rest = []
    for number, line in enumerate(lines):
        if match := DECLARED.fullmatch(line):
            kind, array, shape = match.groups()
            declared[array], base[array] = (kind, [int(length) for length in re.findall(r"\d+", shape)]), array
            continue
        rest.append(line)
        if match := VIEW.fullmatch(line):
            base[match[2]] = base.get(match[4], match[4])
        elif match := CALL.fullmatch(line):
            for argument in match[1].split(", "):
                used.setdefault(base.get(argument, argument), []).append(number)
        else:
            raise RejectedError("this version of emx-onnx-cgen writes its entry function in an unknown form")
    if len(declared) < 2:
        return source
    shared, total = [], 0
    for kind in sorted({kind for kind, _ in declared.values()}):
        values = [
            Value(array, BYTES[kind] * math.prod(shape), min(used.get(array, [0])), max(used.get(array, [0])))
            for array, (type_, shape) in declared.items()
            if type_ == kind
        ]
        offsets = place(values)
        count = max(offsets[value.name] + value.size for value in values) // BYTES[kind]
        total += BYTES[kind] * count
        shared.append(f"    _Alignas({ALIGN}) {kind} memory_{kind}[{count}];")
        for value in values:
            row = "".join(f"[{length}]" for length in declared[value.name][1][1:])
            start = f"memory_{kind} + {offsets[value.name] // BYTES[kind]}"
            shared.append(f"    {kind} (*const {value.name}){row} = ({kind} (*){row})({start});")
    if total > MAX_MEMORY:
        raise RejectedError(TOO_LARGE)
    apart = [line.replace("    ", "    static ", 1) for line in lines if DECLARED.fullmatch(line)]
    body = "\n".join(["#ifdef KBT_APART", *apart, "#else", *shared, "#endif", *rest, ""])
    return source[: found.start(1)] + body + source[found.end(1) :]
