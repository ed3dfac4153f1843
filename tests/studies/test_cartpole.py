"""The cart-pole against Gymnasium, the laws of mechanics and the claims at the top of kbt_edge/studies/cartpole.py."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from kbt_edge.errors import NumericsError, RangeError, ShapeError
from kbt_edge.studies.cartpole import (
    FORCE_LIMIT,
    FORCE_SCALE,
    NEW,
    OLD,
    START_BOX,
    STATE_BOX,
    CartPole,
    force_rmse,
    lqr_gain,
    lqr_policy,
    rollout,
    sample_pairs,
    sample_starts,
    sample_states,
    success_rates,
)

scipy_linalg = pytest.importorskip("scipy.linalg")

ODD = CartPole(cart_mass=2.3, pole_mass=0.7, length=1.9, gravity=3.7)
PLANTS = pytest.mark.parametrize("plant", [OLD, NEW, ODD], ids=["old", "new", "odd"])
CORNERS = np.array(list(itertools.product((-1.0, 1.0), repeat=4)))
SURFACE = np.array([p for p in itertools.product(np.linspace(-1.0, 1.0, 5), repeat=4) if max(map(abs, p)) == 1.0])


def some_states(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, (n, 4)) * [5.0, 4.0, 3.1, 3.0]


def energy(plant: CartPole, state: np.ndarray) -> np.ndarray:
    """Of the cart, and of the rod cut into elements: Gauss points are exact for what is quadratic along the rod."""
    _, v, theta, omega = np.moveaxis(state, -1, 0)
    total = 0.5 * plant.cart_mass * v**2
    for point, weight in zip(*np.polynomial.legendre.leggauss(3), strict=True):
        s = plant.length * (1.0 + point)  # from 0 to the rod's whole length, 2·length
        across, up = v + s * omega * np.cos(theta), -s * omega * np.sin(theta)
        total += weight / 2.0 * plant.pole_mass * (0.5 * (across**2 + up**2) + plant.gravity * s * np.cos(theta))
    return total


def momentum(plant: CartPole, state: np.ndarray) -> np.ndarray:
    """Horizontal, of the cart and of the rod's centre of mass."""
    _, v, theta, omega = np.moveaxis(state, -1, 0)
    return plant.cart_mass * v + plant.pole_mass * (v + plant.length * omega * np.cos(theta))


@PLANTS
def test_the_equations_of_motion_are_those_of_gymnasium(plant: CartPole) -> None:
    gymnasium_cartpole = pytest.importorskip("gymnasium.envs.classic_control.cartpole")
    env = gymnasium_cartpole.CartPoleEnv()
    env.gravity, env.masscart, env.masspole, env.length = plant.gravity, plant.cart_mass, plant.pole_mass, plant.length
    env.total_mass, env.polemass_length = plant.cart_mass + plant.pole_mass, plant.pole_mass * plant.length
    for state, force in zip(some_states(50), np.linspace(-90.0, 90.0, 50), strict=True):
        env.state, env.force_mag, env.steps_beyond_terminated = tuple(state), force, None
        env.step(1)  # Gymnasium pushes with force_mag, here any number, and takes one Euler step
        expected = (np.array(env.state) - state) / env.tau
        np.testing.assert_allclose(plant.derivative(state, force), expected, rtol=1e-9, atol=1e-9)


@PLANTS
def test_without_force_energy_and_momentum_stay(plant: CartPole) -> None:
    state = start = some_states(20)
    for _ in range(2000):
        state = plant.step(state, np.zeros(20), 1e-3)
    assert np.abs(state - start).max() > 1.0
    scale = np.abs(energy(plant, start)).max()
    np.testing.assert_allclose(energy(plant, state), energy(plant, start), rtol=0, atol=1e-8 * scale)
    np.testing.assert_allclose(momentum(plant, state), momentum(plant, start), rtol=0, atol=1e-8)


@PLANTS
def test_a_force_does_work_and_gives_impulse(plant: CartPole) -> None:
    state = start = some_states(20)
    force = np.linspace(-30.0, 30.0, 20)
    for _ in range(1000):
        state = plant.step(state, force, 1e-3)
    work = force * (state[:, 0] - start[:, 0])
    np.testing.assert_allclose(energy(plant, state) - energy(plant, start), work, rtol=1e-7, atol=1e-6)
    np.testing.assert_allclose(momentum(plant, state) - momentum(plant, start), force, rtol=1e-7, atol=1e-6)


@PLANTS
def test_the_linearisation_is_the_slope_at_the_upright(plant: CartPole) -> None:
    A, B = plant.linearise()
    d = 1e-5
    nothing, steps = np.zeros(4), d * np.eye(4)
    slopes = (plant.derivative(steps, nothing) - plant.derivative(-steps, nothing)) / (2 * d)
    np.testing.assert_allclose(A, slopes.T, atol=1e-8)
    rest = np.zeros(4)
    slope = (plant.derivative(rest, np.array(d)) - plant.derivative(rest, np.array(-d))) / (2 * d)
    np.testing.assert_allclose(B[:, 0], slope, atol=1e-8)


