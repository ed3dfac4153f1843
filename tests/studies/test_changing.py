"""The page on a plant that changes: its streams are what it says, and the default head follows them."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import RecursiveLeastSquares

torch = pytest.importorskip("torch")
for package in ("joblib", "scipy", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from kbt_edge import _core  # noqa: E402
from kbt_edge.studies import changing, changing_page  # noqa: E402
from kbt_edge.studies.common import SINGLE, WATCHFUL, Settings, pretrained  # noqa: E402

SMALL = Settings(unseen=60, changing_seeds=2, changing_before=300, changing_after=300)
OLD, NEW = cartpole.lqr_gain(cartpole.OLD), cartpole.lqr_gain(cartpole.NEW)
LINEAR = [name for name in changing.LEARNERS if not name.startswith("retraining")]


def after(found: dict[str, Any], sample: int) -> float:
    """The error after so many samples."""
    return float(found["rmse"][found["moments"].index(sample)])


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Every learner on every stream; retraining on a memory that fills up once in each part."""
    settings = Settings(unseen=60, changing_seeds=2, changing_before=100, changing_after=100)
    return {"settings": asdict(settings), "changing": changing.changing(settings, 1, lambda line: None)}


# ---- the streams -----------------------------------------------------------------------------------------------------


def test_the_plant_changes_at_once_and_back() -> None:
    samples = changing.stream("there and back", SMALL, 0)
    assert samples.events == {"abrupt change": 300, "back again": 600}
    for part, gain in ((slice(300), OLD), (slice(300, 600), NEW), (slice(600, 900), OLD)):
        np.testing.assert_allclose(samples.forces[part], -samples.states[part] @ gain)
        assert (samples.gains[part] == gain).all()
    assert len(samples.forces) == 900


def test_the_plant_moves_slowly_and_then_stands_still() -> None:
    gains = changing.stream("slow", SMALL, 0).gains
    assert len(gains) == 900
    assert (gains[:300] == OLD).all()
    np.testing.assert_allclose(gains[599:], np.broadcast_to(NEW, (301, 4)))
    steps = np.abs(np.diff(gains[299:600], axis=0)).max(axis=1)
    assert steps.min() > 0.0
    assert steps.max() < 0.05 * np.abs(NEW - OLD).max()


def test_outliers_are_in_the_targets_and_not_in_the_plant() -> None:
    samples = changing.stream("outliers", SMALL, 0)
    off = samples.forces + samples.states @ OLD
    assert (samples.gains == OLD).all()
    np.testing.assert_allclose(np.abs(off[300 : 300 + changing.BURST]), changing.OUTLIER)
    assert set(np.sign(off[300 : 300 + changing.BURST])) == {-1.0, 1.0}
    np.testing.assert_allclose(np.delete(off, np.arange(300, 300 + changing.BURST)), 0.0, atol=1e-9)


def test_seeds_give_different_streams_of_the_same_plants() -> None:
    first, second = (changing.stream("slow", SMALL, seed) for seed in (0, 1))
    assert (first.gains == second.gains).all()
    assert (first.states != second.states).all()


# ---- the learners ----------------------------------------------------------------------------------------------------


def test_without_forgetting_rls_is_the_least_squares_of_the_study() -> None:
    network = pretrained()
    ours, study = changing.RLS(network, 1.0, prior_var=100.0), RecursiveLeastSquares(network, 100.0)
    samples = changing.stream("slow", SMALL, 0)
    rows = changing.hidden(network, samples.states)
    for state, h, force in zip(samples.states[:60], rows, samples.forces, strict=False):
        ours.learn(state, h, float(force) / cartpole.FORCE_SCALE)
        study.observe(state, float(force))
    unseen = cartpole.sample_states(np.random.default_rng(0), 20)
    np.testing.assert_allclose(
        ours.forces(unseen, changing.hidden(network, unseen)), study.policy(unseen), rtol=1e-3, atol=1e-3
    )


def test_rls_does_not_wind_up_without_excitation() -> None:
    network = pretrained()
    rls, plain = changing.RLS(network, 0.95), changing.RLS(network, 0.95)
    plain.limit = np.inf
    for learner in (rls, plain):
        for _ in range(1000):
            learner.learn(np.zeros(4), np.ones(16), 0.0)
    assert np.abs(rls.P).max() < 1e4 < 1e20 < np.abs(plain.P).max()


