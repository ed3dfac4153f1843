"""The plots of a benchmark, if matplotlib is installed: latency histograms, the trace of a paced loop, the sweep."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbt_edge.bench.figures import duration, histogram_edges
from kbt_edge.bench.tables import COLUMNS, LOOPS, STAGES

__all__ = ["Trace", "draw"]

PACED: Final = {"release_jitter": "late release (jitter)", "service": "the step itself", "response": "response"}
COLOURS: Final = {"full": "tab:red", "neuron": "tab:blue", "diagonal": "tab:green", "shared": "tab:purple"}
_POINTS: Final = 4000  # of a trace; more are not visible in a plot


@dataclass(frozen=True)
class Trace:
    """A paced loop, step by step, in nanoseconds from each due release."""

    loop: str
    jitter: NDArray[np.float64]
    response: NDArray[np.float64]


def draw(folder: Path, result: Mapping[str, Any], traces: list[Trace]) -> dict[str, Path]:
    """Write the plots of this result; returns them by name, an empty dict if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    drawn = {"latency": folder / "latency.png"}
    _latency(drawn["latency"], result)
    if traces:
        drawn["release"] = folder / "release.png"
        _release(drawn["release"], result, traces)
    if result.get("sweep", {}).get("exponents"):
        drawn["sweep"] = folder / "sweep.png"
        _sweep(drawn["sweep"], result["sweep"])
    return drawn


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _latency(path: Path, result: Mapping[str, Any]) -> None:
    """One panel per loop: how often each latency occurred, both axes logarithmic, so that rare slow steps show."""
    rows = [row for row in result["back_to_back"]["rows"] if not row.get("too_short") and row["stage"] != "overhead"]
    panels: list[tuple[str, list[tuple[str, Mapping[str, Any]]]]] = []
    for loop, title in LOOPS.items():
        of_loop = [(STAGES[row["stage"]], row) for row in rows if row["loop"] == loop]
        if of_loop:
            panels.append((f"back to back: {title}", of_loop))
    deadline = result["paced"]["deadline_ms"] * 1e6 if "paced" in result else 0.0
    for loop in result.get("paced", {}).get("loops", []):
        parts = [(name, loop[part]) for part, name in PACED.items()]
        panels.append((f"paced at {result['paced']['rate_hz']:g} Hz: {LOOPS[loop['loop']]}", parts))
    figure = _figure(11, 2.9 * len(panels))
    for axes, (title, entries) in zip(np.atleast_1d(figure.subplots(len(panels), 1)), panels, strict=True):
        for i, (name, row) in enumerate(entries):
            edges, counts = histogram_edges(row["histogram"]), row["histogram"]["counts"]
            colour = f"C{i}"
            axes.stairs(counts, edges, color=colour, fill=True, alpha=0.25)
            axes.stairs(counts, edges, color=colour, linewidth=1.2, label=name)
        if "paced" in title:
            axes.axvline(deadline, color="black", linewidth=2, label=f"deadline {duration(deadline)}")
        _time_axis(axes, "x")
        axes.set_yscale("log")
        axes.set_ylim(0.7, None)
        _percentile_marks(axes, entries[-1][1], f"C{len(entries) - 1}")
        axes.set_title(title, loc="left")
        axes.set_ylabel("steps")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
        axes.grid(alpha=0.25)
    axes.set_xlabel("latency; dotted: percentiles of the last entry beside each panel")
    figure.savefig(path, dpi=110)


def _percentile_marks(axes: Any, row: Mapping[str, Any], colour: str) -> None:
    """Lines at the percentiles of one row, with their names one below the other, so that none covers another."""
    low, high = axes.get_xlim()
    for i, (key, label) in enumerate(COLUMNS.items()):
        if row[key] is None:
            continue
        axes.axvline(row[key], color=colour, linestyle=":", linewidth=1.2)
        on_the_right = np.log(row[key] / low) > 0.85 * np.log(high / low)
        side, gap = ("right", -4) if on_the_right else ("left", 4)
        axes.annotate(f"{label} {duration(row[key])}", (row[key], 0.96 - 0.1 * i), (gap, 0), ha=side, va="top",
                      fontsize=8, xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                      bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5})  # fmt: skip


