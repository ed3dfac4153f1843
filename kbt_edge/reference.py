"""The mathematics of the head in float64 NumPy, to be read beside docs/method.md.

This is the textbook form: joint covariance matrices over all rows and neurons, a Rauch-Tung-Striebel pass with explicit
gains ``K = cross-covariance · covariance⁻¹``, and plain posterior covariances. The C++ core computes the same numbers
without inverses and in UD factors, so each checks the other. The reference is slow and meant for small heads.

Vectors over a sample are row-major: row ``a``, neuron ``j`` is entry ``a·n + j``. The weights of a layer are
neuron-major: weight ``p`` of neuron ``j`` is entry ``j·(m+1) + p``, bias last.

In order: forward moments (method.md §2), measurement (method.md §3), posterior structures (method.md §5), the head with
its backward pass (method.md §4), and the prior (method.md §1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import NumericsError, RangeError, ShapeError

__all__ = [
    "Layer",
    "Prediction",
    "ReferenceHead",
    "Update",
    "linear_moments",
    "moment_softmax",
    "prior_means",
    "relu_moments",
    "softmax_moments",
]

Array = npt.NDArray[np.float64]

NOISE_FLOOR = 1e-9  #: smallest noise variance
SMOOTHING = 1e-7  #: τ of the multinomial noise, method.md (3.3)
MOST_EXPLAINED = 0.9  #: of the innovation's covariance by the logits, method.md (11.4)
ADAPT_START = 10  #: samples that the first value of a learned noise counts as, method.md (8.2)
NOISE_MEMORY = 100  #: samples that the learned noise remembers
HUBER = 16.0  #: NIS per output that a sample counts as at most, method.md (8.3)
LIKELIHOOD_FLOOR = 1e-30  #: probabilities below this are raised to it before taking the logarithm

# ---------------------------------------------------------------------------------------------------------------------
# Forward moments (method.md §2)
# ---------------------------------------------------------------------------------------------------------------------


class LinearMoments(NamedTuple):
    """Moments of u, and its covariance with the weights and the inputs: method.md (2.1) to (2.3)."""

    mean: Array  # (y·n,)
    cov: Array  # (y·n, y·n)
    cov_wu: Array  # (n·(m+1), y·n)
    cov_zu: Array  # (y·m, y·n)


def linear_moments(W: Array, S: Array, z: Array, C: Array) -> LinearMoments:
    """Moments of u_aj = w_jᵀ [z_a, 1] for independent w and z: method.md (2.1) to (2.3).

    ``W`` (n, m+1) and ``S`` (n·(m+1), n·(m+1)) are the mean and covariance of the weights, ``z`` (y, m) and ``C``
    (y·m, y·m) those of the input rows.
    """
    (n, m1), (y, m) = W.shape, z.shape
    z1 = np.column_stack([z, np.ones(y)])
    A = np.einsum("ap,jk->ajkp", z1, np.eye(n)).reshape(y * n, n * m1)  # u = A w  at the mean of z
    B = np.kron(np.eye(y), W[:, :m])  # u = B z + bias  at the mean of w
    S_jk = S.reshape(n, m1, n, m1)[:, :m, :, :m].transpose(0, 2, 1, 3).reshape(n * n, m * m)
    C_ab = C.reshape(y, m, y, m).transpose(0, 2, 1, 3).reshape(y * y, m * m)
    both = (C_ab @ S_jk.T).reshape(y, y, n, n).transpose(0, 2, 1, 3).reshape(y * n, y * n)  # Σ_pq S_jk[p,q] C_ab[p,q]
    cov_wu, cov_zu = S @ A.T, C @ B.T
    return LinearMoments((z1 @ W.T).ravel(), A @ cov_wu + B @ cov_zu + both, cov_wu, cov_zu)


def _scales(cov: Array) -> Array:
    """Standard deviations, or 1 where the variance is zero. Dividing by them first keeps solves well conditioned."""
    var = np.diag(cov)
    return np.sqrt(np.where(var > 0, var, 1.0))


_erfc: Callable[[Array], Array] = np.vectorize(math.erfc, otypes=[np.float64])


def _standard_relu(alpha: Array) -> tuple[Array, Array, Array, Array]:
    """φ(alpha), Φ(alpha), mean and variance of max(0, x) for x ~ N(alpha, 1), to full relative precision.

    method.md (2.4) and (2.5) cancel in the lower tail. There the integrals I₀ = Φ, I₁ = E z, I₂ = ½ E z², which satisfy
    I_{n-2} = n I_n + |alpha| I_{n-1} with I₋₁ = φ, come from their continued fraction
    I_{n-1} / I_{n-2} = 1 / (|alpha| + n · I_n / I_{n-1}). All of its terms are positive.
    """
    phi = np.exp(-0.5 * alpha**2) / math.sqrt(2 * math.pi)
    Phi, above = 0.5 * _erfc(-alpha / math.sqrt(2)), 0.5 * _erfc(alpha / math.sqrt(2))
    mean = alpha * Phi + phi
    # E z² - (E z)² with Φ² written as Φ - Φ(1-Φ), so that the large alpha² Φ cancels analytically
    var = Phi + alpha**2 * Phi * above + alpha * phi * (above - Phi) - phi**2

    tail = alpha < -2.5
    ratio = np.zeros((3, int(tail.sum())))  # I₀/I₋₁, I₁/I₀, I₂/I₁
    last = np.zeros(ratio.shape[1])
    for n in range(80, 0, -1):
        last = 1.0 / (-alpha[tail] + n * last)
        if n <= 3:
            ratio[n - 1] = last
    I0, I1, I2 = phi[tail] * np.cumprod(ratio, axis=0)
    Phi[tail], mean[tail], var[tail] = I0, I1, 2 * I2 - I1**2
    return phi, Phi, mean, var


def relu_moments(mu: Array, Sigma: Array, order: int = 2) -> tuple[Array, Array, Array]:
    """Mean and covariance of z = max(0, u) for u ~ N(mu, Sigma), and Φ, so that Cov(u, z) = Σ diag(Φ).

    The diagonal is exact. Off it, the series of method.md (2.6) in the correlation rho stops at ``order``. Its n-th
    term is rhoⁿ / (n(n-1)) · c_j c_k with c = sigma · φ(alpha) · h_{n-2}(alpha), alpha = mu / sigma, and the
    normalised Hermite polynomials h_n = He_n / √n!, which do not overflow at high order.
    """
    sigma = np.sqrt(np.maximum(np.diag(Sigma), 0.0))
    random, safe = sigma > 0, _scales(Sigma)
    alpha = np.where(random, np.clip(mu / safe, -40.0, 40.0), 0.0)  # beyond 40, φ is zero and Φ is 0 or 1
    phi, Phi, mean, var = _standard_relu(alpha)
    Phi = np.where(random, Phi, np.where(mu > 0, 1.0, np.where(mu < 0, 0.0, 0.5)))
    # for alpha > 0 the plain form is more accurate: it returns mu exactly once Φ is 1
    mean = np.where(random, np.where(alpha > 0, mu * Phi + sigma * phi, sigma * mean), np.maximum(mu, 0.0))

    rho = np.clip(Sigma / np.outer(safe, safe), -1.0, 1.0)
    cov = Phi[:, None] * Sigma * Phi
    h_previous, h = np.zeros_like(alpha), np.ones_like(alpha)
    for n in range(2, order + 1):
        c = sigma * phi * h  # zero where u is certain
        cov += rho**n / (n * (n - 1)) * np.outer(c, c)
        h_previous, h = h, (alpha * h - math.sqrt(n - 2) * h_previous) / math.sqrt(n - 1)
    np.fill_diagonal(cov, sigma**2 * var)
    return mean, cov, Phi


def _softmax(u: Array) -> Array:
    exp = np.exp(u - u.max(axis=-1, keepdims=True))
    return np.asarray(exp / exp.sum(axis=-1, keepdims=True))


def _block_diagonal(blocks: Array) -> Array:
    """(y, r, c) → (y·r, y·c)."""
    y, r, c = blocks.shape
    return np.asarray(np.einsum("arc,ab->arbc", blocks, np.eye(y)).reshape(y * r, y * c))


def _jacobian(p: Array) -> Array:
    """diag(p) - ppᵀ for every row of p, (y, d_o) → (y·d_o, y·d_o)."""
    return _block_diagonal(p[:, :, None] * np.eye(p.shape[1]) - p[:, :, None] * p[:, None, :])


def softmax_moments(mu: Array, Sigma: Array, order: int = 1) -> tuple[Array, Array, Array]:
    """Mean (y, d_o) of softmax(u) per row, its covariance J Σ Jᵀ, and J, for u with mean ``mu`` (y, d_o).

    method.md (2.7) and (2.8). Order 2 adds method.md (2.9) to the mean, clips it at zero and renormalises.
    """
    y, d_o = mu.shape
    p = _softmax(mu)
    J = _jacobian(p)
    mean = p
    if order == 2:
        block = np.einsum("aiaj->aij", Sigma.reshape(y, d_o, y, d_o))  # each row's own covariance
        var = np.einsum("aii->ai", block)
        block_p = np.einsum("aij,aj->ai", block, p)
        common = 2 * (p * block_p).sum(axis=1) - (p * var).sum(axis=1)  # 2 pᵀΣp - Σ_k p_k Σ_kk
        mean = np.maximum(p + 0.5 * p * (var - 2 * block_p + common[:, None]), 0.0)
        mean = mean / mean.sum(axis=1, keepdims=True)
    return mean, J @ Sigma @ J.T, J


class MomentSoftmax(NamedTuple):
    """The softmax of an uncertain u, method.md §11."""

    mean: Array  # (y, d_o)
    q: Array  # (y, d_o): the mean, smoothed
    H: Array  # (y·d_o, y·d_o): how the mean moves with that of u
    s: Array  # (y,): scale of the innovation's covariance


def moment_softmax(mu: Array, Sigma: Array) -> MomentSoftmax:
    """method.md (11.1), (11.2) and (11.4) for u with mean ``mu`` (y, d_o) and joint covariance ``Sigma``."""
    y, d_o = mu.shape
    var = np.diag(Sigma).reshape(y, d_o)
    kappa = 1 / np.sqrt(1 + math.pi / 8 * np.maximum(var, 0.0))
    mean = _softmax(kappa * mu)
    q = (mean + SMOOTHING) / (1 + d_o * SMOOTHING)
    J = _jacobian(q)
    M = np.einsum("aiaj->aij", (kappa.ravel()[:, None] * Sigma * kappa.ravel()).reshape(y, d_o, y, d_o))
    bound = np.einsum("aij,aj->ai", np.abs(M), q).max(axis=1)  # Gershgorin's, of diag(q) M
    return MomentSoftmax(mean, q, J * kappa.ravel(), np.maximum(1.0, bound / MOST_EXPLAINED))


# ---------------------------------------------------------------------------------------------------------------------
# Linear algebra of covariances
# ---------------------------------------------------------------------------------------------------------------------


def _solve(cov: Array, rhs: Array) -> Array:
    """cov⁻¹ rhs for a positive definite covariance and a vector or matrix on the right."""
    s = _scales(cov)
    columns = rhs.reshape(len(rhs), -1)
    return (np.linalg.solve(cov / np.outer(s, s), columns / s[:, None]) / s[:, None]).reshape(rhs.shape)


def _gain(cross: Array, cov: Array) -> Array:
    """The RTS gain cross · cov⁺. The pseudo-inverse drops directions without variance (dead units, repeated rows)."""
    s = _scales(cov)
    value, vector = np.linalg.eigh(cov / np.outer(s, s))
    keep = value > len(s) * np.finfo(np.float64).eps * value[-1]
    return np.asarray((cross / s) @ (vector[:, keep] / value[keep]) @ vector[:, keep].T / s)


def _ud(S: Array) -> tuple[Array, Array]:
    """S = U diag(D) Uᵀ with U unit upper triangular, for a positive semidefinite S."""
    rest, U, D = S.copy(), np.eye(len(S)), np.zeros(len(S))
    for j in range(len(S) - 1, -1, -1):
        D[j] = max(rest[j, j], 0.0)
        if D[j] > 0:
            U[:j, j] = rest[:j, j] / D[j]
            rest[:j, :j] -= D[j] * np.outer(U[:j, j], U[:j, j])
    return U, D


# ---------------------------------------------------------------------------------------------------------------------
# Measurement (method.md §3)
# ---------------------------------------------------------------------------------------------------------------------


class Innovation(NamedTuple):
    """e = y - prediction, for a prediction H u with noise R: cov = H Σ_u Hᵀ + R, cross = Cov(u, H u).

    A variable with gain G changes by μ⁺ - μ = G e and Σ⁺ - Σ = G (after - cov) Gᵀ. ``after`` is the covariance of the
    innovation after the update: zero for "fuse", method.md (3.1), Σ_data for "replace", method.md (3.5).
    """

    e: Array
    cov: Array
    cross: Array
    noise: Array
    after: Array | float = 0.0

    @property
    def gain(self) -> Array:
        """The Kalman gain of u, Σ_ue Σ_ee⁻¹."""
        return np.asarray(_solve(self.cov, self.cross.T).T)

    @property
    def nis(self) -> float:
        """Normalised innovation squared, eᵀ V e."""
        return float(self.e @ _solve(self.cov, self.e))

    @property
    def gaussian_log_likelihood(self) -> float:
        logdet = float(np.linalg.slogdet(self.cov)[1])
        return -0.5 * (self.nis + logdet + len(self.e) * math.log(2 * math.pi))


def _innovation(e: Array, Sigma: Array, H: Array, R: Array, after: Array | float = 0.0) -> Innovation:
    cross = Sigma @ H.T
    return Innovation(e, H @ cross + R, cross, R, after)


def _multinomial_innovation(y: Array, mean: Array, p: Array, Sigma: Array) -> Innovation:
    """One draw from each row's class probabilities: linear map and noise are both J = diag(q) - qqᵀ.

    J is singular because the probabilities of a row sum to one. Dropping one class per row removes the singularity and
    loses nothing; dropping the likeliest keeps the rest well conditioned. The smoothing bounds the update for classes
    of probability near zero. The core solves the same problem through a root of J, method.md (3.3).
    """
    d_o = p.shape[1]
    q = (p + SMOOTHING) / (1 + d_o * SMOOTHING)
    keep = (np.arange(d_o) != q.argmax(axis=1)[:, None]).ravel()
    J = _jacobian(q)
    return _innovation((y - mean).ravel()[keep], Sigma, J[keep], J[np.ix_(keep, keep)])


def _moment_innovation(y: Array, moments: MomentSoftmax, Sigma: Array) -> Innovation:
    """The covariance of each row's innovation is s J, whatever u contributes to it: method.md (11.3).

    What u does not contribute is the noise, and the rest is a Kalman update. One class per row is dropped, as above.
    """
    d_o, q, H = y.shape[1], moments.q, moments.H
    explained = (H @ Sigma @ H.T).reshape(len(y), d_o, len(y), d_o)
    own = _block_diagonal(np.einsum("aiaj->aij", explained))
    noise = np.repeat(moments.s, d_o)[:, None] * _jacobian(q) - own
    keep = (np.arange(d_o) != q.argmax(axis=1)[:, None]).ravel()
    return _innovation((y - moments.mean).ravel()[keep], Sigma, H[keep], noise[np.ix_(keep, keep)])


# ---------------------------------------------------------------------------------------------------------------------
# Layers and posterior structures (method.md §5)
# ---------------------------------------------------------------------------------------------------------------------

Covariance = Literal["full", "neuron", "diagonal"]


class Layer:
    """The Gaussian weights of one linear layer.

    ``mean`` is (n, m+1), bias last. ``cov`` is the part that the structure keeps: (n·(m+1), n·(m+1)) for ``full``,
    (n, m+1, m+1) for ``neuron``, (n, m+1) for ``diagonal``. A ``unit`` is the variance per neuron that ``prior_var`` is
    a multiple of. With ``full`` it is the same for all neurons.
    """

    def __init__(self, mean: Array, prior_var: float, structure: Covariance) -> None:
        self.mean, self.prior_var, self.structure = mean.copy(), prior_var, structure
        self.set_prior(np.ones(len(mean)))

    def set_prior(self, unit: Array) -> None:
        """Independent weights with the variance that they have before any data."""
        self.cov = self.kept(self.prior_var * np.diag(np.repeat(unit, self.mean.shape[1])))

    def dense(self) -> Array:
        """The joint covariance of all weights, zero outside the structure."""
        if self.structure == "full":
            return self.cov
        return _block_diagonal(self.cov) if self.structure == "neuron" else np.diag(self.cov.ravel())

    def kept(self, dense: Array) -> Array:
        """The part of a joint covariance that the structure keeps."""
        n, m1 = self.mean.shape
        if self.structure == "full":
            return np.asarray(0.5 * (dense + dense.T))
        if self.structure == "neuron":
            block = np.einsum("jpjq->jpq", dense.reshape(n, m1, n, m1))
            return np.asarray(0.5 * (block + block.transpose(0, 2, 1)))
        return np.array(np.diag(dense).reshape(n, m1))

    def update(self, gain: Array, innovation: Innovation) -> None:
        """Updates the weights, method.md (4.2), and drops what the structure does not keep."""
        self.mean = self.mean + (gain @ innovation.e).reshape(self.mean.shape)
        self.cov = self.kept(self.dense() + gain @ (innovation.after - innovation.cov) @ gain.T)

    def map_blocks(self, function: Callable[[Array, int], Array]) -> None:
        """Applies ``function(matrix, neuron)`` to every covariance matrix that the structure holds."""
        if self.structure == "neuron":
            self.cov = np.stack([function(block, j) for j, block in enumerate(self.cov)])
        elif self.structure == "full":
            self.cov = function(self.cov, 0)
        else:
            rows = [[function(np.array([[v]]), j)[0, 0] for v in row] for j, row in enumerate(self.cov)]
            self.cov = np.array(rows)

    def scale(self, ratio: Array) -> None:
        """Multiplies the covariance of every neuron's weights."""
        self.map_blocks(lambda S, j: np.asarray(ratio[j] * S))

    def let_go(self, forgetting: float, step: float, unit: Array) -> None:
        """Forgetting, method.md (5.7), and a random walk, (9.3). Neither raises D of S = U D Uᵀ above the prior."""

        def raised(S: Array, j: int) -> Array:
            U, D = _ud(S)
            return np.asarray((U * np.minimum(D / forgetting + step, np.maximum(D, self.prior_var * unit[j]))) @ U.T)

        self.map_blocks(raised)

    def clip(self) -> int:
        """Sets negative eigenvalues to zero and returns how many were negative beyond rounding."""
        clipped = 0

        def clip(S: Array, _: int) -> Array:
            nonlocal clipped
            value, vector = np.linalg.eigh(S)
            clipped += int((value < -len(S) * np.finfo(np.float64).eps * np.abs(value).max()).sum())
            return S if value[0] >= 0 else np.asarray((vector * np.maximum(value, 0.0)) @ vector.T)

        self.map_blocks(clip)
        return clipped


