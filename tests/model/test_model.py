"""The model: trunk and head in physical units, nothing learned twice or by accident, and saved without losing a bit."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx
from grid import one_fast

import kbt_edge as kbt
from kbt_edge import bundle as bundles
from kbt_edge.errors import BundleError, DtypeError, NumericsError, RangeError, ShapeError
from kbt_edge.flight import FlightLog
from kbt_edge.model import Model
from kbt_edge.trunk import BackendError, Trunk

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.standard_normal((2, 3)), RNG.standard_normal(2)
MEAN, SCALE = np.array([0.5, -1.0, 3.0, 0.0]), np.array([2.0, 0.1, 10.0, 1.0])
OFFSET, UNIT = np.array([100.0, -3.0]), np.array([50.0, 0.03])
X, Y = np.array([1.0, -1.1, 8.0, 0.3]), np.array([120.0, -2.97])


def make_head(d_o: int = 2, **settings: Any) -> kbt.Head:
    settings = {"hidden": (6,), "prior_var": (1e-3, 0.3), "noise_var": 0.05, "drift": 0.0, **settings}
    return kbt.Head(WEIGHT[:d_o], BIAS[:d_o], **settings)


def make_model(trunk: Any = None, **changes: Any) -> Model:
    settings = {
        "head": make_head(dtype="float64"),
        "input_mean": MEAN,
        "input_scale": SCALE,
        "output_offset": OFFSET,
        "output_scale": UNIT,
        "backend": "onnxruntime",
        **changes,
    }
    return Model((trunk or tiny_onnx.Control()).onnx, **settings)


def plain(head: kbt.Head, trunk: Any = None) -> Model:
    return Model((trunk or tiny_onnx.Control()).onnx, head, backend="onnxruntime")


# Units.


def test_a_prediction_is_the_head_s_in_physical_units() -> None:
    model, head = make_model(), make_head(dtype="float64")
    p, u = model.predict(X), head.predict(tiny_onnx.Control()((X - MEAN) / SCALE)[0])
    np.testing.assert_allclose(p.mean, OFFSET + UNIT * u.mean, rtol=1e-6)
    np.testing.assert_allclose(p.cov, np.diag(UNIT) @ u.cov @ np.diag(UNIT), rtol=1e-5)
    np.testing.assert_allclose(p.var, UNIT**2 * u.var, rtol=1e-5)
    np.testing.assert_allclose(p.total_var, np.diagonal(p.cov) + UNIT**2 * 0.05, rtol=1e-6)
    np.testing.assert_allclose(model.noise_var, UNIT**2 * 0.05, rtol=1e-6)


def test_the_innovation_and_the_likelihood_are_those_of_physical_units() -> None:
    """log N(y; mean, cov + R) and its quadratic form, from what ``predict`` reports."""
    model = make_model()
    for step in range(5):
        y = Y + 3 * step * UNIT
        p, R = model.predict(X + step), np.diag(model.noise_var)
        S, e = p.cov + R, y - p.mean
        u = model.observe(y)
        nis = e @ np.linalg.solve(S, e)
        assert u.nis == pytest.approx(nis, rel=1e-6)
        log_density = -0.5 * (nis + np.linalg.slogdet(S)[1] + 2 * math.log(2 * math.pi))
        assert u.log_likelihood == pytest.approx(log_density, rel=1e-6)
        assert u.status == "ok"


def test_several_rows_are_scaled_jointly() -> None:
    trunk = tiny_onnx.Control(rows=3)
    model = make_model(trunk, head=make_head(dtype="float64", max_rows=3))
    x, y = X + RNG.standard_normal((3, 4)), Y + UNIT * RNG.standard_normal((3, 2))
    p, R = model.predict(x), np.diag(np.tile(model.noise_var, 3))
    u = make_head(dtype="float64", max_rows=3).predict(trunk((x - MEAN) / SCALE))
    assert p.mean.shape == p.total_var.shape == (3, 2)
    np.testing.assert_allclose(p.mean, OFFSET + UNIT * u.mean, rtol=1e-6)
    S, e = p.cov + R, (y - p.mean).ravel()
    np.testing.assert_allclose(p.cov, u.cov * np.outer(np.tile(UNIT, 3), np.tile(UNIT, 3)), rtol=1e-4)
    log_density = -0.5 * (e @ np.linalg.solve(S, e) + np.linalg.slogdet(S)[1] + 6 * math.log(2 * math.pi))
    assert model.observe(y).log_likelihood == pytest.approx(log_density, rel=1e-6)


def test_other_units_are_the_same_model() -> None:
    """Degrees instead of radians, millinewtons instead of newtons: the head learns the very same."""
    degrees, milli = 180 / math.pi, 1000.0
    one = make_model()
    other = make_model(
        input_mean=MEAN * degrees, input_scale=SCALE * degrees, output_offset=OFFSET * milli, output_scale=UNIT * milli
    )
    for step in range(20):
        x, y = X + 0.1 * step, Y - step * UNIT
        p, q = one.predict(x), other.predict(x * degrees)
        np.testing.assert_allclose(q.mean, p.mean * milli, rtol=1e-6)
        np.testing.assert_allclose(q.total_std, p.total_std * milli, rtol=1e-5)
        u, v = one.observe(y), other.observe(y * milli)
        assert v.nis == pytest.approx(u.nis, rel=1e-4)
        assert v.log_likelihood == pytest.approx(u.log_likelihood - 2 * math.log(milli), rel=1e-5)
    for a, b in zip(one.head.layers, other.head.layers, strict=True):
        np.testing.assert_allclose(b.mean, a.mean, rtol=1e-5, atol=1e-7)


def test_a_large_mean_or_offset_does_not_eat_the_digits() -> None:
    """Pressure around 101325 Pa, time around 1.7e9 s: float32 alone would leave 8e-3 and 128."""
    mean, offset = np.array([101325.0, 1.7e9, 0.0, 0.0]), 1e9
    small = make_model(head=make_head(1), input_mean=0.0, input_scale=1.0, output_offset=0.0, output_scale=1.0)
    large = make_model(head=make_head(1), input_mean=mean, input_scale=1.0, output_offset=offset, output_scale=1.0)
    x = np.array([0.125, -0.375, 0.5, 1.0])
    for _ in range(3):
        np.testing.assert_allclose(large.predict(x + mean).mean - offset, small.predict(x).mean, atol=1e-6)
        assert small.observe(0.25).nis == pytest.approx(large.observe(0.25 + offset).nis, rel=1e-5)


@pytest.mark.parametrize(
    "noise", [4.0, np.array([4.0, 1e-6]), np.array([[4.0, 1e-3], [1e-3, 1e-6]]), [[4, 0.001], [0.001, 1e-6]]]
)
def test_the_noise_of_one_sample_is_given_in_squared_units(noise: Any) -> None:
    R = np.asarray(noise)
    kind = "matrix" if R.ndim == 2 else "constant"
    model = make_model(head=make_head(noise=kind))
    S = model.predict(X).cov + (R if R.ndim == 2 else np.diag(np.broadcast_to(R, 2)))
    e = Y - model.predict(X).mean
    assert model.observe(Y, noise).nis == pytest.approx(e @ np.linalg.solve(S, e), rel=1e-5)
    before = make_model(head=make_head(noise=kind))
    assert before.update(X, Y, noise_var=noise).nis == pytest.approx(e @ np.linalg.solve(S, e), rel=1e-5)


def test_a_noise_matrix_is_reported_in_squared_units() -> None:
    R = np.array([[0.05, 0.01], [0.01, 0.04]])
    model = make_model(head=make_head(noise_var=R, dtype="float64"))
    np.testing.assert_allclose(model.noise_var, R * np.outer(UNIT, UNIT), rtol=1e-6)


KINDS: dict[str, Callable[..., Model]] = {
    "short way": lambda **units: make_model(head=make_head(dtype="float32"), **units),
    "float64 head": lambda **units: make_model(**units),
    "two inputs": lambda **units: Model(tiny_onnx.TwoInputs().onnx, make_head(), backend="onnxruntime", **units),
}
INPUTS = {"short way": (X,), "float64 head": (X,), "two inputs": (X[:2], X[1:])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", [1e-30, 1e-19, 1e20, 1e30, (1e-30, 1e30), (1e12, 1e-25)], ids=str)
def test_every_allowed_output_scale_gives_finite_positive_deviations(kind: str, unit: Any) -> None:
    one, scaled = KINDS[kind](output_offset=0.0, output_scale=1.0), KINDS[kind](output_offset=0.0, output_scale=unit)
    p, q = one.predict(*INPUTS[kind]), scaled.predict(*INPUTS[kind])
    units = np.broadcast_to(np.asarray(unit, float), (2,))
    for array in (*q, scaled.noise_var):
        assert array.dtype == np.float64
    np.testing.assert_allclose(q.mean, units * p.mean, rtol=1e-6)
    np.testing.assert_allclose(q.std, units * p.std, rtol=1e-6)
    np.testing.assert_allclose(q.total_std, units * p.total_std, rtol=1e-6)
    np.testing.assert_allclose(q.cov, np.outer(units, units) * p.cov, rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(scaled.noise_var), units * np.sqrt(one.noise_var), rtol=1e-6)
    assert (q.std > 0).all()
    nis = scaled.observe(units * 0.5).nis
    assert nis == pytest.approx(one.observe(np.array([0.5, 0.5])).nis, rel=1e-4)


def test_probabilities_and_their_covariance_are_float64() -> None:
    p = plain(kbt.Head(WEIGHT, BIAS, output="softmax")).predict(X)
    assert [array.dtype for array in p] == [np.float64] * 3


def test_one_number_scales_every_feature() -> None:
    one = make_model(input_mean=0.5, input_scale=2.0, output_offset=1.0, output_scale=3.0)
    each = make_model(
        input_mean=np.full(4, 0.5), input_scale=np.full(4, 2.0), output_offset=[1.0, 1.0], output_scale=[3.0, 3.0]
    )
    np.testing.assert_array_equal(one.predict(X).mean, each.predict(X).mean)
    np.testing.assert_array_equal(one.predict(X).cov, each.predict(X).cov)


def test_without_scaling_the_head_answers_itself() -> None:
    model = plain(make_head())
    p, q = model.predict(X), make_head().predict(model.trunk(X)[0])
    for got, want in zip(p, q, strict=True):
        np.testing.assert_array_equal(got, want)
    assert p.mean.dtype == np.float64  # results are in physical units, and an offset needs the digits


# The verbs.


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each run of a trunk that Python starts."""
    started: list[int] = []
    run = Trunk.__call__

    def counted(self: Trunk, *inputs: Any, **settings: Any) -> Any:
        started.append(1)
        return run(self, *inputs, **settings)

    monkeypatch.setattr(Trunk, "__call__", counted)
    return started


