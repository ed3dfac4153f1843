"""Facts of docs/method.md that the NumPy reference must show on its own, before anything is compared with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from grid import one_fast

from kbt_edge.errors import KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.reference import (
    NOISE_FLOOR,
    SMOOTHING,
    ReferenceHead,
    linear_moments,
    moment_softmax,
    prior_means,
    relu_moments,
    softmax_moments,
)

pytestmark = pytest.mark.host_only("proves the mathematics of the NumPy reference, which is the same on every machine")

Array = npt.NDArray[np.float64]
STRUCTURES = ("full", "neuron", "diagonal")
MODELS: dict[str, dict[str, Any]] = {
    "fuse": {"output": "gaussian", "rule": "fuse"},
    "replace": {"output": "gaussian", "rule": "replace"},
    "softmax": {"output": "softmax", "softmax_order": 1, "noise_var": 0.1},
    "softmax2": {"output": "softmax", "softmax_order": 2, "noise_var": 0.1},
    "multinomial": {"output": "softmax", "softmax_order": 1, "noise": "multinomial"},
    "moment": {"output": "softmax", "softmax_order": 0, "noise": "multinomial"},
    "moment, constant": {"output": "softmax", "softmax_order": 0, "noise_var": 0.1},
}


def make_head(seed: int = 0, d: int = 4, d_o: int = 3, hidden: tuple[int, ...] = (), **settings: Any) -> ReferenceHead:
    rng = np.random.default_rng(seed)
    settings.setdefault("prior_var", 1e-2)
    return ReferenceHead(prior_means(rng.normal(size=(d_o, d)), rng.normal(size=d_o), hidden), **settings)


def stream(head: ReferenceHead, rows: int, samples: int, seed: int = 1) -> list[tuple[Array, Any]]:
    """Inputs with the targets of another linear readout: noisy values, or the class of its largest output."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(head.d_o, head.d))
    data: list[tuple[Array, Any]] = []
    for _ in range(samples):
        h = rng.normal(size=(rows, head.d))
        y = h @ W.T + 0.1 * rng.normal(size=(rows, head.d_o))
        data.append((h, y if head.output == "gaussian" else y.argmax(axis=1)))
    return data


def dense(head: ReferenceHead) -> list[Array]:
    return [layer.dense() for layer in head.layers]


def snapshot(head: ReferenceHead) -> tuple[Any, ...]:
    state = [(layer.mean.tobytes(), layer.cov.tobytes()) for layer in head.layers]
    return (state, head.noise_var.tobytes(), head.samples)


# --- moments ---------------------------------------------------------------------------------------------------------


def test_relu_mean_and_variance_agree_with_mpmath_from_the_dead_to_the_linear_end() -> None:
    alphas = np.concatenate([np.linspace(-37, 40, 155), [-2.5 - 1e-9, -2.5 + 1e-9, 0.0]])
    mean, cov, Phi = relu_moments(2.0 * alphas, 4.0 * np.eye(len(alphas)))
    with mpmath.workdps(700):  # E z² - (E z)² loses more digits than the answer has
        for alpha, got_mean, got_var, got_Phi in zip(alphas, mean, np.diag(cov), Phi, strict=True):
            a = mpmath.mpf(float(alpha))
            P, p = mpmath.ncdf(a), mpmath.npdf(a)
            E = a * P + p
            V = (1 + a * a) * P + a * p - E * E
            for got, exact in ((got_mean, 2 * E), (got_var, 4 * V), (got_Phi, P)):
                assert abs(got / exact - 1) < 1e-13


@pytest.mark.parametrize("rho", [-1.0, -0.95, -0.5, 0.0, 0.3, 0.8, 0.95])
def test_relu_covariance_at_zero_mean_is_the_arc_cosine_kernel(rho: float) -> None:
    s, t = 0.7, 1.9
    Sigma = np.array([[s * s, rho * s * t], [rho * s * t, t * t]])
    _, cov, _ = relu_moments(np.zeros(2), Sigma, order=400)
    theta = math.acos(rho)
    exact = s * t * (math.sin(theta) + (math.pi - theta) * math.cos(theta) - 1) / (2 * math.pi)
    # at |rho| = 1 the terms fall only like n^(-5/2), so the remainder after 400 of them is seen
    assert cov[0, 1] == pytest.approx(exact, abs=1e-5 if abs(rho) == 1 else 1e-9)


