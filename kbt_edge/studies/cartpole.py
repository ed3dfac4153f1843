"""The cart-pole of method.md §7: the plant, its LQR, i.i.d. samples of that LQR, and the closed loop.

A state is [x, v, θ, ω]: the cart's place (m) and speed (m/s), the pole's angle from the upright (rad) and its rate
(rad/s). Arrays of states have the shape (..., 4), forces (N) the shape (...). A policy: states (N, 4) → forces (N,).

The study's settings were fixed with the two LQRs alone, before any learner ran:

``START_BOX``
    Where trials start. Its shape is 1 m and 1 m/s at the cart and, over the 5 m of the new pole, at the pole's centre
    of mass. Scaled up, the new LQR first loses the new plant at 2.76 times that shape; the box is 2.5 times it.
``STATE_BOX``
    Where samples are drawn, uniformly. It holds 99.7 % of the states that the new LQR passes through from ``START_BOX``
    on the new plant, and 99.4 % of those of the old LQR on the old plant.
Success
    The pole never reaches the horizontal, and throughout the last 5 of 15 s the plant is within what Gymnasium calls
    balanced: the cart within 2.4 m, the pole within 12°. The rail has no end: the new LQR needs up to 24 m of it.
    From every corner of ``START_BOX`` the new LQR is balanced after at most 6.1 s. The old LQR on the new plant has an
    unstable pair of poles (1.05 ± 1.33i per second) and dropped each of 4,000 random starts within 7 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbt_edge.errors import NumericsError, RangeError, ShapeError

__all__ = [
    "CONTROL_RATE",
    "FORCE_LIMIT",
    "FORCE_SCALE",
    "HORIZON",
    "NEW",
    "OLD",
    "START_BOX",
    "STATE_BOX",
    "CartPole",
    "Policies",
    "Policy",
    "Rollout",
    "force_rmse",
    "lqr_gain",
    "lqr_policy",
    "rollout",
    "sample_pairs",
    "sample_starts",
    "sample_states",
    "success_rates",
]

Array = NDArray[np.float64]
Policy = Callable[[Array], Array]
Policies = Callable[[Array], Array]  # of M policies at once: states (M, N, 4) → forces (M, N)


@dataclass(frozen=True)
class CartPole:
    """A uniform rod on a cart, without friction, driven by a horizontal force on the cart.

    ``length`` is the distance from the pivot to the rod's centre of mass, so the rod is twice as long and its moment of
    inertia about that centre is m·length²/3. This is Gymnasium's model (its factor 4/3 is 1 + 1/3).
    """

    cart_mass: float = 1.0  # kg
    pole_mass: float = 0.1  # kg
    length: float = 0.5  # m
    gravity: float = 9.81  # m/s²

    def __post_init__(self) -> None:
        for name in ("cart_mass", "pole_mass", "length", "gravity"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise RangeError(f"{name} must be a positive number, got {value!r}")

    def derivative(self, state: Array, force: Array) -> Array:
        """Time derivative of ``state`` (..., 4) under ``force`` (...): the nonlinear equations of motion."""
        mass = self.cart_mass + self.pole_mass
        lever = self.pole_mass * self.length / mass
        theta, omega = state[..., 2], state[..., 3]
        sin, cos = np.sin(theta), np.cos(theta)
        push = force / mass + lever * omega * omega * sin
        out = np.empty_like(state)
        out[..., 0] = state[..., 1]
        out[..., 2] = omega
        out[..., 3] = (self.gravity * sin - cos * push) / (4.0 / 3.0 * self.length - lever * cos * cos)
        out[..., 1] = push - lever * cos * out[..., 3]
        return out

    def step(self, state: Array, force: Array, dt: float) -> Array:
        """One classical Runge–Kutta step of ``dt`` seconds, the force held (zero-order hold)."""
        k1 = self.derivative(state, force)
        k2 = self.derivative(state + 0.5 * dt * k1, force)
        k3 = self.derivative(state + 0.5 * dt * k2, force)
        k4 = self.derivative(state + dt * k3, force)
        return state + dt / 6.0 * (k1 + 2.0 * (k2 + k3) + k4)

    def linearise(self) -> tuple[Array, Array]:
        """A (4, 4) and B (4, 1) of ṡ = A s + B f at the upright rest."""
        mass = self.cart_mass + self.pole_mass
        lever = self.pole_mass * self.length / mass
        arm = 4.0 / 3.0 * self.length - lever
        A = np.zeros((4, 4))
        A[0, 1] = A[2, 3] = 1.0
        A[3, 2] = self.gravity / arm
        A[1, 2] = -lever * A[3, 2]
        B = np.zeros((4, 1))
        B[3, 0] = -1.0 / (mass * arm)
        B[1, 0] = 1.0 / mass - lever * B[3, 0]
        return A, B


OLD = CartPole()
"""The plant that the transformer was pre-trained for."""

NEW = CartPole(pole_mass=1.0, length=5.0)
"""The plant after the change: a pole ten times heavier and ten times longer."""

START_BOX: Array = np.array([2.5, 2.5, 0.5, 0.5])
STATE_BOX: Array = np.array([16.0, 12.0, 0.6, 1.0])  # also the scale of a network's inputs: they lie in ±1
FORCE_SCALE = 20.0  # N; the scale of a network's output: the old LQR's force over STATE_BOX has a deviation of 22 N
FORCE_LIMIT = 100.0  # N; the new LQR never needs more than 82 N from START_BOX
CONTROL_RATE = 50.0  # Hz
HORIZON = 15.0  # s
_HELD = 5.0  # s at the end of a trial during which the plant must be balanced
_BALANCED_X, _BALANCED_THETA = 2.4, 12.0 * math.pi / 180.0  # Gymnasium's CartPole bounds
for _constant in (START_BOX, STATE_BOX):
    _constant.flags.writeable = False


def lqr_gain(plant: CartPole, Q: ArrayLike | None = None, R: float = 1.0) -> Array:
    """The gain k (4,) of the force f = −k·s that minimises ∫ sᵀQs + R f² on the linearised plant; Q defaults to I."""
    try:
        from scipy.linalg import solve_continuous_are
    except ImportError as error:
        raise ImportError("lqr_gain needs SciPy: pip install 'kbt-edge[demo]'", name="scipy") from error
    weight = np.eye(4) if Q is None else np.asarray(Q, dtype=np.float64)
    if weight.shape != (4, 4):
        raise ShapeError(f"Q must have shape (4, 4), got {weight.shape}")
    if not (math.isfinite(R) and R > 0.0):
        raise RangeError(f"R must be a positive number, got {R!r}")
    A, B = plant.linearise()
    P = solve_continuous_are(A, B, weight, np.array([[R]]))
    return np.asarray((B.T @ P)[0] / R, dtype=np.float64)


def lqr_policy(gain: Array) -> Policy:
    """The policy of a gain: f = −k·s, before any force limit."""
    return lambda states: -(states @ gain)


def sample_starts(rng: np.random.Generator, n: int) -> Array:
    """``n`` starting states (n, 4), uniform in ``START_BOX``."""
    return rng.uniform(-START_BOX, START_BOX, (n, 4))


def sample_states(rng: np.random.Generator, n: int) -> Array:
    """``n`` states (n, 4) to learn or to be tested on, uniform in ``STATE_BOX``."""
    return rng.uniform(-STATE_BOX, STATE_BOX, (n, 4))


def sample_pairs(rng: np.random.Generator, n: int, gain: Array, noise_var: float = 0.0) -> tuple[Array, Array]:
    """``n`` i.i.d. pairs: states (n, 4) and the LQR's force at each (n,), with noise of variance ``noise_var`` (N²).

    The noise is drawn even when its variance is zero, so one seed gives the same states at every noise level.
    """
    if not (math.isfinite(noise_var) and noise_var >= 0.0):
        raise RangeError(f"noise_var must be zero or a positive number, got {noise_var!r}")
    states = sample_states(rng, n)
    forces = lqr_policy(gain)(states) + math.sqrt(noise_var) * rng.standard_normal(n)
    return states, forces


def force_rmse(policy: Policy, gain: Array, states: Array) -> float:
    """Root mean square difference (N) between a policy and the LQR over ``states`` (n, 4)."""
    return float(np.sqrt(np.mean((policy(states) - lqr_policy(gain)(states)) ** 2)))


@dataclass(frozen=True, repr=False)
class Rollout:
    """Trajectories of N starts over T control periods. After a pole has fallen its states and forces are NaN."""

    time: Array  # (T + 1,) s
    states: Array  # (T + 1, N, 4)
    forces: Array  # (T, N) as applied, within the limit
    success: NDArray[np.bool_]  # (N,)

    @property
    def success_rate(self) -> float:
        """Share of the starts that were stabilised."""
        return float(self.success.mean())

    def __repr__(self) -> str:
        return f"Rollout({self.success.sum()} of {self.success.size} starts stabilised in {self.time[-1]:g} s)"


def rollout(
    plant: CartPole,
    policy: Policy,
    starts: Array,
    seconds: float = HORIZON,
    rate: float = CONTROL_RATE,
    force_limit: float = FORCE_LIMIT,
) -> Rollout:
    """Run ``policy`` on ``plant`` from each of ``starts`` (N, 4). All advance together: one policy call a period.

    The force is held for a control period of 1/``rate`` s, which is also the step of the integration. Success is
    explained at the top of this file. A force that is not a number counts as a fall.
    """
    starts = np.asarray(starts, dtype=np.float64)
    if starts.ndim != 2 or starts.shape[1] != 4:
        raise ShapeError(f"starts must have shape (N, 4), got {starts.shape}")
    if not np.isfinite(starts).all():
        raise NumericsError("starts must be finite, got NaN or infinity")
    for name, value in (("rate", rate), ("force_limit", force_limit)):
        if not value > 0.0:
            raise RangeError(f"{name} must be positive, got {value!r}")
    if not seconds > _HELD:
        raise RangeError(f"seconds must exceed the {_HELD:g} s for which balance must be held, got {seconds!r}")

    periods = round(seconds * rate)
    states = np.full((periods + 1, len(starts), 4), np.nan)
    forces = np.full((periods, len(starts)), np.nan)
    states[0] = starts
    upright = np.flatnonzero(np.abs(starts[:, 2]) < 0.5 * math.pi)
    for t in range(periods):
        if not upright.size:
            break
        now = states[t, upright]
        force = np.clip(policy(now), -force_limit, force_limit)
        if force.shape != (len(now),):
            raise ShapeError(f"policy must return forces of shape ({len(now)},), got {force.shape}")
        after = plant.step(now, force, 1.0 / rate)
        standing = np.abs(after[:, 2]) < 0.5 * math.pi  # false for NaN
        forces[t, upright] = force
        upright = upright[standing]
        states[t + 1, upright] = after[standing]

    last = states[-round(_HELD * rate) :]
    balanced = (np.abs(last[..., 0]) <= _BALANCED_X) & (np.abs(last[..., 2]) <= _BALANCED_THETA)
    return Rollout(np.arange(periods + 1) / rate, states, forces, balanced.all(axis=0))


def success_rates(plant: CartPole, policies: Policies, count: int, starts: Array) -> Array:
    """``rollout(...).success_rate`` of each of ``count`` policies from the same starts (N, 4), all of them at once."""
    periods, held = round(HORIZON * CONTROL_RATE), round(_HELD * CONTROL_RATE)
    states = np.repeat(np.asarray(starts, dtype=np.float64)[None], count, axis=0)
    standing = np.abs(states[..., 2]) < 0.5 * math.pi
    for t in range(1, periods + 1):
        if not standing.any():
            break
        force = np.clip(policies(states), -FORCE_LIMIT, FORCE_LIMIT)
        after = plant.step(states, force, 1.0 / CONTROL_RATE)
        standing &= np.abs(after[..., 2]) < 0.5 * math.pi  # false for NaN
        if t > periods - held:
            standing &= (np.abs(after[..., 0]) <= _BALANCED_X) & (np.abs(after[..., 2]) <= _BALANCED_THETA)
        states = np.where(standing[..., None], after, 0.0)  # failed trials are parked at zero
    rates: Array = standing.mean(axis=1)
    return rates
