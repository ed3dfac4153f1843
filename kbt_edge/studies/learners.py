"""KBT as the study runs it: the shipped head, its variants, and the paper's own setting from ``reference``.

They take one (state, force) pair at a time like the baselines, and beside a policy they offer what those cannot: the
variance of every force they predict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kbt_edge.head import Head
from kbt_edge.reference import ReferenceHead, prior_means
from kbt_edge.studies.baselines import hidden, linear_policies
from kbt_edge.studies.cartpole import FORCE_SCALE, Policies

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = ["Kbt", "Moments", "Paper", "TwoLayers", "readout", "two_layer_policies", "two_layers"]

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """Predicted forces at N states, in newtons."""

    mean: Array  # (N,)
    epistemic: Array  # (N,) variance of the model
    total: Array  # (N,) variance of an observation


def readout(network: DecisionTransformer) -> tuple[Array, Array]:
    """W_O (1, d) and its bias (1,)."""
    weight, bias = network.readout.weight.detach().numpy(), network.readout.bias.detach().numpy()
    return weight.astype(np.float64), bias.astype(np.float64)


class Kbt:
    """A head on the rows of the frozen trunk. ``settings`` are those of ``Head``; without any, its defaults:
    a watchful head. The paper's setting needs ``drift=0.0``.

    The trunk runs in torch here, many states at a time, as a study asks for a hundred thousand forces per sample
    learned. Computation time is measured on the ``Model`` of the bundle (``repro.computation_time``), not here.
    """

    def __init__(self, network: DecisionTransformer, **settings: Any) -> None:
        self.network = network
        self.head = Head(*readout(network), **settings)
        self.seconds = 0.0
        self.samples = 0

    def observe(self, state: Array, force: float) -> None:
        """One update of the head."""
        h = hidden(self.network, state).astype(np.float32)
        started = time.process_time()
        self.head.update(h, [force / FORCE_SCALE])
        self.seconds += time.process_time() - started
        self.samples += 1

    def policy(self, states: Array) -> Array:
        """Forces (N,) at states (N, 4)."""
        rows = hidden(self.network, states).astype(np.float32)
        return FORCE_SCALE * np.array([self.head.predict(h).mean[0] for h in rows], np.float64)

    def snapshot(self) -> Array | TwoLayers:
        """What the mean of a force depends on."""
        layers = self.head.layers
        if len(layers) == 1:
            return np.array(layers[0].mean[0], np.float64)
        return two_layers(layers[0].mean, layers[0].cov, layers[1].mean)

    def policies(self, snapshots: Sequence[Any]) -> Policies:
        """M snapshots as policies that run together."""
        run = linear_policies if isinstance(snapshots[0], np.ndarray) else two_layer_policies
        return run(self.network, snapshots)

    def moments(self, states: Array) -> Moments:
        """Forces at states (N, 4) with their variances."""
        seen = [self.head.predict(h) for h in hidden(self.network, states).astype(np.float32)]
        columns = np.array([(p.mean[0], p.var[0], p.total_var[0]) for p in seen], np.float64).T
        return Moments(FORCE_SCALE * columns[0], FORCE_SCALE**2 * columns[1], FORCE_SCALE**2 * columns[2])


class Paper:
    """The paper's setting: two layers with one ε, all correlations, ``replace``, and a diagonal Σ_uz (method.md §4).

    It exists in ``reference`` alone.
    """

    def __init__(self, network: DecisionTransformer, prior_var: float, noise_var: float = 0.0) -> None:
        self.network = network
        weight, bias = readout(network)
        self.head = ReferenceHead(
            prior_means(weight, bias, (2 * weight.shape[1],)),
            prior_var=prior_var,
            noise_var=noise_var / FORCE_SCALE**2,
            covariance="full",
            rule="replace",
            backward="diagonal",
        )
        self.seconds = 0.0
        self.samples = 0

    def observe(self, state: Array, force: float) -> None:
        """One update of the head."""
        h = hidden(self.network, state)
        started = time.process_time()
        self.head.update(h, [force / FORCE_SCALE])
        self.seconds += time.process_time() - started
        self.samples += 1

    def policy(self, states: Array) -> Array:
        """Forces (N,) at states (N, 4)."""
        forces: Array = self.policies([self.snapshot()])(states[None])[0]
        return forces

    def snapshot(self) -> TwoLayers:
        """What the mean of a force depends on."""
        first, last = self.head.layers
        return two_layers(first.mean, first.dense(), last.mean)

    def policies(self, snapshots: Sequence[TwoLayers]) -> Policies:
        """M snapshots as policies that run together."""
        return two_layer_policies(self.network, snapshots)

    def moments(self, states: Array) -> Moments:
        """Forces at states (N, 4) with their variances: slow."""
        seen = [self.head.predict(h) for h in hidden(self.network, states)]
        columns = np.array([(p.mean[0], p.var[0], p.total_var[0]) for p in seen]).T
        return Moments(FORCE_SCALE * columns[0], FORCE_SCALE**2 * columns[1], FORCE_SCALE**2 * columns[2])


class TwoLayers(NamedTuple):
    """What the mean of a head of two layers depends on."""

    first: Array  # (n, d + 1) means
    roots: Array  # (n, d + 1, d + 1) a root of the covariance of each neuron's weights
    last: Array  # (n + 1,) means


def two_layers(first: Array, cov: Array, last: Array) -> TwoLayers:
    """From the means of the layers and the covariance of the first: full, or one block per neuron."""
    n, m = first.shape
    blocks = np.einsum("jpjq->jpq", np.asarray(cov, np.float64).reshape(n, m, n, m)) if cov.ndim == 2 else cov
    value, vector = np.linalg.eigh(blocks)
    roots = vector * np.sqrt(np.maximum(value, 0.0))[:, None, :]
    return TwoLayers(first.astype(np.float64), roots, last[0].astype(np.float64))


def two_layer_policies(network: DecisionTransformer, snapshots: Sequence[TwoLayers]) -> Policies:
    """The mean forces of M heads of two layers: E max(0, u) from the mean and the variance of each u (method.md §2).

    The heads can do this themselves, one state at a time, together with the variance of the force.
    """
    from scipy.special import ndtr

    first, roots, last = (np.stack(parts) for parts in zip(*snapshots, strict=True))
    count, n, m = first.shape
    columns = roots.transpose(0, 2, 1, 3).reshape(count, m, n * m)

    def policies(states: Array) -> Array:
        rows = np.concatenate([hidden(network, states), np.ones((*states.shape[:-1], 1))], axis=-1)
        mu = rows @ first.transpose(0, 2, 1)
        sigma = np.linalg.norm((rows @ columns).reshape(*mu.shape, m), axis=-1) + 1e-30
        alpha = mu / sigma
        z = mu * ndtr(alpha) + sigma * np.exp(-0.5 * alpha**2) / math.sqrt(2.0 * math.pi)
        forces: Array = np.einsum("mnj,mj->mn", z, last[:, :-1]) + last[:, -1:]
        return FORCE_SCALE * forces

    return policies