@pytest.mark.parametrize("order", [2, 3, 4, 5, 8])
def test_relu_covariance_stays_positive_semidefinite_wherever_the_series_stops(order: int) -> None:
    rng = np.random.default_rng(order)
    for _ in range(50):
        F = rng.normal(size=(8, 3)) * rng.uniform(0.01, 3)  # rank 3, so many correlations are close to ±1
        Sigma = F @ F.T
        _, cov, Phi = relu_moments(rng.normal(size=8), Sigma, order)
        joint = np.block([[Sigma, Sigma * Phi], [(Sigma * Phi).T, cov]])
        value = np.linalg.eigvalsh(joint)
        assert value[0] > -1e-13 * value[-1]


def test_relu_of_a_certain_input_is_certain() -> None:
    mean, cov, Phi = relu_moments(np.array([2.0, -2.0, 0.0, 1.0]), np.diag([0.0, 0.0, 0.0, 1.0]), order=6)
    assert mean[:3].tolist() == [2.0, 0.0, 0.0]
    assert Phi[:3].tolist() == [1.0, 0.0, 0.5]
    assert not cov[:3].any()
    assert not cov[:, :3].any()


def test_softmax_order_two_adds_half_the_trace_of_hessian_times_covariance() -> None:
    rng = np.random.default_rng(0)
    mu = rng.normal(size=(2, 4))
    F = 0.1 * rng.normal(size=(8, 8))
    Sigma = F @ F.T
    mean, _, _ = softmax_moments(mu, Sigma, order=2)

    def softmax(u: Any) -> Any:
        exp = [mpmath.exp(x) for x in u]
        return [x / mpmath.fsum(exp) for x in exp]

    for a in range(2):
        block = Sigma[4 * a : 4 * a + 4, 4 * a : 4 * a + 4]
        for i in range(4):

            def component(*u: Any, i: int = i) -> Any:
                return softmax(u)[i]

            expected = component(*mu[a])
            for k, l in itertools.product(range(4), range(4)):  # noqa: E741
                direction = tuple((1 if j == k else 0) + (1 if j == l else 0) for j in range(4))
                expected += 0.5 * block[k, l] * mpmath.diff(component, tuple(mu[a]), direction)
            assert mean[a, i] == pytest.approx(float(expected), rel=1e-9)


def test_softmax_means_are_probabilities_even_far_outside_the_small_variance_regime() -> None:
    mean, _, _ = softmax_moments(np.array([[800.0, 0.0, -800.0], [0.1, 0.0, -0.1]]), 50.0 * np.eye(6), order=2)
    assert (mean >= 0).all()
    np.testing.assert_allclose(mean.sum(axis=1), 1.0)


# --- prior -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [(), (8,), (11,), (9, 12)])
def test_the_prior_reproduces_the_readout_as_its_variance_vanishes(hidden: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    W, b, h = rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=(5, 4))
    means = prior_means(W, b, hidden)
    errors = []
    for prior_var in (1e-4, 1e-8, 1e-20):
        p = ReferenceHead(means, prior_var=prior_var).predict(h)
        errors.append(float(np.abs(p.mean - (h @ W.T + b)).max()))
        assert p.var.max() < 1e3 * prior_var
    assert errors[-1] < 1e-12
    for below, W_next in itertools.pairwise(means):
        spare = slice(8, below.shape[0])
        assert not W_next[:, spare].any()  # nothing looks at a spare neuron
        assert below[spare, :4].all()  # but it looks at h


