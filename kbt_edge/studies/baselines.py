"""The baselines (method.md §7): retraining from a memory, retraining the readout, least squares on h, and no learning.

Every learner sees one (state, force) pair at a time, in metres, radians and newtons, and offers its policy whenever it
is asked. It starts from a pre-trained ``DecisionTransformer``, which it copies. torch is imported when first needed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kbt_edge.errors import RangeError
from kbt_edge.studies.cartpole import (
    FORCE_SCALE,
    STATE_BOX,
    Policies,
    Policy,
    force_rmse,
    sample_pairs,
    sample_states,
)

if TYPE_CHECKING:
    import torch

    from kbt_edge.networks import DecisionTransformer

__all__ = [
    "CHOICE_SEEDS",
    "METHODS",
    "Choice",
    "Frozen",
    "Learner",
    "Method",
    "RecursiveLeastSquares",
    "Retraining",
    "choose",
    "hidden",
    "linear_policies",
    "load_network",
    "network_policies",
    "network_policy",
    "scaled_forces",
    "scaled_states",
]

Array = NDArray[np.float64]
NETWORK_FILE: Final = Path(__file__).with_name("cartpole.npz")
_EXACT = 1e-12  # N; a policy with a smaller RMSE is the LQR itself, and scores as this


class Learner(Protocol):
    """The interface of a method in a study."""

    seconds: float  # of computation spent in observe so far; other processes do not count
    samples: int  # observed so far

    def observe(self, state: Array, force: float) -> None:
        """Learn one sample: a state (4,) and its force."""

    def policy(self, states: Array) -> Array:
        """Forces (N,) at states (N, 4)."""

    def snapshot(self) -> Any:
        """The policy as it is now, for ``policies``."""

    def policies(self, snapshots: Sequence[Any]) -> Policies:
        """M snapshots as policies that run together, many times faster than one after the other."""


def load_network() -> DecisionTransformer:
    """The network that the bundle "cartpole" was made from (tools/pretrain_cartpole.py), to be retrained."""
    import torch

    from kbt_edge.networks import DecisionTransformer

    model = DecisionTransformer()
    with np.load(NETWORK_FILE, allow_pickle=False) as arrays:
        model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    return model.eval()


def scaled_states(states: Array) -> torch.Tensor:
    """States (..., 4) as the network takes them: float32 in ±1 over ``STATE_BOX``, with a context axis, (..., 1, 4)."""
    import torch

    return torch.from_numpy(np.asarray(states / STATE_BOX, dtype=np.float32)).unsqueeze(-2)


def scaled_forces(forces: Array) -> torch.Tensor:
    """Forces (...) as the network gives them: float32 in units of ``FORCE_SCALE``, with an action axis, (..., 1)."""
    import torch

    return torch.from_numpy(np.asarray(forces / FORCE_SCALE, dtype=np.float32)).unsqueeze(-1)


def hidden(model: DecisionTransformer, states: Array) -> Array:
    """The trunk's rows h (..., d) at states (..., 4)."""
    import torch

    with torch.no_grad():
        inputs = scaled_states(states)
        rows: Array = model.trunk(inputs.reshape(-1, 1, inputs.shape[-1])).numpy().astype(np.float64)
    return rows.reshape(*states.shape[:-1], -1)


def network_policy(model: DecisionTransformer) -> Policy:
    """The policy of a network, in newtons."""
    import torch

    def policy(states: Array) -> Array:
        with torch.no_grad():
            forces: Array = model(scaled_states(states)).squeeze(-1).numpy().astype(np.float64)
        return FORCE_SCALE * forces

    return policy


def network_policies(model: DecisionTransformer, weights: Sequence[dict[str, torch.Tensor]]) -> Policies:
    """The policies of one network with M sets of weights."""
    import torch
    from torch.func import functional_call, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    stacked = {name: torch.stack([each[name] for each in weights]) for name in weights[0]}
    run = vmap(lambda parameters, inputs: functional_call(model, parameters, (inputs,)))

    def policies(states: Array) -> Array:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # the fused kernels take no batch of weights
        try:
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                forces: Array = run(stacked, scaled_states(states)).squeeze(-1).numpy().astype(np.float64)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        return FORCE_SCALE * forces

    return policies


