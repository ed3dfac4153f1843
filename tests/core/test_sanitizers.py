"""The core under clang's sanitizers: addresses, undefined behaviour, races; and a short run of its fuzzers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cabi import CSRC, ROOT, TESTS, build_core, build_sanitized, compiler, run

pytestmark = [
    pytest.mark.host_only("needs clang and its run times"),
    pytest.mark.slow("builds the core with sanitizers"),
]
CLANG = compiler("clang")


def has(sanitizer: str) -> bool:
    """Whether clang has the run time of a sanitizer: a program of its own can be built with it."""
    command = [str(CLANG), "-x", "c", f"-fsanitize={sanitizer}", "-", "-o", os.devnull]
    return CLANG is not None and subprocess.run(command, input=b"int main(void) { return 0; }").returncode == 0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tools/fuzz.py keeps its build of the core, with the address and undefined-behaviour sanitizers."""
    if CLANG is None or not has("address,undefined"):
        pytest.skip("clang with the run times of its sanitizers is not installed (Debian: clang, libclang-rt-*-dev)")
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("target", ["abi", "blob", "flight", "store"])
def test_a_short_run_of_each_fuzzer_finds_nothing(target: str, work: Path) -> None:
    runs = {"abi": 300, "blob": 20_000, "flight": 5_000, "store": 3_000}[target]
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), target, "--runs", str(runs), "--seconds", "0"]
    told = run(*call, "--work", work)
    executions = int(re.search(rf"{target}: (\d+) executions", told)[1])  # type: ignore[index]
    assert executions >= runs
    assert ", 0 findings" in told


def test_programs_of_the_core_run_without_a_report(work: Path, tmp_path: Path) -> None:
    objects = sorted((work / "core").glob("*.o")) or build_sanitized(
        tmp_path, "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=all"
    )
    options = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread", f"-I{CSRC}/include")
    options += ("-DKBT_UPDATES=500",)
    for source, arguments in (("same_bits.c", ()), ("power_cut.c", (3, 6, 1)), ("readers.c", (300,))):
        program, compiled = tmp_path / source.removesuffix(".c"), tmp_path / f"{source}.o"
        run(CLANG, *options, "-c", TESTS / source, "-o", compiled)
        run(f"{CLANG}++", *options, compiled, *objects, "-o", program)
        run(program, *arguments)  # any report ends it with another code than 0


def test_one_writer_and_two_readers_race_for_nothing(tmp_path: Path) -> None:
    if CLANG is None or not has("thread"):
        pytest.skip("clang with the run time of its thread sanitizer is not installed (Debian: libclang-rt-*-dev)")
    flags = ("-O1", "-g", "-fsanitize=thread", "-DKBT_NO_FLOAT64")
    objects = [
        build_core(f"{CLANG}++", flags, tmp_path / f"{name}.o", f"abi/{name}.cpp") for name in ("kbt", "mailbox")
    ]
    compiled = tmp_path / "readers.o"
    run(CLANG, "-g", "-fsanitize=thread", f"-I{CSRC}/include", "-c", TESTS / "readers.c", "-o", compiled)
    run(f"{CLANG}++", "-fsanitize=thread", "-pthread", compiled, *objects, "-o", tmp_path / "readers")
    for verb in ("take", "follow"):
        told = json.loads(run(tmp_path / "readers", 3_000, 0, verb))
        assert told["torn"] == 0
        assert told["versions_seen"] > 10
