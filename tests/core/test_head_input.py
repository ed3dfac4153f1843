"""Bad input is rejected with a typed error that names it, and nothing changes; odd but good input is read correctly."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import pairwise

import kbt_edge as kbt
from kbt_edge import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.flight import FlightLog

D, D_O, ROWS = 3, 2, 3
H = np.array([0.5, -1.0, 2.0], np.float32)
Y = np.array([1.0, -2.0], np.float32)

Bad = dict[str, tuple[Any, type[KbtError]]]


def make(**settings: Any) -> kbt.Head:
    """A head that has already learned something, so that there is something to spoil."""
    settings = {"hidden": (7,), "prior_var": (1e-3, 0.5), "noise_var": 1e-2, "max_rows": ROWS, **settings}
    head = kbt.Head([[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]], [0.5, -0.5], **settings)
    head.update(0.5 * H, 1 if settings.get("output") == "softmax" else Y)
    return head


def rejected(
    error: type[KbtError],
    argument: str,
    call: Callable[[], object],
    head: kbt.Head | None = None,
    says: str = "expected .*got",
) -> None:
    """``call`` raises exactly ``error``; its message names the argument and ``says`` the rest; ``head`` is unmoved."""
    before = head.to_bytes() if head else None
    with pytest.raises(KbtError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert re.match(rf"(.*\W)?{re.escape(argument)}(\W|$)", message), message
    assert re.search(says, message, re.DOTALL), message
    if head:
        assert head.to_bytes() == before


def bad_reals(good: np.ndarray) -> Bad:
    """What no argument that wants an array of real numbers like ``good`` may accept."""

    def with_value(x: Any, dtype: Any) -> np.ndarray:
        array = good.astype(dtype)
        array.flat[-1] = x
        return array

    return {
        "nan": (with_value(np.nan, np.float32), NumericsError),
        "nan in a list": (with_value(np.nan, np.float64).tolist(), NumericsError),
        "inf": (with_value(np.inf, np.float32), NumericsError),
        "minus inf": (with_value(-np.inf, np.float64), NumericsError),
        "beyond float32": (with_value(1e39, np.float64), NumericsError),
        "beyond float32, extended": (with_value(np.longdouble("1e300"), np.longdouble), NumericsError),
        "complex": (good.astype(complex), DtypeError),
        "strings": (good.astype(str), DtypeError),
        "objects": (good.astype(object), DtypeError),
        "booleans": (good > 0, DtypeError),
        "dates": (good.astype(np.int64).astype("datetime64[s]"), DtypeError),
        "masked": (np.ma.masked_array(good, mask=good > 0), DtypeError),
        "records": (np.zeros(good.shape, [("x", "f4")]), DtypeError),
        "ragged": ([[1.0, 2.0], [3.0]], DtypeError),
        "a number no float holds": ([10**400] * good.size, DtypeError),
        "a dictionary": ({"a": 1.0}, DtypeError),
        "None": (None, DtypeError),
        "too short": (good[..., :-1], ShapeError),
        "too long": (np.concatenate([good, good], axis=-1), ShapeError),
        "too deep": (good[None, None, None], ShapeError),
        "empty": (good[:0], ShapeError),
    }


def table(bad: Bad) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("value", "error"), bad.values(), ids=bad.keys())


# ---- predict, update, observe --------------------------------------------------------------------------------------

BAD_H: Bad = bad_reals(H) | {
    "0-d": (np.float32(1.0), ShapeError),
    "a number": (1.0, ShapeError),
    "no rows": (np.zeros((0, D), np.float32), ShapeError),
    "too many rows": (np.zeros((ROWS + 1, D), np.float32), ShapeError),
    "too many rows in a list": (np.zeros((ROWS + 1, D)).tolist(), ShapeError),
    "transposed": (np.zeros((D, ROWS - 1), np.float32), ShapeError),
    "nan in one row": (np.stack([H, H * np.nan]), NumericsError),
}
BAD_Y: Bad = bad_reals(Y) | {
    "0-d": (np.float32(1.0), ShapeError),
    "rows that h has not": (np.stack([Y, Y]), ShapeError),
}
BAD_NOISE: Bad = {name: case for name, case in bad_reals(Y).items() if name not in ("None", "too short")} | {
    "negative": (-1.0, RangeError),
    "negative, plain array": (np.array([0.1, -0.1], np.float32), RangeError),
    "nan": (np.nan, NumericsError),
    "matrix with a negative variance": ([[1.0, 0.0], [0.0, -1.0]], RangeError),
    "asymmetric": ([[1.0, 0.5], [0.4, 1.0]], RangeError),
    "indefinite": ([[1.0, 2.0], [2.0, 1.0]], RangeError),
    "matrix of another size": (np.eye(3), ShapeError),
    "flattened matrix": (np.eye(2, dtype=np.float32).ravel(), ShapeError),
    "flattened matrix in a list": ([1.0, 0.0, 0.0, 1.0], ShapeError),
    "a row of variances": (np.ones((1, 2), np.float32), ShapeError),
}


@table(BAD_H)
def test_predict_rejects_a_bad_h(value: Any, error: type[KbtError]) -> None:
    head = make()
    rejected(error, "h", lambda: head.predict(value), head)


@table(BAD_H)
def test_update_rejects_a_bad_h(value: Any, error: type[KbtError]) -> None:
    head = make()
    head.predict(H)  # update must never fall back on an earlier prediction
    y = np.zeros((np.shape(value)[0], D_O)) if isinstance(value, np.ndarray) and value.ndim == 2 else Y
    rejected(error, "h", lambda: head.update(value, y), head)


@table(BAD_Y)
def test_update_rejects_a_bad_y(value: Any, error: type[KbtError]) -> None:
    head = make()
    rejected(error, "y", lambda: head.update(H, value), head)


@table(BAD_Y)
def test_observe_rejects_a_bad_y_and_keeps_the_prediction(value: Any, error: type[KbtError]) -> None:
    head, other = make(), make()
    head.predict(H)
    rejected(error, "y", lambda: head.observe(value), head)
    assert head.observe(Y) == other.update(H, Y)
    assert head.to_bytes() == other.to_bytes()


@table(BAD_NOISE)
def test_update_and_observe_reject_a_bad_noise_var(value: Any, error: type[KbtError]) -> None:
    head = make(noise="matrix")
    rejected(error, "noise_var", lambda: head.update(H, Y, value), head)
    head.predict(H)
    rejected(error, "noise_var", lambda: head.observe(Y, value), head)


@pytest.mark.parametrize("noise", ["adaptive", "constant"])
def test_a_noise_matrix_needs_a_head_that_was_made_for_it(noise: Any) -> None:
    head = make(noise=noise)
    says = "expected .*got" if noise == "adaptive" else "noise='matrix'"
    rejected(ShapeError, "noise_var", lambda: head.update(H, Y, np.eye(2)), head, says)


def test_outputs_that_share_a_factor_reject_noises_of_their_own() -> None:
    head = make(hidden=(), drift=0.0, prior_var=1.0)
    assert head.config["covariance"] == "shared"
    rejected(RangeError, "noise_var", lambda: head.update(H, Y, [0.1, 0.2]), head)
    own = make(hidden=(), drift=0.0, prior_var=1.0, noise_var=(0.1, 0.2))
    assert own.config["covariance"] == "neuron"
    assert own.update(H, Y, [0.3, 0.2]).status == "ok"


def test_an_adaptive_head_rejects_a_noise_matrix() -> None:
    rejected(ShapeError, "noise_var", lambda: make(noise="adaptive", noise_var=np.eye(2)))


@pytest.mark.parametrize(
    "value", [0.1, np.array([0.1, 0.1], np.float32), np.eye(2)], ids=["scalar", "vector", "matrix"]
)
def test_a_multinomial_head_rejects_a_noise_var(value: Any) -> None:
    head = make(output="softmax", noise="multinomial")
    rejected(RangeError, "noise_var", lambda: head.update(H, 1, value), head)


BAD_LABELS: Bad = {
    "negative": (-1, RangeError),
    "too large": (2, RangeError),
    "negative, plain array": (np.array([-1], np.int32)[0], RangeError),
    "too large, int32": (np.array(2, np.int32), RangeError),
    "beyond int32": (2**40, RangeError),
    "unsigned beyond int64": (np.uint64(2**63 + 1), RangeError),
    "wraps to a valid int32": (2**32 + 1, RangeError),
    "a float": (1.0, ShapeError),
    "a boolean": (True, DtypeError),
    "a string": ("1", DtypeError),
    "two for one row": ([0, 1, 1], ShapeError),
    "a row of one": (np.array([1]), ShapeError),
    "a row of one, int32": (np.array([1], np.int32), ShapeError),
    "no probabilities": ([0.5, 0.6], RangeError),
    "a negative probability": ([1.5, -0.5], RangeError),
    "one-hot twice": ([1, 1], RangeError),
    "nan": ([np.nan, 1.0], NumericsError),
    "empty": ([], ShapeError),
    "None": (None, DtypeError),
}


@table(BAD_LABELS)
def test_a_softmax_head_rejects_a_bad_label(value: Any, error: type[KbtError]) -> None:
    head = make(output="softmax")
    rejected(error, "y", lambda: head.update(H, value), head)
    head.predict(H)
    rejected(error, "y", lambda: head.observe(value), head)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("labels", [[[0], [1]], [[0, 1]], [0], [0, 1, 1], [0, 2]], ids=str)
def test_labels_of_the_wrong_shape_or_range_are_rejected_in_every_integer_type(labels: Any, dtype: type) -> None:
    head = make(output="softmax")
    y: np.ndarray = np.array(labels, dtype)
    error = RangeError if y.max() > 1 else ShapeError
    rejected(error, "y", lambda: head.update(np.stack([H, H]), y), head)


def test_a_gaussian_head_learns_no_labels() -> None:
    head = make()
    rejected(ShapeError, "y", lambda: head.update(H, 1), head)
    rejected(ShapeError, "y", lambda: head.update(H, np.array([1], np.int32)), head)


def test_observe_needs_a_prediction_of_its_own() -> None:
    head = make()
    # The update before has used its forward pass.
    rejected(RangeError, "observe", lambda: head.observe(Y), head, "call predict first")
    head.predict(H)
    head.observe(Y)
    rejected(RangeError, "observe", lambda: head.observe(Y), head, "call predict first")
    head.predict(H)
    head.update(H, Y)
    rejected(RangeError, "observe", lambda: head.observe(Y), head, "call predict first")
    head.predict(H)
    head.restore(head.to_bytes())
    rejected(RangeError, "observe", lambda: head.observe(Y), head, "call predict first")


def test_after_a_rejected_update_observe_learns_at_the_h_that_was_predicted() -> None:
    head, other = make(), make()
    head.predict(H)
    rejected(NumericsError, "y", lambda: head.update(-7 * H, np.full(2, 3e38, np.float32)), head)
    head.observe(Y)
    other.update(H, Y)
    assert head.to_bytes() == other.to_bytes()


@pytest.mark.parametrize("h", [H, H[None]], ids=["one row", "one row of several"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_is_a_target_for_one_output(h: np.ndarray, dtype: str) -> None:
    answers = set()
    numbers = [2, 2.0, np.float32(2), np.float64(2), np.int16(2), np.array(2.0), np.array(2)]
    for y in (*numbers, np.full((*h.shape[:-1], 1), 2.0)):
        head = kbt.Head(np.ones((1, D)), drift=0.0, noise_var=0.1, dtype=dtype, max_rows=2)
        head.predict(h)
        answers.add((head.observe(y), head.update(h, y), head.update(h, y, 0.5), head.to_bytes()))
    assert len(answers) == 1
    rejected(DtypeError, "y", lambda: head.update(h, True), head)
    rejected(ShapeError, "y", lambda: head.update(np.stack([H, H]), 2.0), head)


@pytest.mark.parametrize("errors", ["warn", "raise"])
@pytest.mark.parametrize("form", [list, np.array, np.float32], ids=["list", "float64", "float32"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "y: expected finite numbers, got nan at index 1"),
        (3e38, r"h, y: expected .* got \|h\| up to 2, \|y\| up to 3e\+38"),
        (1e39, "y: expected numbers that fit into float32, got 1e[+]39"),
    ],
    ids=str,
)
def test_a_rejected_sample_is_counted_once_and_recorded_once(
    value: float, message: str, form: Callable[..., Any], errors: Any
) -> None:
    if value == 1e39 and form is np.float32:
        value, message = np.inf, "y: expected finite numbers, got inf at index 1"
    head = make()
    head.record(10)
    y = form([1.0, value])
    with np.errstate(all=errors):
        rejected(NumericsError, "y", lambda: head.update(H, y), head)
        with pytest.raises(NumericsError, match=message):
            head.update(H, y)
    assert head.counters.rejected == len(FlightLog(head.flight_log())) == 2
    head.predict(H)
    with np.errstate(all=errors):
        rejected(NumericsError, "y", lambda: head.observe(y), head)
    assert head.counters.rejected == len(FlightLog(head.flight_log())) == 3


def test_a_rejected_prediction_is_counted_once() -> None:
    head = make()
    for count, h in enumerate(
        ([1e38] * D, np.full(D, 1e38), np.full(D, 1e38, np.float32), [1e39] * D, [np.nan] * D), 1
    ):
        rejected(NumericsError, "h", partial(head.predict, h), head)
        assert head.counters.rejected == count


class Calling:
    """An array that calls something while it is converted."""

    def __init__(self, value: Any, call: Callable[[], object]) -> None:
        self.value, self.call = value, call

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.call()
        return np.array(self.value, dtype)


@pytest.mark.parametrize("argument", ["y", "noise_var"])
def test_a_target_that_uses_the_head_while_it_is_converted_is_rejected(argument: str) -> None:
    head, other = make(), make()
    for call in (lambda: head.predict(-H), lambda: head.predict(H), lambda: head.observe(Y)):
        head.predict(H)
        calling = Calling(Y, call) if argument == "y" else Calling(1.0, call)
        with pytest.raises(RangeError, match=r"observe: .* another one now; pass NumPy arrays"):
            head.observe(*((calling,) if argument == "y" else (Y, calling)))
    other.update(H, Y)  # only what the last call learned itself
    assert head.to_bytes() == other.to_bytes()
    head.update(H, Calling(Y, lambda: head.predict(-H)))  # says itself where it learns
    other.update(H, Y)
    assert head.to_bytes() == other.to_bytes()


def test_dtypes_with_metadata_are_read_as_what_they_are() -> None:
    head, other = make(), make()
    marked = np.dtype(np.float32, metadata={"unit": "rad"})
    assert head.update(H.astype(marked), Y.astype(marked)) == other.update(H, Y)


def test_y_must_have_the_rows_of_the_prediction() -> None:
    head = make()
    head.predict(np.stack([H, H]))
    rejected(ShapeError, "y", lambda: head.observe(Y), head)
    rejected(ShapeError, "y", lambda: head.observe(np.stack([Y, Y, Y])), head)
    head.predict(H)
    rejected(ShapeError, "y", lambda: head.observe(np.stack([Y, Y])), head)


# ---- Head and from_means -------------------------------------------------------------------------------------------

WEIGHT = np.array([[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]], np.float32)
MEANS = [np.ones((4, D + 1), np.float32), np.ones((D_O, 5), np.float32)]
BAD_WEIGHT: Bad = {name: case for name, case in bad_reals(WEIGHT).items() if name not in ("too short", "too long")} | {
    "1-d": (H, ShapeError),
    "0-d": (1.0, ShapeError),
    "no inputs": (np.zeros((2, 0)), ShapeError),
    "no outputs": (np.zeros((0, 2)), ShapeError),
}
BAD_BIAS: Bad = {name: case for name, case in bad_reals(Y).items() if name != "None"} | {
    "0-d": (1.0, ShapeError),
    "a column": (Y[:, None], ShapeError),
}


@table(BAD_WEIGHT)
def test_a_bad_weight_is_rejected(value: Any, error: type[KbtError]) -> None:
    rejected(error, "weight", lambda: kbt.Head(value, Y))


@table(BAD_BIAS)
def test_a_bad_bias_is_rejected(value: Any, error: type[KbtError]) -> None:
    rejected(error, "bias", lambda: kbt.Head(WEIGHT, value))


@table(
    bad_reals(MEANS[1])
    | {"1-d": (Y, ShapeError), "0-d": (1.0, ShapeError), "no neurons": (np.zeros((0, 5)), ShapeError)}
)
def test_bad_means_are_rejected(value: Any, error: type[KbtError]) -> None:
    rejected(error, "means[1]", lambda: kbt.Head.from_means([MEANS[0], value]))


@pytest.mark.parametrize(
    "means", [[], None, 3.0, [np.ones(4)], [np.ones((2, 1))]], ids=["empty", "None", "3.0", "1-d", "bias only"]
)
def test_means_that_are_no_layers_are_rejected(means: Any) -> None:
    with pytest.raises(KbtError, match=r"means.*expected.*got"):
        kbt.Head.from_means(means)


SETTINGS: list[tuple[str, Any, type[KbtError], dict[str, Any]]] = [
    ("hidden", (5,), RangeError, {}),
    ("hidden", (8, 5), RangeError, {}),
    ("hidden", (0,), RangeError, {}),
    ("hidden", (-6,), RangeError, {}),
    ("hidden", (2**20 + 1,), RangeError, {}),
    ("hidden", (2**70,), RangeError, {}),
    ("hidden", (8.0,), DtypeError, {}),
    ("hidden", (True,), DtypeError, {}),
    ("hidden", "32", DtypeError, {}),
    ("hidden", 32, DtypeError, {}),
    ("hidden", None, DtypeError, {}),
    ("hidden", (6,) * 8, RangeError, {}),
    ("hidden", (2**20, 2**20), RangeError, {"covariance": "full"}),
    ("hidden", (2**20,) * 7, RangeError, {"max_rows": 2**20}),
    ("hidden", (2**20,), RangeError, {"covariance": "full", "max_rows": 64}),  # countable, but no machine has it
    *[("prior_var", x, RangeError, {}) for x in (0.0, -1.0, np.nan, np.inf, 1e300, (1.0, -1.0), (np.nan, 1.0))],
    *[("prior_var", x, ShapeError, {}) for x in ((1.0,), (1.0, 1.0, 1.0), ())],
    *[("prior_var", x, DtypeError, {}) for x in ("1", True, 1j, (1.0, None), [[1.0, 1.0]])],
    *[
        ("noise_var", x, RangeError, {})
        for x in (-1e-3, (1.0, -1.0), [[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.1], [0.0, 1.0]])
    ],
    *[("noise_var", x, NumericsError, {}) for x in (np.nan, np.inf, 1e39, (1.0, np.nan))],
    *[("noise_var", x, ShapeError, {}) for x in ((1.0, 1.0, 1.0), np.eye(3), [], np.ones((2, 1)))],
    *[("noise_var", x, DtypeError, {}) for x in ("1", True, 1j, {})],
    *[("output", x, RangeError, {}) for x in ("Gaussian", "", None, 0, b"gaussian")],
    *[("covariance", x, RangeError, {}) for x in ("FULL", None, 1)],
    *[("rule", x, RangeError, {}) for x in ("kalman", None, 0)],
    ("rule", "replace", RangeError, {"output": "softmax"}),
    *[("noise", x, RangeError, {}) for x in ("fixed", 0.1, "multinomial")],
    ("noise", "adaptive", RangeError, {"rule": "replace"}),
    ("noise", "adaptive", RangeError, {"output": "softmax"}),
    *[("relu_order", x, RangeError, {}) for x in (1, 13, -2)],
    *[("relu_order", x, DtypeError, {}) for x in (2.0, "2", None, True)],
    *[("softmax_order", x, RangeError, {}) for x in (-1, 3)],
    *[("softmax_order", x, DtypeError, {}) for x in (1.0, None, True)],
    *[("input_var", x, RangeError, {}) for x in (-1e-9, np.nan, np.inf, 1e30)],
    *[("input_var", x, DtypeError, {}) for x in ("0", None, False, 1j)],
    *[("forgetting", x, RangeError, {}) for x in (0.0, 1.0 + 1e-9, -0.5, np.nan, np.inf)],
    *[("forgetting", x, DtypeError, {}) for x in ("1", None, True)],
    *[("gate", x, RangeError, {}) for x in (0.0, -1.0, np.nan, np.inf)],
    *[("gate", x, DtypeError, {}) for x in ("9", True, 9j)],
    *[("max_rows", x, RangeError, {}) for x in (0, -1, 2**20 + 1)],
    *[("max_rows", x, DtypeError, {}) for x in (1.0, "1", None, True)],
    ("max_rows", 2**20, RangeError, {"covariance": "full"}),
    *[("dtype", x, RangeError, {}) for x in ("float16", "int32", ">f4", "nonsense", np.longdouble, complex, ...)],
    *[("seed", x, RangeError, {}) for x in (-1, 2**64)],
    *[("seed", x, DtypeError, {}) for x in (1.0, "1", None, True)],
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "others"),
    SETTINGS,
    ids=[f"{name}={value!r}"[:40] for name, value, *_ in SETTINGS],
)
def test_a_bad_setting_is_rejected(argument: str, value: Any, error: type[KbtError], others: dict[str, Any]) -> None:
    settings = {"hidden": (6,), **others, argument: value}
    rejected(error, argument, lambda: kbt.Head(WEIGHT, Y, **settings))


def test_a_head_that_takes_more_than_a_gibibyte_is_made_only_if_asked_for() -> None:
    """Rejected before anything is allocated: no machine has room for the second one."""
    weight = np.ones((1, 16))
    for settings in ({"hidden": (100_000,)}, {"hidden": (20_000,), "covariance": "full"}):
        said = r"max_memory = 1 GiB, got one of [\d.e+]+ GiB \(outputs x width: 1 x \d+,"
        with pytest.raises(RangeError, match=said):
            kbt.Head(weight, **settings)
    means = [np.zeros((40_000, 17), np.float32), np.zeros((1, 40_001), np.float32)]
    said = r"widths 16 → 40000 → 1, .*covariance='diagonal' takes [\d.]+ MiB; or use a larger max_memory"
    with pytest.raises(RangeError, match=said):
        kbt.Head.from_means(means)
    assert kbt.Head.from_means(means, covariance="diagonal").nbytes < 2**30
    small = kbt.Head(weight)
    assert kbt.Head(weight, max_memory=small.nbytes).nbytes == small.nbytes
    with pytest.raises(RangeError, match="max_memory"):
        kbt.Head(weight, max_memory=small.nbytes - 1)
    rejected(DtypeError, "max_memory", lambda: kbt.Head(weight, max_memory=1e9))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"noise": "full"}, {"hidden": (6,)}, {"output": "softmax"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_input_whose_square_overflows_is_rejected_by_a_watchful_head(settings: dict[str, Any], dtype: str) -> None:
    """Its prior is in units of |h|²."""
    rng = np.random.default_rng(0)
    huge = 3e38 if dtype == "float32" else 1e200
    h = np.array([[1.0, huge, 0.5], [1.0, 2.0, 3.0]])
    y = np.array([0, 1]) if "output" in settings else rng.normal(size=(2, 2))
    for learned in (0, 5):
        head = kbt.Head(np.zeros((2, 3)), max_rows=2, dtype=dtype, **settings)  # type: ignore[arg-type]
        for _ in range(learned):
            head.update(rng.normal(size=(2, 3)), y)
        before = head.to_bytes()
        for call in (lambda head=head: head.update(h, y), lambda head=head: head.predict(h)):
            with pytest.raises(NumericsError):
                call()
        assert head.to_bytes() == before
        head.update(rng.normal(size=(2, 3)), y)
        assert all(np.isfinite(mean).all() for mean in head.means)
        assert kbt.Head.from_bytes(head.to_bytes()).to_bytes() == head.to_bytes()


def test_softmax_needs_two_outputs() -> None:
    rejected(RangeError, "output", lambda: kbt.Head(WEIGHT[:1], output="softmax"))


def test_an_unknown_keyword_is_a_type_error() -> None:
    for make_head in (lambda: kbt.Head(WEIGHT, colour=1), lambda: kbt.Head.from_means(MEANS, colour=1)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            make_head()


# ---- from_bytes, restore, load -------------------------------------------------------------------------------------

BAD_BLOBS: dict[str, tuple[Callable[[bytes], Any], type[KbtError]]] = {
    "text": (lambda good: "KBTS", DtypeError),
    "None": (lambda good: None, DtypeError),
    "a number": (lambda good: len(good), DtypeError),
    "empty": (lambda good: b"", BundleError),
    "foreign": (lambda good: b"\x89PNG" + good[4:], BundleError),
    "truncated": (lambda good: good[:-1], BundleError),
    "trailing byte": (lambda good: good + b"\0", BundleError),
    "damaged": (lambda good: good[:-1] + bytes([good[-1] ^ 1]), BundleError),
    "newer version": (lambda good: good[:4] + b"\4" + good[5:], BundleError),
}


@pytest.mark.parametrize(("spoil", "error"), BAD_BLOBS.values(), ids=BAD_BLOBS.keys())
def test_a_bad_blob_is_rejected(spoil: Callable[[bytes], Any], error: type[KbtError]) -> None:
    head = make()
    blob = spoil(head.to_bytes())
    says = "head state" if error is BundleError else "expected .*got"
    rejected(error, "blob", lambda: head.restore(blob), head, says)
    rejected(error, "blob", lambda: kbt.Head.from_bytes(blob), says=says)


def test_the_blob_of_another_configuration_is_rejected() -> None:
    head = make()
    for other in (
        make(forgetting=0.5),
        make(hidden=(8,)),
        make(dtype="float64"),
        make(output="softmax"),
        make(gate=9.0),
    ):
        rejected(
            BundleError, "blob", partial(head.restore, other.to_bytes()), head, "head state of another configuration"
        )


@pytest.mark.parametrize("content", [b"", b"KBTS", b"\x7fELF" * 100], ids=["empty", "short", "foreign"])
def test_load_names_the_file_it_cannot_use(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "head.kbt"
    path.write_bytes(content)
    rejected(BundleError, str(path), lambda: kbt.Head.load(path), says="head state")


@pytest.mark.parametrize("name", ["missing.kbt", ".", "nowhere/head.kbt"])
def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(BundleError, match=re.escape(str(path))):
        kbt.Head.load(path)
    if name != "missing.kbt":
        with pytest.raises(BundleError, match=re.escape(str(path))):
            make().save(path)


# ---- odd but good --------------------------------------------------------------------------------------------------


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view: np.ndarray = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def spaced(array: np.ndarray) -> np.ndarray:
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77, array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


class Exported:
    """An object that only offers itself as an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "negative strides": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "reversed rows": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "fortran": np.asfortranarray,
    "every other column": spaced,
    "column of a cube": lambda a: np.stack([a, a + 1], axis=-1)[..., 0],
    "broadcast view": lambda a: np.lib.stride_tricks.as_strided(a, a.shape, a.strides, writeable=False),
    "read-only": read_only,
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "unaligned": unaligned,
    "unaligned big-endian": lambda a: unaligned(a.astype(a.dtype.newbyteorder(">"))),
    "wider": lambda a: a.astype(np.float64 if a.dtype.kind == "f" else np.int64),
    "extended": lambda a: a.astype(np.longdouble if a.dtype.kind == "f" else np.uint64),
    "half": lambda a: a.astype(np.float16 if a.dtype.kind == "f" else np.int8),
    "integers": lambda a: a.astype(np.int16),
    "nested lists": lambda a: a.tolist(),
    "array protocol": Exported,
    "matrix subclass": lambda a: np.asarray(a).view(type("Sub", (np.ndarray,), {})),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("kind", ["gaussian", "one-hot", "labels"])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_every_form_of_an_array_gives_the_result_of_a_plain_copy(
    form: Callable[[np.ndarray], Any], kind: str, rows: int | None
) -> None:
    rng = np.random.default_rng(4)
    lead = () if rows is None else (rows,)
    # small integers: exact in every number type tried here
    h = rng.integers(-3, 4, (*lead, D)).astype(np.float32)
    y: np.ndarray
    if kind == "gaussian":
        y = rng.integers(-3, 4, (*lead, D_O)).astype(np.float32)
    else:
        labels = rng.integers(0, D_O, lead).astype(np.int32)
        y = labels if kind == "labels" else np.eye(D_O, dtype=np.float32)[labels]
    output = "gaussian" if kind == "gaussian" else "softmax"
    noise = np.array([1.0, 2.0], np.float32)

    plain, odd = make(output=output), make(output=output)
    odd_h = form(h)
    odd_y = y if np.ndim(y) == 0 else form(y)
    for a, b in zip(plain.predict(h), odd.predict(odd_h), strict=True):
        np.testing.assert_array_equal(a, b)
    assert plain.update(h, y) == odd.update(odd_h, odd_y)
    plain.predict(h)
    odd.predict(odd_h)
    assert plain.observe(y, noise) == odd.observe(odd_y, form(noise))
    assert plain.to_bytes() == odd.to_bytes()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_a_readout_gives_the_same_head(form: Callable[[np.ndarray], Any]) -> None:
    weight, bias = np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.array([3.0, 4.0], np.float32)
    noise = np.array([[2.0, 1.0], [1.0, 3.0]], np.float32)
    plain = kbt.Head(weight, bias, hidden=(6,), drift=0.0, noise_var=noise)
    same = kbt.Head(form(weight), form(bias), hidden=(6,), drift=0.0, noise_var=form(noise))
    assert same.to_bytes() == plain.to_bytes()
    means = [layer.mean for layer in plain.layers]
    same = kbt.Head.from_means([form(m) for m in means], noise_var=form(noise), drift=0.0)
    assert same.to_bytes() == plain.to_bytes()


