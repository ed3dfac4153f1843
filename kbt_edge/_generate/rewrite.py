"""Other nodes with the same result, which the generator translates better, or at all.

Each pass takes a model without text, and the type and shape of each of its values.

    fold_constants       what is computed from constants alone is computed here, if it is small
    fold_normalisations  BatchNormalization becomes part of the product before it, or a Mul and an Add
    gather_rows          GatherND by constant indices becomes a Gather
    turn_weights         a constant that Gemm would transpose is transposed here
    patches_as_rows      a Conv of patches that do not overlap becomes a product
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .limits import FOLDED, MAX_MEMORY, TYPES, RejectedError

__all__ = ["rewritten"]

Info = tuple[int, tuple[int, ...]]  # element type and shape
WIDEST: Final = 8  # bytes of an element


def rewritten(onnx: Any, model: Any, known: Mapping[str, Info | None], kernels: bool) -> bool:
    """Change ``model``; False if there was nothing to change. ``kernels`` as in ``Translator``."""
    graph = _Graph(onnx, model, known)
    for step in (_fold_constants, _fold_normalisations, _gather_rows):
        step(graph)
    if kernels:
        _turn_weights(graph)
        _patches_as_rows(graph)
    return graph.finish()


class _Graph:
    """A model whose nodes and constants are being replaced."""

    def __init__(self, onnx: Any, model: Any, known: Mapping[str, Info | None]) -> None:
        self.onnx = onnx
        self.graph = model.graph
        self.opset = max(entry.version for entry in model.opset_import)
        self.known = dict(known)
        self.initialisers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.nodes = list(model.graph.node)
        self.changed = False
        self._arrays: dict[str, Any] = {}
        self._count = 0

    def constant(self, name: str) -> Any:
        """The values of a constant, None for other names."""
        if name not in self._arrays and name in self.initialisers:
            self._arrays[name] = self.onnx.numpy_helper.to_array(self.initialisers[name])
        return self._arrays.get(name)

    def fresh(self) -> str:
        self._count += 1
        return f"w{self._count}"

    def new_constant(self, array: Any, name: str = "") -> str:
        name = name or self.fresh()
        array = np.ascontiguousarray(array).reshape(array.shape)
        self.initialisers[name] = self.onnx.numpy_helper.from_array(array, name)
        self._arrays[name] = array
        self.known[name] = self.initialisers[name].data_type, array.shape
        self.changed = True
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> Any:
        self.changed = True
        return self.onnx.helper.make_node(operator, inputs, [output or self.fresh()], **attributes)

    def shape(self, name: str) -> tuple[int, ...]:
        info = self.known.get(name)
        if info is None:
            raise RejectedError("the shape of a value is not known before the trunk runs")
        return info[1]

    def readers(self, name: str) -> int:
        """How many nodes, and outputs of the model, read a value."""
        names = [one for node in self.nodes for one in node.input] + [value.name for value in self.graph.output]
        return names.count(name)

    def finish(self) -> bool:
        if self.changed:
            del self.graph.node[:], self.graph.initializer[:]
            self.graph.node.extend(self.nodes)
            read = {name for node in self.nodes for name in node.input} | {value.name for value in self.graph.output}
            self.graph.initializer.extend(tensor for name, tensor in self.initialisers.items() if name in read)
        return self.changed


def _attributes(graph: _Graph, node: Any) -> dict[str, Any]:
    return {attribute.name: graph.onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _fold_constants(graph: _Graph) -> None:
    """Only values that fit in a trunk's memory, and operators whose result is no larger than they are."""
    kept = []
    for node in graph.nodes:
        if any(graph.known.get(name) is None for name in node.output):
            _infer(graph, node)
        if node.op_type == "Constant" or not _foldable(graph, node):
            kept.append(node)
            if node.op_type == "Constant":
                _remember_constant(graph, node)
            continue
        from onnx.reference import ReferenceEvaluator

        helper = graph.onnx.helper
        empty = [helper.make_tensor_value_info(name, *(graph.known[name] or ())) for name in filter(None, node.input)]
        outputs = [helper.make_tensor_value_info(name, *(graph.known[name] or ())) for name in node.output]
        alone = helper.make_model(
            helper.make_graph([node], "g", empty, outputs), opset_imports=[helper.make_opsetid("", graph.opset)]
        )
        feed = {name: graph.constant(name) for name in filter(None, node.input)}
        if node.op_type == "Shape":
            feed = {node.input[0]: np.broadcast_to(np.float32(0), graph.shape(node.input[0]))}
        for name, array in zip(node.output, ReferenceEvaluator(alone).run(None, feed), strict=True):
            graph.new_constant(np.asarray(array), name)
    graph.nodes = kept


