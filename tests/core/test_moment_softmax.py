"""The moment softmax of method.md §11: right in the mean, safe with any prior, and the same in core and reference."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt
from kbt_edge.reference import MOST_EXPLAINED, ReferenceHead, moment_softmax

Array = npt.NDArray[np.float64]
STRUCTURES = ("full", "neuron", "diagonal")


def difference(got: object, want: object) -> float:
    """Largest difference of two arrays, relative to the largest entry of the second, or to 1 where that is less."""
    want = np.asarray(want)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1e-12))


def softmax(u: Array) -> Array:
    exp = np.exp(u - u.max(axis=-1, keepdims=True))
    return np.asarray(exp / exp.sum(axis=-1, keepdims=True))


def random_covariance(rng: np.random.Generator, n: int, scale: float) -> Array:
    F = rng.normal(size=(n, n + 1)) * np.sqrt(scale / (n + 1))
    return np.asarray(F @ F.T)


# ---- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.host_only("proves the mathematics of the NumPy reference, which is the same on every machine")
def test_the_moment_softmax_is_near_the_mean_of_the_softmax() -> None:
    """For independent logits of one variance, where (11.1) is meant to hold. Taylor's first order is far off."""
    rng = np.random.default_rng(0)
    moment, taylor = [], []
    for classes, var in itertools.product((2, 3, 5, 10), (0.5, 2.0, 8.0)):
        for _ in range(10):
            mu = 2 * rng.normal(size=classes)
            exact = softmax(mu + np.sqrt(var) * rng.standard_normal((20_000, classes))).mean(axis=0)
            moments = moment_softmax(mu[None], var * np.eye(classes))
            moment.append(np.abs(moments.mean[0] - exact).max())
            taylor.append(np.abs(softmax(mu) - exact).max())
    print(f"largest error of a probability, mean: {np.mean(moment):.3f}, first order {np.mean(taylor):.3f}")
    assert np.mean(moment) < 0.04
    assert np.max(moment) < 0.15
    assert np.mean(moment) < 0.3 * np.mean(taylor)


def test_the_update_is_the_pseudo_inverse_of_s_j_in_closed_form() -> None:
    """r = κ e / s and Λ = -κ J κ / s, method.md (11.3), by explicit matrices."""
    rng = np.random.default_rng(1)
    mu, Sigma, y = rng.normal(size=4), random_covariance(rng, 4, 5.0), np.eye(4)[2]
    m = moment_softmax(mu[None], Sigma)
    kappa = 1 / np.sqrt(1 + np.pi / 8 * np.diag(Sigma))
    J = np.diag(m.q[0]) - np.outer(m.q[0], m.q[0])
    inverse = np.linalg.pinv(m.s[0] * J, rcond=1e-12, hermitian=True)
    np.testing.assert_allclose(m.H.T @ inverse @ (y - m.mean[0]), kappa * (y - m.mean[0]) / m.s, atol=1e-12)
    np.testing.assert_allclose(m.H.T @ inverse @ m.H, kappa[:, None] * J * kappa / m.s, atol=1e-12)
    e = y - m.mean[0]
    assert e @ inverse @ e == pytest.approx((e**2 / m.q[0]).sum() / m.s[0])


def test_no_logits_explain_more_than_their_share_of_the_innovation() -> None:
    """method.md (11.4) for logits that are independent, correlated, and all but one and the same."""
    rng = np.random.default_rng(2)
    tight = 0.0
    for n, scale in itertools.product((2, 3, 8, 20), (0.1, 1.0, 10.0, 1e6)):
        common = rng.normal(size=n)
        for Sigma in (
            np.diag(rng.gamma(1.0, scale, size=n)),
            random_covariance(rng, n, scale),
            scale * np.outer(common, common),
        ):
            m = moment_softmax(rng.normal(size=(1, n)) * rng.choice([0.1, 3.0]), Sigma)
            root = np.diag(np.sqrt(m.q[0])) - np.outer(m.q[0], np.sqrt(m.q[0]))  # J = root rootᵀ
            kappa = 1 / np.sqrt(1 + np.pi / 8 * np.diag(Sigma))
            W = root.T @ (kappa[:, None] * Sigma * kappa) @ root / m.s
            share = float(np.linalg.eigvalsh(W)[-1])
            assert share <= MOST_EXPLAINED + 1e-9
            tight = max(tight, share)
            assert 1 <= m.s[0] < 2.9
    assert tight > 0.8  # the bound is of use


