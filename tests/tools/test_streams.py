"""The judges of the head: every plant runs and every score is finite; streams are scored and judged as they say."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))
learners, plants, streams = (importlib.import_module(name) for name in ("stream_learners", "plants", "streams"))
common, data = importlib.import_module("plant_common"), importlib.import_module("stream_data")


@pytest.mark.parametrize("task", plants.TASKS)
def test_every_plant_gives_finite_figures(task: str) -> None:
    if task in ("change", "outliers"):
        pytest.importorskip("scipy")
    rows = list(plants.TASKS[task]({"ours": learners.Ours, "frozen": learners.Frozen}, common.QUICK))
    assert {"ours", "frozen"} <= {row["learner"] for row in rows}
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    assert len(plants.text(task, rows).splitlines()) == len(rows) + 2


def test_the_tool_prints_json_and_knows_its_tasks() -> None:
    command = [sys.executable, str(TOOLS / "plants.py"), "--quick", "--alone", "--json", "back"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {row["learner"] for row in json.loads(done.stdout)["back"]} == {"ours"}
    wrong = subprocess.run([*command[:2], "sideways"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "unknown task sideways; there are change, outliers" in wrong.stderr


def test_rls_is_least_squares_and_forgetting_neither_winds_up_nor_loses_its_sign() -> None:
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(100, 3)), rng.normal(size=4)
    Y = common.plus_one(X) @ w[:, None] + 0.1 * rng.normal(size=(100, 1))
    rls = learners.RLS(3, 1, prior=1e6)
    common.teach(rls, X, Y)
    np.testing.assert_allclose(rls.W, np.linalg.lstsq(common.plus_one(X), Y, rcond=None)[0], atol=1e-5)
    rls = learners.RLS(3, 1, forgetting=0.95)
    for _ in range(5000):  # without any excitation but the bias
        rls.predict(np.zeros(3))
        rls.learn(np.zeros(1))
    values = np.linalg.eigvalsh(rls.P)
    assert 0 < values.min() < values.max() < 200


class Knows:
    """Predicts zero with the variance that it is told."""

    def __init__(self, d: int, o: int) -> None:
        self.o = o

    def predict(self, h: Any) -> tuple[Any, Any]:
        return np.zeros(self.o), np.full(self.o, 4.0)

    def learn(self, y: Any) -> None:
        pass


def test_scores_of_a_learner_that_knows_the_law() -> None:
    rng = np.random.default_rng(1)
    found = streams.scores((np.zeros((20_020, 1)), 2 * rng.normal(size=(20_020, 2)), "regression"), Knows)
    assert found["RMSE"] == pytest.approx(1, abs=0.01)
    assert found["NLL"] == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi * 4), abs=0.02)
    assert found["90 %"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("score", "ours", "best", "verdict"),
    [("RMSE", 1.019, 1.0, "level"), ("RMSE", 1.03, 1.0, "lost"), ("RMSE", 0.9, 1.0, "ahead"),
     ("RMSE", math.nan, 1.0, "lost"), ("accuracy", 0.97, 1.0, "lost"), ("accuracy", 0.9, 0.8, "ahead"),
     ("NLL", -1.99, -2.0, "level"), ("NLL", -1.97, -2.0, "lost"), ("NLL", -2.1, -2.0, "ahead")],
)  # fmt: skip
def test_verdicts(score: str, ours: float, best: float, verdict: str) -> None:
    peers = {"good": {score: best}, "bad": {score: best - 5 if score == "accuracy" else best + 5}}
    [row] = streams.judged("a stream", {score: ours}, peers)
    assert (row["peer"], row["verdict"]) == ("good", verdict)


def test_streams_are_split_by_name_and_scaled_by_their_first_rows() -> None:
    assert not data.LOOK & data.SCORE
    assert abs(len(data.LOOK) - len(data.SCORE)) <= 2
    values = np.random.default_rng(2).normal(5, 3, (500, 2))
    later = values.copy()
    later[50:] *= 10
    np.testing.assert_array_equal(data.scaled(values)[:50], data.scaled(later)[:50])
    assert data.scaled(values)[:50].std() == pytest.approx(1)
    assert set(data.scaled(np.array([[0.0], [1.0], [1.0]])).ravel()) == {0.0, 1.0}


def test_features_of_a_stream_are_from_before_its_target() -> None:
    values = np.arange(10.0)[:, None]
    X, Y, _ = data.ahead(values, (1, 3), known=-values)
    np.testing.assert_array_equal(X, np.stack([np.arange(2, 9), np.arange(0, 7), -np.arange(3, 10)], axis=1))
    np.testing.assert_array_equal(Y[:, 0], np.arange(3, 10))
