"""Reads the declarations of an untrusted ONNX file, without the ``onnx`` package.

A bundle may come from an untrusted source, and a board has no ``onnx`` installed. This reader parses the protobuf wire
format far enough to find operators, inputs, outputs and valid token ids. It rejects tensors in other files (external
data) and control flow: nested graphs, functions and training graphs. ``rules.py`` checks the remaining graph.

It is stricter than a protobuf parser where two readers could disagree about the same bytes: a known field of the wrong
wire type, and a repeated field that may occur once, are errors. Every length is checked against the size of
the file before it is used, tensors are views into the file and must have as many values as their shape says, and the
number of fields is limited. So the cost of a hostile file is bounded by its size. The only error raised is
``BundleError``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from kbt_edge.errors import BundleError

__all__ = ["ELEMENT_TYPES", "MAX_BYTES", "Graph", "Node", "OnnxModel", "Tensor", "Value", "parse_onnx"]

# They bound the memory that a hostile file can use.
MAX_BYTES: Final = 2**28  # unless the caller allows more
MAX_PARTS: Final = 100_000  # of one kind in one message, e.g. the nodes of a graph
MAX_FIELDS: Final = 200_000  # of the whole file
MAX_RANK: Final = 64
MAX_NAME: Final = 4096

# The marker that makes onnxruntime read bytes as its own format, which is not checked here.
ORT_FORMAT: Final = b"ORTM"

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
    17: ("float8e4m3fn", 1),
    18: ("float8e4m3fnuz", 1),
    19: ("float8e5m2", 1),
    20: ("float8e5m2fnuz", 1),
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
    value_type: int  # element type of its attribute ``value``, which a Constant has; 0 without one


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]  # without those that an initialiser provides
    outputs: tuple[Value, ...]
    initialisers: Mapping[str, Tensor]
    names: tuple[str, ...]  # of all inputs


@dataclass(frozen=True)
class OnnxModel:
    opset: int  # of the default domain
    graph: Graph

    @property
    def operators(self) -> dict[str, int]:
        """Operator → how often it occurs, sorted by name."""
        return dict(sorted(Counter(node.operator for node in self.graph.nodes).items()))


def parse_onnx(data: bytes, max_bytes: int = MAX_BYTES) -> OnnxModel:
    """Read ``data``, the content of an ONNX file. External data, control flow and anything malformed is rejected."""
    if len(data) > max_bytes:
        raise BundleError(f"ONNX file: expected at most {max_bytes} bytes, got {len(data)}; max_bytes allows more")
    if data[4:8] == ORT_FORMAT:
        raise BundleError("ONNX file: expected protobuf, got bytes that onnxruntime would take for its own format")
    return _Reader().model(memoryview(data))


# The parts of a model, each named after its message in onnx.proto, with the field numbers from there.


class _Reader:
    """Reads one file. Fields are counted: each costs about a hundred bytes here and two in the file."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def _message(self, data: memoryview | None, name: str, kinds: Mapping[int, str]) -> _Message:
        message = _Message(data if data is not None else _NOTHING, name, kinds, self._left)
        self._left -= message.count
        return message

    def model(self, data: memoryview) -> OnnxModel:
        model = self._message(data, "model", {7: "one", 8: "many", 20: "many", 25: "many"})
        body = model.one(7)
        if body is None:
            raise BundleError("ONNX file: it holds no graph; it is empty, cut off, or not an ONNX file")
        if model.many(20) or model.many(25):
            what = "training information" if model.many(20) else "functions of its own"
            raise BundleError(
                f"ONNX file: it holds {what}; a trunk is one graph. Export it for inference, with inlining"
            )
        return OnnxModel(opset=self._opset(model.many(8)), graph=self._graph(body))

    def _opset(self, imports: list[memoryview]) -> int:
        opset = 0
        for entry in imports:
            fields = self._message(entry, "opset_import", {1: "one", 2: "int"})
            if fields.text(1) in ("", "ai.onnx"):
                opset = max(opset, fields.integer(2))
        if opset < 1:
            raise BundleError("ONNX file: it imports no version of the standard operators")
        return opset

    def _graph(self, data: memoryview) -> Graph:
        fields = self._message(data, "graph", {1: "many", 5: "many", 11: "many", 12: "many", 15: "many"})
        initialisers: dict[str, Tensor] = {}
        for tensor in (self._tensor(entry) for entry in fields.many(5)):
            if tensor.name in initialisers:
                raise BundleError(f"ONNX file: two initialisers are named {tensor.name!r}")
            initialisers[tensor.name] = tensor
        for entry in fields.many(15):
            self._sparse_tensor(entry)
        inputs = tuple(map(self._value, fields.many(11)))
        return Graph(
            nodes=tuple(map(self._node, fields.many(1))),
            inputs=tuple(value for value in inputs if value.name not in initialisers),
            outputs=tuple(map(self._value, fields.many(12))),
            initialisers=initialisers,
            names=tuple(value.name for value in inputs),
        )

    def _node(self, data: memoryview) -> Node:
        fields = self._message(data, "node", {1: "many", 2: "many", 4: "one", 5: "many", 7: "one"})
        operator = _operator(fields.text(4), fields.text(7))
        integers: dict[str, int] = {}
        value_type = 0
        for entry in fields.many(5):
            name, integer, element_type = self._attribute(entry, operator)
            if integer is not None:
                integers[name] = integer
            if name in _VALUE_TYPES:
                value_type = _VALUE_TYPES[name] or element_type
        return Node(
            operator=operator,
            inputs=tuple(_text(entry, "node") for entry in fields.many(1)),
            outputs=tuple(_text(entry, "node") for entry in fields.many(2)),
            integers=integers,
            value_type=value_type,
        )

    def _attribute(self, data: memoryview, operator: str) -> tuple[str, int | None, int]:
        """Its name, its integer if it is one, and the element type of its tensor if it is one."""
        kinds = {1: "one", 3: "int", 5: "one", 6: "one", 10: "many", 11: "many", 22: "one", 23: "many"}
        fields = self._message(data, "attribute", kinds)
        if fields.has(6) or fields.has(11):
            raise BundleError(
                f"ONNX file: {operator} holds a graph of its own; a trunk cannot branch or loop (If, Loop, Scan). "
                "Export it with constant control flow"
            )
        tensors = [self._tensor(entry) for entry in [*fields.many(5), *fields.many(10)]]
        for entry in [*fields.many(22), *fields.many(23)]:
            self._sparse_tensor(entry)
        return fields.text(1), fields.integer(3) if fields.has(3) else None, tensors[0].element_type if tensors else 0

    def _tensor(self, data: memoryview) -> Tensor:
        kinds = {1: "ints", 2: "int", 3: "one", 8: "one", 9: "one", 13: "many", 14: "int"}
        fields = self._message(data, "tensor", {**kinds, **dict.fromkeys(_VALUES, "values")})
        name = fields.text(8)
        if fields.many(13) or fields.integer(14) != 0:
            raise BundleError(
                f"ONNX file: tensor {name!r} keeps its values in another file; a trunk must be one self-contained file"
            )
        shape = tuple(fields.integers(1))
        if any(length < 0 for length in shape):
            raise BundleError(f"ONNX file: tensor {name!r} has a negative dimension: {shape}")
        element_type = fields.integer(2)
        _check_values(fields, name, element_type, shape)
        return Tensor(name, element_type, shape)

    def _sparse_tensor(self, data: memoryview) -> None:
        fields = self._message(data, "sparse_tensor", {1: "one", 2: "one"})
        for part in (fields.one(1), fields.one(2)):
            if part is not None:
                self._tensor(part)
        # A runtime makes it dense, so a few bytes can fill any memory.
        raise BundleError("ONNX file: expected dense tensors, got a sparse one; export the trunk without")

    def _value(self, data: memoryview) -> Value:
        fields = self._message(data, "value_info", {1: "one", 2: "one"})
        name = fields.text(1)
        kind = self._message(fields.one(2), "type", {1: "one"}).one(1)
        if kind is None:
            return Value(name, 0, None)  # a sequence, map or optional: a valid graph, never a valid trunk
        tensor = self._message(kind, "tensor_type", {1: "int", 2: "one"})
        if not tensor.has(2):
            return Value(name, tensor.integer(1), None)
        shape: list[int | str | None] = []
        for entry in self._message(tensor.one(2), "shape", {1: "many"}).many(1):
            dimension = self._message(entry, "dimension", {1: "int", 2: "one"})
            shape.append(dimension.integer(1) if dimension.has(1) else dimension.text(2) or None)
        return Value(name, tensor.integer(1), tuple(shape))


