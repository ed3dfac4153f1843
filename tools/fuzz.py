"""Fuzz for as long as a maintainer has patience.

    python tools/fuzz.py [TARGET ...] [--seconds 60] [--jobs 1]
    python tools/fuzz.py --report                # what all runs so far have spent and found

Targets are the files of tests/fuzz: Python ones run under atheris (``pip install -e '.[fuzz]'``), C++ ones are built
with clang's libFuzzer and the address and undefined-behaviour sanitizers. ``stateful`` is tests/test_stateful.py with
random examples instead of the fixed ones of the test run. Prints executions, the growth of coverage and findings.
Corpora and findings are kept in --work; what was spent and found goes to --totals, which is committed, as machines come
and go. Exits with 1 when anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
INTERRUPTED = 72  # libFuzzer's answer to somebody who stops it
sys.path.insert(0, str(ROOT / "tests"))


@dataclass(frozen=True)
class Target:
    """``command(work)`` answers the command of a libFuzzer process, without its options; it builds what has to be."""

    name: str
    command: Callable[[Path], list[str]]


def python_target(source: Path) -> Target:
    return Target(source.stem, lambda work: [sys.executable, str(source)])


def cpp_target(source: Path) -> Target:
    def build(work: Path) -> list[str]:
        from cabi import CSRC, build_sanitized, compiler, run

        clang = compiler("clang++")
        if clang is None:
            raise SystemExit(f"{source.name}: expected clang++ with libFuzzer, found none")
        core, binary = work.parent / "core", work / source.stem
        objects = sorted(core.glob("*.o"))
        newest = max(path.stat().st_mtime for path in CSRC.iterdir())
        if not objects or min(path.stat().st_mtime for path in objects) < newest:
            core.mkdir(exist_ok=True)
            objects = build_sanitized(core, "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=all")
        options = ("-std=c++17", "-Wall", "-Wextra", "-O1", "-g", "-fsanitize=fuzzer,address,undefined")
        run(clang, *options, f"-I{CSRC}", source, *objects, "-o", binary)
        return [str(binary)]

    return Target(source.stem, build)


TARGETS = {
    target.name: target
    for target in (python_target(FUZZ / "bundle.py"), *(cpp_target(source) for source in sorted(FUZZ.glob("*.cpp"))))
}


@dataclass
class Outcome:
    executions: int = 0
    first_coverage: int = 0
    last_coverage: int = 0
    findings: int = 0
    cpu_seconds: float = 0.0
    tally: Counter[str] = field(default_factory=Counter)  # what a target has counted itself, such as calls refused


def fuzz(target: Target, seconds: int, runs: int, jobs: int, work: Path) -> Outcome:
    folder = work / target.name
    corpus, seeds = folder / "corpus", FUZZ / "corpus" / target.name
    for path in (corpus, folder / "findings"):
        path.mkdir(parents=True, exist_ok=True)
    call = [*target.command(folder), str(corpus), *([str(seeds)] if seeds.is_dir() else [])]
    call += ["-max_len=2048", "-len_control=0"] if target.name != "bundle" else []
    call += ["-print_final_stats=1", "-rss_limit_mb=2048", "-timeout=60", f"-artifact_prefix={folder}/findings/"]
    call += [f"-max_total_time={seconds}"] * (seconds > 0) + [f"-runs={runs}"] * (runs > 0)
    processes = []
    for job in range(jobs):
        log = (folder / f"log{job}").open("w+")
        processes.append((subprocess.Popen([*call, f"-seed={int(time.time()) + job}"], stdout=log, stderr=log), log))
    outcome = Outcome()
    for process, log in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        outcome.cpu_seconds += usage.ru_utime + usage.ru_stime
        log.seek(0)
        text = log.read()
        log.close()
        covered = [int(number) for number in re.findall(r"\bcov: (\d+)", text)] or [0]
        executed = re.findall(r"number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)", text, re.M)[-1:]
        outcome.executions += int((executed or ["0"])[-1])
        outcome.first_coverage = max(outcome.first_coverage, covered[0])
        outcome.last_coverage = max(outcome.last_coverage, covered[-1])
        for line in re.findall(rf"^{target.name}: (\d.*)$", text, re.M):
            outcome.tally.update({what: int(count) for count, what in re.findall(r"(\d+) ([a-z ]+)", line)})
        if process.returncode not in (0, INTERRUPTED):
            last = "\n".join(text.splitlines()[-40:])
            print(f"{target.name}: ended with {process.returncode}\n{last}", file=sys.stderr)
            if "INFO: Seed:" not in text:  # libFuzzer's first words
                raise SystemExit(f"{target.name}: expected the fuzzer to start, but it did not")
            outcome.findings += 1
    return outcome


def stateful(seconds: int) -> Outcome:
    """New random examples, round after round, until the time is over or one fails."""
    outcome, end = Outcome(), time.monotonic() + seconds
    while time.monotonic() < end and not outcome.findings:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_stateful.py")],
            env={**os.environ, "HYPOTHESIS_PROFILE": "long"},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        outcome.cpu_seconds += usage.ru_utime + usage.ru_stime
        if process.returncode not in (0, 1):
            raise SystemExit(f"stateful: expected its tests to run, but pytest ended with {process.returncode}")
        outcome.executions += 1
        outcome.findings += process.returncode
    return outcome


def totals_in(path: Path) -> dict[str, Any]:
    totals: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return totals


def remember(name: str, outcome: Outcome, path: Path) -> dict[str, Any]:
    """Add to what is known of earlier runs."""
    totals = totals_in(path)
    total = totals.setdefault(name, {"cpu_seconds": 0.0, "executions": 0, "findings": 0})
    for key in ("cpu_seconds", "executions", "findings"):
        total[key] = round(total[key] + getattr(outcome, key), 1)
    total["tally"] = dict(outcome.tally + Counter(total.get("tally", {})))
    path.write_text(json.dumps(totals, indent=1, sort_keys=True) + "\n")
    return dict(total)


def report(path: Path) -> None:
    totals = totals_in(path)
    for name, total in totals.items():
        print(
            f"{name}: {total['cpu_seconds'] / 3600:.2f} h of processor time, {total['executions']} executions"
            + "".join(f"; {count} {what}" for what, count in total["tally"].items())
            + f"; {total['findings']} ended with a finding"
        )
    print(f"together: {sum(total['cpu_seconds'] for total in totals.values()) / 3600:.2f} h of processor time")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the core and the readers of files.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}, stateful")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; 0: until --runs")
    parser.add_argument("--runs", type=int, default=0, help="executions of each target; 0: until --seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fuzz", help="where corpora and findings go")
    parser.add_argument("--totals", type=Path, default=FUZZ / "totals.json", help="what was spent and found so far")
    parser.add_argument("--report", action="store_true", help="print what was spent and found so far; fuzz nothing")
    options = parser.parse_args()
    unknown = sorted(set(options.targets) - {*TARGETS, "stateful"})
    if unknown:
        parser.error(f"TARGET: expected some of {', '.join(TARGETS)}, stateful; got {', '.join(unknown)}")
    if options.seconds <= 0 and options.runs <= 0:
        parser.error("--seconds, --runs: expected one of them above 0")
    work, totals = options.work.resolve(), options.totals.resolve()
    if options.report:
        return report(totals)
    work.mkdir(parents=True, exist_ok=True)
    found = 0
    for name in options.targets or [*TARGETS, "stateful"]:
        if name == "stateful":
            outcome = stateful(options.seconds)
        else:
            outcome = fuzz(TARGETS[name], options.seconds, options.runs, options.jobs, work)
        total = remember(name, outcome, totals)
        print(
            f"{name}: {outcome.executions} executions, coverage {outcome.first_coverage} -> {outcome.last_coverage}, "
            f"{outcome.findings} findings, {outcome.cpu_seconds:.0f} s of processor time "
            f"({total['cpu_seconds'] / 3600:.2f} h and {total['executions']} executions so far)"
            + "".join(f"; {count} {what}" for what, count in total["tally"].items())
        )
        found += outcome.findings
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
