"""Repairs of the C that the generator wrote."""

from __future__ import annotations

import math
import re

from .limits import RejectedError

__all__ = ["safe", "without_copies"]


def safe(source: str) -> str:
    """Clamp the index of every Gather, and let NaN pass through ReLU, maximum and minimum."""
    limited, count = re.subn(
        r"(gather_index \+= (\d+);\s*\})",
        r"\1 gather_index = gather_index < 0 ? 0 : gather_index >= \2 ? \2 - 1 : gather_index;",
        source,
    )
    if count != source.count("idx_t gather_index ="):
        raise RejectedError("this version of emx-onnx-cgen writes Gather in an unknown form")
    kept = re.sub(r"return a > (0\.0f?) \? a : \1;", r"return a <= \1 ? \1 : a;", limited)
    return re.sub(r"if \((\S+) ([<>]) acc\) acc = \1;", r"if (\1 \2 acc || \1 != \1) acc = \1;", kept)


def without_copies(source: str) -> str:
    """A temporary array with the numbers of another one, in another shape, becomes a pointer to that one."""
    arrays = {
        name: (kind, tuple(map(int, re.findall(r"\d+", shape))))
        for kind, name, shape in re.findall(r"^    (\w+) (tmp\w+)((?:\[\d+\])+);\n", source, flags=re.M)
    }
    call = r"^    (node(\d+)_(?:reshape|squeeze|transpose|unsqueeze))\((tmp\w+), (tmp\w+)\);\n"
    for function, number, old, new in re.findall(call, source, flags=re.M):
        definition = re.search(
            rf"^/\*\n \* Node {number}:((?!\*/).)*\*/\nEMX_NODE_FN void {function}\(.*?^}}\n\n?",
            source,
            flags=re.M | re.S,
        )
        if definition is None or old not in arrays or new not in arrays:
            continue
        (kind, shape), (new_kind, new_shape) = arrays[old], arrays[new]
        order = re.search(r"perm: \[([\d, ]+)\]", definition[0])
        axes = [axis for axis in map(int, order[1].split(",")) if shape[axis] > 1] if order else []
        moved = axes != sorted(axes) or (order is None and function.endswith("transpose"))
        if moved or kind != new_kind or math.prod(shape) != math.prod(new_shape):
            continue
        row = "".join(f"[{length}]" for length in new_shape[1:])
        source = source.replace(f"    {kind} {new}[{new_shape[0]}]{row};\n", "")
        source = source.replace(
            f"    {function}({old}, {new});\n", f"    {kind} (*const {new}){row} = ({kind} (*){row}){old};\n"
        )
        source = source.replace(definition[0], "")
    return source
