"""The command line: results on stdout, trouble on stderr, and exit codes that mean something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx
from command import call

import kbt_edge as kbt
from kbt_edge import cli
from kbt_edge.cli import inspect
from kbt_edge.model import Model

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = kbt.Head(np.ones((1, 3)), hidden=(8,), prior_var=(1e-4, 0.25), noise_var=0.04, drift=0.0)
    model = Model(
        tiny_onnx.Control().onnx,
        head,
        input_mean=[1, 2, 3, 4],
        input_scale=0.5,
        output_scale=10.0,
        made={"by": "a test"},
        backend="onnxruntime",
    )
    for step in range(7):
        model.update(np.sin(step + np.arange(4)), float(step))
    return model.save(tmp_path / "bundle")


def test_inspect_tells_what_is_in_a_bundle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", str(folder), "--backend", "onnxruntime", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    model = Model.load(folder, backend="onnxruntime")
    assert told["path"] == str(folder)
    assert told["made"] == {"kbt_edge": kbt.__version__, "by": "a test"}

    trunk = told["trunk"]
    assert trunk["bytes"] == (folder / "trunk.onnx").stat().st_size
    assert trunk["sha256"] == model.trunk.sha256
    assert trunk["operators"] == {"Add": 1, "MatMul": 1, "Tanh": 1}
    assert (trunk["backend"], trunk["reason"]) == ("onnxruntime", "asked for")
    assert trunk["inputs"] == [
        {"name": "x", "shape": [1, 4], "dtype": "float32", "mean": [1.0, 2.0, 3.0, 4.0], "scale": [0.5]}
    ]

    head = told["head"]
    assert head["bytes"] == (folder / "head.kbt").stat().st_size
    assert head["memory"] == model.head.nbytes
    assert head["widths"] == [3, 8, 1]
    assert head["samples"] == 7
    assert head["noise_var"] == [pytest.approx(0.04 * 100)]
    for layer, told_layer in zip(model.head.layers, head["layers"], strict=True):
        std = np.sqrt([np.diag(block) for block in layer.cov])
        assert told_layer["shape"] == list(layer.mean.shape)
        assert told_layer["smallest_std"] == pytest.approx(std.min())
        assert told_layer["largest_std"] == pytest.approx(std.max())
    assert head["layers"][0]["largest_std"] <= 0.01 * 1.0001
    assert head["layers"][1]["smallest_std"] < 0.4 < head["layers"][1]["largest_std"]


@pytest.mark.parametrize("covariance", ["full", "neuron", "diagonal"])
def test_the_range_of_deviations_is_that_of_the_prior_before_any_data(covariance: str) -> None:
    head = kbt.Head(np.ones((2, 3)), hidden=(6,), prior_var=(0.04, 0.25), covariance=covariance, drift=0.0,
                    noise_var=0.01)  # fmt: skip
    for layer, deviation in zip(head.layers, (0.2, 0.5), strict=True):
        told = inspect.describe_layer(layer)
        assert told["smallest_std"] == pytest.approx(deviation)
        assert told["largest_std"] == pytest.approx(deviation)


def test_inspect_writes_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", str(folder), "--backend", "onnxruntime")
    assert (code, err) == (0, "")
    for expected in (
        str(folder),
        "x  (1, 4)  float32  (x - [1, 2, 3, 4]) / 0.5",
        "1 row of 3",
        "Add 1, MatMul 1, Tanh 1",
        "onnxruntime  (asked for)",
        "3 → 8 → 1  gaussian  neuron  float32",
        "noise constant 4",
        "y = 0 + 10 · u",
        "samples     7",
        "8 × 4",
        "by          a test",
    ):
        assert expected in out, expected


def test_an_error_is_one_line_and_code_1(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "inspect", str(tmp_path / "nothing"))
    assert (code, out) == (1, "")
    assert err == f"kbt-edge: {tmp_path / 'nothing'}: expected the folder of a bundle; there is no such folder\n"
    (folder / "trunk.onnx").write_bytes(b"damaged")
    code, out, err = call(capsys, "inspect", str(folder), "--json")
    assert (code, out) == (1, "")
    assert err.startswith("kbt-edge: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_file_that_cannot_be_written_is_one_line_and_code_1(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    (tmp_path / "file").write_text("in the way")
    few = ("--samples", "1") if command == "demo" else ("--steps", "256")
    code, out, err = call(capsys, command, "--out", str(tmp_path / "file" / "x"), "--backend", "onnxruntime", *few)
    assert (code, out) == (1, "")
    assert err.startswith(f"kbt-edge: {tmp_path / 'file'}")
    assert err.count("\n") == 1


def test_a_missing_package_is_one_line_that_names_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)  # as if it were not installed
    code, out, err = call(capsys, "demo", "--samples", "1", "--out", str(tmp_path), "--backend", "onnxruntime")
    assert (code, out) == (1, "")
    assert err == "kbt-edge: this command needs scipy (pip install 'kbt-edge[demo]')\n"


def test_a_command_whose_own_module_needs_a_missing_package_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "inspect", ("kbt_edge.studies.figures", "shows nothing"))
    monkeypatch.delitem(sys.modules, "kbt_edge.studies.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(capsys, "inspect", "x") == (
        1,
        "",
        "kbt-edge: this command needs matplotlib (pip install 'kbt-edge[demo]')\n",
    )


def test_a_missing_module_of_our_own_is_a_bug_and_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "inspect", ("kbt_edge.no_such_module", "shows nothing"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["inspect", "x"])


def test_built_in_commands_use_the_shipped_bundle_whatever_is_in_the_working_directory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "cartpole")
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "inspect", "cartpole", "--backend", "onnxruntime")
    assert (code, out) == (1, "")
    assert 'write "./cartpole" for' in err
    shipped = call(capsys, "inspect", "kbt_edge:cartpole", "--backend", "onnxruntime", "--json")[1]
    told = call(capsys, "bench", "--steps", "256", "--backend", "onnxruntime", "--out", str(tmp_path / "b"), "--json")[
        1
    ]
    assert json.loads(told)["workload"]["trunk_sha256"] == json.loads(shipped)["trunk"]["sha256"]
    assert json.loads(told)["workload"]["bundle"] == "cartpole"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["inspect"],
        ["paint"],
        ["inspect", "a", "b"],
        ["inspect", "a", "--backend", "torch"],
        ["--json"],
        ["inspect", "-x"],
    ],
)
def test_a_call_that_is_not_understood_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "usage: kbt-edge" in err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"{name} {summary}" in " ".join(out.split())  # wherever argparse broke the line
        code, text, _ = call(capsys, name, "--help")
        assert code == 0
        assert "--json" in text
    assert call(capsys, "--version")[1] == f"kbt-edge {kbt.__version__}\n"


def test_a_strange_name_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "\x1b[31mred\x07"
    code, _, err = call(capsys, "inspect", str(evil))
    assert code == 1
    assert "\\x1b[31mred\\x07" in err
    assert err.removesuffix("\n").isprintable()


def test_progress_is_for_terminals(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("inspect", str(folder), "--backend", "onnxruntime", "--json")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    code, out, err = call(capsys, *arguments)
    assert code == 0
    assert "starting its trunk" in err
    json.loads(out)


def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "kbt_edge", *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False, **settings)


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_the_module_is_the_command(folder: Path) -> None:
    answer = run("inspect", str(folder), "--backend", "onnxruntime", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert json.loads(answer.stdout)["head"]["samples"] == 7
    assert run("inspect", str(folder / "x")).returncode == 1


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    call = [sys.executable, "-m", "kbt_edge", "inspect", str(folder), "--backend", "onnxruntime"]
    answer = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.long("starts Python once more, seconds of emulation")
def test_a_full_disk_is_one_line_and_code_1(folder: Path) -> None:
    call = [sys.executable, "-m", "kbt_edge", "inspect", str(folder), "--backend", "onnxruntime"]
    with open("/dev/full", "w") as full:
        answer = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.startswith("kbt-edge: ")
    assert answer.stderr.count("\n") == 1


# export

POLICY = """
import torch

