"""What an ONNX file declares, read from its bytes without the ``onnx`` package and without trusting them.

A trunk arrives in a bundle that may come from anyone, and a board has no ``onnx`` installed. This reader walks the
protobuf wire format far enough to answer: which operators, which inputs and outputs, which token ids are valid, and
above all whether any tensor, however deep, points to a file outside (external data), which is refused.

It is stricter than a protobuf parser where two readers could disagree about the same bytes: a known field of the wrong
wire type, and a repeated field that may occur once, are errors. Every length is checked against the bytes that are
really there before it is used, tensors stay views into the file, and nesting is limited, so the cost of a hostile
file is bounded by its size. The only error raised is ``BundleError``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kbt_edge.errors import BundleError

__all__ = [
    "ELEMENT_TYPES",
    "MAX_BYTES",
    "Graph",
    "Node",
    "OnnxModel",
    "Tensor",
    "Value",
    "read_onnx",
    "token_limits",
    "token_lookups",
]

# Far above any trunk that runs on a board, and low enough to bound what a hostile file can make the reader hold.
MAX_BYTES: Final = 2**28
MAX_DEPTH: Final = 8  # graphs within graphs
MAX_PARTS: Final = 100_000  # of one kind in one message, e.g. the nodes of a graph
MAX_RANK: Final = 64
MAX_NAME: Final = 4096

# TensorProto.DataType: number -> (name, bytes per element), for the types stored as whole bytes.
ELEMENT_TYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("float32", 4),
    2: ("uint8", 1),
    3: ("int8", 1),
    4: ("uint16", 2),
    5: ("int16", 2),
    6: ("int32", 4),
    7: ("int64", 8),
    9: ("bool", 1),
    10: ("float16", 2),
    11: ("float64", 8),
    12: ("uint32", 4),
    13: ("uint64", 8),
    16: ("bfloat16", 2),
}


@dataclass(frozen=True)
class Value:
    """A graph input or output. A dimension is a number, a symbol, or None; ``shape`` is None when not declared."""

    name: str
    element_type: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Tensor:
    """A constant of the graph, without its values."""

    name: str
    element_type: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    operator: str  # with its domain in front unless that is the default one
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    integers: Mapping[str, int]  # the attributes that are one integer
    graphs: tuple[Graph, ...]  # the bodies of If, Loop and Scan


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]  # without those that an initialiser provides
    outputs: tuple[Value, ...]
    initialisers: Mapping[str, Tensor]


@dataclass(frozen=True)
class OnnxModel:
    opset: int  # of the default domain
    graph: Graph
    functions: tuple[tuple[Node, ...], ...]

    @property
    def operators(self) -> dict[str, int]:
        """Operator → how often it occurs, at any depth, sorted by name."""
        count: Counter[str] = Counter()
        pending = [*self.graph.nodes, *(node for function in self.functions for node in function)]
        while pending:
            node = pending.pop()
            count[node.operator] += 1
            pending.extend(inner for graph in node.graphs for inner in graph.nodes)
        return dict(sorted(count.items()))


def read_onnx(data: bytes) -> OnnxModel:
    """Read ``data``, the content of an ONNX file; refuse external data and anything malformed with a BundleError."""
    if len(data) > MAX_BYTES:
        raise BundleError(f"ONNX file: expected at most {MAX_BYTES} bytes, got {len(data)}")
    model = _Message(memoryview(data), "model", {7: "one", 8: "many", 20: "many", 25: "many"})
    body = model.one(7)
    if body is None:
        raise BundleError("ONNX file: it holds no graph; it is empty, cut off, or not an ONNX file")
    for training in model.many(20):
        parts = _Message(training, "training_info", {1: "one", 2: "one"})
        for part in (parts.one(1), parts.one(2)):
            if part is not None:
                _graph(part, 1)
    return OnnxModel(
        opset=_opset(model.many(8)),
        graph=_graph(body, 0),
        functions=tuple(_function(function) for function in model.many(25)),
    )


def token_limits(graph: Graph) -> dict[str, int]:
    """Integer input → the number of rows of the smallest table it looks up; its valid ids lie below that number."""
    limits: dict[str, int] = {}
    for source, rows in token_lookups(graph).values():
        limits[source] = min(rows, limits.get(source, rows))
    return limits


def token_lookups(graph: Graph) -> dict[int, tuple[str, int]]:
    """Which nodes look ids up in a table: position of the ``Gather`` → (input the ids come from, rows of the table).

    Followed from an integer input through operators that only rearrange values to the ``Gather`` of an initialiser.
    """
    origin = {value.name: value.name for value in graph.inputs if value.element_type == 7}
    lookups: dict[int, tuple[str, int]] = {}
    for position, node in enumerate(graph.nodes):
        if node.operator in _REARRANGE and node.inputs and node.inputs[0] in origin:
            origin.update(dict.fromkeys(node.outputs, origin[node.inputs[0]]))
        elif node.operator == "Gather" and len(node.inputs) == 2 and node.inputs[1] in origin:
            table = graph.initialisers.get(node.inputs[0])
            axis = node.integers.get("axis", 0)
            if table is not None and -len(table.shape) <= axis < len(table.shape):
                lookups[position] = (origin[node.inputs[1]], table.shape[axis])
    return lookups


_REARRANGE = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)


# The parts of a model, each named after its message in onnx.proto, with the field numbers from there.


def _opset(imports: list[memoryview]) -> int:
    opset = 0
    for entry in imports:
        fields = _Message(entry, "opset_import", {1: "one", 2: "int"})
        if fields.text(1) in ("", "ai.onnx"):
            opset = max(opset, fields.integer(2))
    if opset < 1:
        raise BundleError("ONNX file: it imports no version of the standard operators")
    return opset


def _graph(data: memoryview, depth: int) -> Graph:
    if depth > MAX_DEPTH:
        raise BundleError(f"ONNX file: expected graphs nested at most {MAX_DEPTH} deep, got more")
    fields = _Message(data, "graph", {1: "many", 5: "many", 11: "many", 12: "many", 15: "many"})
    initialisers: dict[str, Tensor] = {}
    for tensor in (_tensor(entry) for entry in fields.many(5)):
        if tensor.name in initialisers:
            raise BundleError(f"ONNX file: two initialisers are named {tensor.name!r}")
        initialisers[tensor.name] = tensor
    for entry in fields.many(15):
        _sparse_tensor(entry)
    return Graph(
        nodes=tuple(_node(entry, depth) for entry in fields.many(1)),
        inputs=tuple(value for value in map(_value, fields.many(11)) if value.name not in initialisers),
        outputs=tuple(map(_value, fields.many(12))),
        initialisers=initialisers,
    )


def _function(data: memoryview) -> tuple[Node, ...]:
    fields = _Message(data, "function", {7: "many", 11: "many"})
    for entry in fields.many(11):
        _attribute(entry, 0)
    return tuple(_node(entry, 0) for entry in fields.many(7))


def _node(data: memoryview, depth: int) -> Node:
    fields = _Message(data, "node", {1: "many", 2: "many", 4: "one", 5: "many", 7: "one"})
    integers: dict[str, int] = {}
    graphs: list[Graph] = []
    for entry in fields.many(5):
        name, integer, inner = _attribute(entry, depth)
        if integer is not None:
            integers[name] = integer
        graphs.extend(inner)
    operator, domain = fields.text(4), fields.text(7)
    return Node(
        operator=operator if domain in ("", "ai.onnx") else f"{domain}.{operator}",
        inputs=tuple(_text(entry, "node") for entry in fields.many(1)),
        outputs=tuple(_text(entry, "node") for entry in fields.many(2)),
        integers=integers,
        graphs=tuple(graphs),
    )


def _attribute(data: memoryview, depth: int) -> tuple[str, int | None, list[Graph]]:
    kinds = {1: "one", 3: "int", 5: "one", 6: "one", 10: "many", 11: "many", 22: "one", 23: "many"}
    fields = _Message(data, "attribute", kinds)
    for entry in [*fields.many(5), *fields.many(10)]:
        _tensor(entry)
    for entry in [*fields.many(22), *fields.many(23)]:
        _sparse_tensor(entry)
    graphs = [_graph(entry, depth + 1) for entry in [*fields.many(6), *fields.many(11)]]
    return fields.text(1), fields.integer(3) if fields.has(3) else None, graphs


def _tensor(data: memoryview) -> Tensor:
    fields = _Message(data, "tensor", {1: "ints", 2: "int", 8: "one", 9: "one", 13: "many", 14: "int"})
    name = fields.text(8)
    if fields.many(13) or fields.integer(14) != 0:
        raise BundleError(
            f"ONNX file: tensor {name!r} keeps its values in another file; a trunk must be one self-contained file"
        )
    shape = tuple(fields.integers(1))
    if any(length < 0 for length in shape):
        raise BundleError(f"ONNX file: tensor {name!r} has a negative dimension: {shape}")
    element_type = fields.integer(2)
    raw = fields.one(9)
    if raw is not None and element_type in ELEMENT_TYPES:
        expected = math.prod(shape) * ELEMENT_TYPES[element_type][1]
        if len(raw) != expected:
            raise BundleError(f"ONNX file: tensor {name!r} of shape {shape} needs {expected} bytes, it has {len(raw)}")
    return Tensor(name, element_type, shape)


def _sparse_tensor(data: memoryview) -> None:
    fields = _Message(data, "sparse_tensor", {1: "one", 2: "one"})
    for part in (fields.one(1), fields.one(2)):
        if part is not None:
            _tensor(part)


def _value(data: memoryview) -> Value:
    fields = _Message(data, "value_info", {1: "one", 2: "one"})
    name = fields.text(1)
    kind = _Message(fields.one(2), "type", {1: "one"}).one(1)
    if kind is None:
        return Value(name, 0, None)  # a sequence, map or optional: a valid graph, never a valid trunk
    tensor = _Message(kind, "tensor_type", {1: "int", 2: "one"})
    if not tensor.has(2):
        return Value(name, tensor.integer(1), None)
    shape: list[int | str | None] = []
    for entry in _Message(tensor.one(2), "shape", {1: "many"}).many(1):
        dimension = _Message(entry, "dimension", {1: "int", 2: "one"})
        shape.append(dimension.integer(1) if dimension.has(1) else dimension.text(2) or None)
    return Value(name, tensor.integer(1), tuple(shape))


# The wire format: https://protobuf.dev/programming-guides/encoding


class _Message:
    """The known fields of one message. Kind: "int" once, "ints" any number, "one" or "many" strings or messages."""

    def __init__(self, data: memoryview | None, name: str, kinds: Mapping[int, str]) -> None:
        self._name = name
        self._ints: dict[int, list[int]] = {}
        self._parts: dict[int, list[memoryview]] = {}
        for number, wire, integer, part in _fields(data if data is not None else memoryview(b""), name):
            kind = kinds.get(number)
            if kind is None:
                continue
            if wire == 0 and kind in ("int", "ints"):
                self._ints.setdefault(number, []).append(integer)
            elif wire == 2 and kind == "ints":
                self._ints.setdefault(number, []).extend(islice(_packed(part, name), MAX_RANK + 1))
            elif wire == 2 and kind in ("one", "many"):
                self._parts.setdefault(number, []).append(part)
            else:
                raise BundleError(f"ONNX file: field {number} of message {name} has the wrong wire type {wire}")
            if kind in ("int", "one") and len(self._ints.get(number, ())) + len(self._parts.get(number, ())) > 1:
                raise BundleError(f"ONNX file: field {number} of message {name} occurs twice")
            if len(self._ints.get(number, ())) > MAX_RANK or len(self._parts.get(number, ())) > MAX_PARTS:
                raise BundleError(f"ONNX file: message {name} repeats field {number} more often than any real model")

    def has(self, number: int) -> bool:
        return number in self._ints or number in self._parts

    def integer(self, number: int) -> int:
        return self._ints[number][0] if number in self._ints else 0

    def integers(self, number: int) -> list[int]:
        return self._ints.get(number, [])

    def one(self, number: int) -> memoryview | None:
        return self._parts[number][0] if number in self._parts else None

    def many(self, number: int) -> list[memoryview]:
        return self._parts.get(number, [])

    def text(self, number: int) -> str:
        part = self.one(number)
        return "" if part is None else _text(part, self._name)


_NOTHING = memoryview(b"")
_FIXED = {1: 8, 5: 4}


def _fields(data: memoryview, name: str) -> Iterator[tuple[int, int, int, memoryview]]:
    """Yield (field number, wire type, integer, bytes) of every field, in order."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position, name)
        number, wire = key >> 3, key & 7
        if not 0 < number < 2**29:
            raise BundleError(f"ONNX file: message {name} has the impossible field number {number}")
        if wire == 0:
            integer, position = _varint(data, position, name)
            yield number, wire, integer - 2**64 if integer >= 2**63 else integer, _NOTHING
            continue
        if wire == 2:
            length, position = _varint(data, position, name)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise BundleError(f"ONNX file: field {number} of message {name} has the unknown wire type {wire}")
        if length > end - position:
            raise BundleError(f"ONNX file: message {name} is cut off: {length} bytes announced, {end - position} left")
        yield number, wire, 0, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int, name: str) -> tuple[int, int]:
    value = 0
    for count in range(10):
        if position >= len(data):
            raise BundleError(f"ONNX file: message {name} is cut off within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & (2**64 - 1), position
    raise BundleError(f"ONNX file: a number in message {name} is longer than 64 bits")


def _packed(data: memoryview, name: str) -> Iterator[int]:
    position = 0
    while position < len(data):
        value, position = _varint(data, position, name)
        yield value - 2**64 if value >= 2**63 else value


def _text(data: memoryview, name: str) -> str:
    if len(data) > MAX_NAME:
        raise BundleError(
            f"ONNX file: expected names of at most {MAX_NAME} bytes, message {name} has one of {len(data)}"
        )
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"ONNX file: a name in message {name} is not UTF-8: {error}") from None