# ---------------------------------------------------------------------------------------------------------------------
# The head
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """``mean`` and ``total_var`` are shaped like the target; ``cov`` is joint and epistemic, over (row, output)."""

    mean: Array
    cov: Array
    total_var: Array

    @property
    def var(self) -> Array:
        return np.diag(self.cov).reshape(self.mean.shape)


@dataclass(frozen=True)
class Update:
    """``status`` is "ok" or "gated"; ``nis`` the normalised innovation squared."""

    status: Literal["ok", "gated"]
    nis: float
    log_likelihood: float


class Forward(NamedTuple):
    """One forward pass: linear moments per layer, then mean, covariance and Φ of each ReLU between them."""

    linear: list[LinearMoments]
    relu: list[tuple[Array, Array, Array]]


class ReferenceHead:
    """The Bayesian head of docs/method.md with the settings of ``kbt_edge.Head``.

    One filter: ``drift`` is a number, and ``reference_bank`` has several. ``means`` is one (n, m+1) array per linear
    layer. ``in_units_of_noise`` makes the prior a ratio to the noise and steps robust, method.md §8; None: where the
    noise is learned. ``backward="diagonal"`` is the paper's Σ_uz, for the ablation. It makes covariances indefinite
    (method.md §4); ``clipped`` counts the negative eigenvalues that were set to zero.
    """

    def __init__(
        self,
        means: Sequence[npt.ArrayLike],
        *,
        prior_var: float | Sequence[float],
        noise_var: npt.ArrayLike = 1e-2,
        output: Literal["gaussian", "softmax"] = "gaussian",
        covariance: Covariance = "neuron",
        rule: Literal["fuse", "replace"] = "fuse",
        relu_order: int = 2,
        softmax_order: int = 0,
        noise: Literal["constant", "adaptive", "multinomial"] = "constant",
        input_var: float = 0.0,
        forgetting: float = 1.0,
        gate: float | None = None,
        drift: float = 0.0,
        in_units_of_noise: bool | None = None,
        backward: Literal["exact", "diagonal"] = "exact",
    ) -> None:
        _choice("output", output, ("gaussian", "softmax"))
        _choice("covariance", covariance, ("full", "neuron", "diagonal"))
        _choice("rule", rule, ("fuse", "replace"))
        _choice("noise", noise, ("constant", "adaptive", "multinomial"))
        _choice("backward", backward, ("exact", "diagonal"))
        _require(output == "gaussian" or rule == "fuse", "rule='replace' diverges for output='softmax'; use 'fuse'")
        _require(
            noise == "constant" or (rule == "fuse" and (output == "gaussian") == (noise == "adaptive")),
            "noise='adaptive' belongs to output='gaussian' and noise='multinomial' to 'softmax', both with rule='fuse';"
            f" got noise={noise!r}, output={output!r}, rule={rule!r}",
        )
        _require(relu_order >= 2, f"relu_order must be at least 2, got {relu_order}")
        _require(softmax_order in (0, 1, 2), f"softmax_order must be 0, 1 or 2, got {softmax_order}")
        _require(0 < forgetting <= 1, f"forgetting must lie in (0, 1], got {forgetting}")
        _require(input_var >= 0, f"input_var must not be negative, got {input_var}")
        _require(drift >= 0, f"drift must not be negative, got {drift}")
        _require(gate is None or gate > 0, f"gate must be positive or None, got {gate}")

        weights = [_finite("means", mean) for mean in means]
        if not weights or any(W.ndim != 2 or W.shape[1] < 2 for W in weights):
            raise ShapeError(f"means: expected one (n, m+1) array per layer, got shapes {[W.shape for W in weights]}")
        if any(W.shape[1] != below.shape[0] + 1 for below, W in pairwise(weights)):
            raise ShapeError(f"means: each layer must take the layer below, got shapes {[W.shape for W in weights]}")
        prior = _finite("prior_var", prior_var)
        if prior.shape not in ((), (len(weights),)):
            raise ShapeError(f"prior_var: expected one number or {len(weights)}, got shape {prior.shape}")
        _require(bool((prior >= 0).all()), f"prior_var must not be negative, got {prior_var}")

        self.d, self.d_o = weights[0].shape[1] - 1, weights[-1].shape[0]
        self.layers = [
            Layer(W, float(v), covariance) for W, v in zip(weights, np.broadcast_to(prior, len(weights)), strict=True)
        ]
        self.output, self.rule, self.noise, self.backward = output, rule, noise, backward
        self.relu_order, self.softmax_order = relu_order, softmax_order
        self.input_var, self.forgetting, self.gate, self.drift = float(input_var), float(forgetting), gate, drift
        self.in_units_of_noise = noise == "adaptive" if in_units_of_noise is None else in_units_of_noise
        self.noise_var = self._noise(noise_var)
        _require(noise != "adaptive" or self.noise_var.ndim == 1, "noise='adaptive' needs noise_var per output")
        self.samples = 0
        self.clipped = 0
        self.set_prior()

    def set_prior(self, relative: float = 1.0) -> None:
        """Covariances before any data, ``relative`` times as wide in the last layer."""
        for i, layer in enumerate(self.layers):
            layer.set_prior(self._unit(i) * (relative if i == len(self.layers) - 1 else 1.0))

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """The predictive distribution for h, (d,) or (rows, d)."""
        rows = self._rows(h)
        u = self._forward(rows).linear[-1]
        mean, cov = self._output(u)
        var = np.diag(cov).reshape(mean.shape)
        if self.rule == "replace":
            total = var
        elif self.noise == "multinomial":
            p = _softmax(u.mean.reshape(mean.shape))
            total = var + p * (1 - p)
            if self.softmax_order == 0:  # all there is: the target is zero or one
                q = moment_softmax(u.mean.reshape(mean.shape), u.cov).q
                total = q * (1 - q)
        else:
            total = var + self._variances()
        shape = mean.shape if np.ndim(h) == 2 else (self.d_o,)
        return Prediction(mean.reshape(shape), cov, total.reshape(shape))

    def update(self, h: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learns the target y of h. ``noise_var`` replaces R for this sample.

        All rows form one joint update; where outputs are apart, rows are learned one after another (method.md §10).
        """
        rows = self._rows(h)
        target = self._target(y, h)
        _require(noise_var is None or self.noise != "multinomial", "noise_var has no meaning for noise='multinomial'")
        R = self.noise_var if noise_var is None else self._noise(noise_var)

        forward = self._forward(rows)
        innovation, log_likelihood = self._measure(forward.linear[-1], target, R)
        nis = innovation.nis
        one_by_one = self._apart and len(rows) > 1
        if one_by_one and self.output == "softmax":
            nis = sum(self._measure(self._forward(row).linear[-1], t, R)[0].nis for row, t in _pairs(rows, target))
        if self.gate is not None and nis > self.gate:
            return Update("gated", nis, log_likelihood)

        weight = 1.0
        if self.in_units_of_noise and nis > HUBER * target.size:  # method.md (8.3)
            weight = HUBER * target.size / nis
            innovation, _ = self._measure(forward.linear[-1], target, R / weight)

        if one_by_one:
            for row, t in _pairs(rows, target):
                now = self._forward(row)
                self._learn(now, self._measure(now.linear[-1], t, R / weight)[0])
        else:
            self._learn(forward, innovation)
        if self.noise == "adaptive" and noise_var is None:
            self._learn_noise(forward.linear[-1], target, weight)
        if self.forgetting < 1 or self.drift > 0:
            self._let_go(rows, forward)
        self.samples += 1
        return Update("ok", nis, log_likelihood)

    @property
    def _apart(self) -> bool:
        """Whether nothing correlates the outputs of a row."""
        if len(self.layers) > 1 or self.rule != "fuse" or self.input_var > 0:
            return False
        if self.layers[0].structure == "full" and self.d_o > 1:
            return False
        if self.output == "softmax":
            return self.noise == "multinomial" and self.softmax_order == 0
        return self.noise_var.ndim == 1

    def _learn(self, forward: Forward, innovation: Innovation) -> None:
        for layer, gain in zip(self.layers, self._backward(forward, innovation.gain), strict=True):
            layer.update(gain, innovation)
            if self.backward == "diagonal":
                self.clipped += layer.clip()

    def _learn_noise(self, u: LinearMoments, y: Array, weight: float) -> None:
        """method.md (8.2), averaged over rows. What is in units of the noise goes with it."""
        R, e, var = self.noise_var, y - u.mean.reshape(y.shape), np.diag(u.cov).reshape(y.shape)
        found = (weight * e**2 * R / (R + var)).mean(axis=0)
        rate = 1 / min(ADAPT_START + self.samples, NOISE_MEMORY)
        self.noise_var = np.maximum(R + rate * (found - R), NOISE_FLOOR)
        for i, layer in enumerate(self.layers):
            layer.scale(self._per_neuron(i, self.noise_var) / self._per_neuron(i, R))

    def _let_go(self, h: Array, forward: Forward) -> None:
        """A walk moves the outputs of every layer by ``drift`` times the noise per sample, at this input."""
        noise = 1.0 if self.output == "softmax" else float(self._variances().mean())
        for i, layer in enumerate(self.layers):
            z = h if i == 0 else forward.relu[i - 1][0].reshape(len(h), -1)
            size = float((z**2).sum()) / len(h) + 1  # of [z, 1]
            layer.let_go(self.forgetting, self.drift * noise / size, self._unit(i))

    def _variances(self) -> Array:
        return self.noise_var if self.noise_var.ndim == 1 else np.diag(self.noise_var)

    def _unit(self, i: int) -> Array:
        """What the prior of layer i is a multiple of, per neuron."""
        return self._per_neuron(i, self._variances() if self.in_units_of_noise else np.ones(self.d_o))

    def _per_neuron(self, i: int, of_outputs: Array) -> Array:
        """Outputs have their own neurons in the last layer, and share the layers below and a joint covariance."""
        layer = self.layers[i]
        own = i == len(self.layers) - 1 and layer.structure != "full"
        return of_outputs if own else np.full(len(layer.mean), of_outputs.mean())

    def _forward(self, h: Array) -> Forward:
        """The moments of method.md §2 through all layers, all rows jointly."""
        z, C = h, self.input_var * np.eye(h.size)
        linear, relu = [], []
        for i, layer in enumerate(self.layers):
            linear.append(linear_moments(layer.mean, layer.dense(), z, C))
            if i + 1 < len(self.layers):
                relu.append(relu_moments(linear[-1].mean, linear[-1].cov, self.relu_order))
                z, C = relu[-1][0].reshape(len(h), -1), relu[-1][1]
        return Forward(linear, relu)

    def _output(self, u: LinearMoments) -> tuple[Array, Array]:
        mean = u.mean.reshape(-1, self.d_o)
        if self.output == "gaussian":
            return mean, u.cov
        if self.softmax_order > 0:
            return softmax_moments(mean, u.cov, self.softmax_order)[:2]
        moments = moment_softmax(mean, u.cov)
        H = moments.H
        if self.noise == "multinomial":
            H = H / np.sqrt(np.repeat(moments.s, self.d_o))[:, None]  # method.md (11.5)
        return moments.mean, H @ u.cov @ H.T

    def _measure(self, u: LinearMoments, y: Array, R: Array) -> tuple[Innovation, float]:
        """The innovation (method.md §3) and the log likelihood of y."""
        mu, identity = u.mean.reshape(y.shape), np.eye(y.size)
        R = _block_diagonal(np.broadcast_to(R if R.ndim == 2 else np.diag(R), (len(y), self.d_o, self.d_o)))
        if self.output == "gaussian":
            e = (y - mu).ravel()
            if self.rule == "fuse":
                innovation = _innovation(e, u.cov, identity, R)
            else:
                innovation = _innovation(e, u.cov, identity, NOISE_FLOOR * identity, after=R)
            return innovation, innovation.gaussian_log_likelihood
        if self.softmax_order == 0:
            moments = moment_softmax(mu, u.cov)
            mean, J = moments.mean, moments.H
        else:
            mean, _, J = softmax_moments(mu, u.cov, self.softmax_order)
        log_likelihood = float((y * np.log(np.maximum(mean, LIKELIHOOD_FLOOR))).sum())
        if self.noise == "multinomial" and self.softmax_order == 0:
            return _moment_innovation(y, moments, u.cov), log_likelihood
        if self.noise == "multinomial":
            return _multinomial_innovation(y, mean, _softmax(mu), u.cov), log_likelihood
        return _innovation((y - mean).ravel(), u.cov, J, R), log_likelihood

    def _backward(self, forward: Forward, G_u: Array) -> list[Array]:
        """The backward pass of method.md §4 as an explicit RTS recursion, from the gain of the last u to all weights.

        RTS moves a variable by K = Σ_xu Σ_uu⁻¹ times the move of its neighbour u, so gains on the innovation chain:
        G_x = K G_u. Carrying G instead of the moments keeps K · Kᵀ from amplifying rounding in u twice.
        """
        gains = []
        for i in range(len(self.layers) - 1, -1, -1):
            _, cov_u, cov_wu, cov_zu = forward.linear[i]
            gains.append(_gain(cov_wu, cov_u) @ G_u)
            if i > 0:
                G_z = _gain(cov_zu, cov_u) @ G_u
                _, cov_z, Phi = forward.relu[i - 1]
                cov_uz = forward.linear[i - 1].cov * Phi  # Stein's lemma, method.md (4.1)
                if self.backward == "diagonal":
                    cov_uz = np.diag(np.diag(cov_uz))
                G_u = _gain(cov_uz, cov_z) @ G_z
        return gains[::-1]

    def _rows(self, h: npt.ArrayLike) -> Array:
        rows = _finite("h", h)
        if rows.ndim not in (1, 2) or rows.shape[-1] != self.d or rows.size == 0:
            raise ShapeError(f"h: expected ({self.d},) or (rows, {self.d}), got {rows.shape}")
        return np.atleast_2d(rows)

    def _target(self, y: npt.ArrayLike, h: npt.ArrayLike) -> Array:
        """y as (rows, d_o); class numbers become one-hot rows."""
        rows = np.shape(h)[:-1]
        labels = np.asarray(y)
        if self.output == "softmax" and labels.shape == rows and np.issubdtype(labels.dtype, np.integer):
            known = (labels >= 0) & (labels < self.d_o)
            _require(bool(known.all()), f"y: expected classes 0 to {self.d_o - 1}, got {y!r}")
            return np.asarray(np.eye(self.d_o)[np.atleast_1d(labels)])
        target = _finite("y", y)
        if target.shape != (*rows, self.d_o):
            raise ShapeError(f"y: expected shape {(*rows, self.d_o)} beside h of {np.shape(h)}, got {target.shape}")
        return np.atleast_2d(target)

    def _noise(self, noise_var: npt.ArrayLike) -> Array:
        """R per output (d_o,) or as a matrix (d_o, d_o), with variances raised to the floor."""
        R = _finite("noise_var", noise_var)
        if R.shape not in ((), (self.d_o,), (self.d_o, self.d_o)):
            raise ShapeError(f"noise_var: expected a number, ({self.d_o},) or ({self.d_o}, {self.d_o}), got {R.shape}")
        if R.ndim < 2:
            _require(bool((R >= 0).all()), f"noise_var must not be negative, got {noise_var!r}")
            return np.maximum(np.broadcast_to(R, (self.d_o,)), NOISE_FLOOR)
        _require(
            bool(np.allclose(R, R.T) and np.linalg.eigvalsh(R)[0] >= -1e-12 * np.abs(R).max()),
            f"noise_var must be symmetric and positive semidefinite, got {noise_var!r}",
        )
        return np.where(np.eye(self.d_o, dtype=bool), np.maximum(R, NOISE_FLOOR), R)


# ---------------------------------------------------------------------------------------------------------------------
# The prior from the readout (method.md §1)
# ---------------------------------------------------------------------------------------------------------------------


def prior_means(
    weight: npt.ArrayLike, bias: npt.ArrayLike, hidden: Sequence[int] = (), spare_seed: int = 0
) -> list[Array]:
    """Layer means that reproduce the readout ``weight`` (d_o, d), ``bias`` (d_o,) through ReLU layers of width ≥ 2d.

    method.md (1.2): a hidden layer splits h into (+h, -h, spare), the next one merges and splits again, the last one
    merges and reads out. Spare neurons have random input weights and biases, and outgoing weights of zero.
    """
    W, b = _finite("weight", weight), _finite("bias", bias)
    if W.ndim != 2 or b.shape != W.shape[:1]:
        raise ShapeError(f"weight, bias: expected (d_o, d) and (d_o,), got {W.shape} and {b.shape}")
    d = W.shape[1]
    _require(all(n >= 2 * d for n in hidden), f"hidden widths must be at least 2d = {2 * d}, got {tuple(hidden)}")
    rng = np.random.default_rng(spare_seed)
    merge = np.eye(d)  # recovers h from the layer below
    means = []
    for n in hidden:
        spare = rng.normal(size=(n - 2 * d, d + 1)) / math.sqrt(d)
        split = np.vstack([np.eye(d, d + 1), -np.eye(d, d + 1), spare])
        means.append(np.column_stack([split[:, :d] @ merge, split[:, d]]))
        merge = np.hstack([np.eye(d), -np.eye(d), np.zeros((d, n - 2 * d))])
    return [*means, np.column_stack([W @ merge, b])]


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def _pairs(rows: Array, target: Array) -> list[tuple[Array, Array]]:
    """Every row with its target, as batches of one."""
    return [(rows[a : a + 1], target[a : a + 1]) for a in range(len(rows))]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RangeError(message)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name}: expected one of {allowed}, got {value!r}")


def _finite(name: str, value: npt.ArrayLike) -> Array:
    array = np.asarray(value, dtype=np.float64)
    if not np.isfinite(array).all():
        raise NumericsError(f"{name}: expected finite numbers, got NaN or infinity")
    return array
