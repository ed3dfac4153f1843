"""Adaptation to the new plant: success, force RMSE and log likelihood against samples, and seconds per sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kbt_edge._progress import Tell
from kbt_edge.errors import BackendError
from kbt_edge.head import Head
from kbt_edge.model import Model
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import METHODS, Learner, Method, Retraining
from kbt_edge.studies.common import (
    HEADS,
    PAPER_EPSILON,
    SINGLE,
    WATCHFUL,
    Array,
    Result,
    Settings,
    parallel,
    pretrained,
)
from kbt_edge.studies.learners import Kbt, Paper
from kbt_edge.trunk import Backend

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["adaptation", "computation_time"]


@dataclass(frozen=True)
class Row:
    """A line of a figure or of the ablation: its name, what it changes, and how to make its learner."""

    name: str
    what: str
    make: Callable[[DecisionTransformer], Learner]
    main: bool = False  # looked at often, and drawn


def rows(tuned: Mapping[str, Any]) -> list[Row]:
    """KBT, each of its corrections, and the baselines."""
    wide = {"drift": 0.0, "hidden": (32,)}
    one = {**wide, "prior_var": PAPER_EPSILON}
    layered = {**wide, "noise_var": 1e-3}  # known, and the default prior of each layer

    def kbt(**settings: Any) -> Callable[[DecisionTransformer], Learner]:
        return lambda network: Kbt(network, **settings)

    ladder = [
        Row("paper", "two layers, one ε, replace, diagonal backward", lambda network: Paper(network, PAPER_EPSILON)),
        Row("exact backward", "+ Cov(u, z) in full", kbt(**one, covariance="full", rule="replace", noise_var=0.0)),
        Row("fuse", "+ a Kalman update", kbt(**one, covariance="full", noise_var=1e-3)),
        Row("prior per layer", "+ ε = 1e-6 and 10", kbt(**layered, covariance="full")),
        Row("blocks", "+ correlations within neurons only", kbt(**layered)),
        Row(SINGLE, "one layer, noise learned", kbt(**HEADS[SINGLE]), main=True),
        Row("tuned", "settings by kbt_edge.tune", kbt(**tuned)),
        Row(WATCHFUL, "nothing set: a watchful head", kbt(**HEADS[WATCHFUL]), main=True),
    ]
    others = [Row(method.name, "", _baseline(method), main=method.name != "least squares") for method in METHODS]
    return ladder + others


def _baseline(method: Method) -> Callable[[DecisionTransformer], Learner]:
    return lambda network: method.make(network, method.setting)


def adaptation(settings: Settings, tuned: Mapping[str, Any], jobs: int | None, tell: Tell) -> Result:
    """Every row over every trial: {row: {"samples": [...], "rmse": [trial][moment], ...}}."""
    every = rows(tuned)
    tasks = [(row.name, trial) for trial in range(settings.trials) for row in every]
    # The slowest first, so that no process starts one of them last.
    tasks.sort(key=lambda task: task[0] not in ("paper", "retrain 10", *HEADS))
    done = parallel("adaptation", _adapt, [(name, trial, settings, tuned) for name, trial in tasks], jobs, tell)
    by_task = dict(zip(tasks, done, strict=True))
    out: Result = {}
    for row in every:
        trials = [by_task[row.name, trial] for trial in range(settings.trials)]
        out[row.name] = {"what": row.what, "main": row.main, "samples": trials[0]["samples"]}
        for figure in ("rmse", "success", "nll"):
            out[row.name][figure] = [trial[figure] for trial in trials]
        out[row.name]["clipped"] = [trial["clipped"] for trial in trials]
    return out


def _adapt(name: str, trial: int, settings: Settings, tuned: Mapping[str, Any]) -> Result:
    """One trial of one row."""
    row = next(row for row in rows(tuned) if row.name == name)
    gain = cartpole.lqr_gain(cartpole.NEW)
    rng = np.random.default_rng([settings.seed, trial])  # the same streams for every row
    starts = cartpole.sample_starts(rng, settings.starts)
    unseen = cartpole.sample_states(rng, settings.unseen)
    states, forces = cartpole.sample_pairs(rng, settings.samples, gain)
    wanted = cartpole.lqr_policy(gain)(unseen)
    learner = row.make(pretrained())
    moments = settings.moments() if row.main else settings.few_moments()

    out: Result = {"samples": moments, "rmse": [], "nll": []}
    seen: list[Array] = []  # forces of each policy that differs from the one before
    snapshots, index = [], []
    for moment in moments:
        for i in range(learner.samples, moment):
            learner.observe(states[i], float(forces[i]))
        believed = learner.policy(unseen)
        if not seen or not np.array_equal(seen[-1], believed):
            seen.append(believed)
            snapshots.append(learner.snapshot())
        index.append(len(snapshots) - 1)
        out["rmse"].append(float(np.sqrt(np.mean((believed - wanted) ** 2))))
        out["nll"].append(_negative_log_likelihood(learner, unseen, wanted))
    rates = cartpole.success_rates(cartpole.NEW, learner.policies(snapshots), len(snapshots), starts)
    out["success"] = rates[index].tolist()
    out["clipped"] = learner.head.clipped if isinstance(learner, Paper) else None
    return out


def _negative_log_likelihood(learner: Learner, states: Array, forces: Array) -> float | None:
    """Mean over unseen states of −log of the predicted density of the force; None if nothing is predicted."""
    if isinstance(learner, Paper):
        states, forces = states[:50], forces[:50]  # it is slow
    if not isinstance(learner, (Kbt, Paper)):
        return None
    seen = learner.moments(states)
    total = np.maximum(seen.total, 1e-12)
    return float(np.mean(0.5 * (np.log(2 * math.pi * total) + (forces - seen.mean) ** 2 / total)))


def computation_time(settings: Settings, tell: Tell) -> Result:
    """Mean seconds per sample from state and force to an adapted policy, in one process, one row after the other.

    Processor time: the load of other processes does not count.
    """
    rng = np.random.default_rng([settings.seed, 1 << 20])
    states, forces = cartpole.sample_pairs(rng, 400, cartpole.lqr_gain(cartpole.NEW))
    out: Result = {}
    backends: tuple[Backend, ...] = ("compiled", "onnxruntime")
    for backend in backends:
        try:
            models = {name: _model(backend, head) for name, head in HEADS.items()}
        except BackendError as error:
            out |= {f"{name}, trunk {backend}": {"seconds": None, "why": str(error)} for name in HEADS}
            continue
        for name, model in models.items():
            repeats = []
            for _ in range(5):
                started = time.process_time()
                for state, force in zip(states, forces, strict=True):
                    model.predict(state)
                    model.observe(force)
                repeats.append((time.process_time() - started) / len(states))
            out[f"{name}, trunk {backend}"] = {"seconds": float(np.median(repeats))}
    # The start-up of torch is not charged to any method.
    warm_up = Retraining(pretrained(), memory=10, learning_rate=1e-3, epochs=1)
    for state, force in zip(states[:10], forces[:10], strict=True):
        warm_up.observe(state, float(force))
    for method in METHODS:
        if method.name == "frozen":
            continue
        tell(f"computation time: {method.name}")
        learner = method.make(pretrained(), method.setting)
        memory = getattr(learner, "memory", 1)
        count = max(1, settings.timed // memory) * memory  # full memories only: nothing is trained before
        for state, force in zip(states[:count], forces[:count], strict=True):
            learner.observe(state, float(force))
        out[method.name] = {"seconds": learner.seconds / count}
    tell(None)
    return out


def _model(backend: Backend, settings: Mapping[str, Any]) -> Model:
    """The shipped cart-pole, with a head of these settings that has learned nothing."""
    model = Model.load("kbt_edge:cartpole", backend=backend)
    means = model.head.layers[0].mean
    return Model(
        model.bundle().trunk,
        Head(means[:, :-1], means[:, -1], **settings),
        input_mean=model.input_mean,
        input_scale=model.input_scale,
        output_offset=model.output_offset,
        output_scale=model.output_scale,
        backend=backend,
    )