# The attributes that hold the value of a Constant, and their element types; 0: that of a tensor.
_VALUE_TYPES: Final = {"value": 0, "value_float": 1, "value_floats": 1, "value_int": 7, "value_ints": 7}


def _operator(name: str, domain: str) -> str:
    return name if domain in ("", "ai.onnx") else f"{domain}.{name}"


# Where a tensor that has no raw bytes keeps its values: field -> bytes of each, or 0 for numbers of varying length.
_VALUES: Final = {4: 4, 5: 0, 7: 0, 10: 8, 11: 0}
_VALUES_OF: Final = {1: 4, 7: 7, 11: 10, 12: 11, 13: 11}  # element type -> field; 5 for all others


def _check_values(fields: _Message, name: str, element_type: int, shape: tuple[int, ...]) -> None:
    """A tensor has as many values as its shape says, so the size of the file bounds the memory of its constants."""
    if element_type not in ELEMENT_TYPES:
        raise BundleError(f"ONNX file: tensor {name!r} has the unknown element type {element_type}")
    if fields.has(3):
        raise BundleError(f"ONNX file: tensor {name!r} is a segment of another one")
    elements = math.prod(shape)
    raw, kept = fields.one(9), [number for number in _VALUES if fields.has(number)]
    if raw is None:
        field = _VALUES_OF.get(element_type, 5)
        counted, expected = fields.values(field), elements
        what = "values"
        if kept not in ([], [field]):
            raise BundleError(f"ONNX file: tensor {name!r} keeps its values in the field of another type")
    else:
        counted, expected, what = len(raw), elements * ELEMENT_TYPES[element_type][1], "bytes"
        if kept:
            raise BundleError(f"ONNX file: tensor {name!r} holds its values twice")
    if counted != expected:
        shown = str(expected) if expected < 10**30 else "a huge number of"
        raise BundleError(f"ONNX file: tensor {name!r} of rank {len(shape)} needs {shown} {what}, it has {counted}")


