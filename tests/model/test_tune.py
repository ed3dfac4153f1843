"""tune: never worse on its own stream, better where the defaults are wrong, the same answer twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_onnx

import kbt_edge as kbt
from kbt_edge import cli
from kbt_edge.errors import RangeError, ShapeError
from kbt_edge.model import Model
from kbt_edge.tune import prequential, tune

pytestmark = pytest.mark.long("tries many priors on whole streams")

WEIGHT = np.array([[1.0, -0.5, 0.25]])


def stream(seed: int, n: int = 80, change: float = 0.5, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Targets of a changed readout, with noise of that variance."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(n, 3))
    return h, h @ (WEIGHT + change).T + np.sqrt(noise) * rng.normal(size=(n, 1))


def score(head: kbt.Head, h: np.ndarray, y: np.ndarray) -> float:
    return prequential(head, list(zip(h, y, strict=True)))


@pytest.mark.parametrize("hidden", [(), (6,), (6, 6)])
def test_on_its_stream_the_choice_is_the_best_that_was_tried_and_not_worse_than_before(hidden: tuple[int, ...]) -> None:
    h, y = stream(0)
    tuned = tune(kbt.Head(WEIGHT, hidden=hidden), h, y)
    assert tuned.best.log_likelihood == max(candidate.log_likelihood for candidate in tuned.tried)
    assert tuned.best.log_likelihood >= tuned.before.log_likelihood
    assert len(tuned.best.prior_var) == len(hidden) + 1
    assert score(tuned.head, h, y) == tuned.best.log_likelihood  # the head it returns is fresh, and is that candidate


def test_it_finds_a_wrong_noise_variance_and_is_better_on_another_stream() -> None:
    for true, assumed in ((1e-4, 1.0), (1.0, 1e-4)):
        h, y = stream(1, noise=true)
        wrong = kbt.Head(WEIGHT, drift=0.0, noise_var=assumed)
        tuned = tune(wrong, h, y)
        assert tuned.best.noise_var == pytest.approx(true, rel=1.0)
        other = stream(2, 200, noise=true)
        assert score(tuned.head, *other) > score(kbt.Head(WEIGHT, drift=0.0, noise_var=assumed), *other) + 0.5


def test_a_change_that_is_small_gets_a_tight_prior_and_a_large_one_a_wide_prior() -> None:
    small, large = (tune(kbt.Head(WEIGHT, drift=0.0, noise_var=0.01), *stream(3, change=change)) for change in (0.01, 3.0))
    assert small.best.prior_var[0] < 0.1 < 1.0 < large.best.prior_var[0]


def test_it_is_deterministic_and_leaves_its_subject_alone() -> None:
    h, y = stream(4)
    head = kbt.Head(WEIGHT, hidden=(6,))
    before = head.to_bytes()
    first, second = tune(head, h, y), tune(head, h, y)
    assert head.to_bytes() == before
    assert (first.best, first.tried) == (second.best, second.tried)
    assert first.head.to_bytes() == second.head.to_bytes()
    assert first.head.samples == 0


def test_everything_but_the_variances_stays() -> None:
    head = kbt.Head(WEIGHT, hidden=(6,), covariance="diagonal", gate=1e9, forgetting=0.99, dtype="float64")
    config = tune(head, *stream(5)).head.config
    variances = ("prior_var", "noise_var")
    assert {k: v for k, v in config.items() if k not in variances} == {
        k: v for k, v in head.config.items() if k not in variances
    }


def test_classes_have_no_noise_to_choose() -> None:
    rng = np.random.default_rng(6)
    h = rng.normal(size=(60, 3))
    labels = (h @ rng.normal(size=(3, 4))).argmax(axis=1)
    tuned = tune(kbt.Head(np.zeros((4, 3)), output="softmax"), h, labels)
    assert tuned.best.noise_var is None
    assert tuned.best.log_likelihood >= tuned.before.log_likelihood
    assert "best" in tuned.report()


def test_noise_per_output_keeps_its_ratios() -> None:
    rng = np.random.default_rng(7)
    h = rng.normal(size=(80, 3))
    y = h @ np.ones((3, 2)) + rng.normal(size=(80, 2)) * [0.1, 0.3]
    tuned = tune(kbt.Head(np.zeros((2, 3)), drift=0.0, noise_var=[1.0, 9.0]), h, y)
    assert tuned.head.noise_var[1] / tuned.head.noise_var[0] == pytest.approx(9.0, rel=1e-5)
    assert tuned.head.noise_var[0] < 0.1


def make_model() -> Model:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    head = kbt.Head(WEIGHT, drift=0.0, noise_var=1.0)
    return Model(tiny_onnx.Control().onnx, head, input_scale=2.0, output_scale=10.0, backend="onnxruntime")


def model_stream() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    model, x = make_model(), rng.normal(size=(60, 4))
    return x, np.array([model.predict(one).mean[0] + 3.0 for one in x])


def test_a_model_is_tuned_in_its_own_units() -> None:
    model, (x, y) = make_model(), model_stream()
    tuned = tune(model, x, y)
    assert tuned.best.noise_var is not None
    assert tuned.best.noise_var < 0.1
    fresh, plain = tuned.model, make_model()
    gained = sum(fresh.update(one, target).log_likelihood for one, target in zip(x, y, strict=True))
    gained -= sum(plain.update(one, target).log_likelihood for one, target in zip(x, y, strict=True))
    expected = len(x) * (tuned.best.log_likelihood - tuned.before.log_likelihood)
    assert gained == pytest.approx(expected, rel=1e-3)
    assert model.head.samples == 0


def test_the_command_writes_a_bundle_and_says_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model().save(tmp_path / "bundle")
    x, y = model_stream()
    np.savez(tmp_path / "samples.npz", x=x, y=y)
    arguments = ["tune", str(tmp_path / "bundle"), str(tmp_path / "samples.npz"), "--backend", "onnxruntime"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["log_likelihood"] > told["before"]["log_likelihood"]
    loaded = Model.load(tmp_path / "out", backend="onnxruntime").head.config
    assert loaded["prior_var"] == pytest.approx(told["best"]["prior_var"])
    assert cli.main(arguments) == 0
    assert "nothing written" in capsys.readouterr().out


def test_wrong_arguments_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = kbt.Head(WEIGHT)
    with pytest.raises(ShapeError, match="y: expected 3 targets, one per sample of x, got 2"):
        tune(head, np.ones((3, 3)), np.ones((2, 1)))
    with pytest.raises(ShapeError, match="x: expected at least 2 samples to tune on, got 1"):
        tune(head, np.ones((1, 3)), np.ones((1, 1)))
    with pytest.raises(ShapeError, match="x: expected one entry per sample, got 3"):
        tune(head, 3, np.ones((1, 1)))
    with pytest.raises(ShapeError, match="h: expected"):  # the head's own complaint
        tune(head, np.ones((3, 2)), np.ones((3, 1)))
    with pytest.raises(RangeError, match="model: expected a tuned Model"):
        _ = tune(head, *stream(9)).model
    make_model().save(tmp_path / "bundle")
    (tmp_path / "samples.npz").write_bytes(b"no archive")
    assert cli.main(["tune", str(tmp_path / "bundle"), str(tmp_path / "samples.npz"), "--backend", "onnxruntime"]) == 1
    assert "samples: expected a .npz file with x and y" in capsys.readouterr().err
