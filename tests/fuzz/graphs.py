"""Random small graphs of every operator that a trunk may be compiled from, through generator, compiler and sanitizers.

    python tests/fuzz/graphs.py --graphs 20000 [--seed 0] [--batch 100]

Shapes, attributes, types and numbers of inputs are random and often wrong, and a third of the graphs declare a shape
that their nodes do not make. Each graph has to be rejected, or its C has to run without a report from the address and
undefined behaviour sanitizers, to agree with onnxruntime to 1e-5, and to compute the same bits when its values share
memory. Many graphs go into one compilation. Prints what became of them; exits with 1 when anything was found, after
writing the graphs in question to --findings.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper, shape_inference

from kbt_edge._generate import RejectedError, Translator
from kbt_edge.errors import KbtError
from kbt_edge.onnxfile import read_onnx, token_limits
from kbt_edge.trunk import build, source

FLOAT, INT32, INT64, BOOL, DOUBLE = 1, 6, 7, 9, 11
NUMPY = {FLOAT: np.float32, INT32: np.int32, INT64: np.int64, BOOL: np.bool_, DOUBLE: np.float64}
TOLERANCE = 1e-5  # of C against onnxruntime, relative to the largest output
ROUNDS = 3  # sets of inputs


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    Abs Ceil Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity IsNaN LeakyRelu Log LogSoftmax Neg Reciprocal
    Relu Selu Sigmoid Sign Sin Softmax Softplus Sqrt Tanh
    """
)
BINARY = words("Add Sub Mul Div Pow Max Min Mean")
COMPARE = words("Equal Greater GreaterOrEqual Less LessOrEqual")
REDUCE = words("ReduceMax ReduceMean ReduceMin ReduceSum")
OTHERS = words(
    """
    And BatchNormalization Cast Clip Concat Constant Conv Expand Flatten Gather GatherND Gemm LayerNormalization MatMul
    Not Or RMSNormalization Reshape Shape Slice Split Squeeze Transpose Trilu Unsqueeze Where
    """
)
OPERATORS = [*UNARY, *BINARY, *COMPARE, *REDUCE, *OTHERS]
assert set(OPERATORS) == source.OPERATORS


@dataclass
class Value:
    name: str
    kind: int
    shape: tuple[int, ...]


