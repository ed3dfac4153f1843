"""Where an exact answer is known, the head gives it: batch regression, the original readout, the laws of its verbs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt

Array = npt.NDArray[Any]

# ---- one layer is Bayesian linear regression -----------------------------------------------------------------------


@dataclass
class Sample:
    h: Array
    y: Array
    R: Array  # as given to the head: scalar, (d_o,) or (d_o, d_o)


def random_stream(seed: int, noise: str) -> tuple[Array, Array, float, list[Sample]]:
    """A readout, its prior variance, and samples of random size, scale and noise."""
    rng = np.random.default_rng(seed)
    d, d_o, samples = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 120))
    stream = []
    for _ in range(samples):
        rows = int(rng.integers(1, 4))
        scale = 10.0 ** rng.uniform(-2, 1)
        if noise == "scalar":
            R = np.array(10.0 ** rng.uniform(-2, 1))
        elif noise == "per output":
            R = 10.0 ** rng.uniform(-2, 1, d_o)
        else:
            root = rng.normal(size=(d_o, d_o))
            R = root @ root.T + 0.05 * np.eye(d_o)
            R = (R + R.T) / 2
        stream.append(Sample(scale * rng.normal(size=(rows, d)), 3 * rng.normal(size=(rows, d_o)), R))
    return rng.normal(size=(d_o, d)), rng.normal(size=d_o), 10.0 ** rng.uniform(-1, 1), stream


def joint_regression(weight: Array, bias: Array, prior_var: float, stream: list[Sample]) -> tuple[Array, Array]:
    """Mean and covariance of all weights, output by output, from the sum of the samples' information matrices."""
    d_o, m = weight.shape[0], weight.shape[1] + 1
    information = np.eye(d_o * m) / prior_var
    vector = np.column_stack([weight, bias]).ravel() / prior_var
    for sample in stream:
        R = sample.R if sample.R.ndim == 2 else sample.R * np.eye(d_o)
        precision = np.linalg.inv(R)
        for h, y in zip(sample.h, sample.y, strict=True):
            X = np.kron(np.eye(d_o), np.append(h, 1.0))  # y = X w + noise
            information += X.T @ precision @ X
            vector += X.T @ precision @ y
    covariance = np.linalg.inv(information)
    return np.linalg.solve(information, vector).reshape(d_o, m), covariance