# --- L = 1 is Bayesian linear regression -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", ["neuron", "full", "full, correlated noise"])
def test_one_layer_equals_batch_bayesian_linear_regression(case: str, rows: int) -> None:
    R = (
        np.array([[0.5, 0.2, 0.0], [0.2, 0.3, -0.1], [0.0, -0.1, 0.9]])
        if "noise" in case
        else np.diag([0.5, 0.01, 2.0])
    )
    head = make_head(prior_var=0.3, covariance=case.split(",")[0], noise_var=R if "noise" in case else np.diag(R))
    w0, S0 = head.layers[0].mean.ravel(), 0.3 * np.eye(15)
    data = stream(head, rows, 40)
    total = sum(head.update(h, y).log_likelihood for h, y in data)

    h1 = np.vstack([np.column_stack([h, np.ones(rows)]) for h, _ in data])
    Y = np.concatenate([y.ravel() for _, y in data])
    A = np.einsum("ap,jk->ajkp", h1, np.eye(3)).reshape(-1, 15)
    noise = np.kron(np.eye(len(h1)), R)
    precision = np.linalg.inv(S0) + A.T @ np.linalg.solve(noise, A)
    S = np.linalg.inv(precision)
    w = w0 + S @ A.T @ np.linalg.solve(noise, Y - A @ w0)
    np.testing.assert_allclose(head.layers[0].mean.ravel(), w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(head.layers[0].dense(), S, rtol=1e-9, atol=1e-13)

    # the log likelihoods of the stream add up to the evidence of the whole
    evidence = A @ S0 @ A.T + noise
    e = Y - A @ w0
    expected = -0.5 * (e @ np.linalg.solve(evidence, e) + np.linalg.slogdet(2 * np.pi * evidence)[1])
    assert total == pytest.approx(expected, rel=1e-9)


def test_total_variance_is_epistemic_plus_noise_under_fuse_and_epistemic_under_replace() -> None:
    h = np.ones((2, 4))
    R = np.array([0.1, 0.2, 0.3])
    fuse = make_head(noise_var=R).predict(h)
    np.testing.assert_allclose(fuse.total_var, fuse.var + R)
    np.testing.assert_allclose(fuse.var, 0.01 * 5)
    replace = make_head(noise_var=R, rule="replace").predict(h)
    np.testing.assert_array_equal(replace.total_var, replace.var)
    p = make_head(output="softmax", noise="multinomial", softmax_order=1).predict(h)
    np.testing.assert_allclose(p.total_var, p.var + p.mean * (1 - p.mean))
    p = make_head(output="softmax", noise="multinomial").predict(h)  # a label that is zero or one has no other variance
    np.testing.assert_allclose(p.total_var, p.mean * (1 - p.mean), atol=1e-6)  # smoothing
    assert (p.var < p.total_var).all()


def test_input_variance_adds_what_the_weights_make_of_it() -> None:
    h, v = np.array([[1.0, -1.0, 0.5, 2.0], [0.0, 3.0, 1.0, 1.0]]), 0.2
    head = make_head(input_var=v)
    W = head.layers[0].mean[:, :4]
    own = v * (W @ W.T) + v * 4 * 0.01 * np.eye(3)
    expected = make_head().predict(h).cov + np.kron(np.eye(2), own)  # the rows' errors are independent
    np.testing.assert_allclose(head.predict(h).cov, expected, atol=1e-14)


# --- the smoother (method.md §4) -------------------------------------------------------------------------------------


def root(q: Array) -> Array:
    """F of method.md (3.3), one block per row."""
    rows, d_o = q.shape
    F = np.zeros((rows * d_o, rows * d_o))
    for a in range(rows):
        block = slice(a * d_o, (a + 1) * d_o)
        F[block, block] = np.diag(np.sqrt(q[a])) - np.outer(q[a], np.sqrt(q[a]))
    return F


def adjoint_step(head: ReferenceHead, h: Array, y: Any) -> list[tuple[Array, Array]]:
    """One update in the inverse-free form: (w̄, S) of every layer, from the head's state before the update."""
    rows, d_o = len(h), head.d_o
    z, C = h, head.input_var * np.eye(h.size)
    linear, relu = [], []
    for layer in head.layers:
        linear.append(linear_moments(layer.mean, layer.dense(), z, C))
        relu.append(relu_moments(linear[-1].mean, linear[-1].cov, head.relu_order))
        z, C = relu[-1][0].reshape(rows, -1), relu[-1][1]

    Sigma, mu = linear[-1].cov, linear[-1].mean.reshape(rows, d_o)
    R = np.kron(np.eye(rows), np.diag(head.noise_var))
    if head.output == "gaussian":
        e = (y - mu).ravel()
        predicted = Sigma + (R if head.rule == "fuse" else NOISE_FLOOR * np.eye(len(e)))
        V = np.linalg.inv(predicted)
        r, Lam = V @ e, -V if head.rule == "fuse" else V @ (R - predicted) @ V
    elif head.softmax_order == 0:
        moments = moment_softmax(mu, Sigma)
        e, H = (np.eye(d_o)[y] - moments.mean).ravel(), moments.H
        if head.noise == "constant":
            V = np.linalg.inv(H @ Sigma @ H.T + R)
            r, Lam = H.T @ V @ e, -H.T @ V @ H
        else:
            kappa = 1 / np.sqrt(1 + np.pi / 8 * np.diag(Sigma))
            G = kappa[:, None] * root(moments.q)
            S = G.T @ Sigma @ G
            for a in range(rows):
                block = slice(a * d_o, (a + 1) * d_o)
                S[block, block] = moments.s[a] * np.eye(d_o)
            V = np.linalg.inv(S)
            r, Lam = G @ V @ (e / np.sqrt(moments.q.ravel())), -G @ V @ G.T
            if rows == 1:  # (11.3)
                np.testing.assert_allclose(r, kappa * e / moments.s, atol=1e-13)
    else:
        mean, cov, J = softmax_moments(mu, Sigma, head.softmax_order)
        e = (np.eye(d_o)[y] - mean).ravel()
        if head.noise == "constant":
            V = np.linalg.inv(cov + R)
            r, Lam = J.T @ V @ e, -J.T @ V @ J
        else:
            q = (softmax_moments(mu, Sigma, 1)[0] + SMOOTHING) / (1 + d_o * SMOOTHING)
            F = root(q)
            G = np.linalg.inv(np.eye(rows * d_o) + F.T @ Sigma @ F)
            r, Lam = F @ G @ (e / np.sqrt(q.ravel())), -F @ G @ F.T

    after = []
    for i in range(len(head.layers) - 1, -1, -1):
        layer, cross = head.layers[i], linear[i].cov_wu
        S = layer.dense() + cross @ Lam @ cross.T
        kept = np.kron(np.eye(len(layer.mean)), np.ones((layer.mean.shape[1],) * 2))
        S *= {"full": np.ones_like(S), "neuron": kept, "diagonal": np.eye(len(S))}[layer.structure]
        after.append((layer.mean + (cross @ r).reshape(layer.mean.shape), S))
        if i > 0:
            W, Phi = np.kron(np.eye(rows), layer.mean[:, :-1]), relu[i - 1][2]
            r, Lam = Phi * (W.T @ r), Phi[:, None] * (W.T @ Lam @ W) * Phi
    return after[::-1]


def assert_rts_equals_adjoint(head: ReferenceHead, data: list[tuple[Array, Any]], tolerance: float = 1e-12) -> None:
    if head._apart:  # its rows are learned one after another
        data = [(h[a : a + 1], y[a : a + 1]) for h, y in data for a in range(len(h))]
    for h, y in data:
        expected = adjoint_step(head, h, y)
        before = [layer.mean.copy() for layer in head.layers]
        assert head.update(h, y).status == "ok"
        for layer, old, (mean, S) in zip(head.layers, before, expected, strict=True):
            assert np.abs(layer.mean - mean).max() <= tolerance * np.abs(mean).max()
            assert np.abs(layer.dense() - S).max() <= tolerance * np.abs(S).max()
            assert np.abs(layer.mean - old).max() > 0  # every layer learns


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [(), (9,), (9, 8)])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("model", MODELS)
def test_explicit_rts_gains_equal_the_inverse_free_adjoint_form(
    model: str, structure: str, hidden: tuple[int, ...], rows: int
) -> None:
    for prior_var, order, input_var in ((1e-2, 2, 0.0), ([1e-5] * len(hidden) + [1.0], 5, 1e-3)):
        head = make_head(
            hidden=hidden,
            prior_var=prior_var,
            covariance=structure,
            relu_order=order,
            input_var=input_var,
            **MODELS[model],
        )
        assert_rts_equals_adjoint(head, stream(head, rows, 6))