# ---- core and reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [(), (9,)], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("noise", ["multinomial", "constant"])
def test_core_equals_reference(noise: str, structure: str, hidden: tuple[int, ...], rows: int) -> None:
    for classes, prior, input_var in ((3, 0.3, 0.0), (9, 10.0, 0.05)):
        rng = np.random.default_rng(3)
        settings: dict[str, Any] = dict(
            prior_var=(0.02, prior) if hidden else prior,
            noise_var=0.2,
            output="softmax",
            noise=noise,
            covariance=structure,
            input_var=input_var,
            drift=0.0,
        )
        weight, bias = rng.normal(size=(classes, 3)), rng.normal(size=classes)
        double = kbt.Head(weight, bias, hidden=hidden, dtype="float64", max_rows=rows, **settings)
        means = [layer.mean for layer in double.layers]
        single = kbt.Head.from_means(means, dtype="float32", max_rows=rows, **settings)
        reference = ReferenceHead(means, **settings)
        assert double.config["softmax_order"] == reference.softmax_order == 0
        worst = {"float64": 0.0, "float32": 0.0}
        for _ in range(30):
            h, y = rng.normal(size=(rows, 3)).astype(np.float32), rng.integers(0, classes, rows)
            q, want = reference.predict(h), reference.update(h, y)
            for head in (double, single):
                p = head.predict(h)
                cov, got = p.cov, head.update(h, y)
                worst[head.config["dtype"]] = max(
                    worst[head.config["dtype"]],
                    difference(p.mean, q.mean),
                    difference(cov, q.cov),
                    difference(p.total_var, q.total_var),
                    difference(got.nis, want.nis),
                    difference(got.log_likelihood, want.log_likelihood),
                )
        for head in (double, single):
            for layer, other in zip(head.layers, reference.layers, strict=True):
                error = max(difference(layer.mean, other.mean), difference(layer.cov, other.cov))
                worst[head.config["dtype"]] = max(worst[head.config["dtype"]], error)
        assert worst["float64"] < 1e-9
        assert worst["float32"] < 2e-3
        assert single.counters.floored == 0


# ---- streams ---------------------------------------------------------------------------------------------------------


def labels(rng: np.random.Generator, samples: int, d: int, classes: int, sharpness: float) -> tuple[Array, Any]:
    """Draws from a softmax of a linear map, |h|² ≈ d."""
    h = rng.normal(size=(samples, d))
    u = sharpness / np.sqrt(d) * h @ rng.normal(size=(d, classes))
    return h, (u + rng.gumbel(size=u.shape)).argmax(axis=1)


def surprise(head: kbt.Head, h: Array, y: Any) -> float:
    return -float(np.mean([head.update(x, int(label)).log_likelihood for x, label in zip(h, y, strict=True)]))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("d", "classes"), [(16, 2), (16, 5), (40, 3)], ids=str)
def test_a_wide_prior_does_not_diverge_and_beats_first_order(structure: str, d: int, classes: int) -> None:
    h, y = labels(np.random.default_rng(4), 300, d, classes, 6.0)

    def run(order: int) -> float:
        head = kbt.Head(np.zeros((classes, d)), output="softmax", prior_var=10.0, covariance=structure,
                        softmax_order=order, drift=0.0)  # fmt: skip
        return surprise(head, h, y)

    moment, first = run(0), run(1)
    print(f"nats a label: moment {moment:.3f}, first order {first:.3f}, guessing {np.log(classes):.3f}")
    assert moment < np.log(classes)
    assert moment < first


