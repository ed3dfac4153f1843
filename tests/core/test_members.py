"""The watchful head: equal to its reference, quick after a change, calm without one."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest

import kbt_edge as kbt
from kbt_edge.flight import FlightLog
from kbt_edge.reference_members import WIDE, ReferenceMembers

Array = npt.NDArray[np.float64]
D, NOISE = 8, 0.1


def linear(rng: np.random.Generator, plant: Array, samples: int) -> tuple[Array, Array]:
    """Inputs, and targets of a plant (d_o, d) with noise."""
    h = rng.normal(size=(samples, plant.shape[1]))
    return h, h @ plant.T + NOISE * rng.normal(size=(samples, len(plant)))


def learn(head: kbt.Head, h: Array, y: Array) -> None:
    for hi, yi in zip(h, y, strict=True):
        head.update(hi, yi)


def error(head: kbt.Head, plant: Array) -> float:
    """Root mean square error of the mean at 200 new inputs."""
    h = np.random.default_rng(99).normal(size=(200, plant.shape[1]))
    found = np.array([head.predict(hi).mean for hi in h])
    return float(np.sqrt(np.mean((found - h @ plant.T) ** 2)))


def taught(seed: int = 0, samples: int = 50, d_o: int = 2, **settings: object) -> kbt.Head:
    rng = np.random.default_rng(seed)
    head = kbt.Head(rng.normal(size=(d_o, D)), **settings)  # type: ignore[arg-type]
    learn(head, *linear(rng, rng.normal(size=(d_o, D)), samples))
    return head


def same(a: kbt.Prediction, b: kbt.Prediction) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d_o", "noise", "rows"), [(1, "adaptive", 1), (3, "full", 1), (3, "adaptive", 3), (3, "constant", 3)]
)
def test_the_core_equals_the_reference(d_o: int, noise: str, rows: int) -> None:
    """600 samples with a change, outliers and noise of single calls; the change is noticed at the same sample."""
    rng, d, calls = np.random.default_rng(3), 4, 600 // rows
    weight, bias, plants = rng.normal(size=(d_o, d)), rng.normal(size=d_o), rng.normal(size=(2, d_o, d))
    head = kbt.Head(weight, bias, noise=noise, noise_var=0.02, dtype="float64", max_rows=rows)
    reference = ReferenceMembers(weight, bias, noise=noise, noise_var=0.02)
    noticed = []
    for step in range(calls):
        h, y = linear(rng, plants[int(step >= calls // 2)], rows)
        y += 30.0 * (step % 97 == 50)
        if rows == 1:
            h, y = h[0], y[0]
        noise_var = 0.05 if step % 7 == 3 else None
        got, expected = head.predict(h), reference.predict(h)
        for name in ("mean", "cov", "total_var"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-8, atol=1e-9)
        update, judged = head.update(h, y, noise_var), reference.update(h, y, noise_var)
        assert update.nis == pytest.approx(judged.nis, rel=1e-8, abs=1e-9)
        assert update.log_likelihood == pytest.approx(judged.log_likelihood, rel=1e-8, abs=1e-9)
        assert update.changed == (judged.changed != "none")
        noticed += [step] * update.changed
    assert len(noticed) == 1
    np.testing.assert_allclose(list(head.belief.values()), reference.weights, rtol=1e-7, atol=1e-10)


def test_a_change_is_dated_in_samples_with_several_rows_too() -> None:
    rng, rows, before = np.random.default_rng(3), 3, 80
    head = kbt.Head(np.zeros((1, D)), max_rows=rows)
    for plant in rng.normal(size=(2, 1, D)):
        for _ in range(before):
            head.update(*linear(rng, plant, rows))
    assert [change.kind for change in head.changes] == ["changed"]
    assert abs(head.changes[0].sample - before) <= 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 8, 21])
def test_rows_of_one_update_are_learned_as_separate_samples_to_the_bit(d: int, dtype: str) -> None:
    """Through surprises, fresh members in the middle of an update, and widths that no group of rows divides."""
    rng, rows, count = np.random.default_rng(d), 11, 90
    together, apart = (
        kbt.Head(np.zeros((3, d)), max_rows=most, dtype=dtype)  # type: ignore[arg-type]
        for most in (rows, 1)
    )
    changed = 0
    for step in range(count):
        plant = np.ones((3, d)) * (1 + 4 * (step >= count // 2))
        h, y = linear(rng, plant, int(rng.integers(1, rows + 1)))
        if step % 7 == 3:
            y[-1] += 50.0
        changed += together.update(h, y).changed is not None
        learn(apart, h, y)
        assert together.means[0].tobytes() == apart.means[0].tobytes()
        assert together.noise_var.tobytes() == apart.noise_var.tobytes()
        assert together.layers[0].cov.tobytes() == apart.layers[0].cov.tobytes()
    assert changed


def test_the_still_member_is_ridge_regression() -> None:
    """Its robust weight is 1 here: the targets are near the readout, and the prior is wide."""
    rng, R = np.random.default_rng(1), NOISE**2
    plant = rng.normal(size=(2, D))
    reference = ReferenceMembers(plant + 0.01 * rng.normal(size=plant.shape), noise="constant", noise_var=R)
    h, y = linear(rng, plant, 12)
    for hi, yi in zip(h, y, strict=True):
        reference.update(hi, yi)
    Z = np.column_stack([np.ones(12), h])
    precision = np.eye(D + 1) / (WIDE / (Z[0] @ Z[0]))
    P = np.linalg.inv(Z.T @ Z + precision)
    still = reference.members[0]
    np.testing.assert_allclose(still.P, P, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(still.W, (P @ (Z.T @ y + precision @ reference.first_W.T)).T, rtol=1e-7, atol=1e-8)


# ---- change, outliers, and neither -----------------------------------------------------------------------------------


def test_after_a_change_it_is_nearly_as_good_as_a_fresh_head() -> None:
    errors: dict[int, list[tuple[float, float]]] = {20: [], 50: []}
    for seed in range(10):
        rng = np.random.default_rng(seed)
        old, new = rng.normal(size=(2, 1, D))
        head, fresh = kbt.Head(np.zeros((1, D))), kbt.Head(np.zeros((1, D)))
        learn(head, *linear(rng, old, 500))
        h, y = linear(rng, new, 50)
        for step, (hi, yi) in enumerate(zip(h, y, strict=True), 1):
            head.update(hi, yi)
            fresh.update(hi, yi)
            if step in errors:
                errors[step].append((error(head, new), error(fresh, new)))
    for step, pairs in errors.items():
        mine, its = np.sqrt(np.mean(np.square(pairs), axis=0))
        assert mine <= 1.5 * its, (step, mine, its)


def test_an_early_outlier_is_forgotten() -> None:
    squares = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        plant = rng.normal(size=(1, D))
        h, y = linear(rng, plant, 500)
        clean, hit = kbt.Head(np.zeros((1, D))), kbt.Head(np.zeros((1, D)))
        learn(clean, h, y)
        y[4] += 1000 * NOISE
        learn(hit, h, y)
        squares.append((error(hit, plant) ** 2, error(clean, plant) ** 2))
    mine, its = np.sqrt(np.mean(squares, axis=0))
    assert mine <= 1.5 * its


@pytest.mark.parametrize("noise", ["gaussian", "student", "uniform"])
def test_a_plant_that_stands_still_has_not_changed(noise: str) -> None:
    rng, n = np.random.default_rng(5), 20_000
    draws = {"gaussian": rng.normal(size=n), "student": rng.standard_t(4, n), "uniform": rng.uniform(-1, 1, n)}
    plant, h = rng.normal(size=D), rng.normal(size=(n, D))
    head = kbt.Head(np.zeros((1, D)))
    learn(head, h, (h @ plant + NOISE * draws[noise])[:, None])
    assert head.changes == ()


def test_a_plant_that_goes_back_is_known_again() -> None:
    rng = np.random.default_rng(7)
    first, other = rng.normal(size=(2, 1, D))
    head = kbt.Head(np.zeros((1, D)))
    learn(head, *linear(rng, first, 500))
    learn(head, *linear(rng, other, 500))
    learn(head, *linear(rng, first, 20))
    assert error(head, first) < NOISE
    learn(head, *linear(rng, first, 480))
    assert [change.kind for change in head.changes] == ["changed", "returned"]
    for change, at in zip(head.changes, (500, 1000), strict=True):
        assert abs(change.sample - at) <= 5


# ---- told by the user ------------------------------------------------------------------------------------------------


def test_reset_makes_a_new_head() -> None:
    weight = np.random.default_rng(0).normal(size=(2, D))
    head = kbt.Head(weight, [1.0, 2.0])
    blob = head.to_bytes()
    learn(head, *linear(np.random.default_rng(1), -weight, 300))
    assert head.to_bytes() != blob
    head.reset()
    assert head.to_bytes() == blob
    assert (head.samples, head.changes) == (0, ())


def test_supposed_changes_begin_from_the_readout() -> None:
    weight, h = np.random.default_rng(0).normal(size=(2, D)), np.ones(D)
    head = kbt.Head(weight)
    learn(head, *linear(np.random.default_rng(1), -weight, 100))
    learned = head.predict(h).mean
    head.suppose_changed()
    away = np.abs(head.predict(h).mean - weight @ h)
    assert (away <= 4e-4 * np.abs(learned - weight @ h)).all()  # e^-8 of the weight is the plant before
    assert head.changes == (kbt.head.Change(100, 100, 0.0, "changed"),)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_copy_a_reader_and_a_replay_are_the_same_head() -> None:
    head = taught(samples=150)
    copy, reader = kbt.Head.from_bytes(head.to_bytes()), head.reader()
    head.record(1000)
    rng = np.random.default_rng(8)
    h, y = linear(rng, rng.normal(size=(2, D)), 200)  # another plant
    for hi, yi in zip(h, y, strict=True):
        assert head.update(hi, yi) == copy.update(hi, yi)
        assert same(head.predict(hi), reader.predict(hi))
    assert head.changes
    assert head.to_bytes() == copy.to_bytes()
    replay = FlightLog(head.flight_log()).replay()
    assert replay.reproduced
    assert replay.head.to_bytes() == head.to_bytes()


@pytest.mark.parametrize("bad", [np.nan, 1e38])
@pytest.mark.parametrize("samples", [0, 50])
def test_a_rejected_call_changes_nothing(bad: float, samples: int) -> None:
    head = taught(samples=samples)
    twin, h = kbt.Head.from_bytes(head.to_bytes()), np.linspace(-1, 1, D)
    blob = head.to_bytes()
    head.predict(h)
    for call in (lambda: head.update(2 * h, [0.0, bad]), lambda: head.observe([bad, 0.0])):
        with pytest.raises(kbt.KbtError):
            call()
        assert head.to_bytes() == blob
    assert head.observe([1.0, 2.0]) == twin.update(h, [1.0, 2.0])
    assert head.to_bytes() == twin.to_bytes()


def test_a_state_of_version_1_is_one_still_filter() -> None:
    head = taught(drift=0.0, noise_var=0.01, covariance="neuron")
    blob, end = head.to_bytes(), 24 + 18 * 4 + 12 * 8
    assert struct.unpack_from("<d", blob, end) == (0.0,)
    body = blob[24:end] + blob[end + 8 :]
    old = kbt.Head.from_bytes(struct.pack("<4sIQII", b"KBTS", 1, 24 + len(body), zlib.crc32(body), 0) + body)
    assert old.config["drift"] == 0.0
    assert old.belief == {"still": 1.0}
    assert old.to_bytes() == blob
    assert same(old.predict(np.ones(D)), head.predict(np.ones(D)))


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_predictions_before_any_data_are_wide_and_change_nothing() -> None:
    head = kbt.Head(np.ones((1, D)), noise_var=0.01)
    blob = head.to_bytes()
    for size in (1e-3, 1.0, 1e3):
        assert head.predict(np.full(D, size)).var[0] > 1000 * 0.01
        assert head.to_bytes() == blob


@pytest.mark.parametrize("covariance", ["neuron", "full"])
@pytest.mark.parametrize("noise", ["adaptive", "full"])
@pytest.mark.parametrize("samples", [0, 50])
def test_what_it_knows_has_the_documented_shapes(covariance: str, noise: str, samples: int) -> None:
    head = taught(samples=samples, covariance=covariance, noise=noise)
    assert sum(head.belief.values()) == pytest.approx(1.0, abs=1e-6)
    layer = head.layers[0]
    assert layer.mean.shape == (2, D + 1)
    assert layer.cov.shape == ((2 * (D + 1),) * 2 if covariance == "full" else (2, D + 1, D + 1))
    assert head.noise_var.shape == ((2, 2) if noise == "full" else (2,))
    assert all(np.isfinite(x).all() for x in (layer.mean, layer.cov, head.noise_var))
    if samples:
        h = np.append(np.linspace(-1, 1, D), 1.0)
        p = head.predict(h[:-1])
        np.testing.assert_allclose(layer.mean @ h, p.mean, rtol=1e-4)
        blocks = layer.cov if covariance == "neuron" else [layer.cov[: D + 1, : D + 1], layer.cov[D + 1 :, D + 1 :]]
        np.testing.assert_allclose([h @ block @ h for block in blocks], p.var, rtol=2e-3)