def test_a_step_is_of_fourth_order() -> None:
    def after_one_second(steps: int) -> np.ndarray:
        state = some_states(20)
        for _ in range(steps):
            state = OLD.step(state, np.full(20, 5.0), 1.0 / steps)
        return state

    exact = after_one_second(6400)
    errors = [np.abs(after_one_second(n) - exact).max() for n in (200, 400)]
    assert 3.7 < np.log2(errors[0] / errors[1]) < 4.3


@PLANTS
def test_no_gain_near_the_lqr_is_cheaper(plant: CartPole) -> None:
    A, B = plant.linearise()
    Q, R = np.diag([1.0, 2.0, 3.0, 4.0]), 0.5

    def cost(gain: np.ndarray) -> float:
        """Of all unit starts together, from the Lyapunov equation of the closed loop."""
        closed = A - B @ gain[None]
        assert np.linalg.eigvals(closed).real.max() < 0.0
        return float(np.trace(scipy_linalg.solve_continuous_lyapunov(closed.T, -Q - R * np.outer(gain, gain))))

    best = lqr_gain(plant, Q, R)
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert cost(best * (1.0 + 0.01 * rng.standard_normal(4))) > cost(best)


def test_the_new_lqr_stabilises_the_new_plant_from_the_whole_box_with_a_margin() -> None:
    policy = lqr_policy(lqr_gain(NEW))
    starts = np.vstack([1.1 * START_BOX * SURFACE, START_BOX * SURFACE, sample_starts(np.random.default_rng(0), 500)])
    assert rollout(NEW, policy, starts).success.all()
    assert rollout(NEW, policy, 1.1 * START_BOX * CORNERS, rate=200.0).success.all()


def test_the_box_could_not_be_a_fifth_larger() -> None:
    assert not rollout(NEW, lqr_policy(lqr_gain(NEW)), 1.2 * START_BOX * CORNERS).success.all()


@pytest.mark.parametrize("rate", [50.0, 200.0])
def test_the_old_lqr_stabilises_the_old_plant_always_and_the_new_one_never(rate: float) -> None:
    policy = lqr_policy(lqr_gain(OLD))
    starts = np.vstack([START_BOX * CORNERS, sample_starts(np.random.default_rng(0), 500)])
    assert rollout(OLD, policy, starts, rate=rate).success.all()
    assert not rollout(NEW, policy, starts, rate=rate).success.any()


@pytest.mark.parametrize("plant", [OLD, NEW], ids=["old", "new"])
def test_samples_cover_the_states_that_the_lqr_passes_through(plant: CartPole) -> None:
    starts = sample_starts(np.random.default_rng(0), 1000)
    visited = rollout(plant, lqr_policy(lqr_gain(plant)), starts).states
    assert (np.abs(visited) <= STATE_BOX).all(axis=-1).mean() > 0.99


def test_the_force_limit_leaves_the_new_lqr_alone() -> None:
    result = rollout(NEW, lqr_policy(lqr_gain(NEW)), START_BOX * CORNERS)
    assert np.abs(result.forces).max() < FORCE_LIMIT


def test_success_is_balance_within_the_bounds_of_gymnasium() -> None:
    steady = lqr_policy(lqr_gain(NEW))
    for place, expected in ((2.3, True), (2.5, False)):
        result = rollout(NEW, lambda s, place=place: steady(s - [place, 0.0, 0.0, 0.0]), 0.2 * START_BOX * CORNERS)
        assert result.success.all() == result.success.any() == expected
    upright = np.zeros((1, 4))
    assert rollout(NEW, lambda s: np.zeros(len(s)), upright).success.all()
    assert not rollout(NEW, lambda s: np.zeros(len(s)), np.array([[0.0, 0.0, 0.01, 0.0]])).success.any()


def test_a_fallen_pole_is_no_longer_asked_about_and_its_path_ends() -> None:
    asked: list[int] = []

    def idle(states: np.ndarray) -> np.ndarray:
        assert np.isfinite(states).all()
        asked.append(len(states))
        return np.zeros(len(states))

    result = rollout(OLD, idle, np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0], [0.0, 0.0, 2.0, 0.0]]))
    assert result.success.tolist() == [True, False, False]
    assert (asked[0], asked[-1]) == (2, 1)
    path = result.states[:, 1, 2]
    end = int(np.isfinite(path).sum())
    assert np.isfinite(path[:end]).all()
    assert np.abs(path[:end]).max() < np.pi / 2
    assert np.isnan(result.states[end:, 1]).all()
    assert result.time.shape == (751,)
    assert result.states.shape == (751, 3, 4)
    assert result.forces.shape == (750, 3)


