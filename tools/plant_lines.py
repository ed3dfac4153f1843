"""The tasks of plants.py that are linear in the features: quiet, drift, width and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from plant_common import (
    QUICK,
    Z90,
    Array,
    Make,
    Row,
    Rows,
    Sizes,
    baselines,
    error,
    mean_square,
    plus_one,
    reported,
    teach,
)
from stream_learners import RLS, Ours

D = 16
TINY = 1e-3  # of the target's deviation: smaller errors count as this


def linear(seed: int, n: int, d: int = D) -> tuple[np.random.Generator, Array, Array]:
    rng = np.random.default_rng([seed, n, d])
    return rng, rng.normal(size=(n, d)), rng.normal(size=d + 1)


def noises(rng: np.random.Generator, H: Array) -> dict[str, Array]:
    n = len(H)
    slow = rng.normal(size=n) * np.sqrt(1 - 0.81)
    for i in range(1, n):
        slow[i] += 0.9 * slow[i - 1]
    laws = {"gaussian": rng.normal(size=n), "student-t 4": rng.standard_t(4, n) / np.sqrt(2),
            "uniform": rng.uniform(-1, 1, n) * np.sqrt(3), "AR(1) 0.9": slow,
            "grows with |x1|": rng.normal(size=n) * np.abs(H[:, 0])}  # fmt: skip
    return {law: 0.3 * noise for law, noise in laws.items()}


def stationary(*a: Any) -> Any:
    """One filter that knows that nothing changes: the head's own if it has that setting, else exact regression."""
    try:
        return Ours(*a, drift=0.0)
    except (TypeError, ValueError):
        return RLS(*a, prior=1000.0)


def quiet(learners: dict[str, Make], sizes: Sizes) -> Rows:
    blank = D, 1, np.zeros((1, D)), np.zeros(1)
    for law in noises(np.random.default_rng(0), np.zeros((1, D))):
        reference = 0.0
        for name, make in {"stationary": stationary, **learners}.items():
            each, false, held = [], 0, []
            for seed in range(sizes.few):
                rng, H, w = linear(seed, sizes.length + sizes.unseen)
                Y = (plus_one(H) @ w)[:, None]
                noisy = Y + noises(rng, H)[law][:, None]
                learner = make(*blank)
                teach(learner, H[: sizes.settled], noisy[: sizes.settled])
                each.append(error(learner, H[sizes.length :], Y[sizes.length :]))
                if reported(learner) is not None:
                    inside = teach(learner, H[sizes.settled : sizes.length], noisy[sizes.settled : sizes.length])
                    held.append(float(np.mean(np.abs(inside) < Z90)))
                    false += reported(learner) or 0
            reference = reference or mean_square(each)
            yield {"case": law, "learner": name, "over stationary": mean_square(each) / reference,
                   "false per 1e5": false / (sizes.few * sizes.length) * 1e5 if held else None,
                   "90 %": float(np.mean(held)) if held else None}  # fmt: skip


def paths(rng: np.random.Generator, w: Array, n: int) -> dict[str, Array]:
    """Weights (n, d + 1) under each law of drift."""
    t = np.arange(n)[:, None]
    steps, bias = rng.normal(size=(n, len(w))), np.eye(len(w))[-1]
    other = rng.normal(size=len(w))
    ramp = np.clip((t - 0.2 * n) / (0.2 * n), 0, 1)
    return {
        "weights walk": w + 0.005 * np.cumsum(steps, axis=0),
        "bias walks": w + 0.03 * np.cumsum(steps, axis=0) * bias,
        "weights swing": w + other * np.sin(2 * np.pi * t / 2000),
        "ramp, then still": w + (other - w) * ramp,
    }


