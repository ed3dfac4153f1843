"""The comparison with peers: how it takes turns and judges, and that it says what it could not set up."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.host_only("measures time, and an emulated board has no time of its own")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_peers.py"


sys.path.append(str(TOOL.parent))
peers, racing = importlib.import_module("peers"), importlib.import_module("racing")


def test_runners_take_turns_and_the_first_turn_does_not_count() -> None:
    turns = []

    def runner(name: str) -> Any:
        def block() -> Any:
            turns.append(name)
            return np.array([len(turns)])

        return block

    taken = racing.run(racing.Race("", {"ours": runner("ours"), "peer": runner("peer")}, ()), rounds=3)
    assert turns == ["ours", "peer"] * 4
    assert {name: [int(block[0]) for block in blocks] for name, blocks in taken.items()} == {
        "ours": [3, 5, 7],
        "peer": [4, 6, 8],
    }


def test_a_disturbance_of_whole_rounds_leaves_the_ratio_alone() -> None:
    rng = np.random.default_rng(0)
    ours, peer = rng.integers(900, 1100, (20, 51)), rng.integers(6300, 7700, (20, 51))
    expected = float(np.median(np.median(peer, axis=1) / np.median(ours, axis=1)))
    slow = rng.choice([1, 4], 20)
    taken = {"ours": list(ours * slow[:, None]), "peer": list(peer * slow[:, None])}
    verdict = racing.judged(racing.Goal("ours", "peer", 6.0), taken)
    assert verdict["ratio"] == pytest.approx(expected)
    assert verdict["low"] <= verdict["ratio"] <= verdict["high"]
    assert verdict["met"] is True
    assert racing.judged(racing.Goal("ours", "peer", 8.0), taken)["met"] is False
    assert racing.judged(racing.Goal("ours", "peer", None), taken)["met"] is None


def test_a_percentile_is_given_only_where_there_are_calls_enough() -> None:
    many = racing.figures([np.arange(1, 1002)])
    assert (many["median_us"], many["p99_us"], many["calls"]) == (0.501, 0.991, 1001)
    assert racing.figures([np.array([5])] * 5)["p99_us"] is None


def test_a_runner_that_does_not_learn_is_rejected() -> None:
    stream = peers.Stream.drawn(20)
    with pytest.raises(RuntimeError, match="a stone does not learn"):
        stream.must_teach("a stone", lambda h: 0.0, lambda h, y: None)


def test_a_peer_that_cannot_be_imported_is_skipped_with_its_reason(tmp_path: Path) -> None:
    for peer in ("pytagi", "jax"):
        (tmp_path / f"{peer}.py").write_text(f"raise ImportError('{peer} wants a library that is not here')")
    command = [sys.executable, str(TOOL), "--json", "--only", "python", "c", "full", "step"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["races"] == {}
    assert set(report["skipped"]) == {"python", "c", "full", "step"}
    assert "jax wants a library that is not here" in report["skipped"]["full"]
    for race in ("python", "c", "step"):
        assert "pytagi" in report["skipped"][race]
