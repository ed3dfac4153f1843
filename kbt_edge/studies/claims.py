"""What the project promises of the study, checked against the figures of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kbt_edge.studies.common import HEADS, SINGLE, WATCHFUL, Result

__all__ = ["claims"]


def claims(result: Mapping[str, Any]) -> list[Result]:
    """What the project promises, each with the figure found in this run: {"claim", "head", "found", "met"}.

    First what is promised of the paper's setting, one filter, then the same of the default head.
    """
    found = []
    for head in HEADS:
        for what, figure, met in _of_one_head(result, head):
            found.append({"claim": what, "head": head, "found": figure, "met": bool(met)})
    return found


def _of_one_head(result: Mapping[str, Any], head: str) -> Iterator[tuple[str, str, bool]]:
    rows = result["adaptation"]
    samples = rows[head]["samples"]
    success = np.array(rows[head]["success"])
    sure = [count for i, count in enumerate(samples) if success[:, i:].min() == 1.0]
    yield (
        "The old policy never balances the new plant; the adapted one always does, from at most 50 samples on, "
        "in every trial and without a later drop",
        f"{100 * success[:, 0].max():.0f} % before; 100 % in each of {_count(len(success), 'trial')} "
        + (f"from {sure[0]} to {samples[-1]} samples" if sure else "at no point"),
        success[:, 0].max() == 0.0 and bool(sure) and sure[0] <= 50,
    )

    retraining = {name: row for name, row in rows.items() if name.startswith(("retrain", "readout"))}
    ours = _at(rows[head], 50)
    best, name = min(
        (_at(row, count), name) for name, row in retraining.items() for count in row["samples"] if 50 <= count <= 100
    )
    yield (
        "Without tuning, the force RMSE after 50 samples is at most a third of that of the best retraining at "
        "50 to 100",
        f"{ours:.2f} N against {best:.2f} N ({name}): {ours / best:.2f} of it",
        ours <= best / 3.0,
    )
    last = samples[-1]
    ours = _at(rows[head], last)
    best, name = min((_at(row, last), name) for name, row in retraining.items())
    yield (
        f"After {last} samples it is no worse than the best of them",
        f"{ours:.2f} N against {best:.2f} N ({name})",
        ours <= best,
    )

    times = result["computation_time"]
    kbt = min(row["seconds"] for name, row in times.items() if name.startswith(head) and row["seconds"])
    quickest, name = min((row["seconds"], name) for name, row in times.items() if name.startswith("retrain"))
    yield (
        "A sample costs at least 1,000 times less computation than with any retraining memory",
        f"{1e6 * kbt:.1f} µs against {1e3 * quickest:.1f} ms ({name}): {quickest / kbt:,.0f} times",
        quickest / kbt >= 1000.0,
    )

    for row in ("replace", "fuse") if head == SINGLE else (WATCHFUL,):
        runs = [run for run in result["data_variance"]["runs"] if run["row"] == row and run["sigma"] > 0]
        worst = max(abs(run["settled_total"] / run["sigma"] - 1.0) for run in runs)
        shrinking = all(run["epistemic"][-1] < 0.1 * run["epistemic"][0] for run in runs)
        figures = ", ".join(f"{run['settled_total']:.2f} for {run['sigma']:g}" for run in runs)
        extra = " and the variance of the model itself shrinks" if row == "fuse" else ""
        where = "Along noisy streams" if row == WATCHFUL else f"Under {row}"
        yield (
            f"{where}, the predicted variance comes within 5 % of Σ_data{extra}",
            figures
            + (f"; the model's own down to {max(run['epistemic'][-1] for run in runs):.2g} N²" if extra else ""),
            worst <= 0.05 and (row != "fuse" or shrinking),
        )

    nominal = result["calibration"]["nominal"].index(0.9)
    cover = [run["observed"][nominal] for run in result["calibration"]["runs"] if run["head"] == head]
    yield (
        "Intervals of 90 % hold 87 to 93 % of unseen observations, with noise of 1, 10 and 50 N², known and learned",
        f"{100 * min(cover):.1f} to {100 * max(cover):.1f} %",
        min(cover) >= 0.87 and max(cover) <= 0.93,
    )

    if head == SINGLE:
        runs = result["tuning"]["runs"]
        gains = [run["tuned"]["log_likelihood"] - run[head]["log_likelihood"] for run in runs]
        slowest = max(run["seconds"] for run in runs)
        yield (
            "tune improves or equals the log likelihood without it on every fresh plant, in under 10 s",
            f"{min(gains):+.2f} to {max(gains):+.2f} per sample on {_count(len(runs), 'plant')}; "
            f"{slowest:.1f} s at most",
            min(gains) >= 0.0 and slowest < 10.0,
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _at(row: Mapping[str, Any], count: int) -> float:
    """Mean force RMSE over the trials after ``count`` samples."""
    return float(np.mean([trial[row["samples"].index(count)] for trial in row["rmse"]]))
