"""``kbt-edge repro``: the paper's study again, with what it leaves out, as figures, JSON and one HTML report.

Five experiments, each a function below that returns plain data:

    adaptation        success, force RMSE and log likelihood against samples: KBT, its ablation, and every baseline
    computation_time  seconds per sample of each, one after the other with nothing else of the study running
    data_variance     predicted variance against iterations for four Σ_data, under ``replace`` and ``fuse``
    calibration       nominal against observed coverage, the noise once known and once learned
    tuning            defaults and ``tune`` on plants that nobody has looked at

Trials are independent, and run through joblib: ``study(settings, jobs)`` uses processes on this machine; inside
``joblib.parallel_config(backend="dask")`` (or "ray", after ``ray.util.joblib.register_ray()``) and with ``jobs=None``
it uses that cluster. Every trial draws from its own seed, so results do not depend on how they were shared out.

What was chosen, was chosen on other streams than those of the trials (``baselines.CHOICE_SEEDS``): the learning rates
of retraining, the ε of the paper's setting, and the variances of the row "tuned". The row "KBT" is a plain ``Head``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbt_edge.cli import live
from kbt_edge.errors import RangeError
from kbt_edge.head import Head
from kbt_edge.model import Model
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import CHOICE_SEEDS, METHODS, Learner, Method, Retraining, hidden, load_network
from kbt_edge.studies.learners import Kbt, Paper, readout
from kbt_edge.trunk import BackendError
from kbt_edge.tune import prequential, tune

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["FULL", "QUICK", "Repro", "Settings", "study"]

Array = NDArray[np.float64]
Result = dict[str, Any]

PAPER_EPSILON: Final = 1e-4  # one for both layers; docs/study.md says how it was chosen
SIGMA_DATA: Final = (0.0, 10.0, 20.0, 50.0)  # N²
NOISES: Final = (1.0, 10.0, 50.0)  # N²
NOMINAL: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
WINDOW: Final = 500  # the paper's moving average
SETTLED: Final = 30_000  # iterations from which the paper shows its variances
TUNING_SAMPLES: Final = 100


@dataclass(frozen=True)
class Settings:
    """How much of everything."""

    seed: int = 0
    trials: int = 10
    samples: int = 400
    starts: int = 50  # of the closed loop, per trial
    unseen: int = 500  # states on which forces are compared
    iterations: int = 70_000  # of the Σ_data study
    plants: int = 5
    timed: int = 400  # samples over which retraining is timed; a full memory at least

    def moments(self) -> list[int]:
        """Sample counts at which the main rows are looked at: where each memory fills up, and between."""
        counts = {*range(0, 50, 5), *range(50, self.samples + 1, 10), *range(75, self.samples + 1, 25)}
        return sorted(count for count in counts if count <= self.samples)

    def few_moments(self) -> list[int]:
        """And the rest."""
        return [count for count in (0, 10, 20, 50, 100, 200, 300, 400) if count <= self.samples]


FULL: Final = Settings()
QUICK: Final = Settings(trials=1, samples=100, starts=20, unseen=200, iterations=20_000, timed=1)


def study(settings: Settings, jobs: int | None = None) -> Result:
    """All experiments. ``jobs``: processes; None leaves it to joblib's configuration."""
    started = time.time()
    chosen = tuned_settings()
    result: Result = {
        "settings": asdict(settings),
        "machine": _machine(),
        "tuned": chosen,
        "adaptation": adaptation(settings, chosen, jobs),
        "data_variance": data_variance(settings, jobs),
        "calibration": calibration(settings, jobs),
        "tuning": tuning(settings),
        "computation_time": computation_time(settings),
    }
    result["claims"] = claims(result)
    result["seconds"] = time.time() - started
    return result


# ---- adaptation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of a figure or of the ablation: its name, what it changes, and how to make its learner."""

    name: str
    what: str
    make: Callable[[DecisionTransformer], Learner]
    main: bool = False  # looked at often, and drawn


