"""The tasks of plants.py that are machines: the cart-pole and the motor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from plant_common import Array, Make, Row, Rows, Sizes, error, mean_square, plus_one, reported, teach

# ---- the cart-pole ---------------------------------------------------------------------------------------------------


@lru_cache(None)
def policy() -> tuple[Any, Array, Array]:
    """The shipped bundle, and its readout."""
    import kbt_edge as kbt

    model = kbt.Model.load("kbt_edge:cartpole")
    layer = model.head.layers[-1].mean.astype(np.float64)
    return model, layer[:, :-1], layer[:, -1]


@lru_cache(None)
def forces(seed: int, n: int, new: bool) -> tuple[Array, Array]:
    """Rows h, and the right forces over FORCE_SCALE."""
    from kbt_edge.studies import cartpole

    rng = np.random.default_rng([seed, new])
    states, right = cartpole.sample_pairs(rng, n, cartpole.lqr_gain(cartpole.NEW if new else cartpole.OLD))
    model, weight, _ = policy()
    H = np.array([model.features(state) for state in states], np.float64).reshape(n, weight.shape[1])
    return H, right[:, None] / cartpole.FORCE_SCALE


def newtons(learner: Any, unseen: tuple[Array, Array]) -> float:
    from kbt_edge.studies import cartpole

    return error(learner, *unseen) * cartpole.FORCE_SCALE


def change(learners: dict[str, Make], sizes: Sizes) -> Rows:
    _, weight, bias = policy()
    moments = (20, 50, 200)
    for n in sizes.old:
        for name, make in learners.items():
            found, false, late = {moment: [] for moment in moments}, 0, []  # type: ignore[var-annotated]
            for seed in range(sizes.seeds):
                learner = make(weight.shape[1], 1, weight, bias)
                teach(learner, *forces(seed, n, False))
                false += reported(learner) or 0
                H, Y = forces(seed, max(moments) + sizes.unseen, True)
                done, before = 0, reported(learner)
                for moment in moments:
                    for i in range(done, moment):
                        teach(learner, H[i : i + 1], Y[i : i + 1])
                        if before is not None and reported(learner) > before and len(late) == seed:  # type: ignore[operator]
                            late.append(i + 1)
                    done = moment
                    found[moment].append(newtons(learner, (H[max(moments) :], Y[max(moments) :])))
                late += [0] * (seed + 1 - len(late))
            row: Row = {"case": f"{n} old", "learner": name}
            for moment, each in found.items():
                row |= {f"{moment} median": float(np.median(each)), f"{moment} worst": max(each)}
            row["<= 3 N at 20"] = sum(value <= 3.0 for value in found[20])
            yield row | {"seen after": float(np.median(late)) if any(late) else None, "false": false}


def outliers(learners: dict[str, Make], sizes: Sizes) -> Rows:
    from kbt_edge.studies import cartpole

    _, weight, bias = policy()

    def thrown(case: str, seed: int, n: int) -> Array:
        rng, out = np.random.default_rng([seed, 7]), np.zeros(n)
        if case == "300 N at 4":
            out[3] = 300.0
        elif case == "1 % of 60 N":
            out = 60.0 * rng.choice([-1, 1], n) * (rng.random(n) < 0.01)
        elif case == "bursts of 5":
            for start in np.flatnonzero(rng.random(n) < 0.002):
                out[start : start + 5] = 60.0 * rng.choice([-1, 1])
        return out[:, None] / cartpole.FORCE_SCALE

    for name, make in learners.items():
        clean = 0.0
        for case in ("clean", "300 N at 4", "1 % of 60 N", "bursts of 5"):
            each, false = [], 0
            for seed in range(sizes.few):
                H, Y = forces(seed, sizes.after + sizes.unseen, True)
                learner = make(weight.shape[1], 1, weight, bias)
                teach(learner, H[: sizes.after], Y[: sizes.after] + thrown(case, seed, sizes.after))
                each.append(newtons(learner, (H[sizes.after :], Y[sizes.after :])))
                false += reported(learner) or 0
            clean = clean or mean_square(each)
            yield {"case": case, "learner": name, "RMSE N": mean_square(each), "over clean": mean_square(each) / clean,
                   "worst N": max(each), "changes": false}  # fmt: skip


# ---- the motor -------------------------------------------------------------------------------------------------------


def motor_log(seed: int, seconds: float, changes: bool) -> tuple[Array, Array]:
    """Features of a drive that follows a wandering speed, and its current (A), at 200 Hz."""
    rng, rate = np.random.default_rng([seed, 5]), 200
    n = int(seconds * rate)
    t = np.arange(n + 2) / rate
    rates, phases = rng.uniform((0.05, 0.3, 0.9), (0.15, 0.6, 1.8)), rng.uniform(0, 2 * np.pi, 3)
    speed = np.sin(2 * np.pi * np.outer(t, rates) + phases) @ np.array([12.0, 6.0, 3.0])  # rad/s
    turn = np.gradient(speed, 1 / rate)
    friction = np.where(changes & (t >= seconds / 2), 3.0, 1.0)
    torque = 2e-3 * turn + friction * (0.01 * speed + 0.08 * np.tanh(speed / 0.2))  # N m
    current = torque / 0.1 + 0.03 * rng.normal(size=n + 2)
    seen = speed + 0.02 * rng.normal(size=n + 2)  # an encoder's
    rise = np.append(0.0, np.diff(seen)) * rate
    sign, command = np.tanh(seen / 0.5), speed + 0.03 * turn
    columns = [seen / 10, sign, rise / 20, command / 10]
    rows = [column[2:] for column in columns] + [column[1:-1] for column in columns[:3]] + [columns[0][:-2]]
    return np.stack(rows, axis=1), current[2:, None]


def drive(learner: Any, H: Array, Y: Array) -> tuple[Array, list[int], int]:
    """The errors, the samples at which changes were reported, and how often the verdict was another one."""
    errors, at, verdict, verdicts = np.empty(len(Y)), [], None, 0
    for i, (h, y) in enumerate(zip(H, Y, strict=True)):
        errors[i] = learner.predict(h)[0][0] - y[0]
        learner.learn(y)
        if (reported(learner) or 0) > len(at):
            at.append(i)
        if i % 20 == 19 and hasattr(learner, "head"):
            new = learner.head.health().verdict
            verdicts += verdict is not None and new != verdict
            verdict = new
    return errors, at, verdicts


def motor(learners: dict[str, Make], sizes: Sizes) -> Rows:
    H, Y = motor_log(1000, sizes.seconds, False)
    fit = np.linalg.lstsq(plus_one(H), Y, rcond=None)[0].T
    start = H.shape[1], 1, fit[:, :-1], fit[:, -1]
    n, minutes = len(Y), sizes.seconds / 60
    for name, make in learners.items():
        learner = make(*start)
        errors, at, verdicts = drive(learner, *motor_log(0, sizes.seconds, True))
        seen = [i for i in at if i >= n // 2]
        after = errors[n // 2 :]
        row: Row = {"case": "friction x3", "learner": name, "before A": mean_square(list(errors[n // 4 : n // 2]))}
        row |= {"first s A": mean_square(list(after[:200])), "2nd-5th s A": mean_square(list(after[200:1000])),
                "last half A": mean_square(list(after[len(after) // 2 :]))}  # fmt: skip
        row |= {"seen after s": (seen[0] - n // 2 + 1) / 200 if seen else None, "changes": len(at)}
        yield row | {"verdicts/min": verdicts / minutes if hasattr(learner, "head") else None}
    for name, make in learners.items():
        learner = make(*start)
        if reported(learner) is None and name != "RLS 1":
            continue  # has no alarms
        each = [drive(make(*start), *motor_log(seed, sizes.seconds, False)) for seed in range(1, 1 + sizes.logs)]
        row = {"case": f"no change, {sizes.logs} logs", "learner": name}
        row["last half A"] = mean_square([float(e) for errors, _, _ in each for e in errors[n // 2 :]])
        row["changes"] = sum(len(at) for _, at, _ in each)
        flips = sum(verdicts for _, _, verdicts in each) / minutes / sizes.logs
        yield row | {"verdicts/min": flips if hasattr(learner, "head") else None}