def blocks(covariance: Array, d_o: int) -> Array:
    """The block of each output."""
    m = covariance.shape[0] // d_o
    return np.stack([covariance[i * m : (i + 1) * m, i * m : (i + 1) * m] for i in range(d_o)])


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    ("covariance", "noise"),
    [
        ("shared", "scalar"),
        ("neuron", "scalar"),
        ("neuron", "per output"),
        ("full", "scalar"),
        ("full", "per output"),
        ("full", "matrix"),
    ],
)
def test_a_single_layer_is_batch_regression_after_any_stream(covariance: str, noise: str, seed: int) -> None:
    weight, bias, prior_var, stream = random_stream(seed, noise)
    head = kbt.Head(weight, bias, prior_var=prior_var, drift=0.0, noise="matrix" if noise == "matrix" else "constant",
                    noise_var=1, covariance=covariance, max_rows=3, dtype="float64")  # fmt: skip
    for sample in stream:
        head.update(sample.h, sample.y, sample.R)

    mean, cov = joint_regression(weight, bias, prior_var, stream)
    if covariance != "full":
        cov = blocks(cov, head.d_o)
    (layer,) = head.layers
    np.testing.assert_allclose(layer.mean, mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(layer.cov, cov, rtol=0, atol=1e-8 * np.abs(cov).max())


@pytest.mark.parametrize("covariance", ["neuron", "full"])
def test_regression_needs_no_noise_per_call(covariance: str) -> None:
    weight, bias, prior_var, stream = random_stream(3, "matrix" if covariance == "full" else "per output")
    R = stream[0].R
    stream = [Sample(s.h, s.y, R) for s in stream]
    head = kbt.Head(weight, bias, prior_var=prior_var, drift=0.0, noise_var=R, covariance=covariance, max_rows=3,
                    dtype="float64")  # fmt: skip
    for sample in stream:
        head.update(sample.h, sample.y)
    mean, _ = joint_regression(weight, bias, prior_var, stream)
    np.testing.assert_allclose(head.layers[0].mean, mean, rtol=1e-8, atol=1e-8)


def test_the_prediction_of_a_single_layer_is_the_posterior_predictive() -> None:
    weight, bias, prior_var, stream = random_stream(5, "matrix")
    head = kbt.Head(weight, bias, prior_var=prior_var, drift=0.0, noise="matrix", noise_var=1, covariance="full",
                    max_rows=3, dtype="float64")  # fmt: skip
    for sample in stream:
        head.update(sample.h, sample.y, sample.R)
    mean, cov = joint_regression(weight, bias, prior_var, stream)

    h = np.random.default_rng(0).normal(size=(3, head.d))
    X = np.concatenate([np.kron(np.eye(head.d_o), np.append(row, 1.0)) for row in h])  # (row, output) like p.cov
    p = head.predict(h)
    np.testing.assert_allclose(p.mean.ravel(), X @ mean.ravel(), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(p.cov, X @ cov @ X.T, rtol=0, atol=1e-8 * np.abs(X @ cov @ X.T).max())
    np.testing.assert_allclose(p.total_var, p.var + head.noise_var)


@pytest.mark.parametrize("covariance", ["neuron", "full"])
@pytest.mark.parametrize("d_o", [1, 2, 9])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dtype", "noise_var", "tolerance"), [
    ("float64", 1e-4, 1e-8), ("float64", 1e-6, 1e-8), ("float64", 1e-9, 1e-8),
    ("float32", 1e-2, 1e-3), ("float32", 1e-4, 1e-3), ("float32", 1e-6, 2e-3),
])  # fmt: skip
def test_regression_stays_exact_when_the_noise_is_small(
    dtype: str, noise_var: float, tolerance: float, rows: int, d_o: int, covariance: str
) -> None:
    rng = np.random.default_rng(0)
    weight, truth = rng.normal(size=(2, d_o, 3)).astype(np.float32)
    head = kbt.Head(weight, prior_var=1, drift=0.0, noise_var=noise_var, covariance=covariance, max_rows=rows,
                    dtype=dtype)  # fmt: skip
    stream = []
    for _ in range(20):
        h = rng.normal(size=(rows, 3)).astype(np.float32)
        y = (h @ truth.T + np.sqrt(noise_var) * rng.normal(size=(rows, d_o))).astype(np.float32)
        head.update(h, y)
        stream.append(Sample(h.astype(np.float64), y.astype(np.float64), np.array(noise_var)))
    mean, cov = joint_regression(weight, np.zeros(d_o), 1.0, stream)
    if covariance == "neuron":
        cov = blocks(cov, d_o)
    (layer,) = head.layers
    np.testing.assert_allclose(layer.mean, mean, rtol=0, atol=tolerance * np.abs(mean).max())
    np.testing.assert_allclose(layer.cov, cov, rtol=0, atol=tolerance * np.abs(cov).max())