def test_a_force_that_is_not_a_number_is_a_fall() -> None:
    result = rollout(NEW, lambda s: np.full(len(s), np.nan), np.zeros((2, 4)))
    assert not result.success.any()
    assert result.success_rate == 0.0


def test_forces_are_applied_within_the_limit() -> None:
    result = rollout(NEW, lambda s: np.full(len(s), 1e9), np.zeros((1, 4)), force_limit=7.0)
    assert result.forces[0, 0] == 7.0
    np.testing.assert_allclose(result.states[1, 0], NEW.step(np.zeros(4), np.array(7.0), 0.02))


def test_a_trial_does_not_depend_on_its_neighbours() -> None:
    policy = lqr_policy(lqr_gain(OLD))
    starts = sample_starts(np.random.default_rng(0), 5)
    together = rollout(NEW, policy, starts)
    for i in range(5):
        alone = rollout(NEW, policy, starts[i : i + 1])
        np.testing.assert_allclose(alone.states[:, 0], together.states[:, i], rtol=1e-6)


def test_pairs_are_the_lqr_with_the_noise_that_was_asked_for() -> None:
    gain = lqr_gain(NEW)
    states, forces = sample_pairs(np.random.default_rng(3), 20_000, gain)
    np.testing.assert_allclose(forces, -states @ gain)
    assert (np.abs(states) <= STATE_BOX).all()
    np.testing.assert_allclose(states.std(axis=0), STATE_BOX / np.sqrt(3.0), rtol=0.02)
    same, noisy = sample_pairs(np.random.default_rng(3), 20_000, gain, noise_var=10.0)
    np.testing.assert_array_equal(same, states)
    assert (noisy - forces).var() == pytest.approx(10.0, rel=0.05)
    assert abs(np.corrcoef(noisy - forces, forces)[0, 1]) < 0.03


def test_scaled_targets_of_the_old_lqr_have_a_deviation_near_one() -> None:
    _, forces = sample_pairs(np.random.default_rng(0), 20_000, lqr_gain(OLD))
    assert forces.std() / FORCE_SCALE == pytest.approx(1.0, abs=0.2)


def test_force_rmse_is_in_newtons() -> None:
    gain = lqr_gain(NEW)
    states = sample_states(np.random.default_rng(0), 100)
    assert force_rmse(lambda s: lqr_policy(gain)(s) + 0.25, gain, states) == pytest.approx(0.25)


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(RangeError, match=r"length must be a positive number, got 0\.0"):
        CartPole(length=0.0)
    with pytest.raises(ShapeError, match=r"Q must have shape \(4, 4\), got \(3, 3\)"):
        lqr_gain(OLD, np.eye(3))
    with pytest.raises(RangeError, match="R must be"):
        lqr_gain(OLD, R=-1.0)
    with pytest.raises(RangeError, match="noise_var must be"):
        sample_pairs(np.random.default_rng(0), 3, np.ones(4), noise_var=-1.0)
    policy = lqr_policy(np.ones(4))
    with pytest.raises(ShapeError, match=r"starts must have shape \(N, 4\), got \(4,\)"):
        rollout(OLD, policy, np.zeros(4))
    with pytest.raises(NumericsError, match="starts must be finite"):
        rollout(OLD, policy, np.full((1, 4), np.nan))
    with pytest.raises(RangeError, match="rate must be positive, got 0"):
        rollout(OLD, policy, np.zeros((1, 4)), rate=0)
    with pytest.raises(RangeError, match="seconds must exceed"):
        rollout(OLD, policy, np.zeros((1, 4)), seconds=5.0)
    with pytest.raises(ShapeError, match=r"policy must return forces of shape \(2,\), got \(2, 1\)"):
        rollout(OLD, lambda s: np.zeros((len(s), 1)), np.zeros((2, 4)))


def test_the_boxes_cannot_be_changed_by_accident() -> None:
    for box in (START_BOX, STATE_BOX):
        with pytest.raises(ValueError, match="read-only"):
            box[0] = 1.0


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    with pytest.raises(ImportError, match=r"pip install 'kbt-edge\[demo\]'"):
        lqr_gain(OLD)


def test_the_studies_load_neither_scipy_nor_torch() -> None:
    code = (
        "import sys, kbt_edge.studies.cartpole, kbt_edge.studies.baselines; "
        "print(sorted({'scipy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_policies_at_once_succeed_where_each_alone_does() -> None:
    gains = [scale * lqr_gain(NEW) for scale in (0.0, 0.2, 0.5, 1.0, 2.0)] + [lqr_gain(OLD), np.full(4, np.nan)]
    starts = sample_starts(np.random.default_rng(0), 30)
    together = success_rates(NEW, lambda states: -np.einsum("mnd,md->mn", states, np.array(gains)), len(gains), starts)
    alone = [rollout(NEW, lqr_policy(gain), starts).success_rate for gain in gains]
    assert together.tolist() == alone
    assert len(set(alone)) >= 3
