"""``kbt-edge demo``: the plant has changed and the policy fails; after fifty samples it balances.

Uses the shipped cart-pole bundle: a decision transformer trained on the LQR of the old plant. On the new plant, with a
pole ten times as long and ten times as heavy, it fails from every start. The head then learns the new LQR's forces one
sample at a time, and the closed loop is tried again on the way. No torch.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kbt_edge._progress import Tell, silent
from kbt_edge.errors import RangeError
from kbt_edge.model import Model
from kbt_edge.studies import cartpole
from kbt_edge.trunk import Backend

__all__ = ["run"]

Array = NDArray[np.float64]
_LOOK = (5, 10, 20, 50, 100, 200, 400)  # samples after which the loop is closed again
STARTS, _TEST_STATES = 10, 200


def run(samples: int, seed: int, out: Path, backend: Backend = "auto", tell: Tell = silent) -> dict[str, Any]:
    """Learn ``samples`` samples of the new plant; writes the adapted bundle and a picture to ``out``."""
    if not 1 <= samples <= 100_000:
        raise RangeError(f"samples: expected 1..100000, got {samples}")
    if seed < 0:
        raise RangeError(f"seed: expected 0 or more, got {seed}")
    model = Model.load("kbt_edge:cartpole", backend=backend)
    rng = np.random.default_rng(seed)
    gain = cartpole.lqr_gain(cartpole.NEW)
    starts = cartpole.sample_starts(rng, STARTS)
    unseen = cartpole.sample_states(rng, _TEST_STATES)
    states, forces = cartpole.sample_pairs(rng, samples, gain)

    old_plant = cartpole.rollout(cartpole.OLD, _policy(model), starts)
    before = cartpole.rollout(cartpole.NEW, _policy(model), starts)
    scenes = [_scene("the old policy on the new plant", model, before)]
    progress = [_look(model, 0, gain, unseen, before, [])]
    seconds: list[float] = []
    tell(_line(progress[-1]))
    for i, (state, force) in enumerate(zip(states, forces, strict=True), 1):
        model.predict(state)
        started = time.perf_counter()
        model.observe(force)
        seconds.append(time.perf_counter() - started)
        if i in _LOOK or i == samples:
            after = cartpole.rollout(cartpole.NEW, _policy(model), starts)
            progress.append(_look(model, i, gain, unseen, after, seconds))
            if i in (_LOOK[0], samples):
                scenes.append(_scene(f"after {i} samples", model, after))
        tell(_line({**progress[-1], "samples": i}))
    tell(None)

    out.mkdir(parents=True, exist_ok=True)
    bundle = model.save(out / "cartpole")
    picture = out / "demo.png"
    drawn = _draw(picture, scenes)
    return {
        "samples": samples,
        "seed": seed,
        "backend": model.trunk.backend,
        "backend_reason": model.trunk.backend_reason,
        "starts": STARTS,
        "success_old_plant_before": old_plant.success_rate,
        "success_new_plant_before": before.success_rate,
        "success_new_plant_after": after.success_rate,
        "progress": progress,
        "bundle": str(bundle),
        "picture": str(picture) if drawn else None,
    }


def _policy(model: Model) -> cartpole.Policy:
    return lambda states: np.array([model.predict(state).mean[0] for state in states], np.float64)


def _look(
    model: Model, samples: int, gain: Array, unseen: Array, trial: cartpole.Rollout, seconds: list[float]
) -> dict[str, Any]:
    """One row of the table: error and uncertainty on unseen states, and success in the closed loop."""
    return {
        "samples": samples,
        "rmse": cartpole.force_rmse(_policy(model), gain, unseen),
        "std": float(np.sqrt(np.mean([model.predict(state).var[0] for state in unseen]))),
        "success": trial.success_rate,
        "update_us": 1e6 * statistics.median(seconds) if seconds else None,
    }


def _line(row: Mapping[str, Any]) -> str:
    speed = "" if row["update_us"] is None else f", {row['update_us']:.1f} µs per update"
    return f"{row['samples']} samples: RMSE {row['rmse']:.2f} N, {100 * row['success']:.0f} % balanced{speed}"


class _Scene(NamedTuple):
    """A column of the picture: the closed loop, and the predictions along the first trajectory."""

    title: str
    trial: cartpole.Rollout
    force: Array
    std: Array  # of an observation


def _scene(title: str, model: Model, trial: cartpole.Rollout) -> _Scene:
    path = trial.states[:-1, 0]
    seen = [model.predict(state) for state in path[np.isfinite(path).all(axis=1)]]
    return _Scene(title, trial, np.array([p.mean[0] for p in seen]), np.array([p.total_std[0] for p in seen]))


def _draw(path: Path, scenes: Sequence[_Scene]) -> bool:
    """Angles of all starts above, the force of one with its 95 % band below; from left to right as samples come."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(1.5 + 4.2 * len(scenes), 6.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, len(scenes), sharex=True, sharey="row")
        for (top, bottom), (title, trial, force, std) in zip(axes.T, scenes, strict=True):
            top.set_title(f"{title}\n{trial.success.sum()} of {trial.success.size} starts balanced")
            angles = np.degrees(trial.states[:, :, 2])
            top.plot(trial.time, angles, color="#0b5fa5", alpha=0.55, linewidth=1.2)
            _mark_falls(top, trial.time, angles)
            top.axhline(0, color="#555", linewidth=0.6)
            top.set_ylim(-98, 98)
            shown = trial.time[: len(force)]
            bottom.fill_between(shown, force - 1.96 * std, force + 1.96 * std, color="#f0a04b", alpha=0.45, linewidth=0,
                                label="its 95 % band")  # fmt: skip
            bottom.plot(shown, force, color="#b33d02", linewidth=1.6, label="predicted force")
            for limit in (-cartpole.FORCE_LIMIT, cartpole.FORCE_LIMIT):
                bottom.axhline(limit, color="#555", linewidth=0.6, linestyle="--")
            bottom.set_ylim(-1.3 * cartpole.FORCE_LIMIT, 1.3 * cartpole.FORCE_LIMIT)
            bottom.set_xlabel("time (s)")
            for panel in (top, bottom):
                panel.grid(color="#e4e7eb")
                panel.set_axisbelow(True)
        axes[0, 0].set_ylabel("pole angle (degrees)")
        axes[1, 0].set_ylabel("force at the first start (N)")
        axes[1, -1].legend(loc="lower right")
        figure.savefig(path, dpi=110)
    return True


def _mark_falls(axes: Any, times: Array, angles: Array) -> None:
    """A cross where a pole reaches the horizontal: its path ends there."""
    for path in angles.T:
        last = int(np.isfinite(path).sum()) - 1
        if last + 1 < len(path):
            axes.plot(times[last], path[last], "x", color="#c0392b", markersize=9, markeredgewidth=2.2)
