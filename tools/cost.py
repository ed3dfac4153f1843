"""How many instructions one update takes, counted by valgrind's callgrind, and how they grow with the head.

    python tools/cost.py [--json] [--quick]

Counts are exact and repeatable, whatever else the machine does. Each is the difference of two runs of different length,
so that start-up does not count. Exits with 1 when a budget is exceeded, with 2 when a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
from cabi import HEADERS, build_core, compiler, run

X86_64 = platform.machine() in ("x86_64", "AMD64")
STRUCTURES = {"full": 0, "neuron": 1, "diagonal": 2}  # KBT_FULL and so on
SINGLE_LAYER = {"shared": 3, "default": -1}
# Instructions of one update, 16 -> 32 -> 1 float32: of the default build, and of one for the oldest machines.
BUDGET = {"full": (750_000, 1_200_000), "neuron": (16_000, 30_000), "diagonal": (10_000, 15_000)}
# The default head, 16 -> 1: an update as most are. The worst is one in which a surprise begins the fresh member anew,
# or one in which a change is noticed.
WATCHFUL_BUDGET = (25_000, 60_000)
LARGEST_WORST = 1.5  # times an update as most are
CHANGE = 204  # updates before the plant changes: cost.c
LARGEST_EXPONENT = 1.1
LARGEST_RECORDING = 0.02  # of an update, for a flight recorder that only records; the copy of the state comes beside it
# d -> 2d -> 1. The factors of `full` grow with d^4 and would fill gigabytes at d = 128, so its sweep ends at 32.
SWEEP = {"neuron": (8, 16, 32, 64, 128), "full": (8, 12, 16, 24, 32), "diagonal": (8, 16, 32, 64, 128)}
# d -> outputs
WIDTHS, OUTPUTS = (16, 32, 64, 128, 256, 512, 1024), (1, 8, 32, 100, 350, 1000, 3000, 8000)
LAYER_SWEEP = {
    "1 output": [(d, 1) for d in WIDTHS],
    "100 outputs": [(d, 100) for d in WIDTHS],
    "width 64": [(64, outputs) for outputs in OUTPUTS],
    "width 512": [(512, outputs) for outputs in OUTPUTS],
}


def factors(structure: str, d: int) -> int:
    """Stored numbers of D and U of a d -> 2d -> 1 head."""
    total = 0
    for n, m in ((2 * d, d + 1), (1, 2 * d + 1)):
        if structure == "diagonal":
            total += n * m
        else:
            matrices, M = (1, n * m) if structure == "full" else (n, m)
            total += matrices * M * (M + 1) // 2
    return total


def layer_numbers(d: int, outputs: int) -> int:
    """Stored numbers of one filter of a d -> outputs head whose outputs share a factor."""
    m = d + 1
    return m * (m + 1) // 2 + m * outputs


def counted(*arguments: object) -> int:
    """Instructions of a whole run of the driver."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return int(found.group(1))


def instructions(driver: Path, structure: str, d: int, updates: int, *recorder: int) -> int:
    """Instructions of one update, averaged over ``updates`` of them; ``recorder``: samples of a flight recorder."""
    counts = [counted(driver, STRUCTURES[structure], d, 2 * d, 1, n, *recorder) for n in (updates, 2 * updates)]
    return round((counts[1] - counts[0]) / updates)


def layer_instructions(driver: Path, structure: str, d: int, outputs: int) -> int:
    """Instructions of the third and fourth update of a head without a hidden layer, on average."""
    counts = [counted(driver, SINGLE_LAYER[structure], d, 0, outputs, updates) for updates in (2, 4)]
    return round((counts[1] - counts[0]) / 2)


