"""How much longer a step takes when its numbers are denormal: ``python tools/denormals.py``.

Processors take denormal numbers to a slow path. Heads of every covariance get ordinary inputs, denormal ones, inputs
whose squares are denormal, and half of each; and ordinary inputs with denormals flushed to zero by the processor, which
shows whether denormal numbers come up inside. Prints the median time of a step as a multiple of that for ordinary
inputs in the same round, the median of all rounds; exits with 1 when one is above 1.2.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

import kbt_edge as kbt
from kbt_edge import _core

LIMIT: Final = 1.2
SAMPLES: Final = 512
ROUNDS: Final = 100
KINDS: Final = ("ordinary", "denormal", "1e-20", "half of each", "flushed")


def inputs(kind: str, ordinary: np.ndarray) -> np.ndarray:
    if kind == "denormal":
        return (ordinary * 1e-40).astype(np.float32)
    if kind == "1e-20":
        return (ordinary * 1e-20).astype(np.float32)
    if kind == "half of each":
        return np.where(np.arange(ordinary.shape[1]) % 2, ordinary, ordinary * 1e-40).astype(np.float32)
    return ordinary


def multiples(settings: dict[str, Any]) -> dict[str, float]:
    rng = np.random.default_rng(0)
    outputs = 3 if settings.get("output") == "softmax" else 1
    weight = rng.standard_normal((outputs, 16)).astype(np.float32)
    ordinary = rng.standard_normal((SAMPLES, 16)).astype(np.float32)
    u = ordinary @ weight.T
    y = u.argmax(1)[:, None].astype(np.int32) if outputs > 1 else (u + 0.1 * rng.standard_normal(u.shape)).astype("f4")
    loops, heads = {}, []
    for kind in KINDS:
        heads.append(kbt.Head(weight, **settings))
        loops[kind] = _core.Loop(heads[-1]._core, 1, inputs(kind, ordinary), y)
    recorder = _core.Recorder(2 * SAMPLES, True)
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    steps = SAMPLES // 8 if settings["covariance"] == "full" else SAMPLES
    for _ in range(ROUNDS):
        for kind, loop in loops.items():
            recorder.clear()
            _core.set_flush_to_zero(kind == "flushed")
            status = loop.steps(0, steps, 1, recorder)
            _core.set_flush_to_zero(False)
            assert status == 0
            medians[kind].append(float(np.median(np.diff(recorder.stamps.astype(np.int64).reshape(-1, 2), axis=1))))
    return {kind: float(np.median(np.divide(medians[kind], medians["ordinary"]))) for kind in KINDS}


def main() -> int:
    hidden: dict[str, Any] = {"hidden": (32,), "prior_var": (1e-3, 1.0), "noise_var": 1e-2}
    worst = 0.0
    print(f"{'':34}" + "".join(f"{kind:>14}" for kind in KINDS))
    for covariance in ("full", "neuron", "diagonal"):
        for name, settings in (("16 → 1", {}), ("16 → 32 → 1", hidden), ("16 → 3 softmax", {"output": "softmax"})):
            found = multiples({"covariance": covariance, **settings})
            worst = max(worst, *(found[kind] for kind in KINDS[:-1]), 1 / found["flushed"])
            print(f"{covariance + ', ' + name:34}" + "".join(f"{found[kind]:14.2f}" for kind in KINDS))
    print(f"largest multiple {worst:.2f}, expected at most {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
