"""Sequences: Algorithm 1 as printed, the same without its repeats, and token by token; and what they reject."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tiny_onnx

import kbt_edge as kbt
from kbt_edge.errors import DtypeError, NumericsError, RangeError, ShapeError
from kbt_edge.model import Model
from kbt_edge.reference import ReferenceHead, prior_means
from kbt_edge.sequence import Sequences

VOCABULARY, D, START = 5, 4, 1
PAIRS = [([2, 3], [4, 2, 3]), ([4], [2]), ([3, 3, 2, 4], [3, 4, 4, 2]), ([2], [0, 3])]


def trunk(causal: bool) -> Callable[[Any, Any], Any]:
    """A small T1 in float64: mixing matrix over the target, the source summed up."""
    rng = np.random.default_rng(3)
    source, target = rng.standard_normal((2, VOCABULARY, D))
    mix = rng.standard_normal((8, 8)) / 2

    def T1(X: Any, Y: Any) -> Any:
        n = len(Y)
        return np.tanh(source[X].mean(axis=0) + (np.tril(mix) if causal else mix)[:n, :n] @ target[Y])

    return T1


SETTINGS: list[dict[str, Any]] = [
    {"covariance": "neuron", "noise": "multinomial", "hidden": (8,)},
    {"covariance": "full", "noise": "multinomial", "hidden": ()},
    {"covariance": "neuron", "noise": "constant", "hidden": (9,)},
    {"covariance": "diagonal", "noise": "constant", "hidden": (8,)},
]


def heads(hidden: tuple[int, ...], max_rows: int = 10, **settings: Any) -> tuple[kbt.Head, ReferenceHead]:
    rng = np.random.default_rng(7)
    means = prior_means(rng.standard_normal((VOCABULARY, D)), rng.standard_normal(VOCABULARY), hidden)
    settings |= {"prior_var": (0.01, 0.3)[-len(means) :], "noise_var": 0.1, "output": "softmax"}
    head = kbt.Head.from_means(means, max_rows=max_rows, dtype="float64", drift=0.0, **settings)
    return head, ReferenceHead(means, **settings)


def make(rows: str | None = None, causal: bool = True, max_rows: int = 10) -> Sequences:
    return Sequences((trunk(causal), heads(max_rows=max_rows, **SETTINGS[0])[0]), start=START, rows=rows)


def assert_same(head: kbt.Head, reference: ReferenceHead, atol: float = 1e-6) -> None:
    for layer, want in zip(head.layers, reference.layers, strict=True):
        np.testing.assert_allclose(layer.mean, want.mean, atol=atol)
        np.testing.assert_allclose(layer.cov, want.kept(want.dense()), atol=atol)


# Which rows are learned.


def algorithm_1(T1: Any, X: list[int], Y: list[int]) -> tuple[Any, Any]:
    """The paper's preprocessing, line by line. Y begins with the start token; indices here are the paper's, from 1."""
    y = len(Y)
    H_hat, Y_hat = np.empty((0, D)), np.empty((0, VOCABULARY))
    for i in range(1, y):
        H_hat = np.vstack([H_hat, T1(X, Y[0:i])])
        for j in range(2, i + 2):
            one_hot = np.zeros(VOCABULARY)
            one_hot[Y[j - 1]] = 1.0
            Y_hat = np.vstack([Y_hat, one_hot])
    return H_hat, Y_hat


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_paper_rows_are_those_of_algorithm_1(settings: dict[str, Any], causal: bool) -> None:
    head, reference = heads(**settings)
    sequences = Sequences((trunk(causal), head), start=START, rows="paper")
    for X, Y in PAIRS:
        H_hat, Y_hat = algorithm_1(trunk(causal), X, [START, *Y])
        assert len(H_hat) == len(Y_hat) == len(Y) * (len(Y) + 1) // 2
        want, got = reference.update(H_hat, Y_hat), sequences.update(X, Y)
        assert got.nis == pytest.approx(want.nis, rel=1e-6)
        assert got.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-6)
        assert_same(head, reference)
    assert head.samples == len(PAIRS)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_unique_rows_are_algorithm_1_without_its_repeats(settings: dict[str, Any]) -> None:
    head, reference = heads(**settings)
    sequences = Sequences((trunk(True), head), start=START)
    assert sequences.rows == "unique"
    for X, Y in PAIRS:
        H_hat, Y_hat = algorithm_1(trunk(True), X, [START, *Y])
        first = [i for i in range(len(H_hat)) if not any(np.allclose(H_hat[i], H_hat[k]) for k in range(i))]
        assert len(first) == len(Y)
        want, got = reference.update(H_hat[first], Y_hat[first]), sequences.update(X, Y)
        assert got.nis == pytest.approx(want.nis, rel=1e-6)
        assert_same(head, reference)


@pytest.mark.parametrize("causal", [True, False])
def test_stream_learns_the_last_row_of_each_step_in_turn(causal: bool) -> None:
    head, reference = heads(max_rows=1, **SETTINGS[0])
    sequences = Sequences((trunk(causal), head), start=START, rows="stream")
    for X, Y in PAIRS:
        updates = [
            reference.update(trunk(causal)(X, [START, *Y[:i]])[-1], np.eye(VOCABULARY)[Y[i]]) for i in range(len(Y))
        ]
        got = sequences.update(X, Y)
        assert got.status == "ok"
        assert got.nis == pytest.approx(sum(u.nis for u in updates), rel=1e-6)
        assert got.log_likelihood == pytest.approx(sum(u.log_likelihood for u in updates), rel=1e-6)
        assert_same(head, reference)
    assert head.samples == sum(len(Y) for _, Y in PAIRS)


def test_one_token_is_the_same_in_every_way() -> None:
    states = set()
    for rows in ("paper", "unique", "stream"):
        sequences = make(rows)
        sequences.update([2, 3], [4])
        states.add(b"".join(layer.mean.tobytes() + layer.cov.tobytes() for layer in sequences.head.layers))
    assert len(states) == 1


def test_a_causal_trunk_runs_once_per_pair() -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def counting(X: Any, Y: Any) -> Any:
        calls.append((X.tolist(), Y.tolist()))
        return trunk(True)(X, Y)

    for rows, expected in [
        ("unique", [[1, 4, 2]]),
        ("stream", [[1, 4, 2]]),
        ("paper", [[1], [1, 4], [1, 4, 2]]),
    ]:
        sequences = Sequences((counting, heads(**SETTINGS[0])[0]), start=START, rows=rows)
        calls.clear()
        sequences.update([2, 3], [4, 2, 3])
        assert calls == [
            ([2, 3], target) for target in expected
        ]  # the start token in front, the last one a target only
        calls.clear()
        sequences.predict([2, 3], [4])
        assert calls == [([2, 3], [1, 4])]


def test_whether_a_trunk_is_causal_is_found_by_trying() -> None:
    assert make().causal
    other = make(causal=False)
    assert not other.causal
    assert other.rows == "paper"
    with pytest.raises(RangeError, match="'unique' needs a causal trunk"):
        make("unique", causal=False)


# Prediction.


def test_a_prediction_is_the_row_of_the_next_token() -> None:
    sequences = make()
    sequences.update(*PAIRS[0])
    X, Y = PAIRS[2]
    joint = sequences.head.predict(trunk(True)(X, [START, *Y]))
    cov = joint.cov
    for i in range(len(Y) + 1):
        p = sequences.predict(X, Y[:i])
        np.testing.assert_allclose(p.mean, joint.mean[i], atol=1e-12)
        block = slice(VOCABULARY * i, VOCABULARY * (i + 1))
        np.testing.assert_allclose(p.cov, cov[block, block], atol=1e-12)
        assert p.mean.sum() == pytest.approx(1)


@pytest.mark.parametrize("rows", ["unique", "paper", "stream"])
def test_what_was_learned_is_generated(rows: str) -> None:
    head = kbt.Head(np.zeros((VOCABULARY, D)), output="softmax", noise="multinomial", prior_var=20.0, max_rows=10)
    sequences = Sequences((trunk(True), head), start=START, rows=rows)
    X, Y = PAIRS[2]
    before = sequences.predict(X, Y[:2])
    assert sequences.generate(X, max_len=4).tolist() != Y
    for _ in range(30):
        sequences.update(X, Y)
    assert sequences.generate(X, max_len=4).tolist() == Y
    after = sequences.predict(X, Y[:2])
    assert after.mean[Y[2]] > 0.8 > before.mean[Y[2]]
    assert after.std[Y[2]] < before.std[Y[2]]
    assert sequences.generate(X, max_len=4, end=Y[1]).tolist() == Y[:2]
    assert sequences.generate(X, max_len=1).tolist() == Y[:1]


def test_generation_takes_the_most_probable_token() -> None:
    sequences = make()
    answer = sequences.generate([2, 4], max_len=6).tolist()
    assert answer == [sequences.predict([2, 4], answer[:i]).mean.argmax() for i in range(6)]
    assert sequences.head.samples == 0


# A trunk from a file: fixed lengths.

TOKENS = tiny_onnx.Tokens(VOCABULARY, 6, D)


def token_model(max_rows: int = 6, file: Any = TOKENS) -> Model:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    head = heads(max_rows=max_rows, **SETTINGS[0])[0]
    return Model(file.onnx, head, backend="onnxruntime")


def test_short_sequences_in_a_fixed_trunk_are_those_of_a_free_one() -> None:
    for rows, longest in [("unique", 6), ("paper", 3), ("stream", 6)]:
        fixed = Sequences(token_model(), start=START, pad=0, rows=rows)
        free = Sequences((TOKENS, heads(**SETTINGS[0])[0]), start=START, pad=0, rows=rows)
        assert fixed.max_len == longest
        for X, Y in [([2], [3]), ([4, 3, 2], [2, 2, 4]), ([2, 3, 4, 4, 3, 2], [2, 3, 4, 4, 3, 2][:longest])]:
            want, got = free.update(X, Y), fixed.update(X, Y)
            assert got.nis == pytest.approx(want.nis, rel=1e-4)
            np.testing.assert_allclose(fixed.predict(X, Y[:2]).mean, free.predict(X, Y[:2]).mean, atol=1e-5)
        for layer, other in zip(fixed.head.layers, free.head.layers, strict=True):
            np.testing.assert_allclose(layer.mean, other.mean, atol=1e-4)


def test_a_pair_of_trunk_and_head_is_a_model() -> None:
    model = token_model()
    a, b = Sequences(model, start=START, pad=0), Sequences((model.trunk, model.head), start=START, pad=0)
    assert a.head is b.head
    a.update([2, 3], [4])
    assert b.head.samples == 1


def test_a_trunk_without_padding_takes_full_sources_only() -> None:
    sequences = Sequences(token_model(), start=START)
    sequences.update([0, 2, 3, 4, 0, 1], [3, 0])
    with pytest.raises(ShapeError, match="x: expected 6 tokens, as this trunk has no padding token; got 2"):
        sequences.update([2, 3], [3])


def test_a_fixed_trunk_must_be_causal() -> None:
    model = token_model(file=tiny_onnx.Tokens(VOCABULARY, 6, D, causal=False))
    for rows in (None, "paper", "stream"):
        with pytest.raises(RangeError, match="trunk: expected a causal one"):
            Sequences(model, start=START, pad=0, rows=rows)


def test_a_model_of_another_kind_is_rejected() -> None:
    with pytest.raises(ShapeError, match="trunk: expected two inputs of token ids"):
        Sequences(token_model(file=tiny_onnx.Control(d=D)), start=START)
    with pytest.raises(RangeError, match="head: expected output='softmax', got 'gaussian'"):
        Sequences((trunk(True), kbt.Head(np.ones((VOCABULARY, D)))), start=START)
    with pytest.raises(DtypeError, match="trunk: expected a Trunk or a function, got int"):
        Sequences((5, heads(**SETTINGS[0])[0]), start=START)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"trunk: expected rows of shape \(4, 4\), got \(4, 3\)"):
        Sequences((lambda X, Y: np.zeros((len(Y), 3)), heads(**SETTINGS[0])[0]), start=START)
    with pytest.raises(RangeError, match="rows: expected one of 'unique', 'paper', 'stream', got 'all'"):
        make("all")


def test_generation_stays_within_the_trunk_and_never_pads() -> None:
    head = heads(**SETTINGS[0], max_rows=6)[0]
    towards_0 = [layer.mean.copy() for layer in head.layers]
    towards_0[-1][0, -1] += 50.0
    biased = kbt.Head.from_means(towards_0, output="softmax", noise="multinomial", max_rows=6)
    trunk = token_model().trunk
    assert Sequences((trunk, biased), start=START).generate([2, 2, 2, 2, 2, 2]).tolist() == [0] * 6
    answer = Sequences((trunk, biased), start=START, pad=0).generate([2])
    assert len(answer) == 6
    assert 0 not in answer


# Rejections.


def wrong_calls() -> list[tuple[str, Any, Any, type[Exception], str]]:
    return [
        ("unknown in y", [2], [3, 5], RangeError, "y: expected token ids from 0 to 4, got 5 at 1"),
        ("negative", [2], [-1], RangeError, "y: expected token ids from 0 to 4, got -1 at 0"),
        ("unknown in x", [2, 5], [3], RangeError, "x: expected token ids from 0 to 4, got 5 at 1"),
        ("padding in x", [2, 0], [3], RangeError, "x: expected no padding, got the padding token 0 at 1"),
        ("padding in y", [2], [3, 0, 0], RangeError, "y: expected no padding, got the padding token 0 at 1"),
        ("empty x", [], [3], ShapeError, "x: expected at least one token, got none"),
        ("empty y", [2], [], ShapeError, "y: expected at least one token, got none"),
        ("long x", [2] * 7, [3], ShapeError, "x: expected at most 6 tokens, got 7"),
        ("long y", [2], [3] * 7, ShapeError, "y: expected at most 6 tokens, got 7"),
        ("two sequences", [[2, 3]], [3], ShapeError, r"x: expected one sequence .* got an array of shape \(1, 2\)"),
        ("a number", 2, [3], ShapeError, "x: expected one sequence"),
        ("floats", [2.0], [3], DtypeError, "x: expected integer token ids"),
        ("text", "23", [3], ShapeError, "x: expected one sequence"),
        ("truth values", [2], [True], DtypeError, "y: expected integer token ids"),
        ("huge", [2**63], [3], RangeError, "x: expected token ids from 0 to 4"),
    ]


@pytest.mark.parametrize(
    ("x", "y", "error", "message"), [c[1:] for c in wrong_calls()], ids=[c[0] for c in wrong_calls()]
)
@pytest.mark.parametrize("rows", ["unique", "stream"])
def test_a_rejected_pair_changes_nothing(rows: str, x: Any, y: Any, error: Any, message: str) -> None:
    sequences = Sequences(token_model(), start=START, pad=0, rows=rows)
    sequences.update([2], [3])
    before = sequences.head.to_bytes()
    with pytest.raises(error, match=message):
        sequences.update(x, y)
    assert sequences.head.to_bytes() == before


def test_the_longest_target_depends_on_the_rows() -> None:
    assert [make("paper", max_rows=n).max_len for n in (1, 2, 3, 5, 6, 9, 10)] == [1, 1, 2, 2, 3, 3, 4]
    assert [make("unique", max_rows=n).max_len for n in (1, 7)] == [1, 7]
    assert make("stream", max_rows=1).max_len is None
    sequences = make("paper", max_rows=5)
    sequences.update([2], [3, 4])
    with pytest.raises(ShapeError, match="y: expected at most 2 tokens, got 3"):
        sequences.update([2], [3, 4, 3])
    make("stream", max_rows=1).update([2], [3, 4, 3, 2, 4, 4])


def test_wrong_tokens_are_rejected_everywhere() -> None:
    sequences = Sequences(token_model(), start=START, pad=0)
    with pytest.raises(RangeError, match="y: expected token ids"):
        sequences.predict([2], [9])
    with pytest.raises(ShapeError, match="y: expected at most 5 tokens, got 6"):
        sequences.predict([2], [2] * 6)
    with pytest.raises(RangeError, match="max_len: expected 1 to 6, got 7"):
        sequences.generate([2], max_len=7)
    with pytest.raises(RangeError, match="max_len"):
        sequences.generate([2], max_len=0)
    with pytest.raises(RangeError, match="end: expected token ids from 0 to 4, got 5"):
        sequences.generate([2], end=5)
    with pytest.raises(RangeError, match="max_len: expected a number"):
        make().generate([2])
    for name in ("start", "pad"):
        with pytest.raises(RangeError, match=f"{name}: expected token ids from 0 to 4, got 5"):
            Sequences(token_model(), **{"start": START, "pad": 0, name: 5})


def test_a_stream_that_fails_halfway_learns_nothing() -> None:
    def grows(X: Any, Y: Any) -> Any:
        h = trunk(True)(X, Y)
        h[2:] *= 1e200 if len(Y) == 6 else 1.0  # only in the call below
        return h

    sequences = Sequences((grows, heads(**SETTINGS[0])[0]), start=START, rows="stream")
    sequences.update([2], [3, 4])
    before = sequences.head.to_bytes()
    with pytest.raises(NumericsError):
        sequences.update([2], [3, 4, 2, 3, 4, 2])
    assert sequences.head.to_bytes() == before


def test_gated_rows_are_reported() -> None:
    head, _ = heads(**SETTINGS[0], gate=1e-9)
    for rows in ("unique", "stream"):
        sequences = Sequences((trunk(True), head), start=START, rows=rows)
        assert sequences.update([2], [3, 4]).status == "gated"
    assert head.samples == 0
    assert head.counters.gated == 3


def test_sequences_say_what_they_are() -> None:
    assert repr(make("paper")).startswith("Sequences(rows='paper', up to 4 tokens; Head(4→8→5, softmax")
    assert "any length" in repr(make("stream"))


# The transformer of networks.py, exported.


@pytest.mark.slow("exports a transformer")
def test_an_exported_transformer_learns_a_sequence(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from kbt_edge.export import export_trunk
    from kbt_edge.networks import TokenTransformer

    torch.manual_seed(0)
    network = TokenTransformer(vocab=7, max_len=6, encoder_layers=1, decoder_layers=1).eval()
    ids = torch.arange(1, 7)
    export_trunk(network.trunk, (ids, ids), tmp_path / "trunk.onnx")
    readout = network.readout
    head = kbt.Head(
        readout.weight.detach().numpy(),
        readout.bias.detach().numpy(),
        output="softmax",
        noise="multinomial",
        max_rows=6,
        prior_var=0.5,
        softmax_order=1,  # which before any data is the softmax of the logits
    )
    sequences = Sequences(Model(tmp_path / "trunk.onnx", head, backend="onnxruntime"), start=1, pad=0)
    assert sequences.causal

    X, Y = [3, 4, 5], [6, 2, 4, 3]
    with torch.no_grad():
        for i in range(len(Y)):
            tail = [1, *Y[:i], *([5] * (5 - i))]  # whatever stands behind the end, the row is the same
            logits = network(torch.tensor([[*X, 0, 0, 0]]), torch.tensor([tail]))[0, i]
            np.testing.assert_allclose(sequences.predict(X, Y[:i]).mean, torch.softmax(logits, 0), atol=1e-5)
    likelihoods = [sequences.update(X, Y).log_likelihood for _ in range(20)]
    assert all(after > before for before, after in pairwise(likelihoods))
    assert sequences.generate(X, max_len=4).tolist() == Y