def drift(learners: dict[str, Make], sizes: Sizes) -> Rows:
    blank = D, 1, np.zeros((1, D)), np.zeros(1)
    n, skip = sizes.drifting, sizes.drifting // 20
    filters = {name: make for name, make in baselines().items() if name != "frozen"}
    for law in paths(np.random.default_rng(0), np.zeros(D + 1), 1):
        found: dict[str, Row] = {}
        for name, make in {**filters, **learners}.items():
            each, changes, last = [], 0, []
            for seed in range(sizes.few):
                rng, H, w = linear(seed, n)
                Y = np.sum(plus_one(H) * paths(rng, w, n)[law], axis=1)[:, None]
                noise, learner, errors = 0.1 * rng.normal(size=(n, 1)), make(*blank), np.empty(n)
                for i, h in enumerate(H):
                    errors[i] = learner.predict(h)[0][0] - Y[i, 0]
                    learner.learn(Y[i] + noise[i])
                each.append(mean_square(list(errors[skip:])))
                last.append(mean_square(list(errors[-n // 5 :])))
                changes += reported(learner) or 0
            found[name] = {"case": law, "learner": name, "RMSE": mean_square(each), "last fifth": mean_square(last),
                           "changes": changes}  # fmt: skip
        best, best_last = (min(found[name][key] for name in filters) for key in ("RMSE", "last fifth"))
        for name in learners:
            row = found[name]
            yield row | {"over best": row["RMSE"] / best, "last over best": row["last fifth"] / best_last}


def layer(rng: np.random.Generator, n: int, d: int) -> Array:
    """Layer-normed features of a random network: their spectrum falls as a trained network's does."""
    X = rng.normal(size=(n, 20)) * np.linspace(1.5, 0.2, 20)
    hidden = np.tanh(X @ rng.normal(size=(20, 2 * d)) / 3)
    out = np.maximum(hidden @ rng.normal(size=(2 * d, d)) / np.sqrt(d), 0)
    return np.asarray((out - out.mean(axis=1, keepdims=True)) / out.std(axis=1, keepdims=True))


def ridge(H: Array, Y: Array, unseen: Array, prior: float) -> Array:
    """The prediction of exact regression with this prior variance in units of the noise."""
    Z = plus_one(H)
    return np.asarray(plus_one(unseen) @ np.linalg.solve(Z.T @ Z + np.eye(Z.shape[1]) / prior, Z.T @ Y))


def width(learners: dict[str, Make], sizes: Sizes) -> Rows:
    for d in sizes.widths:
        moments = {"d/4": d // 4, "d/2": d // 2, "d": d, "2d": 2 * d, "4d": 4 * d}
        rng = np.random.default_rng(d)
        H, w = layer(rng, 4 * d + sizes.unseen, d), rng.normal(size=d)
        Y = (H @ w / np.std(H @ w))[:, None]
        unseen, truth = H[4 * d :], Y[4 * d :]
        for share in (0.0, 0.1, 0.3):
            noisy = Y + share * rng.normal(size=Y.shape)
            best = {moment: min(mean_square(list(ridge(H[:n], noisy[:n], unseen, prior) - truth))
                                for prior in (0.1, 10.0, 1000.0)) for moment, n in moments.items()}  # fmt: skip
            for name, make in learners.items():
                if name.startswith("RLS") and (name != "RLS 1" or d > 256):
                    continue  # slow, and the ridge says the same
                learner, done, inside = make(d, 1, np.zeros((1, d)), np.zeros(1)), 0, np.zeros(0)
                row: Row = {"case": f"d {d}, noise {share:.0%}", "learner": name}
                for moment, n in moments.items():
                    inside = teach(learner, H[done:n], noisy[done:n])
                    found, done = error(learner, unseen, truth), n
                    row |= {f"at {moment}": found, f"{moment} /best": max(found, TINY) / max(best[moment], TINY)}
                yield row | {"90 %": float(np.mean(np.abs(inside) < Z90)), "changes": reported(learner)}


def back(learners: dict[str, Make], sizes: Sizes) -> Rows:
    half = 100 if sizes is QUICK else 500
    slow = np.clip((np.arange(3 * half) - half) / 200, 0, 1)
    there = np.repeat([0.0, 1, 0, 1, 0], half)  # where the plant is, between the two
    step = np.repeat([1.0, np.sqrt(10), 1], half)
    cases = {"there and back": (there, 0.1 + 0 * there), "slow": (slow, 0.1 + 0 * slow),
             "noise x10, /10": (0 * step, 0.1 * step)}  # fmt: skip
    for case, (place, deviation) in cases.items():
        for name, make in learners.items():
            found, changes, held = [], 0, []
            for seed in range(sizes.few):
                rng, H, w = linear(seed, len(place))
                other = rng.normal(size=len(w))
                Y = np.sum(plus_one(H) * (w + place[:, None] * (other - w)), axis=1)[:, None]
                noisy = Y + deviation[:, None] * rng.normal(size=Y.shape)
                learner, errors, inside = make(D, 1, w[None, :-1], w[-1:]), np.empty(len(Y)), np.empty(len(Y))
                for i, h in enumerate(H):
                    mean, var = learner.predict(h)
                    errors[i], inside[i] = mean[0] - Y[i, 0], abs(mean[0] - noisy[i, 0]) < Z90 * np.sqrt(var[0])
                    learner.learn(noisy[i])
                found.append(errors.reshape(-1, half))
                held.append(inside.mean())
                changes += reported(learner) or 0
            each = np.sqrt(np.mean(np.square(found), axis=0))  # (stretches, half)
            row: Row = {"case": case, "learner": name, "before": mean_square(list(each[0]))}
            for label, part in (("0-20", slice(0, 20)), ("20-50", slice(20, 50)), ("50-end", slice(50, None))):
                row[f"{label} after first"] = mean_square(list(each[1, part]))
                row[f"{label}, later"] = mean_square(list(each[2:, part].ravel()))
            yield row | {"90 %": float(np.mean(held)), "changes": changes}
