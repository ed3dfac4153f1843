"""How the head learns on made plants that stand still, drift, or change, next to baselines. For maintainers.

    python tools/plants.py [--json] [--quick] [--length N] [--alone] [TASK ...]

change    the cart-pole: N samples of the old plant, then the new one; force RMSE (N) on unseen states so many samples
          after the change: the median and the worst of the seeds, and how many are at most 3 N after 20 samples
outliers  the same plant: error after many samples with outliers, relative to the error without
quiet     nothing changes, under five laws of noise: false reports of a change per 100,000 samples (--length), and the
          error after 1,000 samples relative to one filter that knows that nothing changes
drift     four laws of drift: error relative to the best of five forgetting factors in hindsight
width     wide layers, with noise: error relative to the best of three ridge priors after d/4 to 4 d samples, and the
          share of targets in the 90 % interval from 2 d on
back      there and back, twice; a slow change; a noise variance that becomes ten times as large, or as small
bent      targets that are not linear in h: the default head with a hidden layer, one filter, and one layer
motor     a motor's current at 200 Hz; friction triples half-way: RMS error (A), seconds until a change is reported,
          changes of health()'s verdict per minute; and alarms in logs without a change

The baselines: recursive least squares with five forgetting factors, and a frozen readout. Seeds are fixed. A learner is
made by a factory (d, outputs, weight, bias); see stream_learners.py. "change" and "outliers" need the package's demo
extra (SciPy) and something that runs the shipped trunk (onnxruntime, or the codegen extra).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import plant_bent  # noqa: E402
import plant_lines  # noqa: E402
import plant_machines  # noqa: E402
from plant_common import QUICK, Make, Row, Rows, Sizes, baselines  # noqa: E402
from stream_learners import Ours  # noqa: E402

TASKS: dict[str, Callable[[dict[str, Make], Sizes], Rows]] = {
    "change": plant_machines.change,
    "outliers": plant_machines.outliers,
    "quiet": plant_lines.quiet,
    "drift": plant_lines.drift,
    "width": plant_lines.width,
    "back": plant_lines.back,
    "bent": plant_bent.bent,
    "motor": plant_machines.motor,
}


def text(task: str, rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[name.strip() for name in names], *([shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust, str.ljust, *[str.rjust] * len(names)]
    lines = ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=False)) for row in cells]
    return "\n".join([task, *lines])


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"some of: {', '.join(TASKS)} (default: all)")
    parser.add_argument("--length", type=int, default=Sizes.length, help="samples of quiet, per law and seed")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything runs")
    parser.add_argument("--alone", action="store_true", help="without the baselines")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    options = parser.parse_args()
    unknown = set(options.tasks) - set(TASKS)
    if unknown:
        parser.error(f"unknown task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if options.length <= Sizes.settled:
        parser.error(f"--length: expected more than {Sizes.settled}, got {options.length}")
    sizes = QUICK if options.quick else dataclasses.replace(Sizes(), length=options.length)
    learners: dict[str, Make] = {"ours": Ours} if options.alone else {"ours": Ours, **baselines()}
    report = {}
    for task in options.tasks or TASKS:
        report[task] = list(TASKS[task](learners, sizes))
        if not options.json:
            print(text(task, report[task]) + "\n", flush=True)
    if options.json:
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