def watchful(driver: Path, d: int) -> dict[str, int]:
    """Instructions of one update of the default head d -> 1: usual, at the first surprise, when a change is noticed."""
    head = SINGLE_LAYER["default"], d, 0, 1
    noticed = int(run(driver, *head, 2 * CHANGE))
    if noticed <= CHANGE:
        raise RuntimeError(f"{driver}: expected a change to be noticed after update {CHANGE}, got {noticed}")

    def between(first: int, last: int) -> int:
        counts = [counted(driver, *head, updates) for updates in (first, last)]
        return round((counts[1] - counts[0]) / (last - first))

    return {
        "usual": between(CHANGE // 2, CHANGE),
        "surprised": between(CHANGE, CHANGE + 1),
        "noticed": between(noticed - 1, noticed),
    }


def build(folder: Path, name: str) -> Path:
    """The driver with the core as CMakeLists.txt builds it ("default"), or for the oldest machines ("baseline")."""
    cxx, cc = compiler("g++", "c++", "clang++"), compiler("gcc", "cc", "clang")
    assert cxx is not None
    assert cc is not None
    if name == "default" and X86_64:  # with the loops for AVX2, chosen at run time
        core = [
            build_core(cxx, ("-O3", "-DKBT_AVX2"), folder / "default.o"),
            build_core(cxx, ("-O3", "-DKBT_AVX2"), folder / "avx2.o", "kernels/avx2.cpp"),
        ]
    else:
        core = [build_core(cxx, ("-O3",), folder / f"{name}.o")]
    core.append(build_core(cxx, ("-O3",), folder / f"{name}_flight.o", "abi/recorder.cpp"))
    driver = Path(__file__).with_name("cost.c")
    run(cc, "-std=c11", "-O2", f"-I{HEADERS}", driver, *core, "-lm", "-o", folder / name)
    return folder / name


def growth(points: list[tuple[Any, int, int]]) -> dict[str, Any]:
    """Exponents of instructions against stored numbers: over all points, and between the last two."""
    stored, counts = (np.log([point[i] for point in points]) for i in (1, 2))
    tail = float((counts[-1] - counts[-2]) / (stored[-1] - stored[-2]))
    return {"points": points, "exponent": float(np.polyfit(stored, counts, 1)[0]), "tail": tail}


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    builds = ("default", "baseline")
    with ThreadPoolExecutor(2) as pool:
        drivers = dict(zip(builds, pool.map(lambda name: build(folder, name), builds), strict=True))
    heads = {
        structure: {name: instructions(driver, structure, 16, 20) for name, driver in drivers.items()}
        for structure in STRUCTURES
    }
    default_head = {name: watchful(driver, 16) for name, driver in drivers.items()}
    sweeps = {}
    for structure, sizes in {} if quick else SWEEP.items():
        points = []
        for d in sizes:
            updates = max(2, min(50, 200_000 // factors(structure, d)))
            points.append((d, factors(structure, d), instructions(drivers["default"], structure, d, updates)))
        sweeps[structure] = growth(points)
    layers: dict[str, Any] = {}
    for structure in () if quick else SINGLE_LAYER:
        for name, sizes in LAYER_SWEEP.items():
            points = [((d, o), layer_numbers(d, o), layer_instructions(drivers["default"], structure, d, o))
                      for d, o in sizes]  # fmt: skip
            layers[f"{structure}, {name}"] = growth(points)
    recording = {}
    for structure in STRUCTURES:  # a recorder that never fills up; and one that begins a half with every sample
        alone = heads[structure]["default"]
        counts = [instructions(drivers["default"], structure, 16, 20, samples) - alone for samples in (1000, 2)]
        recording[structure] = {"record": counts[0], "begin_half": counts[1] - counts[0]}
    return {
        "update_16_1_default": default_head,
        "update_16_32_1_float32": heads,
        "recording_16_32_1_float32": recording,
        "sweep_d_2d_1": sweeps,
        "sweep_one_layer": layers,
    }


def broken_budgets(figures: dict[str, Any]) -> list[str]:
    broken = []
    for structure, budgets in BUDGET.items():
        if not X86_64:
            continue
        for (name, count), budget in zip(figures["update_16_32_1_float32"][structure].items(), budgets, strict=True):
            if count > budget:
                broken.append(f"{structure}, {name}: {count} instructions, budget {budget}")
    for (name, counts), budget in zip(figures["update_16_1_default"].items(), WATCHFUL_BUDGET, strict=True):
        if X86_64 and counts["usual"] > budget:
            broken.append(f"default head, {name}: {counts['usual']} instructions, budget {budget}")
        worst = max(counts.values())
        if worst > LARGEST_WORST * counts["usual"]:
            broken.append(f"default head, {name}: {worst} instructions, more than {LARGEST_WORST} times the usual")
    for structure, counts in figures["recording_16_32_1_float32"].items():
        budget = LARGEST_RECORDING * figures["update_16_32_1_float32"][structure]["default"]
        if structure == "neuron" and counts["record"] > budget:
            broken.append(f"{structure}: {counts['record']} instructions to record, budget {budget:.0f}")
    for name, sweep in (figures["sweep_d_2d_1"] | figures["sweep_one_layer"]).items():
        if sweep["exponent"] > LARGEST_EXPONENT:
            broken.append(f"{name}: exponent {sweep['exponent']:.3f}, budget {LARGEST_EXPONENT}")
    return broken


def show(figures: dict[str, Any]) -> None:
    print("one update, 16 → 1, default head   instructions      budget   without AVX2      budget")
    first, second = figures["update_16_1_default"].values()
    for what in first:
        most = WATCHFUL_BUDGET if what == "usual" else [round(LARGEST_WORST * x["usual"]) for x in (first, second)]
        print(f"  {what:<32}{first[what]:>12,}{most[0]:>12,}{second[what]:>15,}{most[1]:>12,}")
    print("\none update, 16 → 32 → 1 float32   instructions      budget   without AVX2      budget")
    for structure, counts in figures["update_16_32_1_float32"].items():
        default, baseline = BUDGET[structure]
        print(f"  {structure:<32}{counts['default']:>12,}{default:>12,}{counts['baseline']:>15,}{baseline:>12,}")
    print("\nflight recorder, the same heads     one record   when a half begins, once in samples / 2")
    for structure, counts in figures["recording_16_32_1_float32"].items():
        print(f"  {structure:<32}{counts['record']:>12,}{counts['begin_half']:>15,}")
    for structure, sweep in figures["sweep_d_2d_1"].items():
        print(f"\n{structure}, d → 2d → 1: exponent {sweep['exponent']:.3f} of instructions against stored factors "
              f"(between the last two: {sweep['tail']:.3f}; budget {LARGEST_EXPONENT})")  # fmt: skip
        for d, stored, count in sweep["points"]:
            print(f"  d = {d:<4} factors {stored:>10,}  instructions {count:>12,}  per factor {count / stored:8.2f}")
    if figures["sweep_one_layer"]:
        print("\none linear layer, instructions against numbers   exponent  last two  per number")
    for name, sweep in figures["sweep_one_layer"].items():
        _, stored, count = sweep["points"][-1]
        print(f"  {name:<46}{sweep['exponent']:>10.3f}{sweep['tail']:>10.3f}{count / stored:>12.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    parser.add_argument("--quick", action="store_true", help="no sweep over d")
    arguments = parser.parse_args()
    for tool in (("valgrind",), ("g++", "c++", "clang++"), ("gcc", "cc", "clang")):
        if compiler(*tool) is None:
            print(f"cost: needs {' or '.join(tool)}", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments.quick)
    broken = broken_budgets(figures)
    if arguments.json:
        print(json.dumps(figures | {"broken": broken}, indent=2))
    else:
        show(figures)
    for line in broken:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
