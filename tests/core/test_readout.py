"""A softmax over many classes: against the whole head, against NumPy, and what it promises for what it leaves out."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cabi import library

import kbt_edge as kbt
from kbt_edge.readout import Readout

Array = npt.NDArray[Any]
CLASSES, D = 300, 12


def readout(classes: int = CLASSES, d: int = D, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(classes, d)).astype("f4") / 2, -np.log(np.arange(1, classes + 1)).astype("f4")


def stream(count: int, weight: Array, bias: Array, seed: int = 1) -> list[tuple[Array, int]]:
    """Labels from another readout: some rows have moved, and rare classes are frequent."""
    rng = np.random.default_rng(seed)
    classes, d = weight.shape
    true = weight + 0.5 * rng.normal(size=weight.shape) * (rng.random((classes, 1)) < 0.1)
    found = []
    for _ in range(count):
        h = rng.normal(size=d).astype("f4")
        found.append((h, int((true @ h + bias + rng.gumbel(size=classes)).argmax())))
    return found


def softmax(u: Array) -> Array:
    p = np.exp(u - u.max())
    return np.asarray(p / p.sum())


class Plain:
    """method.md (10.5) in float64, for all classes, with P as a matrix."""

    def __init__(self, weight: Array, bias: Array, prior_var: float) -> None:
        self.W = np.column_stack([weight, bias]).astype(float)
        self.P = prior_var * np.eye(self.W.shape[1])

    def predict(self, h: Array) -> tuple[Array, float]:
        z = np.append(h.astype(float), 1.0)
        var = float(z @ self.P @ z)
        return softmax(self.W @ z / np.sqrt(1 + np.pi / 8 * var)), var

    def update(self, h: Array, label: int) -> float:
        z, (p, var) = np.append(h.astype(float), 1.0), self.predict(h)
        q = (p + 1e-7) / (1 + len(p) * 1e-7)
        kappa = 1 / np.sqrt(1 + np.pi / 8 * var)
        s = max(1.0, kappa**2 * var * q.max() / 0.9)
        g = self.P @ z
        self.W += np.outer(kappa / s * (np.eye(len(p))[label] - p), g)
        self.P -= kappa**2 / s * (q * (1 - q)).mean() * np.outer(g, g)
        return float(np.log(p[label]))


@pytest.mark.parametrize("prior_var", [0.01, 1.0])
def test_with_all_classes_it_is_the_plain_rule_and_the_shared_head(prior_var: float) -> None:
    weight, bias = readout()
    one = Readout(weight, bias, top=CLASSES, prior_var=prior_var)
    head = kbt.Head(weight, bias, output="softmax", covariance="shared", drift=0.0, prior_var=prior_var)
    plain = Plain(weight, bias, prior_var)
    for h, label in stream(300, weight, bias):
        p, var = plain.predict(h)
        np.testing.assert_allclose(one.predict(h).p, p, atol=2e-5)
        np.testing.assert_allclose(one.predict(h).logit_var, var, rtol=1e-4)
        np.testing.assert_allclose(head.predict(h).mean, p, atol=2e-5)
        want = plain.update(h, label)
        assert one.update(h, label).log_likelihood == pytest.approx(want, abs=1e-3)
        assert head.update(h, label).log_likelihood == pytest.approx(want, abs=1e-3)
    assert one.dropped == 0


def test_what_one_step_leaves_out_is_within_its_bound() -> None:
    weight, bias = readout()
    for seed, prior_var in ((1, 0.01), (2, 0.1), (3, 3.0)):
        seen = stream(40, weight, bias, seed)
        few, worst = Readout(weight, bias, top=8, held=9, prior_var=prior_var), 0.0
        for h, label in seen:
            few = Readout(weight, bias, top=8, held=9, prior_var=prior_var)
            all_classes = Readout(weight, bias, top=CLASSES, prior_var=prior_var)
            bound = few.update(h, label).left_out
            assert all_classes.update(h, label).left_out == 0.0
            apart = 0.5 * np.abs(few.predict(h).p.astype(float) - all_classes.predict(h).p).sum()
            assert apart <= bound + 1e-6
            worst = max(worst, apart / bound)
        assert worst > 0.01  # the bound is not empty


def test_a_thousand_steps_stay_near_those_of_all_classes() -> None:
    weight, bias = readout(2000, 32)
    few, all_classes = Readout(weight, bias, top=64), Readout(weight, bias, top=2000, held=2000)
    worst = 0.0
    for h, label in stream(1000, weight, bias):
        worst = max(worst, float(np.abs(few.predict(h).p - all_classes.predict(h).p).max()))
        few.observe(label)
        all_classes.observe(label)
    assert worst < 1e-3
    assert few.held > 64


def test_the_row_that_moved_least_leaves_a_full_table() -> None:
    weight, bias = readout()
    small = Readout(weight, bias, top=4, held=10)
    dropped = 0
    for h, label in stream(200, weight, bias):
        update = small.update(h, label)
        dropped += update.dropped
        assert update.dropped <= 5
    assert small.held == 10
    assert small.dropped == dropped > 10


def test_it_learns_rare_classes_that_became_frequent() -> None:
    weight, bias = readout()
    one = Readout(weight, bias, top=16)
    seen = stream(3000, weight, bias)
    early = np.mean([one.update(h, label).log_likelihood for h, label in seen[:500]])
    for h, label in seen[500:2500]:
        one.update(h, label)
    late = [one.update(h, label).log_likelihood for h, label in seen[2500:]]
    frozen = Readout(weight, bias, top=16)
    before = [np.log(frozen.predict(h).p[label]) for h, label in seen[2500:]]
    assert np.mean(late) > early
    assert np.mean(late) > np.mean(before) + 0.05


def test_a_rejected_call_changes_nothing() -> None:
    weight, bias = readout()
    one, twin = (Readout(weight, bias, top=8) for _ in range(2))
    for h, label in stream(20, weight, bias):
        one.update(h, label)
        twin.update(h, label)
    h = np.ones(D, "f4")
    one.predict(h)
    twin.predict(h)
    blob = one.to_bytes()
    bad: list[tuple[type[Exception], Any]] = [
        (kbt.NumericsError, lambda: one.update(np.full(D, np.nan), 1)),
        (kbt.NumericsError, lambda: one.update(np.full(D, 3e38), 1)),
        (kbt.ShapeError, lambda: one.update(np.ones(D + 1), 1)),
        (kbt.RangeError, lambda: one.observe(CLASSES)),
        (kbt.RangeError, lambda: one.update(h, -1)),
        (kbt.DtypeError, lambda: one.update(h, 1.5)),  # type: ignore[arg-type]
        (kbt.BundleError, lambda: one.restore(blob[:-1])),
    ]
    for error, call in bad:
        with pytest.raises(error):
            call()
        assert one.to_bytes() == blob
    assert one.observe(3) == twin.observe(3)
    assert one.to_bytes() == twin.to_bytes()
    with pytest.raises(kbt.RangeError, match="no prediction is waiting"):
        one.observe(3)


def test_a_state_goes_on_to_the_same_bits_and_only_on_its_own_readout(tmp_path: Path) -> None:
    weight, bias = readout()
    one, other = Readout(weight, bias, top=4, held=30), Readout(weight, bias, top=4, held=30)
    seen = stream(120, weight, bias)
    for h, label in seen[:60]:
        one.update(h, label)
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert (other.samples, other.held, other.dropped) == (one.samples, one.held, one.dropped)
    for h, label in seen[60:]:
        assert one.update(h, label) == other.update(h, label)
    assert one.to_bytes() == other.to_bytes()
    changed = weight.copy()
    changed[5, 5] += 1
    for stranger in (Readout(changed, bias, top=4, held=30), Readout(weight, bias, top=5, held=30)):
        before = stranger.to_bytes()
        with pytest.raises(kbt.BundleError):
            stranger.restore(one.to_bytes())
        assert stranger.to_bytes() == before


def test_damaged_states_are_rejected_and_change_nothing() -> None:
    weight, bias = readout(40, 3)
    one = Readout(weight, bias, top=2, held=5)
    for h, label in stream(20, weight, bias):
        one.update(h, label)
    blob = one.to_bytes()
    for i in range(len(blob)):
        with pytest.raises(kbt.BundleError):
            one.restore(blob[:i] + bytes([blob[i] ^ 0x11]) + blob[i + 1 :])
    rng = np.random.default_rng(0)
    for _ in range(500):  # with a checksum that is right
        body = bytearray(blob[24:])
        at = int(rng.integers(0, len(body) - 4))
        body[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\xff\xff\xff\xff", b"\0\0\x80\xff"])
        head = bytearray(blob[:24])
        head[16:20] = zlib.crc32(bytes(body)).to_bytes(4, "little")
        try:
            one.restore(bytes(head + body))
        except kbt.BundleError:
            assert one.to_bytes() == blob
        else:
            one.update(np.ones(3), 1)  # whatever it says, it is a state
            one.restore(blob)


def test_the_readout_is_read_where_it_is(tmp_path: Path) -> None:
    weight, bias = readout()
    weight.tofile(tmp_path / "weight")
    mapped = np.memmap(tmp_path / "weight", np.float32, "r", shape=weight.shape)
    one, two = Readout(mapped, bias), Readout(weight, bias)
    h = np.ones(D)
    assert one.update(h, 7) == two.update(h, 7)
    np.testing.assert_array_equal(one.predict(h).p, two.predict(h).p)
    assert one.nbytes < Readout(np.zeros((4 * CLASSES, D)), top=64).nbytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top": 0}, "top: expected 1"),
        ({"top": 20, "held": 20}, "held: expected more than top = 20"),
        ({"prior_var": 0.0}, "prior_var: expected"),
        ({"prior_var": float("nan")}, "prior_var: expected"),
    ],
)
def test_settings_out_of_range_say_what_was_expected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(kbt.RangeError, match=message):
        Readout(*readout(), **settings)
    with pytest.raises(kbt.ShapeError, match="weight"):
        Readout(np.zeros((1, 3)))
    with pytest.raises(kbt.ShapeError, match="bias"):
        Readout(np.zeros((5, 3)), np.zeros(4))


def test_the_c_abi_checks_sizes_pointers_and_alignment() -> None:
    ffi, C = library()
    weight, bias = readout(8, 3)
    cfg = ffi.new("kbt_readout_config *", {"d": 3, "classes": 8, "top": 2, "held": 4, "prior_var": 0.1})
    assert C.kbt_readout_check(cfg) == ffi.NULL
    for field, wrong in (("d", 0), ("classes", 1), ("top", 0), ("held", 2), ("prior_var", -1.0)):
        bad = ffi.new("kbt_readout_config *", cfg[0])
        setattr(bad, field, wrong)
        assert ffi.string(C.kbt_readout_check(bad)).decode() == field
        assert C.kbt_readout_bytes(bad) == 0
    needed, slot = C.kbt_readout_bytes(cfg), ffi.new("kbt_readout **")
    memory = np.zeros(needed + 128, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    at, w, b = (ffi.cast("void *", start), *(ffi.cast("float *", x.ctypes.data) for x in (weight, bias)))
    assert C.kbt_readout_init(cfg, w, b, at, needed - 1, slot) == C.KBT_E_SIZE
    assert C.kbt_readout_init(cfg, w, b, ffi.cast("void *", start + 8), needed, slot) == C.KBT_E_ALIGN
    assert C.kbt_readout_init(cfg, ffi.NULL, b, at, needed, slot) == C.KBT_E_NULL
    weight[1, 1] = np.nan
    assert C.kbt_readout_init(cfg, w, b, at, needed, slot) == C.KBT_E_NONFINITE
    weight[1, 1] = 0.0
    assert C.kbt_readout_init(cfg, w, b, at, needed, slot) == C.KBT_OK
    one, h, p = slot[0], ffi.new("float[3]", [1, 2, 3]), ffi.new("float[8]")
    assert C.kbt_readout_observe(one, 1, ffi.NULL) == C.KBT_E_ORDER
    assert C.kbt_readout_predict(one, h, p, ffi.NULL) == C.KBT_OK
    assert sum(p) == pytest.approx(1.0, rel=1e-6)
    assert C.kbt_readout_observe(one, 8, ffi.NULL) == C.KBT_E_LABEL
    assert C.kbt_readout_observe(one, 1, ffi.NULL) == C.KBT_OK
    assert C.kbt_readout_observe(one, 1, ffi.NULL) == C.KBT_E_ORDER
    assert C.kbt_readout_update(one, h, 2, ffi.NULL) == C.KBT_OK
    assert (C.kbt_readout_samples(one), C.kbt_readout_held(one)) == (2, 3)
    assert C.kbt_readout_reset(one) == C.KBT_OK
    assert (C.kbt_readout_samples(one), C.kbt_readout_held(one)) == (0, 0)
