"""What the tasks of plants.py share: sizes, baselines, and how a learner is taught and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stream_learners import RLS, Frozen

Array = NDArray[np.float64]
Make = Callable[[int, int, Array, Array], Any]
Row = dict[str, Any]
Rows = Iterator[Row]
FACTORS = (1.0, 0.999, 0.99, 0.98, 0.95)
Z90 = 1.6448536


@dataclass(frozen=True)
class Sizes:
    seeds: int = 10
    few: int = 3  # seeds of the longer tasks
    old: tuple[int, ...] = (0, 100, 1000, 10_000)
    unseen: int = 500
    after: int = 3000  # samples with outliers
    length: int = 20_000  # of quiet
    settled: int = 1000
    drifting: int = 5000
    widths: tuple[int, ...] = (16, 64, 256, 512, 768)
    seconds: float = 120.0  # of a motor's log
    logs: int = 20


QUICK = Sizes(seeds=2, few=1, old=(0, 50), unseen=30, after=150, length=300, settled=150, drifting=300, widths=(16,),
              seconds=4.0, logs=1)  # fmt: skip


def baselines() -> dict[str, Make]:
    made: dict[str, Make] = {f"RLS {f:g}": lambda *a, f=f: RLS(*a, forgetting=f, prior=1000.0) for f in FACTORS}
    return made | {"frozen": Frozen}


def teach(learner: Any, H: Array, Y: Array) -> Array:
    """Predict, then learn, each sample; the errors (n, outputs) in units of the predicted deviation."""
    out = np.empty(Y.shape)
    for i, (h, y) in enumerate(zip(H, Y, strict=True)):
        mean, var = learner.predict(h)
        out[i] = (y - mean) / np.sqrt(np.maximum(var, 1e-300))
        learner.learn(y)
    return out


def error(learner: Any, H: Array, Y: Array) -> float:
    """Root mean square over samples that are not learned."""
    return float(np.sqrt(np.mean([(learner.predict(h)[0] - y) ** 2 for h, y in zip(H, Y, strict=True)])))


def mean_square(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def reported(learner: Any) -> int | None:
    return getattr(learner, "changes", None)


def plus_one(H: Array) -> Array:
    return np.hstack([H, np.ones((len(H), 1))])