@pytest.mark.parametrize(("apart", "tolerance"), [(0.0, 1e-11), (1e-4, 1e-7)])
def test_dead_units_and_repeated_rows_do_not_disturb_the_gains(apart: float, tolerance: float) -> None:
    """Their covariances are singular or nearly so: gains must drop the null space and, at 1e-4 apart, nothing else."""
    head = make_head(hidden=(9,), prior_var=(1e-6, 1.0), covariance="full", noise_var=0.1)
    rng = np.random.default_rng(5)
    for _ in range(6):
        h = 5 * rng.normal(size=4) + apart * rng.normal(size=(3, 4))  # about ±5 with deviation 0.01: one copy is dead
        assert_rts_equals_adjoint(head, [(h, rng.normal(size=(3, 3)))], tolerance)


def smallest_relative_eigenvalue(head: ReferenceHead) -> float:
    return min(float(v[0] / v[-1]) for v in (np.linalg.eigvalsh(S) for S in dense(head)))


def test_the_diagonal_backward_form_loses_definiteness_and_the_exact_one_never() -> None:
    indefinite = []
    for structure, model, rows in itertools.product(STRUCTURES, ("fuse", "replace", "softmax"), (1, 3)):
        settings: dict[str, Any] = {"hidden": (9,), "prior_var": 1e-1, "covariance": structure} | MODELS[model]
        exact, paper = make_head(**settings), make_head(backward="diagonal", **settings)
        for h, y in stream(exact, rows, 30):
            exact.update(h, y)
            assert smallest_relative_eigenvalue(exact) > -1e-14
            if not paper.clipped:
                paper.update(h, y)
        indefinite.append(paper.clipped > 0)
        assert exact.clipped == 0
    print(f"the diagonal form went indefinite in {sum(indefinite)} of {len(indefinite)} configurations")
    assert sum(indefinite) >= 9


