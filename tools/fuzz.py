"""Run the fuzzers. For maintainers.

    python tools/fuzz.py [TARGET ...] [--seconds 60] [--jobs 1]

Targets are the files of tests/fuzz: Python ones run under atheris (``pip install -e '.[fuzz]'``), C++ ones are built
with clang's libFuzzer and the address and undefined-behaviour sanitizers. ``stateful`` is test_stateful.py with
random examples instead of the fixed ones of the test run. ``copies`` is abi.cpp as a plain program, with the installed
library and with a build without vectors: random calls of a head and of a copy made from its bytes, --runs of them for
each structure and build, must have equal results. Prints executions, the growth of coverage and findings. Corpora and
findings are kept in --work. Exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider")
INTERRUPTED = 72  # exit code of libFuzzer after Ctrl-C
sys.path.insert(0, str(ROOT / "tests/support"))


@dataclass(frozen=True)
class Target:
    """``command(work)`` builds the target and returns the command of a libFuzzer process, without options."""

    name: str
    command: Callable[[Path], list[str]]


def python_target(source: Path) -> Target:
    return Target(source.stem, lambda work: [sys.executable, str(source)])


def cpp_target(source: Path) -> Target:
    def build(work: Path) -> list[str]:
        from cabi import CSRC, INCLUDES, build_sanitized, compiler, eigen, run

        clang = compiler("clang++")
        if clang is None:
            raise SystemExit(f"{source.name}: expected clang++ with libFuzzer, found none")
        core, binary = work.parent / "core", work / source.stem
        objects = sorted(core.glob("*.o"))
        newest = max(path.stat().st_mtime for path in CSRC.rglob("*.*"))
        if not objects or min(path.stat().st_mtime for path in objects) < newest:
            core.mkdir(exist_ok=True)
            objects = build_sanitized(core, "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=all")
        options = ("-std=c++17", "-Wall", "-Wextra", "-O1", "-g", "-fsanitize=fuzzer,address,undefined")
        run(clang, *options, "-isystem", eigen(), *INCLUDES, source, *objects, "-o", binary)
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
    tally: Counter[str] = field(default_factory=Counter)  # counted by the target, such as rejected calls


def fuzz(target: Target, seconds: int, runs: int, jobs: int, seed: int, work: Path) -> Outcome:
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
        processes.append((subprocess.Popen([*call, f"-seed={seed + job}"], stdout=log, stderr=log), log))
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
            if "INFO: Seed:" not in text:  # libFuzzer's first output
                raise SystemExit(f"{target.name}: expected the fuzzer to start, but it did not")
            outcome.findings += 1
    return outcome


STRUCTURES = ("full", "neuron", "diagonal", "shared")


def build_plain(folder: Path) -> list[Path]:
    """abi.cpp as programs without sanitizers: with the installed library, and with a core as a Cortex-M has it."""
    from cabi import INCLUDES, build_core, compiler, eigen, installed, run

    cxx = compiler("g++", "clang++", "c++")
    if cxx is None:
        raise SystemExit("copies: expected a C++ compiler, found none")
    folder.mkdir(parents=True, exist_ok=True)
    scalar = ("-O1", "-DEIGEN_DONT_VECTORIZE")
    library = installed("lib/libkbt.so")
    core = [build_core(cxx, scalar, folder / f"{name}.o", f"abi/{name}.cpp") for name in ("kbt", "mailbox")]
    programs = {"installed": (library, f"-Wl,-rpath,{library.parent}"), "scalar": (*scalar, *core)}
    for name, parts in programs.items():
        options = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-DKBT_PLAIN", "-isystem", eigen(), *INCLUDES)
        run(cxx, *options, FUZZ / "abi.cpp", *parts, "-o", folder / name)
    return [folder / name for name in programs]


def copies(seconds: int, runs: int, seed: int, work: Path) -> Outcome:
    """Heads against copies made from their bytes: ``runs`` calls each, or again and again until the time is over."""
    programs = build_plain(work / "copies")
    outcome, end = Outcome(), time.monotonic() + seconds
    while True:
        for structure, program in itertools.product(range(len(STRUCTURES)), programs):
            process = subprocess.Popen([program, str(structure), str(runs or 20_000), str(seed)],
                                       stderr=subprocess.PIPE, text=True)  # fmt: skip
            assert process.stderr is not None
            told = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            outcome.cpu_seconds += usage.ru_utime + usage.ru_stime
            if process.returncode != 0:
                print(f"copies: {' '.join(map(str, process.args))}: {told}", file=sys.stderr)  # type: ignore[arg-type]
                outcome.findings += 1
                continue
            compared = int(re.findall(r"(\d+) compared", told)[-1])
            outcome.executions += compared
            outcome.tally[STRUCTURES[structure]] += compared
        seed += 1
        if runs > 0 or outcome.findings or time.monotonic() >= end:
            return outcome


def stateful(seconds: int) -> Outcome:
    """New random examples, round after round, until the time is over or one fails."""
    outcome, end = Outcome(), time.monotonic() + seconds
    while time.monotonic() < end and not outcome.findings:
        process = subprocess.Popen(
            [*PYTEST, str(ROOT / "tests/core/test_stateful.py")],
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the core and the readers of files.")
    names = [*TARGETS, "copies", "stateful"]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; 0: until --runs")
    parser.add_argument("--runs", type=int, default=0, help="executions of each target; 0: until --seconds")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of random numbers; default: the time")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fuzz", help="where corpora and findings go")
    options = parser.parse_args()
    unknown = sorted(set(options.targets) - set(names))
    if unknown:
        parser.error(f"TARGET: expected some of {', '.join(names)}; got {', '.join(unknown)}")
    if options.seconds <= 0 and options.runs <= 0:
        parser.error("--seconds, --runs: expected one of them above 0")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    found = 0
    for name in options.targets or names:
        if name == "stateful":
            outcome = stateful(options.seconds)
        elif name == "copies":
            outcome = copies(options.seconds, options.runs, options.seed, work)
        else:
            outcome = fuzz(TARGETS[name], options.seconds, options.runs, options.jobs, options.seed, work)
        print(
            f"{name}: {outcome.executions} executions, coverage {outcome.first_coverage} -> {outcome.last_coverage}, "
            f"{outcome.findings} findings, {outcome.cpu_seconds:.0f} s of processor time"
            + "".join(f"; {count} {what}" for what, count in outcome.tally.items())
        )
        found += outcome.findings
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
