"""tune: never worse on its own stream, better where defaults are wrong, nothing by chance, the same answer twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx

import kbt_edge as kbt
from kbt_edge import cli
from kbt_edge._candidates import Scored, choice
from kbt_edge.errors import RangeError, ShapeError
from kbt_edge.model import Model
from kbt_edge.tune import prequential, tune

pytestmark = pytest.mark.long("tries many settings on whole streams")

WEIGHT = np.array([[1.0, -0.5, 0.25]])


def stream(seed: int, n: int = 80, change: float = 0.5, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Targets of a changed readout, with noise of that variance."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(n, 3))
    return h, h @ (WEIGHT + change).T + np.sqrt(noise) * rng.normal(size=(n, 1))


def score(head: kbt.Head, h: np.ndarray, y: np.ndarray) -> float:
    return prequential(head, list(zip(h, y, strict=True)))


def nonlinear(seed: int, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(n, 3))
    return h, np.abs(h).sum(axis=1, keepdims=True) + 0.05 * rng.normal(size=(n, 1))


def error_of(head: kbt.Head, h: np.ndarray, y: np.ndarray, begin: int) -> float:
    """Root of the mean squared error from sample ``begin`` on; each sample is predicted, then learned."""
    found = []
    for one, target in zip(h, y, strict=True):
        found.append(head.predict(one).mean - target)
        head.update(one, target)
    return float(np.sqrt(np.mean(np.square(found[begin:]))))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hidden": (6,)},
        {"hidden": (6, 6)},
        {"drift": 0.0},
        {"drift": 0.0, "prior_var": 1.0},  # better than the default, but not beyond chance
        {"drift": 0.0, "noise_var": 1e-2},
        {"drift": 0.0, "noise_var": 1.0, "prior_var": 1e-4},
        {"rule": "replace", "noise_var": 0.1},
    ],
)
def test_on_its_stream_the_choice_is_not_worse_than_before_nor_than_the_default(settings: dict[str, Any]) -> None:
    h, y = stream(0)
    tuned = tune(kbt.Head(WEIGHT, **settings), h, y)
    assert tuned.before.log_likelihood == pytest.approx(score(kbt.Head(WEIGHT, **settings), h, y), abs=1e-6)
    assert tuned.default.log_likelihood == pytest.approx(score(kbt.Head(WEIGHT), h, y), abs=1e-6)
    assert tuned.best.log_likelihood >= max(tuned.before.log_likelihood, tuned.default.log_likelihood)
    assert {id(tuned.best), id(tuned.before), id(tuned.default)} <= {id(candidate) for candidate in tuned.tried}
    assert score(tuned.head, h, y) == tuned.best.log_likelihood  # the head it returns is fresh, and is that candidate


def test_settings_are_keywords_of_a_head_and_a_gain_has_the_error_of_paired_differences() -> None:
    h, y = nonlinear(1)
    tuned = tune(kbt.Head(WEIGHT), h, y)
    heads = kbt.Head(WEIGHT), kbt.Head(WEIGHT, **tuned.best.settings)
    usual, chosen = (
        np.array([head.update(one, target).log_likelihood for one, target in zip(h, y, strict=True)]) for head in heads
    )
    assert tuned.best.gain == pytest.approx(np.mean(chosen - usual))
    assert tuned.best.error == pytest.approx(np.std(chosen - usual, ddof=1) / np.sqrt(len(h)))


def test_it_chooses_a_hidden_layer_where_the_mapping_is_not_linear_and_none_where_it_is() -> None:
    assert "hidden" not in tune(kbt.Head(WEIGHT), *stream(3)).best.settings
    tuned = tune(kbt.Head(WEIGHT), *nonlinear(3))
    assert "hidden" in tuned.best.settings
    assert score(tuned.head, *nonlinear(4)) > score(kbt.Head(WEIGHT), *nonlinear(4)) + 1.0


def test_it_chooses_a_noise_matrix_where_noise_is_correlated() -> None:
    rng = np.random.default_rng(5)
    weight = np.vstack([WEIGHT, -WEIGHT])
    h = rng.normal(size=(200, 3))
    alone = h @ weight.T + 0.1 * rng.normal(size=(200, 2))
    together = alone + rng.normal(size=(200, 1))
    assert tune(kbt.Head(weight), h, together).head.config["noise"] == "full"
    assert tune(kbt.Head(weight), h, alone).head.config["noise"] == "adaptive"
    assert tune(kbt.Head(weight, noise="full"), h, together).head.config["noise"] == "full"


def test_a_change_that_is_small_gets_a_tight_prior_and_a_large_one_a_wide_prior() -> None:
    small = tune(kbt.Head(WEIGHT), *stream(3, change=0.01, noise=0.01)).best
    large = tune(kbt.Head(WEIGHT), *stream(3, change=3.0, noise=1e-6)).best
    assert small.settings["prior_var"][0] < 100.0 < 1e4 < large.settings["prior_var"][0]


def test_one_filter_and_hidden_layers_are_chosen_only_for_a_gain_that_is_worth_it() -> None:
    rng = np.random.default_rng(17)
    usual = rng.normal(size=100)

    def scored(gain: float, watchful: bool, deep: bool = False) -> Scored:
        return Scored({"hidden": (6,)} if deep else {}, watchful, list(usual + gain + 0.01 * rng.normal(size=100)))

    watchful, single = scored(0.0, True), scored(0.0, False)
    small, large = scored(0.05, False), scored(0.2, False)
    assert choice(watchful, [watchful, small]) is watchful
    assert choice(watchful, [watchful, small, large]) is large
    assert choice(single, [single, small]) is small
    assert choice(watchful, [watchful, large, scored(0.15, True)]).watchful
    deep = scored(0.05, True, deep=True)
    assert choice(watchful, [watchful, deep]) is watchful
    assert choice(scored(0.0, True, deep=True), [deep]) is deep
    assert choice(watchful, [deep, scored(0.2, True, deep=True)]).deep
    for seed in range(3):
        assert tune(kbt.Head(WEIGHT), *stream(seed)).head.config["drift"] == "auto"


def test_a_gain_within_chance_changes_nothing() -> None:
    for seed in range(10):
        rng = np.random.default_rng([6, seed])
        weight = WEIGHT + rng.normal(size=(1, 3))
        h = rng.normal(size=(40, 3))
        tuned = tune(kbt.Head(WEIGHT), h, h @ weight.T + rng.normal(size=(40, 1)))
        assert tuned.best is tuned.default
        assert any(one.gain > 0.0 for one in tuned.tried)


@pytest.mark.parametrize("noise", [1e-3, 0.1])
def test_after_a_choice_from_few_samples_the_head_goes_on_as_well_as_the_default(noise: float) -> None:
    rng = np.random.default_rng(7)
    weight = rng.normal(size=(1, 64))
    h = rng.normal(size=(570, 64))
    y = h @ (weight + rng.normal(size=(1, 64))).T + noise * rng.normal(size=(570, 1))
    tuned = tune(kbt.Head(weight), h[:70], y[:70])
    assert error_of(tuned.head, h, y, 70) <= 1.1 * error_of(kbt.Head(weight), h, y, 70)


@pytest.mark.slow("learns 1,200 samples of width 512")
def test_from_100_samples_of_512_inputs_nothing_is_chosen() -> None:
    rng = np.random.default_rng(8)
    weight = rng.normal(size=(1, 512))
    h = rng.normal(size=(600, 512))
    y = h @ (weight + rng.normal(size=(1, 512))).T + 0.1 * rng.normal(size=(600, 1))
    with pytest.warns(UserWarning, match="tune: 100 samples are too few to choose settings for 513 inputs"):
        tuned = tune(kbt.Head(weight), h[:100], y[:100])
    assert error_of(tuned.head, h, y, 100) <= 1.1 * error_of(kbt.Head(weight), h, y, 100)


def test_with_fewer_samples_than_inputs_the_present_settings_stay() -> None:
    h, y = stream(9, 3)
    head = kbt.Head(WEIGHT, drift=0.0, noise_var=1e-9)
    with pytest.warns(UserWarning, match="tune: 3 samples are too few to choose settings for 4 inputs"):
        tuned = tune(head, h, y)
    assert tuned.best is tuned.before
    assert tuned.head.to_bytes() == head.to_bytes()
    assert "note: 3 samples are too few" in tuned.report()
    assert tune(head, *stream(9, 4)).note is None


def test_a_constant_noise_is_kept_or_learned_instead_but_never_another_one() -> None:
    for true, assumed in ((1e-4, 1.0), (1.0, 1e-4), (0.01, 0.01)):
        h, y = stream(1, noise=true)
        tuned = tune(kbt.Head(WEIGHT, drift=0.0, noise_var=assumed), h, y)
        constants = [one.settings["noise_var"] for one in tuned.tried if "noise_var" in one.settings]
        assert constants == pytest.approx([assumed] * len(constants))
        if true != assumed:
            assert tuned.head.config["noise"] == "adaptive"
            other = stream(2, 200, noise=true)
            assert score(tuned.head, *other) > score(kbt.Head(WEIGHT, drift=0.0, noise_var=assumed), *other) + 0.5


def test_a_constant_noise_that_is_too_small_for_the_errors_is_not_chosen_with_other_settings() -> None:
    h, y = stream(10, noise=1.0)
    tuned = tune(kbt.Head(WEIGHT, drift=0.0, noise_var=0.1), h, y)
    linear = [one for one in tuned.tried if "hidden" not in one.settings]
    assert [one for one in linear if "noise_var" in one.settings] == [tuned.before]
    honest = tune(kbt.Head(WEIGHT, drift=0.0, noise_var=1.0), h, y)
    assert len([one for one in honest.tried if "noise_var" in one.settings and "hidden" not in one.settings]) > 1


def test_noise_that_is_learned_starts_where_it_is() -> None:
    head = kbt.Head(np.vstack([WEIGHT, WEIGHT]), drift=0.0, noise="adaptive", noise_var=[1.0, 9.0])
    rng = np.random.default_rng(11)
    tuned = tune(head, rng.normal(size=(40, 3)), rng.normal(size=(40, 2)))
    assert tuned.before.settings["noise"] == "adaptive"
    assert tuned.before.settings["noise_var"] == [1.0, 9.0]


def test_it_is_deterministic_and_leaves_its_subject_alone() -> None:
    h, y = stream(4)
    head = kbt.Head(WEIGHT, hidden=(6,))
    before = head.to_bytes()
    first, second = tune(head, h, y), tune(head, h, y)
    assert head.to_bytes() == before
    assert (first.best, first.tried) == (second.best, second.tried)
    assert first.head.to_bytes() == second.head.to_bytes()
    assert first.head.samples == 0


def test_everything_that_is_not_chosen_stays() -> None:
    head = kbt.Head(
        WEIGHT, hidden=(6,), covariance="diagonal", gate=1e9, forgetting=0.99, dtype="float64", relu_order=3
    )
    kept = ("output", "dtype", "covariance", "rule", "forgetting", "gate", "relu_order", "max_rows")
    tuned = tune(head, *nonlinear(5))
    assert tuned.best is not tuned.default
    assert {name: tuned.head.config[name] for name in kept} == {name: head.config[name] for name in kept}
    default = tune(head, *nonlinear(5)).default.settings
    assert default == {"dtype": "float64"}


def test_it_starts_from_the_readout_that_the_head_has_now() -> None:
    h, y = stream(12)
    head = kbt.Head(WEIGHT)
    for one, target in zip(h, y, strict=True):
        head.update(one, target)
    tuned = tune(head, *stream(13))
    np.testing.assert_allclose(tuned.head.layers[0].mean, head.layers[0].mean, rtol=1e-5)
    assert np.abs(tuned.head.layers[0].mean - kbt.Head(WEIGHT).layers[0].mean).max() > 0.1


def test_a_fresh_hidden_head_may_lose_its_hidden_layer_and_one_that_has_learned_keeps_it() -> None:
    h, y = stream(14)
    head = kbt.Head(WEIGHT, hidden=(7,), seed=3, prior_var=(0.1, 10.0))
    assert "hidden" not in tune(head, h, y).best.settings
    head.update(h[0], y[0])
    tuned = tune(head, h, y)
    assert {one.settings["hidden"] for one in tuned.tried} == {(7,)}
    assert tuned.best.log_likelihood >= tuned.before.log_likelihood
    for layer, learned in zip(tuned.head.layers, head.layers, strict=True):
        np.testing.assert_array_equal(layer.mean, learned.mean)


def test_classes_have_a_prior_to_choose() -> None:
    rng = np.random.default_rng(15)
    h = rng.normal(size=(200, 3))
    labels = (h @ rng.normal(size=(3, 4))).argmax(axis=1)
    tuned = tune(kbt.Head(np.zeros((4, 3)), output="softmax"), h, labels)
    assert tuned.best.gain > 0.0
    assert tuned.best.settings["output"] == "softmax"
    assert tuned.best.settings["prior_var"][0] > 1.0  # labels without noise
    assert tuned.default.settings == {"output": "softmax"}


def test_the_report_has_the_choice_its_gain_and_a_table() -> None:
    tuned = tune(kbt.Head(WEIGHT, drift=0.0, noise_var=0.01), *nonlinear(16))
    lines = tuned.report().splitlines()
    assert f"chosen: {tuned.best}" in lines
    assert f"gain over the default head: {tuned.best.gain:+.3f} ± {tuned.best.error:.3f}" in lines[2]
    for name, candidate in (("chosen", tuned.best), ("default", tuned.default), ("before", tuned.before)):
        [line] = [line for line in lines[4:] if line.split()[:1] == [name]]
        assert f"{candidate.log_likelihood:.3f}" in line
        assert line.endswith(str(candidate))


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
    assert tuned.head.config["noise"] == "adaptive"
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
    assert told["best"]["gain"] >= told["default"]["gain"] == 0.0
    assert told["best"] in told["candidates"]
    assert len(told["candidates"]) == told["settings_tried"]
    assert told["note"] is None
    loaded = Model.load(tmp_path / "out", backend="onnxruntime").head
    again = kbt.Head(WEIGHT, **told["best"]["settings"])
    assert loaded.to_bytes() == again.to_bytes()
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "nothing written" in said
    assert "gain over the default head" in said
    np.savez(tmp_path / "samples.npz", x=x[:3], y=y[:3])
    assert cli.main(arguments) == 0
    assert "3 samples are too few" in capsys.readouterr().out


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
