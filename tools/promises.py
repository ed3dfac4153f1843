"""Measure what docs/promises.md promises, and write the page: ``python tools/promises.py [NAME ...]``.

Each promise has a command that prints its figures. Those named (or all, which takes hours) are run; what they printed
is kept in docs/promises.json with the day and the machine, and the page is written from it. A promise whose command
fails is not written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "promises.json"
PAGE = ROOT / "docs" / "promises.md"


@dataclass(frozen=True)
class Promise:
    title: str
    promise: str
    command: tuple[str, ...]  # after the interpreter
    figures: str  # a pattern: the lines of its output that are kept


PROMISES: Final = {
    "fuzz": Promise(
        "Any call, any bytes",
        "Whatever is called in whatever order with whatever numbers, and whatever a file holds: no crash, nothing "
        "undefined, a refused call changes nothing, what is learned is finite and no variance is negative, and a file "
        "that is accepted means what its head saves again. Fuzzed with coverage guidance under the address and "
        "undefined-behaviour sanitizers; `store` is a device that starts from damaged flash memory, `stateful` the "
        "Python classes beside the reference. These are all runs so far of `tools/fuzz.py`, on whatever machine; what "
        "ended with a finding was mended and became a test, or was a fault of the test, and none is open.",
        ("tools/fuzz.py", "--report"),
        r"^(abi|blob|flight|store|bundle|stateful|together): .*",
    ),
    "meaning": Promise(
        "Intact files that lie",
        "State blobs with a right checksum and a wrong meaning are refused, all of them.",
        ("-m", "pytest", "-q", "-s", "tests/test_hostile_files.py", "-k", "thousand"),
        r".*(refused|accepted).*|^\d+ passed.*",
    ),
    "kills": Promise(
        "Killed while saving",
        "A process killed at any moment of a save leaves the old state or the new one.",
        ("tools/kill_saves.py", "--kills", "2000"),
        r"\w.*",
    ),
    "power": Promise(
        "Power cut while saving",
        "The same holds when the power goes at any write, for files and for the two slots of flash memory.",
        ("-m", "pytest", "-q", "tests/test_power_loss.py", "tests/test_codegen.py", "-k", "power or cut or sync"),
        r"^\d+ passed.*",
    ),
    "threads": Promise(
        "One learns, others predict",
        "A reader never sees half an update and never waits for one. Two readers and a learner that never rests; then "
        "a learner of 1 kHz. Microseconds are p50 and p99 of taking a posterior and predicting. After `kbt_take` the "
        "first prediction from a new posterior waits until it has come from the other core's caches, 24 kB here: where "
        "more than one in a hundred is such a one, p99 is the time that takes, which depends on whether the cores "
        "share a cache. A reader that calls `kbt_follow` does not wait for it. The readers run alone and beside the "
        "learner in turns.",
        ("tools/readers.py",),
        r".*\b(torn|p99)\b.*",
    ),
    "soak": Promise(
        "Ten million updates",
        "In float32 and in each scenario: nothing refused, everything finite, no negative variance, and the average "
        "NIS of a consistent filter where the model is correct. In brackets: how far from float64 the covariance of a "
        "layer ended, 20 % at most. After a million updates it is 5 %, which the tests check.",
        ("tools/soak.py", "--covariance", "neuron", "--within", "20"),
        r".*\S.*",
    ),
    "coverage": Promise(
        "What the tests execute",
        "Lines and branches of the core, and lines of the package, that the ordinary test run executes: at least 98, "
        "95 and 95 % of them. `python tools/cover.py --missing` names the rest.",
        ("tools/cover.py",),
        r"^(TOTAL|csrc/|file) .*|^\d+ passed.*",
    ),
    "denormals": Promise(
        "No slow numbers",
        "A step takes as long for denormal inputs as for ordinary ones, and none come up inside.",
        ("tools/denormals.py",),
        r".*\S.*",
    ),
}


def measure(name: str) -> dict[str, object]:
    promise = PROMISES[name]
    print(f"{name}: python {' '.join(promise.command)}", file=sys.stderr)
    done = subprocess.run([sys.executable, *promise.command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}: ended with {done.returncode}\n{done.stdout}")
    lines = [line.rstrip() for line in done.stdout.splitlines() if re.fullmatch(promise.figures, line)]
    if not lines:
        raise SystemExit(f"{name}: printed no figure\n{done.stdout}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"day": datetime.date.today().isoformat(), "machine": machine, "figures": lines}


def page(kept: dict[str, dict[str, object]]) -> str:
    parts = [
        "# What we promise, and how it is tested",
        "Every figure below was printed by the command above it, on the day and the machine named. "
        "`python tools/promises.py` runs them again and writes this page.",
    ]
    for name, promise in PROMISES.items():
        if name not in kept:
            parts.append(f"## {promise.title}\n\n{promise.promise}\n\nNot measured yet: `tools/promises.py {name}`.")
            continue
        found = kept[name]
        lines = found["figures"]
        assert isinstance(lines, list)
        printed = "\n".join(lines)
        parts.append(
            f"## {promise.title}\n\n{promise.promise}\n\n"
            f"`python {' '.join(promise.command)}`, {found['day']}, {found['machine']}:\n\n```\n{printed}\n```"
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what docs/promises.md promises, and write the page.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PROMISES)}; default: all")
    parser.add_argument("--write-only", action="store_true", help="write the page from what is kept, measure nothing")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - PROMISES.keys())
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(PROMISES)}; got {', '.join(unknown)}")
    kept: dict[str, dict[str, object]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in [] if options.write_only else options.names or PROMISES:
        kept[name] = measure(name)
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(kept))


if __name__ == "__main__":
    main()
