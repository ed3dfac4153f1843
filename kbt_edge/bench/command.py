"""``kbt-edge bench``: how long a step takes on this board, how far that can be relied on, and where the time goes."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kbt_edge import __version__
from kbt_edge.bench import baselines, compare, pictures, report, sweep, tables
from kbt_edge.bench.board import Board, load_between
from kbt_edge.bench.loops import Harness, back_to_back, paced, stops
from kbt_edge.bench.realtime import settings
from kbt_edge.bench.workload import load
from kbt_edge.cli import live
from kbt_edge.errors import RangeError

__all__ = ["Bench"]

_MAX_RELEASES: Final = 5_000_000


class Bench:
    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("bundle", nargs="?", default="kbt_edge:cartpole", help="folder or name of the bundle (default: cartpole)")
        add("--backend", choices=("auto", "compiled", "onnxruntime"), default="auto", help="how the trunk runs")
        add("--steps", type=int, metavar="N", help="back-to-back steps (default: 20000, fewer if they take long)")
        add("--rate", type=float, metavar="HZ", help="also run a paced control loop at this rate")
        add("--deadline-ms", type=float, metavar="MS", help="of a paced step, from its release (default: its period)")
        add("--duration", type=float, default=30.0, metavar="S", help="seconds of each paced loop (default 30)")
        add("--loop", choices=("both", "c", "python"), default="both", help="which paced loop to run (default: both)")
        add("--spin", type=float, default=0.0, metavar="US", help="be awake for so long before each release")
        add("--rehearse", action="store_true", help="take steps with a copy while awake, so that caches are warm")
        add("--fifo", type=int, metavar="PRIO", help="real-time priority, 1..99")
        add("--cpu", type=int, metavar="N", help="stay on this core")
        add("--ftz", action="store_true", help="flush denormal numbers to zero (changes bits)")
        add("--sweep", metavar="AXES", help=f"comma-separated: {', '.join(sweep.AXES)}")
        add("--baselines", action="store_true", help="also time what else could be done with a sample")
        add("--compare", nargs="+", type=Path, metavar="JSON", help="print results side by side, and measure nothing")
        add("--out", type=Path, default=Path("kbt-bench"), help="folder for results (default kbt-bench)")
        add("--seed", type=int, default=0, help="draws the samples (default 0)")

    def run(self, options: argparse.Namespace) -> Mapping[str, Any]:
        if options.compare is not None:
            return compare.side_by_side(options.compare)
        _check(options)
        axes = sweep.axes(options.sweep) if options.sweep is not None else None
        board = Board()
        live("loading the bundle ...")
        work = load(options.bundle, options.backend, options.seed, options.rehearse)
        harness = Harness(board.clocksource(), board.machine)
        traces: list[pictures.Trace] = []
        result: dict[str, Any] = {
            "format": compare.FORMAT,
            "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "kbt_edge": __version__,
            "board": board.describe(),
            "workload": work.description,
            "before": board.state(),
        }
        with settings(options.fifo, options.cpu, options.ftz) as told:
            result["settings"] = told
            rest = any(entry["name"] == "fifo" and entry["applied"] for entry in told)
            result["stops"] = stops(harness)
            result["back_to_back"] = back_to_back(work, harness, options.steps, rest, live)
            if options.rate is not None:
                deadline = 1e3 / options.rate if options.deadline_ms is None else options.deadline_ms
                loops = ("c", "python") if options.loop == "both" else (options.loop,)
                figures, spin_ns = [], round(1e3 * options.spin)
                for loop in loops:
                    row, jitter, response = paced(
                        work, harness, loop, options.rate, 1e6 * deadline, options.duration, spin_ns, live
                    )
                    figures.append(row)
                    traces.append(pictures.Trace(loop, jitter, response))
                result["paced"] = {
                    "rate_hz": options.rate,
                    "deadline_ms": deadline,
                    "duration_s": options.duration,
                    "spin_us": options.spin,
                    "rehearse": options.rehearse,
                    "whole": work.whole,
                    "loops": figures,
                }
            if axes is not None:
                result["sweep"] = sweep.run(axes, harness, options.seed, live)
        result["after"] = board.state()
        result["load"] = load_between(result["before"], result["after"])
        result["harness"] = _harness(harness, result)
        if options.baselines:
            result["baselines"] = baselines.run(work, live)
        live(None)
        _write(options.out, result, traces)
        return result

    def text(self, result: Mapping[str, Any]) -> str:
        return compare.text(result) if "columns" in result else tables.text(result)


def _check(options: argparse.Namespace) -> None:
    def within(name: str, value: float | None, low: float, high: float) -> None:
        if value is not None and not low <= value <= high:
            raise RangeError(f"{name}: expected {low:g}..{high:g}, got {value}")

    within("--steps", options.steps, 100, 2_000_000)
    within("--rate", options.rate, 0.1, 100_000)
    within("--deadline-ms", options.deadline_ms, 1e-6, 1e6)
    within("--duration", options.duration, 0.01, 86_400)
    within("--fifo", options.fifo, 1, 99)
    within("--cpu", options.cpu, 0, 4095)
    within("--seed", options.seed, 0, 2**63)
    within("--spin", options.spin, 0, 1e6 / (options.rate or 0.1))
    if options.rate is None and options.spin:
        raise RangeError("--spin: expected together with --rate, got no rate")
    if options.rehearse and not options.spin:
        raise RangeError("--rehearse: expected together with --spin, the time to rehearse in; got none")
    if options.rate is None and options.deadline_ms is not None:
        raise RangeError("--deadline-ms: expected together with --rate, got no rate")
    if options.rate is not None and options.rate * options.duration > _MAX_RELEASES:
        raise RangeError(f"--rate, --duration: expected at most {_MAX_RELEASES} releases")


def _harness(harness: Harness, result: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's own cost, and its largest share in any figure that is reported."""
    rows = [row for row in result["back_to_back"]["rows"] if not row.get("too_short")]
    rows += result.get("sweep", {}).get("points", [])
    loops = result.get("paced", {}).get("loops", [])
    return {
        "clock": harness.clock,
        "c_overhead_ns": harness.c_overhead,
        "python_overhead_ns": harness.python_overhead,
        "smallest_figure_ns": min([row["p50"] for row in rows] + [loop["smallest_ns"] for loop in loops]),
        "largest_overhead_share": max(row["overhead_share"] for row in [*rows, *loops]),
    }


def _write(folder: Path, result: dict[str, Any], traces: list[pictures.Trace]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"json": folder / "bench.json"} | pictures.draw(folder, result, traces)
    files["html"] = folder / "report.html"
    result["files"] = {name: str(path) for name, path in files.items()}
    files["html"].write_text(report.html(result), encoding="utf-8")
    files["json"].write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
