"""The ONNX reader: it reads what ``onnx`` reads, and hostile bytes give a BundleError or a model, nothing else."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kbt_edge.errors import BundleError
from kbt_edge.onnxfile import OnnxModel, read_onnx, token_limits
from kbt_edge.onnxfile.wire import MAX_NAME

onnx = pytest.importorskip("onnx", reason="the reader is compared with onnx, which is not installed")
helper = onnx.helper
numpy_helper = pytest.importorskip("onnx.numpy_helper", reason="this onnx has none")
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def make(nodes: list[Any], inputs: list[Any], outputs: list[Any], initialisers: list[Any] = [], **more: Any) -> Any:  # noqa: B006
    graph = helper.make_graph(nodes, "g", inputs, outputs, initialisers)
    more.setdefault("opset_imports", [helper.make_opsetid("", 20)])
    return helper.make_model(graph, ir_version=10, **more)


def tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), name)


def external(name: str = "w") -> Any:
    outside = onnx.TensorProto(name=name, data_type=FLOAT, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../../etc/passwd")
    return outside


def value(name: str, shape: list[int | str | None], element_type: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, element_type, shape)


def mlp() -> Any:
    return make(
        [helper.make_node("Gemm", ["x", "w", "b"], ["u"]), helper.make_node("Relu", ["u"], ["h"])],
        [value("x", [1, 4])],
        [value("h", [1, 3])],
        [tensor("w", (4, 3)), tensor("b", (3,))],
    )


def tokens() -> Any:
    return make(
        [
            helper.make_node("Unsqueeze", ["ids", "axes"], ["column"]),
            helper.make_node("Gather", ["wide", "column"], ["a"], axis=-2),
            helper.make_node("Gather", ["narrow", "ids"], ["b"]),
            helper.make_node("Squeeze", ["a", "axes"], ["c"]),
            helper.make_node("Add", ["b", "c"], ["h"]),
        ],
        [value("ids", [5], INT64), value("other", [2], INT64)],
        [value("h", [5, 3])],
        [tensor("wide", (9, 3)), tensor("narrow", (7, 3)), numpy_helper.from_array(np.array([1]), "axes")],
    )


def branching() -> Any:
    """An If with a constant in each branch."""

    def branch(name: str) -> Any:
        node = helper.make_node("Constant", [], [name], value=tensor(name, (3,)))
        return helper.make_graph([node], name, [], [value(name, [3])])

    node = helper.make_node("If", ["c"], ["h"], then_branch=branch("t"), else_branch=branch("e"))
    return make([node], [helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])], [value("h", [3])])


def scanning(depth: int) -> Any:
    """A Scan in a Scan in a Scan: a few bytes, and work that grows with each of them."""
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["h"])], "g", [], [value("h", [3])])
    for _ in range(depth):
        graph = helper.make_graph([helper.make_node("Scan", ["x"], ["h"], body=graph)], "g", [], [value("h", [3])])
    graph.input.append(value("x", [3]))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def with_function() -> Any:
    body = [
        helper.make_node("Constant", [], ["k"], value=tensor("k", (3,))),
        helper.make_node("Add", ["a", "k"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    function = helper.make_function("my", "Shift", ["a"], ["y"], body, opsets[:1])
    node = helper.make_node("Shift", ["x"], ["h"], domain="my")
    return make([node], [value("x", [3])], [value("h", [3])], functions=[function], opset_imports=opsets)


def with_training() -> Any:
    model = mlp()
    model.training_info.add().algorithm.initializer.append(tensor("step", (3,)))
    return model


def with_list_of_graphs() -> Any:
    model = mlp()
    graph = helper.make_graph([], "g", [], [])
    model.graph.node[0].attribute.append(helper.make_attribute("bodies", [graph, graph]))
    return model


CONTROL_FLOW = {
    "an If": (branching, "If holds a graph of its own"),
    "a Scan": (lambda: scanning(1), "Scan holds a graph of its own"),
    "a Scan in a Scan in a Scan": (lambda: scanning(3), "Scan holds a graph of its own"),
    "a list of graphs": (with_list_of_graphs, "Gemm holds a graph of its own"),
    "a function": (with_function, "functions of its own"),
    "a training graph": (with_training, "training information"),
}


@pytest.mark.parametrize("case", CONTROL_FLOW)
def test_control_flow_is_rejected(case: str) -> None:
    build, message = CONTROL_FLOW[case]
    with pytest.raises(BundleError, match=message):
        read_onnx(build().SerializeToString())


def dynamic() -> Any:
    return make([helper.make_node("Relu", ["x"], ["h"])], [value("x", ["batch", None, 4])], [value("h", [1, 4])])


MODELS = {"mlp": mlp, "tokens": tokens, "dynamic": dynamic}


def dimensions(info: Any) -> tuple[int | str | None, ...]:
    kinds = {"dim_value": lambda d: d.dim_value, "dim_param": lambda d: d.dim_param, None: lambda d: None}
    return tuple(kinds[d.WhichOneof("value")](d) for d in info.type.tensor_type.shape.dim)


@pytest.mark.parametrize("name", MODELS)
def test_it_reads_what_onnx_reads(name: str) -> None:
    model = MODELS[name]()
    read = read_onnx(model.SerializeToString())
    assert read.opset == 20
    assert read.operators == Counter(node.op_type for node in model.graph.node)
    assert list(read.operators) == sorted(read.operators)
    for mine, theirs in ((read.graph.inputs, model.graph.input), (read.graph.outputs, model.graph.output)):
        assert [(v.name, v.element_type, v.shape) for v in mine] == [
            (v.name, v.type.tensor_type.elem_type, dimensions(v)) for v in theirs
        ]
    assert {t.name: (t.element_type, t.shape) for t in read.graph.initialisers.values()} == {
        t.name: (t.data_type, tuple(t.dims)) for t in model.graph.initializer
    }
    assert [(n.inputs, n.outputs) for n in read.graph.nodes] == [
        (tuple(n.input), tuple(n.output)) for n in model.graph.node
    ]


def test_an_input_that_an_initialiser_provides_is_not_an_input() -> None:
    model = mlp()
    model.graph.input.append(value("w", [4, 3]))
    assert [v.name for v in read_onnx(model.SerializeToString()).graph.inputs] == ["x"]


def test_token_limit_is_the_smallest_table_an_input_looks_up() -> None:
    assert token_limits(read_onnx(tokens().SerializeToString()).graph) == {"ids": 7}


def sparse(values: Any) -> Any:
    made = onnx.SparseTensorProto(dims=[9])
    made.values.CopyFrom(values)
    made.indices.CopyFrom(numpy_helper.from_array(np.arange(3), "i"))
    return made


def in_initialiser() -> Any:
    model = mlp()
    model.graph.initializer.append(external())
    return model


def in_entries_alone() -> Any:
    model = in_initialiser()
    model.graph.initializer[-1].ClearField("data_location")
    return model


def in_location_alone() -> Any:
    model = in_initialiser()
    del model.graph.initializer[-1].external_data[:]
    return model


def in_sparse_initialiser() -> Any:
    model = mlp()
    model.graph.sparse_initializer.append(sparse(external()))
    return model


def in_sparse_attribute() -> Any:
    model = mlp()
    model.graph.node.append(helper.make_node("Constant", [], ["s"], sparse_value=sparse(external())))
    return model


def in_tensor_list_attribute() -> Any:
    model = mlp()
    model.graph.node[0].attribute.append(helper.make_attribute("list", [external("a"), external("b")]))
    return model


EXTERNAL = {
    "initialiser": in_initialiser,
    "entries without location": in_entries_alone,
    "location without entries": in_location_alone,
    "sparse initialiser": in_sparse_initialiser,
    "attribute": lambda: make([helper.make_node("Constant", [], ["h"], value=external())], [], [value("h", [3])]),
    "sparse attribute": in_sparse_attribute,
    "list attribute": in_tensor_list_attribute,
}


@pytest.mark.parametrize("place", EXTERNAL)
def test_external_data_is_rejected_wherever_it_hides(place: str) -> None:
    with pytest.raises(BundleError, match="another file"):
        read_onnx(EXTERNAL[place]().SerializeToString())


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field. Written out here so that malformed ones can be written too."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


OPSET = field(8, b"\x10\x14")
GOOD_GRAPH = mlp().graph.SerializeToString()


def initialiser(content: bytes) -> bytes:
    return OPSET + field(7, field(5, content))


MALFORMED = {
    "empty": b"",
    "text": b"this is not an ONNX file",
    "zeros": bytes(1000),
    "no graph": OPSET,
    "no opset": field(7, GOOD_GRAPH),
    "foreign opset": field(8, b"\x0a\x02my\x10\x01") + field(7, GOOD_GRAPH),
    "two graphs": OPSET + field(7, GOOD_GRAPH) + field(7, GOOD_GRAPH),
    "graph as a number": OPSET + b"\x38\x01",
    "length beyond the end": OPSET + b"\x3a\xff\xff\xff\xff\x7f",
    "length of 2**63": OPSET + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    "endless number": OPSET + b"\x3a" + b"\xff" * 20,
    "group": OPSET + b"\x3b\x3c",
    "field number 0": OPSET + b"\x02\x00",
    "field number 2**30": OPSET + varint(2**33) + b"\x00",
    "cut fixed64": OPSET + b"\x09\x00\x00",
    "name not UTF-8": OPSET + field(7, field(1, field(4, b"\xff\xfe"))),
    "endless name": OPSET + field(7, field(1, field(4, b"a" * (MAX_NAME + 1)))),
    "negative dimension": initialiser(b"\x08" + varint(2**64 - 1) + b"\x10\x01" + field(8, b"w")),
    "dimensions without data": initialiser(field(1, varint(10**6) * 2) + b"\x10\x01" + field(9, b"")),
    "more data than declared": initialiser(b"\x08\x01\x10\x01" + field(9, bytes(8))),
    "rank of 1000": initialiser(field(1, b"\x01" * 1000)),
    "rank of 1000, unpacked": initialiser(b"\x08\x01" * 1000),
    "twin initialisers": OPSET + field(7, 2 * field(5, field(8, b"w"))),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_rejected(name: str) -> None:
    with pytest.raises(BundleError, match=r"^ONNX file: "):
        read_onnx(MALFORMED[name])


def test_every_truncation_is_rejected_or_read() -> None:
    data = tokens().SerializeToString()
    assert sum(isinstance(attempt(data[:end]), BundleError) for end in range(len(data))) > 0.9 * len(data)


def attempt(data: bytes) -> OnnxModel | BundleError:
    """Anything but these two fails the test that calls."""
    try:
        return read_onnx(data)
    except BundleError as error:
        return error


def mutated(seed: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(seed)
    for _ in range(int(rng.integers(1, 3))):
        place = int(rng.integers(0, len(data)))
        kind = int(rng.integers(0, 8))
        if kind == 0:
            data[place : place + int(rng.integers(1, 20))] = rng.bytes(int(rng.integers(0, 20)))
        elif kind == 1:
            data[place:place] = varint(int(rng.integers(0, 2**62)))
        elif kind == 2:
            other = int(rng.integers(0, len(data)))
            data[place:place] = data[other : other + 40]
        else:
            data[place] = int(rng.integers(0, 256))
    return bytes(data)


@pytest.mark.long("two thousand files")
def test_two_thousand_mutated_files_are_rejected_or_read() -> None:
    rng = np.random.default_rng(20)
    seeds = [build().SerializeToString() for build in MODELS.values()]
    results = [attempt(mutated(seeds[trial % len(seeds)], rng)) for trial in range(2000)]
    # Both happen often, or the mutations would prove nothing.
    assert sum(isinstance(result, BundleError) for result in results) > 400
    assert sum(isinstance(result, OnnxModel) for result in results) > 200


@pytest.mark.long("reads a file again for every bit of it")
def test_no_flipped_bit_hides_external_data_that_onnx_would_follow() -> None:
    helpers = pytest.importorskip("onnx.external_data_helper", reason="needed to list every tensor of a model")
    compared = 0
    for build in EXTERNAL.values():
        data = bytearray(build().SerializeToString())
        for place in range(len(data)):
            for bit in range(8):
                data[place] ^= 1 << bit
                if isinstance(attempt(bytes(data)), OnnxModel):
                    try:
                        tensors = list(helpers._get_all_tensors(onnx.load_model_from_string(bytes(data))))
                    except Exception:  # of the protobuf implementation in use
                        tensors = []
                    compared += bool(tensors)
                    assert not any(map(helpers.uses_external_data, tensors))
                data[place] ^= 1 << bit
    assert compared > 20  # some flips do turn the reference into something harmless


@pytest.mark.slow("reads 300,000 nodes under tracemalloc")
def test_a_repetitive_file_costs_no_more_than_its_size_allows() -> None:
    data = OPSET + field(7, field(1, b"") * 300_000)  # empty nodes of two bytes each
    tracemalloc.start()
    with pytest.raises(BundleError, match="more often than any real model"):
        read_onnx(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20