def test_the_diagonal_form_is_repaired_by_clipping() -> None:
    head = make_head(hidden=(9,), prior_var=1e-1, covariance="full", backward="diagonal")
    for h, y in stream(head, 3, 30):
        head.update(h, y)
        assert smallest_relative_eigenvalue(head) > -1e-13
    assert head.clipped > 0


# --- the measurement (method.md §3) ----------------------------------------------------------------------------------


def test_replace_brings_the_predictive_variance_to_that_of_the_data() -> None:
    for Sigma_data in (0.05, 2.0):
        head = make_head(d=3, d_o=1, hidden=(6,), prior_var=(1e-3, 0.1), rule="replace", noise_var=Sigma_data)
        start = head.predict(np.ones(3)).var[0]
        data = stream(head, 1, 600)
        for h, y in data:
            head.update(h, y)
        var = np.mean([head.predict(h).var[0, 0] for h, _ in data[-50:]])
        assert abs(start / Sigma_data - 1) > 0.5
        assert var == pytest.approx(Sigma_data, rel=0.15)


def test_replace_takes_over_target_and_variance_in_a_single_step() -> None:
    head = make_head(covariance="full", prior_var=0.5, rule="replace", noise_var=[0.1, 1.0, 10.0])
    h, y = np.array([1.0, 2.0, -1.0, 0.5]), np.array([5.0, -3.0, 100.0])
    head.update(h, y)
    p = head.predict(h)
    np.testing.assert_allclose(p.mean, y, rtol=1e-7)
    np.testing.assert_allclose(p.cov, np.diag([0.1, 1.0, 10.0]), atol=1e-7)


@pytest.mark.parametrize("wrong_by", one_fast([50.0, 1 / 50]))
def test_adaptive_noise_finds_the_variance_of_the_noise(wrong_by: float) -> None:
    true = np.array([0.5, 0.02])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        head = make_head(seed, d=3, d_o=2, prior_var=1.0, noise="adaptive", noise_var=wrong_by * true)
        W = rng.normal(size=(2, 3))
        for _ in range(1000):
            h = rng.normal(size=(2, 3))
            head.update(h, h @ W.T + rng.normal(size=(2, 2)) * np.sqrt(true))
        np.testing.assert_allclose(head.noise_var, true, rtol=0.25)


def test_adaptive_noise_moves_toward_the_squared_error_in_units_of_its_variance() -> None:
    head = make_head(d_o=1, prior_var=0.1, noise="adaptive", noise_var=0.4)
    h, y, R = np.array([1.0, 0.0, 2.0, 0.0]), np.array([3.0]), 0.4
    c = 0.1 * (1 + 4 + 1)  # zᵀPz: the prior is a ratio to the noise
    before = head.layers[0].mean.copy()
    p = head.predict(h)
    assert p.var[0] == pytest.approx(R * c)
    e = float(y[0] - p.mean[0])
    assert head.update(h, y).nis == pytest.approx(e * e / (R * (1 + c)))
    after = R + (e * e / (1 + c) - R) / 10  # method.md (8.2)
    assert head.noise_var[0] == pytest.approx(after)
    z = np.append(h, 1.0)
    P = 0.1 * np.eye(5) - np.outer(0.1 * z, 0.1 * z) / (1 + c)  # (8.1)
    np.testing.assert_allclose(head.layers[0].mean, before + e * 0.1 * z / (1 + c))
    np.testing.assert_allclose(head.layers[0].cov[0], after * P, atol=1e-15)
    head.update(h, y, noise_var=7.0)
    assert head.noise_var[0] == pytest.approx(after)
    assert head.samples == 2