def rows(tuned: Mapping[str, Any]) -> list[Row]:
    """KBT, each of its corrections, and the baselines."""
    wide = {"hidden": (32,)}
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
        Row("KBT", "one layer, noise learned: the defaults", kbt(), main=True),
        Row("tuned", "the same, variances by kbt_edge.tune", kbt(**tuned)),
    ]
    others = [Row(method.name, "", _baseline(method), main=method.name != "least squares") for method in METHODS]
    return ladder + others


def _baseline(method: Method) -> Callable[[DecisionTransformer], Learner]:
    return lambda network: method.make(network, method.setting)


def adaptation(settings: Settings, tuned: Mapping[str, Any], jobs: int | None) -> Result:
    """Every row over every trial: {row: {"samples": [...], "rmse": [trial][moment], ...}}."""
    every = rows(tuned)
    tasks = [(row.name, trial) for trial in range(settings.trials) for row in every]
    # The slowest first, so that no process is left with them at the end.
    tasks.sort(key=lambda task: task[0] not in ("paper", "retrain 10", "KBT"))
    done = _parallel("adaptation", _adapt, [(name, trial, settings, tuned) for name, trial in tasks], jobs)
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
    learner = row.make(_network())
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


def tuned_settings() -> Result:
    """What ``tune`` chooses for the new plant on a stream that no trial uses."""
    network = _network()
    rng = np.random.default_rng(CHOICE_SEEDS[0])
    states, forces = cartpole.sample_pairs(rng, TUNING_SAMPLES, cartpole.lqr_gain(cartpole.NEW))
    best = tune(Head(*readout(network)), *_scaled(network, states, forces)).best
    return {"prior_var": best.prior_var, "noise_var": best.noise_var, "noise": "adaptive"}


# ---- computation time ------------------------------------------------------------------------------------------------


