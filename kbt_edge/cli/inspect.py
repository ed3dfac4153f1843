"""``kbt-edge inspect BUNDLE``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kbt_edge.bundle import find
from kbt_edge.cli.terminal import add_backend, add_bundle, add_max_bytes, progress
from kbt_edge.model import Model
from kbt_edge.results import Layer

__all__ = ["arguments", "described", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    add_backend(parser)
    add_max_bytes(parser)


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    folder = find(options.bundle)
    progress(f"reading {folder} and starting its trunk ...")
    return described(Model.load(options.bundle, backend=options.backend, max_bytes=options.max_bytes), folder)


def text(result: Mapping[str, Any]) -> str:
    trunk, head = result["trunk"], result["head"]
    lines = [result["path"], ""]

    def line(name: str, *parts: object) -> None:
        lines.append(f"  {name:<11} " + "  ".join(str(part) for part in parts if part not in (None, "")))

    lines.append("trunk")
    line("file", _size(trunk["bytes"]), f"sha256 {trunk['sha256'][:16]}…")
    for entry in trunk["inputs"]:
        scaling = f"(x - {_row(entry['mean'])}) / {_row(entry['scale'])}" if entry["mean"] is not None else None
        line("input", entry["name"], tuple(entry["shape"]), entry["dtype"], scaling)
    line("output", f"{trunk['rows']} row{'s' * (trunk['rows'] > 1)} of {trunk['d']}")
    line("operators", ", ".join(f"{name} {count}" for name, count in trunk["operators"].items()))
    line("backend", trunk["backend"], f"({trunk['reason']})")

    lines += ["", "head"]
    line("structure", " → ".join(map(str, head["widths"])), head["output"], head["covariance"], head["dtype"])
    line(
        "rule",
        head["rule"],
        f"noise {head['noise']}" + f" {_row(head['noise_var'])}" * (head["noise"] != "multinomial"),
    )
    line("settings", *(f"{key} {head[key]}" for key in _SETTINGS))
    if head["offset"] is not None:
        line("units", f"y = {_row(head['offset'])} + {_row(head['scale'])} · u")
    line("memory", _size(head["memory"]), f"({_size(head['bytes'])} in the file)")
    line("samples", head["samples"])
    line("layer", f"{'weights':>12}  {'smallest std':>12}  {'largest std':>12}")
    for number, layer in enumerate(head["layers"], 1):
        shape = f"{layer['shape'][0]} × {layer['shape'][1]}"
        line(f"  {number}", f"{shape:>12}  {layer['smallest_std']:>12.3g}  {layer['largest_std']:>12.3g}")
    if result["made"]:
        lines += ["", "made"]
        for key, value in result["made"].items():
            line(key, value)
    return "\n".join(lines)


def described(model: Model, folder: Path) -> dict[str, Any]:
    """A bundle as plain data."""
    bundle, head, trunk = model.bundle(), model.head, model.trunk
    return {
        "path": str(folder.absolute()),
        "made": model.made,
        "trunk": {
            "bytes": len(bundle.trunk),
            "sha256": trunk.sha256,
            "inputs": [
                {"name": i.name, "shape": list(i.shape), "dtype": i.dtype, "mean": i.mean, "scale": i.scale}
                for i in bundle.inputs
            ],
            "rows": trunk.rows,
            "d": trunk.d,
            "operators": trunk.operators,
            "backend": trunk.backend,
            "reason": trunk.backend_reason,
        },
        "head": {
            "bytes": len(bundle.head),
            "memory": head.nbytes,
            **head.config,
            "noise_var": np.asarray(model.noise_var, np.float64).tolist(),
            "offset": bundle.offset,
            "scale": bundle.scale,
            "samples": head.samples,
            "layers": [describe_layer(layer) for layer in head.layers],
        },
    }


_SETTINGS = ("prior_var", "relu_order", "softmax_order", "input_var", "forgetting", "gate", "max_rows")


def describe_layer(layer: Layer) -> dict[str, Any]:
    """Size of a layer, and the range of its weights' standard deviations."""
    diagonal = layer.cov.shape == layer.mean.shape
    var = layer.cov if diagonal else np.diagonal(layer.cov, axis1=-2, axis2=-1)
    std = np.sqrt(np.asarray(var, np.float64))
    return {"shape": list(layer.mean.shape), "smallest_std": float(std.min()), "largest_std": float(std.max())}


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def _row(values: Any) -> str:
    """A number, or a few, or how many there are."""
    flat = np.ravel(values)
    if len(flat) == 1:
        return f"{flat[0]:.4g}"
    return f"[{', '.join(f'{value:.4g}' for value in flat)}]" if len(flat) <= 8 else f"[{len(flat)} numbers]"