# The wire format: https://protobuf.dev/programming-guides/encoding


class _Message:
    """The known fields of one message.

    Kind: "int" once, "ints" any number, "one" or "many" strings or messages, "values" numbers that are only counted.
    """

    def __init__(self, data: memoryview, name: str, kinds: Mapping[int, str], most: int) -> None:
        self._name = name
        self._ints: dict[int, list[int]] = {}
        self._parts: dict[int, list[memoryview]] = {}
        self._counts: dict[int, int] = {}
        self.count = 0
        for number, wire, integer, part in _fields(data, name):
            self.count += 1
            if self.count > most:
                raise BundleError(f"ONNX file: expected at most {MAX_FIELDS} fields, got more than any real model has")
            kind = kinds.get(number)
            if kind is None:
                continue
            if kind == "values":
                self._counts[number] = self._counts.get(number, 0) + _numbers(part, wire, _VALUES[number], name)
            elif wire == 0 and kind in ("int", "ints"):
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
        return number in self._ints or number in self._parts or number in self._counts

    def integer(self, number: int) -> int:
        return self._ints[number][0] if number in self._ints else 0

    def integers(self, number: int) -> list[int]:
        return self._ints.get(number, [])

    def values(self, number: int) -> int:
        return self._counts.get(number, 0)

    def one(self, number: int) -> memoryview | None:
        return self._parts[number][0] if number in self._parts else None

    def many(self, number: int) -> list[memoryview]:
        return self._parts.get(number, [])

    def text(self, number: int) -> str:
        part = self.one(number)
        return "" if part is None else _text(part, self._name)


_NOTHING: Final = memoryview(b"")
_FIXED: Final = {1: 8, 5: 4}


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


def _numbers(data: memoryview, wire: int, width: int, name: str) -> int:
    """How many numbers of a repeated field one entry holds: itself, or those packed into it."""
    if wire == (0 if width == 0 else 1 if width == 8 else 5):
        return 1
    if wire != 2 or (width and len(data) % width):
        raise BundleError(f"ONNX file: the values of a {name} are not whole numbers of {width} bytes")
    return len(data) // width if width else int(np.count_nonzero(np.frombuffer(data, np.uint8) < 0x80))


def _text(data: memoryview, name: str) -> str:
    if len(data) > MAX_NAME:
        raise BundleError(
            f"ONNX file: expected names of at most {MAX_NAME} bytes, message {name} has one of {len(data)}"
        )
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"ONNX file: a name in message {name} is not UTF-8: {error}") from None
    if not text.isprintable():  # it will be shown, and must not move a terminal's cursor
        raise BundleError(f"ONNX file: expected printable names, message {name} has {text[:40]!a}")
    return text