@pytest.mark.parametrize("seed", [0, 1])
def test_two_hundred_samples_after_a_change_the_default_head_is_far_ahead(seed: int) -> None:
    found = {name: changing.follow("there and back", name, seed, SMALL) for name in (WATCHFUL, "RLS 1", "frozen")}
    error = {name: after(each, 300 + 200) for name, each in found.items()}
    assert error[WATCHFUL] < 0.5
    assert error[WATCHFUL] < error["RLS 1"] / 20
    assert error[WATCHFUL] < error["frozen"] / 50
    assert after(found["frozen"], 300) < 0.2  # it was right before
    assert 300 < found[WATCHFUL]["reported"][0] <= 300 + 200


def test_a_burst_of_outliers_is_forgotten_and_not_reported() -> None:
    found = {name: changing.follow("outliers", name, 0, SMALL) for name in (WATCHFUL, "RLS 0.95")}
    assert found[WATCHFUL]["reported"] == []
    assert after(found[WATCHFUL], 300 + 50) < 0.1
    assert after(found[WATCHFUL], 300 + 50) < after(found["RLS 0.95"], 300 + 50) / 10


def test_the_belief_is_a_share_of_every_member_at_every_moment() -> None:
    found = changing.follow("outliers", WATCHFUL, 0, Settings(unseen=5, changing_before=60, changing_after=60))
    assert list(found["belief"]) == list(_core.MEMBERS) == list(changing_page.MEMBERS)
    total = np.sum(list(found["belief"].values()), axis=0)
    np.testing.assert_allclose(total, np.ones(len(found["moments"])), rtol=1e-5)


# ---- the page --------------------------------------------------------------------------------------------------------


def made_up(errors: dict[str, list[float]]) -> dict[str, Any]:
    """A stream with an event after 10 samples, and the error of each learner 20 and 50 samples later."""
    data = {"events": {"event": 10}, "moments": [10, 30, 60], "rmse": {n: [[9.0, *e]] for n, e in errors.items()}}
    return {"streams": {"a": data}}


def test_losses_come_first_and_the_largest_at_the_top() -> None:
    lines = changing.table(made_up({WATCHFUL: [1.0, 3.0], "frozen": [2.0, 1.0]}))
    assert [(line["after"], line["ratio"]) for line in lines] == [(50, 3.0), (20, 0.5)]
    lines = changing.table(made_up({WATCHFUL: [2.0, 3.0], "frozen": [1.0, 1.0]}))
    assert [line["ratio"] for line in lines] == [3.0, 2.0]


def test_the_table_has_medians_and_ends_where_the_next_event_begins() -> None:
    result = made_up({WATCHFUL: [1.0, 3.0], "frozen": [2.0, 1.0]})
    data = result["streams"]["a"]
    data["rmse"][WATCHFUL] += [[9.0, 7.0, 3.0], [9.0, 6.0, 3.0]]
    data["events"]["later"] = 40
    lines = changing.table(result)
    assert [(line["event"], line["after"], line["errors"][WATCHFUL]) for line in lines] == [
        ("event", 20, 6.0),
        ("later", 20, 3.0),
    ]


@pytest.mark.slow("runs every learner on every stream, retraining included")
def test_the_page_and_its_pictures_are_written(measured: dict[str, Any], tmp_path: Path) -> None:
    drawn = changing_page.draw_all(measured, tmp_path)
    assert set(drawn) == {"abrupt", "back", "slow", "outliers"}
    for name, path in drawn.items():
        assert (tmp_path / f"changing-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in path.read_bytes()
    page = changing_page.html(measured, drawn)
    assert "A plant that changes while it runs" in page
    assert len(re.findall(r'src="data:image/svg\+xml;base64,', page)) == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)  # every blank of the page is filled in
    lost = [line["ratio"] > 1.0 for line in changing.table(measured["changing"])]
    assert page.count("<tr class=lost>") == sum(lost)
    assert lost == sorted(lost, reverse=True)


@pytest.mark.slow("runs every learner on every stream, retraining included")
def test_every_learner_is_measured_on_every_stream(measured: dict[str, Any]) -> None:
    found = measured["changing"]
    assert list(found["streams"]) == list(changing.STREAMS)
    assert set(changing_page.LINES) == set(changing.LEARNERS) == set(found["seconds"])
    for data in found["streams"].values():
        for runs in data["rmse"].values():
            assert np.array(runs).shape == (2, len(data["moments"]))
            assert np.isfinite(runs).all()
    seconds = found["seconds"]
    assert seconds["retraining 100"] > 20 * max(seconds[name] for name in LINEAR)
    back = found["streams"]["there and back"]
    at = back["moments"].index(200)
    assert back["rmse"]["retraining 100"][0][at] < back["rmse"]["frozen"][0][at] / 5
    assert SINGLE in found["streams"]["slow"]["rmse"]
