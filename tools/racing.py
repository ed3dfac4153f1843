"""Runs the races of compare_peers.py: runners take turns, and the ratio of their times is compared with a goal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENOUGH_FOR_P99 = 200  # calls

Nanoseconds = NDArray[np.int64]
Block = Callable[[], Nanoseconds]  # runs a block of calls and returns how long each took


class SkipError(Exception):
    """A race that cannot be set up here, and why."""


@dataclass(frozen=True)
class Goal:
    ours: str
    peer: str
    factor: float | None  # None: for information


@dataclass(frozen=True)
class Race:
    title: str
    runners: dict[str, Block]
    goals: tuple[Goal, ...]
    rounds: int | None = None  # None: as many as asked for
    notes: Callable[[dict[str, float]], list[str]] = lambda medians: []  # from medians in µs


def run(race: Race, rounds: int) -> dict[str, list[Nanoseconds]]:
    """Runner → its blocks, one per round. The first block of each warms up and does not count."""
    taken: dict[str, list[Nanoseconds]] = {name: [] for name in race.runners}
    gc.collect()
    gc.disable()
    try:
        for turn in range(1 + (race.rounds or rounds)):
            for name, block in race.runners.items():
                nanoseconds = block()
                if turn:
                    taken[name].append(nanoseconds)
    finally:
        gc.enable()
    return taken


def figures(blocks: Sequence[Nanoseconds]) -> dict[str, float | int | None]:
    """Median and 99th percentile of single calls; of a few calls there is no such percentile."""
    calls = np.concatenate(blocks) / 1e3
    p99 = float(np.percentile(calls, 99)) if calls.size >= ENOUGH_FOR_P99 else None
    return {"median_us": float(np.median(calls)), "p99_us": p99, "max_us": float(calls.max()), "calls": calls.size}


def judged(goal: Goal, taken: dict[str, list[Nanoseconds]]) -> dict[str, Any]:
    """How many times as long the peer takes."""
    ratios = [
        float(np.median(peer) / np.median(ours)) for ours, peer in zip(taken[goal.ours], taken[goal.peer], strict=True)
    ]
    low, ratio, high = (float(q) for q in np.percentile(ratios, (10, 50, 90)))
    met = None if goal.factor is None else ratio >= goal.factor
    return {"ours": goal.ours, "peer": goal.peer, "ratio": ratio, "low": low, "high": high,
            "goal": goal.factor, "met": met}  # fmt: skip


def timed(call: Callable[..., Any], *columns: Sequence[Any]) -> Block:
    """A block of calls with one or two arguments each."""
    clock = time.perf_counter_ns

    def block() -> Nanoseconds:
        taken = []
        if len(columns) == 1:
            for x in columns[0]:
                started = clock()
                call(x)
                taken.append(clock() - started)
        else:
            for x, y in zip(*columns, strict=True):
                started = clock()
                call(x, y)
                taken.append(clock() - started)
        return np.array(taken)

    return block
