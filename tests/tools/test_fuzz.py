"""A short run of the fuzzers, which keeps them and their seeds working. tools/fuzz.py runs them for hours."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cabi import compiler

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tests" / "fuzz"


def test_the_seeds_are_what_their_maker_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_seeds", FUZZ / "make_seeds.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    for target, files in maker.seeds().items():
        found = {path.name: path.read_bytes() for path in (maker.CORPUS / target).iterdir()}
        earlier = {name for name, data in found.items() if target == "blob" and data[4] == 1}  # an earlier core's
        assert {name: data for name, data in found.items() if name not in earlier} == files


@pytest.mark.host_only("fuzzes Python code, which is the same everywhere")
@pytest.mark.slow("fuzzes")
def test_two_thousand_mutated_bundles_are_rejected_or_mean_the_same(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="the fuzz extra is not installed")
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "bundle", "--runs", "2000", "--seconds", "0"]
    call += ["--work", str(tmp_path)]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert answer.returncode == 0, answer.stderr
    told = re.search(r"bundle: (\d+) executions, coverage (\d+) -> (\d+), 0 findings", answer.stdout)
    assert told is not None, answer.stdout
    executions, first, last = map(int, told.groups())
    assert executions >= 2000
    assert last > first > 100  # the coverage of the Python files is seen, and grows


@pytest.mark.host_only("builds the core for two kinds of machine")
@pytest.mark.slow("compiles the core twice")
def test_nine_thousand_calls_of_a_head_are_answered_as_by_a_copy_made_from_its_bytes(tmp_path: Path) -> None:
    if compiler("g++", "clang++", "c++") is None:
        pytest.skip("no C++ compiler")
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "copies", "--runs", "1500", "--seed", "1"]
    call += ["--work", str(tmp_path)]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=900, check=False)
    assert answer.returncode == 0, answer.stderr
    assert ", 0 findings" in answer.stdout
    executions = re.search(r"copies: (\d+) executions", answer.stdout)
    tally = {what: int(count) for count, what in re.findall(r"; (\d+) (\w+)", answer.stdout)}
    assert executions is not None, answer.stdout
    assert int(executions[1]) == sum(tally.values()) >= 9000
    assert min(tally[structure] for structure in ("full", "neuron", "diagonal")) >= 3000


@pytest.mark.host_only("compiles for this machine with sanitizers")
@pytest.mark.slow("compiles with sanitizers")
def test_three_hundred_random_graphs_are_rejected_or_agree_with_onnxruntime(tmp_path: Path) -> None:
    for package in ("emx_onnx_cgen", "onnx", "onnxruntime"):
        pytest.importorskip(package, reason="the graphs go through it")
    call = [sys.executable, str(FUZZ / "graphs.py"), "--graphs", "300", "--findings", str(tmp_path)]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = re.search(r"graphs: 300 graphs, (\d+) lies, (\d+) rejected, .* (\d+) run, 0 findings;", answer.stdout)
    assert told is not None, answer.stdout
    assert min(map(int, told.groups())) > 40  # each of these happens often


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_an_unknown_target_is_rejected(tmp_path: Path) -> None:
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "nonsense", "--work", str(tmp_path)]
    answer = subprocess.run(call, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "expected some of" in answer.stderr


@pytest.mark.host_only("fuzzes Python code, which is the same everywhere")
def test_a_fuzzer_that_does_not_start_has_found_nothing(tmp_path: Path) -> None:
    (tmp_path / "atheris.py").write_text("raise ImportError('broken')\n")
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "bundle", "--work", str(tmp_path / "work")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "expected the fuzzer to start" in answer.stderr
    assert "findings" not in answer.stdout
