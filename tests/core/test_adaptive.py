"""Learned noise: method.md (8.1) to (8.3) in one filter. Whatever the noise is at first does not matter for long."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt
from kbt_edge._core import E_RANGE

SAMPLES, UNSEEN, D = 2000, 1000, 4
TRUE_VAR = (0.5, 0.02)  # one per output

Array = npt.NDArray[np.float64]


def data(seed: int) -> tuple[Array, Array, Array]:
    """A readout, and inputs with targets of another readout, which a head can represent exactly, plus noise."""
    rng = np.random.default_rng(seed)
    before, after = rng.normal(size=(2, len(TRUE_VAR), D))
    h = rng.normal(size=(SAMPLES + UNSEEN, D))
    return before, h, h @ after.T + np.sqrt(TRUE_VAR) * rng.normal(size=(SAMPLES + UNSEEN, len(TRUE_VAR)))


def learned(
    seed: int, covariance: str, hidden: tuple[int, ...], noise: str, noise_var: Array, samples: int = SAMPLES
) -> kbt.Head:
    """One filter. A constant noise has a plain prior, a learned one a ratio: the same where the noise is right."""
    weight, h, y = data(seed)
    prior_var = (1e-5, 1.0)[1 - len(hidden) :]
    if noise == "adaptive":
        prior_var = tuple(var / np.mean(TRUE_VAR) for var in prior_var)
    head = kbt.Head(weight, hidden=hidden, prior_var=prior_var, covariance=covariance, noise=noise, drift=0.0,
                    noise_var=noise_var)  # fmt: skip
    for hi, yi in zip(h[:samples], y, strict=False):
        head.update(hi, yi)
    return head


def unseen_nll(head: kbt.Head, seed: int) -> Array:
    """Mean negative log likelihood of the samples that were not learned, per output."""
    _, h, y = data(seed)
    total = np.zeros(len(TRUE_VAR))
    for hi, yi in zip(h[SAMPLES:], y[SAMPLES:], strict=True):
        p = head.predict(hi)
        total += 0.5 * (np.log(2 * np.pi * p.total_var) + (yi - p.mean) ** 2 / p.total_var)
    return total / UNSEEN


# ---- one linear layer: exact whatever the noise does -----------------------------------------------------------------


def near_samples(seed: int, rows: int, d_o: int) -> tuple[Array, list[tuple[Array, Array]]]:
    """A readout, and samples of a plant so near to it that no step is robust, with noise that changes on the way."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(d_o, D))
    plant = weight + 0.05 * rng.normal(size=weight.shape)
    stream = []
    for step in range(60):
        h = rng.normal(size=(rows, D))
        stream.append((h, h @ plant.T + 0.05 * (1 + step // 20) * rng.uniform(-1, 1, (rows, d_o))))
    return weight, stream


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("d_o", [1, 2, 9])
@pytest.mark.parametrize("noise_var", [0.01, 0.5])
def test_one_linear_layer_is_ridge_regression_whatever_the_noise_does(noise_var: float, d_o: int, rows: int) -> None:
    """``prior_var`` is a ratio to the noise, so the noise cancels: (ZᵀZ + I/prior) W = Zᵀ Y + W₀/prior."""
    weight, stream = near_samples(d_o, rows, d_o)
    head = kbt.Head(weight, prior_var=3.0, noise="adaptive", noise_var=noise_var, drift=0.0, dtype="float64",
                    max_rows=rows)  # fmt: skip
    noises = []
    for h, y in stream:
        assert head.update(h, y).nis < 16 * rows * d_o  # no robust step, which ridge regression has not
        noises.append(head.noise_var)
    assert np.ptp(noises, axis=0).min() > 1e-3  # the noise did move
    Z = np.vstack([np.column_stack([h, np.ones(rows)]) for h, _ in stream])
    Y = np.vstack([y for _, y in stream])
    precision, first = Z.T @ Z + np.eye(D + 1) / 3.0, np.column_stack([weight, np.zeros(d_o)])
    want = np.linalg.solve(precision, Z.T @ Y + first.T / 3.0).T
    np.testing.assert_allclose(head.layers[0].mean, want, rtol=1e-8, atol=1e-8)
    P = np.linalg.inv(precision)
    for block, R in zip(head.layers[0].cov, head.noise_var, strict=True):
        np.testing.assert_allclose(block, R * P, rtol=0, atol=1e-8 * R * np.abs(P).max())


def test_a_joint_covariance_is_ridge_regression_too_where_the_outputs_have_the_same_noise() -> None:
    weight, stream = near_samples(0, 1, 1)
    two = kbt.Head(np.vstack([weight, weight]), prior_var=3.0, noise="adaptive", noise_var=0.1, drift=0.0,
                   covariance="full", dtype="float64")  # fmt: skip
    one = kbt.Head(weight, prior_var=3.0, noise="adaptive", noise_var=0.1, drift=0.0, dtype="float64")
    for h, y in stream:
        two.update(h[0], [y[0, 0], y[0, 0]])
        one.update(h[0], y[0])
    np.testing.assert_allclose(two.layers[0].mean, np.vstack([one.layers[0].mean] * 2), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(two.noise_var, np.repeat(one.noise_var, 2), rtol=1e-8)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_noise_follows_the_squared_errors_in_units_of_their_variance(rows: int) -> None:
    """(8.2) with plain NumPy beside it."""
    weight, stream = near_samples(3, rows, 2)
    head = kbt.Head(weight, prior_var=3.0, noise="adaptive", noise_var=0.1, drift=0.0, dtype="float64", max_rows=rows)
    W, P, R = np.column_stack([weight, np.zeros(2)]), 3.0 * np.eye(D + 1), np.full(2, 0.1)
    for age, (h, y) in enumerate(stream):
        Z = np.column_stack([h, np.ones(rows)])
        e, S = y - Z @ W.T, Z @ P @ Z.T
        R = R + (np.mean(e**2 / (1 + np.diag(S))[:, None], axis=0) - R) / min(10 + age, 100)
        gain = P @ Z.T @ np.linalg.inv(np.eye(rows) + S)
        W, P = W + (gain @ e).T, P - gain @ Z @ P
        head.update(h, y)
        np.testing.assert_allclose(head.noise_var, R, rtol=1e-8)


# ---- a wrong first noise ---------------------------------------------------------------------------------------------


@pytest.mark.host_only("statistics over thousands of updates, slow to emulate; the board learns the same bits")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("covariance", "hidden"), [("neuron", ()), ("neuron", (12,)), ("full", (8,))])
def test_the_noise_is_found_from_50_times_too_small_and_too_large(
    covariance: str, hidden: tuple[int, ...], seed: int
) -> None:
    truth = np.array(TRUE_VAR)
    best = unseen_nll(learned(seed, covariance, hidden, "constant", truth), seed)
    for factor in (1 / 50, 50.0):
        head = learned(seed, covariance, hidden, "adaptive", factor * truth)
        ratio, worse = head.noise_var / truth, unseen_nll(head, seed) - best
        print(f"{covariance} {hidden} seed {seed} from {factor:g}: R/truth {ratio}, NLL {worse}")
        # The noise remembers 100 samples, so its relative deviation is sqrt(2/199) = 0.1 for ever; this is 3.5 of it.
        assert (np.abs(ratio - 1) <= 0.35).all()
        assert (np.abs(worse) <= 0.1).all()


@pytest.mark.host_only("statistics over thousands of updates, slow to emulate; the board learns the same bits")
@pytest.mark.parametrize("first", [1 / 50, 50.0, 1e-9], ids=["50 times too small", "50 times too large", "nothing"])
@pytest.mark.parametrize(
    ("covariance", "hidden"),
    [("neuron", ()), ("diagonal", ()), ("neuron", (12,)), ("full", (8,)), ("diagonal", (8,)), ("neuron", (8, 8))],
)
def test_500_samples_after_a_wrong_first_noise_it_predicts_as_after_the_right_one(
    covariance: str, hidden: tuple[int, ...], first: float
) -> None:
    """Also where it is next to nothing: a noise of zero with certain weights is no fixed point that is stuck."""
    truth = np.array(TRUE_VAR)
    prior = (1e-3,) * len(hidden) + (10.0,)
    worse = []
    for seed in range(5):
        weight, h, y = data(seed)
        noises = (truth, np.full(2, first) if first < 1e-6 else first * truth)
        heads = [kbt.Head(weight, hidden=hidden, prior_var=prior, covariance=covariance, noise="adaptive", drift=0.0,
                          noise_var=noise_var) for noise_var in noises]  # fmt: skip
        for head in heads:
            for hi, yi in zip(h[:500], y, strict=False):
                head.update(hi, yi)
        right, wrong = (unseen_nll(head, seed) for head in heads)
        worse.append(wrong - right)
        assert (heads[1].noise_var > 0.3 * truth).all()
    print(f"{covariance} {hidden} from {first:g}: nats worse {np.mean(worse, axis=0)}")
    assert np.mean(worse) <= 0.05
    assert np.max(worse) <= 0.2


@pytest.mark.host_only("statistics over thousands of updates, slow to emulate; the board learns the same bits")
def test_the_head_is_far_worse_off_with_the_wrong_noise_so_that_there_is_something_to_find() -> None:
    truth = np.array(TRUE_VAR)
    best = unseen_nll(learned(0, "neuron", (), "constant", truth), 0)
    for factor in (1 / 50, 50.0):
        assert (unseen_nll(learned(0, "neuron", (), "constant", factor * truth), 0) > best + 0.5).all()


# ---- outliers --------------------------------------------------------------------------------------------------------


@pytest.mark.host_only("statistics over thousands of updates, slow to emulate; the board learns the same bits")
@pytest.mark.parametrize(
    ("covariance", "hidden"), [("neuron", ()), ("full", ()), ("neuron", (12,)), ("full", (8,)), ("diagonal", (8,))]
)
def test_an_early_outlier_does_not_lock_the_head(covariance: str, hidden: tuple[int, ...]) -> None:
    """Of 300 at sample 4: it counts as one of four standard deviations (8.3), and the noise forgets it."""
    worse = []
    for seed in range(5):
        weight, h, y = data(seed)
        heads = []
        for outlier in (0.0, 300.0):
            head = kbt.Head(weight, hidden=hidden, prior_var=(1e-3, 10.0)[1 - len(hidden) :], covariance=covariance,
                            noise="adaptive", noise_var=0.01, drift=0.0)  # fmt: skip
            for step, (hi, yi) in enumerate(zip(h[:500], y, strict=False)):
                head.update(hi, yi + outlier * (step == 4))
            heads.append(unseen_nll(head, seed))
        worse.append(heads[1] - heads[0])
    print(f"{covariance} {hidden}: nats worse {np.mean(worse, axis=0)}")
    assert np.mean(worse) <= 0.05
    assert np.max(worse) <= 0.2


@pytest.mark.parametrize("hidden", [(), (8,)])
@pytest.mark.parametrize("noise", ["adaptive", "constant"])
def test_a_robust_step_is_that_of_a_noise_with_which_the_outlier_is_four_deviations(
    noise: str, hidden: tuple[int, ...]
) -> None:
    """A single filter of constant noise has no robust step: it is exact."""
    weight, h, y = data(0)
    prior = {"adaptive": (1e-3, 10.0), "constant": (1e-4, 1.0)}[noise][1 - len(hidden) :]
    head = kbt.Head(weight, hidden=hidden, prior_var=prior, noise=noise, noise_var=0.1, drift=0.0, dtype="float64")
    before = [layer.mean for layer in head.layers]
    nis = head.update(h[0], y[0] + 1000.0).nis
    assert nis > 16 * 2
    plain = kbt.Head.from_means(before, prior_var=tuple(0.1 * p if noise == "adaptive" else p for p in prior),
                                noise_var=0.1, drift=0.0, dtype="float64")  # fmt: skip
    plain.update(h[0], y[0] + 1000.0, noise_var=0.1 * nis / (16 * 2) if noise == "adaptive" else None)
    for layer, other in zip(head.layers, plain.layers, strict=True):
        np.testing.assert_allclose(layer.mean, other.mean, rtol=1e-9)


def test_noise_given_with_a_sample_is_not_learned_from() -> None:
    for hidden in ((), (6,)):
        for drift in (0.0, "auto"):
            head = kbt.Head(np.eye(2), hidden=hidden, noise="adaptive", noise_var=0.3, drift=drift)
            before = head.noise_var
            head.update([1.0, 2.0], [5.0, -5.0], noise_var=0.1)
            np.testing.assert_allclose(head.noise_var, before, rtol=1e-6 if drift == "auto" else 0)  # members are mixed
            head.update([1.0, 2.0], [5.0, -5.0])
            assert (np.abs(head.noise_var - before) > 0.01).all()


# ---- the posterior goes with the noise -------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["neuron", "full", "diagonal"])
def test_what_is_never_excited_keeps_its_prior_in_units_of_the_noise(covariance: str) -> None:
    """However the noises of several outputs fluctuate. The hidden layer goes with their mean."""
    rng = np.random.default_rng(0)
    head = kbt.Head(np.eye(4, 3), hidden=(6,), prior_var=(1e-4, 10.0), covariance=covariance, noise="adaptive",
                    noise_var=0.01, drift=0.0, dtype="float64")  # fmt: skip
    plant = rng.normal(size=(4, 3))
    for _ in range(2000):
        h = rng.normal(size=3) * [1.0, 1.0, 0.0]
        head.update(h, plant @ h + 0.1 * rng.normal(size=4))
    cov, n = head.layers[0].cov, 6
    unexcited = {
        "neuron": lambda: [cov[j, 2, 2] for j in range(n)],
        "full": lambda: [cov[4 * j + 2, 4 * j + 2] for j in range(n)],
        "diagonal": lambda: [cov[j, 2] for j in range(n)],
    }[covariance]()
    np.testing.assert_allclose(unexcited, 1e-4 * head.noise_var.mean(), rtol=1e-9)


@pytest.mark.parametrize("drift", [0.0, "auto"])
@pytest.mark.parametrize("hidden", [(), (6,)])
def test_a_noise_in_whose_units_the_prior_would_overflow_is_rejected(hidden: tuple[int, ...], drift: object) -> None:
    head = kbt.Head(np.eye(3), hidden=hidden, noise="adaptive", covariance="diagonal", drift=drift)
    blob = head.to_bytes()
    assert head.core.set_noise(np.array([3e35], np.float32)) == E_RANGE
    assert head.to_bytes() == blob
    assert head.core.set_noise(np.array([1e20], np.float32)) == 0
    assert np.isfinite(head.health().largest_var)
    for step in range(200):  # what is learned stays in range as well
        with contextlib.suppress(kbt.NumericsError):
            head.update(np.full(3, 0.1 + step % 3), np.full(3, (-1) ** step * 1e18))
        assert np.isfinite(head.health().largest_var)
