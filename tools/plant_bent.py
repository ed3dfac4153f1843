"""The task of plants.py that is not linear in the features: heads with a hidden layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from plant_common import Z90, Array, Make, Row, Rows, Sizes, mean_square
from stream_learners import Ours

TASKS = ("network", "friction", "products")


def targets(rng: np.random.Generator, H: Array) -> dict[str, Array]:
    """Of deviation one."""
    d = H.shape[1]
    w, inner = rng.normal(size=d) / np.sqrt(d), 1.5 * rng.normal(size=(12, d)) / np.sqrt(d)
    made = {
        "network": np.tanh(H @ inner.T + rng.normal(size=12) / 2) @ rng.normal(size=12),
        "friction": H @ w + np.maximum(H[:, 0], 0) - 0.8 * np.abs(H[:, 2]) + 0.3 * np.sign(H[:, 1]),
        "products": H @ w + 0.7 * H[:, 0] * H[:, 1] + 0.4 * np.sin(2 * H[:, 2]),
    }
    return {name: y / y.std() for name, y in made.items()}


def learned(learner: Any, H: Array, Y: Array) -> Row:
    errors, var = np.empty(len(Y)), np.empty(len(Y))
    for i, (h, y) in enumerate(zip(H, Y, strict=True)):
        mean, variance = learner.predict(h)
        errors[i], var[i] = y - mean[0], variance[0]
        learner.learn(np.array([y]))
    first, late = len(Y) // 20, len(Y) // 2
    nats = 0.5 * (errors**2 / var + np.log(2 * np.pi * var))
    return {"RMSE early": mean_square(list(errors[first:late])), "RMSE late": mean_square(list(errors[late:])),
            "NLL": float(nats[first:].mean()),
            "90 %": float(np.mean(np.abs(errors[first:]) < Z90 * np.sqrt(var[first:])))}  # fmt: skip


def bent(learners: dict[str, Make], sizes: Sizes) -> Rows:
    """The default head with 2 d hidden neurons, one filter with the prior (1e-6, 10), and one layer."""
    n = sizes.drifting // 2
    for d in (8, 16):
        others = {name: make for name, make in learners.items() if name in ("frozen", "RLS 1")}
        makers: dict[str, Make] = {
            "ours": partial(Ours, hidden=(2 * d,)),
            "(1e-6, 10)": partial(Ours, hidden=(2 * d,), drift=0.0, prior_var=(1e-4, 1e3)),  # of the first noise, 1e-2
            "one layer": Ours,
            **others,
        }
        for noise in (0.02, 0.3):
            for task in TASKS:
                for name, make in makers.items():
                    rows = []
                    for seed in range(sizes.few):
                        rng = np.random.default_rng([seed, d, 9])
                        H = rng.normal(size=(n, d))
                        Y = targets(rng, H)[task] + noise * rng.normal(size=n)
                        start = 0.3 * rng.normal(size=(1, d))  # of a readout that was trained on something else
                        rows.append(learned(make(d, 1, start, np.zeros(1)), H, Y))
                    yield {"case": f"{task}, d {d}, noise {noise:.0%}", "learner": name,
                           **{key: float(np.mean([row[key] for row in rows])) for key in rows[0]}}  # fmt: skip
