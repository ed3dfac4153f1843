"""The page "A plant that changes while it runs" of ``kbt-edge repro``, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kbt_edge.studies.changing import BURST, MEMORY, OUTLIER, table
from kbt_edge.studies.common import SINGLE, WATCHFUL
from kbt_edge.studies.figures import OURS, PAPER
from kbt_edge.studies.figures import STYLE as FIGURE_STYLE
from kbt_edge.studies.report import STYLE, embedded, escaped, number

__all__ = ["draw_all", "html"]

Result = Mapping[str, Any]

# Colour, line style and width of each learner, from back to front.
LINES: Final[dict[str, tuple[str, str, float]]] = {
    "frozen": ("#8a939c", ":", 1.8),
    "RLS 1": ("#e8b023", "-", 3.4),
    SINGLE: (PAPER, "--", 1.5),
    "RLS 0.99": ("#e06c10", "-", 1.5),
    "RLS 0.95": ("#8c2d04", "-", 1.5),
    f"retraining {MEMORY}": ("#2e8b57", "-", 1.5),
    WATCHFUL: (OURS, "-", 2.8),
}
MEMBERS: Final = {
    "still": "#3a78b5",
    "noisy": "#b4bcc4",
    "drifts slowly": "#cfe8c6",
    "drifts": "#7cc47a",
    "drifts fast": "#1f7a3d",
    "offset drifts": "#f3d27a",
    "has changed": "#d7402b",
    "as before": "#8756a8",
}
REPORTED: Final = "#c0392b"
FIGURES: Final = {
    "abrupt": ("there and back", "The abrupt change, enlarged."),
    "back": ("there and back", "The plant changes at once, and later changes back."),
    "slow": ("slow", "The plant moves slowly, then stands still again."),
    "outliers": ("outliers", "The plant stays as it is, and some targets are wrong."),
}

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kbt-edge: a plant that changes while it runs</title><style>$style
td.best { font-weight: 700; } tr.lost td:first-child { border-left: 5px solid #c0392b; }</style></head><body><main>

<h1>A plant that changes while it runs</h1>
<p class=lead>The other page of this study begins with a new plant. Here the head has learned $before samples of the
old plant before anything happens. Nobody tells it that something has happened, or what.</p>

<p>The cart-pole and its network are those of the study, and the targets have no noise. The plant changes at once and
later changes back; it moves slowly, evenly in the logarithms of its masses and lengths, over $after samples; or it
stays as it is while $burst targets in a row are $outlier N off, up or down. Errors are those of the force on states
that no learner has seen, against the LQR of the plant as it is at that moment.</p>

<p>$default is <code>Head(weight, bias)</code> with nothing set. $single is the one filter of the paper's study. RLS is
recursive least squares on the same rows of the frozen trunk with a forgetting factor, guarded against wind-up. The
factor has to be chosen beforehand, and each suits another plant. Retraining trains the whole network
for 100 epochs whenever its memory of $memory samples is full, and drops the memory.</p>

<h2>Errors after each event</h2>
<p>Median force RMSE (N) over $seeds; the smallest of each line is bold. $losses</p>
$table

<h2>The abrupt change</h2>
$abrupt
<h2>There and back</h2>
$back
<h2>A slow change</h2>
$slow
<h2>A burst of outliers</h2>
$outliers

<h2>Reported changes</h2>
<p>Samples after which the default head reported a change, for each seed. It is sure after about
120 samples of the changed plant; its predictions follow the change long before.</p>
$reported

<h2>Cost</h2>
<p>Processor time of one sample learned from h, without the trunk. The heads are called from Python, and RLS is plain
NumPy, so most of its time is that of calls. Retraining includes the network.</p>
$cost

<footer><p>kbt-edge repro: $seeds, seed $seed. All figures are in results.json beside this page.</p></footer>
</main></body></html>
"""


def html(result: Result, figures: Mapping[str, Path]) -> str:
    """The page. ``figures``: SVG files by name, as ``draw_all`` returns them."""
    found, settings = result["changing"], result["settings"]
    seeds = settings["changing_seeds"]
    lines = table(found)
    lost = sum(line["ratio"] > 1.0 for line in lines)
    caption = (
        " Above: median error over the seeds, and a band from the smallest to the largest error of the default head."
        " Below: what the default head believed of the plant, on the first stream."
    )
    return Template(PAGE).substitute(
        {name: embedded(figures[name], FIGURES[name][1] + caption) for name in FIGURES},
        style=STYLE,
        before=f"{settings['changing_before']:,}",
        after=f"{settings['changing_after']:,}",
        burst=BURST,
        outlier=f"{OUTLIER:g}",
        memory=MEMORY,
        default=WATCHFUL,
        single=SINGLE,
        seeds=f"{seeds} stream" + "s" * (seeds != 1),
        seed=settings["seed"],
        losses=f"In {lost} of {len(lines)} lines another learner is better than the default head. They come first, "
        "marked red, the largest loss at the top."
        if lost
        else "The default head has the smallest error in every line.",
        table=_table(lines),
        reported=_reported(found["streams"]),
        cost=_cost(found["seconds"]),
    )