def test_the_caller_may_reuse_its_buffer_between_predict_and_observe() -> None:
    head, other = make(), make()
    h = H.copy()
    head.predict(h)
    h[:] = np.nan
    assert head.observe(Y) == other.update(H, Y)
    assert head.to_bytes() == other.to_bytes()


def test_results_are_the_callers_own() -> None:
    head = make()
    before = head.to_bytes()
    p = head.predict(H)
    for array in (p.mean, p.cov, p.total_var, head.noise_var, head.layers[0].mean, head.layers[1].cov):
        array[...] = 7.0
    assert head.to_bytes() == before


# ---- extremes ------------------------------------------------------------------------------------------------------

EXTREMES = {
    "float32": [0.0, 1e-45, -1e-40, 1.2e-38, 1e-20, 1e10, -1e15, 1e20, -1e30, 3e38, -3e38],
    "float64": [0.0, 5e-324, -1e-310, 2.3e-308, 1e-160, 1e50, -1e100, 1e155, -1e250, 1.7e308, -1.7e308],
}
EXTREME_HEADS = [
    {"output": output, "rule": rule, "noise": noise, "covariance": covariance, "hidden": hidden, "dtype": dtype}
    for (output, rule, noise), covariance, hidden, dtype in itertools.product(
        [
            ("gaussian", "fuse", "constant"),
            ("gaussian", "fuse", "adaptive"),
            ("gaussian", "replace", "constant"),
            ("softmax", "fuse", "constant"),
            ("softmax", "fuse", "multinomial"),
        ],
        ("full", "neuron", "diagonal"),
        ((), (9,)),
        ("float32", "float64"),
    )
]