@pytest.mark.parametrize("structure", ["neuron", "diagonal"])
def test_the_posterior_goes_with_the_noise_and_its_means_do_not_depend_on_it(structure: str) -> None:
    """One layer in units of the noise: what the noise is at first changes nothing but the size of the covariance."""
    heads = [make_head(covariance=structure, prior_var=2.0, noise="adaptive", noise_var=R) for R in (1e-4, 1e4)]
    rng = np.random.default_rng(0)
    for _ in range(40):
        h, e = rng.normal(size=(2, 4)), 1e-3 * rng.normal(size=(2, 3))  # too little for a robust step
        for head in heads:
            head.update(h, head.predict(h).mean + e)
    (small, large), ratio = heads, heads[1].noise_var / heads[0].noise_var
    np.testing.assert_allclose(small.layers[0].mean, large.layers[0].mean, atol=1e-12)
    expected = np.einsum("j,j...->j...", ratio, small.layers[0].cov)
    np.testing.assert_allclose(large.layers[0].cov, expected, rtol=1e-9, atol=1e-15 * ratio.max())


@pytest.mark.parametrize("in_units", [False, True])
def test_a_robust_step_is_one_with_more_noise(in_units: bool) -> None:
    settings: dict[str, Any] = {"hidden": (8,), "prior_var": 0.1, "noise_var": [0.1, 0.2, 0.3]}
    head, again = make_head(in_units_of_noise=in_units, **settings), make_head(**settings)
    for layer, other in zip(head.layers, again.layers, strict=True):
        other.cov = layer.cov.copy()
    h, y = np.ones(4), np.full(3, 100.0)
    nis = head.update(h, y).nis
    assert nis > 16 * 3
    v = 16 * 3 / nis if in_units else 1.0
    again.update(h, y, noise_var=np.array([0.1, 0.2, 0.3]) / v)  # (8.3)
    for layer, other in zip(head.layers, again.layers, strict=True):
        np.testing.assert_allclose(layer.mean, other.mean, rtol=1e-12)
        np.testing.assert_allclose(layer.cov, other.cov, rtol=1e-12)


