"""The learners of streams.py and plants.py: our head and plain baselines. stream_peers.py has the peers.

A learner of numbers has ``predict(h) -> (mean, variance of an observation)``, both (outputs,), and then ``learn(y)``.
A learner of classes has ``predict(h) -> probabilities`` and then ``learn(label)``. A factory of one takes (d, outputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Factory = Callable[[int, int], Any]
WINDOW = 100  # samples over which noise is averaged


class Ours:
    """A head, with the default settings unless others are given."""

    def __init__(self, d: int, o: int, weight: Array | None = None, bias: Array | None = None, **settings: Any) -> None:
        import kbt_edge as kbt

        weight, bias = np.zeros((o, d)) if weight is None else weight, np.zeros(o) if bias is None else bias
        self.head = kbt.Head(weight, bias, **settings)
        self.changes = 0  # that the head has reported

    def predict(self, h: Array) -> tuple[Array, Array]:
        p = self.head.predict(h.astype(np.float32))
        return p.mean.astype(np.float64), p.total_var.astype(np.float64)

    def learn(self, y: Array) -> None:
        update = self.head.observe(y.astype(np.float32))
        changes = getattr(self.head, "changes", None)
        if changes is not None:
            self.changes = changes if isinstance(changes, int) else len(changes)
        elif getattr(update, "changed", False):
            self.changes += 1


class OurClasses:
    def __init__(self, d: int, o: int) -> None:
        import kbt_edge as kbt

        self.head = kbt.Head(np.zeros((o, d)), np.zeros(o), output="softmax")

    def predict(self, h: Array) -> Array:
        return np.asarray(self.head.predict(h.astype(np.float32)).mean, np.float64)

    def learn(self, label: int) -> None:
        self.head.observe(label)


# ---- plain baselines -------------------------------------------------------------------------------------------------


class Errors:
    """A running variance of a learner's own errors, for learners that give none."""

    def __init__(self, o: int) -> None:
        self.var, self.count = np.ones(o), 10

    def add(self, squared: Array) -> None:
        self.var += (squared - self.var) / min(self.count, WINDOW)
        self.count += 1


class RLS:
    """Recursive least squares, the covariance in units of the noise.

    Against wind-up: what forgetting takes from the prior is given back, one coordinate per sample in turn, so that the
    covariance of directions without excitation stays at about the prior.
    """

    def __init__(self, d: int, o: int, weight: Array | None = None, bias: Array | None = None, forgetting: float = 1.0,
                 prior: float = 100.0) -> None:  # fmt: skip
        self.W = np.zeros((d + 1, o))
        if weight is not None and bias is not None:
            self.W = np.vstack([weight.T, bias])
        self.P, self.noise = prior * np.eye(d + 1), Errors(o)
        self.forgetting, self.turn = forgetting, 0
        self.limit = prior / ((1 - forgetting) * (d + 1)) if forgetting < 1.0 else 0.0

    def predict(self, h: Array) -> tuple[Array, Array]:
        self.z = np.append(h, 1.0)
        self.gain = self.P @ self.z
        self.q = 1.0 + float(self.z @ self.gain)
        self.mean = self.z @ self.W
        return self.mean, self.noise.var * self.q

    def learn(self, y: Array) -> None:
        error, f = y - self.mean, self.forgetting
        denominator = self.q - 1.0 + f
        self.W += np.outer(self.gain / denominator, error)
        self.P -= np.outer(self.gain, self.gain) / denominator  # symmetric to the bit, or forgetting blows it up
        if f < 1.0:
            self.P /= f
            self.turn = (self.turn + 1) % len(self.z)
            column = self.P[:, self.turn].copy()
            self.P -= np.outer(column, column) / (self.limit + column[self.turn])
        self.noise.add(error**2 / self.q)


class Frozen:
    """Learns nothing but the size of its errors."""

    def __init__(self, d: int, o: int, weight: Array | None = None, bias: Array | None = None) -> None:
        self.W, self.b = np.zeros((o, d)) if weight is None else weight, np.zeros(o) if bias is None else bias
        self.errors = Errors(o)

    def predict(self, h: Array) -> tuple[Array, Array]:
        self.mean = self.value(h)
        return self.mean, self.errors.var.copy()

    def value(self, h: Array) -> Array:
        return self.W @ h + self.b

    def learn(self, y: Array) -> None:
        self.errors.add((y - self.mean) ** 2)


class LastValue(Frozen):
    def value(self, h: Array) -> Array:
        return self.b

    def learn(self, y: Array) -> None:
        super().learn(y)
        self.b = y


class Mean(LastValue):
    def learn(self, y: Array) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().learn(y)
        self.b = self.mean + (y - self.mean) / self.count


class Counts:
    """How often each class was seen so far."""

    def __init__(self, d: int, o: int) -> None:
        self.seen = np.ones(o)

    def predict(self, h: Array) -> Array:
        return self.seen / self.seen.sum()

    def learn(self, label: int) -> None:
        self.seen[label] += 1


class LastClass(Counts):
    """How often each class was seen after the latest one."""

    def __init__(self, d: int, o: int) -> None:
        self.seen, self.latest = np.ones((o, o)), 0

    def predict(self, h: Array) -> Array:
        row: Array = self.seen[self.latest]
        return row / row.sum()

    def learn(self, label: int) -> None:
        self.seen[self.latest, label] += 1
        self.latest = label


def baselines(kind: str) -> dict[str, Factory]:
    """For "regression" or "classification"."""
    if kind == "classification":
        return {"counts": Counts, "last class": LastClass}
    made: dict[str, Factory] = {"last value": LastValue, "mean": Mean}
    for f in (1.0, 0.99, 0.95):
        made[f"RLS {f:g}"] = lambda d, o, f=f: RLS(d, o, forgetting=f)  # type: ignore[misc]
    return made