@pytest.mark.parametrize("settings", EXTREME_HEADS, ids=lambda s: "-".join(map(str, s.values())))
def test_extreme_finite_input_is_rejected_or_gives_a_finite_result(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    hidden = settings.pop("hidden")
    extremes = EXTREMES[settings["dtype"]]
    rng = np.random.default_rng(0)
    fresh = kbt.Head(
        [[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]], hidden=hidden, prior_var=0.1, **{"noise_var": 1e-2, **settings}
    ).to_bytes()
    rejections = 0
    for trial in range(150):
        if trial % 5 == 0:
            head = kbt.Head.from_bytes(fresh)
        h = rng.choice(extremes, D) if trial % 2 else np.full(D, extremes[trial // 2 % len(extremes)])
        y: Any = rng.choice(extremes, D_O)
        noise = None if trial % 3 or settings["noise"] != "constant" else abs(float(rng.choice(extremes)))
        if settings["output"] == "softmax":
            y = int(rng.integers(0, D_O))
        before = head.to_bytes()
        try:
            p = head.predict(h)
            u = head.update(h, y, noise)
        except NumericsError:
            rejections += 1
            assert head.to_bytes() == before
            continue
        for array in (*p, np.array([u.nis, u.log_likelihood])):
            assert np.isfinite(array).all()
        assert (p.var >= 0).all()
        for layer in head.layers:
            assert np.isfinite(layer.mean).all()
            assert np.isfinite(layer.cov).all()
        assert head.health().smallest_var >= 0
        kbt.Head.from_bytes(head.to_bytes())  # a state that its own loader accepts
    assert rejections > 0  # the extremes are extreme enough


def spread(rng: np.random.Generator, shape: tuple[int, ...], digits: float) -> np.ndarray:
    """Numbers of either sign, of every order of magnitude from 10^-digits to 10^digits."""
    sign: np.ndarray = rng.choice([-1.0, 1.0], shape)
    return sign * 10.0 ** rng.uniform(-digits, digits, shape)


@pytest.mark.parametrize("settings", pairwise(EXTREME_HEADS), ids=lambda s: "-".join(map(str, s.values())))
def test_rows_of_every_magnitude_never_leave_a_state_that_is_not_finite(settings: dict[str, Any]) -> None:
    """Joint updates, whose rows differ by more orders of magnitude than a number has digits: only rounding is left."""
    settings = dict(settings)
    hidden, rows, rng = settings.pop("hidden"), 3, np.random.default_rng(0)
    weight = [[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]]
    made = {"noise_var": 1e-2, **settings}
    fresh = kbt.Head(weight, hidden=hidden, prior_var=10.0, max_rows=rows, drift=0.0, **made).to_bytes()
    learned = 0
    for trial in range(300):
        if trial % 10 == 0:
            head = kbt.Head.from_bytes(fresh)
        digits = rng.uniform(0, 12 if settings["dtype"] == "float32" else 70)
        h = spread(rng, (rows, D), digits)
        y = spread(rng, (rows, D_O), digits) if settings["output"] == "gaussian" else rng.integers(0, D_O, rows)
        before = head.to_bytes()
        try:
            head.update(h, y)
            learned += 1
        except NumericsError:
            assert head.to_bytes() == before
        assert all(np.isfinite(layer.mean).all() for layer in head.layers)
        assert head.health().smallest_var >= 0
        assert np.isfinite(head.health().largest_var)
        kbt.Head.from_bytes(head.to_bytes())  # a state that its own loader accepts
    assert learned > 0


@pytest.mark.parametrize(
    ("covariance", "outputs", "hidden", "dtype"),
    pairwise(itertools.product(["full", "neuron", "diagonal"], [1, 2, 9], [(), (8,)], ["float32", "float64"])),
)
def test_variances_never_outgrow_their_type(covariance: str, outputs: int, hidden: tuple[int, ...], dtype: str) -> None:
    """`replace` lets them grow from whatever they are to whatever the noise is, in directions of every steepness."""
    rng, learned, rejections = np.random.default_rng(0), 0, 0
    most = 30.0 if dtype == "float32" else 250.0
    for trial in range(320):
        if trial % 8 == 0:
            prior = 10.0 ** rng.uniform(-29, 3)
            settings: dict[str, Any] = {"covariance": covariance, "hidden": hidden, "dtype": dtype, "max_rows": 2}
            head = kbt.Head(np.ones((outputs, 3)), rule="replace", prior_var=prior, noise_var=1e-9, **settings)
        h = spread(rng, (1 + trial % 2, 3), most / 3) * rng.integers(0, 2, 3)
        before = head.to_bytes()
        try:
            head.update(h, np.zeros((len(h), outputs)), 10.0 ** rng.uniform(-9, most))
            learned += 1
        except NumericsError:
            rejections += 1
            assert head.to_bytes() == before
        for layer in head.layers:
            assert np.isfinite(layer.mean).all()
            assert np.isfinite(layer.cov).all()
        kbt.Head.from_bytes(head.to_bytes())  # a state that its own loader accepts
    assert learned > 30
    assert rejections > 0


@pytest.mark.parametrize(("dtype", "silent", "heard"), [("float32", 9e-13, 1.1e-12), ("float64", 9e-101, 1.1e-100)])
def test_inputs_too_small_to_say_anything_count_as_zero(dtype: str, silent: float, heard: float) -> None:
    def learned(h: float) -> bytes:
        head = kbt.Head(np.ones((1, 2)), hidden=(4,), prior_var=(1e-3, 1.0), drift=0.0, noise_var=0.1, dtype=dtype)
        head.update(np.array([h, 1.0]), np.array([2.0]))
        return head.to_bytes()

    tiny = float(np.finfo(dtype).smallest_subnormal)
    assert learned(silent) == learned(-silent) == learned(tiny) == learned(-0.0) == learned(0.0)
    assert learned(heard) != learned(0.0)


def test_the_binding_rejects_what_no_class_of_the_package_sends() -> None:
    head = kbt.Head(np.ones((1, 3)))
    before = head.to_bytes()
    for arguments in ((), (np.ones(3),) * 9):
        with pytest.raises(TypeError, match=r"expected \d arguments, got \d"):
            head.core.predict(*arguments)
    empty = type(head.core).__new__(type(head.core))
    with pytest.raises(TypeError, match="never initialised"):
        empty.predict(np.ones(3, np.float32))
    assert head.to_bytes() == before
