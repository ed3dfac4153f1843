#!/usr/bin/env python3
"""Latency of ``predict + observe`` on the shipped cart-pole bundle, compiled trunk against onnxruntime, in one process.

    python tools/step_latency.py [--json]

Both models are warmed up, then take turns in blocks of 200 steps, so that both see the same disturbances and each its
own warm caches. Medians and 99th percentiles of single steps; the clock's own cost is printed and not subtracted.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

import kbt_edge as kbt

BLOCK, BLOCKS = 200, 40


def block(model: kbt.Model, states: np.ndarray, forces: np.ndarray) -> list[int]:
    taken = []
    for state, force in zip(states, forces, strict=True):
        started = time.perf_counter_ns()
        model.predict(state)
        model.observe(force)
        taken.append(time.perf_counter_ns() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (BLOCK, 4)) * [16, 12, 0.6, 1]
    forces = rng.normal(0, 20, BLOCK).tolist()
    models = {backend: kbt.Model.load("kbt_edge:cartpole", backend=backend) for backend in ("compiled", "onnxruntime")}
    taken: dict[str, list[int]] = {backend: [] for backend in models}
    for model in models.values():
        block(model, states, forces)
    for _ in range(BLOCKS):
        for backend, model in models.items():
            taken[backend] += block(model, states, forces)
    clock = float(np.median([-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(10_000)])) / 1e3
    result = {
        backend: {"median_us": float(np.median(ns)) / 1e3, "p99_us": float(np.percentile(ns, 99)) / 1e3}
        for backend, ns in taken.items()
    }
    ratio = result["onnxruntime"]["median_us"] / result["compiled"]["median_us"]
    if args.json:
        print(json.dumps({**result, "ratio_of_medians": ratio, "clock_us": clock}))
        return
    for backend, figures in result.items():
        print(f"{backend:12s} median {figures['median_us']:8.2f} µs   p99 {figures['p99_us']:8.2f} µs")
    print(f"ratio of medians {ratio:.1f}; the clock itself costs {clock:.2f} µs; {BLOCKS} x {BLOCK} steps each")


if __name__ == "__main__":
    main()