def test_observe_learns_the_prediction_without_running_the_trunk(runs: list[int]) -> None:
    one, other = make_model(), make_model()
    for step in range(10):
        x, y = X + 0.1 * step, Y + UNIT * step
        runs.clear()
        one.predict(x)
        assert len(runs) == 1
        u = one.observe(y)
        assert len(runs) == 1
        assert u == other.update(x, y)
    assert one.head.to_bytes() == other.head.to_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_the_latest_prediction_can_be_observed_and_only_once(dtype: str) -> None:
    model = make_model(head=make_head(dtype=dtype))
    before = model.head.to_bytes()
    with pytest.raises(RangeError, match="call predict first"):
        model.observe(Y)
    assert model.head.to_bytes() == before
    model.predict(X)
    model.observe(Y)
    after = model.head.to_bytes()
    with pytest.raises(RangeError, match="one observe per prediction"):
        model.observe(Y)
    assert model.head.to_bytes() == after != before
    model.update(X, Y)
    with pytest.raises(RangeError, match="one observe per prediction"):
        model.observe(Y)


NUMBERS = [2, 2.0, np.float32(2), np.float64(2), np.int16(2), np.array(2.0), np.array(2), [2.0], np.array([2])]


@pytest.mark.parametrize("make", [make_model, lambda head: Model(tiny_onnx.TwoInputs().onnx, head)], ids=["1", "2"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_is_a_target_for_one_output(make: Callable[..., Model], dtype: str) -> None:
    answers = set()
    for y in NUMBERS:
        model = make(
            head=make_head(1, dtype=dtype),
            **({"output_offset": 3.0, "output_scale": 7.0} if make is make_model else {}),
        )
        x = (X,) if make is make_model else (X[:2], X[1:])
        model.predict(*x)
        answers.add((model.observe(y), model.update(x, y), model.update(x, y, 0.5), model.head.to_bytes()))
    assert len(answers) == 1
    for none in (True, "2"):
        model.predict(*x)
        with pytest.raises(DtypeError, match="y: expected real numbers"):
            model.observe(none)
    with pytest.raises(ShapeError, match=r"y: expected shape \(2,\), got \(\)"):
        make_model().update(X, 2.5)


@pytest.mark.parametrize(
    ("y", "noise", "error", "message"),
    [
        ([1.0, np.nan], None, NumericsError, "y"),
        (np.array([np.inf, 1.0]), None, NumericsError, "y"),
        (np.array([1e308, 1e308]), None, NumericsError, "y"),
        ([1.0], None, ShapeError, r"y: expected shape \(2,\), got \(1,\)"),
        ([[1.0, 2.0]], None, ShapeError, r"y: expected shape \(2,\), got \(1, 2\)"),
        (1.0, None, ShapeError, r"y: expected shape \(2,\), got \(\)"),
        (["a", "b"], None, DtypeError, "y: expected real numbers"),
        ([True, False], None, DtypeError, "y: expected real numbers"),
        ([1j, 2.0], None, DtypeError, "y: expected real numbers"),
        ([[1.0], [2.0, 3.0]], None, DtypeError, "y"),
        (np.ma.array([1.0, 2.0]), None, DtypeError, "masked"),
        (None, None, DtypeError, "y"),
        (Y, -1.0, RangeError, r"noise_var: expected variances >= 0, got -1\.0"),
        (Y, [1.0, 2.0, 3.0], ShapeError, r"noise_var: expected shape a number, \(2,\) or \(2, 2\), got \(3,\)"),
        (Y, np.nan, NumericsError, "noise_var"),
        (Y, [[1.0, 2.0], [3.0, 1.0]], RangeError, "noise_var: expected a symmetric matrix"),
        (Y, "big", DtypeError, "noise_var"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rejected_target_changes_nothing(y: Any, noise: Any, error: Any, message: str, dtype: str) -> None:
    model, undisturbed = (make_model(head=make_head(dtype=dtype, noise="matrix")) for _ in range(2))
    model.predict(X)
    before = model.head.to_bytes()
    for call in (lambda: model.observe(y, noise), lambda: model.update(X + 1, y, noise)):
        with pytest.raises(error, match=message):
            call()
        assert model.head.to_bytes() == before
    undisturbed.predict(X)
    assert model.observe(Y) == undisturbed.observe(Y)  # the prediction still waits for its target


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ((X[:3],), ShapeError, r"input 'x': expected shape \(1, 4\), got \(3,\)"),
        ((X[:1],), ShapeError, r"got \(1,\)"),  # must not be broadcast
        ((np.float64(1.0),), ShapeError, r"got \(\)"),
        ((X[:, None],), ShapeError, r"got \(4, 1\)"),
        ((np.ones((2, 4)),), ShapeError, r"got \(2, 4\)"),
        ((np.array([1, 2, np.nan, 4]),), NumericsError, "got nan at"),
        (([1, 2, np.inf, 4],), NumericsError, "got inf at index 2"),
        ((np.array([1e300, 0, 0, 0]),), NumericsError, "x"),
        ((X > 0,), DtypeError, "expected real numbers"),
        ((["a"] * 4,), DtypeError, "expected real numbers"),
        ((None,), DtypeError, "x"),
        ((), ShapeError, r"x: expected 1 inputs \(x\), got 0"),
        ((X, X), ShapeError, r"x: expected 1 inputs \(x\), got 2"),
        (({"z": X},), ShapeError, "x: expected the inputs x, got z"),
        (({},), ShapeError, "x: expected the inputs x, got none"),
    ],
)
def test_a_rejected_input_changes_nothing(x: Any, error: Any, message: str) -> None:
    model, undisturbed = make_model(), make_model()
    model.predict(X)
    before = model.head.to_bytes()
    with pytest.raises(error, match=message):
        model.predict(*x)
    if len(x) == 1:
        with pytest.raises(error, match=message):
            model.update(x[0], Y)
    assert model.head.to_bytes() == before
    undisturbed.predict(X)
    assert model.observe(Y) == undisturbed.observe(Y)


# A rejection is explained from the one run that was rejected.


class Linear:
    """x (1, 4) → h = x, or x (1, 2) and z (1, 2) → h = [x, z]: as large as its inputs."""

    def __init__(self, inputs: int = 1) -> None:
        node, names = tiny_onnx.node, ["x", "z"][:inputs]
        shapes = [(name, (1, 4 // inputs), tiny_onnx.FLOAT) for name in names]
        eye = np.eye(4, dtype=np.float32)
        nodes = [node("MatMul", [name, f"{name}_to_h"], f"h_{name}") for name in names]
        nodes.append(node("Add", ["h_x", "h_z" if inputs == 2 else "zero"], "h"))
        constants = {f"{name}_to_h": block for name, block in zip(names, np.split(eye, inputs), strict=True)}
        self.onnx = tiny_onnx.model(nodes, shapes, ("h", (1, 4)), constants | {"zero": np.zeros(4, np.float32)})


COMPILER = (
    importlib.util.find_spec("emx_onnx_cgen") is not None and shutil.which(os.environ.get("CC", "cc")) is not None
)
WAYS = [
    "one input",
    "two inputs",
    "float64",
    pytest.param("compiled", marks=pytest.mark.skipif(not COMPILER, reason="needs emx-onnx-cgen and a C compiler")),
]


def by_way(way: str, cache: Path, **settings: Any) -> Model:
    """A model for each way that a call can take through this package, with one output in units of 20."""
    head = kbt.Head(np.ones((1, 4)), dtype="float64" if way == "float64" else "float32", **settings)
    backend = "compiled" if way == "compiled" else "onnxruntime"
    units = {"input_scale": 10.0, "output_offset": 1.0, "output_scale": 20.0}
    return Model(Linear(2 if way == "two inputs" else 1).onnx, head, backend=backend, cache_dir=cache, **units)


def given(way: str, x: Any) -> tuple[Any, ...]:
    array = np.array(x, np.float64)
    return (array[:2], array[2:]) if way == "two inputs" else (array,)


def records(model: Model) -> int:
    return len(FlightLog(model.head.flight_log()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("errors", ["warn", "raise"])
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.nan, "y: expected finite numbers, got nan"),
        ([np.inf], "y: expected finite numbers, got inf at index 0"),
        (np.array([-np.inf]), "y: expected finite numbers, got -inf at index 0"),
        ("too large", r"y: expected numbers .*, got \|y\| up to 3e\+(20|200)$"),
        ("too large, as an array", r"y: expected numbers .*, got \|y\| up to 3e\+(20|200)$"),
        ("too large, as a list", r"y: expected numbers .*, got \|y\| up to 3e\+(20|200)$"),
    ],
    ids=str,
)
def test_a_rejected_target_is_counted_once_recorded_once_and_told_in_its_own_units(
    way: str, y: Any, message: str, errors: Any, cache: Path
) -> None:
    if isinstance(y, str):
        large = 3e200 if way == "float64" else 3e20
        y = np.array([large]) if "array" in y else [large] if "list" in y else large
    model, undisturbed = by_way(way, cache), by_way(way, cache)
    model.head.record(10)
    with np.errstate(all=errors):
        model.predict(*given(way, X))
        with pytest.raises(NumericsError, match=message):
            model.observe(y)
    assert model.head.counters.rejected == 1
    assert records(model) == 1
    undisturbed.predict(*given(way, X))
    assert model.observe(21.0) == undisturbed.observe(21.0)


@pytest.mark.parametrize("way", ["one input", "two inputs", WAYS[-1]])
@pytest.mark.parametrize("y", [1e300, [1e300], np.array([1e300])], ids=repr)
def test_a_target_that_only_the_head_cannot_hold_is_told_in_its_own_units(way: str, y: Any, cache: Path) -> None:
    model = by_way(way, cache)
    model.head.record(10)
    model.predict(*given(way, X))
    with pytest.raises(NumericsError, match=r"y: expected numbers that fit into float32 after scaling, got 1e\+300$"):
        model.observe(y)
    assert (model.head.counters.rejected, records(model)) == (1, 1)


def test_a_noise_that_only_the_head_cannot_hold_is_told_in_its_own_units(cache: Path) -> None:
    model = make_model(head=make_head(), output_scale=1e-30)
    model.predict(X)
    with pytest.raises(NumericsError, match=r"noise_var: expected variances that fit into float32 .* got up to 0\.5"):
        model.observe(Y, 0.5)


@pytest.mark.parametrize("way", ["one input", "two inputs", WAYS[-1]])
@pytest.mark.parametrize("form", [tuple, lambda x: ([each.tolist() for each in x],)], ids=["arrays", "lists"])
@pytest.mark.parametrize("errors", ["warn", "raise"])
def test_a_prediction_that_the_head_rejects_runs_the_trunk_once_and_is_counted_once(
    way: str, form: Any, errors: Any, cache: Path, runs: list[int]
) -> None:
    model = by_way(way, cache)
    x = form(given(way, [0.0, 0.0, 0.0, 3e26]))  # h² does not fit into float32
    x = x[0] if way == "two inputs" and isinstance(x[0], list) else x
    with np.errstate(all=errors), pytest.raises(NumericsError, match=r"\|input '[xz]'\| up to 3e\+26"):
        model.predict(*x)
    assert model.head.counters.rejected == 1
    assert len(runs) == (0 if way == "compiled" and form is tuple else 1)  # 0: it runs in C, without Python


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("errors", ["warn", "raise"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"input '[xz]': expected finite numbers, got nan at index [13]"),
        (1e300, r"input '[xz]': expected numbers that fit into float32 after scaling, got 1e\+300"),
    ],
)
def test_an_input_that_the_trunk_rejects_is_told_in_its_own_units(
    way: str, value: float, message: str, errors: Any, cache: Path
) -> None:
    model, undisturbed = by_way(way, cache), by_way(way, cache)
    for each in (model, undisturbed):
        each.predict(*given(way, X))
    for call in (lambda *x: model.predict(*x), lambda *x: model.update(x if len(x) > 1 else x[0], 21.0)):
        with np.errstate(all=errors), pytest.raises(NumericsError, match=message):
            call(*given(way, [0.0, 0.0, 0.0, value]))
    assert model.head.counters.rejected == 0
    assert model.observe(21.0) == undisturbed.observe(21.0)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_too_small_for_float32_are_no_error(way: str, cache: Path) -> None:
    model = by_way(way, cache)
    with np.errstate(all="raise"):
        assert model.predict(*given(way, [1e-300] * 4)).mean == pytest.approx(1.0)
        model.observe([1.0 + 1e-15], noise_var=1e-300)
        model.update(given(way, [1e-45] * 4), 1.0)


# Converting an argument may run any code.


class Calling:
    """An array that calls something while it is converted."""

    def __init__(self, value: Any, call: Callable[[], object]) -> None:
        self.value, self.call = value, call

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.call()
        return np.array(self.value, dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argument", ["y", "noise_var"])
def test_a_target_that_predicts_while_it_is_converted_is_rejected(way: str, argument: str, cache: Path) -> None:
    model = by_way(way, cache)
    model.predict(*given(way, X))
    before = model.head.to_bytes()
    calling = Calling([2.0], lambda: model.predict(*given(way, -X)))
    with pytest.raises(RangeError, match=r"observe: .* another one now; pass NumPy arrays"):
        model.observe(*((calling,) if argument == "y" else (21.0, calling)))
    assert model.head.to_bytes() == before


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_use_the_model_while_they_are_converted_are_learned_as_given(way: str, cache: Path) -> None:
    model, plain_one = by_way(way, cache), by_way(way, cache)
    state = model.head.to_bytes()
    plain_one.update(given(way, X), 21.0, 4.0)

    def disturb() -> None:
        model.update(given(way, -X), -50.0)
        model.head.restore(state)

    x = tuple(Calling(each, disturb) for each in given(way, X))
    model.update(x if len(x) > 1 else x[0], Calling([21.0], disturb), Calling(4.0, disturb))
    assert model.head.to_bytes() == plain_one.head.to_bytes()
    fresh = by_way(way, cache)  # converting has put the model back to that
    np.testing.assert_array_equal(model.predict(*x).mean, fresh.predict(*given(way, X)).mean)


# Whose prediction it is.


@pytest.mark.parametrize("way", WAYS)
def test_a_prediction_is_observed_by_the_object_that_made_it(way: str, cache: Path) -> None:
    model = by_way(way, cache)
    before = model.head.to_bytes()
    model.predict(*given(way, X))
    with pytest.raises(RangeError, match=r"observe: .* made by a Model, .* call the model's observe"):
        model.head.observe(21.0)
    model.head.predict(X)
    for y in (21.0, [21.0]):
        with pytest.raises(RangeError, match=r"observe: .* of this model before it; .* made by its head"):
            model.observe(y)
    other = Model(Linear().onnx, model.head, output_scale=3.0, backend="onnxruntime")
    other.predict(X)
    with pytest.raises(RangeError, match=r"observe: .* by another model with that head"):
        model.observe(21.0)
    assert model.head.to_bytes() == before
    other.observe(21.0)
    model.head.predict(X)
    model.head.observe(1.0)
    model.predict(*given(way, X))
    model.observe(21.0)
    assert model.head.samples == 3


def test_inputs_of_any_real_type_mean_the_same() -> None:
    model = make_model()
    x = np.array([1.0, -1.0, 8.0, 2.0])
    want = model.predict(x).mean
    for same in (x[None], x.astype(np.float32), x.astype(np.int8), x.astype(np.float16), x.tolist(), [x], {"x": x}):
        np.testing.assert_array_equal(model.predict(same).mean, want)
    np.testing.assert_array_equal(model.predict(np.repeat(x, 2)[::2]).mean, want)


def test_several_inputs_come_as_arguments_a_tuple_or_a_dict() -> None:
    trunk = tiny_onnx.TwoInputs()
    position, wheels = np.array([1.0, 2.0]), np.array([0.1, 0.2, 0.3])
    model = Model(
        trunk.onnx,
        make_head(dtype="float64"),
        input_mean={"wheels": [0.1, 0.0, 0.0]},
        input_scale={"position": 2.0, "wheels": [1.0, 0.1, 1.0]},
        backend="onnxruntime",
    )
    h = trunk(position / 2, (wheels - [0.1, 0, 0]) / [1.0, 0.1, 1.0])[0]
    want = make_head(dtype="float64").predict(h).mean
    by_name = {"wheels": wheels, "position": position}
    for p in (model.predict(position, wheels), model.predict((position, wheels)), model.predict(by_name)):
        np.testing.assert_allclose(p.mean, want, rtol=1e-5)
    state = model.head.to_bytes()
    u = model.update((position, wheels), Y)
    model.head.restore(state)
    assert u == model.update(by_name, Y)
    for wrong in (position, (position,), {"position": position}, {**by_name, "more": 1}):
        with pytest.raises(ShapeError, match="position, wheels"):
            model.predict(wrong)


def test_a_softmax_head_takes_labels_and_has_no_units() -> None:
    head = kbt.Head(WEIGHT, BIAS, output="softmax", noise="multinomial")
    model = plain(head)
    p = model.predict(X)
    assert p.mean.sum() == pytest.approx(1)
    u = model.observe(1)
    assert u.log_likelihood == pytest.approx(math.log(p.mean[1]), rel=1e-5)
    assert model.predict(X).mean[1] > p.mean[1]
    with pytest.raises(RangeError, match="class labels"):
        model.observe(2)
    model.observe(np.array([0.0, 1.0]))
    for wrong in ({"output_scale": 2.0}, {"output_offset": 1.0}):
        with pytest.raises(RangeError, match="probabilities, which are not scaled"):
            Model(tiny_onnx.Control().onnx, head, backend="onnxruntime", **wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"head": kbt.Head(np.ones((1, 5)))}, ShapeError, "head: expected d = 3, .* got d = 5"),
        (
            {"trunk": tiny_onnx.Control(rows=2)},
            ShapeError,
            "head: expected max_rows >= 2, .* got max_rows = 1; make it",
        ),
        ({"input_scale": 0.0}, RangeError, "input_scale of 'x': expected numbers from 1e-30"),
        ({"input_scale": [1, 1, 1, -1]}, RangeError, "input_scale of 'x'"),
        ({"input_mean": [1.0, 2.0]}, ShapeError, r"input_mean of 'x': expected shape a number or \(4,\), got \(2,\)"),
        ({"input_mean": np.nan}, NumericsError, "input_mean of 'x'"),
        ({"input_mean": {"y": 1.0}}, RangeError, r"input_mean: expected some of the inputs \['x'\], got \['y'\]"),
        ({"output_scale": [1.0, 2.0, 3.0]}, ShapeError, r"output_scale: expected shape a number or \(2,\)"),
        ({"output_scale": 1e31}, RangeError, "output_scale"),
        ({"output_offset": "far"}, DtypeError, "output_offset"),
        ({"backend": "torch"}, RangeError, "backend"),
    ],
)
def test_a_model_that_does_not_fit_together_is_rejected(wrong: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_model(**wrong)


def test_scaling_that_has_no_place_is_rejected() -> None:
    tokens = tiny_onnx.Tokens(5, 4, d=3).onnx
    head = kbt.Head(np.ones((5, 3)), output="softmax", noise="multinomial", max_rows=4)
    Model(tokens, head, backend="onnxruntime")
    with pytest.raises(RangeError, match=r"input_mean: expected a dict with some of the inputs \[\]"):
        Model(tokens, head, input_mean=1.0, backend="onnxruntime")
    with pytest.raises(RangeError, match=r"input_scale: expected a dict with some of the inputs"):
        Model(tiny_onnx.TwoInputs().onnx, make_head(), input_scale=[1.0, 2.0], backend="onnxruntime")


def test_a_model_says_what_it_is() -> None:
    model = make_model(head=make_head())
    assert repr(model).startswith("Model(x (1, 4) → 1 × 3, onnxruntime; Head(3→6→2, gaussian")
    np.testing.assert_array_equal(model.input_mean["x"], MEAN)
    np.testing.assert_array_equal(model.input_scale["x"], SCALE)
    np.testing.assert_array_equal(model.output_offset, OFFSET)
    np.testing.assert_array_equal(model.output_scale, UNIT)
    assert model.made == {"kbt_edge": kbt.__version__}
    assert make_model(made={"torch": "2"}).made == {"kbt_edge": kbt.__version__, "torch": "2"}
    assert "±" in repr(model.predict(X))


@pytest.mark.skipif(
    importlib.util.find_spec("emx_onnx_cgen") is None or shutil.which(os.environ.get("CC", "cc")) is None,
    reason="a compiled trunk needs emx-onnx-cgen and a C compiler",
)
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_both_backends_learn_the_same(tmp_path: Path) -> None:
    make_model().save(tmp_path / "b")
    models = [
        Model.load(tmp_path / "b", backend=backend, cache_dir=tmp_path) for backend in ("compiled", "onnxruntime")
    ]
    assert [model.trunk.backend for model in models] == ["compiled", "onnxruntime"]
    for step in range(50):
        x, y = X + np.sin(step + np.arange(4)), Y + UNIT * np.cos(step)
        p, q = (model.predict(x) for model in models)
        np.testing.assert_allclose(p.mean, q.mean, rtol=1e-4)
        np.testing.assert_allclose(p.total_var, q.total_var, rtol=1e-3)
        for model in models:
            model.observe(y)


# Copies.


def learned(model: Model) -> tuple[bytes, str]:
    """In another process: what the model is after three samples, and how it runs its trunk."""
    learn(model, 0, 3)
    return model.head.to_bytes(), model.trunk.backend


COPIES: dict[str, Callable[[Model], Model]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_copy_is_a_model_of_its_own(how: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(head=make_head(dtype=dtype, noise="adaptive"), made={"by": "a test"})
    learn(model, 0, 5)
    model.save(tmp_path / "b")
    model.predict(X)
    twin = COPIES[how](model)
    assert twin.bundle() == model.bundle()
    assert twin.trunk.backend == model.trunk.backend == "onnxruntime"
    with pytest.raises(RangeError, match="call predict first"):
        twin.observe(Y)
    with pytest.raises(BundleError, match="expected a folder"):
        twin.save()
    before = model.head.to_bytes()
    learn(twin, 5, 5)
    assert model.head.to_bytes() == before
    learn(model, 5, 5)
    assert model.head.to_bytes() == twin.head.to_bytes()


def test_a_copy_of_a_token_model_is_a_model_of_its_own() -> None:
    head = kbt.Head(np.ones((5, 3)), output="softmax", noise="multinomial", max_rows=4)
    model = Model(tiny_onnx.Tokens(5, 4, d=3).onnx, head, backend="onnxruntime")
    twin = pickle.loads(pickle.dumps(model))
    ids = np.array([1, 2, 3, 4])
    twin.update((ids, ids), ids)
    assert (model.head.samples, twin.head.samples) == (0, 1)


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_a_model_is_sent_to_a_process_that_was_spawned() -> None:
    model = make_model(head=make_head())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(learned, (model,))
    assert model.head.samples == 0
    assert there == learned(model)


# The bundle.


def learn(model: Model, start: int, count: int) -> list[Any]:
    answers = []
    for step in range(start, start + count):
        p = model.predict(X + np.sin(step + np.arange(4)))
        answers.append((p.mean.tobytes(), p.cov.tobytes(), model.observe(Y + UNIT * np.cos(step))))
    return answers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loaded_model_goes_on_as_if_nothing_had_happened(tmp_path: Path, dtype: str) -> None:
    model = make_model(head=make_head(dtype=dtype, noise="adaptive"))
    learn(model, 0, 20)
    assert model.save(tmp_path / "b") == tmp_path / "b"
    loaded = Model.load(tmp_path / "b", backend="onnxruntime")
    assert loaded.bundle() == model.bundle() == bundles.read(tmp_path / "b")
    assert loaded.head.samples == 20
    assert learn(loaded, 20, 20) == learn(model, 20, 20)
    assert loaded.head.to_bytes() == model.head.to_bytes()


def test_a_model_is_saved_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with pytest.raises(BundleError, match="expected a folder, as this model was never saved"):
        model.save()
    model.save(tmp_path / "a")
    learn(model, 0, 3)
    model.save()
    loaded = Model.load(str(tmp_path / "a"), backend="onnxruntime")
    assert loaded.head.to_bytes() == model.head.to_bytes()
    learn(loaded, 0, 3)
    loaded.save()
    assert Model.load(tmp_path / "a", backend="onnxruntime").head.samples == 6
    loaded.save(tmp_path / "b")
    learn(loaded, 0, 1)
    loaded.save()  # where it was saved last
    assert [Model.load(tmp_path / n, backend="onnxruntime").head.samples for n in "ab"] == [6, 7]


def test_the_shipped_bundle_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "SHIPPED", tmp_path / "package")
    make_model().save(tmp_path / "package" / "cartpole")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    model = Model.load("cartpole", backend="onnxruntime")
    learn(model, 0, 5)
    with pytest.raises(BundleError, match="expected a folder"):
        model.save()
    model.save("cartpole")
    with pytest.raises(BundleError, match=r'write "\./cartpole" for .* or "kbt_edge:cartpole"'):
        Model.load("cartpole", backend="onnxruntime")
    assert Model.load("./cartpole", backend="onnxruntime").head.samples == 5
    assert Model.load("kbt_edge:cartpole", backend="onnxruntime").head.samples == 0
    assert bundles.read(tmp_path / "package" / "cartpole").head == make_model().head.to_bytes()
    with pytest.raises(BundleError, match="the name of a bundle of the package"):
        model.save("kbt_edge:cartpole")
    assert [path.name for path in Path().iterdir()] == ["cartpole"]


def exchange(folder: Path, name: str, data: bytes, **said: Any) -> None:
    """Another file in a bundle, described correctly, so that only its meaning is wrong."""
    (folder / name).write_bytes(data)
    text = json.loads((folder / "bundle.json").read_text())
    part = text["trunk" if name == "trunk.onnx" else "head"]
    part |= {"bytes": len(data), **said}
    if name == "trunk.onnx":
        part["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "bundle.json").write_text(json.dumps(text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model().save(tmp_path / "b")


def external_data() -> bytes:
    """A trunk whose weights lie in another file."""
    field, node = tiny_onnx.field, tiny_onnx.node
    away = field(13, field(1, "location") + field(2, "../../etc/passwd")) + field(14, 1)
    tensor = field(1, 4) + field(1, 3) + field(2, tiny_onnx.FLOAT) + field(8, "W") + away
    graph = field(1, node("MatMul", ["x", "W"], "h")) + field(2, "g") + field(5, tensor)
    graph += field(11, tiny_onnx.value_info("x", (1, 4), 1)) + field(12, tiny_onnx.value_info("h", (1, 3), 1))
    return field(1, 10) + field(7, graph) + field(8, field(2, 20))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiny_onnx.Control(d=5).onnx, r"expected inputs, rows and d as in bundle\.json"),
        (tiny_onnx.Control(rows=2).onnx, r"expected inputs, rows and d as in bundle\.json"),
        (tiny_onnx.TwoInputs().onnx, r"expected inputs, rows and d as in bundle\.json"),
        (external_data(), "keeps its values in another file"),
        (b"not ONNX", "ONNX file"),
    ],
)
def test_a_trunk_that_is_not_what_the_bundle_says_is_rejected(folder: Path, data: bytes, message: str) -> None:
    exchange(folder, "trunk.onnx", data)
    with pytest.raises(BundleError, match=f"trunk.onnx: .*{message}"):
        Model.load(folder, backend="onnxruntime")


def test_a_trunk_and_a_head_of_different_width_are_rejected(folder: Path) -> None:
    other = kbt.Head(np.ones((2, 5)), dtype="float64")
    exchange(folder, "head.kbt", other.to_bytes(), widths=[5, 2])
    with pytest.raises(BundleError, match=r"head\.widths\[0\]: expected trunk\.d = 3, got 5"):
        Model.load(folder, backend="onnxruntime")


def test_a_state_that_is_not_a_number_is_rejected(folder: Path) -> None:
    head = make_head(dtype="float64")
    blob = bytearray(head.to_bytes())
    first = blob.index(struct.pack("<d", head.layers[0].mean[0, 0]))
    for value in (math.nan, math.inf):
        struct.pack_into("<d", blob, first, value)
        struct.pack_into("<I", blob, 16, zlib.crc32(blob[24:]))
        exchange(folder, "head.kbt", bytes(blob))
        with pytest.raises(BundleError, match=r"head\.kbt: .*state"):
            Model.load(folder, backend="onnxruntime")


def test_loading_says_which_backend_it_could_not_have(folder: Path) -> None:
    with pytest.raises(RangeError, match="providers"):
        Model.load(folder, providers=["NoSuchProvider"])
    with pytest.raises((BackendError, RangeError), match="backend='compiled'"):
        Model.load(folder, backend="compiled", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "make",
    [lambda: make_model(head=make_head(dtype="float32")), lambda: Model.load("cartpole")],
    ids=["made", "shipped"],
)
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_the_short_way_and_the_long_way_agree(make: Callable[[], Model]) -> None:
    """Plain arrays take one crossing into C; the long way converts them and calls scaling, trunk and head apart."""
    short, long = make(), make()
    rng = np.random.default_rng(4)
    for _ in range(30):
        x, y = rng.normal(size=short.trunk.inputs[0].shape), rng.normal(size=short.head.d_o)
        p, q = short.predict(x), long.predict(x.tolist())
        for got, want in zip(p, q, strict=True):
            assert got.tobytes() == want.tobytes()
        assert short.observe(y) == long.observe(y.tolist())
    assert short.head.samples == long.head.samples == 30


@pytest.mark.skipif(
    importlib.util.find_spec("emx_onnx_cgen") is None or shutil.which(os.environ.get("CC", "cc")) is None,
    reason="a compiled trunk needs emx-onnx-cgen and a C compiler",
)
@pytest.mark.parametrize("rows", one_fast([1, 3]))
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_every_form_of_an_input_and_a_target_means_the_same(rows: int, tmp_path: Path) -> None:
    """Whatever the short way cannot take goes the long way, to the same bits."""
    head = make_head(dtype="float32", max_rows=rows)
    model = make_model(tiny_onnx.Control(rows=rows), head=head, backend="compiled", cache_dir=tmp_path)
    fresh = model.head.to_bytes()
    x, y = np.arange(4.0 * rows).reshape(rows, 4) / 8, np.arange(2.0 * rows).reshape(rows, 2) * 8 + 64
    wide_x, wide_y = np.repeat(x, 2, axis=1), np.repeat(y, 2, axis=1)
    inputs = [x, x.astype(np.float32), x.astype(np.float16), x.tolist(), wide_x[:, ::2], np.asfortranarray(x)]
    targets = [y, y.astype(np.float32), y.astype(np.int64), y.tolist(), wide_y[:, ::2]]
    if rows == 1:
        inputs += [x[0], x[0].astype(np.float32), wide_x[0, ::2]]
        targets = [target[0] for target in targets]  # type: ignore[index]
    predictions, states = set(), set()
    for each in inputs:
        predicted = model.predict(each)
        predictions.add((predicted.mean.tobytes(), predicted.cov.tobytes(), predicted.total_var.tobytes()))
    for each in targets:
        model.head.restore(fresh)
        model.predict(x)
        model.observe(each)
        states.add(model.head.to_bytes())
    assert len(predictions) == len(states) == 1
    for wrong in (x[:, :3], x[:, :, None], np.zeros((rows + 1, 4)), np.float64(1.0), x.reshape(-1, 2, 2)):
        with pytest.raises(ShapeError):
            model.predict(wrong)
    for wrong in (y[:, :1], np.zeros((rows + 1, 2)), np.zeros((rows, 2, 1))):
        model.predict(x)
        with pytest.raises(ShapeError):
            model.observe(wrong)
    assert model.head.to_bytes() == states.pop()