@pytest.mark.parametrize("output", ["gaussian", "softmax"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_walk_raises_the_ud_diagonal_but_never_above_the_prior(structure: str, output: str) -> None:
    noise: dict[str, Any] = {"noise": "multinomial"} if output == "softmax" else {"noise_var": [0.1, 0.2, 0.6]}
    settings: dict[str, Any] = {"output": output, "prior_var": 0.3, "covariance": structure, "hidden": (8,)} | noise
    plain, head = make_head(**settings), make_head(drift=0.5, **settings)
    q, capped = 0.5 * (1.0 if output == "softmax" else 0.3), 0  # 0.3: the mean of the noise
    for h, y in stream(head, 2, 8):
        for to, layer in zip(plain.layers, head.layers, strict=True):
            to.mean, to.cov = layer.mean.copy(), layer.cov.copy()
        z = [h, head._forward(h).relu[0][0].reshape(2, -1)]
        plain.update(h, y)
        head.update(h, y)
        for layer, before, inputs in zip(head.layers, plain.layers, z, strict=True):
            L = np.linalg.cholesky(before.dense()[::-1, ::-1])[::-1, ::-1]  # upper triangular: S = L Lᵀ
            U, D = L / np.diag(L), np.diag(L) ** 2
            step = q / (np.mean(np.sum(inputs**2, axis=1)) + 1)
            capped += int((D + step > 0.3).sum())
            expected = (U * np.minimum(D + step, np.maximum(D, 0.3))) @ U.T
            np.testing.assert_allclose(layer.dense(), expected, rtol=1e-9, atol=1e-13)
            np.testing.assert_array_equal(layer.mean, before.mean)
    assert capped > 0


def test_noise_below_the_floor_is_lifted_to_it() -> None:
    np.testing.assert_array_equal(make_head(noise_var=[0.0, 1e-12, 1.0]).noise_var, [NOISE_FLOOR, NOISE_FLOOR, 1.0])
    singular = np.diag([0.0, 1.0, 1.0])
    np.testing.assert_array_equal(make_head(noise_var=singular).noise_var, np.diag([NOISE_FLOOR, 1.0, 1.0]))
    head = make_head(noise_var=0.0, hidden=(8,), covariance="full")
    for h, y in stream(head, 3, 20):
        assert math.isfinite(head.update(h, y).nis)


def test_a_gated_sample_changes_nothing() -> None:
    settings: dict[str, Any] = {"hidden": (8,), "forgetting": 0.9, "noise": "adaptive"}
    h, y = np.ones(4), np.full(3, 4.0)
    nis = make_head(**settings).update(h, y).nis
    strict, lenient = make_head(gate=0.999 * nis, **settings), make_head(gate=1.001 * nis, **settings)
    before = snapshot(strict)
    u = strict.update(h, y)
    assert (u.status, u.nis) == ("gated", nis)
    assert snapshot(strict) == before
    assert lenient.update(h, y).status == "ok"
    assert snapshot(lenient) != before


# --- multinomial noise -----------------------------------------------------------------------------------------------


def certain_head(logits: Array, eps: float) -> ReferenceHead:
    """u = logits + w·h with w ~ N(0, eps): the change of w is eps · r_u for h = 1, to full relative precision."""
    means = np.column_stack([np.zeros(len(logits)), logits])
    return ReferenceHead([means], prior_var=eps, output="softmax", noise="multinomial")


@pytest.mark.parametrize("p_target", [0.3, 1e-3, 1e-9, 1e-30])
def test_multinomial_gradient_is_target_minus_probability_however_wrong_the_head_was(p_target: float) -> None:
    logits, y, eps = np.array([0.0, math.log(p_target), -1.0]), np.array([0.0, 1.0, 0.0]), 1e-14
    head = certain_head(logits, eps)
    p = head.predict(np.ones(1)).mean
    head.update(np.ones(1), 1)
    r = head.layers[0].mean[:, 0] / eps
    np.testing.assert_allclose(r, y - p, rtol=1e-12)

    # R = J + tiny·I instead leaves p / (p + tiny) of the gradient, which is nothing where it is needed most
    J = np.diag(p) - np.outer(p, p)
    starved = J @ np.linalg.solve(J + 1e-6 * np.eye(3), y - p)
    assert (abs(starved[1] - (y - p)[1]) < 0.01) == (p_target > 1e-4)
    if p_target < 1e-8:
        assert starved[1] < 0.01


@pytest.mark.parametrize("rows", [1, 3])
def test_multinomial_update_equals_the_information_form(rows: int) -> None:
    """With J as map and as noise, JᵀR⁺J = J and JᵀR⁺e = e: the posterior precision just gains AᵀJA."""
    head = make_head(d_o=4, prior_var=0.4, covariance="full", output="softmax", noise="multinomial", softmax_order=1)
    rng = np.random.default_rng(2)
    for _ in range(10):
        h, label = 2 * rng.normal(size=(rows, 4)), rng.integers(4, size=rows)
        w, S = head.layers[0].mean.ravel(), head.layers[0].cov
        A = np.einsum("ap,jk->ajkp", np.column_stack([h, np.ones(rows)]), np.eye(4)).reshape(-1, 20)
        p = head.predict(h).mean
        q = (p + SMOOTHING) / (1 + 4 * SMOOTHING)
        J = np.diag(q.ravel()) - np.kron(np.eye(rows), np.ones((4, 4))) * np.outer(q, q)
        e = (np.eye(4)[label] - p).ravel()
        S_after = np.linalg.inv(np.linalg.inv(S) + A.T @ J @ A)
        nis = e @ np.linalg.pinv(J @ A @ S @ A.T @ J + J, rcond=1e-12, hermitian=True) @ e
        u = head.update(h, label)
        np.testing.assert_allclose(head.layers[0].cov, S_after, atol=1e-11)
        np.testing.assert_allclose(head.layers[0].mean.ravel(), w + S_after @ A.T @ e, atol=1e-10)
        assert u.nis == pytest.approx(nis, rel=1e-6)
        assert u.log_likelihood == pytest.approx(np.log(p[np.arange(rows), label]).sum())


def test_class_numbers_and_one_hot_rows_are_the_same_target() -> None:
    a, b = (make_head(hidden=(8,), output="softmax", noise="multinomial") for _ in range(2))
    h = np.random.default_rng(0).normal(size=(2, 4))
    a.update(h, [2, 0])
    b.update(h, np.eye(3)[[2, 0]])
    assert snapshot(a) == snapshot(b)


# --- forgetting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_forgetting_divides_the_ud_diagonal_but_never_lifts_it_above_the_prior(structure: str) -> None:
    plain = make_head(prior_var=0.3, covariance=structure)
    head = make_head(prior_var=0.3, covariance=structure, forgetting=0.5)
    capped = 0
    for h, y in stream(head, 1, 12):
        plain.layers[0].mean, plain.layers[0].cov = head.layers[0].mean.copy(), head.layers[0].cov.copy()
        plain.update(h, y)
        head.update(h, y)
        L = np.linalg.cholesky(plain.layers[0].dense()[::-1, ::-1])[::-1, ::-1]  # upper triangular: S = L Lᵀ
        U, D = L / np.diag(L), np.diag(L) ** 2
        grown = np.minimum(2 * D, np.maximum(D, 0.3))
        capped += int((2 * D > 0.3).sum())
        expected = (U * grown) @ U.T
        np.testing.assert_allclose(head.layers[0].dense(), expected, rtol=1e-9, atol=1e-14)
        np.testing.assert_array_equal(head.layers[0].mean, plain.layers[0].mean)
    assert capped > 0


def test_forgetting_keeps_a_head_alert_to_drift() -> None:
    errors = {}
    for forgetting in (1.0, 0.95):
        head = make_head(d=2, d_o=1, prior_var=1.0, noise_var=0.01, forgetting=forgetting)
        rng = np.random.default_rng(0)
        missed = []
        for k in range(400):
            h = rng.normal(size=2)
            y = h @ np.array([math.cos(k / 50), math.sin(k / 50)])
            missed.append(abs(float(y - head.predict(h).mean[0])))
            head.update(h, [y])
        errors[forgetting] = np.mean(missed[200:])
    assert errors[0.95] < 0.4 * errors[1.0]


# --- rejections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"output": "softmax", "rule": "replace"},
        {"output": "softmax", "noise": "adaptive"},
        {"output": "gaussian", "noise": "multinomial"},
        {"rule": "replace", "noise": "adaptive"},
        {"noise": "adaptive", "noise_var": np.eye(3)},
        {"noise_var": -1.0},
        {"noise_var": [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]},
        {"prior_var": -1e-3},
        {"covariance": "block"},
        {"relu_order": 1},
        {"softmax_order": 3},
        {"forgetting": 0.0},
        {"drift": -1.0},
        {"input_var": -1.0},
        {"gate": 0.0},
        {"hidden": (7,)},
    ],
)
def test_settings_that_make_no_sense_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(RangeError):
        make_head(**settings)


