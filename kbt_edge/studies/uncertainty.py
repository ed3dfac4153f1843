"""Predicted variances along noisy streams, and how often observations lie in the predicted intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kbt_edge._progress import Tell
from kbt_edge.head import Head
from kbt_edge.settings import Rule
from kbt_edge.studies import cartpole
from kbt_edge.studies.common import (
    HEADS,
    PAPER_EPSILON,
    WATCHFUL,
    Array,
    Result,
    Settings,
    parallel,
    pretrained,
    scaled,
)
from kbt_edge.studies.learners import Kbt, readout

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["calibration", "coverage", "data_variance", "moving_average", "variance"]

SIGMA_DATA: Final = (0.0, 10.0, 20.0, 50.0)  # N²
NOISES: Final = (1.0, 10.0, 50.0)  # N²
NOMINAL: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
WINDOW: Final = 500  # the paper's moving average
SETTLED: Final = 30_000  # iterations from which the paper shows its variances


def data_variance(settings: Settings, jobs: int | None, tell: Tell) -> Result:
    """Predicted variance (N²) of the next observation, before it is learned, along streams of noisy samples."""
    tasks = [(row, sigma, settings) for row in ("replace", "fuse", WATCHFUL) for sigma in SIGMA_DATA]
    done = parallel("predicted variance", variance, tasks, jobs, tell)
    return {"window": WINDOW, "settled": SETTLED, "runs": done}


def _head(network: DecisionTransformer, row: str, sigma: float) -> Head:
    """The paper's head of two layers under the rule ``row``, or a head with nothing set, which learns its noise."""
    if row == WATCHFUL:
        return Head(*readout(network), **HEADS[row])
    rule: Rule = "replace" if row == "replace" else "fuse"
    noise = sigma / cartpole.FORCE_SCALE**2
    return Head(*readout(network), drift=0.0, hidden=(32,), prior_var=PAPER_EPSILON, noise_var=noise, rule=rule)


def variance(row: str, sigma: float, settings: Settings) -> Result:
    """One stream; ``row`` as in ``_head``."""
    network = pretrained()
    rng = np.random.default_rng([settings.seed, 2 << 20])
    states, forces = cartpole.sample_pairs(rng, settings.iterations, cartpole.lqr_gain(cartpole.NEW), sigma)
    head = _head(network, row, sigma)
    total, epistemic = np.empty(len(states)), np.empty(len(states))
    for i, (h, y) in enumerate(zip(*scaled(network, states, forces), strict=True)):
        p = head.predict(h)
        total[i], epistemic[i] = p.total_var[0], p.var[0]
        head.observe(y)
    scale = cartpole.FORCE_SCALE**2
    at = np.arange(WINDOW, len(states) + 1, max(1, len(states) // 350))
    settled = slice(min(SETTLED, len(states) // 2), None)
    return {
        "row": row,
        "sigma": sigma,
        "iterations": at.tolist(),
        "total": (scale * moving_average(total)[at - WINDOW]).tolist(),
        "epistemic": (scale * moving_average(epistemic)[at - WINDOW]).tolist(),
        "settled_total": float(scale * total[settled].mean()),
        "settled_epistemic": float(scale * epistemic[settled].mean()),
    }


def moving_average(values: Array) -> Array:
    """Entry i is the mean of values[i : i + WINDOW]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[WINDOW:] - sums[:-WINDOW]) / WINDOW)


def calibration(settings: Settings, jobs: int | None, tell: Tell) -> Result:
    """Share of unseen noisy observations within the predicted intervals after 400 samples, mean over the trials."""
    kinds = [(head, noise, known) for head in HEADS for noise in NOISES for known in (True, False)]
    tasks = [(*kind, trial, settings) for kind in kinds for trial in range(settings.trials)]
    done = parallel("calibration", coverage, tasks, jobs, tell)
    out: Result = {"nominal": list(NOMINAL), "runs": []}
    for i, (head, noise, known) in enumerate(kinds):
        trials = np.array([found["observed"] for found in done[i * settings.trials : (i + 1) * settings.trials]])
        learned = [found["noise_var"] for found in done[i * settings.trials : (i + 1) * settings.trials]]
        run = {"head": head, "noise": noise, "known": known, "observed": trials.mean(axis=0).tolist()}
        out["runs"].append({**run, "noise_var": float(np.mean(learned))})
    return out


def coverage(head: str, noise: float, known: bool, trial: int, settings: Settings) -> Result:
    """One trial of the head ``HEADS[head]``."""
    network = pretrained()
    gain = cartpole.lqr_gain(cartpole.NEW)
    rng = np.random.default_rng([settings.seed, 3 << 20, trial])
    given: dict[str, Any] = {"noise_var": noise / cartpole.FORCE_SCALE**2} if known else {}
    learner = Kbt(network, **HEADS[head], **given)
    for state, force in zip(*cartpole.sample_pairs(rng, 400, gain, noise), strict=True):
        learner.observe(state, float(force))
    unseen, observed = cartpole.sample_pairs(rng, 1000, gain, noise)
    seen = learner.moments(unseen)
    score = np.abs(observed - seen.mean) / np.sqrt(seen.total)
    within = [float(np.mean(score <= _two_sided(share))) for share in NOMINAL]
    return {"observed": within, "noise_var": float(learner.head.noise_var[0]) * cartpole.FORCE_SCALE**2}


def _two_sided(share: float) -> float:
    """Half-width, in standard deviations, of the central interval that holds ``share`` of a Gaussian."""
    from scipy.special import ndtri

    return float(ndtri(0.5 + 0.5 * share))