def _table(lines: Sequence[Result]) -> str:
    names = list(lines[0]["errors"])
    out = [f"<tr><th></th><th>samples after</th>{''.join(f'<th>{escaped(name)}</th>' for name in names)}</tr>"]
    for line in lines:
        best = min(line["errors"].values())
        cells = (
            f"<td{' class=best' if error == best else ''}>{number(error)}</td>" for error in line["errors"].values()
        )
        lost = " class=lost" if line["ratio"] > 1.0 else ""
        out.append(f"<tr{lost}><td>{escaped(line['event'])}</td><td>{line['after']:,}</td>{''.join(cells)}</tr>")
    return f"<table>{''.join(out)}</table>"


def _reported(streams: Result) -> str:
    out = ["<tr><th>stream</th><th>events</th><th>reported, seed by seed</th></tr>"]
    for name, data in streams.items():
        events = ", ".join(f"{event} at {at:,}" for event, at in data["events"].items())
        runs = "; ".join(", ".join(f"{at:,}" for at in run) or "none" for run in data["reported"])
        out.append(f"<tr><td>{escaped(name)}</td><td>{escaped(events)}</td><td>{escaped(runs)}</td></tr>")
    return f"<table>{''.join(out)}</table>"


def _cost(seconds: Mapping[str, float]) -> str:
    cells = (
        f"<tr><td>{escaped(name)}</td><td>{1e6 * value:,.1f} µs</td></tr>"
        for name, value in seconds.items()
        if name != "frozen"
    )
    return f"<table><tr><th></th><th>per sample</th></tr>{''.join(cells)}</table>"


# ---- figures ---------------------------------------------------------------------------------------------------------


def draw_all(result: Result, folder: Path) -> dict[str, Path]:
    """Draw every figure into ``folder``; returns the SVG of each by name."""
    drawn = {}
    with rc_context(FIGURE_STYLE):
        for name, (stream, _) in FIGURES.items():
            figure = Figure(figsize=(10, 7.4), layout="constrained")
            FigureCanvasAgg(figure)
            data = result["changing"]["streams"][stream]
            start, end = (*data["events"].values(), data["moments"][-1])[:2]
            _draw(figure, data, (max(0, start - 40), min(start + 240, end)) if name == "abrupt" else None)
            figure.savefig(folder / f"changing-{name}.png", dpi=150)
            drawn[name] = folder / f"changing-{name}.svg"
            figure.savefig(drawn[name], metadata={"Date": None})
    return drawn


def _draw(figure: Figure, data: Result, window: tuple[int, int] | None) -> None:
    """``window``: from and to which sample; None shows the whole stream."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    low, high = window or (0, data["moments"][-1])
    at = np.array(data["moments"])
    shown = (at >= low) & (at <= high)
    for name, (colour, style, width) in LINES.items():
        runs = np.array(data["rmse"][name], float)[:, shown]
        above.plot(at[shown], np.median(runs, axis=0), color=colour, linestyle=style, linewidth=width, label=name)
        if name == WATCHFUL:
            above.fill_between(at[shown], runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    above.set_yscale("log")
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    above.set_ylabel("force RMSE on unseen states\n(N, log scale)")
    below.stackplot(
        at[shown],
        [np.array(data["belief"][member])[shown] for member in MEMBERS],
        colors=list(MEMBERS.values()),
        labels=list(MEMBERS),
    )
    below.set(ylabel="belief of the default head\n(share)", xlabel="samples seen", ylim=(0, 1), xlim=(low, high))
    _mark(above, below, data, low, high)
    for axes, title in ((above, "learner"), (below, "the plant ...")):
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], title=title, loc="center left", bbox_to_anchor=(1.0, 0.5),
                    alignment="left")  # fmt: skip


def _mark(above: Axes, below: Axes, data: Result, low: int, high: int) -> None:
    """What happened, by its name above the picture, and where the head reported a change."""
    for event, sample in data["events"].items():
        for axes in (above, below):
            axes.axvline(sample, color="#1d2730", linewidth=1.0)
        if low <= sample <= high:
            above.annotate(event, (sample, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 5),
                           textcoords="offset points", ha="center")  # fmt: skip
    first, others = data["reported"][0], [at for run in data["reported"][1:] for at in run]
    label = "change reported\n(ticks: other streams)" if others else "change reported"
    for i, sample in enumerate(at for at in first if low <= at <= high):
        above.axvline(sample, color=REPORTED, linewidth=1.6, linestyle=(0, (4, 2)), label=None if i else label)
        below.axvline(sample, color="#ffffff", linewidth=3.0)
        below.axvline(sample, color=REPORTED, linewidth=1.6, linestyle=(0, (4, 2)))
    ticks = [at for at in others if low <= at <= high]
    if ticks:  # an empty line upsets the layout
        above.plot(ticks, [0.03] * len(ticks), "|", color=REPORTED, markersize=14, markeredgewidth=1.6,
                   transform=above.get_xaxis_transform())  # fmt: skip
