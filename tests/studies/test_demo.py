"""The demo: the old policy falls, the adapted one stands, and what it leaves behind can be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kbt_edge import cli
from kbt_edge.model import Model
from kbt_edge.studies import demo

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")


@pytest.mark.slow("runs the demo twice")
def test_twenty_samples_turn_a_policy_that_always_falls_into_one_that_never_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--samples", "20", "--out", str(tmp_path / "out"), "--backend", "onnxruntime"]
    assert cli.main([*arguments, "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert said.err == ""  # no live line where there is no terminal
    assert told["success_old_plant_before"] == 1.0
    assert told["success_new_plant_before"] == 0.0
    assert told["success_new_plant_after"] == 1.0
    assert [row["samples"] for row in told["progress"]] == [0, 5, 10, 20]
    first, last = told["progress"][0], told["progress"][-1]
    assert last["rmse"] < 1.0 < 20.0 < first["rmse"]
    assert last["std"] < first["std"] / 10
    assert last["update_us"] > 0

    adapted = Model.load(tmp_path / "out" / "cartpole", backend="onnxruntime")
    assert adapted.head.samples == 20
    if told["picture"]:
        assert Path(told["picture"]).read_bytes().startswith(b"\x89PNG")

    assert cli.main(arguments) == 0  # again into the same folder, for people
    text = capsys.readouterr().out
    assert "new plant, before   0 %" in text
    assert "new plant, after    100 %" in text


def test_a_terminal_sees_a_line_for_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(demo, "STARTS", 2)
    assert cli.main(["demo", "--samples", "7", "--out", str(tmp_path), "--backend", "onnxruntime"]) == 0
    live = capsys.readouterr().err
    for i in range(8):
        assert f"{i} samples: RMSE " in live
    assert "µs per update" in live


@pytest.mark.slow("runs the demo twice")
def test_one_seed_gives_one_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for seed in ("3", "3", "4"):
        arguments = ["demo", "--samples", "6", "--seed", seed, "--out", str(tmp_path / f"{len(told)}"), "--json"]
        assert cli.main([*arguments, "--backend", "onnxruntime"]) == 0
        told.append([row["rmse"] for row in json.loads(capsys.readouterr().out)["progress"]])
    assert told[0] == told[1] != told[2]
    heads = [(tmp_path / str(i) / "cartpole" / "head.kbt").read_bytes() for i in range(3)]
    assert heads[0] == heads[1] != heads[2]
    assert np.isfinite(told).all()


def test_wrong_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--samples", "0"]) == 1
    assert "samples: expected 1..100000, got 0" in capsys.readouterr().err
    assert cli.main(["demo", "--seed", "-1"]) == 1
    assert "seed: expected 0 or more, got -1" in capsys.readouterr().err
