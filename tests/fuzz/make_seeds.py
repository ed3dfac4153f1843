"""Write the seeds of the blob, bundle and flight log fuzzers, always the same: ``python tests/fuzz/make_seeds.py``.

Blobs of version 1 in the corpus were written by an earlier core."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import tiny_onnx

import kbt_edge as kbt
from kbt_edge import bundle as bundles

CORPUS = Path(__file__).parent / "corpus"


def seeds() -> dict[str, dict[str, bytes]]:
    """By target and name."""
    return {"blob": blob_seeds(), "bundle": bundle_seeds(), "flight": flight_seeds()}


def blob_seeds() -> dict[str, bytes]:
    """A head of each kind that has no state of version 1."""
    kinds: dict[str, dict[str, Any]] = {
        "members": {},
        "noise-matrix-learned": {"noise": "full"},
        "bank": {"hidden": (4,)},
        "bank-matrix": {"hidden": (4,), "noise_var": [[0.5, 0.1], [0.1, 0.4]]},
        "shared": {"drift": 0.0, "max_rows": 2},
        "shared-softmax": {"output": "softmax", "covariance": "shared"},
        "walk": {"drift": 0.01, "covariance": "neuron", "dtype": "float64"},
    }
    return {name: head(2, **settings).to_bytes() for name, settings in kinds.items()}


def flight_seeds() -> dict[str, bytes]:
    """Logs with each kind of record, rejected ones among them."""
    plain, matrix = head(1), head(2, noise_var=[[0.5, 0.1], [0.1, 0.4]], dtype="float64", gate=9.0)
    softmax = head(3, output="softmax", covariance="diagonal", max_rows=2, hidden=(4,))
    for each in (plain, matrix, softmax):
        each.record(4)
    for step in range(7):  # more than it remembers, so that a checkpoint stands in the log
        plain.update([0.1 * step, -1.0], [0.5])
    matrix.predict([1.0, 0.5])
    matrix.observe([0.5, 0.25])
    matrix.update([1.0, -0.5], [99.0, 99.0])
    softmax.update([[1.0, 0.0], [0.0, 1.0]], [2, 0])
    return {"plain": plain.flight_log(), "matrix": matrix.flight_log(), "softmax": softmax.flight_log()}


def bundle_seeds() -> dict[str, bytes]:
    """One bundle of each kind, as small as they come."""
    control, tokens = tiny_onnx.Control(d=2), tiny_onnx.Tokens(3, 2, d=2)
    scaled = bundles.BundleInput("x", (1, 4), "float32", (0.5,), (2.0, 1.0, 0.1, 1e3))
    ids = tuple(bundles.BundleInput(f"{name}_ids", (2,), "int64") for name in ("source", "target"))
    one = dict(trunk=control.onnx, inputs=(scaled,), rows=1, d=2, offset=(0.25,), scale=(3.0,), made={"by": "seed"})
    two = dict(trunk=tokens.onnx, inputs=ids, rows=2, d=2)
    return {
        "plain": packed(head(2), **one),
        "matrix": packed(head(2, noise_var=[[0.5, 0.1], [0.1, 0.4]], dtype="float64", gate=9.0), **one),
        "hidden": packed(head(1, hidden=(4,), covariance="full", forgetting=0.99), **one),
        "softmax": packed(head(3, output="softmax", covariance="diagonal", max_rows=2), **two),
    }


def head(d_o: int, **settings: Any) -> kbt.Head:
    made = kbt.Head(np.arange(2.0 * d_o).reshape(d_o, 2) / 4, **settings)
    made.update([0.5, -1.0], np.eye(d_o)[0])
    return made


def packed(state: kbt.Head, **parts: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        bundles.write(folder, bundles.Bundle(head=state.to_bytes(), **parts))
        text, head, trunk = ((Path(folder) / name).read_bytes() for name in ("bundle.json", "head.kbt", "trunk.onnx"))
    text = json.dumps(json.loads(text), separators=(",", ":")).encode()
    return struct.pack("<II", len(text), len(head)) + text + head + trunk


def main() -> None:
    for target, files in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (CORPUS / target / name).write_bytes(data)
            print(f"{target}/{name:<10} {len(data):>6} bytes")


if __name__ == "__main__":
    main()