def linear_policies(model: DecisionTransformer, readouts: Sequence[Array]) -> Policies:
    """The policies of M readouts (d + 1,), bias last, on the rows of one frozen trunk."""
    weights = np.stack(readouts)

    def policies(states: Array) -> Array:
        forces: Array = np.einsum("mnd,md->mn", hidden(model, states), weights[:, :-1]) + weights[:, -1:]
        return FORCE_SCALE * forces

    return policies


class Frozen:
    """The pre-trained network, unchanged."""

    def __init__(self, model: DecisionTransformer) -> None:
        self.policy = network_policy(copy.deepcopy(model).eval())
        self.seconds = 0.0
        self.samples = 0

    def observe(self, state: Array, force: float) -> None:
        """Count the sample; learn nothing."""
        self.samples += 1

    def snapshot(self) -> None:
        """Nothing changes."""

    def policies(self, snapshots: Sequence[None]) -> Policies:
        """The same one M times."""
        return lambda states: self.policy(states.reshape(-1, 4)).reshape(states.shape[:-1])


class Retraining:
    """Warm-started retraining, as in the paper: when ``memory`` samples have come, train on them and drop them.

    Each retraining runs Adam (a new one, without the moments of the last) for ``epochs`` passes over the memory in
    shuffled batches of ``batch``, from the weights that the previous retraining left. Between two retrainings the
    policy stays as it is. ``readout_only`` trains W_O alone, on rows h that are computed once.

    The paper does not give the batch size. For the memories 50 and 100, batches of 25 gave a force RMSE 7 and 10 %
    below that of one batch an epoch (each at its best learning rate), in two and four times as many steps.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        memory: int,
        learning_rate: float,
        epochs: int = 100,
        batch: int = 25,
        readout_only: bool = False,
        seed: int = 0,
    ) -> None:
        import torch

        for name, value in (("memory", memory), ("epochs", epochs), ("batch", batch)):
            if value < 1:
                raise RangeError(f"{name} must be at least 1, got {value!r}")
        if not (math.isfinite(learning_rate) and learning_rate > 0.0):
            raise RangeError(f"learning_rate must be a positive number, got {learning_rate!r}")
        self.seconds = 0.0
        self.samples = 0
        self.memory = memory
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch = batch
        self.readout_only = readout_only
        self.model = copy.deepcopy(model).eval()
        self._states = np.empty((memory, 4))
        self._forces = np.empty(memory)
        self._shuffle = torch.Generator().manual_seed(seed)
        self.policy = network_policy(self.model)

    def observe(self, state: Array, force: float) -> None:
        """Keep the sample; retrain when the memory is full."""
        started = time.process_time()
        place = self.samples % self.memory
        self._states[place] = state
        self._forces[place] = force
        self.samples += 1
        if place + 1 == self.memory:
            self._retrain()
        self.seconds += time.process_time() - started

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the weights."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def policies(self, snapshots: Sequence[dict[str, torch.Tensor]]) -> Policies:
        """M snapshots as policies that run together."""
        return network_policies(self.model, snapshots)

    def _retrain(self) -> None:
        import torch

        inputs, targets = scaled_states(self._states), scaled_forces(self._forces)
        network: torch.nn.Module = self.model
        if self.readout_only:
            network = self.model.readout
            with torch.no_grad():
                inputs = self.model.trunk(inputs).squeeze(-2)
        optimiser = torch.optim.Adam(network.parameters(), self.learning_rate)
        for _ in range(self.epochs):
            order = torch.randperm(self.memory, generator=self._shuffle)
            for first in range(0, self.memory, self.batch):
                rows = order[first : first + self.batch]
                loss = torch.nn.functional.mse_loss(network(inputs[rows]), targets[rows])
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()


class RecursiveLeastSquares:
    """Recursive least squares on [h, 1] from the pre-trained W_O, in float64, with ``prior_var`` in units of the noise.

    It is the exact posterior mean of a linear readout: a head without hidden layers, with L = 1 (method.md §1).
    """

    def __init__(self, model: DecisionTransformer, prior_var: float) -> None:
        if not (math.isfinite(prior_var) and prior_var > 0.0):
            raise RangeError(f"prior_var must be a positive number, got {prior_var!r}")
        self.seconds = 0.0
        self.samples = 0
        self.model = copy.deepcopy(model).eval()
        readout = self.model.readout
        parts = [readout.weight.detach().numpy()[0], readout.bias.detach().numpy()]
        self._mean: Array = np.concatenate(parts).astype(np.float64)
        self._cov: Array = prior_var * np.eye(len(self._mean))

    def observe(self, state: Array, force: float) -> None:
        """One Kalman step of the readout with unit noise."""
        started = time.process_time()
        z = np.append(hidden(self.model, state), 1.0)
        g = self._cov @ z
        spread = 1.0 + float(z @ g)
        self._mean += g * ((force / FORCE_SCALE - float(z @ self._mean)) / spread)
        self._cov -= np.outer(g, g) / spread
        self.samples += 1
        self.seconds += time.process_time() - started

    def policy(self, states: Array) -> Array:
        """Forces (N,) at states (N, 4)."""
        forces: Array = hidden(self.model, states) @ self._mean[:-1] + self._mean[-1]
        return FORCE_SCALE * forces

    def snapshot(self) -> Array:
        """The readout, bias last."""
        return np.array(self._mean)

    def policies(self, snapshots: Sequence[Array]) -> Policies:
        """M snapshots as policies that run together."""
        return linear_policies(self.model, snapshots)


@dataclass(frozen=True)
class Choice:
    """A setting chosen by ``choose``, with everything that it was chosen from."""

    value: float
    scores: dict[float, float]  # candidate → geometric mean of the force RMSE (N)
    seeds: tuple[int, ...]


def choose(
    make: Callable[[float], Learner],
    candidates: Sequence[float],
    gain: Array,
    seeds: Sequence[int],
    samples: int = 400,
    checkpoints: int = 4,
    noise_var: float = 0.0,
) -> Choice:
    """The candidate whose learner comes closest to the LQR on streams of ``seeds``, which no study's trial may share.

    The score is the geometric mean of the force RMSE on unseen states over the seeds and ``checkpoints`` evenly spaced
    moments of a stream, so that no single moment decides. A learner that diverges scores infinity.
    """
    if not (len(candidates) and len(seeds)):
        raise RangeError("candidates and seeds must not be empty")
    if checkpoints < 1 or samples < checkpoints:
        raise RangeError(f"checkpoints must be from 1 to samples={samples}, got {checkpoints}")
    moments = {samples * (i + 1) // checkpoints for i in range(checkpoints)}
    scores: dict[float, float] = {}
    for candidate in candidates:
        logs: list[float] = []
        for seed in seeds:
            rng = np.random.default_rng(seed)  # the same stream for every candidate
            unseen = sample_states(rng, 1000)
            learner = make(candidate)
            for state, force in zip(*sample_pairs(rng, samples, gain, noise_var), strict=True):
                learner.observe(state, float(force))
                if learner.samples in moments:
                    rmse = force_rmse(learner.policy, gain, unseen)
                    logs.append(math.log(max(rmse, _EXACT)) if math.isfinite(rmse) else math.inf)
        scores[candidate] = math.exp(sum(logs) / len(logs))
    return Choice(min(scores, key=scores.__getitem__), scores, tuple(seeds))


@dataclass(frozen=True)
class Method:
    """A row of the comparison: how to make the learner, and its one setting."""

    name: str
    make: Callable[[DecisionTransformer, float], Learner]
    candidates: tuple[float, ...]  # learning rates, or prior variances; empty if there is nothing to choose
    setting: float  # what ``choose`` took on CHOICE_SEEDS, with the new plant's LQR and the network of tools/


def _retraining(memory: int, setting: float, readout_only: bool = False) -> Method:
    def make(model: DecisionTransformer, learning_rate: float) -> Learner:
        return Retraining(model, memory, learning_rate, readout_only=readout_only)

    if readout_only:
        return Method(f"readout {memory}", make, (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0), setting)
    return Method(f"retrain {memory}", make, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), setting)


CHOICE_SEEDS = (900, 901, 902)
"""The streams on which the settings below were chosen; no trial of a study may use them."""

METHODS = (
    Method("frozen", lambda model, _: Frozen(model), (), 0.0),
    _retraining(10, 3e-4),
    _retraining(20, 1e-3),
    _retraining(25, 3e-4),
    _retraining(50, 1e-3),
    _retraining(75, 1e-3),
    _retraining(100, 1e-3),
    _retraining(50, 3e-2, readout_only=True),
    Method("least squares", RecursiveLeastSquares, (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7), 1e6),
)
"""The paper's six memories and what the paper left out."""
