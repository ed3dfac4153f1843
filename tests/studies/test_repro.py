"""The study: its parts measure what they say, its network is the bundle's, and its page needs nothing but itself."""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kbt_edge as kbt
from kbt_edge import cli
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import CHOICE_SEEDS, METHODS, hidden, load_network

torch = pytest.importorskip("torch")
for package in ("joblib", "scipy", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from kbt_edge.networks import DecisionTransformer  # noqa: E402
from kbt_edge.studies import adaptation, figures, report, repro, tuning, uncertainty  # noqa: E402
from kbt_edge.studies.claims import claims  # noqa: E402
from kbt_edge.studies.common import HEADS, PAPER_EPSILON, SINGLE, WATCHFUL  # noqa: E402
from kbt_edge.studies.learners import Kbt, Paper, readout  # noqa: E402

GAIN = cartpole.lqr_gain(cartpole.NEW)
UNSEEN = cartpole.sample_states(np.random.default_rng(99), 40)
TINY = repro.Settings(trials=1, samples=50, starts=3, unseen=20, iterations=1200, plants=1, timed=1,
                      changing_seeds=1, changing_before=100, changing_after=100)  # fmt: skip


@pytest.fixture(scope="module")
def network() -> DecisionTransformer:
    torch.set_num_threads(1)
    return load_network()


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """A whole study, with one retraining memory."""
    few = tuple(m for m in METHODS if m.name in ("frozen", "retrain 10", "readout 50", "least squares"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptation, "METHODS", few)
        return repro.study(TINY, jobs=1)


def stream(n: int, seed: int = 0) -> list[tuple[np.ndarray, float]]:
    states, forces = cartpole.sample_pairs(np.random.default_rng(seed), n, GAIN)
    return [(state, float(force)) for state, force in zip(states, forces, strict=True)]


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_the_network_that_is_retrained_is_the_one_in_the_bundle(network: DecisionTransformer) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = kbt.Model.load("cartpole", backend="onnxruntime")
    rows = np.array(
        [model.trunk((state / cartpole.STATE_BOX).astype(np.float32)[None], copy=True)[0] for state in UNSEEN]
    )
    np.testing.assert_allclose(rows, hidden(network, UNSEEN), atol=1e-5)
    assert model.head.config == kbt.Head(*readout(network)).config  # the bundle has the default settings
    np.testing.assert_allclose(model.head.layers[0].mean, np.column_stack(readout(network)), rtol=1e-6)


LEARNERS: dict[str, Callable[[DecisionTransformer], Any]] = {
    "default": lambda network: Kbt(network),
    "one filter": lambda network: Kbt(network, drift=0.0),
    "two layers": lambda network: Kbt(network, drift=0.0, hidden=(32,)),
    "two layers, full": lambda network: Kbt(network, drift=0.0, hidden=(32,), covariance="full", noise_var=1e-3),
    "paper": lambda network: Paper(network, 1e-2),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_snapshots_act_together_as_each_did_when_it_was_taken(name: str, network: DecisionTransformer) -> None:
    learner = LEARNERS[name](network)
    snapshots, policies = [], []
    for i, (state, force) in enumerate(stream(4)):
        learner.observe(state, force)
        if i % 2:
            snapshots.append(learner.snapshot())
            policies.append(learner.moments(UNSEEN[:10]).mean)  # by the head itself
            np.testing.assert_allclose(learner.policy(UNSEEN[:10]), policies[-1], rtol=1e-4, atol=1e-3)
    assert np.abs(policies[1] - policies[0]).max() > 0.1
    together = learner.policies(snapshots)(np.stack([UNSEEN[:10]] * 2))
    np.testing.assert_allclose(together, policies, rtol=1e-4, atol=1e-3)


def test_the_paper_s_setting_clips_what_its_diagonal_makes_indefinite(network: DecisionTransformer) -> None:
    learner = Paper(network, PAPER_EPSILON)
    for state, force in stream(15):
        learner.observe(state, force)
    assert learner.head.clipped > 0


@pytest.mark.parametrize("head", HEADS)
def test_twenty_samples_balance_every_start_and_it_stays_so(head: str, network: DecisionTransformer) -> None:
    for seed in CHOICE_SEEDS:
        rng = np.random.default_rng(seed)
        starts = cartpole.sample_starts(rng, 20)
        learner, snapshots = Kbt(network, **HEADS[head]), []
        for i, (state, force) in enumerate(stream(100, seed)):
            if i in (0, 20, 30, 50, 70):
                snapshots.append(learner.snapshot())
            learner.observe(state, force)
        snapshots.append(learner.snapshot())
        rates = cartpole.success_rates(cartpole.NEW, learner.policies(snapshots), len(snapshots), starts)
        assert rates.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        assert cartpole.force_rmse(learner.policy, GAIN, cartpole.sample_states(rng, 300)) < 0.4


def test_intervals_of_the_defaults_hold_what_they_promise() -> None:
    at = uncertainty.NOMINAL.index(0.9)
    for head, known in ((SINGLE, True), (SINGLE, False), (WATCHFUL, False)):
        trials = [uncertainty.coverage(head, 10.0, known, trial, TINY) for trial in range(4)]
        assert np.mean([trial["observed"][at] for trial in trials]) == pytest.approx(0.9, abs=0.03)
        assert np.mean([trial["noise_var"] for trial in trials]) == pytest.approx(10.0, rel=0.15)


def test_the_predicted_variance_comes_to_that_of_the_data() -> None:
    settings = replace(TINY, iterations=6000)
    for rule, tolerance in (("replace", 0.1), ("fuse", 0.1)):
        run = uncertainty.variance(rule, 20.0, settings)
        assert run["settled_total"] == pytest.approx(20.0, rel=tolerance)
        assert (run["settled_epistemic"] < 2.0) == (rule == "fuse")
        assert run["iterations"][0] == uncertainty.WINDOW
        assert len(run["iterations"]) == len(run["total"]) == len(run["epistemic"])


def test_the_moving_average_is_that_of_the_paper() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    expected = [values[i : i + 500].mean() for i in range(1501)]
    np.testing.assert_allclose(uncertainty.moving_average(values), expected, atol=1e-12)


def test_the_paper_s_rows_are_single_filters(network: DecisionTransformer) -> None:
    rows = {row.name: row.make(network) for row in adaptation.rows(tuning.tuned_settings())}
    heads = {name: learner.head for name, learner in rows.items() if isinstance(learner, Kbt)}
    drifts = {name: head.config["drift"] for name, head in heads.items()}
    assert len(drifts) == 7
    assert drifts.pop(WATCHFUL) == "auto"
    drifts.pop("tuned")  # tune chooses for itself
    assert set(drifts.values()) == {0.0}
    assert heads[SINGLE].config == kbt.Head(*readout(network), drift=0.0).config


def test_retraining_is_looked_at_when_its_memory_is_full() -> None:
    moments = repro.FULL.moments()
    for memory in (10, 20, 25, 50, 75, 100):
        assert {memory, 400 // memory * memory} <= set(moments)


def test_trials_do_not_use_the_streams_on_which_settings_were_chosen() -> None:
    drawn = [np.random.default_rng([0, trial]).uniform() for trial in range(10)]
    assert not set(drawn) & {np.random.default_rng(seed).uniform() for seed in CHOICE_SEEDS}


# ---- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.slow("runs a study")
def test_a_study_has_every_row_and_finds_kbt_ahead(result: dict[str, Any]) -> None:
    rows = result["adaptation"]
    ladder = ["paper", "exact backward", "fuse", "prior per layer", "blocks", SINGLE, "tuned", WATCHFUL]
    assert list(rows)[:8] == ladder
    for head in HEADS:
        assert rows[head]["success"][0][0] == 0.0
        assert rows[head]["success"][0][-1] == 1.0
    final = {name: row["rmse"][0][-1] for name, row in rows.items()}
    ours = max(final[SINGLE], final[WATCHFUL])
    assert ours < 0.5
    assert max(ours, final["blocks"]) < final["retrain 10"] < final["frozen"]
    assert max(ours, final["blocks"]) < final["exact backward"] < final["paper"]
    assert rows["frozen"]["nll"] == [[None] * len(rows["frozen"]["samples"])]
    assert result["computation_time"]["retrain 10"]["seconds"] > 1e-4


@pytest.mark.slow("runs a study")
def test_a_claim_is_met_only_by_its_figures(result: dict[str, Any]) -> None:
    def met(change: Callable[[dict[str, Any]], None], index: int) -> bool:
        changed = copy.deepcopy(result)
        change(changed)
        return bool(claims(changed)[index]["met"])

    def kbt_fails_late(r: dict[str, Any]) -> None:
        r["adaptation"][SINGLE]["success"][0][-1] = 0.9

    def retraining_is_quick(r: dict[str, Any]) -> None:
        r["computation_time"]["retrain 10"]["seconds"] = 1e-6

    def intervals_are_narrow(r: dict[str, Any]) -> None:
        run = next(run for run in r["calibration"]["runs"] if run["head"] == SINGLE)
        run["observed"][uncertainty.NOMINAL.index(0.9)] = 0.8

    def tuning_hurts(r: dict[str, Any]) -> None:
        r["tuning"]["runs"][0]["tuned"]["log_likelihood"] = -99.0

    def the_default_fails_late(r: dict[str, Any]) -> None:
        r["adaptation"][WATCHFUL]["success"][0][-1] = 0.9

    def the_default_predicts_too_much(r: dict[str, Any]) -> None:
        runs = r["data_variance"]["runs"]
        next(run for run in runs if run["row"] == WATCHFUL and run["sigma"] > 0)["settled_total"] = 99.0

    assert [claim["head"] for claim in result["claims"]] == [SINGLE] * 8 + [WATCHFUL] * 6
    assert met(lambda r: None, 0)
    assert met(lambda r: None, 8)
    assert met(kbt_fails_late, 8)
    assert not met(the_default_fails_late, 8)
    assert not met(the_default_predicts_too_much, 12)
    assert not met(kbt_fails_late, 0)
    assert not met(retraining_is_quick, 3)
    assert not met(intervals_are_narrow, 6)
    assert not met(tuning_hurts, 7)


@pytest.mark.slow("runs a study")
def test_the_report_is_one_file_with_all_its_figures(result: dict[str, Any], tmp_path: Path) -> None:
    drawn = figures.draw_all(result, tmp_path)
    assert set(drawn) == {"success", "time", "variance", "error", "calibration"}
    for name in drawn:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in (tmp_path / f"{name}.svg").read_bytes()
    page = report.html(result, drawn)
    assert len(re.findall(r'src="data:image/svg\+xml;base64,', page)) == 5
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)  # every blank of the page is filled in
    assert all(html.escape(claim["found"]) in page for claim in result["claims"])


@pytest.mark.slow("runs a study")
def test_the_command_writes_data_figures_and_report(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    diverged = copy.deepcopy(result)
    diverged["adaptation"]["paper"]["rmse"][0][-1] = float("inf")
    monkeypatch.setattr(repro, "study", lambda settings, jobs, tell: diverged)
    assert cli.main(["repro", "--quick", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "out" / "report.html") in said
    data = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert data["adaptation"]["paper"]["rmse"][0][-1] is None
    assert data["claims"] == result["claims"]
    assert (tmp_path / "out" / "success.svg").is_file()
    assert str(tmp_path / "out" / "changing.html") in said
    assert (tmp_path / "out" / "changing-abrupt.png").is_file()


def test_wrong_options_are_rejected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["repro", "--trials", "0"]) == 1
    assert "--trials: expected 1 or more, got 0" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["repro", "--quick"]) == 1
    assert "pip install 'kbt-edge[repro]'" in capsys.readouterr().err
