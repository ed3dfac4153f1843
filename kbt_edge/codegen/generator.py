"""A bundle as C for a microcontroller: ``kbt-edge codegen BUNDLE -o DIR``.

    NAME.h  NAME.c        init, predict, observe, save and load, in physical units
    NAME_trunk.c          the frozen network as plain C: weights in flash, temporaries on the stack
    NAME_state.c          the head's configuration and state, byte for byte as in head.kbt
    NAME_arena.cpp        the memory the head learns in: static, of exactly the size this head needs
    kbt/                  the sources of the core, copied from the installed package as they are
    CMakeLists.txt        a static library of all that, for any CMake project
    README.md             how it was made, what it takes, how to call it
    codegen.json          the same for programs, with the SHA-256 of every file

The text of these files is in templates/. The arithmetic of physical units is not: NAME.c fills in the structures of
kbt/kbt_policy.h and calls it. Nothing uses a heap, printf or files. ``kbt_edge.load_generated`` compiles such a folder
for this computer.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kbt_edge import _core
from kbt_edge import bundle as bundles
from kbt_edge._version import __version__
from kbt_edge.bundle import BundleInput
from kbt_edge.codegen import manifest as manifests
from kbt_edge.codegen import toolchain
from kbt_edge.model import Model
from kbt_edge.onnxfile import read_onnx
from kbt_edge.scaling import log_scale_of
from kbt_edge.trunk import TensorSpec
from kbt_edge.trunk.build import try_out
from kbt_edge.trunk.source import CArray, trunk_source

__all__ = ["generate"]

_C_TYPES: Final = {"float32": "float", "int64": "int64_t"}  # as the network takes them
_ALIGN: Final = 64  # bytes: KBT_ARENA_ALIGN, KBT_STORE_HEADER and KBT_STORE_UNIT


def generate(
    bundle: str | os.PathLike[str], folder: str | os.PathLike[str], name: str | None = None
) -> Mapping[str, Any]:
    """Write the C of ``bundle`` to ``folder`` and return the content of its codegen.json.

    bundle   the folder of a bundle, or the name of one that ships with the package
    folder   new, empty, or written by an earlier ``generate``, which is then replaced
    name     prefix of every C name; default: the name of the bundle's folder
    """
    source = bundles.find(bundle)
    name = manifests.checked_name(source.absolute().name if name is None else name)
    manifests.check_target(Path(folder))
    model = Model.load(bundle)
    about = _described(name, model)
    values = {**about, **_values(model), "network": _network(name, model)}
    files = {
        f"{name}.h": _rendered("policy.h", values),
        f"{name}.c": _rendered("policy.c", values),
        f"{name}_trunk.c": _rendered("trunk.c", values),
        f"{name}_state.c": _rendered("state.c", values),
        f"{name}_arena.cpp": _rendered("arena.cpp", values),
        "CMakeLists.txt": _rendered("CMakeLists.txt", values),
        **{f"kbt/{path.name}": path.read_bytes() for path in toolchain.core_sources()},
    }
    with tempfile.TemporaryDirectory(prefix="kbt-codegen-") as scratch:
        manifests.write(Path(scratch), files, about)
        size = toolchain.measure(Path(scratch))
    files["README.md"] = _rendered("README.md", {**values, "size": size})
    return manifests.write(Path(folder), files, {**about, "size": size})


def _described(name: str, model: Model) -> dict[str, Any]:
    """For codegen.json: what ``load_generated`` and the user have to know."""
    blob, config = model.head.to_bytes(), model.head.config
    planned = _core.state_config(blob)
    assert not isinstance(planned, int)  # the head has just written it
    return {
        "format": manifests.FORMAT,
        "kbt_edge": __version__,
        "name": name,
        "trunk_sha256": model.trunk.sha256,
        "made": model.made,
        "inputs": [{"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in model.trunk.inputs],
        "rows": model.trunk.rows,
        "outputs": model.head.d_o,
        "output": config["output"],
        "dtype": config["dtype"],
        "defines": _defines(config),
        "state_bytes": len(blob),
        "slot_bytes": _ALIGN + _rounded(len(blob)),
        "arena_array_bytes": planned.arena_bytes() - _rounded(_core.RECORD_BYTES[planned.dtype]),
    }


def _defines(config: dict[str, Any]) -> list[str]:
    """Leave out of the core what this head does not need. ``kbt_init`` rejects a head that the core does not have."""
    members = (
        len(config["widths"]) == 2
        and config["output"] == "gaussian"
        and config["covariance"] != "diagonal"
        and config["input_var"] == 0
    )
    kind = "KBT_ONLY_FILTER" if config["drift"] != "auto" else "KBT_ONLY_MEMBERS" if members else "KBT_ONLY_BANK"
    widths = config["widths"]
    joint = len(widths) > 2 and widths[-1] <= widths[-2]
    return [kind] + ["KBT_ONLY_JOINT"] * joint + ["KBT_NO_FLOAT64"] * (config["dtype"] == "float32")


def _rounded(count: int) -> int:
    return (count + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True)
class _Argument:
    """An input of ``NAME_predict``. ``mean`` and ``scale`` have one number per feature, none for token ids."""

    name: str
    spec: TensorSpec
    count: int
    mean: list[float]
    scale: list[float]

    @staticmethod
    def of(name: str, spec: TensorSpec, entry: BundleInput) -> _Argument:
        mean, scale = (
            [] if numbers is None else np.broadcast_to(numbers, spec.shape[-1:]).tolist()
            for numbers in (entry.mean, entry.scale)
        )
        return _Argument(name, spec, math.prod(spec.shape), mean, scale)


def _values(model: Model) -> dict[str, Any]:
    """What the templates need beside ``_described``."""
    bundle, head, specs = model.bundle(), model.head, model.trunk.inputs
    names = ["x"] if len(specs) == 1 else [f"x{i + 1}" for i in range(len(specs))]
    offset, scale = (
        np.broadcast_to(numbers, (head.d_o,)).tolist() for numbers in (model.output_offset, model.output_scale)
    )
    return {
        "arguments": [_Argument.of(*entry) for entry in zip(names, specs, bundle.inputs, strict=True)],
        "d": model.trunk.d,
        "offset": offset,
        "scale": scale,
        "log_scale": log_scale_of(scale, model.trunk.rows),
        "state": bundle.head,
        "config": head.config,
        "noise_var": np.ravel(head.noise_var).tolist(),
        "samples": head.samples,
        "toolchain": toolchain,
    }


def _network(name: str, model: Model) -> str:
    """The C of the network, tried out on this computer, with all its names local to the file."""
    data = model.bundle().trunk
    onnx = read_onnx(data)
    inputs = [CArray(spec.shape, _C_TYPES[spec.dtype], spec.limit) for spec in model.trunk.inputs]
    output = CArray(tuple(length for length in onnx.graph.outputs[0].shape or () if isinstance(length, int)), "float")
    source = trunk_source(data, onnx, inputs, output, f"{name}_network", kernels=False)
    try_out(source, inputs, output, toolchain.find_compiler("CC", "cc", "gcc", "clang"))
    source = re.sub(r"^(extern )?const ", "static const ", source, flags=re.M)
    return re.sub(rf"^(void|_Bool) (?={name}_network)", r"static EMX_UNUSED \1 ", source, flags=re.M)


def _rendered(template: str, values: Mapping[str, Any]) -> bytes:
    """A template of this package with ``values`` filled in."""
    import jinja2  # here, so that load_generated works without it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["hex"] = float.hex  # every bit of a double
    environment.filters["byte"] = "0x{:02x}".format
    return environment.get_template(f"{template}.j2").render(values).encode("ascii")
