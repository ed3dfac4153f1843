"""One factor for all outputs is what a factor for each output is, wherever all of them see the same inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt

Array = npt.NDArray[Any]


def random_case(seed: int) -> tuple[dict[str, Any], Array, list[tuple[Array, Array]]]:
    """Settings, a readout, and a stream of one to four rows at a time."""
    rng = np.random.default_rng(seed)
    d, outputs, rows = int(rng.integers(1, 20)), int(rng.integers(2, 30)), int(rng.integers(1, 5))
    settings: dict[str, Any] = {
        "noise": str(rng.choice(["constant", "adaptive"])),
        "noise_var": float(10.0 ** rng.uniform(-3, 0)),
        "prior_var": float(10.0 ** rng.uniform(-1, 1)),
        "max_rows": rows,
        "drift": 0.0,
        "dtype": "float64",
    }
    if rng.random() < 0.2:
        settings["forgetting"] = float(rng.uniform(0.9, 1.0))
    if rng.random() < 0.2:
        settings["gate"] = 3.0 * rows * outputs
    weight = rng.normal(size=(outputs, d))
    plant = weight + 0.1 * rng.normal(size=weight.shape)
    stream = []
    for _ in range(int(rng.integers(5, 60))):
        h = 10.0 ** rng.uniform(-1, 1) * rng.normal(size=(rows, d))
        stream.append((h, h @ plant.T + rng.normal(size=(rows, outputs)) * np.sqrt(settings["noise_var"])))
    return settings, weight, stream


def regression(settings: dict[str, Any], weight: Array, stream: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Means, and the covariance of one output in units of its noise, from the sums of the samples."""
    prior = settings["prior_var"] / (1.0 if settings["noise"] == "adaptive" else settings["noise_var"])
    Z = np.vstack([np.column_stack([h, np.ones(len(h))]) for h, _ in stream])
    Y = np.vstack([y for _, y in stream])
    first = np.column_stack([weight, np.zeros(len(weight))])
    precision = Z.T @ Z + np.eye(Z.shape[1]) / prior
    return np.linalg.solve(precision, Z.T @ Y + first.T / prior).T, np.linalg.inv(precision)


def close(got: Array, want: Array, tolerance: float = 1e-8) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("seed", range(200))
def test_shared_is_neuron_and_batch_regression(seed: int) -> None:
    settings, weight, stream = random_case(seed)
    shared = kbt.Head(weight, **settings)
    neuron = kbt.Head(weight, covariance="neuron", **settings)
    assert shared.config["covariance"] == "shared"
    plain = "forgetting" not in settings
    for h, y in stream:
        a, b = shared.predict(h), neuron.predict(h)
        close(a.mean, b.mean)
        close(a.total_var, b.total_var)
        close(a.cov, b.cov)
        one, other = shared.observe(y), neuron.observe(y)
        assert one.status == other.status
        assert one.nis == pytest.approx(other.nis, rel=1e-7)
        assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-7)
        plain = plain and one.status == "ok" and not (settings["noise"] == "adaptive" and one.nis > 16 * y.size)
    close(shared.noise_var, neuron.noise_var)
    close(shared.layers[0].mean, neuron.layers[0].mean)
    close(shared.layers[0].cov, neuron.layers[0].cov)
    if plain:  # nothing forgotten, gated or taken for an outlier
        mean, P = regression(settings, weight, stream)
        close(shared.means[0], mean)
        close(shared.layers[0].cov, shared.noise_var[:, None, None] * P)


def test_most_random_cases_are_plain_regression() -> None:
    """Otherwise the test above would compare with it too rarely."""
    plain = sum("forgetting" not in random_case(seed)[0] for seed in range(200))
    assert plain > 140


@pytest.mark.parametrize("outputs", [2, 7, 8, 9, 17])
@pytest.mark.parametrize("settings", [{"noise": "constant"}, {"noise": "adaptive"}, {"output": "softmax"}])
def test_nothing_is_floored_where_outputs_do_not_fill_the_lanes(settings: dict[str, Any], outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    for covariance in ("neuron", "shared"):
        head = kbt.Head(np.zeros((outputs, 4)), covariance=covariance, drift=0.0, **settings)
        for _ in range(20):
            target = int(rng.integers(outputs)) if "output" in settings else rng.normal(size=outputs)
            head.update(rng.normal(size=4), target)
        assert head.counters.floored == 0


def test_a_random_walk_is_the_same_too() -> None:
    settings, weight, stream = random_case(3)
    settings.pop("forgetting", None)
    settings.update(drift=0.01, noise="constant")
    shared, neuron = (kbt.Head(weight, covariance=each, **settings) for each in ("shared", "neuron"))
    for h, y in stream:
        assert shared.update(h, y).nis == pytest.approx(neuron.update(h, y).nis, rel=1e-7)
    close(shared.layers[0].mean, neuron.layers[0].mean)
    close(shared.layers[0].cov, neuron.layers[0].cov)


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": (8,)},
        {"rule": "replace", "drift": 0.0},
        {"input_var": 0.1, "drift": 0.0},
        {"noise_var": np.eye(2)},
        {"output": "softmax", "softmax_order": 1},
        {"output": "softmax", "noise_var": 0.1},
    ],
)
def test_shared_says_where_it_is_not_possible(settings: dict[str, Any]) -> None:
    weight = np.eye(2, 4)
    with pytest.raises(kbt.RangeError, match=r"covariance: expected one linear layer.*'neuron' suits all heads"):
        kbt.Head(weight, covariance="shared", **settings)
    assert kbt.Head(weight, **settings).config["covariance"] == "neuron"


def test_two_classes_that_share_a_factor_are_as_those_that_do_not() -> None:
    """By symmetry both have the same variance, so nothing is lost."""
    rng = np.random.default_rng(0)
    shared, neuron = (
        kbt.Head(np.zeros((2, 5)), output="softmax", covariance=each, drift=0.0, dtype="float64")
        for each in ("shared", "neuron")
    )
    for _ in range(200):
        h = rng.normal(size=5)
        label = int(h[0] + 0.5 * rng.normal() > 0)
        close(shared.predict(h).mean, neuron.predict(h).mean)
        assert shared.observe(label).nis == pytest.approx(neuron.observe(label).nis, rel=1e-6)


@pytest.mark.parametrize("drift", [0.0, "auto"])
def test_many_classes_that_share_a_factor_learn_nearly_as_well(drift: Any) -> None:
    """A hard case: 50 samples for each of 30 classes, from zero. docs/method.md §10 has real streams."""
    rng = np.random.default_rng(1)
    true = 2.0 * rng.normal(size=(30, 10))
    losses = []
    stream = [rng.normal(size=10) for _ in range(1500)]
    labels = [int((true @ h + rng.gumbel(size=30)).argmax()) for h in stream]
    for covariance in ("neuron", "shared"):
        head = kbt.Head(np.zeros((30, 10)), output="softmax", covariance=covariance, drift=drift)  # type: ignore[arg-type]
        losses.append(-np.mean([head.update(h, y).log_likelihood for h, y in zip(stream, labels, strict=True)]))
    assert losses[1] < losses[0] + 0.06
    assert losses[0] < np.log(30) - 0.5
