"""``kbt-edge bench``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kbt_edge.bench import compare, sweep, tables
from kbt_edge.bench.measure import Options, measure
from kbt_edge.cli.terminal import add_backend, add_max_bytes, live
from kbt_edge.errors import RangeError

__all__ = ["arguments", "run", "text"]

_MAX_RELEASES: Final = 5_000_000


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", nargs="?", default="kbt_edge:cartpole", help="folder or name of the bundle (default: cartpole)")
    add_backend(parser)
    add_max_bytes(parser)
    add("--steps", type=int, metavar="N", help="back-to-back steps (default: 20000, fewer if they take long)")
    add("--rate", type=float, metavar="HZ", help="also run a paced control loop at this rate")
    add(
        "--deadline-ms",
        type=float,
        metavar="MS",
        help="deadline after each release (default: the period)",
    )
    add("--duration", type=float, default=30.0, metavar="S", help="seconds of each paced loop (default 30)")
    add("--loop", choices=("both", "c", "python"), default="both", help="which paced loop to run (default: both)")
    add("--spin", type=float, default=0.0, metavar="US", help="busy-wait for this long before each release")
    add("--fifo", type=int, metavar="PRIO", help="real-time priority, 1..99")
    add("--cpu", type=int, metavar="N", help="pin to this core")
    add("--ftz", action="store_true", help="flush denormal numbers to zero (changes bits)")
    add("--sweep", metavar="AXES", help=f"comma-separated: {', '.join(sweep.AXES)}")
    add("--baselines", action="store_true", help="also time other ways to learn a sample")
    add("--compare", nargs="+", type=Path, metavar="JSON", help="print saved results side by side instead of measuring")
    add("--out", type=Path, default=Path("kbt-bench"), help="folder for results (default kbt-bench)")
    add("--seed", type=int, default=0, help="draws the samples (default 0)")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    if options.compare is not None:
        return compare.side_by_side(options.compare)
    _check(options)
    return measure(
        Options(
            bundle=options.bundle,
            backend=options.backend,
            max_bytes=options.max_bytes,
            out=options.out,
            steps=options.steps,
            rate_hz=options.rate,
            deadline_ms=options.deadline_ms,
            duration_s=options.duration,
            loops=("c", "python") if options.loop == "both" else (options.loop,),
            spin_us=options.spin,
            fifo=options.fifo,
            cpu=options.cpu,
            ftz=options.ftz,
            axes=sweep.axes(options.sweep) if options.sweep is not None else None,
            baselines=options.baselines,
            seed=options.seed,
        ),
        live,
    )


def text(result: Mapping[str, Any]) -> str:
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
        raise RangeError("--spin needs --rate")
    if options.rate is None and options.deadline_ms is not None:
        raise RangeError("--deadline-ms needs --rate")
    if options.rate is not None and options.rate * options.duration > _MAX_RELEASES:
        raise RangeError(f"--rate, --duration: expected at most {_MAX_RELEASES} releases")