def test_first_order_is_approached_as_the_prior_becomes_narrow() -> None:
    h, y = labels(np.random.default_rng(5), 50, 4, 3, 3.0)
    heads = [kbt.Head(np.ones((3, 4)), output="softmax", prior_var=1e-6, softmax_order=order, dtype="float64",
                      drift=0.0)
             for order in (0, 1)]  # fmt: skip
    for x, label in zip(h, y, strict=True):
        for head in heads:
            head.update(x, int(label))
    moment, first = (head.predict(h[0]) for head in heads)
    np.testing.assert_allclose(moment.mean, first.mean, rtol=1e-4)
    np.testing.assert_allclose(heads[0].layers[0].cov, heads[1].layers[0].cov, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("prior", [1e-30, 1.0, 1e12])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_probabilities_sum_to_one_and_variances_stay_below_those_of_a_label(
    structure: str, prior: float, dtype: str
) -> None:
    rng = np.random.default_rng(6)
    head = kbt.Head(30 * rng.normal(size=(5, 3)), output="softmax", prior_var=prior, covariance=structure, dtype=dtype,
                    max_rows=2, drift=0.0)  # fmt: skip
    for size in (1.0, 1e-3, 1e3) * 10:
        h = size * rng.normal(size=(2, 3))
        p = head.predict(h)
        np.testing.assert_allclose(p.mean.sum(axis=1), 1.0, rtol=1e-6)
        assert (p.mean >= 0).all()
        assert (p.var >= 0).all()
        assert (p.var <= p.total_var * (1 + 1e-5)).all()
        assert (p.total_var <= 0.25 + 1e-6).all()
        assert np.isfinite(p.cov).all()
        update = head.update(h, rng.integers(0, 5, 2))
        assert update.nis >= 0
        assert np.isfinite(update.log_likelihood)
    assert all(np.isfinite(layer.mean).all() for layer in head.layers)
    assert all((np.linalg.eigvalsh(np.atleast_2d(c)) > -1e-6 * prior).all() for c in blocks(head))


def blocks(head: kbt.Head) -> list[Array]:
    cov = np.asarray(head.layers[0].cov, np.float64)
    if head.config["covariance"] == "diagonal":
        return [np.diag(cov.ravel())]
    return list(cov) if cov.ndim == 3 else [cov]


def test_the_variance_of_a_probability_is_near_that_of_monte_carlo() -> None:
    """method.md (11.5): with wide logits it saturates, where J Σ Jᵀ grows without bound."""
    rng = np.random.default_rng(7)
    for var in (0.1, 1.0, 10.0, 100.0):
        head = kbt.Head(np.zeros((3, 1)), [0.5, 0.0, -0.5], output="softmax", prior_var=var, dtype="float64", drift=0.0)
        u = np.array([0.5, 0.0, -0.5]) + np.sqrt(var) * rng.standard_normal((50_000, 3))  # h = 0: the bias alone
        np.testing.assert_allclose(head.predict([0.0]).var, softmax(u).var(axis=0), rtol=0.6)


@pytest.mark.parametrize("noise", ["multinomial", "constant"])
@pytest.mark.parametrize("order", [0, 1])
def test_the_covariance_of_a_nearly_certain_prediction_keeps_its_digits(noise: str, order: int) -> None:
    """Variances down to 1e-14, in single precision as in double."""
    h = np.array([[4.0, 0.1, -0.2, 0.3], [0.2, 3.0, 0.1, 0.0]])
    settings: dict[str, Any] = dict(
        hidden=(8,), output="softmax", drift=0.0, max_rows=2, prior_var=1e-3, noise=noise, softmax_order=order
    )
    for x in (h[:1], h):
        single, double = (
            kbt.Head(4 * np.eye(3, 4), dtype=dtype, **settings).predict(x)  # type: ignore[arg-type]
            for dtype in ("float32", "float64")
        )
        assert double.var.min() < 1e-12
        np.testing.assert_allclose(single.var, double.var, rtol=1e-5)
        np.testing.assert_allclose(single.cov, double.cov, rtol=1e-5)


def test_the_default_prior_narrows_with_the_width_of_h() -> None:
    for d, expected in ((4, 1.0), (16, 1.0), (64, 0.25)):
        assert kbt.Head(np.zeros((2, d)), output="softmax", drift=0.0).config["prior_var"] == pytest.approx((expected,))
    # Of a gaussian with a given noise it is plain, and a ratio where the noise is learned: method.md §8.
    assert kbt.Head(np.zeros((2, 64)), drift=0.0, noise_var=0.01).config["prior_var"] == (10.0,)
    assert kbt.Head(np.zeros((2, 64)), drift=0.0).config["prior_var"] == pytest.approx((2e4 / 65,))


def test_one_row_needs_no_work_that_grows_with_the_cube_of_the_classes() -> None:
    """300 classes and 4 inputs: a factorisation of 300 x 300 would take 9 million multiplications for each label."""
    seconds = {}
    for order in (0, 1):
        head = kbt.Head(np.zeros((300, 4)), output="softmax", softmax_order=order, drift=0.0)
        head.update(np.ones(4), 0)
        started = time.perf_counter()
        for label in range(5):
            head.update(np.ones(4), label)
        seconds[order] = time.perf_counter() - started
    print(f"first order takes {seconds[1] / seconds[0]:.0f} times as long")
    assert seconds[0] < 0.5 * seconds[1]
