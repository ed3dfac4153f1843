"""``kbt-edge repro``"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kbt_edge.cli.terminal import live
from kbt_edge.errors import RangeError
from kbt_edge.studies import repro

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="one trial of 100 samples: under a minute")
    parser.add_argument("--trials", type=int, help="number of trials (default 10, with --quick 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, default=0, help="draws the trials (default 0)")
    parser.add_argument("--out", type=Path, default=Path("kbt-repro"), help="folder (default kbt-repro)")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    settings = replace(repro.QUICK if options.quick else repro.FULL, seed=options.seed)
    if options.trials is not None:
        settings = replace(settings, trials=options.trials)
    for name, value, low in (("trials", settings.trials, 1), ("jobs", options.jobs, 1), ("seed", options.seed, 0)):
        if value < low:
            raise RangeError(f"--{name}: expected {low} or more, got {value}")
    return repro.run(settings, options.jobs, options.out, live)


def text(result: Mapping[str, Any]) -> str:
    lines = []
    for claim in result["claims"]:
        lines += [
            f"{'yes' if claim['met'] else 'NO ':<4} {claim['head']}: {claim['claim']}",
            f"     {claim['found']}",
        ]
    lines += ["", f"report: {result['report']}", f"        {result['changing']}"]
    lines += [f"data:   {result['results']}   ({result['seconds']:.0f} s)"]
    return "\n".join(lines)