@dataclass
class Maker:
    """Makes one graph."""

    rng: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    pool: list[Value] = field(default_factory=list)
    count: int = 0

    # ---- dice

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def below(self, n: int) -> int:
        return int(self.rng.integers(0, max(n, 1)))

    def pick(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def dims(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        return tuple(int(n) for n in self.rng.integers(1, 5, size=int(self.rng.integers(least, most + 1))))

    def axis(self, rank: int) -> int:
        return int(self.rng.integers(-rank - 1, rank + 1)) if self.chance(0.15) else self.below(2 * rank) - rank

    # ---- values

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def constant(self, array: Any) -> str:
        name = self.fresh()
        array = np.asarray(array)
        if self.chance(0.2):
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            self.constants.append(numpy_helper.from_array(array, name))
        return name

    def numbers(self, shape: tuple[int, ...], kind: int) -> Any:
        if kind == BOOL:
            return self.rng.random(shape) < 0.5
        if kind in (INT32, INT64):
            extreme = [0, 1, -1, np.iinfo(NUMPY[kind]).max, np.iinfo(NUMPY[kind]).min]
            small = self.rng.integers(-4, 5, size=shape)
            return np.where(self.rng.random(shape) < 0.1, self.pick(extreme), small).astype(NUMPY[kind])
        return self.rng.normal(size=shape).astype(NUMPY[kind])

    def value(self, kind: int | None = None) -> Value:
        """One of those made so far, mostly of the kind asked for."""
        fitting = [value for value in self.pool if value.kind == kind]
        if fitting and not self.chance(0.02):
            return fitting[-1] if self.chance(0.6) else self.pick(fitting)
        if kind is not None and not self.chance(0.05):
            shape = self.dims()
            return Value(self.constant(self.numbers(shape, kind)), kind, shape)
        return self.pick(self.pool)

    def partner(self, other: Value) -> str:
        """A value of the same kind that broadcasts with another one, or is meant to."""
        if self.chance(0.3):
            return self.value(other.kind).name
        shape = list(other.shape)
        for axis in range(len(shape)):
            if self.chance(0.3):
                shape[axis] = 1
        shape = shape[self.below(len(shape) + 1) :] if self.chance(0.4) else shape
        if self.chance(0.2):
            shape = [*self.dims(1, 2), *shape][-4:]
        if self.chance(0.05) and shape:
            shape[self.below(len(shape))] = 1 + self.below(70)
        return self.constant(self.numbers(tuple(shape), other.kind))

    # ---- nodes

    def add(self) -> bool:
        """One more node. False if ONNX's own rules reject it, or do not know what it makes."""
        kept = len(self.nodes), len(self.constants)
        operator = self.pick(OPERATORS)
        inputs, outputs, attributes = self.node(operator)
        if self.chance(0.03) and inputs:  # one too few, one too many, another order
            inputs = self.pick([inputs[:-1], [*inputs, inputs[0]], inputs[::-1], [*inputs[:-1], ""]])
        names = [self.fresh() for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        made = self.inferred(names)
        if made is None and not self.chance(0.05):
            del self.nodes[kept[0] :], self.constants[kept[1] :]
            return False
        self.pool += made or []
        return made is not None

    def inferred(self, names: list[str]) -> list[Value] | None:
        try:
            model = shape_inference.infer_shapes(self.model([]), check_type=True, strict_mode=True)
        except Exception:
            return None
        found = {}
        for value in model.graph.value_info:
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
                shape = tuple(d.dim_value for d in dims)
                if min(shape, default=1) > 0 and np.prod(shape, dtype=float) < 5000 and len(shape) < 6:
                    found[value.name] = Value(value.name, value.type.tensor_type.elem_type, shape)
        if not all(name in found for name in names):
            return None
        return [found[name] for name in names if found[name].kind in NUMPY]

    def node(self, operator: str) -> tuple[list[str], int, dict[str, Any]]:
        """Inputs, number of outputs and attributes."""
        real = DOUBLE if self.chance(0.05) else FLOAT
        number = self.pick([real, real, real, real, INT64, INT64, INT32])
        if operator in UNARY:
            x = self.value(number if operator in ("Abs", "Identity", "Neg", "Sign") else real)
            return [x.name], 1, self.unary_attributes(operator, x)
        if operator in BINARY:
            x = self.value(number if operator in ("Add", "Sub", "Mul", "Max", "Min") or self.chance(0.1) else real)
            more = self.below(3) if operator in ("Max", "Min", "Mean") else 1
            inputs = [x.name, *(self.partner(x) for _ in range(more))]
            return inputs[:: self.pick([1, -1])], 1, {}
        if operator in COMPARE:
            x = self.value(number)
            return [x.name, self.partner(x)], 1, {}
        if operator in REDUCE:
            return self.reduction(self.value(number if operator != "ReduceMean" else real))
        return getattr(self, f"node_{operator.lower()}")(real, number)  # type: ignore[no-any-return]

    def unary_attributes(self, operator: str, x: Value) -> dict[str, Any]:
        if self.chance(0.5):
            return {}
        if operator in ("Softmax", "LogSoftmax"):
            return {"axis": self.axis(len(x.shape))}
        if operator in ("Elu", "LeakyRelu", "HardSigmoid", "Selu"):
            return {"alpha": float(self.rng.random())}
        return {"approximate": self.pick(["none", "tanh", "other"])} if operator == "Gelu" else {}

    def reduction(self, x: Value) -> tuple[list[str], int, dict[str, Any]]:
        attributes = {"keepdims": self.below(2)} if self.chance(0.6) else {}
        if self.chance(0.3):
            return [x.name], 1, attributes | ({"noop_with_empty_axes": 1} if self.chance(0.5) else {})
        axes = [self.axis(len(x.shape)) for _ in range(1 + self.below(2))]
        return [x.name, self.constant(np.array(axes, np.int64))], 1, attributes

    def node_and(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(BOOL)
        return [x.name, self.partner(x)], 1, {}

    node_or = node_and

    def node_not(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        return [self.value(BOOL).name], 1, {}

    def node_batchnormalization(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        deep = [value for value in self.pool if value.kind == real and len(value.shape) > 1]
        x = deep[-1] if deep else self.value(real)
        shape = x.shape[1:2] if self.chance(0.9) else self.dims(0, 2)
        parts = [self.numbers(shape, real) for _ in range(4)]
        if self.chance(0.9):
            parts[3] = np.abs(parts[3])
        attributes = {"epsilon": 1e-3} if self.chance(0.3) else {"training_mode": 1} if self.chance(0.1) else {}
        return [x.name, *map(self.constant, parts)], 3 if "training_mode" in attributes else 1, attributes

    def node_cast(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        return [self.pick(self.pool).name], 1, {"to": self.pick([FLOAT, FLOAT, INT64, INT32, BOOL, DOUBLE, 10, 2])}

    def node_clip(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        shape = self.dims(0, 2) if self.chance(0.15) else ()
        bounds = [self.constant(self.numbers(shape, x.kind)) if self.chance(0.8) else "" for _ in range(self.below(3))]
        return [x.name, *bounds], 1, {}

    def node_concat(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        axis = self.axis(len(x.shape))
        inputs = [x.name]
        for _ in range(1 + self.below(2)):
            shape = list(x.shape)
            if shape:
                shape[axis % len(shape)] = 1 + self.below(4)
            inputs.append(self.constant(self.numbers(tuple(shape), x.kind)))
        return inputs, 1, {"axis": axis}

    def node_constant(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        choices: list[dict[str, Any]] = [
            {"value_float": 1.5},
            {"value_floats": [1.5, -2.0]},
            {"value_int": -(2**63)},
            {"value_ints": [3, 4, 5]},
            {"value": numpy_helper.from_array(self.numbers(self.dims(), number))},
        ]
        return [], 1, self.pick(choices)

    def node_conv(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        """A third of them divide their input into patches."""
        deep = [value for value in self.pool if value.kind == real and len(value.shape) in (3, 4)]
        x = self.pick(deep) if deep else self.value(real)
        rank = max(len(x.shape) - 2, 1)
        channels = x.shape[1] if len(x.shape) > 1 else 1
        group = channels if self.chance(0.2) else 1
        kernel = [self.pick([k for k in range(1, n + 1) if n % k == 0]) for n in x.shape[2:]] or [1]
        attributes: dict[str, Any] = {"strides": kernel}
        if self.chance(0.6):
            kernel = [1 + self.below(3) for _ in range(rank)]
            attributes = {"strides": [1 + self.below(3) for _ in range(rank)]} if self.chance(0.5) else {}
            if self.chance(0.4):
                attributes["pads"] = [self.below(3) for _ in range(2 * rank)]
            elif self.chance(0.3):
                attributes["auto_pad"] = self.pick(["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
            if self.chance(0.3):
                attributes["dilations"] = [1 + self.below(2) for _ in range(rank)]
        if self.chance(0.05):
            attributes[self.pick(["strides", "dilations", "pads"])] = [self.pick([0, -1, 2**31, 2**62])] * rank
        out = group * (1 + self.below(3))
        inputs = [x.name, self.constant(self.numbers((out, channels // group, *kernel), real))]
        if self.chance(0.6):
            inputs.append(self.constant(self.numbers((out,), real)))
        return inputs, 1, attributes | {"group": group} | ({"kernel_shape": kernel} if self.chance(0.5) else {})

    def node_expand(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        shape = [n if self.chance(0.7) else self.pick([1, 2, 60]) for n in x.shape]
        return [x.name, self.constant(np.array([*self.dims(0, 1), *shape], np.int64))], 1, {}

    def node_flatten(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        return [x.name], 1, {"axis": self.axis(len(x.shape))} if self.chance(0.8) else {}

    def node_gather(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        ids = [value for value in self.inputs if value.kind == INT64]
        if ids and self.chance(0.6):
            return [self.constant(self.numbers((*self.dims(1, 1), *self.dims(0, 2)), real)), ids[0].name], 1, {}
        x = self.value(number)
        axis = self.axis(len(x.shape))
        length = x.shape[axis % len(x.shape)] if x.shape else 1
        reach = length + 1 if self.chance(0.1) else length
        index = self.rng.integers(-reach, reach, size=self.dims(0, 2)).astype(self.pick([np.int64, np.int32]))
        return [x.name, self.constant(index)], 1, {"axis": axis}

    def node_gathernd(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        batch = self.below(2) if len(x.shape) > 1 and self.chance(0.3) else 0
        depth = 1 + self.below(max(len(x.shape) - batch, 1))
        leading = (*x.shape[:batch], *self.dims(0, 2))
        reach = 1 if self.chance(0.05) else 0
        lengths = (*x.shape[batch : batch + depth], *[1] * depth)[:depth]
        index = [self.rng.integers(-n - reach, n + reach, size=leading) for n in lengths]
        inputs = [x.name, self.constant(np.stack(index, axis=-1).astype(np.int64))]
        return inputs, 1, {"batch_dims": batch} if batch or self.chance(0.1) else {}

    def node_gemm(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        flat = [value for value in self.pool if value.kind == real and len(value.shape) == 2]
        x = self.pick(flat) if flat else self.value(real)
        transposed = self.below(2), self.below(2)
        rows, inner = (*x.shape[:2], 1, 1)[:2] if not transposed[0] else (*x.shape[:2], 1, 1)[1::-1]
        columns = 1 + self.below(4)
        weight = self.numbers((columns, inner) if transposed[1] else (inner, columns), real)
        inputs = [x.name, self.constant(weight)]
        if self.chance(0.7):
            shapes = [(), (1,), (columns,), (1, columns), (rows, 1), (rows, columns), self.dims(0, 3)]
            inputs.append(self.constant(self.numbers(self.pick(shapes), real)))
        attributes = {"transA": transposed[0], "transB": transposed[1]}
        return inputs, 1, attributes | ({"alpha": 0.5, "beta": -1.5} if self.chance(0.4) else {})

    def node_matmul(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number if self.chance(0.3) else real)
        inner = x.shape[-1] if x.shape else 1
        shape = self.pick([(inner,), (inner, 3), (inner, 1), (2, inner, 3), (*x.shape[:-2], inner, 2), self.dims()])
        y = self.constant(self.numbers(shape, x.kind))
        return [x.name, y] if self.chance(0.85) else [y, x.name], 1, {}

    def normalisation(self, real: int, most: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(real)
        axis = self.axis(len(x.shape))
        shape = x.shape[axis:] if x.shape and self.chance(0.8) else self.dims()
        inputs = [x.name, *(self.constant(self.numbers(shape, real)) for _ in range(1 + self.below(most)))]
        attributes: dict[str, Any] = {"axis": axis} if self.chance(0.7) else {}
        return inputs, 1 + (self.below(3) if most > 1 and self.chance(0.2) else 0), attributes

    def node_layernormalization(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        return self.normalisation(real, 2)

    def node_rmsnormalization(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        return self.normalisation(real, 1)

    def node_reshape(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        size = int(np.prod(x.shape))
        shape = self.pick([[-1], [size], [1, size], [size, 1], [0, -1], [1, 0], [2, -1], list(x.shape)[::-1], [-1, -1]])
        if self.chance(0.1):
            shape = [int(n) for n in self.rng.integers(-1, 6, size=3)]
        return [x.name, self.constant(np.array(shape, np.int64))], 1, {"allowzero": 1} if self.chance(0.1) else {}

    def node_shape(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.pick(self.pool)
        return [x.name], 1, {"start": self.below(3) - 1} if self.chance(0.3) else {}

    def node_slice(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        count = 1 + self.below(max(len(x.shape), 1))
        far = [-(2**63), 2**63 - 1, -100, 100, *range(-5, 6)]
        parts = [np.array([self.pick(far) for _ in range(count)], np.int64) for _ in range(2)]
        if self.chance(0.7):
            axes = self.rng.permutation(len(x.shape))[:count] if len(x.shape) >= count else np.zeros(count)
            parts.append(np.asarray(axes, np.int64))
            if self.chance(0.5):
                parts.append(np.array([self.pick([1, 2, -1, -2, 3, 0, 2**62]) for _ in range(count)], np.int64))
        return [x.name, *map(self.constant, parts)], 1, {}

    def node_split(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        axis = self.axis(len(x.shape))
        length = x.shape[axis % len(x.shape)] if x.shape else 1
        if self.chance(0.5):
            count = 1 + self.below(3)
            return [x.name], count, {"axis": axis, "num_outputs": count}
        first = self.below(length) if length > 1 else 0
        parts = [first, length - first] if first else [length]
        if self.chance(0.1):
            parts[0] += 1
        return [x.name, self.constant(np.array(parts, np.int64))], len(parts), {"axis": axis}

    def node_squeeze(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        ones = [axis for axis, length in enumerate(x.shape) if length == 1]
        if self.chance(0.4):
            return [x.name], 1, {}
        axes = [self.pick(ones)] if ones and self.chance(0.9) else [self.axis(len(x.shape))]
        return [x.name, self.constant(np.array(axes, np.int64))], 1, {}

    def node_transpose(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        order = [int(axis) for axis in self.rng.permutation(len(x.shape))]
        if self.chance(0.1) and order:
            order[0] = self.below(5) - 1
        return [x.name], 1, {"perm": order} if self.chance(0.8) and order else {}

    def node_trilu(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        far = self.constant(np.array(self.pick([0, 1, -1, 5, -5, 2**62]), np.int64))
        return [x.name, *([far] if self.chance(0.6) else [])], 1, {"upper": self.below(2)} if self.chance(0.7) else {}

    def node_unsqueeze(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        x = self.value(number)
        axes = [self.axis(len(x.shape) + 1) for _ in range(1 + self.below(2))]
        return [x.name, self.constant(np.array(axes, np.int64))], 1, {}

    def node_where(self, real: int, number: int) -> tuple[list[str], int, dict[str, Any]]:
        condition = self.value(BOOL)
        x = self.value(number)
        return [condition.name, x.name, self.partner(x)], 1, {}

    # ---- the whole

    def model(self, outputs: list[Any], opset: int = 23) -> Any:
        declared = [helper.make_tensor_value_info(v.name, v.kind, v.shape) for v in self.inputs]
        graph = helper.make_graph(self.nodes, "g", declared, outputs, self.constants)
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])

    def make(self) -> Any:
        """A model with one float32 output, whose shape is not declared yet."""
        self.inputs = [Value("x", FLOAT, self.dims(1))]
        if self.chance(0.4):
            self.inputs.append(Value("ids", INT64, self.dims(1, 2)))
        self.pool = list(self.inputs)
        wanted, tries = 1 + self.below(5), 0
        while len(self.nodes) < wanted and tries < 12:
            self.add()
            tries += 1
        made = {name for node in self.nodes for name in node.output}
        candidates = [value for value in self.pool if value.name in made] or [self.inputs[0]]
        last = candidates[-1] if self.chance(0.8) else self.pick(candidates)
        name = last.name
        for operator, needed, more, attributes in (
            ("Cast", last.kind != FLOAT or name not in made, [], {"to": FLOAT}),
            ("Reshape", not last.shape, [self.constant(np.array([-1], np.int64))] if not last.shape else [], {}),
        ):
            if needed:
                output = self.fresh()
                self.nodes.append(helper.make_node(operator, [name, *more], [output], **attributes))
                name = output
        return self.model([helper.make_tensor_value_info(name, FLOAT, None)])


@dataclass
class Case:
    """A graph with its inputs and what onnxruntime answers to them; None where it rejects."""

    data: bytes
    inputs: list[source.CArray]
    output: source.CArray
    feeds: list[dict[str, Any]]
    answers: list[Any]
    lie: bool
    code: str = ""

    def finite_throughout(self, feed: dict[str, Any]) -> bool:
        """Whether every value between input and output is finite."""
        model = onnx.load_model_from_string(self.data)
        del model.graph.output[:], model.graph.value_info[:]  # which may be lies
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for node in model.graph.node for name in node.output)
        values = session(model).run(None, feed)
        return all(np.isfinite(value).all() for value in values if value.dtype.kind == "f")

    def trembling(self, feed: dict[str, Any], answer: Any) -> float:
        """How far onnxruntime's own answer moves if every value is off by its last digit: no more is asked of C."""
        rng, most = np.random.default_rng(0), 0.0
        for _ in range(8):
            moved = reference(rounded(self.data, rng), feed)
            if moved is None or moved.shape != answer.shape or not np.isfinite(moved).all():
                return float("inf")
            most = max(most, float(np.abs(moved - answer).max()))
        return 4 * most


def rounded(data: bytes, rng: np.random.Generator) -> Any:
    """The model with every float32 value, between its nodes and at its inputs, off by one in its last digit or not."""
    model = onnx.load_model_from_string(data)
    del model.graph.value_info[:]  # which may be lies
    model = shape_inference.infer_shapes(model)
    graph = model.graph
    values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    nodes = list(graph.node)
    del graph.node[:], graph.value_info[:]

    def nudge(exact: str, name: str) -> Any:
        shape = [dimension.dim_value for dimension in values[name].shape.dim]
        factors = (1 + 1.2e-7 * rng.choice([-1, 0, 1], size=shape)).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(factors, f"{name} nudge"))
        return helper.make_node("Mul", [exact, f"{name} nudge"], [name])

    inputs = {value.name for value in graph.input if value.type.tensor_type.elem_type == FLOAT}
    for name in inputs:
        values[f"{name} moved"] = values[name]
        graph.node.append(nudge(name, f"{name} moved"))
    for node in nodes:
        node.input[:] = [f"{name} moved" if name in inputs else name for name in node.input]
        moved = [name for name in node.output if name in values and values[name].elem_type == FLOAT]
        node.output[:] = [f"{name} exact" if name in moved else name for name in node.output]
        graph.node.extend([node, *(nudge(f"{name} exact", name) for name in moved)])
    return model


def make_case(rng: np.random.Generator, note: Path) -> Case:
    """``note`` holds the graph meanwhile, in case that onnxruntime does not survive it."""
    maker = Maker(rng)
    model = maker.make()
    note.write_bytes(model.SerializeToString())
    opset = model.opset_import[0]
    if maker.chance(0.5):
        opset.version = maker.pick([13, 16, 17, 18, 19, 20, 20, 20, 21, 22, 23])
    limits: dict[str, int] = {}
    with contextlib.suppress(KbtError):
        limits = token_limits(read_onnx(model.SerializeToString()).graph)
    feeds = []
    for which in range(ROUNDS):
        feed = {}
        for value in maker.inputs:
            if value.kind == FLOAT:
                special = rng.choice([0.0, 1.0, -1.0, 3.0, 40.0], size=value.shape)
                feed[value.name] = (rng.normal(size=value.shape) if which < 2 else special).astype(np.float32)
            elif value.name in limits:
                feed[value.name] = rng.integers(0, limits[value.name], size=value.shape)
            else:
                feed[value.name] = maker.numbers(value.shape, INT64)
        feeds.append(feed)
    answers = [reference(model, feed) for feed in feeds]
    shape = next((answer.shape for answer in answers if answer is not None), None)
    lie = maker.chance(0.3)
    if shape is None:
        declared, lie = maker.dims(1), False
    else:
        declared = shape
        while lie and declared == shape:
            declared = maker.pick(
                [maker.dims(1), (*shape[:-1], shape[-1] + 1), (1, *shape), shape[1:] or (7,), (64, 4)]
            )
    tensor = model.graph.output[0].type.tensor_type
    del tensor.shape.dim[:]
    for length in declared:
        tensor.shape.dim.add(dim_value=length)
    if maker.chance(0.3):  # the values between are declared too, wrongly; the declarations must not be used
        for node in model.graph.node[:-1]:
            for output in node.output:
                info = helper.make_tensor_value_info(output, maker.pick([FLOAT, INT64]), maker.dims())
                model.graph.value_info.append(info)
    kinds = {FLOAT: "float", INT64: "int64_t"}
    inputs = [source.CArray(v.shape, kinds[v.kind], limits.get(v.name)) for v in maker.inputs]
    output = source.CArray(tuple(declared), "float")
    return Case(model.SerializeToString(), inputs, output, feeds, answers, lie)


def session(model: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def reference(model: Any, feed: dict[str, Any]) -> Any:
    """What onnxruntime answers, or None."""
    try:
        read_onnx(model.SerializeToString())  # rejects what would end this process
        return session(model).run(None, feed)[0]
    except Exception:
        return None


# Many graphs in one program: it reads the inputs of all from a file and writes status and output of each.

LOCAL = re.compile(r"\b(ref_scalar_\w+|node\d+_\w+|weight\d+_\w+|trunk|trunk_load|kbt_trunk_run)\b")


def program(cases: list[Case]) -> str:
    parts = [f"#include <stdio.h>\n#include <stdlib.h>\n{source.PRELUDE}\n"]
    calls = []
    for i, case in enumerate(cases):
        parts.append(LOCAL.sub(rf"g{i}_\1", case.code).replace('__attribute__((visibility("default")))', ""))
        lines = [f"static void case{i}(FILE *in) {{", f"  for (int round = 0; round < {ROUNDS}; ++round) {{"]
        for k, array in enumerate(case.inputs):
            count = int(np.prod(array.shape))
            lines.append(f"    {array.c_type} *x{k} = malloc({count} * sizeof *x{k});")
            lines.append(f"    if (fread(x{k}, sizeof *x{k}, {count}, in) != {count}) exit(9);")
        count = int(np.prod(case.output.shape))
        lines += [
            f"    const void *inputs[] = {{{', '.join(f'x{k}' for k in range(len(case.inputs)))}}};",
            f"    float *h = calloc({count}, sizeof *h);",
            f"    int status = g{i}_kbt_trunk_run(inputs, h);",
            f"    fwrite(&status, sizeof status, 1, stdout); fwrite(h, sizeof *h, {count}, stdout);",
            *(f"    free(x{k});" for k in range(len(case.inputs))),
            "    free(h);\n  }\n}\n",
        ]
        parts.append("\n".join(lines))
        calls.append(f"    case {i}: case{i}(in); break;")
    parts.append(
        'int main(int argc, char **argv) {\n  FILE *in = fopen(argv[1], "rb");\n'
        "  for (int i = 2; i < argc; ++i) switch (atoi(argv[i])) {\n" + "\n".join(calls) + "\n  }\n  return 0;\n}\n"
    )
    return "\n".join(parts)


def run(binary: Path, cases: list[Case], which: list[int]) -> tuple[str, bytes]:
    """The sanitizers' report, empty if there is none, and what was written."""
    feed = b"".join(x.tobytes() for i in which for f in cases[i].feeds for x in f.values())
    (binary.parent / "feed").write_bytes(feed)
    call = [str(binary), str(binary.parent / "feed"), *map(str, which)]
    done = subprocess.run(call, capture_output=True, env={"ASAN_OPTIONS": "detect_leaks=0"}, timeout=600)
    if done.returncode == 0:
        return "", done.stdout
    report = re.search(r"(runtime error|AddressSanitizer): .*", done.stderr.decode(errors="replace"))
    return report[0] if report else f"exit code {done.returncode}", b""


def separate(cases: list[Case], written: bytes, which: int) -> bytes:
    """What one case has written."""
    sizes = [ROUNDS * (4 + 4 * int(np.prod(case.output.shape))) for case in cases]
    return written[sum(sizes[:which]) : sum(sizes[: which + 1])]


def judge(case: Case, written: bytes) -> str:
    """What is wrong with the answers, or nothing."""
    count = int(np.prod(case.output.shape))
    for feed, answer in zip(case.feeds, case.answers, strict=True):
        status = int.from_bytes(written[:4], sys.byteorder)
        got = np.frombuffer(written, np.float32, count, 4).reshape(case.output.shape)
        written = written[4 + 4 * count :]
        if answer is None:
            continue  # onnxruntime rejects it, with these inputs at least
        if not np.isfinite(answer).all():
            if status == 0:
                return "finite where onnxruntime is not"
            continue
        away = float(np.abs(got - answer).max()) if status == 0 else float("inf")
        if away <= TOLERANCE * max(1.0, float(np.abs(answer).max())) or not case.finite_throughout(feed):
            continue  # some reductions of onnxruntime lose NaN on the way, others do not; C never does
        if away > case.trembling(feed, answer):
            return f"status {status}, differs from onnxruntime by {away:.1e}"
    return ""


def fuzz(graphs: int, seed: int, batch: int, findings: Path, quiet: bool = False) -> Counter[str]:
    rng = np.random.default_rng(seed)
    translate = Translator()
    told = Counter(dict.fromkeys(("graphs", "lies", "rejected", "rejected by onnxruntime alone", "run", "findings"), 0))
    operators: Counter[str] = Counter()

    findings.mkdir(parents=True, exist_ok=True)

    def found(case: Case, what: str) -> None:
        told["findings"] += 1
        path = findings / f"{seed}-{told['graphs']}-{told['findings']}.onnx"
        path.write_bytes(case.data)
        print(f"{path}: {what}: {[node.op_type for node in onnx.load_model_from_string(case.data).graph.node]}")

    while told["graphs"] < graphs:
        cases: list[Case] = []
        while len(cases) < batch and told["graphs"] < graphs:
            case = make_case(rng, findings / f"{seed}-now.onnx")
            told["graphs"] += 1
            told["lies"] += case.lie
            try:
                model = read_onnx(case.data)
                source.check_operators(model)
                case.code = translate(case.data, "trunk") + source.run_function(case.inputs, case.output)
            except (KbtError, RejectedError):
                told["rejected"] += 1
                continue
            if case.lie:
                found(case, f"a lie is believed: {case.output.shape}")
            told["rejected by onnxruntime alone"] += all(answer is None for answer in case.answers)
            operators.update(model.operators.keys())
            cases.append(case)
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder) / "trial"
            command = [shutil.which("gcc") or "cc", *build.SANITIZE, "-w", "-Werror=incompatible-pointer-types"]
            try:
                build.compile_c(command, program(cases), binary)
            except KbtError as error:
                told["findings"] += 1
                print(f"seed {seed}, graph {told['graphs']}: does not compile: {error}")
                (findings / f"{seed}-{told['graphs']}.c").write_text(program(cases))
                continue
            everything = list(range(len(cases)))
            report, written = run(binary, cases, everything)
            if report:  # which of them is it?
                for i in everything:
                    report, one = run(binary, cases, [i])
                    wrong = report or judge(cases[i], one)
                    if wrong:
                        found(cases[i], wrong)
            else:
                # Apart or in one memory, a network computes the same bits.
                build.compile_c([command[0], *build.LANGUAGE, "-O1", "-w"], program(cases), binary)
                if run(binary, cases, everything) != ("", written):
                    for i in everything:
                        if run(binary, cases, [i]) != ("", separate(cases, written, i)):
                            found(cases[i], "its values overwrite each other")
                for case in cases:
                    size = ROUNDS * (4 + 4 * int(np.prod(case.output.shape)))
                    wrong = judge(case, written[:size])
                    written = written[size:]
                    if wrong:
                        found(case, wrong)
            told["run"] += len(cases)
        if not quiet:
            print(
                f"graphs: {', '.join(f'{count} {what}' for what, count in told.items())}", file=sys.stderr, flush=True
            )
    (findings / f"{seed}-now.onnx").unlink(missing_ok=True)
    missing = sorted(set(OPERATORS) - set(operators))
    print(f"graphs: {', '.join(f'{count} {what}' for what, count in told.items())}; operators never run: {missing}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="Random graphs through the C generator, compiler and sanitizers.")
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=100, help="graphs in one compilation")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz/graphs"), help="where findings are written")
    options = parser.parse_args()
    told = fuzz(options.graphs, options.seed, options.batch, options.findings)
    raise SystemExit(1 if told["findings"] else 0)


if __name__ == "__main__":
    main()
