"""Files from a stranger: each is rejected by name, in bounded memory, and nothing outside the bundle is opened."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_onnx import FLOAT, INT64, field, node, tensor, value_info, varint

import kbt_edge as kbt
from kbt_edge import bundle as bundles
from kbt_edge import trunk as trunks
from kbt_edge._files import read_bounded
from kbt_edge.errors import BundleError, KbtError
from kbt_edge.onnxfile import read_onnx
from kbt_edge.onnxfile.wire import MAX_FIELDS, ORT_FORMAT

pytestmark = pytest.mark.long("thousands of damaged files")

OPSET = field(8, field(2, 20))
W = tensor("w", np.ones((4, 3), np.float32))
X, H = value_info("x", (1, 4), FLOAT), value_info("h", (1, 3), FLOAT)


IDS = value_info("i", (2,), INT64)


def integer(name: str, number: int) -> bytes:
    """An attribute that holds an integer."""
    return field(5, field(1, name) + field(3, number) + field(20, 2))


def onnx_file(
    *nodes: bytes,
    inputs: tuple[bytes, ...] = (X,),
    more: bytes = b"",
    initialisers: tuple[bytes, ...] = (W,),
    after: bytes = b"",
) -> bytes:
    graph = b"".join(field(1, entry) for entry in nodes) + b"".join(field(5, entry) for entry in initialisers)
    graph += b"".join(field(11, entry) for entry in inputs) + field(12, H) + more
    return field(1, 10) + field(7, graph) + OPSET + after


def constant(data: bytes) -> bytes:
    """An initialiser that is not used, so that only its own content is wrong."""
    return onnx_file(node("MatMul", ["x", "w"], "h"), initialisers=(W, field(8, "k") + data))


def function(name: str, *nodes: bytes) -> bytes:
    return field(
        25, field(1, name) + field(4, "x") + field(5, "y") + b"".join(field(7, n) for n in nodes) + field(10, "my")
    )


def call(name: str, source: str, target: str) -> bytes:
    return node(name, [source], target) + field(7, "my")


def branch(*nodes: bytes, output: str) -> bytes:
    """An attribute that holds a graph."""
    body = b"".join(field(1, entry) for entry in nodes) + field(12, value_info(output, (1, 3), FLOAT))
    return field(5, field(1, "then_branch") + field(6, body))


GOOD = onnx_file(node("MatMul", ["x", "w"], "h"))
POLYGLOT = field(2, b"\0\0" + ORT_FORMAT)  # the name of the producer, if read as protobuf
EXTERNAL = field(13, field(1, "location") + field(2, "../../../etc/passwd"))

ONNX: dict[str, tuple[bytes, str]] = {
    "a cycle": (
        onnx_file(node("Add", ["x", "b"], "a"), node("Add", ["a", "x"], "b"), node("MatMul", ["b", "w"], "h")),
        "Add reads 'b', which is not defined before it",
    ),
    "a node that reads itself": (onnx_file(node("Add", ["h", "x"], "h")), "reads 'h', which is not defined"),
    "a missing initialiser": (onnx_file(node("MatMul", ["x", "w"], "h"), initialisers=()), "MatMul reads 'w'"),
    "an input that does not exist": (onnx_file(node("MatMul", ["y", "w"], "h")), "MatMul reads 'y'"),
    "an output that nothing makes": (
        onnx_file(node("MatMul", ["x", "w"], "a")),
        "the output 'h' of a graph is not computed by",
    ),
    "an output made twice": (
        onnx_file(*2 * [node("MatMul", ["x", "w"], "h")]),
        "two things in one graph are named 'h'",
    ),
    "an output named as an initialiser": (
        onnx_file(node("Neg", ["x"], "w"), node("MatMul", ["x", "w"], "h")),
        "two things in one graph are named 'w'",
    ),
    "two inputs of one name": (onnx_file(node("MatMul", ["x", "w"], "h"), inputs=(X, X)), "two inputs of a graph"),
    "a subgraph": (
        onnx_file(node("If", ["x"], "h") + branch(node("Neg", ["x"], "h"), output="h")),
        "If holds a graph of its own; a trunk cannot branch or loop",
    ),
    "a subgraph of an operator that has none": (
        onnx_file(node("Neg", ["x"], "h") + branch(output="z")),
        "Neg holds a graph of its own",
    ),
    "a training graph": (
        onnx_file(node("MatMul", ["x", "w"], "h"), after=field(20, field(1, b""))),
        "it holds training information",
    ),
    "a name that clears the screen": (onnx_file(node("Neg", ["\x1b[2J"], "h")), r"expected printable names, .*x1b\[2J"),
    "an operator with a line break": (onnx_file(node("Neg\n", ["x"], "h")), "expected printable names"),
    "onnxruntime's own format": (POLYGLOT + GOOD, "would take for its own format"),
    "external data": (constant(field(1, 1) + field(2, 1) + EXTERNAL), "keeps its values in another file"),
    "external data without a path": (constant(field(1, 1) + field(2, 1) + field(14, 1)), "in another file"),
    "a sparse tensor of 4 TB": (
        onnx_file(node("MatMul", ["x", "w"], "h"), more=field(15, field(3, 2**40))),
        "expected dense tensors, got a sparse one",
    ),
    "a sparse tensor with external data": (
        onnx_file(node("MatMul", ["x", "w"], "h"), more=field(15, field(1, EXTERNAL))),
        "in another file",
    ),
    "a context of a provider": (
        onnx_file(node("EPContext", ["x"], "h") + field(7, "com.microsoft")),
        "'com.microsoft.EPContext' is neither an operator of ONNX nor one that",
    ),
    "an unknown domain": (onnx_file(node("Neg", ["x"], "h") + field(7, "evil.ops")), "'evil.ops.Neg' is neither"),
    "a terabyte without values": (constant(field(1, 2**40) + field(2, 1)), "needs 1099511627776 values, it has 0"),
    "dimensions of 2**62": (constant(64 * field(1, 2**62) + field(2, 1)), "needs a huge number of values, it has 0"),
    "a negative dimension": (constant(field(1, 2**64 - 1) + field(2, 1)), "negative dimension"),
    "fewer floats than declared": (
        constant(field(1, 3) + field(2, 1) + field(4, bytes(8))),
        "needs 3 values, it has 2",
    ),
    "half a float": (constant(field(1, 1) + field(2, 1) + field(4, bytes(3))), "not whole numbers of 4 bytes"),
    "fewer integers than declared": (
        constant(field(1, 3) + field(2, 7) + field(7, b"\x80\x01\x01")),
        "needs 3 values, it has 2",
    ),
    "values of another type": (constant(field(1, 2) + field(2, 7) + field(4, bytes(8))), "the field of another type"),
    "values twice": (
        constant(field(1, 2) + field(2, 1) + field(4, bytes(8)) + field(9, bytes(8))),
        "holds its values twi",
    ),
    "fewer bytes than declared": (
        constant(field(1, 2**20) + field(2, 1) + field(9, bytes(8))),
        "needs 4194304 bytes, it has 8",
    ),
    "a segment": (constant(field(2, 1) + field(3, b"\x08\x01")), "a segment of another one"),
    "an unknown element type": (constant(field(2, 99)), "unknown element type 99"),
    "a function": (
        onnx_file(call("f", "x", "h"), after=function("f", node("Neg", ["x"], "y"))),
        "it holds functions of its own",
    ),
    "an operator of classical machine learning": (
        onnx_file(node("TreeEnsemble", ["x"], "h") + field(7, "ai.onnx.ml")),
        "'ai.onnx.ml.TreeEnsemble' is neither",
    ),
    "an operator of onnxruntime that no tool writes": (
        onnx_file(node("BeamSearch", ["x"], "h") + field(7, "com.microsoft")),
        "'com.microsoft.BeamSearch' is neither",
    ),
    "an input left out of a sum": (
        onnx_file(node("Mean", ["x", "x", ""], "m"), node("MatMul", ["x", "w"], "h")),  # a fault in onnxruntime
        "Mean leaves out an input that it needs",
    ),
    "a first input left out": (onnx_file(node("Clip", ["", "x"], "h")), "Clip leaves out an input that it needs"),
    "integer division": (
        onnx_file(node("Div", ["i", "i"], "q"), node("MatMul", ["x", "w"], "h"), inputs=(X, IDS)),
        "Div of integers",
    ),
    "integer remainder of what was cast": (
        onnx_file(
            node("Cast", ["x"], "i") + integer("to", 7), node("Mod", ["i", "i"], "q"), node("MatMul", ["x", "w"], "h")
        ),
        "Mod of integers",
    ),
    "division of a value of unknown type": (
        onnx_file(node("ArgMax", ["x"], "i"), node("Div", ["i", "i"], "q"), node("MatMul", ["x", "w"], "h")),
        "Div of integers, or of values of unknown type",
    ),
    "an array as long as an input says": (
        onnx_file(node("Expand", ["w", "i"], "e"), node("MatMul", ["x", "w"], "h"), inputs=(X, IDS)),
        "the shape that Expand makes depends on the values of an input",
    ),
    "a range as long as an input says": (
        onnx_file(
            node("ReduceMax", ["i"], "m"),
            node("Range", ["m", "m", "m"], "r"),
            node("MatMul", ["x", "w"], "h"),
            inputs=(X, IDS),
        ),
        "the shape that Range makes depends on",
    ),
    "as many values as an input has that are not zero": (
        onnx_file(node("NonZero", ["x"], "n"), node("MatMul", ["x", "w"], "h")),
        "the shape that NonZero makes depends on",
    ),
    "a million empty fields": (
        onnx_file(node("Neg", ["x"], "h"), after=field(99, b"") * MAX_FIELDS),
        "at most 200000 f",
    ),
    "a varint without end": (GOOD + b"\x08" + b"\xff" * 11, "longer than 64 bits"),
    "a varint cut off": (GOOD + b"\x08\xff", "cut off within a number"),
    "a length of 2**63": (GOOD + b"\x12" + varint(2**63), "is cut off"),
}


def assert_plain(error: KbtError) -> None:
    assert str(error).isprintable()
    assert len(str(error)) < 600


def test_the_pieces_of_these_files_are_accepted_when_nothing_is_wrong_with_them() -> None:
    assert read_onnx(GOOD).operators == {"MatMul": 1}
    for good in (
        constant(field(1, 2) + field(2, 1) + field(4, bytes(8))),
        constant(field(1, 2) + field(2, 1) + b"\x25\0\0\0\0" * 2),
        constant(field(1, 2) + field(2, 7) + field(7, b"\x80\x01\x01")),
        constant(field(1, 2) + field(2, 6) + field(5, 1) * 2),
        constant(field(1, 2) + field(2, 11) + field(10, bytes(16))),
        onnx_file(node("Gelu", ["x"], "h") + field(7, "com.microsoft")),
        onnx_file(node("Div", ["x", "w"], "h")),
        onnx_file(node("Clip", ["x", "", "w"], "h")),
        onnx_file(node("Cast", ["i"], "f") + integer("to", 1), node("Div", ["f", "f"], "h"), inputs=(IDS,)),
        onnx_file(node("NonZero", ["w"], "n"), node("Expand", ["x", "n"], "h")),
        onnx_file(node("Shape", ["x"], "s"), node("Reshape", ["x", "s"], "h")),
    ):
        read_onnx(good)


@pytest.mark.parametrize("name", ONNX)
def test_a_hostile_onnx_file_is_rejected_by_name(name: str) -> None:
    data, message = ONNX[name]
    with pytest.raises(BundleError, match=message) as error:
        read_onnx(data)
    assert_plain(error.value)


# What a sound file can make a runtime do.


def growing(times: int) -> bytes:
    """A vector that doubles: 2^times values from a hundred bytes each."""
    axis = field(5, field(1, "axis") + field(3, 0) + field(20, 2))
    nodes = [node("Concat", [f"a{i}", f"a{i}"], f"a{i + 1}") + axis for i in range(times)]
    nodes += [node("ReduceMax", [f"a{times}"], "m"), node("MatMul", ["x", "w"], "u"), node("Add", ["u", "m"], "h")]
    return onnx_file(*nodes, initialisers=(W, tensor("a0", np.ones(1024, np.float32))))


def test_a_trunk_that_grows_without_end_is_stopped_at_the_limit() -> None:
    pytest.importorskip("onnxruntime", reason="its arena is what is limited")
    with pytest.raises(trunks.BackendError, match=r"onnxruntime failed to run the trunk.*memory"):
        kbt.Trunk(growing(20), backend="onnxruntime")  # 8 GB in all
    assert np.isfinite(kbt.Trunk(growing(3), backend="onnxruntime")(np.ones(4))).all()


def test_a_trunk_that_grows_without_end_is_not_compiled(tmp_path: Path) -> None:
    pytest.importorskip("emx_onnx_cgen", reason="the generator is not installed")
    with pytest.raises(trunks.BackendError, match="too large"):
        kbt.Trunk(growing(20), backend="compiled", cache_dir=tmp_path)


@pytest.mark.parametrize("chosen", [None, "0"])
def test_onnxruntime_is_told_not_to_report_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    pytest.importorskip("onnxruntime", reason="it is what is told")
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", chosen or "")
    if chosen is None:
        monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    kbt.Trunk(GOOD, backend="onnxruntime")
    assert os.environ["ORT_DISABLE_TELEMETRY"] == (chosen or "1")


def test_a_trunk_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="it is what is stopped")
    monkeypatch.setattr(trunks.onnxruntime, "FIRST_RUN_SECONDS", 0.05)
    square = tensor("s", np.eye(512, dtype=np.float32))
    nodes = [node("MatMul", ["s" if i == 0 else f"a{i - 1}", "s"], f"a{i}") for i in range(300)]  # 8 · 10¹⁰ operations
    nodes += [node("ReduceMax", ["a299"], "m"), node("MatMul", ["x", "w"], "u"), node("Add", ["u", "m"], "h")]
    with pytest.raises(BundleError, match=r"did not finish within 0\.05 s"):
        kbt.Trunk(onnx_file(*nodes, initialisers=(W, square)), backend="onnxruntime")


def test_a_huge_trunk_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = [node("Neg", ["x" if i == 0 else f"a{i - 1}"], f"a{i}") for i in range(5000)]
    with pytest.raises(trunks.BackendError, match=r"5000 nodes, this one has .* and 5001"):
        kbt.Trunk(onnx_file(*nodes, node("MatMul", ["a4999", "w"], "h")), backend="compiled", cache_dir=tmp_path)


# Files that are none.


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    readers: list[Callable[[Any], object]] = [
        kbt.Head.load,
        kbt.Trunk,
        lambda path: read_bounded(path, 10),
        lambda path: kbt.Model(path, kbt.Head(np.ones((1, 3)))),
    ]
    for read in readers:
        for path in (tmp_path / "fifo", tmp_path / "folder", "/dev/zero", "/dev/null"):
            with pytest.raises(BundleError, match=r"not a regular file|Is a directory"):
                read(path)
        for path in (tmp_path / "loop", tmp_path / "missing", "nul\0"):
            with pytest.raises(BundleError, match="cannot be read"):
                read(path)
        with pytest.raises(BundleError, match="but its size is 0"):
            read("/proc/self/status")  # claims to be empty
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(BundleError, match="expected at most 10 bytes, the file has 11"):
        read_bounded(tmp_path / "long", 10)


# State blobs with a valid checksum and a wrong meaning.

HEADER = 24  # csrc/abi/state.hpp
INTEGERS = [
    "dtype",
    "layers",
    *(f"widths[{i}]" for i in range(9)),
    "max_rows",
    "output",
    "covariance",
    "rule",
    "noise",
    "relu_order",
    "softmax_order",
]
REALS = [*(f"prior_var[{i}]" for i in range(8)), "noise_var", "input_var", "forgetting", "gate", "drift"]
SAMPLES = HEADER + 4 * len(INTEGERS) + 8 * len(REALS)
COUNT = SAMPLES + 8
NOISE = COUNT + 4


def sealed(blob: bytearray) -> bytes:
    struct.pack_into("<I", blob, 16, zlib.crc32(blob[HEADER:]))
    return bytes(blob)


def learned(**settings: Any) -> kbt.Head:
    rng = np.random.default_rng(3)
    head = kbt.Head(rng.standard_normal((2, 3)), **{"hidden": (6,), "noise_var": 0.1, "drift": 0.0, **settings})
    for _ in range(5):
        y = rng.integers(0, 2) if settings.get("output") == "softmax" else rng.standard_normal(2)
        head.update(rng.standard_normal(3), y)
    return head


HEADS: dict[str, dict[str, Any]] = {
    "neuron": {},
    "full": {"covariance": "full", "gate": 50.0},
    "diagonal": {"covariance": "diagonal", "dtype": "float64", "max_rows": 3},
    "matrix": {"noise_var": [[0.5, 0.1], [0.1, 0.4]], "hidden": ()},
    "adaptive": {"noise": "adaptive"},
    "softmax": {"output": "softmax", "noise": "multinomial", "noise_var": None},
    "paper": {"rule": "replace", "input_var": 0.1},
}


def wrong_states(head: kbt.Head, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """(what is wrong, a blob with a valid checksum)"""
    blob = head.to_bytes()
    config = head.config
    real = "<d" if config["dtype"] == "float64" else "<f"
    size = struct.calcsize(real)
    outputs, widths = config["widths"][-1], config["widths"]

    def put(form: str, place: int, value: Any) -> bytes:
        out = bytearray(blob)
        struct.pack_into(form, out, place, value)
        return sealed(out)

    for i, name in enumerate(INTEGERS):
        place = HEADER + 4 * i
        now = struct.unpack_from("<i", blob, place)[0]
        # A smaller or larger number of rows or another rule is a fine head too, if the rest allows it.
        free = {
            "max_rows": range(1, 300),
            "rule": (0, 1),
            "relu_order": range(2, 13),
            "softmax_order": (0, 1, 2),
            "noise": (0, 1, 2),
            "output": (0, 1),
        }.get(name, ())
        for value in {-(2**31), -1, 0, now + 1, now + 7, 13, 2**16, 2**20 + 1, 2**31 - 1} - {now, *free}:
            yield f"{name} = {value}", put("<i", place, value)
    for i, name in enumerate(REALS):
        used = i < len(widths) - 1 or i >= 8
        bad = [math.nan, math.inf, -math.inf, -1.0] + ([2.0, 0.0] if name == "forgetting" else [])
        for value in bad if used else [*bad, 1.0]:
            yield f"{name} = {value}", put("<d", HEADER + 4 * len(INTEGERS) + 8 * i, value)
    count = struct.unpack_from("<i", blob, COUNT)[0]
    for value in {-(2**31), -1, 0, 1, count + 1, count * count, 2**31 - 1} - {count}:
        yield f"count of noise = {value}", put("<i", COUNT, value)
    for i in range(count):
        diagonal = count == outputs or i % (outputs + 1) == 0
        for value in [math.nan, math.inf, -math.inf] + ([-1.0, 0.0, 1e-12] if diagonal else [9.0, -9.0, 0.2]):
            yield f"noise[{i}] = {value}", put(real, NOISE + size * i, value)
    if count > outputs:  # symmetric, and not a covariance
        out = bytearray(blob)
        for i in (1, 2):
            struct.pack_into(real, out, NOISE + size * i, 9.0)
        yield "indefinite noise", sealed(out)
    place = NOISE + size * count
    for layer, (m, n) in enumerate(itertools.pairwise(widths)):
        means, columns = n * (m + 1), m + 1
        whole = config["covariance"] == "full"
        matrices, order = (1, means) if whole else (n, columns)
        each = order if config["covariance"] == "diagonal" else order * (order + 1) // 2
        for i in rng.sample(range(means), 4):
            for value in (math.nan, math.inf, -math.inf):
                yield f"mean {i} of layer {layer} = {value}", put(real, place + size * i, value)
        place += size * means
        for matrix in rng.sample(range(matrices), min(matrices, 2)):
            start = place + size * matrix * each
            for i in rng.sample(range(order), 3):
                for value in (math.nan, math.inf, -math.inf, -1.0, -1e-30):
                    yield f"D {matrix}, {i} of layer {layer} = {value}", put(real, start + size * i, value)
            for i in rng.sample(range(order, each), 3) if each > order else ():
                for value in (math.nan, math.inf, -math.inf):
                    yield f"U {matrix}, {i} of layer {layer} = {value}", put(real, start + size * i, value)
        place += size * matrices * each
    assert place == len(blob)
    for cut in (1, size, 4 * size, len(blob) - HEADER, len(blob) - SAMPLES):
        short, long = bytearray(blob[:-cut]), bytearray(blob + bytes(cut))
        for what, out in ((f"{cut} bytes fewer", short), (f"{cut} bytes more", long)):
            struct.pack_into("<Q", out, 8, len(out))
            yield what, sealed(out)
    for offset, what in ((0, "magic"), (4, "version"), (8, "length"), (20, "spare field")):
        for value in (0, 1, 2, 2**32 - 1):
            if struct.unpack_from("<I", blob, offset)[0] != value:
                yield f"{what} = {value}", put("<I", offset, value)


WATCHFUL: dict[str, dict[str, Any]] = {
    "members": {"hidden": (), "noise_var": None},
    "noise matrix": {"hidden": (), "noise_var": None, "noise": "full"},
    "bank": {"noise_var": None},
    "softmax": {"output": "softmax", "noise_var": None, "hidden": ()},
}


@pytest.mark.parametrize("kind", WATCHFUL)
def test_a_watchful_state_with_any_number_wrong_is_rejected_or_answers_with_finite_numbers(kind: str) -> None:
    head = learned(drift="auto", **WATCHFUL[kind])
    blob, rng, rejected = head.to_bytes(), random.Random(5), 0
    places = range(NOISE, len(blob) - 3, 4)
    for place in rng.sample(places, min(len(places), 300)):
        for value in (math.nan, math.inf, -1.0, -1e30, 0.0, 1e30):
            out = bytearray(blob)
            struct.pack_into("<f", out, place, value)
            try:
                other = kbt.Head.from_bytes(sealed(out))
            except kbt.KbtError:
                rejected += 1
                continue
            assert math.isfinite(value)
            for _ in range(3):
                with contextlib.suppress(kbt.KbtError):
                    p = other.predict(np.ones(3, np.float32))
                    assert np.isfinite(p.mean).all()
                    assert (p.total_var >= 0).all()
                    other.observe(0 if kind == "softmax" else [1.0, -1.0])
    assert rejected >= 2 * min(len(places), 300)


def test_a_thousand_states_with_a_valid_checksum_and_a_wrong_meaning_are_rejected() -> None:
    rng = random.Random(11)
    accepted, blobs = [], set()
    for name, settings in HEADS.items():
        head = learned(**settings)
        before = head.to_bytes()
        assert kbt.Head.from_bytes(before).to_bytes() == before
        for what, blob in wrong_states(head, rng):
            blobs.add(blob)
            assert blob != before
            try:
                other = kbt.Head.from_bytes(blob)
            except BundleError as error:
                assert_plain(error)
            else:
                accepted.append((name, what, other.to_bytes() == blob))
            with pytest.raises(BundleError):
                head.restore(blob)
            assert head.to_bytes() == before
    print(f"{len(blobs)} states, {len(accepted)} accepted")
    assert len(blobs) >= 1000
    assert accepted == []


@pytest.mark.parametrize("name", ["neuron", "full", "diagonal", "matrix"])
def test_a_state_whose_factors_are_finite_and_whose_covariance_is_not_is_rejected(name: str) -> None:
    """Found by fuzzing: an update at h = 0, whose prediction is finite, then wrote infinite means."""
    head = learned(**HEADS[name])
    blob, config = head.to_bytes(), head.config
    real, largest = ("<d", 1e308) if config["dtype"] == "float64" else ("<f", 3e38)
    size = struct.calcsize(real)
    n, m = config["widths"][1], config["widths"][0] + 1
    order = n * m if config["covariance"] == "full" else m
    variances = NOISE + size * (head.noise_var.size + n * m)
    places = {"the last D": variances + size * (order - 1)}
    if config["covariance"] != "diagonal":
        places["the first U"] = variances + size * order
    for what, place in places.items():
        wrong = bytearray(blob)
        struct.pack_into(real, wrong, place, largest)
        with pytest.raises(BundleError, match="impossible values"):
            head.restore(sealed(wrong))
        assert head.to_bytes() == blob, what


def test_a_state_that_asks_for_more_memory_than_it_may_is_rejected_before_it_gets_any() -> None:
    head = kbt.Head(np.ones((2, 3)), drift=0.0)
    blob = bytearray(head.to_bytes())
    struct.pack_into("<i", blob, HEADER + 4 * INTEGERS.index("max_rows"), 3000)
    with pytest.raises(BundleError, match=r"expected a head of at most 1342\d+ bytes, got one of .*max_rows 3000"):
        kbt.Head.from_bytes(sealed(blob))
    many = kbt.Head(np.ones((1, 3)), max_rows=500, drift=0.0)
    assert kbt.Head.from_bytes(many.to_bytes(), max_memory=many.nbytes).nbytes == many.nbytes
    with pytest.raises(BundleError, match=f"at most {many.nbytes - 1} bytes"):
        kbt.Head.from_bytes(many.to_bytes(), max_memory=many.nbytes - 1)


# The whole bundle, in a process that watches what is opened and how much memory is touched.


def described(text: Any, folder: Path, trunk: bytes) -> None:
    (folder / "trunk.onnx").write_bytes(trunk)
    text["trunk"] |= {"bytes": len(trunk), "sha256": hashlib.sha256(trunk).hexdigest()}
    (folder / "bundle.json").write_text(json.dumps(text))


def bombs() -> dict[str, bytes]:
    return {
        "deep lists": b"[" * 1_000_000,
        "deep objects": b'{"a":' * 200_000,
        "a hundred thousand keys": b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}",
        "one key a hundred thousand times": b"{" + b",".join([b'"a":0'] * 100_000) + b"}",
        "an integer of a million digits": b'{"format":' + b"9" * 1_000_000 + b"}",
        "a real of a million digits": b'{"format":0.' + b"9" * 1_000_000 + b"}",
        "an exponent of a million digits": b'{"format":1e' + b"9" * 1_000_000 + b"}",
        "a text of a million characters": b'{"format":"' + b"x" * 1_000_000 + b'"}',
        "a million escapes": b'{"format":"' + b"\\ud800" * 170_000 + b'"}',
        "empty lists": b"[" + b"[]," * 300_000 + b"[]]",
        "NaN": b'{"format":NaN}',
        "two megabytes": b" " * 2_000_000,
    }


CHILD = """
import json, os, resource, sys
from pathlib import Path
import kbt_edge as kbt

