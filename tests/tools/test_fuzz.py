"""A short run of the fuzzers, so that they and their seeds stay alive. tools/fuzz.py runs them for hours."""

from __future__ import annotations

import importlib.util
import json
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
        assert {path.name: path.read_bytes() for path in (maker.CORPUS / target).iterdir()} == files


@pytest.mark.host_only("fuzzes Python code, which is the same everywhere")
@pytest.mark.slow("fuzzes")
def test_two_thousand_mutated_bundles_are_rejected_or_mean_the_same(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="the fuzz extra is not installed")
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "bundle", "--runs", "2000", "--seconds", "0"]
    call += ["--work", str(tmp_path), "--totals", str(tmp_path / "totals.json")]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert answer.returncode == 0, answer.stderr
    told = re.search(r"bundle: (\d+) executions, coverage (\d+) -> (\d+), 0 findings", answer.stdout)
    assert told is not None, answer.stdout
    executions, first, last = map(int, told.groups())
    assert executions >= 2000
    assert last > first > 100  # the coverage of the Python files is seen, and grows
    assert json.loads((tmp_path / "totals.json").read_text())["bundle"]["executions"] == executions


@pytest.mark.host_only("builds the core for two kinds of machine")
@pytest.mark.slow("compiles the core twice")
def test_nine_thousand_calls_of_a_head_are_answered_as_by_a_copy_made_from_its_bytes(tmp_path: Path) -> None:
    if compiler("g++", "clang++", "c++") is None:
        pytest.skip("no C++ compiler")
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "copies", "--runs", "1500", "--seed", "1"]
    call += ["--work", str(tmp_path), "--totals", str(tmp_path / "totals.json")]
    answer = subprocess.run(call, capture_output=True, text=True, timeout=900, check=False)
    assert answer.returncode == 0, answer.stderr
    assert ", 0 findings" in answer.stdout
    total = json.loads((tmp_path / "totals.json").read_text())["copies"]
    assert total["executions"] == sum(total["tally"].values()) >= 9000
    assert min(total["tally"][structure] for structure in ("full", "neuron", "diagonal")) >= 3000


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
    call += ["--totals", str(tmp_path / "totals.json")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "expected the fuzzer to start" in answer.stderr
    assert not (tmp_path / "totals.json").exists()


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_the_report_sums_up_what_earlier_runs_have_kept(tmp_path: Path) -> None:
    kept = {"abi": {"cpu_seconds": 5400.0, "executions": 7, "findings": 1, "tally": {"calls": 300}}}
    kept["store"] = {"cpu_seconds": 1800.0, "executions": 9, "findings": 0, "tally": {}}
    totals = tmp_path / "totals.json"
    totals.write_text(json.dumps(kept))
    call = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--report", "--totals", str(totals)]
    answer = subprocess.run(call, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [
        "abi: 1.50 h of processor time, 7 executions; 300 calls; 1 ended with a finding",
        "store: 0.50 h of processor time, 9 executions; 0 ended with a finding",
        "together: 2.00 h of processor time",
    ]
    assert json.loads(totals.read_text()) == kept
