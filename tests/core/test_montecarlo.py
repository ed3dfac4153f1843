"""Every closed form of method.md §2 against Monte Carlo, within four standard errors, in random configurations.

The standard errors come from the samples. A fair comparison gives z-scores of unit variance, so beside the largest |z|
their root mean square is checked: it would sink below one if the errors were overestimated and nothing could fail. What
the paper prints, where it is wrong, goes through the same comparison and must be rejected.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from kbt_edge.reference import linear_moments, relu_moments, softmax_moments

pytestmark = pytest.mark.host_only("proves the mathematics of the NumPy reference, which is the same on every machine")

Array = npt.NDArray[np.float64]
CONFIGURATIONS = 220
SAMPLES = 120_000


class Comparison:
    """z-scores of closed forms against sample averages."""

    def __init__(self) -> None:
        self.z: list[float] = []

    def mean(self, x: Array, predicted: float) -> None:
        self.z.append(float((x.mean() - predicted) / (x.std() / math.sqrt(len(x)))))

    def cov(self, x: Array, y: Array, predicted: float) -> None:
        self.mean((x - x.mean()) * (y - y.mean()), predicted)

    def report(self, name: str) -> Array:
        z = np.sort(np.abs(self.z))
        rms = math.sqrt((z**2).mean())
        print(f"{name}: {len(z)} comparisons, |z| up to {z[-1]:.2f}, median {np.median(z):.2f}, rms {rms:.3f}")
        return z

    def assert_agrees(self, name: str) -> None:
        z = self.report(name)
        assert z[-1] < 4
        assert 0.9 < math.sqrt((z**2).mean()) < 1.1

    def assert_rejects(self, name: str) -> None:
        """Beyond four standard errors in most configurations, not by one lucky draw."""
        assert float(np.median(self.report(name))) > 4


def random_covariance(rng: np.random.Generator, n: int, scale: float) -> Array:
    """Dense, full rank, and with standard deviations spread over a decade around ``scale``."""
    F = rng.normal(size=(n, n + 1))
    sigma = scale * 10 ** rng.uniform(-0.5, 0.5, size=n)
    F *= (sigma / np.linalg.norm(F, axis=1))[:, None]
    return np.asarray(F @ F.T)


def draw(rng: np.random.Generator, mu: Array, Sigma: Array) -> Array:
    """(dimension, samples), so that every variable is contiguous."""
    sample: Array = mu[:, None] + np.linalg.cholesky(Sigma) @ rng.standard_normal((len(mu), SAMPLES))
    return sample


def softmax(u: Array) -> Array:
    """Over the first axis."""
    exp = np.exp(u - u.max(axis=0))
    probabilities: Array = exp / exp.sum(axis=0)
    return probabilities


def test_relu_moments_and_its_covariance_with_the_input() -> None:
    rng = np.random.default_rng(20)
    diagonal, covariance, stein = Comparison(), Comparison(), Comparison()
    unsquared, phi_for_Phi = Comparison(), Comparison()
    for _ in range(CONFIGURATIONS):
        Sigma = random_covariance(rng, 3, scale=1.0)
        sigma = np.sqrt(np.diag(Sigma))
        while np.abs(np.triu(Sigma / np.outer(sigma, sigma), 1)).max() > 0.9:  # where order 60 leaves no remainder
            Sigma = random_covariance(rng, 3, scale=1.0)
            sigma = np.sqrt(np.diag(Sigma))
        alpha = rng.uniform(-2, 2.5, size=3)
        mu = alpha * sigma
        mean, cov, Phi = relu_moments(mu, Sigma, order=60)
        u = draw(rng, mu, Sigma)
        z = np.maximum(u, 0.0)
        j, k = rng.choice(3, size=2, replace=False)
        diagonal.mean(z[j], mean[j])
        diagonal.cov(z[j], z[j], cov[j, j])
        covariance.cov(z[j], z[k], cov[j, k])
        stein.cov(u[j], z[j], Sigma[j, j] * Phi[j])
        stein.cov(u[j], z[k], Sigma[j, k] * Phi[k])

        phi = np.exp(-0.5 * alpha**2) / math.sqrt(2 * math.pi)
        printed = Phi[j] * Sigma[j, k] * Phi[k] + phi[j] * Sigma[j, k] * phi[k] / (2 * sigma[j] * sigma[k])
        unsquared.cov(z[j], z[k], printed)
        printed = (mu[j] ** 2 + Sigma[j, j]) * phi[j] + mu[j] * sigma[j] * phi[j] - mu[j] * mean[j]
        phi_for_Phi.cov(u[j], z[j], printed)
    diagonal.assert_agrees("ReLU mean and variance")
    covariance.assert_agrees("ReLU covariance")
    stein.assert_agrees("Cov(u, relu u), on and off the diagonal")
    unsquared.assert_rejects("control: second-order term with the covariance unsquared")
    phi_for_Phi.assert_rejects("control: density in place of distribution in Cov(u, relu u)")


@pytest.mark.slow("draws 26 million samples")
def test_linear_layer_with_dense_weight_and_row_covariances() -> None:
    rng = np.random.default_rng(21)
    mean, cov, cross = Comparison(), Comparison(), Comparison()
    without_product = Comparison()
    y, n, m = 2, 2, 2
    for _ in range(CONFIGURATIONS):
        W, z = rng.normal(size=(n, m + 1)), rng.normal(size=(y, m))
        S, C = random_covariance(rng, n * (m + 1), scale=0.7), random_covariance(rng, y * m, scale=0.7)
        moments = linear_moments(W, S, z, C)
        w_s, z_s = draw(rng, W.ravel(), S), draw(rng, z.ravel(), C)
        w3, z3 = w_s.reshape(n, m + 1, -1), z_s.reshape(y, m, -1)
        u = np.stack([(w3[j, :m] * z3[a]).sum(axis=0) + w3[j, m] for a in range(y) for j in range(n)])
        a, j, p, q = rng.integers(2), rng.integers(2), rng.integers(n * (m + 1)), rng.integers(y * m)
        one, other = n * a + j, n * (1 - a) + (1 - j)  # another neuron in another row
        mean.mean(u[one], moments.mean[one])
        cov.cov(u[one], u[one], moments.cov[one, one])
        cov.cov(u[one], u[other], moments.cov[one, other])
        cross.cov(w_s[p], u[one], moments.cov_wu[p, one])
        cross.cov(z_s[q], u[one], moments.cov_zu[q, one])

        S_jj, C_aa = S.reshape(n, m + 1, n, m + 1)[j, :m, j, :m], C.reshape(y, m, y, m)[a, :, a]
        without_product.cov(u[one], u[one], moments.cov[one, one] - float((S_jj * C_aa).sum()))
    mean.assert_agrees("linear mean")
    cov.assert_agrees("linear covariance over rows and neurons")
    cross.assert_agrees("Cov(w, u) and Cov(z, u)")
    without_product.assert_rejects("control: linear covariance without the product of both covariances")


@pytest.mark.slow("draws 26 million samples")
def test_softmax_of_first_order_where_the_variance_is_small() -> None:
    rng = np.random.default_rng(22)
    mean, cov, cross = Comparison(), Comparison(), Comparison()
    for _ in range(CONFIGURATIONS):
        mu = rng.normal(size=(2, 3))
        Sigma = random_covariance(rng, 6, scale=5e-4)
        p, Sigma_pp, J = softmax_moments(mu, Sigma, order=1)
        u = draw(rng, mu.ravel(), Sigma)
        s = np.concatenate([softmax(u[:3]), softmax(u[3:])])
        i, k = rng.integers(3, size=2)
        mean.mean(s[i], p[0, i])
        cov.cov(s[i], s[i], Sigma_pp[i, i])
        cov.cov(s[i], s[3 + k], Sigma_pp[i, 3 + k])
        cross.cov(u[k], s[i], (Sigma @ J.T)[k, i])
    mean.assert_agrees("softmax mean, order 1")
    cov.assert_agrees("softmax covariance within and between rows")
    cross.assert_agrees("Cov(u, softmax u)")


@pytest.mark.slow("draws 26 million samples")
def test_softmax_mean_of_second_order_where_the_first_is_no_longer_enough() -> None:
    rng = np.random.default_rng(23)
    second, first = Comparison(), Comparison()
    for _ in range(CONFIGURATIONS):
        mu = rng.normal(size=(1, 4))
        Sigma = random_covariance(rng, 4, scale=0.01)
        e = draw(rng, np.zeros(4), Sigma)
        # the average over ±e is free of the linear term, which would drown the curvature
        pair = 0.5 * (softmax(mu.T + e) + softmax(mu.T - e))
        i = rng.integers(4)
        second.mean(pair[i], softmax_moments(mu, Sigma, order=2)[0][0, i])
        first.mean(pair[i], softmax_moments(mu, Sigma, order=1)[0][0, i])
    second.assert_agrees("softmax mean, order 2")
    first.assert_rejects("control: softmax mean of order 1 at the same variance")
