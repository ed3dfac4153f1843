"""How fast kbt_edge is compared with its peers, on this machine. For maintainers.

    python tools/compare_peers.py --setup peers      # once, and after every change: an environment with the peers in it
    peers/bin/python tools/compare_peers.py [--json] [--only RACE ...] [--cpu N] [--rounds N]

The races, each with the factor that it must be won by:

python      ``Head.update`` (6) and ``predict`` (2.5) against pytagi, which keeps a diagonal; 16 → 32 → 1, float32
c           ``kbt_update`` (forward and backward) in a C loop against pytagi's forward and update (10)
full        ``Head.update`` with the full covariance of each layer against an EKF compiled by JAX (1.5)
step        ``Model.predict`` + ``observe`` with a compiled trunk against onnxruntime and a pytagi head (10)
retraining  the same step against one retraining of the whole transformer from a memory, as in the paper (5,000)

All runners of a race run in one process, pinned to one core, with one thread each. They take turns in blocks, so that
all get the same disturbances and each has warm caches. A ratio is the median over the rounds of a round's ratio of
medians; next to it is the range of the middle 80 % of the rounds. The cost of reading the clock is printed and not
subtracted. Every head must first show that it learns. What cannot be set up is skipped, and the reason printed.

Exits with 1 when a race was lost, with 0 otherwise, also when races were skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
from races import RACES
from racing import SkipError, figures, judged, run

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("pytagi==0.2.1", "nvidia-nccl-cu12", "jax")  # beside the train and codegen extras of the package


def pin(cpu: int) -> int:
    """One core, one thread for every library that is loaded from now on."""
    os.sched_setaffinity(0, {cpu})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    return cpu


def setting(cpu: int) -> dict[str, Any]:
    import kbt_edge

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    versions = {"python": platform.python_version(), "kbt-edge": kbt_edge.__version__}
    for package in ("numpy", "pytagi", "jax", "jaxlib", "torch", "onnxruntime"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    ticks = [-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(10_000)]
    return {
        "machine": platform.machine(),
        "cpu": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "pinned_to": cpu,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
        "clock_us": float(np.median(ticks)) / 1e3,
        "versions": versions,
        "kbt_edge_from": str(Path(kbt_edge.__file__).parent),
    }


def text(race: dict[str, Any]) -> str:
    lines = [race["title"], f"  {'':<42}{'median µs':>14}{'p99 µs':>14}{'calls':>9}"]
    for name, row in race["runners"].items():
        median, p99 = microseconds(row["median_us"]), microseconds(row["p99_us"])
        lines.append(f"  {name:<42}{median:>14}{p99:>14}{row['calls']:>9,}")
    for row in race["ratios"]:
        digits = 0 if row["ratio"] >= 100 else 2
        value, low, high = (f"{row[key]:,.{digits}f}" for key in ("ratio", "low", "high"))
        verdict = "" if row["goal"] is None else f"   goal {row['goal']:,g}: {'met' if row['met'] else 'MISSED'}"
        lines.append(f"  {row['ours']} is {value} ({low} to {high}) times as fast as {row['peer']}{verdict}")
    lines += [textwrap.fill(note, 120, initial_indent="  ", subsequent_indent="  ") for note in race["notes"]]
    return "\n".join(lines)


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.{0 if value >= 10_000 else 2}f}"


def heading(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"{where['cpu']}, {where['machine']}, {where['cores']} cores, pinned to {where['pinned_to']}, one thread each; "
        f"load average {where['load_before']:.1f} at the start\n{versions}\n"
        f"kbt_edge from {where['kbt_edge_from']}; reading the clock takes {where['clock_us']:.2f} µs, in every figure\n"
    )


def set_up(folder: Path) -> int:
    print(f"an environment in {folder}: {', '.join(PEERS)}, and kbt-edge from {ROOT}", file=sys.stderr)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", *PEERS, f"{ROOT}[demo,train,codegen]",
               "--config-settings", f"build-dir={folder.resolve() / 'build'}"]  # fmt: skip
    if subprocess.run(install).returncode:
        print("compare_peers: pip failed", file=sys.stderr)
        return 2
    print(f"pytagi also needs Open MPI's libraries (Debian: apt install libopenmpi3). Then:\n  {python} {__file__}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make a virtual environment with the peers, and stop")
    parser.add_argument("--only", nargs="+", choices=RACES, metavar="RACE", help=f"some of: {', '.join(RACES)}")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each runner (default 40)")
    parser.add_argument("--cpu", type=int, help="the core to run on (default: the last one)")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    options = parser.parse_args()
    if options.setup is not None:
        return set_up(options.setup)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    allowed = sorted(os.sched_getaffinity(0))
    if options.cpu is not None and options.cpu not in allowed:
        parser.error(f"--cpu: expected one of {allowed}, got {options.cpu}")
    if importlib.util.find_spec("kbt_edge") is None:
        print("compare_peers: kbt_edge is not installed for this Python; --setup makes one with it", file=sys.stderr)
        return 2
    where = setting(pin(allowed[-1] if options.cpu is None else options.cpu))
    if not options.json:
        print(heading(where))
    races: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or RACES:
            try:
                race = RACES[name](Path(folder))
            except SkipError as reason:
                skipped[name] = str(reason)
                if not options.json:
                    print(f"{name}: skipped: {reason}\n", flush=True)
                continue
            taken = run(race, options.rounds)
            rows = {runner: figures(blocks) for runner, blocks in taken.items()}
            races[name] = {
                "title": race.title,
                "runners": rows,
                "ratios": [judged(goal, taken) for goal in race.goals],
                "notes": race.notes({runner: float(row["median_us"] or 0) for runner, row in rows.items()}),
            }
            if not options.json:
                print(text(races[name]) + "\n", flush=True)
    where["load_after"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps({"setting": where, "races": races, "skipped": skipped}, indent=2, ensure_ascii=False))
    lost = any(row["met"] is False for race in races.values() for row in race["ratios"])
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
