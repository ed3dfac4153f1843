"""The figures of ``kbt-edge repro``, each from the plain data of ``repro.study``, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kbt_edge.studies.common import SINGLE, WATCHFUL

__all__ = ["OURS", "PAPER", "STYLE", "draw_all"]

Result = Mapping[str, Any]

OURS: Final = "#0b5fa5"  # the default head
FILTER: Final = "#56b4e9"  # one filter, drift=0
PAPER: Final = "#7a3e9d"
MEMORIES: Final = ("#fbc48a", "#f9a04f", "#f07d1e", "#d95605", "#a63a02", "#662200")  # light to dark with the memory
STYLE: Final[dict[Any, Any]] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "path",  # looks the same without our fonts
    "svg.hashsalt": "kbt-edge",  # one result gives one file
}


def draw_all(result: Result, folder: Path) -> dict[str, Path]:
    """Draw every figure into ``folder``; returns the SVG of each by name."""
    drawers: dict[str, Callable[[Figure, Result], None]] = {
        "success": _success,
        "time": _time,
        "variance": _variance,
        "error": _error,
        "calibration": _calibration,
    }
    sizes = {"success": (9, 4.6), "time": (9, 4.2), "variance": (11, 4.4), "error": (9, 5.2), "calibration": (9, 9)}
    drawn = {}
    with rc_context(STYLE):
        for name, draw in drawers.items():
            figure = Figure(figsize=sizes[name], layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure, result)
            figure.savefig(folder / f"{name}.png", dpi=150)
            drawn[name] = folder / f"{name}.svg"
            figure.savefig(drawn[name], metadata={"Date": None})
    return drawn


def _memories(rows: Result) -> list[tuple[str, str]]:
    """Retraining rows with their colours."""
    names = [name for name in rows if name.startswith("retrain")]
    return [(name, MEMORIES[i % len(MEMORIES)]) for i, name in enumerate(names)]


def _success(figure: Figure, result: Result) -> None:
    rows = result["adaptation"]
    axes = figure.subplots()
    lines = [(name, colour, f"retraining, memory {name.split()[1]}", "-", 1.7) for name, colour in _memories(rows)]
    lines += [
        ("frozen", "#888", "frozen", ":", 1.7),
        (WATCHFUL, OURS, WATCHFUL, "-", 3.6),
        (SINGLE, FILTER, SINGLE, "--", 1.8),
    ]
    for name, colour, label, style, width in lines:
        axes.plot(rows[name]["samples"], _percent(rows[name]["success"]), color=colour, linestyle=style,
                  linewidth=width, label=label, drawstyle="steps-post")  # fmt: skip
    axes.set(xlabel="samples seen", ylabel="starts balanced (%)", ylim=(-3, 104), xlim=(0, None))
    _legend_beside(axes)


def _time(figure: Figure, result: Result) -> None:
    times = {name: row["seconds"] for name, row in result["computation_time"].items() if row["seconds"]}
    names = list(times)[::-1]
    colours = dict(_memories({name: None for name in times}))
    axes = figure.subplots()
    for i, name in enumerate(names):
        ours = OURS if name.startswith(WATCHFUL) else FILTER if name.startswith(SINGLE) else "#8a939c"
        colour = colours.get(name, ours)
        axes.barh(i, 1e6 * times[name], color=colour, height=0.7)
        axes.text(1e6 * times[name] * 1.12, i, _duration(times[name]), va="center")
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_xscale("log")
    axes.set(xlabel="computation time per sample (µs, log scale)", xlim=(1, 8e6 * max(times.values())))
    axes.grid(axis="y", visible=False)


def _variance(figure: Figure, result: Result) -> None:
    panels = figure.subplots(1, 3, sharey=True)
    titles = {"replace": "replace (the paper's rule)", "fuse": "fuse (Kalman update)", WATCHFUL: WATCHFUL}
    runs = result["data_variance"]["runs"]
    sigmas = sorted({run["sigma"] for run in runs})
    shades = ["#9ecae1", "#6baed6", "#3182bd", "#08519c"]
    for axes, row in zip(panels, titles, strict=True):
        for run in (run for run in runs if run["row"] == row):
            colour = shades[sigmas.index(run["sigma"]) % len(shades)]
            shown = np.array(run["iterations"]) / 1000.0
            axes.plot(shown, np.array(run["total"]) + 1e-9, color=colour, linewidth=1.5)
            axes.axhline(run["sigma"], color="#555", linewidth=0.7, linestyle="--")
            label = f"Σ_data = {run['sigma']:g}"
            box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}  # the lines behind may wander
            axes.annotate(label, (shown[-1], run["sigma"]), xytext=(-4, 9), textcoords="offset points", ha="right",
                          bbox=box)  # fmt: skip
        axes.axvspan(result["data_variance"]["settled"] / 1000.0, shown[-1], color="#f3f6f9", zorder=0)
        axes.set(title=titles[row], xlabel="iterations (thousands)")
        axes.set(ylim=(-3, 1.35 * max(sigmas)), xlim=(0, shown[-1]))
    panels[0].set_ylabel("predicted variance (N²)")


def _error(figure: Figure, result: Result) -> None:
    rows = result["adaptation"]
    left, right = figure.subplots(1, 2)
    for name, colour in _memories(rows):
        if name.split()[1] in ("10", "50", "100"):
            _curve(left, rows[name], "rmse", colour, f"retraining, memory {name.split()[1]}", step="post")
    _curve(left, rows["readout 50"], "rmse", "#2e8b57", "readout only, memory 50", step="post")
    _curve(left, rows[WATCHFUL], "rmse", OURS, WATCHFUL, width=3.4)
    _curve(left, rows[SINGLE], "rmse", FILTER, SINGLE)
    left.set_yscale("log")
    left.set(xlabel="samples seen", ylabel="force RMSE on unseen states (N, log scale)")
    for name, colour, label in (
        ("paper", PAPER, "the paper's setting"),
        ("blocks", "#2e8b57", "two layers, fuse, prior per layer"),
        (WATCHFUL, OURS, WATCHFUL),
        (SINGLE, FILTER, SINGLE),
        ("tuned", "#e6550d", f"{SINGLE}, tuned"),
    ):
        _curve(right, rows[name], "nll", colour, label, width=3.4 if name == WATCHFUL else 1.6)
    right.set_yscale("symlog", linthresh=3.0)
    right.set(xlabel="samples seen", ylabel="negative log likelihood of unseen forces (nats)")
    for axes in (left, right):
        axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)


def _calibration(figure: Figure, result: Result) -> None:
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    kinds = [(head, known) for head in (SINGLE, WATCHFUL) for known in (True, False)]
    nominal = 100 * np.array(result["calibration"]["nominal"])
    shades = {1.0: "#6baed6", 10.0: "#3182bd", 50.0: "#08306b"}
    for axes, (head, known) in zip(panels.flat, kinds, strict=True):
        axes.plot([0, 100], [0, 100], color="#555", linewidth=0.8, linestyle="--")
        for run in result["calibration"]["runs"]:
            if (run["head"], run["known"]) != (head, known):
                continue
            axes.plot(nominal, 100 * np.array(run["observed"]), "o-", color=shades.get(run["noise"], OURS),
                      markersize=5, label=f"noise {run['noise']:g} N²")  # fmt: skip
        axes.plot([90, 90], [87, 93], color="#c0392b", linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.set(title=f"{head}, noise {'known' if known else 'learned'}", aspect="equal")
        axes.legend(loc="upper left")
    for axes in panels[1]:
        axes.set_xlabel("nominal coverage (%)")
    for axes in panels[:, 0]:
        axes.set_ylabel("observed coverage (%)")


def _curve(
    axes: Axes,
    row: Result,
    figure: str,
    colour: str,
    label: str,
    width: float = 1.6,
    step: Literal["post"] | None = None,
) -> None:
    """Mean over the trials, and a band from the smallest to the largest."""
    values = np.array(row[figure], float)
    x = row["samples"]
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.13, linewidth=0, step=step)
    style = "default" if step is None else f"steps-{step}"
    axes.plot(x, values.mean(axis=0), color=colour, linewidth=width, label=label, drawstyle=style)


def _percent(trials: list[list[float]]) -> Any:
    return 100 * np.mean(trials, axis=0)


def _legend_beside(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _label(name: str) -> str:
    return name.replace("retrain ", "retraining, memory ").replace("readout ", "readout only, memory ")


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
