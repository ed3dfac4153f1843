"""A plant that changes while it runs: the default head next to learners that were told how the plant moves.

Three streams of samples without noise, each of which begins with the old plant of the cart-pole:

    there and back   the plant becomes the new one at once, and later the old one again
    slow             masses and lengths move to those of the new plant, evenly in their logarithms, and stay there
    outliers         the plant stays as it is; the targets of 20 samples in a row are 60 N off, up or down

After every few samples each learner is asked for forces at states that no learner has seen. Its error is measured
against the LQR of the plant as it is at that moment. Retraining is the whole network's, warm-started, on a memory of
100 samples that is trained on and dropped whenever it is full. The other learners read the rows h of the frozen trunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from kbt_edge._progress import Tell
from kbt_edge.head import Head
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import METHODS, Retraining, hidden
from kbt_edge.studies.common import HEADS, SINGLE, WATCHFUL, Array, Result, Settings, parallel, pretrained
from kbt_edge.studies.learners import readout

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["AFTER", "LEARNERS", "RLS", "STREAMS", "Stream", "changing", "stream", "table"]

AFTER: Final = (20, 50, 200, 1000)  # samples after a change at which the table looks
STREAMS: Final = ("there and back", "slow", "outliers")
BURST: Final = 20  # samples
OUTLIER: Final = 60.0  # N
MEMORY: Final = 100  # samples, of retraining
LEARNING_RATE: Final = next(method.setting for method in METHODS if method.name == f"retrain {MEMORY}")


# ---- the streams -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Samples, and the gain of the plant's LQR at each of them."""

    states: Array  # (n, 4)
    forces: Array  # (n,) N, outliers included
    gains: Array  # (n, 4)
    events: dict[str, int]  # what happens to the plant or the targets, and after how many samples


def stream(name: str, settings: Settings, seed: int) -> Stream:
    """One of ``STREAMS``."""
    before, after = settings.changing_before, settings.changing_after
    old, new = cartpole.lqr_gain(cartpole.OLD), cartpole.lqr_gain(cartpole.NEW)
    parts = {
        "there and back": ([old] * before, [new] * after, [old] * after),
        "slow": ([old] * before, _moving(after), [new] * after),
        "outliers": ([old] * before, [old] * after),
    }[name]
    events = {
        "there and back": {"abrupt change": before, "back again": before + after},
        "slow": {"slow change begins": before},
        "outliers": {"outliers begin": before},
    }[name]
    gains = np.concatenate([np.array(part) for part in parts])
    rng = np.random.default_rng([settings.seed, 5 << 20, seed])
    states = cartpole.sample_states(rng, len(gains))
    forces = -np.einsum("ij,ij->i", states, gains)
    if name == "outliers":
        forces[before : before + BURST] += OUTLIER * rng.choice([-1.0, 1.0], BURST)
    return Stream(states, forces, gains, events)


@lru_cache(8)
def _moving(count: int) -> list[Array]:
    """LQR gains on the way from the old plant to the new one."""
    old, new = ((p.cart_mass, p.pole_mass, p.length) for p in (cartpole.OLD, cartpole.NEW))
    way = np.exp(np.linspace(np.log(old), np.log(new), count + 1)[1:])
    return [cartpole.lqr_gain(cartpole.CartPole(*map(float, plant))) for plant in way]


# ---- the learners ----------------------------------------------------------------------------------------------------


class Learner(Protocol):
    """Sees a state, its row h and the target in units of ``FORCE_SCALE``."""

    def learn(self, state: Array, h: Array, y: float) -> None: ...

    def forces(self, states: Array, rows: Array) -> Array:
        """In newtons, (N,) at states (N, 4) with rows (N, d)."""


class Ours:
    """A head."""

    def __init__(self, network: DecisionTransformer, **settings: Any) -> None:
        self.head = Head(*readout(network), **settings)
        self.reported: list[int] = []  # samples after which it reported a change

    def learn(self, state: Array, h: Array, y: float) -> None:
        if self.head.update(h.astype(np.float32), np.array([y], np.float32)).changed:  # its own type: the fast way in
            self.reported.append(self.head.samples)

    def forces(self, states: Array, rows: Array) -> Array:
        return cartpole.FORCE_SCALE * np.array(
            [self.head.predict(h).mean[0] for h in rows.astype(np.float32)], np.float64
        )


class RLS:
    """Recursive least squares on [h, 1] from the readout, the covariance in units of the noise.

    The prior variance was chosen from 10 to 1e6 on streams of another seed, for a factor of 0.95. Over that range the
    errors of the other two hardly change. Against wind-up: what forgetting takes from the prior is given back, one
    coordinate per sample in turn.
    """

    def __init__(self, network: DecisionTransformer, forgetting: float, prior_var: float = 100.0) -> None:
        self.w = np.concatenate([part.ravel() for part in readout(network)])
        self.P: Array = prior_var * np.eye(len(self.w))
        self.forgetting, self.turn = forgetting, 0
        self.limit = prior_var / ((1.0 - forgetting) * len(self.w)) if forgetting < 1.0 else np.inf

    def learn(self, state: Array, h: Array, y: float) -> None:
        z = np.append(h, 1.0)
        g = self.P @ z
        spread = self.forgetting + float(z @ g)
        self.w += g * ((y - float(z @ self.w)) / spread)
        self.P -= np.outer(g, g) / spread
        if self.forgetting < 1.0:
            self.P /= self.forgetting
            self.turn = (self.turn + 1) % len(z)
            column = self.P[:, self.turn].copy()
            self.P -= np.outer(column, column) / (self.limit + column[self.turn])

    def forces(self, states: Array, rows: Array) -> Array:
        forces: Array = cartpole.FORCE_SCALE * (rows @ self.w[:-1] + self.w[-1])
        return forces


