"""From recorded nanoseconds to figures: percentiles, histograms, deadlines, growth exponents. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PERCENTILES",
    "duration",
    "figure",
    "fit_exponent",
    "histogram",
    "histogram_edges",
    "paced_figures",
    "summary",
]

Nanoseconds = NDArray[np.float64]

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}
BINS_PER_DECADE: Final = 50


def summary(ns: Nanoseconds) -> dict[str, Any]:
    """Percentiles by nearest rank, so each is a measured latency; None if there are too few samples."""
    count = len(ns)
    figures: dict[str, Any] = {"count": count}
    for name, share in PERCENTILES.items():
        # p99.9 of 200 samples would be their maximum.
        enough = count * (1 - share) >= 1 - 1e-9
        figures[name] = float(np.quantile(ns, share, method="inverted_cdf")) if enough else None
    figures["min"], figures["max"] = float(ns.min()), float(ns.max())
    return figures


def histogram(ns: Nanoseconds) -> dict[str, Any]:
    """Counts in bins of equal width on a logarithmic axis, ``BINS_PER_DECADE`` to a decade; bin 0 begins at 1 ns."""
    places = np.floor(BINS_PER_DECADE * np.log10(np.maximum(ns, 1.0))).astype(np.int64)
    first = int(places.min())
    return {
        "bins_per_decade": BINS_PER_DECADE,
        "first_bin": first,
        "counts": np.bincount(places - first).tolist(),
    }


def histogram_edges(binned: Mapping[str, Any]) -> NDArray[np.float64]:
    """The edges of the bins, in nanoseconds: one more than counts."""
    places = binned["first_bin"] + np.arange(len(binned["counts"]) + 1)
    return np.asarray(10.0 ** (places / binned["bins_per_decade"]), np.float64)


def paced_figures(
    started: Nanoseconds, done: Nanoseconds, period_ns: float, deadline_ns: float, floor_ns: float
) -> dict[str, Any]:
    """What a paced loop did, from when its steps started and were done, counted from release 0.

    Step k is due at k · period. Its response time is measured from there, even if the loop started late, so a single
    stall is charged to every release that it delayed (no coordinated omission).
    ``floor_ns``: shorter times are mostly the cost of the clock, and are raised to this value.
    """
    releases = period_ns * np.arange(len(started))
    missed = done - releases > deadline_ns

    def part(ns: Nanoseconds) -> dict[str, Any]:
        ns = np.maximum(ns, floor_ns)
        return summary(ns) | {"histogram": histogram(ns), "floor_ns": floor_ns}

    service = part(done - started)
    p50, p99_9 = service["p50"], service["p99_9"]
    steadiness = p99_9 / p50 if p99_9 is not None and p50 > floor_ns else None
    return {
        "steps": len(started),
        "release_jitter": part(started - releases),
        "service": service | {"p99_9_over_p50": steadiness},
        "response": part(done - releases),
        "missed": int(missed.sum()),
        "longest_run_of_misses": _longest_run(missed),
    }


def _longest_run(flags: NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0


def fit_exponent(sizes: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """The growth exponent of time in size: the slope of log time over log size by least squares, over all points and
    over the larger half, where the fixed cost of a call weighs less."""
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(times, np.float64))
    order = np.argsort(x)
    x, y = x[order], y[order]
    half = len(x) // 2 if len(x) > 3 else 0
    return {"all": float(np.polyfit(x, y, 1)[0]), "larger_half": float(np.polyfit(x[half:], y[half:], 1)[0])}


def figure(row: Mapping[str, Any], key: str) -> str:
    """Format a figure of a summary; at the floor of the clock's resolution it is an upper bound."""
    ns = row[key]
    return "≤ " * (ns is not None and ns <= row.get("floor_ns", 0.0)) + duration(ns)


def duration(ns: float | None) -> str:
    """Format nanoseconds with three digits and a unit."""
    if ns is None:
        return "–"
    size = abs(ns)
    for unit, factor in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)):
        if size < 999.5 * factor or unit == "s":
            value = ns / factor
            digits = 0 if unit == "ns" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError
