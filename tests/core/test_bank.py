"""The watchful head with hidden layers or a softmax: equal to its reference, and all or nothing in every filter."""

from __future__ import annotations

import copy
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_onnx
from grid import pairwise

import kbt_edge as kbt
from kbt_edge.flight import FlightLog
from kbt_edge.reference_bank import ReferenceBank

Array = npt.NDArray[np.float64]
D, NOISE = 3, 0.1

KINDS: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": (7,)},
    "hidden, full": {"hidden": (6,), "covariance": "full"},
    "hidden, diagonal": {"hidden": (9,), "covariance": "diagonal"},
    "deep": {"hidden": (6, 6)},
    "given noise": {"hidden": (6,), "noise_var": [0.02, 0.01]},
    "given prior": {"hidden": (6,), "prior_var": (0.01, 1.0)},
    "diagonal": {"covariance": "diagonal"},
    "uncertain input": {"input_var": 0.01},
    "softmax": {"output": "softmax"},
    "softmax, hidden": {"output": "softmax", "hidden": (6,), "covariance": "full"},
    "softmax, given noise": {"output": "softmax", "noise_var": 0.1},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **more: Any) -> kbt.Head:
    rng = np.random.default_rng(11)
    return kbt.Head(rng.normal(size=(2, D)), rng.normal(size=2), **{**KINDS[kind], "max_rows": 2, **more})