class Frozen(RLS):
    """The readout, unchanged."""

    def __init__(self, network: DecisionTransformer) -> None:
        super().__init__(network, 1.0)

    def learn(self, state: Array, h: Array, y: float) -> None:
        pass


class Retrained:
    """The whole network, retrained."""

    def __init__(self, network: DecisionTransformer, memory: int) -> None:
        self.network = Retraining(network, memory, LEARNING_RATE)

    def learn(self, state: Array, h: Array, y: float) -> None:
        self.network.observe(state, cartpole.FORCE_SCALE * y)

    def forces(self, states: Array, rows: Array) -> Array:
        return self.network.policy(states)


LEARNERS: Final[dict[str, Callable[[DecisionTransformer], Learner]]] = {
    WATCHFUL: lambda network: Ours(network, **HEADS[WATCHFUL]),
    SINGLE: lambda network: Ours(network, **HEADS[SINGLE]),
    "RLS 1": lambda network: RLS(network, 1.0),
    "RLS 0.99": lambda network: RLS(network, 0.99),
    "RLS 0.95": lambda network: RLS(network, 0.95),
    f"retraining {MEMORY}": lambda network: Retrained(network, MEMORY),
    "frozen": Frozen,
}


# ---- the measurement -------------------------------------------------------------------------------------------------


def changing(settings: Settings, jobs: int | None, tell: Tell) -> Result:
    """Every learner on every stream: force RMSE by seed and moment, and what the default head believed."""
    tasks = [(s, name, seed, settings) for s in STREAMS for seed in range(settings.changing_seeds) for name in LEARNERS]
    tasks.sort(key=lambda task: not task[1].startswith("retraining"))  # the slowest first
    done = parallel("changing plant", follow, tasks, jobs, tell)
    by_task = {task[:3]: found for task, found in zip(tasks, done, strict=True)}
    out: Result = {"streams": {}, "seconds": {}}
    seeds = range(settings.changing_seeds)
    for s in STREAMS:
        ours = [by_task[s, WATCHFUL, seed] for seed in seeds]
        out["streams"][s] = {
            "events": stream(s, settings, 0).events,
            "moments": ours[0]["moments"],
            "rmse": {name: [by_task[s, name, seed]["rmse"] for seed in seeds] for name in LEARNERS},
            "reported": [found["reported"] for found in ours],
            "belief": ours[0]["belief"],
        }
    for name in LEARNERS:
        times = [by_task[s, name, seed]["seconds"] for s in STREAMS for seed in seeds]
        out["seconds"][name] = float(np.median(times))
    return out


def follow(name: str, learner_name: str, seed: int, settings: Settings) -> Result:
    """One learner on one stream."""
    network = pretrained()
    samples = stream(name, settings, seed)
    unseen = cartpole.sample_states(np.random.default_rng([settings.seed, 6 << 20, seed]), settings.unseen)
    rows, targets = hidden(network, samples.states), samples.forces / cartpole.FORCE_SCALE
    unseen_rows = hidden(network, unseen)
    learner = LEARNERS[learner_name](network)
    moments = _moments(len(rows), samples.events.values())
    out: Result = {"moments": moments, "rmse": [], "belief": {}, "reported": []}
    done, seconds = 0, 0.0
    for moment in moments:
        started = time.process_time()
        for i in range(done, moment):
            learner.learn(samples.states[i], rows[i], float(targets[i]))
        seconds += time.process_time() - started
        done = moment
        wanted = -(unseen @ samples.gains[max(0, moment - 1)])
        out["rmse"].append(float(np.sqrt(np.mean((learner.forces(unseen, unseen_rows) - wanted) ** 2))))
        if isinstance(learner, Ours):
            for member, weight in learner.head.belief.items():
                out["belief"].setdefault(member, []).append(weight)
    if isinstance(learner, Ours):
        out["reported"] = learner.reported
    return out | {"seconds": seconds / len(rows)}


def _moments(n: int, events: Iterable[int]) -> list[int]:
    """Every 20 samples, and closer together after each event."""
    close = [*range(1, 10), *range(10, 60, 2), *range(60, 200, 5)]
    near = {event + k for event in events for k in (*close, *AFTER)}
    return sorted(k for k in {*range(0, n + 1, 20), n, *near} if k <= n)


def table(result: Mapping[str, Any]) -> list[Result]:
    """Median error (N) over the seeds of every learner at ``AFTER`` each event, the default head's losses first.

    "ratio": the default head's error over the smallest of the others.
    """
    lines: list[Result] = []
    for data in result["streams"].values():
        for event, at in data["events"].items():
            ends = [other for other in (*data["events"].values(), data["moments"][-1]) if other > at]
            for count in AFTER:
                if at + count > min(ends):
                    continue
                i = data["moments"].index(at + count)
                errors = {name: float(np.median([run[i] for run in runs])) for name, runs in data["rmse"].items()}
                best = min(error for name, error in errors.items() if name != WATCHFUL)
                lines.append({"event": event, "after": count, "errors": errors, "ratio": errors[WATCHFUL] / best})
    return sorted(lines, key=lambda line: (line["ratio"] <= 1.0, -line["ratio"] if line["ratio"] > 1.0 else 0.0))
