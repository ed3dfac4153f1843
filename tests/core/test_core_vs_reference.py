"""The compiled core equals the NumPy reference, which goes by covariance matrices and explicit RTS gains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from grid import pairwise

import kbt_edge as kbt
from kbt_edge.reference import ReferenceHead

D, UPDATES = 3, 50

GAUSSIAN = [
    dict(output="gaussian", rule=rule, noise=noise, d_o=d_o)
    for rule, noise in [("fuse", "constant"), ("fuse", "adaptive"), ("replace", "constant")]
    for d_o in (1, 2)
]
SOFTMAX = [dict(output="softmax", rule="fuse", noise=noise, d_o=3) for noise in ("constant", "multinomial")]
# 6 and 9 neurons: below and above the vector width, without and with spares.
HIDDEN: dict[int, tuple[int, ...]] = {1: (), 2: (9,), 3: (6, 8)}

GRID = [
    dict(kind, covariance=covariance, layers=layers, rows=rows, order=order)
    for kind, covariance, layers, rows, order in itertools.product(
        GAUSSIAN + SOFTMAX, ("full", "neuron", "diagonal"), (1, 2, 3), (1, 3), (2, 5)
    )
    if layers > 1 or order == 2 or kind["output"] == "softmax"  # a single layer has no ReLU to expand
]


def name(case: dict[str, object]) -> str:
    return "-".join(str(v) for v in case.values())


def heads(case: dict[str, object], extra: dict[str, object]) -> tuple[kbt.Head, kbt.Head, ReferenceHead]:
    """The same head three times: core in float64 and float32, and the reference."""
    rng = np.random.default_rng(1)
    d_o, layers, rows = case["d_o"], case["layers"], case["rows"]
    settings = dict(
        prior_var=(0.3,) if layers == 1 else (0.02,) * (layers - 1) + (0.3,),
        noise_var=0.2,
        output=case["output"],
        covariance=case["covariance"],
        rule=case["rule"],
        noise=case["noise"],
        relu_order=case["order"],
        softmax_order=1 if case["order"] == 2 else 2,
        **extra,
    )
    double = kbt.Head(
        rng.normal(size=(d_o, D)),
        rng.normal(size=d_o),
        hidden=case.get("hidden", HIDDEN[layers]),
        dtype="float64",
        max_rows=rows,
        drift=0.0,
        **settings,
    )
    means = [layer.mean for layer in double.layers]
    single = kbt.Head.from_means(means, dtype="float32", max_rows=rows, drift=0.0, **settings)
    return double, single, ReferenceHead(means, **settings)


def difference(got: object, want: object, least: float = 1e-12) -> float:
    """Largest difference of two arrays, relative to the largest entry of the second."""
    want = np.asarray(want)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), least))


def run(case: dict[str, object], extra: dict[str, object]) -> tuple[float, float]:
    """Largest difference to the reference over means, covariances, predictions and likelihoods: float64, float32."""
    *cores, reference = heads(case, extra)
    rng = np.random.default_rng(7)
    truth = rng.normal(size=(case["d_o"], D))
    worst = [0.0, 0.0]
    for _ in range(UPDATES):
        h = rng.normal(size=(case["rows"], D)).astype(np.float32)
        u = np.tanh(h @ truth.T) + 0.3 * rng.normal(size=(case["rows"], case["d_o"]))
        y = u.argmax(axis=1) if case["output"] == "softmax" else u.astype(np.float32)
        q, want = reference.predict(h), reference.update(h, y)
        for i, head in enumerate(cores):
            p = head.predict(h)
            cov, got = p.cov, head.update(h, y)
            assert got.status == want.status
            worst[i] = max(
                worst[i],
                difference(p.mean, q.mean),
                difference(cov, q.cov),
                difference(p.total_var, q.total_var),
                difference(got.nis, want.nis, 1.0),
                difference(got.log_likelihood, want.log_likelihood, 1.0),
            )
    for i, head in enumerate(cores):
        for layer, other in zip(head.layers, reference.layers, strict=True):
            worst[i] = max(worst[i], difference(layer.mean, other.mean), difference(layer.cov, other.cov))
        worst[i] = max(worst[i], difference(head.noise_var, np.broadcast_to(reference.noise_var, head.noise_var.shape)))
    return worst[0], worst[1]


def test_the_grid_is_as_large_as_promised() -> None:
    assert len(GRID) >= 200


@pytest.mark.parametrize("case", pairwise(GRID), ids=name)
@pytest.mark.long("runs the NumPy reference beside the core, seconds for each configuration")
def test_core_equals_reference_in_both_precisions(case: dict[str, object]) -> None:
    double, single = run(case, {})
    assert double < 1e-9
    assert single < 2e-3


# More outputs than hidden units, which are solved for instead. Units begin as copies, so that they are not independent.
NARROW = [
    dict(output="gaussian", rule="fuse", noise=noise, d_o=d_o, covariance=covariance, layers=len(hidden) + 1, rows=1,
         order=order, hidden=hidden)
    for noise, covariance, (hidden, d_o), order in itertools.product(
        ("constant", "adaptive"), ("neuron", "diagonal"), [((6,), 7), ((7,), 40), ((9,), 16), ((9, 6), 13)], (2, 5)
    )
]  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"input_var": 0.05, "forgetting": 0.95}, {"gate": 30.0}], ids=str)
@pytest.mark.parametrize("case", NARROW, ids=name)
def test_more_outputs_than_hidden_units_equal_the_reference(case: dict[str, object], extra: dict[str, object]) -> None:
    double, single = run(case, extra)
    assert double < 1e-9
    assert single < 2e-3


def test_noise_per_call_equals_the_reference_behind_few_units() -> None:
    rng = np.random.default_rng(5)
    head = kbt.Head(
        rng.normal(size=(9, D)), hidden=(6,), dtype="float64", drift=0.0, noise_var=0.3, prior_var=(0.02, 0.3)
    )
    reference = ReferenceHead(list(head.means), noise_var=0.3, prior_var=(0.02, 0.3))
    for step in range(30):
        h, y = rng.normal(size=D), rng.normal(size=9)
        noise = [None, 0.7, 10.0 ** rng.uniform(-3, 2, size=9)][step % 3]
        got, want = head.update(h, y, noise), reference.update(h, y, noise)
        assert got.nis == pytest.approx(want.nis, rel=1e-9)
        assert got.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-9)
    for layer, other in zip(head.layers, reference.layers, strict=True):
        assert difference(layer.mean, other.mean) < 1e-9
        assert difference(layer.cov, other.cov) < 1e-9
    assert head.counters == (0, 0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_samples_behind_few_units_keep_their_digits_in_float32(seed: int) -> None:
    """Then the outputs' weights have a lower rank than there are units."""
    rng = np.random.default_rng(seed)
    settings = dict(prior_var=(0.02, 0.3), noise_var=0.2, covariance=("neuron", "diagonal")[seed % 2])
    head = kbt.Head(0.3 * rng.normal(size=(13, D)), hidden=(9,), drift=0.0, **settings)
    reference = ReferenceHead([mean.astype(float) for mean in head.means], **settings)
    for _ in range(6):
        h, y = rng.normal(size=D).astype(np.float32), rng.normal(size=13).astype(np.float32)
        got, want = head.update(h, y), reference.update(h, y)
        assert got.nis == pytest.approx(want.nis, rel=1e-4)
        assert got.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-4, abs=1e-3)


