"""What the study compares with: each baseline does what its name says, and none is handicapped by a mistake."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbt_edge.errors import RangeError
from kbt_edge.studies.baselines import (
    METHODS,
    Frozen,
    Method,
    RecursiveLeastSquares,
    Retraining,
    choose,
    hidden,
    network_policy,
    scaled_forces,
    scaled_states,
)
from kbt_edge.studies.cartpole import FORCE_SCALE, STATE_BOX, force_rmse, lqr_policy, sample_pairs, sample_states

torch = pytest.importorskip("torch")

from kbt_edge.networks import DecisionTransformer  # noqa: E402

GAIN = np.array([-1.0, -3.0, -60.0, -40.0])


@pytest.fixture
def model() -> DecisionTransformer:
    torch.manual_seed(0)
    return DecisionTransformer()


def stream(n: int, seed: int = 0) -> list[tuple[np.ndarray, float]]:
    states, forces = sample_pairs(np.random.default_rng(seed), n, GAIN)
    return [(state, float(force)) for state, force in zip(states, forces, strict=True)]


UNSEEN = sample_states(np.random.default_rng(99), 500)


def weights(model: DecisionTransformer) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def changed(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_a_network_works_in_scaled_units_and_its_policy_in_newtons(model: DecisionTransformer) -> None:
    inputs = torch.tensor(UNSEEN / STATE_BOX, dtype=torch.float32)[:, None, :]
    with torch.no_grad():
        expected = FORCE_SCALE * model(inputs)[:, 0].numpy()
        rows = model.trunk(inputs)[:, 0, :].numpy()
    np.testing.assert_allclose(network_policy(model)(UNSEEN), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(hidden(model, UNSEEN), rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(hidden(model, UNSEEN[0]), rows[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scaled_forces(np.array([FORCE_SCALE, -40.0])).numpy(), [[1.0], [-2.0]])
    assert scaled_states(UNSEEN).abs().max() <= 1.0


ONE_OF_EACH = [m for m in METHODS if m.name in ("frozen", "retrain 100", "readout 50", "least squares")]


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=lambda method: method.name)
def test_a_learner_starts_as_the_network_it_was_given_and_leaves_that_alone(
    method: Method, model: DecisionTransformer
) -> None:
    before = weights(model)
    learner = method.make(model, method.setting)
    np.testing.assert_allclose(learner.policy(UNSEEN), network_policy(model)(UNSEEN), rtol=1e-4, atol=1e-4)
    for state, force in stream(100):
        learner.observe(state, force)
    assert changed(before, weights(model)) == set()
    assert learner.samples == 100
    moved = np.abs(learner.policy(UNSEEN) - network_policy(model)(UNSEEN)).max()
    assert (moved > 1.0) == (method.name != "frozen")
    assert (learner.seconds > 0.0) == (method.name != "frozen")


def test_the_comparison_has_the_memories_of_the_paper(model: DecisionTransformer) -> None:
    learners = {method.name: method.make(model, method.setting) for method in METHODS}
    retraining = {name: learner for name, learner in learners.items() if isinstance(learner, Retraining)}
    assert {n: f.memory for n, f in retraining.items() if not f.readout_only} == {
        f"retrain {memory}": memory for memory in (10, 20, 25, 50, 75, 100)
    }
    assert all(learner.epochs == 100 for learner in retraining.values())


def test_no_chosen_setting_lies_at_the_end_of_what_was_tried() -> None:
    for method in METHODS:
        assert not method.candidates or method.setting in sorted(method.candidates)[1:-1]


def test_retraining_waits_until_its_memory_is_full(model: DecisionTransformer) -> None:
    learner = Retraining(model, memory=5, learning_rate=1e-2, epochs=3)
    before = learner.policy(UNSEEN)
    for i, (state, force) in enumerate(stream(10), start=1):
        learner.observe(state, force)
        after = learner.policy(UNSEEN)
        assert np.array_equal(before, after) == (i % 5 != 0)
        before = after


def test_retraining_starts_from_its_last_weights_and_forgets_its_last_samples(model: DecisionTransformer) -> None:
    first, second = stream(8)[:4], stream(8)[4:]
    learner = Retraining(model, memory=4, learning_rate=1e-3, epochs=5)
    for state, force in first:
        learner.observe(state, force)
    fresh = Retraining(learner.model, memory=4, learning_rate=1e-3, epochs=5)
    for state, force in second:
        learner.observe(state, force)
        fresh.observe(state, force)
    np.testing.assert_allclose(learner.policy(UNSEEN), fresh.policy(UNSEEN), rtol=1e-3, atol=1e-3)


def test_retraining_fits_its_memory(model: DecisionTransformer) -> None:
    samples = stream(20)
    states = np.array([state for state, _ in samples])
    learner = Retraining(model, memory=20, learning_rate=1e-2)
    before = force_rmse(learner.policy, GAIN, states)
    for state, force in samples:
        learner.observe(state, force)
    assert force_rmse(learner.policy, GAIN, states) < 0.1 * before


def test_an_epoch_takes_each_sample_of_the_memory_once(
    model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    mse_loss = torch.nn.functional.mse_loss

    def watched(outputs: object, targets: torch.Tensor) -> torch.Tensor:
        seen.extend(targets[:, 0].tolist())
        return mse_loss(outputs, targets)

    monkeypatch.setattr(torch.nn.functional, "mse_loss", watched)
    learner = Retraining(model, memory=7, learning_rate=1e-3, epochs=2, batch=3)
    samples = stream(7)
    for state, force in samples:
        learner.observe(state, force)
    expected = sorted(force / FORCE_SCALE for _, force in samples)
    np.testing.assert_allclose(sorted(seen[:7]), expected, rtol=1e-6)
    np.testing.assert_allclose(sorted(seen[7:]), expected, rtol=1e-6)


def test_readout_only_leaves_the_trunk_alone(model: DecisionTransformer) -> None:
    learner = Retraining(model, memory=10, learning_rate=1e-1, readout_only=True)
    for state, force in stream(10):
        learner.observe(state, force)
    assert changed(weights(model), weights(learner.model)) == {"readout.weight", "readout.bias"}


def test_the_whole_network_is_retrained(model: DecisionTransformer) -> None:
    learner = Retraining(model, memory=50, learning_rate=1e-2, epochs=5)
    for state, force in stream(50):
        learner.observe(state, force)
    assert changed(weights(model), weights(learner.model)) == set(weights(model))


def test_least_squares_is_the_ridge_regression_of_all_samples(model: DecisionTransformer) -> None:
    samples = stream(60)
    learner = RecursiveLeastSquares(model, prior_var=100.0)
    for state, force in samples:
        learner.observe(state, force)
    Z = np.column_stack([hidden(model, np.array([s for s, _ in samples])), np.ones(60)])
    y = np.array([f for _, f in samples]) / FORCE_SCALE
    w0 = np.append(model.readout.weight.detach().numpy()[0], model.readout.bias.detach().numpy())
    w = np.linalg.solve(Z.T @ Z + np.eye(17) / 100.0, Z.T @ y + w0 / 100.0)
    expected = FORCE_SCALE * (np.column_stack([hidden(model, UNSEEN), np.ones(500)]) @ w)
    np.testing.assert_allclose(learner.policy(UNSEEN), expected, rtol=1e-4, atol=1e-3)


class Offset:
    """A policy that is wrong by as much as it was told to be."""

    def __init__(self, offset: float, log: list[np.ndarray]) -> None:
        self.offset, self.seconds, self.samples, self.log = offset, 0.0, 0, log

    def observe(self, state: np.ndarray, force: float) -> None:
        self.samples += 1
        self.log.append(np.append(state, force))

    def policy(self, states: np.ndarray) -> np.ndarray:
        return lqr_policy(GAIN)(states) + self.offset


def test_choose_takes_the_candidate_with_the_least_error_and_keeps_the_record() -> None:
    log: list[np.ndarray] = []
    choice = choose(
        lambda offset: Offset(offset, log), (3.0, -0.5, math.nan, 0.75), GAIN, (7, 8), samples=12, checkpoints=3
    )
    assert choice.value == -0.5
    assert choice.seeds == (7, 8)
    for candidate, score in choice.scores.items():
        assert score == pytest.approx(math.inf if math.isnan(candidate) else abs(candidate))
    streams = np.array(log).reshape(4, 2, 12, 5)
    assert (streams == streams[0]).all(), "every candidate must see the same samples"
    assert not (streams[:, 0] == streams[:, 1]).any(), "and every seed must give others"


def test_choose_accepts_a_learner_that_is_exact() -> None:
    assert choose(lambda offset: Offset(offset, []), (1.0, 0.0), GAIN, (7,), samples=4).value == 0.0


def test_wrong_arguments_are_rejected(model: DecisionTransformer) -> None:
    with pytest.raises(RangeError, match="memory must be at least 1, got 0"):
        Retraining(model, memory=0, learning_rate=1e-3)
    with pytest.raises(RangeError, match=r"learning_rate must be a positive number, got -1\.0"):
        Retraining(model, memory=1, learning_rate=-1.0)
    with pytest.raises(RangeError, match="prior_var must be a positive number, got nan"):
        RecursiveLeastSquares(model, math.nan)
    with pytest.raises(RangeError, match="must not be empty"):
        choose(lambda _: Frozen(model), (), GAIN, (1,))
    with pytest.raises(RangeError, match="checkpoints must be from 1 to samples=4, got 5"):
        choose(lambda _: Frozen(model), (1.0,), GAIN, (1,), samples=4, checkpoints=5)


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=lambda method: method.name)
def test_snapshots_act_together_as_each_did_when_it_was_taken(method: Method, model: DecisionTransformer) -> None:
    learner = method.make(model, method.setting)
    snapshots, policies = [learner.snapshot()], [learner.policy(UNSEEN)]
    for state, force in stream(100):
        learner.observe(state, force)
    snapshots.append(learner.snapshot())
    policies.append(learner.policy(UNSEEN))
    together = learner.policies(snapshots)(np.stack([UNSEEN, UNSEEN]))
    np.testing.assert_allclose(together, policies, rtol=1e-3, atol=1e-3)