def _infer(graph: _Graph, node: Any) -> None:
    """Type and shape of what a node makes, if they depend on constants that have been computed here."""
    onnx = graph.onnx
    infos = {name: graph.known.get(name) for name in filter(None, node.input)}
    types = {name: onnx.helper.make_tensor_type_proto(*info) for name, info in infos.items() if info is not None}
    data = {name: graph.initialisers[name] for name in node.input if name in graph.initialisers}
    try:
        schema = onnx.defs.get_schema(node.op_type, graph.opset)
        made = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[onnx.helper.make_opsetid("", graph.opset)]
        )
    except Exception:  # of many types; the whole model is inferred again, and says why
        return
    for name, kind in made.items():
        dims = kind.tensor_type.shape.dim
        if kind.tensor_type.HasField("shape") and all(length.HasField("dim_value") for length in dims):
            graph.known[name] = int(kind.tensor_type.elem_type), tuple(int(length.dim_value) for length in dims)


def _foldable(graph: _Graph, node: Any) -> bool:
    if node.op_type not in FOLDED or not node.output or "" in node.output:
        return False
    if node.op_type == "Shape":
        return graph.known.get(node.input[0]) is not None and graph.known.get(node.output[0]) is not None
    if any(graph.constant(name) is None for name in filter(None, node.input)):
        return False
    infos = [graph.known.get(name) for name in (*filter(None, node.input), *node.output)]
    return all(info is not None and info[0] in TYPES and WIDEST * math.prod(info[1]) <= MAX_MEMORY for info in infos)


def _remember_constant(graph: _Graph, node: Any) -> None:
    """The array of a Constant node, for the nodes that read it. The node itself stays."""
    (value,) = _attributes(graph, node).values() or (None,)
    info = graph.known.get(node.output[0])
    if info is None or value is None:
        return
    array = graph.onnx.numpy_helper.to_array(value) if isinstance(value, graph.onnx.TensorProto) else np.asarray(value)
    if array.dtype.kind in "fib":
        graph._arrays[node.output[0]] = array.astype(graph.onnx.helper.tensor_dtype_to_np_dtype(info[0]))


def _fold_normalisations(graph: _Graph) -> None:
    made_by = {name: node for node in graph.nodes for name in node.output}
    kept: list[Any] = []
    for node in graph.nodes:
        constants = [graph.constant(name) for name in node.input[1:]]
        if node.op_type != "BatchNormalization":
            kept.append(node)
            continue
        attributes = _attributes(graph, node)
        shape = graph.shape(node.input[0])
        if attributes.get("training_mode", 0) or len(node.output) > 1 or any(array is None for array in constants):
            raise RejectedError("a compiled trunk cannot contain BatchNormalization that is still being trained")
        if len(shape) < 2 or len(constants) != 4 or any(array.shape != shape[1:2] for array in constants):
            raise RejectedError("BatchNormalization: its constants do not fit its input")
        gain, offset, mean, variance = (array.astype(np.float64) for array in constants)
        with np.errstate(all="ignore"):  # of hostile constants; what is not finite shows in the output
            factor = gain / np.sqrt(variance + attributes.get("epsilon", 1e-5))
            term = offset - mean * factor
        kind = constants[0].dtype
        before = made_by.get(node.input[0])
        if before is not None and graph.readers(node.input[0]) == 1 and _absorb(graph, before, factor, term):
            before.output[0] = node.output[0]
            made_by[node.output[0]] = before
            graph.changed = True
            continue
        row = [-1, *[1] * (len(shape) - 2)]
        scaled = graph.node("Mul", node.input[0], graph.new_constant(factor.astype(kind).reshape(row)))
        moved = graph.node(
            "Add", scaled.output[0], graph.new_constant(term.astype(kind).reshape(row)), output=node.output[0]
        )
        kept += [scaled, moved]
    graph.nodes = kept


def _absorb(graph: _Graph, node: Any, factor: Any, term: Any) -> bool:
    """Let ``node``, a Conv or Gemm of constants, make factor · its channels + term."""
    if node.op_type not in ("Conv", "Gemm"):
        return False
    attributes = _attributes(graph, node)
    weight = graph.constant(node.input[1])
    bias = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    if weight is None or bias is None or bias.shape not in ((), (1,), factor.shape, (1, *factor.shape)):
        return False
    channels_last = node.op_type == "Gemm" and not attributes.get("transB", 0)
    if weight.shape[-1 if channels_last else 0] != factor.size:
        return False
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return False
    each = factor if channels_last else factor.reshape(-1, *[1] * (weight.ndim - 1))
    with np.errstate(all="ignore"):
        changed = [weight * each, np.broadcast_to(bias.reshape(-1), factor.shape) * factor + term]
    inputs = [node.input[0], *(graph.new_constant(array.astype(weight.dtype)) for array in changed)]
    del node.input[:]
    node.input.extend(inputs)
    return True