def _time_axis(axes: Any, which: str) -> None:
    """Logarithmic, with nanoseconds spelled as 1 µs, 10 µs, 100 µs."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda ns, _: _short(ns)))
    axis.set_minor_formatter(NullFormatter())


def _short(ns: float) -> str:
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= 0.999 * factor:
            return f"{ns / factor:g} {unit}"
    return f"{ns:g} ns"


def _release(path: Path, result: Mapping[str, Any], traces: list[Trace]) -> None:
    """Delay and response of every release in turn; of each interval the worst is drawn."""
    paced = result["paced"]
    floors = {loop["loop"]: loop["release_jitter"]["floor_ns"] for loop in paced["loops"]}
    figure = _figure(11, 3.2 * len(traces))
    panels = np.atleast_1d(figure.subplots(len(traces), 1, sharex=True, sharey=True))
    for axes, trace in zip(panels, traces, strict=True):
        for values, colour, name in (
            (trace.response, "tab:blue", "response: the step is done"),
            (trace.jitter, "tab:green", "jitter: the step starts"),
        ):
            stretch = max(1, len(values) // _POINTS)
            kept = values[: len(values) // stretch * stretch].reshape(-1, stretch).max(axis=1)
            seconds = np.arange(len(kept)) * stretch / paced["rate_hz"]
            axes.plot(seconds, np.maximum(kept, floors[trace.loop]), ".", markersize=2.5, color=colour, label=name)
        axes.axhline(1e6 * paced["deadline_ms"], color="tab:red", linewidth=1.5, label="deadline")
        _time_axis(axes, "y")
        axes.set_title(f"{LOOPS[trace.loop]}, {paced['rate_hz']:g} Hz", loc="left")
        axes.set_ylabel("after due release")
        axes.grid(alpha=0.25)
    panels[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=9, markerscale=4, frameon=False)
    panels[-1].set_xlabel("time (s)")
    figure.savefig(path, dpi=110)


def _sweep(path: Path, sweep: Mapping[str, Any]) -> None:
    """Time and memory over size on logarithmic axes, a row of panels for each axis of the sweep."""
    rows = list(dict.fromkeys((fit["axis"], fit["of"]) for fit in sweep["exponents"]))
    figure = _figure(12, 3.8 * len(rows))
    panels = figure.subplots(len(rows), 2, squeeze=False, sharex="row")
    for (time_axes, memory_axes), (axis, variable) in zip(panels, rows, strict=True):
        for fit in (fit for fit in sweep["exponents"] if fit["axis"] == axis):
            points = [p for p in sweep["points"] if p["axis"] == axis and p["curve"] == fit["curve"]]
            sizes = [point[variable] for point in points]
            style = {
                "color": COLOURS[points[0]["structure"]],
                "linestyle": "-" if points[0]["dtype"] == "float32" else "--",
                "marker": "o" if points[0]["hidden"] else "^",
                "markersize": 4,
                "linewidth": 1.2,
            }
            label = f"{fit['curve']}: exponent {fit['all']:.2f}"
            time_axes.plot(sizes, [point["p50"] for point in points], label=label, **style)
            memory_axes.plot(sizes, [point["bytes"] / 1024 for point in points], label=label, **style)
        for axes in (time_axes, memory_axes):
            axes.set_xscale("log")
            if variable != "factors":
                axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
                axes.set_xticks([], minor=True)
            axes.grid(alpha=0.25)
            axes.set_xlabel(f"stored factors (over {axis})" if variable == "factors" else variable)
        _time_axis(time_axes, "y")
        memory_axes.set_yscale("log")
        time_axes.set_title("predict + observe in C, p50", loc="left")
        memory_axes.set_title("memory of the head (KiB)", loc="left")
        memory_axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(path, dpi=110)
