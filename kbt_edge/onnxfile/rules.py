"""Which ONNX files may run: ``read_onnx`` checks these rules before any runtime sees the file.

- Every name is defined once and before it is used, so there is no cycle.
- Its operators are those of ONNX, or some that onnxruntime's own tools put into a file, with all inputs they need.
- No shape depends on the values of an input, and the reader rejects control flow, so every run costs the same.
- No operator can end the process. Integer division can: by zero, and of the smallest integer.

The only error raised is ``BundleError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kbt_edge.errors import BundleError
from kbt_edge.onnxfile.wire import ELEMENT_TYPES, MAX_BYTES, Graph, Node, OnnxModel, Value, parse_onnx

__all__ = ["ELEMENT_TYPES", "MAX_BYTES", "OnnxModel", "Value", "read_onnx", "token_limits", "token_lookups"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What onnxruntime's optimiser and quantiser write.
MICROSOFT: Final = _words(
    """
    Attention BiasAdd BiasGelu BiasSplitGelu DecoderMaskedMultiHeadAttention DequantizeLinear DynamicQuantizeMatMul
    EmbedLayerNormalization FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation Gelu GemmFastGelu
    GroupQueryAttention LayerNormalization MatMulIntegerToFloat MatMulNBits MultiHeadAttention NhwcMaxPool
    PackedAttention PackedMultiHeadAttention QAttention QGemm QLinearAdd QLinearAveragePool QLinearConcat
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QuantizeLinear QuickGelu
    RelativePositionBias RotaryEmbedding SkipLayerNormalization SkipSimplifiedLayerNormalization TransposeMatMul
    """
)

# Operators of ONNX of which an input may be left out by an empty name. onnxruntime crashes for others.
OPTIONAL: Final = _words(
    """
    Attention Clip Conv ConvInteger ConvTranspose DFT DequantizeLinear Dropout GRU Gemm LSTM LayerNormalization
    MatMulInteger NonMaxSuppression Pad QLinearConv QuantizeLinear RNN ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Resize RotaryEmbedding STFT Slice Split Squeeze
    Trilu
    """
)

# Operator -> its inputs that decide a shape. -1: every one from the second on.
SHAPED_BY: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Compress", "ImageDecoder", "NonZero", "StringSplit", "Unique"), (0, 1)),
    **dict.fromkeys(("ConstantOfShape", "BlackmanWindow", "HammingWindow", "HannWindow"), (0,)),
    **dict.fromkeys(("MelWeightMatrix", "NonMaxSuppression", "Range"), (0, -1)),
    **dict.fromkeys(("CenterCropPad", "Col2Im", "DFT", "Expand", "OneHot", "Pad", "Resize", "Reshape", "STFT"), (-1,)),
    **dict.fromkeys(("Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Unsqueeze", "Upsample"), (-1,)),
    **dict.fromkeys(("AffineGrid", "MaxUnpool"), (-1,)),
    **dict.fromkeys((f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "SumSquare")), (1,)),
    **dict.fromkeys((f"Reduce{kind}" for kind in ("Max", "Mean", "Min", "Prod", "Sum")), (1,)),
}

FLOATING: Final = frozenset({1, 10, 11, 16})  # element types: float32, float16, float64, bfloat16
# Operators whose first output has the type of their first input.
SAME_TYPE: Final = _words(
    """
    Abs Acos Acosh Add Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Concat Conv ConvTranspose
    Cos Cosh CumSum DepthToSpace Div Dropout Einsum Elu Erf Exp Expand Flatten Floor GRU Gather GatherElements GatherND
    Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization
    LSTM LayerNormalization LeakyRelu Log LogSoftmax LpNormalization LpPool MatMul Max MaxPool Mean Min Mish Mod Mul Neg
    PRelu Pad Pow RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round ScatterElements ScatterND Selu Sigmoid Sign
    Sin Sinh Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK
    Transpose Trilu Unsqueeze
    """
)


def read_onnx(data: bytes, max_bytes: int = MAX_BYTES) -> OnnxModel:
    """Read ``data``, the content of an ONNX file, and reject what breaks a rule of this module."""
    model = parse_onnx(data, max_bytes)
    _check_names(model.graph)
    _check_operators(model.graph)
    _check_work(model.graph)
    _check_division(model.graph)
    return model


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


def _check_names(graph: Graph) -> None:
    made = {*graph.initialisers, *graph.names}
    if len(set(graph.names)) != len(graph.names):
        raise BundleError("ONNX file: two inputs of a graph have the same name")
    for node in graph.nodes:
        for name in filter(None, node.inputs):
            if name not in made:
                raise BundleError(f"ONNX file: {node.operator} reads {name!r}, which is not defined before it")
        for name in filter(None, node.outputs):
            if name in made:
                raise BundleError(f"ONNX file: two things in one graph are named {name!r}")
            made.add(name)
    for value in graph.outputs:
        if value.name not in made:
            raise BundleError(f"ONNX file: the output {value.name!r} of a graph is not computed by any of its nodes")


def _check_operators(graph: Graph) -> None:
    for node in graph.nodes:
        domain, _, name = node.operator.rpartition(".")
        if domain not in ("", "com.microsoft") or (domain and name not in MICROSOFT):
            raise BundleError(
                f"ONNX file: {node.operator!r} is neither an operator of ONNX nor one that onnxruntime's tools write"
            )
        if "" in node.inputs[: None if not domain and name not in OPTIONAL else 1]:
            raise BundleError(f"ONNX file: {node.operator} leaves out an input that it needs")


def _check_work(graph: Graph) -> None:
    """No shape depends on the values of an input. Shapes are fixed, so the result of ``Shape`` is a constant."""
    varying = {value.name for value in graph.inputs}
    for node in graph.nodes:
        if node.operator in ("Shape", "Size"):
            continue
        for place in SHAPED_BY.get(node.operator, ()):
            names = node.inputs[1:] if place < 0 else node.inputs[place : place + 1]
            if not varying.isdisjoint(names):
                raise BundleError(
                    f"ONNX file: the shape that {node.operator} makes depends on the values of an input, "
                    "so its work has no limit; export the trunk with constant shapes"
                )
        if not varying.isdisjoint(node.inputs):
            varying.update(filter(None, node.outputs))
    for value in graph.outputs if varying else ():  # a trunk without inputs is rejected elsewhere
        if value.name not in varying or value.name in graph.names:
            raise BundleError(f"ONNX file: the output {value.name!r} is not computed from an input")


def _check_division(graph: Graph) -> None:
    """Both operands of Div and of Mod have one type: it is enough to know that one of them is floating-point."""
    types = {value.name: value.element_type for value in graph.inputs}
    types |= {name: tensor.element_type for name, tensor in graph.initialisers.items()}
    for node in graph.nodes:
        if node.operator in ("Div", "Mod") and not any(types.get(name, 0) in FLOATING for name in node.inputs):
            raise BundleError(
                f"ONNX file: {node.operator} of integers, or of values of unknown type, can end the process; "
                "export the trunk with constant shapes, or divide floating-point numbers"
            )
        outputs = node.outputs if node.operator == "Split" else node.outputs[:1]
        types |= dict.fromkeys(outputs, _output_type(node, types))


def _output_type(node: Node, types: Mapping[str, int]) -> int:
    """Element type of a node's first output, 0 if unknown."""
    if node.operator == "Cast":
        return node.integers.get("to", 0)
    if node.operator == "Constant":
        return node.value_type
    if node.operator == "ConstantOfShape":
        return node.value_type or 1
    source = 1 if node.operator == "Where" else 0
    known = node.operator in SAME_TYPE or node.operator == "Where"
    return types.get(node.inputs[source], 0) if known and len(node.inputs) > source else 0