def _gather_rows(graph: _Graph) -> None:
    kept: list[Any] = []
    for node in graph.nodes:
        if node.op_type != "GatherND":
            kept.append(node)
            continue
        batch = int(_attributes(graph, node).get("batch_dims", 0))
        index, shape = graph.constant(node.input[1]), graph.shape(node.input[0])
        if index is None or index.ndim <= batch or batch < 0:
            raise RejectedError("a compiled trunk cannot contain GatherND with computed indices")
        depth = index.shape[-1]
        if batch + depth > len(shape) or index.shape[:batch] != shape[:batch]:
            raise RejectedError("GatherND: its indices do not fit its data")
        lengths = np.array(shape[batch : batch + depth], np.int64)
        if (index < -lengths).any() or (index >= lengths).any():
            raise RejectedError("GatherND: an index lies outside its data")
        strides = [math.prod(lengths[axis + 1 :].tolist()) for axis in range(depth)]
        rows = np.where(index < 0, index + lengths, index) @ np.array(strides, np.int64)
        if batch:
            each = np.arange(math.prod(shape[:batch])) * math.prod(lengths.tolist())
            rows = rows + each.reshape(*shape[:batch], *[1] * (rows.ndim - batch))
        flat = [math.prod(shape[: batch + depth]), *shape[batch + depth :]]
        data = graph.node("Reshape", node.input[0], graph.new_constant(np.array(flat, np.int64)))
        index_name = graph.new_constant(rows.astype(np.int64))
        kept += [data, graph.node("Gather", data.output[0], index_name, output=node.output[0], axis=0)]
    graph.nodes = kept


def _turn_weights(graph: _Graph) -> None:
    """Columns next to each other in memory are what vectors need."""
    turned: dict[str, str] = {}
    for node in graph.nodes:
        attributes = _attributes(graph, node)
        if node.op_type != "Gemm" or not attributes.get("transB", 0) or node.input[1] not in graph.initialisers:
            continue
        weight = node.input[1]
        if weight not in turned:
            turned[weight] = graph.new_constant(graph.constant(weight).T)
        node.input[1] = turned[weight]
        for attribute in node.attribute:
            if attribute.name == "transB":
                attribute.i = 0


def _patches_as_rows(graph: _Graph) -> None:
    """(1, C, H, W) → patches (H/h · W/w, C · h · w) → product with the weights (C · h · w, O) → (1, O, H/h, W/w)."""
    graph.nodes = [one for node in graph.nodes for one in (_patches(graph, node) or [node])]


def _patches(graph: _Graph, node: Any) -> list[Any] | None:
    if node.op_type != "Conv" or node.input[1] not in graph.initialisers:
        return None
    attributes = _attributes(graph, node)
    weight, shape = graph.constant(node.input[1]), graph.shape(node.input[0])
    kernel, rank = weight.shape[2:], weight.ndim - 2
    if (
        rank < 1
        or len(shape) != weight.ndim
        or shape[0] != 1
        or attributes.get("group", 1) != 1
        or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
        or any(attributes.get("pads", ()))
        or any(length != 1 for length in attributes.get("dilations", ()))
        or tuple(attributes.get("strides", [1] * rank)) != kernel
        or tuple(attributes.get("kernel_shape", kernel)) != kernel
        or weight.shape[1] != shape[1]
        or any(length % side for length, side in zip(shape[2:], kernel, strict=True))
    ):
        return None
    counts = [length // side for length, side in zip(shape[2:], kernel, strict=True)]
    patch, patches = math.prod(weight.shape[1:]), math.prod(counts)
    steps = _Chain(graph, node.input[0])
    steps.reshape([shape[1], *(n for pair in zip(counts, kernel, strict=True) for n in pair)])
    steps.add("Transpose", perm=[*range(1, 2 * rank, 2), 0, *range(2, 2 * rank + 1, 2)])
    steps.reshape([patches, patch])
    steps.add("MatMul", graph.new_constant(weight.reshape(weight.shape[0], patch).T))
    if len(node.input) > 2 and node.input[2]:
        steps.add("Add", node.input[2])
    steps.add("Transpose", perm=[1, 0])
    steps.reshape([1, weight.shape[0], *counts], node.output[0])
    return steps.nodes


class _Chain:
    """Nodes of which each reads the one before it."""

    def __init__(self, graph: _Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self.nodes: list[Any] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> None:
        self.nodes.append(self.graph.node(operator, self.name, *inputs, output=output, **attributes))
        self.name = self.nodes[-1].output[0]

    def reshape(self, shape: list[int], output: str = "") -> None:
        self.add("Reshape", self.graph.new_constant(np.array(shape, np.int64)), output=output)