EXTRAS = [{"input_var": 0.05}, {"forgetting": 0.9}, {"input_var": 0.02, "forgetting": 0.95, "gate": 6.0}]
WITH_EXTRAS = [dict(c, extra=extra) for extra in EXTRAS for c in GRID if c["order"] == 2 and c["layers"] < 3]


@pytest.mark.parametrize("case", pairwise(WITH_EXTRAS), ids=name)
def test_input_variance_forgetting_and_gate_equal_reference(case: dict[str, object]) -> None:
    assert run(case, case["extra"])[0] < 1e-9


@pytest.mark.parametrize("covariance", ["full", "neuron", "diagonal"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_noise_matrix_and_noise_per_call_equal_reference(covariance: str, layers: int) -> None:
    case = dict(output="gaussian", rule="fuse", noise="constant", d_o=2, covariance=covariance, layers=layers, rows=2,
                order=3)  # fmt: skip
    head, *_ = heads(case, {})
    R = np.array([[0.5, 0.2], [0.2, 0.3]])
    settings = dict(prior_var=(0.3,) if layers == 1 else (0.02, 0.3), covariance=covariance, relu_order=3)
    means = [layer.mean for layer in head.layers]
    head = kbt.Head.from_means(means, noise_var=R, dtype="float64", max_rows=2, drift=0.0, **settings)
    reference = ReferenceHead(means, noise_var=R, **settings)
    rng = np.random.default_rng(3)
    for step in range(30):
        h, y = rng.normal(size=(2, D)), rng.normal(size=(2, 2))
        noise = [None, 0.7, np.array([0.1, 0.9]), 3 * R][step % 4]
        got, want = head.update(h, y, noise), reference.update(h, y, noise)
        assert got.nis == pytest.approx(want.nis, rel=1e-9)
    np.testing.assert_allclose(head.predict(h).total_var, reference.predict(h).total_var, rtol=1e-9)
    for layer, other in zip(head.layers, reference.layers, strict=True):
        np.testing.assert_allclose(layer.cov, other.cov, rtol=0, atol=1e-9 * np.abs(other.cov).max())
        np.testing.assert_allclose(layer.mean, other.mean, rtol=0, atol=1e-9 * np.abs(other.mean).max())


@pytest.mark.parametrize("neurons", [3, 9], ids=["one by one", "interleaved"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)], ids=str)
def test_a_unit_that_is_dead_in_one_row_and_alive_in_another_equals_reference(
    neurons: int, order: tuple[int, ...]
) -> None:
    """Its row of the adjoint is exactly zero, one of the null directions of a joint update."""
    rng = np.random.default_rng(4)
    hidden, last = rng.normal(size=(neurons, 3)), rng.normal(size=(2, neurons + 1))
    hidden[0] = [10.0, 0.0, 0.0]
    settings = dict(prior_var=(0.02, 0.3), noise_var=0.2, covariance="neuron")
    head = kbt.Head.from_means([hidden, last], dtype="float64", max_rows=len(order), drift=0.0, **settings)
    reference = ReferenceHead([hidden, last], **settings)
    for _ in range(5):
        rows = np.array([[-5.0, 0.3], [3.0, 1.0], [1.5, -2.0]])[list(order)] + 0.1 * rng.normal(size=(len(order), 2))
        y = rng.normal(size=(len(order), 2))
        assert difference(head.update(rows, y).nis, reference.update(rows, y).nis) < 1e-9
        for layer, other in zip(head.layers, reference.layers, strict=True):
            assert difference(layer.mean, other.mean) < 1e-9
            assert difference(layer.cov, other.cov) < 1e-9