root = Path(sys.argv[1])
assert kbt.Model.load(root / "good", backend="onnxruntime").predict([0.0] * 4).mean.shape == (2,)
opened, other = [], []

def watch(event, arguments):
    if event == "open" and recording and not isinstance(arguments[0], int):  # a number: of what is open already
        opened.append(os.fspath(arguments[0]))
    elif event.split(".")[0] in ("socket", "subprocess", "ctypes", "os.exec", "os.system", "import") and recording:
        other.append(event)

recording = False
sys.addaudithook(watch)

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + (320 << 20),) * 2)
answers = {}
for folder in sorted(root.iterdir()):
    opened.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    recording = True
    try:
        kbt.Model.load(folder, backend="onnxruntime")
        kind, message = "accepted", ""
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
    recording = False
    answers[folder.name] = [kind, message, list(opened), memory("VmHWM") - before]
print(json.dumps([answers, other]))
"""


@pytest.mark.host_only("the reader's memory and the files it opens are judged by a Linux host")
def test_no_hostile_bundle_opens_a_file_outside_or_takes_more_than_a_multiple_of_its_size(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the good bundle among them is to run")
    root = tmp_path / "bundles"
    entry = bundles.BundleInput("x", (1, 4), "float32", (0.0,), (1.0,))
    state = kbt.Head(np.ones((2, 3)), drift=0.0).to_bytes()
    good = bundles.Bundle(trunk=GOOD, head=state, inputs=(entry,), rows=1, d=3, offset=(0.0,), scale=(1.0,))
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("trunk.onnx", "head.kbt", "bundle.json"):
        (outside / name).write_bytes(b"secret")

    def folder(name: str) -> Path:
        bundles.write(root / name, good)
        return root / name

    folder("good")
    for name, (data, _) in ONNX.items():
        there = folder(f"onnx: {name}")
        described(json.loads((there / "bundle.json").read_text()), there, data)
    for name, text in bombs().items():
        (folder(f"json: {name}") / "bundle.json").write_bytes(text)
    for name in ("trunk.onnx", "head.kbt", "bundle.json"):
        for kind, target in (
            ("absolute", outside / name),
            ("relative", f"../../outside/{name}"),
            ("device", "/dev/zero"),
            ("proc", "/proc/self/environ"),
        ):
            there = folder(f"link: {kind} {name}")
            (there / name).unlink()
            (there / name).symlink_to(target)
        there = folder(f"fifo: {name}")
        (there / name).unlink()
        os.mkfifo(there / name)
    for i, where in enumerate(("../../outside/trunk.onnx", str(outside / "trunk.onnx"), "/etc/passwd")):
        for key in ("path", "file", "location"):
            there = folder(f"path: {i} {key}")
            said = json.loads((there / "bundle.json").read_text())
            said["trunk"][key] = where
            (there / "bundle.json").write_text(json.dumps(said))
    for rows in (3000, 2**20, 2**31 - 1):
        blob = bytearray(state)
        struct.pack_into("<i", blob, HEADER + 4 * INTEGERS.index("max_rows"), rows)
        there = folder(f"head: {rows} rows")
        (there / "head.kbt").write_bytes(sealed(blob))
        said = json.loads((there / "bundle.json").read_text())
        said["head"]["max_rows"] = rows
        (there / "bundle.json").write_text(json.dumps(said))

    answer = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)], capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stderr
    answers, other = json.loads(answer.stdout)
    assert len(answers) >= 70
    assert answers.pop("good")[0] == "accepted"
    assert other == []
    for name, (kind, message, opened, grown) in answers.items():
        assert kind == "BundleError", (name, kind, message)
        assert message.isprintable(), name
        assert len(message) < 700 + len(str(root)), name
        for path in opened:
            assert Path(path).parent == root / name, (name, path)
            assert not Path(path).is_symlink(), (name, path)
        size = sum(path.stat().st_size for path in (root / name).iterdir() if path.is_file() and not path.is_symlink())
        assert grown < 48 * 2**20 + 32 * size, (name, grown, size)
    print(f"{len(answers)} bundles, most memory {max(grown for *_, grown in answers.values()) >> 20} MiB")