# ---- the prior is the readout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["neuron", "full", "diagonal"])
@pytest.mark.parametrize("prior_var", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_before_any_data_the_head_is_the_readout(layers: int, spare: int, prior_var: float, covariance: str) -> None:
    d, d_o = 5, 3
    for seed in range(5):
        rng = np.random.default_rng(seed)
        weight, bias = rng.normal(size=(d_o, d)).astype(np.float32), rng.normal(size=d_o).astype(np.float32)
        hidden = (2 * d + spare,) * (layers - 1)
        head = kbt.Head(weight, bias, hidden=hidden, prior_var=prior_var, covariance=covariance, seed=seed)
        for scale in (0.0, 1e-3, 1.0, 1e3):
            h = (scale * rng.normal(size=d)).astype(np.float32)
            want = weight.astype(np.float64) @ h + bias
            size = np.abs(weight).astype(np.float64) @ np.abs(h) + np.abs(bias)  # what rounding is relative to
            assert (np.abs(head.predict(h).mean - want) <= 1e-6 * size).all()


def test_spare_neurons_depend_on_the_seed_and_nothing_else() -> None:
    one, same, other = (kbt.Head(np.ones((1, 2)), hidden=(7,), seed=seed).layers[0].mean for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(one[:4], other[:4])  # the copies of +h and -h
    assert (one[4:] != other[4:]).all()


# ---- the verbs -----------------------------------------------------------------------------------------------------

KINDS = [
    {"output": "gaussian", "rule": "fuse", "noise": "constant"},
    {"output": "gaussian", "rule": "fuse", "noise": "adaptive"},
    {"output": "gaussian", "rule": "replace", "noise": "constant"},
    {"output": "softmax", "rule": "fuse", "noise": "constant"},
    {"output": "softmax", "rule": "fuse", "noise": "multinomial"},
]
HEADS = [
    dict(kind, covariance=covariance, hidden=hidden, dtype=dtype)
    for kind, covariance, hidden, dtype in itertools.product(
        KINDS, ("full", "neuron", "diagonal"), ((), (9,)), ("float32", "float64")
    )
]


def make(settings: dict[str, object], **more: object) -> kbt.Head:
    rng = np.random.default_rng(11)
    prior_var = 0.2 if settings["hidden"] == () else (1e-2, 0.2)
    return kbt.Head(rng.normal(size=(3, 4)), rng.normal(size=3), prior_var=prior_var, drift=0.0, noise_var=0.1,
                    max_rows=2, **settings, **more)  # type: ignore[arg-type]  # fmt: skip


def sample(settings: dict[str, object], rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    h = rng.normal(size=(rows, 4))
    y = rng.integers(0, 3, rows) if settings["output"] == "softmax" else rng.normal(size=(rows, 3))
    return h, y


def name(settings: dict[str, object]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", HEADS, ids=name)
def test_predict_and_observe_are_one_update_bit_for_bit(settings: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    split, whole = make(settings), make(settings)
    for step in range(12):
        h, y = sample(settings, rng, 1 + step % 2)
        split.predict(sample(settings, rng, 2)[0])  # a prediction that is never observed leaves no trace
        split.predict(h)
        assert split.observe(y) == whole.update(h, y)
        assert split.to_bytes() == whole.to_bytes()


@pytest.mark.parametrize("settings", HEADS, ids=name)
def test_predict_never_changes_the_state_and_repeats_itself(settings: dict[str, object]) -> None:
    rng = np.random.default_rng(1)
    head = make(settings)
    for step in range(4):
        h, y = sample(settings, rng, 1 + step % 2)
        head.update(h, y)
        before = head.to_bytes()
        first, _, again = head.predict(h), head.predict(-3 * h), head.predict(h)
        assert head.to_bytes() == before
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_a_variance_that_has_cancelled_to_rounding_is_not_negative(scale: float) -> None:
    """Samples tell how two classes differ and nothing of what they share: J S J^T is a difference of large numbers."""
    rng = np.random.default_rng(0)
    head = kbt.Head(rng.normal(size=(2, 2)), output="softmax", noise="constant", drift=0.0, noise_var=1e-2,
                    prior_var=1e3, covariance="full", softmax_order=1)  # fmt: skip
    truth = rng.normal(size=(2, 2))
    for _ in range(2000):
        h = rng.normal(size=2)
        head.update(h, int(np.argmax(truth @ h + rng.gumbel(size=2))))
    lost = 0
    for _ in range(200):
        p = head.predict(scale * rng.normal(size=2))
        lost += (p.var == 0).any()
        assert (p.var >= 0).all()
        assert (p.total_var > 0).all()
        assert not p.cov[p.var == 0].any()
    assert lost > 0  # it does come up


@pytest.mark.parametrize("covariance", ["full", "neuron", "diagonal"])
@pytest.mark.parametrize("hidden", [(), (8,)])
@pytest.mark.parametrize("data_var", [10.0, 20.0, 50.0])
@pytest.mark.long("thousands of updates for each configuration")
def test_under_replace_the_predictive_variance_becomes_that_of_the_data(
    data_var: float, hidden: tuple[int, ...], covariance: str
) -> None:
    rng = np.random.default_rng(0)
    weight, truth = rng.normal(size=(1, 4)), rng.normal(size=4)
    head = kbt.Head(weight, hidden=hidden, prior_var=(1e-5, 1.0)[1 - len(hidden) :], drift=0.0, noise_var=data_var,
                    rule="replace", covariance=covariance)  # fmt: skip
    assert head.predict(np.ones(4)).total_var[0] < 0.6 * data_var  # far from it at first
    for _ in range(3000):
        h = rng.normal(size=4)
        head.update(h, [truth @ h + np.sqrt(data_var) * rng.normal()])
    unseen = [head.predict(rng.normal(size=4)).total_var[0] for _ in range(200)]
    assert np.mean(unseen) == pytest.approx(data_var, rel=0.05)


@pytest.mark.parametrize("hidden", [(), (12,)])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.long("thousands of updates for each configuration")
def test_forgetting_tracks_a_drifting_target(seed: int, hidden: tuple[int, ...]) -> None:
    error = {}
    for forgetting in (1.0, 0.97):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=4)
        head = kbt.Head([truth], hidden=hidden, prior_var=(1e-4, 1.0)[1 - len(hidden) :], drift=0.0, noise_var=0.01,
                        forgetting=forgetting)  # fmt: skip
        squares = []
        for step in range(1500):
            truth += 0.01 * rng.normal(size=4)
            h = rng.normal(size=4)
            if step >= 500:
                squares.append((head.predict(h).mean[0] - truth @ h) ** 2)
            head.update(h, [truth @ h + 0.1 * rng.normal()])
        error[forgetting] = np.sqrt(np.mean(squares))
    assert error[0.97] < 0.7 * error[1.0]


@pytest.mark.parametrize("settings", [s for s in HEADS if s["dtype"] == "float32"], ids=name)
def test_the_gate_rejects_above_its_value_and_leaves_the_bytes_alone(settings: dict[str, object]) -> None:
    rng = np.random.default_rng(2)
    h, y = sample(settings, rng, 2)
    free = make(settings)
    nis = free.update(h, y).nis

    below, above = make(settings, gate=0.999 * nis), make(settings, gate=1.001 * nis)
    before = below.to_bytes()
    rejected, accepted = below.update(h, y), above.update(h, y)
    assert (rejected.status, rejected.nis) == ("gated", nis)
    assert (accepted.status, accepted.nis) == ("ok", nis)
    assert below.to_bytes() == before
    assert (below.counters.gated, below.samples) == (1, 0)
    assert (above.counters.gated, above.samples) == (0, 1)
    for layer, other in zip(above.layers, free.layers, strict=True):
        np.testing.assert_array_equal(layer.mean, other.mean)
        np.testing.assert_array_equal(layer.cov, other.cov)


def test_a_gated_prediction_is_spent() -> None:
    head = kbt.Head(np.ones((1, 2)), gate=4.0)
    head.predict([0.0, 0.0])
    assert head.observe([1e3]).status == "gated"
    with pytest.raises(kbt.RangeError, match="observe"):
        head.observe([0.0])


@pytest.mark.parametrize("apart", [2.0**-10, 2.0**-24, 2.0**-40, 0.0])
@pytest.mark.parametrize("covariance", ["full", "neuron"])
def test_rows_that_differ_by_a_hair_are_regressed_exactly(covariance: str, apart: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    head = kbt.Head(
        [[0.5, -1.0, 2.0]], prior_var=0.3, noise_var=0.2, drift=0.0, covariance=covariance, dtype="float64", max_rows=2
    )
    rows = [[apart, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    head.update([row[:3] for row in rows], [[0.0], [1.0]])
    with mpmath.workdps(60):
        A, prior = mpmath.matrix(rows), mpmath.eye(4) * mpmath.mpf(0.3)
        gain = prior * A.T * mpmath.inverse(A * prior * A.T + mpmath.eye(2) * mpmath.mpf(0.2))
        mean = mpmath.matrix([0.5, -1.0, 2.0, 0.0])
        mean += gain * (mpmath.matrix([0.0, 1.0]) - A * mean)
        cov = prior - gain * A * prior
        want = np.array(mean.tolist(), float).ravel(), np.array(cov.tolist(), float)
    np.testing.assert_allclose(head.layers[0].mean.ravel(), want[0], rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(head.layers[0].cov.reshape(4, 4), want[1], rtol=1e-12, atol=1e-16)