def samples(head: kbt.Head, plant: Array, count: int, seed: int = 0) -> list[tuple[Array, Any]]:
    """Inputs with the noisy targets of a plant (d_o, d), or their largest as a class."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(count, head.d))
    u = h @ plant.T + NOISE * rng.normal(size=(count, len(plant)))
    return list(zip(h, u.argmax(axis=1) if head.config["output"] == "softmax" else u, strict=True))


def learn(head: kbt.Head, data: list[tuple[Array, Any]]) -> list[kbt.Update]:
    return [head.update(h, y) for h, y in data]


PLANTS = np.random.default_rng(5).normal(size=(2, 2, D))


def taught(kind: str, count: int = 40, **more: Any) -> kbt.Head:
    head = make(kind, **more)
    learn(head, samples(head, PLANTS[0], count))
    return head


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def answers_as(head: kbt.Head, twin: kbt.Head) -> None:
    """From now on as well: through a change, in which the fresh filter takes over."""
    assert head.to_bytes() == twin.to_bytes()
    for h, y in samples(head, PLANTS[1], 30, seed=3):
        assert same(head.predict(h), twin.predict(h))
        assert head.update(h, y) == twin.update(h, y)
    head.suppose_changed()
    twin.suppose_changed()
    h, y = np.ones((2, D)), np.eye(2)
    assert same(head.predict(h), twin.predict(h))
    assert head.observe(y) == twin.observe(y)
    assert head.to_bytes() == twin.to_bytes()
    assert head.belief == twin.belief


# ---- the reference ---------------------------------------------------------------------------------------------------

GAUSSIAN = [
    {"output": "gaussian", "hidden": (6,), "noise": noise, "d_o": d_o, "covariance": covariance, "rows": rows}
    for noise in ("adaptive", "constant")
    for d_o in (1, 3)
    for covariance in ("neuron", "full", "diagonal")
    for rows in (1, 3)
]
SOFTMAX = [
    {"output": "softmax", "hidden": hidden, "noise": "multinomial", "d_o": 3, "covariance": covariance, "rows": rows}
    for hidden in ((), (6,))
    for covariance in ("neuron", "full", "diagonal")
    for rows in (1, 3)
]
OTHERS = [
    {"output": "gaussian", "hidden": (), "noise": "adaptive", "d_o": 2, "covariance": "diagonal", "rows": 1},
    {"output": "gaussian", "hidden": (), "noise": "adaptive", "d_o": 2, "covariance": "neuron", "rows": 1,
     "input_var": 0.01},
    {"output": "gaussian", "hidden": (6,), "noise": "adaptive", "d_o": 1, "covariance": "neuron", "rows": 1,
     "prior_var": (0.001, 10.0)},
    {"output": "gaussian", "hidden": (6, 6), "noise": "adaptive", "d_o": 1, "covariance": "neuron", "rows": 1,
     "gate": 400.0, "forgetting": 0.999},
    {"output": "softmax", "hidden": (), "noise": "constant", "d_o": 3, "covariance": "neuron", "rows": 1},
]  # fmt: skip


def difference(got: object, want: object, least: float = 1e-12) -> float:
    """Largest difference of two arrays, relative to the largest entry of the second."""
    want = np.asarray(want)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), least))


def run(case: dict[str, Any], dtype: str, before: int, after: int) -> tuple[float, list[int]]:
    """Largest difference to the reference, and the steps at which a change was noticed. The plant changes once."""
    rng, d = np.random.default_rng(3), 2
    settings = {key: value for key, value in case.items() if key not in ("hidden", "d_o", "rows")}
    gaussian, rows, d_o = case["output"] == "gaussian", case["rows"], case["d_o"]
    if settings["noise"] != "multinomial":
        settings["noise_var"] = 0.02
    head = kbt.Head(rng.normal(size=(d_o, d)), rng.normal(size=d_o), hidden=case["hidden"], dtype=dtype, max_rows=rows,
                    **settings)  # fmt: skip
    reference = ReferenceBank([layer.mean for layer in head.layers], **settings)
    plants, worst, noticed = 3 * rng.normal(size=(2, d_o, d)), 0.0, []
    if not gaussian:
        plants[1] = np.roll(plants[0], 1, axis=0)  # every class is another one
    for step in range(before + after):
        h = rng.normal(size=(rows, d)).astype(np.float32).astype(float)
        u = h @ plants[int(step >= before)].T + NOISE * rng.normal(size=(rows, d_o))
        u = (u + 30.0 * (step == before // 2)).astype(np.float32).astype(float)  # an outlier
        y: Any = u if gaussian else u.argmax(axis=1)
        if rows == 1:
            h, y = h[0], y[0]
        noise_var = 0.0625 if gaussian and step % 7 == 3 else None
        got, want = head.predict(h), reference.predict(h)
        for name in ("mean", "cov", "total_var"):
            worst = max(worst, difference(getattr(got, name), getattr(want, name)))
        update, judged = head.update(h, y, noise_var), reference.update(h, y, noise_var)
        worst = max(worst, difference(update.nis, judged.nis, 1.0))
        worst = max(worst, difference(update.log_likelihood, judged.log_likelihood, 1.0))
        assert update.status == judged.status
        assert update.changed == (judged.changed != "none")
        noticed += [step] * update.changed
    for layer, other in zip(head.layers, reference.leading.layers, strict=True):
        worst = max(worst, difference(layer.mean, other.mean), difference(layer.cov, other.cov))
    if gaussian:
        worst = max(worst, difference(head.noise_var, reference.leading.noise_var))
    still, drifts, fresh = (head.belief[name] for name in ("still", "drifts", "has changed"))
    w = reference.weights
    return max(worst, difference([still, drifts, fresh], [w[0] + w[1], w[2], w[3]])), noticed


def name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", [*pairwise([*GAUSSIAN, *SOFTMAX]), *OTHERS], ids=name)
@pytest.mark.long("runs the NumPy reference beside the core, seconds for each configuration")
def test_the_core_equals_the_reference_through_a_change(case: dict[str, Any]) -> None:
    worst, noticed = run(case, "float64", before=40, after=150)
    assert worst < 1e-8
    assert len(noticed) <= 1


@pytest.mark.parametrize(
    ("case", "before"),
    [(GAUSSIAN[0], 60), (GAUSSIAN[9], 60), (GAUSSIAN[-1], 60), (SOFTMAX[3], 150), (SOFTMAX[9], 150)],
    ids=lambda x: name(x) if isinstance(x, dict) else str(x),
)
@pytest.mark.long("runs the NumPy reference beside the core, seconds for each configuration")
def test_the_fresh_filter_takes_over_at_the_same_sample_as_in_the_reference(case: dict[str, Any], before: int) -> None:
    worst, noticed = run(case, "float64", before, after=160)
    assert worst < 1e-8
    assert len(noticed) == 1
    assert before + 119 <= noticed[0] <= before + 150


@pytest.mark.parametrize("case", [GAUSSIAN[0], GAUSSIAN[-1], SOFTMAX[0]], ids=name)
def test_in_single_precision_the_core_is_near_the_reference(case: dict[str, Any]) -> None:
    worst, _ = run(case, "float32", before=20, after=40)
    assert worst < 2e-2


# ---- all or nothing --------------------------------------------------------------------------------------------------


def bad_calls(head: kbt.Head) -> list[Callable[[], object]]:
    softmax, h, y = head.config["output"] == "softmax", np.linspace(-1, 1, D), np.array([0.25, 0.75])
    huge, nan = np.full(D, 1e38), np.array([1.0, np.nan, 1.0])
    calls: list[Callable[[], object]] = [
        lambda: head.update(2 * h, [0.0, np.nan]),
        lambda: head.update(nan, y),
        lambda: head.update(huge, y),
        lambda: head.predict(huge),
        lambda: head.predict(nan),
        lambda: head.observe([np.nan, 0.0]),
        lambda: head.update(np.stack([h, huge]), np.stack([y, y])),
        lambda: head.update(2 * h, y, -1.0),
    ]
    if softmax:
        return [*calls, lambda: head.update(2 * h, 7), lambda: head.observe([3.0, -2.0])]
    return [*calls, lambda: head.update(2 * h, [0.0, 1e38]), lambda: head.observe([1e38, 0.0])]


@every_kind
@pytest.mark.parametrize("count", [0, 40])
@pytest.mark.parametrize("noise_is_set", [False, True])
def test_a_refused_call_changes_nothing_in_any_filter(kind: str, count: int, noise_is_set: bool) -> None:
    head = taught(kind, count)
    if noise_is_set and head.config["noise"] != "multinomial":
        head.core.set_noise(np.array([0.3], np.float32))  # a ratio of 30, whose rounding must not show
    twin, h = kbt.Head.from_bytes(head.to_bytes()), np.linspace(-1, 1, D)
    blob, waiting = head.to_bytes(), head.predict(h)
    for call in bad_calls(head):
        with pytest.raises(kbt.KbtError):
            call()
        assert head.to_bytes() == blob
    assert same(waiting, twin.predict(h))
    assert head.observe([0.0, 1.0]) == twin.update(h, [0.0, 1.0])
    answers_as(head, twin)


@every_kind
@pytest.mark.parametrize("count", [0, 40])
def test_what_the_gate_rejects_changes_nothing_in_any_filter(kind: str, count: int) -> None:
    softmax = KINDS[kind].get("output") == "softmax"
    settings = {"gate": 0.8, "softmax_order": 0} if softmax else {"gate": 60.0}
    head = taught(kind, count, **settings)
    assert head.samples >= count / 2
    twin, free, blob = copy.copy(head), taught(kind, 0), head.to_bytes()
    rejected = 0
    for h, y in samples(head, (1.0 if softmax else 1e6) * PLANTS[1], 20, seed=4):
        if copy.copy(head).update(h, y).status == "ok":
            continue
        update = head.update(h, y)
        rejected += 1
        assert update.status == "gated"
        assert head.to_bytes() == blob
        if count == 0:  # judged by the prior that its own input asks for
            assert update[1:3] == copy.copy(free).update(h, y)[1:3]
    assert rejected > 0
    h = np.linspace(-1, 1, D)
    assert same(head.predict(h), twin.predict(h))
    assert head.observe([0.0, 1.0]) == twin.observe([0.0, 1.0])
    answers_as(head, twin)


@every_kind
def test_predictions_before_any_data_change_nothing(kind: str) -> None:
    head = make(kind)
    blob = head.to_bytes()
    for size in (1e-3, 1.0, 1e3):
        first = head.predict(np.full(D, size))
        assert all(np.isfinite(part).all() for part in first)
        assert same(first, head.predict(np.full(D, size)))
        assert head.to_bytes() == blob


@every_kind
def test_noise_that_is_set_while_a_prediction_waits_counts_for_it(kind: str) -> None:
    """The posterior goes with the noise, so the variances of the waiting prediction do."""
    head = taught(kind)
    if head.config["noise"] == "multinomial":
        return
    twin, h, R = kbt.Head.from_bytes(head.to_bytes()), np.linspace(-1, 1, D), np.array([0.5, 0.2], np.float32)
    head.record(100)
    head.predict(h)
    for each in (head, twin):
        assert each.core.set_noise(R) == 0
    assert head.observe([0.0, 1.0]) == twin.update(h, [0.0, 1.0])
    assert FlightLog(head.flight_log()).replay().reproduced
    answers_as(head, twin)


def test_a_noise_matrix_that_is_set_survives_the_state() -> None:
    head = kbt.Head(np.eye(2), hidden=(6,), noise="matrix", noise_var=[0.1, 0.2], drift="auto")
    matrix = np.array([[0.5, 0.0], [0.0, 0.25]], np.float32)  # with zeros, which no variance can be
    assert head.core.set_noise(matrix) == 0
    for step in range(20):
        h, y = np.array([np.sin(step), np.cos(step)]), np.array([1.0, np.sin(2 * step)])
        assert same(head.predict(h), kbt.Head.from_bytes(head.to_bytes()).predict(h))
        head.update(h, y)
    head.suppose_changed()
    assert np.isfinite(head.predict(h).total_var).all()


# ---- told by the user ------------------------------------------------------------------------------------------------


@every_kind
def test_reset_makes_a_new_head(kind: str) -> None:
    head = make(kind)
    blob = head.to_bytes()
    for _ in range(2):
        learn(head, samples(head, PLANTS[0], 30))
        assert head.to_bytes() != blob
        head.reset()
        assert head.to_bytes() == blob
        assert (head.samples, head.changes, head.core.predicted_rows) == (0, (), 0)
    answers_as(head, make(kind))


@every_kind
def test_a_supposed_change_begins_from_the_readout(kind: str) -> None:
    head, h = taught(kind, 80), np.linspace(-1, 1, D)
    new = make(kind)
    head.suppose_changed()
    assert head.samples == 80
    assert head.changes == (kbt.head.Change(80, 80, 0.0, "changed"),)
    assert head.belief["still"] == pytest.approx(2 / 3, abs=1e-3)
    for layer, other in zip(head.layers, new.layers, strict=True):
        np.testing.assert_array_equal(layer.mean, other.mean)
    np.testing.assert_array_equal(head.noise_var, new.noise_var)
    # The width of the prior follows the inputs, so a softmax, whose mean depends on it, is only near the readout.
    np.testing.assert_allclose(head.predict(h).mean, new.predict(h).mean, atol=1e-5 if new.d_o == 1 else 0.1)


@every_kind
def test_before_the_first_sample_nothing_can_have_changed(kind: str) -> None:
    head = make(kind)
    blob = head.to_bytes()
    head.suppose_changed()
    assert head.to_bytes() == blob
    assert head.changes == ()


@pytest.mark.parametrize("settings", [{"drift": 0.0}, {"drift": 0.01}, {"rule": "replace"}], ids=str)
@pytest.mark.parametrize("hidden", [(), (6,)])
def test_one_filter_has_not_kept_its_readout(hidden: tuple[int, ...], settings: dict[str, Any]) -> None:
    head = kbt.Head(np.eye(3), hidden=hidden, **settings)
    head.update(np.ones(3), np.zeros(3))
    blob = head.to_bytes()
    for call in (head.reset, head.suppose_changed):
        with pytest.raises(kbt.RangeError, match="drift='auto'"):
            call()
        assert head.to_bytes() == blob
    assert head.belief == {"still": 1.0}


# ---- state -----------------------------------------------------------------------------------------------------------


def through_a_bundle(head: kbt.Head, folder: Path) -> kbt.Head:
    model = kbt.Model(tiny_onnx.Control().onnx, head, backend="onnxruntime")
    model.save(folder / "model")
    return kbt.Model.load(folder / "model", backend="onnxruntime").head


@every_kind
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "bytes", "file", "restore", "bundle"])
def test_a_copy_is_the_same_head(kind: str, way: str, tmp_path: Path) -> None:
    head = taught(kind)
    copies: dict[str, Callable[[], kbt.Head]] = {
        "copy": lambda: copy.copy(head),
        "deepcopy": lambda: copy.deepcopy(head),
        "pickle": lambda: pickle.loads(pickle.dumps(head)),
        "bytes": lambda: kbt.Head.from_bytes(head.to_bytes()),
        "file": lambda: (head.save(tmp_path / "head"), kbt.Head.load(tmp_path / "head"))[1],
        "restore": lambda: (other := taught(kind, 7), other.restore(head.to_bytes()))[0],
        "bundle": lambda: through_a_bundle(head, tmp_path),
    }
    answers_as(head, copies[way]())


@every_kind
@pytest.mark.parametrize("count", [0, 40])
def test_a_reader_and_a_replay_are_the_same_head(kind: str, count: int) -> None:
    """Through a change of the plant; the log is so short that it begins anew from a checkpoint."""
    head = taught(kind, count)
    reader = head.reader()
    head.record(100)
    for step, (h, y) in enumerate(samples(head, PLANTS[1], 200, seed=8)):
        if step % 3 == 0:
            head.predict(h)
            head.observe(y)
        else:
            head.update(h, y)
        assert same(head.predict(h), reader.predict(h))
    replay = FlightLog(head.flight_log()).replay()
    assert replay.reproduced
    assert replay.head.to_bytes() == head.to_bytes()
    answers_as(head, replay.head)


@every_kind
def test_a_damaged_state_is_rejected_and_changes_nothing(kind: str) -> None:
    head, other = taught(kind), taught(kind, 7)
    blob, before = head.to_bytes(), other.to_bytes()
    body = blob[24:]
    bad = [blob[:-1], blob + b"\0", blob[:100] + b"\1" + blob[101:]]
    for at in (len(body) - 4, len(body) // 2 // 4 * 4):  # not finite, with a checksum that is right
        spoilt = body[:at] + struct.pack("<f", np.nan) + body[at + 4 :]
        bad.append(struct.pack("<4sIQII", b"KBTS", 2, len(blob), zlib.crc32(spoilt), 0) + spoilt)
    for each in bad:
        with pytest.raises(kbt.KbtError):
            other.restore(each)
        assert other.to_bytes() == before


@every_kind
def test_a_state_of_version_1_is_one_filter(kind: str) -> None:
    head = taught(kind, drift=0.0)
    blob, end = head.to_bytes(), 24 + 18 * 4 + 12 * 8
    assert struct.unpack_from("<d", blob, end) == (0.0,)
    body = blob[24:end] + blob[end + 8 :]
    old = kbt.Head.from_bytes(struct.pack("<4sIQII", b"KBTS", 1, 24 + len(body), zlib.crc32(body), 0) + body)
    assert old.config["drift"] == 0.0
    assert old.belief == {"still": 1.0}
    assert old.to_bytes() == blob
    assert same(old.predict(np.ones(D)), head.predict(np.ones(D)))
    assert learn(old, samples(old, PLANTS[1], 20)) == learn(head, samples(head, PLANTS[1], 20))
    assert old.to_bytes() == head.to_bytes()