def computation_time(settings: Settings) -> Result:
    """Mean seconds per sample from state and force to an adapted policy, in one process, one row after the other.

    Seconds of the processor: what else a machine is doing does not count.
    """
    rng = np.random.default_rng([settings.seed, 1 << 20])
    states, forces = cartpole.sample_pairs(rng, 400, cartpole.lqr_gain(cartpole.NEW))
    out: Result = {}
    for backend in ("compiled", "onnxruntime"):
        try:
            model = Model.load("kbt_edge:cartpole", backend=backend)
        except BackendError as error:
            out[f"KBT, trunk {backend}"] = {"seconds": None, "why": str(error)}
            continue
        repeats = []
        for _ in range(5):
            started = time.process_time()
            for state, force in zip(states, forces, strict=True):
                model.predict(state)
                model.observe(force)
            repeats.append((time.process_time() - started) / len(states))
        out[f"KBT, trunk {backend}"] = {"seconds": float(np.median(repeats))}
    warm_up = Retraining(_network(), memory=10, learning_rate=1e-3, epochs=1)  # what torch does once costs no method
    for state, force in zip(states[:10], forces[:10], strict=True):
        warm_up.observe(state, float(force))
    for method in METHODS:
        if method.name == "frozen":
            continue
        live(f"computation time: {method.name}")
        learner = method.make(_network(), method.setting)
        memory = getattr(learner, "memory", 1)
        count = max(1, settings.timed // memory) * memory  # memories filled to the brim, as the rest costs nothing yet
        for state, force in zip(states[:count], forces[:count], strict=True):
            learner.observe(state, float(force))
        out[method.name] = {"seconds": learner.seconds / count}
    live(None)
    return out


# ---- predicted variance ----------------------------------------------------------------------------------------------


def data_variance(settings: Settings, jobs: int | None) -> Result:
    """Predicted variance (N²) of the next observation, before it is learned, along streams of noisy samples."""
    tasks = [(rule, sigma, settings) for rule in ("replace", "fuse") for sigma in SIGMA_DATA]
    done = _parallel("predicted variance", _variance, tasks, jobs)
    return {"window": WINDOW, "settled": SETTLED, "runs": done}


def _variance(rule: str, sigma: float, settings: Settings) -> Result:
    """The paper's head of two layers, in the compiled core."""
    network = _network()
    rng = np.random.default_rng([settings.seed, 2 << 20])
    states, forces = cartpole.sample_pairs(rng, settings.iterations, cartpole.lqr_gain(cartpole.NEW), sigma)
    head = Head(
        *readout(network),
        hidden=(32,),
        prior_var=PAPER_EPSILON,
        noise_var=sigma / cartpole.FORCE_SCALE**2,
        rule=rule,
    )
    total, epistemic = np.empty(len(states)), np.empty(len(states))
    for i, (h, y) in enumerate(zip(*_scaled(network, states, forces), strict=True)):
        p = head.predict(h)
        total[i], epistemic[i] = p.total_var[0], p.cov[0, 0]
        head.observe(y)
    scale = cartpole.FORCE_SCALE**2
    at = np.arange(WINDOW, len(states) + 1, max(1, len(states) // 350))
    settled = slice(min(SETTLED, len(states) // 2), None)
    return {
        "rule": rule,
        "sigma": sigma,
        "iterations": at.tolist(),
        "total": (scale * _moving_average(total)[at - WINDOW]).tolist(),
        "epistemic": (scale * _moving_average(epistemic)[at - WINDOW]).tolist(),
        "settled_total": float(scale * total[settled].mean()),
        "settled_epistemic": float(scale * epistemic[settled].mean()),
    }


def _moving_average(values: Array) -> Array:
    """Entry i is the mean of values[i : i + WINDOW]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[WINDOW:] - sums[:-WINDOW]) / WINDOW)


# ---- calibration -----------------------------------------------------------------------------------------------------


def calibration(settings: Settings, jobs: int | None) -> Result:
    """Share of unseen noisy observations within the predicted intervals after 400 samples, mean over the trials."""
    kinds = [(noise, known) for noise in NOISES for known in (True, False)]
    tasks = [(noise, known, trial, settings) for noise, known in kinds for trial in range(settings.trials)]
    done = _parallel("calibration", _coverage, tasks, jobs)
    out: Result = {"nominal": list(NOMINAL), "runs": []}
    for i, (noise, known) in enumerate(kinds):
        trials = np.array([found["observed"] for found in done[i * settings.trials : (i + 1) * settings.trials]])
        learned = [found["noise_var"] for found in done[i * settings.trials : (i + 1) * settings.trials]]
        run = {"noise": noise, "known": known, "observed": trials.mean(axis=0).tolist()}
        out["runs"].append({**run, "noise_var": float(np.mean(learned))})
    return out


def _coverage(noise: float, known: bool, trial: int, settings: Settings) -> Result:
    network = _network()
    gain = cartpole.lqr_gain(cartpole.NEW)
    rng = np.random.default_rng([settings.seed, 3 << 20, trial])
    learner = Kbt(network, **({"noise_var": noise / cartpole.FORCE_SCALE**2} if known else {}))
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


# ---- tuning ----------------------------------------------------------------------------------------------------------


def tuning(settings: Settings) -> Result:
    """Defaults and ``tune`` on fresh plants: tuned on a short stream, judged on a longer one of the same plant."""
    network = _network()
    rng = np.random.default_rng([settings.seed, 4 << 20])
    runs = []
    for _ in range(settings.plants):
        plant = _fresh_plant(rng)
        gain = cartpole.lqr_gain(plant)
        short, long = (_scaled(network, *cartpole.sample_pairs(rng, n, gain)) for n in (TUNING_SAMPLES, 400))
        unseen = cartpole.sample_states(rng, settings.unseen)
        tuned = tune(Head(*readout(network)), *short)
        run: Result = {
            "plant": asdict(plant),
            "seconds": tuned.seconds,
            "prior_var": tuned.best.prior_var,
            "noise_var": tuned.best.noise_var,
        }
        for name, head in (("default", Head(*readout(network))), ("tuned", tuned.head)):
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


# ---- what must hold --------------------------------------------------------------------------------------------------


def claims(result: Mapping[str, Any]) -> list[Result]:
    """What the project promises, each with the figure found in this run: {"claim", "found", "met"}."""
    found: list[Result] = []

    def claim(what: str, figure: str, met: bool) -> None:
        found.append({"claim": what, "found": figure, "met": bool(met)})

    rows = result["adaptation"]
    samples = rows["KBT"]["samples"]
    success = np.array(rows["KBT"]["success"])
    sure = [count for i, count in enumerate(samples) if success[:, i:].min() == 1.0]
    claim(
        "The old policy never balances the new plant; the adapted one always does, from at most 50 samples on, "
        "in every trial and without a later drop",
        f"{100 * success[:, 0].max():.0f} % before; 100 % in each of {_count(len(success), 'trial')} "
        + (f"from {sure[0]} to {samples[-1]} samples" if sure else "at no point"),
        success[:, 0].max() == 0.0 and bool(sure) and sure[0] <= 50,
    )

    retraining = {name: row for name, row in rows.items() if name.startswith(("retrain", "readout"))}
    ours = _at(rows["KBT"], 50)
    best, name = min(
        (_at(row, count), name) for name, row in retraining.items() for count in row["samples"] if 50 <= count <= 100
    )
    claim(
        "With default settings, the force RMSE after 50 samples is at most a third of that of the best retraining at "
        "50 to 100",
        f"{ours:.2f} N against {best:.2f} N ({name}): {ours / best:.2f} of it",
        ours <= best / 3.0,
    )
    last = samples[-1]
    ours = _at(rows["KBT"], last)
    best, name = min((_at(row, last), name) for name, row in retraining.items())
    claim(
        f"After {last} samples it is no worse than the best of them", f"{ours:.2f} N against {best:.2f} N ({name})",
        ours <= best,
    )  # fmt: skip

    times = result["computation_time"]
    kbt = min(row["seconds"] for name, row in times.items() if name.startswith("KBT") and row["seconds"])
    quickest, name = min((row["seconds"], name) for name, row in times.items() if name.startswith("retrain"))
    claim(
        "A sample costs at least 1,000 times less computation than with any retraining memory",
        f"{1e6 * kbt:.1f} µs against {1e3 * quickest:.1f} ms ({name}): {quickest / kbt:,.0f} times",
        quickest / kbt >= 1000.0,
    )

    for rule in ("replace", "fuse"):
        runs = [run for run in result["data_variance"]["runs"] if run["rule"] == rule and run["sigma"] > 0]
        worst = max(abs(run["settled_total"] / run["sigma"] - 1.0) for run in runs)
        shrinking = all(run["epistemic"][-1] < 0.1 * run["epistemic"][0] for run in runs)
        figures = ", ".join(f"{run['settled_total']:.2f} for {run['sigma']:g}" for run in runs)
        extra = " and the variance of the model itself shrinks" if rule == "fuse" else ""
        claim(
            f"Under {rule}, the predicted variance comes within 5 % of Σ_data{extra}",
            figures
            + (f"; the model's own down to {max(run['epistemic'][-1] for run in runs):.2g} N²" if extra else ""),
            worst <= 0.05 and (rule == "replace" or shrinking),
        )

    nominal = result["calibration"]["nominal"].index(0.9)
    cover = [run["observed"][nominal] for run in result["calibration"]["runs"]]
    claim(
        "Intervals of 90 % hold 87 to 93 % of unseen observations, with noise of 1, 10 and 50 N², known and learned",
        f"{100 * min(cover):.1f} to {100 * max(cover):.1f} %",
        min(cover) >= 0.87 and max(cover) <= 0.93,
    )

    runs = result["tuning"]["runs"]
    gains = [run["tuned"]["log_likelihood"] - run["default"]["log_likelihood"] for run in runs]
    slowest = max(run["seconds"] for run in runs)
    claim(
        "tune improves or equals the log likelihood of the defaults on every fresh plant, in under 10 s",
        f"{min(gains):+.2f} to {max(gains):+.2f} per sample on {_count(len(runs), 'plant')}; {slowest:.1f} s at most",
        min(gains) >= 0.0 and slowest < 10.0,
    )
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _at(row: Mapping[str, Any], count: int) -> float:
    """Mean force RMSE over the trials after ``count`` samples."""
    return float(np.mean([trial[row["samples"].index(count)] for trial in row["rmse"]]))


# ---- shared ----------------------------------------------------------------------------------------------------------


def _network() -> DecisionTransformer:
    import torch

    torch.set_num_threads(1)  # the network is too small to share out, and trials already are
    return load_network()


def _scaled(network: DecisionTransformer, states: Array, forces: Array) -> tuple[NDArray[np.float32], Array]:
    """Rows h and targets as a head takes them."""
    rows = [hidden(network, part) for part in np.array_split(states, max(1, len(states) // 1000))]
    return np.concatenate(rows).astype(np.float32), forces[:, None] / cartpole.FORCE_SCALE


def _parallel(what: str, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], jobs: int | None) -> list[Any]:
    """``function`` over ``tasks`` through joblib, in order."""
    try:
        import joblib
    except ImportError as error:
        raise BackendError("repro needs joblib, SciPy, matplotlib and torch: pip install 'kbt-edge[repro]'") from error

    class Parallel(joblib.Parallel):  # type: ignore[misc]
        def printlive(self) -> None:  # called by joblib after every task, whatever its back end
            live(f"{what}: {self.n_completed_tasks} of {len(tasks)}")

    live(f"{what}: starting")
    done: list[Any] = Parallel(n_jobs=jobs)(joblib.delayed(function)(*task) for task in tasks)
    live(None)
    return done


def _machine() -> Result:
    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


# ---- the command -----------------------------------------------------------------------------------------------------


class Repro:
    """``kbt-edge repro``"""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true", help="one trial of 100 samples: under a minute")
        parser.add_argument("--trials", type=int, help="number of trials (default 10, with --quick 1)")
        parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
        parser.add_argument("--seed", type=int, default=0, help="draws the trials (default 0)")
        parser.add_argument("--out", type=Path, default=Path("kbt-repro"), help="folder (default kbt-repro)")

    def run(self, options: argparse.Namespace) -> Mapping[str, Any]:
        settings = replace(QUICK if options.quick else FULL, seed=options.seed)
        if options.trials is not None:
            settings = replace(settings, trials=options.trials)
        for name, value, low in (("trials", settings.trials, 1), ("jobs", options.jobs, 1), ("seed", options.seed, 0)):
            if value < low:
                raise RangeError(f"--{name}: expected {low} or more, got {value}")
        _require_packages()
        from kbt_edge.studies import figures, report

        options.out.mkdir(parents=True, exist_ok=True)
        result = study(settings, options.jobs)
        data = options.out / "results.json"
        data.write_text(json.dumps(_finite(result), indent=1, allow_nan=False), "utf-8")
        drawn = figures.draw_all(result, options.out)
        page = options.out / "report.html"
        page.write_text(report.html(result, drawn), "utf-8")
        return {
            "claims": result["claims"],
            "seconds": result["seconds"],
            "report": str(page),
            "results": str(data),
            "figures": [str(path) for path in drawn.values()],
        }

    def text(self, result: Mapping[str, Any]) -> str:
        lines = []
        for claim in result["claims"]:
            lines += [f"{'yes' if claim['met'] else 'NO ':<4} {claim['claim']}", f"     {claim['found']}"]
        lines += ["", f"report: {result['report']}", f"data:   {result['results']}   ({result['seconds']:.0f} s)"]
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    """JSON has no infinity: what diverged becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _require_packages(names: Iterable[str] = ("torch", "joblib", "scipy", "matplotlib")) -> None:
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise BackendError(f"repro needs {', '.join(missing)}: pip install 'kbt-edge[repro]'")