def test_a_rejected_call_changes_nothing() -> None:
    head = make_head(hidden=(8,), output="softmax", noise="multinomial")
    head.update(np.ones(4), 1)
    before = snapshot(head)
    calls: list[tuple[type[KbtError], Callable[[], object]]] = [
        (ShapeError, lambda: head.predict(np.ones(3))),
        (ShapeError, lambda: head.predict(np.ones((0, 4)))),
        (ShapeError, lambda: head.update(np.ones((2, 4)), [1, 2, 0])),
        (ShapeError, lambda: head.update(np.ones((2, 4)), np.eye(3))),
        (RangeError, lambda: head.update(np.ones(4), 3)),
        (RangeError, lambda: head.update(np.ones(4), -1)),
        (RangeError, lambda: head.update(np.ones(4), 1, noise_var=1.0)),
        (NumericsError, lambda: head.update([1.0, 2.0, 3.0, math.nan], 1)),
        (NumericsError, lambda: head.update(np.ones(4), [0.0, math.inf, 0.0])),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert snapshot(head) == before


def test_layers_that_do_not_fit_together_are_rejected() -> None:
    with pytest.raises(ShapeError):
        ReferenceHead([np.zeros((4, 3)), np.zeros((2, 4))], prior_var=1.0)
    with pytest.raises(ShapeError):
        ReferenceHead([np.zeros((2, 3))], prior_var=[1.0, 2.0])
