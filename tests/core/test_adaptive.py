"""noise="adaptive" finds the variance of the observation noise, however wrong it was told at first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt

SAMPLES, UNSEEN, D = 2000, 1000, 4
TRUE_VAR = (0.5, 0.02)  # one per output

Array = npt.NDArray[np.float64]


def data(seed: int) -> tuple[Array, Array, Array]:
    """A readout, and inputs with targets of another readout, which a head can represent exactly, plus noise."""
    rng = np.random.default_rng(seed)
    before, after = rng.normal(size=(2, len(TRUE_VAR), D))
    h = rng.normal(size=(SAMPLES + UNSEEN, D))
    return before, h, h @ after.T + np.sqrt(TRUE_VAR) * rng.normal(size=(SAMPLES + UNSEEN, len(TRUE_VAR)))


def learned(seed: int, covariance: str, hidden: tuple[int, ...], noise: str, noise_var: Array) -> kbt.Head:
    weight, h, y = data(seed)
    prior_var = (1e-5, 1.0)[1 - len(hidden) :]
    head = kbt.Head(weight, hidden=hidden, prior_var=prior_var, covariance=covariance, noise=noise, noise_var=noise_var)
    for hi, yi in zip(h[:SAMPLES], y, strict=False):
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
        assert (np.abs(ratio - 1) <= 0.25).all()
        assert (np.abs(worse) <= 0.1).all()


@pytest.mark.host_only("statistics over thousands of updates, slow to emulate; the board learns the same bits")
def test_the_head_is_far_worse_off_with_the_wrong_noise_so_that_there_is_something_to_find() -> None:
    truth = np.array(TRUE_VAR)
    best = unseen_nll(learned(0, "neuron", (), "constant", truth), 0)
    for factor in (1 / 50, 50.0):
        assert (unseen_nll(learned(0, "neuron", (), "constant", factor * truth), 0) > best + 0.5).all()


def test_noise_given_with_a_sample_is_not_learned_from() -> None:
    head = kbt.Head(np.eye(2), noise="adaptive", noise_var=0.3)
    before = head.noise_var
    head.update([1.0, 2.0], [5.0, -5.0], noise_var=0.1)
    np.testing.assert_array_equal(head.noise_var, before)
    head.update([1.0, 2.0], [5.0, -5.0])
    assert (head.noise_var != before).all()
