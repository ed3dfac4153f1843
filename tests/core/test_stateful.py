"""Any sequence of calls, good and bad: ``Head`` does what the NumPy reference does, a rejected call changes nothing,
and a copy made from the bytes of the head answers every call as the head does.

The test run takes fixed examples. ``HYPOTHESIS_PROFILE=long`` (or tools/fuzz.py stateful) takes many random ones.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx

pytest.importorskip("hypothesis", reason="it makes the sequences of calls")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kbt_edge as kbt
from kbt_edge.errors import KbtError
from kbt_edge.head import Update
from kbt_edge.reference import ReferenceHead
from kbt_edge.reference_bank import ReferenceBank

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile("short", max_examples=25, stateful_step_count=20, derandomize=True, deadline=None,
                          database=None, suppress_health_check=SLOW)  # fmt: skip
settings.register_profile("long", max_examples=400, stateful_step_count=60, deadline=None, database=None,
                          suppress_health_check=SLOW)  # fmt: skip
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

D, MAX_ROWS = 3, 3
TOLERANCE = 1e-9  # of tests/core/test_core_vs_reference.py, in float64

numbers = st.floats(-3, 3, width=32)
# Rows that differ by a hair make the reference lose digits, not the core (test_head_exact.py): it inverts the
# covariance of the outputs, which is then all but singular.
coarse = st.integers(-768, 768).map(lambda n: n / 256)
inputs = st.one_of(arrays(float, (D,), elements=numbers), arrays(float, (2, D), elements=coarse))
BAD = [np.nan, np.inf, -np.inf]
EXTREME = [3e38, -3e38, 1e308, -1e308, 5e-324, -1e-45, 1e-310, 1e19, 0.0]

CONFIGURATIONS: list[dict[str, Any]] = [
    dict(d_o=1),
    dict(d_o=2, covariance="full", gate=30.0),
    dict(d_o=2, hidden=(7,), noise="adaptive"),
    dict(d_o=2, hidden=(6,), covariance="diagonal", forgetting=0.97, input_var=0.02),
    dict(d_o=1, hidden=(6,), rule="replace"),
    dict(d_o=3, output="softmax", noise="multinomial", noise_var=None),
    dict(d_o=3, output="softmax", hidden=(6,), covariance="full"),
    dict(d_o=2, hidden=(12,), covariance="full"),
    dict(d_o=2, hidden=(6,), drift=0.01, forgetting=0.99),
    # watchful: four filters
    dict(d_o=2, hidden=(7,), drift="auto", noise="adaptive"),
    dict(d_o=1, hidden=(6,), drift="auto", covariance="full", gate=30.0),
    dict(d_o=2, drift="auto", covariance="diagonal", input_var=0.02, prior_var=None),
    dict(d_o=2, hidden=(6,), drift="auto", noise="adaptive", prior_var=None),
    dict(d_o=3, drift="auto", output="softmax", noise="multinomial", noise_var=None, prior_var=None),
    dict(d_o=3, hidden=(6,), drift="auto", output="softmax", noise="multinomial", noise_var=None, gate=30.0),
]


def difference(got: object, want: object, least: float = 1e-6) -> float:
    want = np.asarray(want)
    return float(np.abs(np.asarray(got) - want).max() / max(np.abs(want).max(), least))


class HeadBesideReference(RuleBasedStateMachine):
    @initialize(settings=st.sampled_from(CONFIGURATIONS), seed=st.integers(0, 9))
    def make(self, settings: dict[str, Any], seed: int) -> None:
        rng = np.random.default_rng(seed)
        made = {"noise_var": 0.2, "drift": 0.0, **settings}
        self.d_o, hidden = made.pop("d_o"), made.pop("hidden", ())
        made.setdefault("prior_var", (0.3,) if not hidden else (0.02, 0.3))
        weight = rng.normal(size=(self.d_o, D))
        self.head = kbt.Head(weight, hidden=hidden, dtype="float64", max_rows=MAX_ROWS, **made)
        if made["noise_var"] is None:
            del made["noise_var"]
        self.watchful, means = made["drift"] == "auto", [layer.mean for layer in self.head.layers]
        if self.watchful:
            del made["drift"]
            self.reference: Any = ReferenceBank(means, **made)
        else:
            self.reference = ReferenceHead(means, **made)
        self.first = copy.deepcopy(self.reference)
        self.softmax = self.head.config["output"] == "softmax"
        self.multinomial = self.head.config["noise"] == "multinomial"
        self.predicted: Any = None  # the rows that observe would learn
        self.saved: list[tuple[bytes, Any]] = []
        self.keep()

    # ---- what a caller may do

    def both(self, verb: str, *arguments: Any) -> Any:
        """Answer of the head, which is that of a copy bit by bit. The copy predicts first what waits to be observed."""
        other = kbt.Head.from_bytes(self.head.to_bytes())
        if self.predicted is not None:
            other.predict(self.predicted)
        got, want = getattr(self.head, verb)(*arguments), getattr(other, verb)(*arguments)
        for mine, its in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, its, strict=True)
        assert self.head.to_bytes() == other.to_bytes()
        return got

    @rule(h=inputs)
    def predict(self, h: Any) -> None:
        p, q = self.both("predict", h), self.reference.predict(np.atleast_2d(h))
        assert p.mean.shape == (*h.shape[:-1], self.d_o)
        for part in p:
            assert np.isfinite(part).all()
        assert (p.var >= 0).all()
        assert (p.total_var >= p.var).all()
        assert difference(p.mean, q.mean.reshape(p.mean.shape)) < TOLERANCE
        assert difference(p.cov, q.cov) < TOLERANCE
        assert difference(p.total_var, q.total_var.reshape(p.total_var.shape)) < TOLERANCE
        self.predicted = h

    def target(self, data: Any, h: Any) -> Any:
        rows = h.shape[:-1]
        if self.softmax:
            labels = data.draw(arrays(np.int64, rows, elements=st.integers(0, self.d_o - 1)))
            return np.eye(self.d_o)[labels] if data.draw(st.booleans()) else labels
        return data.draw(arrays(float, (*rows, self.d_o), elements=numbers))

    def noise(self, data: Any) -> Any:
        if self.multinomial or self.head.config["noise"] == "adaptive":
            return None
        variances = st.floats(0.05, 5.0)
        return data.draw(st.one_of(st.none(), variances, arrays(float, self.d_o, elements=variances)))

    def compare(self, got: Update, h: Any, y: Any, noise: Any) -> None:
        rows = np.atleast_2d(h)
        y = np.asarray(y)
        targets = y.reshape(len(rows)) if self.softmax and y.dtype.kind == "i" else y.reshape(len(rows), self.d_o)
        want = self.reference.update(rows, targets, noise)
        assert got.status == want.status
        assert difference(got.nis, want.nis, 1.0) < TOLERANCE
        assert difference(got.log_likelihood, want.log_likelihood, 1.0) < TOLERANCE
        self.predicted = None

    @rule(h=inputs, data=st.data())
    def update(self, h: Any, data: Any) -> None:
        y, noise = self.target(data, h), self.noise(data)
        self.compare(self.both("update", h, y, noise), h, y, noise)

    @precondition(lambda self: self.predicted is not None)
    @rule(data=st.data())
    def observe(self, data: Any) -> None:
        y, noise = self.target(data, self.predicted), self.noise(data)
        self.compare(self.both("observe", y, noise), self.predicted, y, noise)

    @rule()
    def keep(self) -> None:
        self.saved.append((self.head.to_bytes(), copy.deepcopy(self.reference)))

    @rule(data=st.data(), anew=st.booleans())
    def restore(self, data: Any, anew: bool) -> None:
        blob, reference = data.draw(st.sampled_from(self.saved))
        if anew:
            self.head = kbt.Head.from_bytes(blob)
        else:
            self.head.restore(blob)
        assert self.head.to_bytes() == blob
        self.reference, self.predicted = copy.deepcopy(reference), None

    @precondition(lambda self: self.watchful)
    @rule()
    def reset(self) -> None:
        self.head.reset()
        self.reference, self.predicted = copy.deepcopy(self.first), None

    @precondition(lambda self: self.watchful)
    @rule()
    def suppose_changed(self) -> None:
        self.head.suppose_changed()
        self.reference.suppose_changed()
        if self.reference.samples > 0:  # before, nothing can have changed
            self.predicted = None

    # ---- what no caller should do

    @precondition(lambda self: not self.watchful)
    @rule()
    def one_filter_has_not_kept_its_prior(self) -> None:
        self.rejected(self.head.reset)
        self.rejected(self.head.suppose_changed)

    def rejected(self, call: Any, *arguments: Any) -> None:
        before = self.head.to_bytes()
        with pytest.raises(KbtError) as error:
            call(*arguments)
        assert str(error.value)
        assert self.head.to_bytes() == before
        waiting = 0 if self.predicted is None else len(np.atleast_2d(self.predicted))
        assert self.head.core.predicted_rows == waiting  # a prediction survives a rejected call

    @rule(value=st.sampled_from(BAD), place=st.integers(0, D - 1), which=st.sampled_from("hyn"))
    def not_finite(self, value: float, place: int, which: str) -> None:
        h, y = np.ones(D), np.full(self.d_o, 1 / self.d_o)
        noise = np.ones(self.d_o)
        {"h": h, "y": y, "n": noise}[which][place % (D if which == "h" else self.d_o)] = value
        self.rejected(self.head.update, h, y, noise if which == "n" else None)
        if which == "h":
            self.rejected(self.head.predict, h)

    @rule(
        bad=st.sampled_from(
            [np.ones(D + 1), np.ones((2, D + 1)), np.ones((1, 1, D)), np.ones((MAX_ROWS + 1, D)), np.ones((0, D)), 1.0,
             None, "abc", np.ones(D, complex), np.ones(D, bool), np.array(["a", "b", "c"]), [[1, 2], [3]],
             np.ones(D, object)]
        )
    )  # fmt: skip
    def wrong_h(self, bad: Any) -> None:
        self.rejected(self.head.update, bad, np.full(self.d_o, 1 / self.d_o))
        self.rejected(self.head.predict, bad)

    @rule(
        bad=st.sampled_from(
            [np.ones(7), np.ones((1, 2, 3)), None, "abc", [[1, 2], [3]], np.ones(3, complex), {}, np.ones((2, 7)),
             10**30, b"x"]
        )
    )  # fmt: skip
    def wrong_y(self, bad: Any) -> None:
        self.rejected(self.head.update, np.ones(D), bad)
        if self.predicted is not None:
            self.rejected(self.head.observe, bad)

    @rule(bad=st.sampled_from([-1.0, np.ones(7), -np.ones(1), np.ones((5, 5)), "abc", np.eye(3) * 1j]))
    def wrong_noise(self, bad: Any) -> None:
        self.rejected(self.head.update, np.ones(D), np.full(self.d_o, 1 / self.d_o), bad)

    @precondition(lambda self: self.predicted is None)
    @rule()
    def observe_without_a_prediction(self) -> None:
        self.rejected(self.head.observe, np.full(self.d_o, 1 / self.d_o))

    @rule(place=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans())
    def a_damaged_state(self, place: float, bit: int, cut: bool) -> None:
        blob = bytearray(self.head.to_bytes())
        at = min(int(place * len(blob)), len(blob) - 1)
        if cut:
            del blob[at:]
        else:
            blob[at] ^= 1 << bit
        self.rejected(self.head.restore, bytes(blob))
        self.rejected(kbt.Head.from_bytes, bytes(blob))

    @rule(value=st.sampled_from(EXTREME), which=st.sampled_from("hy"), single=st.booleans())
    def extreme(self, value: float, which: str, single: bool) -> None:
        """On a copy, as the reference checks no ranges: learned with a finite result, or rejected without a trace."""
        head = copy.copy(self.head)
        if single:
            made = {k: v for k, v in self.head.config.items() if k not in ("widths", "dtype", "noise_var")}
            noise = {} if self.multinomial else {"noise_var": 0.2}
            head = kbt.Head.from_means([layer.mean for layer in self.head.layers], dtype="float32", **made, **noise)
        h, y = np.ones(D), np.full(self.d_o, 1 / self.d_o)
        (h if which == "h" else y)[0] = value
        before = head.to_bytes()
        try:
            head.update(h, y)
        except KbtError:
            assert head.to_bytes() == before
        self.sound(head)
        with contextlib.suppress(KbtError):
            assert all(np.isfinite(part).all() for part in head.predict(h))

    @rule(value=st.sampled_from([*EXTREME, 1e160]), which=st.sampled_from("hy"), rows=st.integers(1, 2))
    def extreme_and_rejected(self, value: float, which: str, rows: int) -> None:
        """What a copy rejects, the head itself rejects without a trace, and goes on as before."""
        h, y = np.ones((rows, D)), np.full((rows, self.d_o), 1 / self.d_o)
        (h if which == "h" else y)[-1, 0] = value
        for verb, arguments in (("update", (h, y)), ("predict", (h,))):
            try:
                getattr(copy.copy(self.head), verb)(*arguments)
            except KbtError:
                self.rejected(getattr(self.head, verb), *arguments)

    # ---- what always holds

    def sound(self, head: kbt.Head) -> None:
        assert head.health().smallest_var >= 0
        for layer in head.layers:
            assert np.isfinite(layer.mean).all()
            assert np.isfinite(layer.cov).all()

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if not hasattr(self, "head"):
            return
        self.sound(self.head)
        reference = self.reference.leading if self.watchful else self.reference
        for layer, other in zip(self.head.layers, reference.layers, strict=True):
            assert difference(layer.mean, other.mean) < TOLERANCE
            assert difference(layer.cov, other.cov) < TOLERANCE


class ModelOnDisk(RuleBasedStateMachine):
    """A model and its folder: what is loaded is what was saved last, and learning is in order or rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "model"
        head = kbt.Head(np.arange(6.0).reshape(2, 3) / 6, drift=0.0, noise_var=0.1)
        self.model = kbt.Model(
            tiny_onnx.Control().onnx, head, input_scale=2.0, output_offset=(5.0, -1.0), output_scale=3.0,
            backend="onnxruntime",
        )  # fmt: skip
        self.on_disk: bytes | None = None
        self.predicted = False

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(x=arrays(float, (4,), elements=numbers))
    def predict(self, x: Any) -> None:
        p = self.model.predict(x)
        assert all(np.isfinite(part).all() for part in p)
        self.predicted = True

    @rule(y=arrays(float, (2,), elements=numbers))
    def observe(self, y: Any) -> None:
        samples, before = self.model.head.samples, self.model.head.to_bytes()
        if self.predicted:
            assert self.model.observe(y).status == "ok"
            assert self.model.head.samples == samples + 1
        else:
            with pytest.raises(KbtError):
                self.model.observe(y)
            assert self.model.head.to_bytes() == before
        self.predicted = False

    @rule(x=arrays(float, (4,), elements=numbers), y=arrays(float, (2,), elements=numbers))
    def update(self, x: Any, y: Any) -> None:
        self.model.update(x, y)
        self.predicted = False

    @rule(bad=st.sampled_from([np.full(4, np.nan), np.ones(3), "abc", np.full(4, 1e300), None, np.ones(4, complex)]))
    def wrong_x(self, bad: Any) -> None:
        before = self.model.head.to_bytes()
        for call in (self.model.predict, lambda x: self.model.update(x, [0.0, 0.0])):
            with pytest.raises(KbtError):
                call(bad)
        assert self.model.head.to_bytes() == before
        self.predicted = self.predicted and self.model.head.core.predicted_rows > 0

    @rule()
    def save(self) -> None:
        self.model.save(self.path)
        self.on_disk = self.model.head.to_bytes()

    @precondition(lambda self: self.on_disk is not None)
    @rule()
    def load(self) -> None:
        again = kbt.Model.load(self.path, backend="onnxruntime")
        assert again.head.to_bytes() == self.on_disk
        x = np.full(4, 0.5)
        restored = copy.copy(self.model.head)
        restored.restore(self.on_disk)
        want = restored.predict(again.trunk(x / 2.0)[0])
        np.testing.assert_allclose(again.predict(x).mean, [5.0, -1.0] + 3.0 * want.mean.astype(float), rtol=1e-6)
        self.model, self.predicted = again, True

    @precondition(lambda self: self.on_disk is not None)
    @rule(name=st.sampled_from(["head.kbt", "trunk.onnx", "bundle.json"]), place=st.floats(0, 0.999))
    def damage(self, name: str, place: float) -> None:
        file = self.path / name
        content = file.read_bytes()
        end = len(content.rstrip(b"\n"))  # without the line's end a JSON file means the same
        file.write_bytes(content[: int(place * end)])
        with pytest.raises(KbtError):
            kbt.Model.load(self.path, backend="onnxruntime")
        file.write_bytes(content)


class TestHead(HeadBesideReference.TestCase):  # type: ignore[name-defined, misc]
    settings = PROFILE


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime runs the trunk")
class TestModel(ModelOnDisk.TestCase):  # type: ignore[name-defined, misc]
    settings = PROFILE
