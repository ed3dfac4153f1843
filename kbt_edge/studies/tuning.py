"""Settings and ``tune`` on plants that played no part in choosing the defaults."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import numpy as np

from kbt_edge.head import Head
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import CHOICE_SEEDS, hidden
from kbt_edge.studies.common import HEADS, SINGLE, Array, Result, Settings, pretrained, scaled
from kbt_edge.studies.learners import readout
from kbt_edge.tune import prequential, tune

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["tuned_settings", "tuning"]

TUNING_SAMPLES: Final = 100


def tuned_settings() -> Result:
    """What ``tune`` chooses for the new plant on a stream that no trial uses."""
    network = pretrained()
    rng = np.random.default_rng(CHOICE_SEEDS[0])
    states, forces = cartpole.sample_pairs(rng, TUNING_SAMPLES, cartpole.lqr_gain(cartpole.NEW))
    return tune(Head(*readout(network)), *scaled(network, states, forces)).best.settings


def tuning(settings: Settings) -> Result:
    """Both heads on fresh plants, and one filter that ``tune`` has tuned on a short stream of the same plant."""
    network = pretrained()
    rng = np.random.default_rng([settings.seed, 4 << 20])
    runs = []
    for _ in range(settings.plants):
        plant = _fresh_plant(rng)
        gain = cartpole.lqr_gain(plant)
        short, long = (scaled(network, *cartpole.sample_pairs(rng, n, gain)) for n in (TUNING_SAMPLES, 400))
        unseen = cartpole.sample_states(rng, settings.unseen)
        tuned = tune(Head(*readout(network), **HEADS[SINGLE]), *short)
        run: Result = {
            "plant": asdict(plant),
            "seconds": tuned.seconds,
            "settings": tuned.best.settings,
        }
        heads = {name: Head(*readout(network), **settings) for name, settings in HEADS.items()}
        for name, head in (heads | {"tuned": tuned.head}).items():
            pairs = list(zip(*long, strict=True))
            first = prequential(head, pairs[:50]) * 50
            rmse_50 = _head_rmse(network, head, gain, unseen)
            rest = prequential(head, pairs[50:]) * 350
            # per sample, as a density of the force in newtons
            run[name] = {
                "log_likelihood": (first + rest) / 400 - math.log(cartpole.FORCE_SCALE),
                "rmse_50": rmse_50,
                "rmse_400": _head_rmse(network, head, gain, unseen),
            }
        runs.append(run)
    return {"samples": TUNING_SAMPLES, "runs": runs}


def _fresh_plant(rng: np.random.Generator) -> cartpole.CartPole:
    """Masses and lengths from a fifth to twenty times those of the old plant, evenly in their logarithms."""
    cart, pole, length = np.exp(rng.uniform(np.log([0.5, 0.05, 0.25]), np.log([3.0, 2.0, 8.0])))
    return cartpole.CartPole(float(cart), float(pole), float(length))


def _head_rmse(network: DecisionTransformer, head: Head, gain: Array, unseen: Array) -> float:
    forces = [head.predict(h).mean[0] for h in hidden(network, unseen).astype(np.float32)]
    wanted = cartpole.lqr_policy(gain)(unseen)
    return float(np.sqrt(np.mean((cartpole.FORCE_SCALE * np.array(forces) - wanted) ** 2)))
