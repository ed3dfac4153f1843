"""One run of ``kbt-edge bench``: how long a step takes on this board, how steadily, and where the time goes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbt_edge._progress import Tell, silent
from kbt_edge._version import __version__
from kbt_edge.bench import baselines, compare, pictures, report, sweep
from kbt_edge.bench.board import Board, load_between
from kbt_edge.bench.loops import Harness, LoopName, back_to_back, paced, stops
from kbt_edge.bench.realtime import settings
from kbt_edge.bench.workload import load
from kbt_edge.onnxfile import MAX_BYTES
from kbt_edge.trunk import Backend

__all__ = ["Options", "measure"]


@dataclass(frozen=True)
class Options:
    """What to measure. The defaults measure back-to-back steps only."""

    bundle: str
    out: Path
    backend: Backend = "auto"
    steps: int | None = None  # None: as many as fit into the time
    rate_hz: float | None = None  # of a paced loop
    deadline_ms: float | None = None  # None: the period
    duration_s: float = 30.0
    loops: Sequence[LoopName] = ("c", "python")
    spin_us: float = 0.0
    fifo: int | None = None
    cpu: int | None = None
    ftz: bool = False
    axes: Sequence[str] | None = None  # of a sweep
    baselines: bool = False
    seed: int = 0
    max_bytes: int = MAX_BYTES


def measure(options: Options, tell: Tell = silent) -> dict[str, Any]:
    """Measure, write JSON, pictures and an HTML report to ``options.out``, and return the figures."""
    board = Board()
    tell("loading the bundle ...")
    work = load(options.bundle, options.backend, options.seed, options.max_bytes)
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
        result["back_to_back"] = back_to_back(work, harness, options.steps, rest, tell)
        if options.rate_hz is not None:
            deadline = 1e3 / options.rate_hz if options.deadline_ms is None else options.deadline_ms
            figures, spin_ns = [], round(1e3 * options.spin_us)
            for loop in options.loops:
                row, jitter, response = paced(
                    work, harness, loop, options.rate_hz, 1e6 * deadline, options.duration_s, spin_ns, tell
                )
                figures.append(row)
                traces.append(pictures.Trace(loop, jitter, response))
            result["paced"] = {
                "rate_hz": options.rate_hz,
                "deadline_ms": deadline,
                "duration_s": options.duration_s,
                "spin_us": options.spin_us,
                "whole": work.whole,
                "loops": figures,
            }
        if options.axes is not None:
            result["sweep"] = sweep.run(options.axes, harness, options.seed, tell)
    result["after"] = board.state()
    result["load"] = load_between(result["before"], result["after"])
    result["harness"] = _harness(harness, result)
    if options.baselines:
        result["baselines"] = baselines.run(work, tell)
    tell(None)
    _write(options.out, result, traces)
    return result


def _harness(harness: Harness, result: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of the harness, and its largest share in any reported figure."""
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