def policy():
    torch.manual_seed(0)
    trunk = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
    return dict(
        module=trunk,
        readout=torch.nn.Linear(6, 2),
        example_inputs=(torch.zeros(1, 4),),
        input_names=["state"],
        input_scale=[1.0, 2.0, 3.0, 4.0],
        output_offset=[5.0, 0.0],
        output_scale=[10.0, 0.5],
        noise_var=[4.0, 0.01],
        hidden=(12,),
        prior_var=(1e-5, 1.0),
        made={"trained": "never"},
    )

def nothing():
    return 5
"""


@pytest.mark.slow("exports a torch model")
def test_export_makes_a_bundle_that_equals_the_torch_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "policy.py").write_text(POLICY)
    bundle = tmp_path / "bundle"
    code, out, err = call(capsys, "export", f"{tmp_path / 'policy.py'}:policy", str(bundle), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["head"]["noise_var"] == pytest.approx([4.0, 0.01])
    assert told["made"]["trained"] == "never"
    assert told["made"]["torch"] == torch.__version__

    model = Model.load(bundle, backend="onnxruntime")
    assert model.bundle().head == (bundle / "head.kbt").read_bytes()
    scope: dict[str, Any] = {}
    exec(POLICY, scope)
    given = scope["policy"]()
    rng = np.random.default_rng(0)
    for _ in range(10):
        x = 3 * rng.standard_normal(4)
        with torch.no_grad():
            scaled = torch.tensor(x / [1, 2, 3, 4], dtype=torch.float32)
            u = given["readout"](given["module"](scaled)).numpy()
        np.testing.assert_allclose(model.predict(x).mean, [5, 0] + u * [10, 0.5], rtol=1e-4, atol=1e-4)

    code, _, err = call(capsys, "export", f"{tmp_path / 'policy.py'}:nothing", str(tmp_path / "other"))
    assert code == 1
    assert "expected a dict with module, readout and example_inputs" in err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("policy", "expected FILE.py:FUNCTION or MODULE:FUNCTION, got policy"),
        ("missing.py:f", "missing.py:f cannot be loaded"),
        ("no.such.module:f", "cannot be loaded: No module named"),
        ("json:no_such_function", "expected a function 'no_such_function' in json"),
    ],
)
def test_a_source_that_cannot_be_found_is_named(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "export", source, str(tmp_path / "b"))
    assert (code, out) == (1, "")
    assert message in err
