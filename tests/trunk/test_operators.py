"""Operators that are rewritten before they are translated: as C they agree with onnxruntime."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbt_edge.errors import NumericsError
from kbt_edge.trunk import BackendError, Trunk, source

onnx = pytest.importorskip("onnx", reason="the trunks of these tests are written with onnx, which is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64

try:
    GENERATOR: str | None = importlib.metadata.version("emx-onnx-cgen")
except importlib.metadata.PackageNotFoundError:
    GENERATOR = None
pytestmark = pytest.mark.skipif(
    GENERATOR is None or not any(map(shutil.which, [os.environ.get("CC", ""), "cc", "gcc", "clang"])),
    reason="a compiled trunk needs a C compiler and emx-onnx-cgen",
)

RNG = np.random.default_rng(4)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def trunk_file(nodes: list[tuple[Any, ...]], x: tuple[int, ...], h: tuple[int, ...]) -> bytes:
    """Nodes as (operator, inputs, attributes): an array is a constant, "x" the input, an int an earlier node."""
    made, constants = [], []
    for number, (operator, inputs, attributes) in enumerate(nodes):
        names = []
        for value in inputs:
            if isinstance(value, np.ndarray):
                constants.append(numpy_helper.from_array(value, f"c{len(constants)}"))
                value = constants[-1].name
            names.append(f"t{value}" if isinstance(value, int) else value)
        made.append(helper.make_node(operator, names, [f"t{number}"], **attributes))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(made, "g", [info("x", FLOAT, x)], [info(f"t{len(nodes) - 1}", FLOAT, h)], constants)
    return bytes(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    )


def normalisation(channels: int) -> list[Any]:
    return [numbers(channels), numbers(channels), numbers(channels), np.abs(numbers(channels)) + np.float32(0.1)]


def rows(*shape: int) -> Any:
    return np.array(shape, np.int64)


MASK = np.zeros((3, 4), np.float32)
MASK[0, 2:] = MASK[1] = -np.inf
NAN_OF_MASKED = [  # as scaled_dot_product_attention is exported, with a row that is masked throughout
    ("Add", ["x", MASK], {}),
    ("Softmax", [0], {}),
    ("IsNaN", [1], {}),
    ("Where", [2, np.array(0, np.float32), 1], {}),
    ("Add", [3, "x"], {}),
]
TRUNKS: dict[str, tuple[list[tuple[Any, ...]], tuple[int, ...], tuple[int, ...]]] = {
    "patches of an image": (
        [
            ("Conv", ["x", numbers(5, 3, 4, 2), numbers(5)], {"strides": [4, 2]}),
            ("Reshape", [0, rows(5, 12)], {}),
        ],
        (1, 3, 8, 12),
        (5, 12),
    ),
    "pieces of a signal": (
        [("Conv", ["x", numbers(6, 2, 5)], {"strides": [5], "kernel_shape": [5]}), ("Tanh", [0], {})],
        (1, 2, 20),
        (1, 6, 4),
    ),
    "a convolution with padding, stride, dilation and groups": (
        [
            (
                "Conv",
                ["x", numbers(4, 2, 3, 2), numbers(4)],
                {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2], "group": 2},
            ),
            ("Reshape", [0, rows(4, -1)], {}),
        ],
        (1, 4, 6, 5),
        (4, 16),
    ),
    "normalisation after a convolution": (
        [
            ("Conv", ["x", numbers(6, 2, 3), numbers(6)], {"pads": [1, 1]}),
            ("BatchNormalization", [0, *normalisation(6)], {"epsilon": 1e-3}),
        ],
        (1, 2, 7),
        (1, 6, 7),
    ),
    "normalisation after a product": (
        [
            ("Gemm", ["x", numbers(6, 4), numbers(6)], {"transB": 1}),
            ("BatchNormalization", [0, *normalisation(6)], {}),
            ("Gemm", [1, numbers(6, 5)], {}),
            ("BatchNormalization", [2, *normalisation(5)], {}),
        ],
        (3, 4),
        (3, 5),
    ),
    "normalisation of something that is read twice": (
        [
            ("Gemm", ["x", numbers(4, 4)], {}),
            ("BatchNormalization", [0, *normalisation(4)], {}),
            ("Add", [0, 1], {}),
        ],
        (3, 4),
        (3, 4),
    ),
    "normalisation of the input": ([("BatchNormalization", ["x", *normalisation(3)], {})], (1, 3, 4), (1, 3, 4)),
    "layer normalisation in lanes": (
        [
            ("LayerNormalization", ["x", numbers(40), numbers(40)], {}),
            ("LayerNormalization", [0, numbers(3, 40), numbers(40)], {"axis": 0, "epsilon": 1e-2}),
            ("LayerNormalization", [1, numbers(40)], {}),
        ],
        (3, 40),
        (3, 40),
    ),
    "rows by pairs of indices": ([("GatherND", ["x", np.array([[0, 2], [1, -1], [1, 0]])], {})], (2, 3, 4), (3, 4)),
    "elements of every row": (
        [
            ("GatherND", ["x", np.array([[[2], [0]], [[1], [-3]]])], {"batch_dims": 1}),
            ("Reshape", [0, rows(4, 4)], {}),
        ],
        (2, 3, 4),
        (4, 4),
    ),
    "attention that is masked throughout": (NAN_OF_MASKED, (3, 4), (3, 4)),
    "shapes that depend on shapes": (
        [
            ("Reshape", ["x", rows(6, 2)], {}),
            ("Shape", [0], {}),
            ("Sub", [1, np.array([2, -1])], {}),
            ("Reshape", [0, 2], {}),
            ("Shape", [3], {}),
            ("Sub", [4, np.array([1, -1])], {}),
            ("Reshape", [3, 5], {}),
        ],
        (4, 3),
        (3, 4),
    ),
    "a shape that is computed from constants": (
        [
            ("Shape", ["x"], {}),
            ("Gather", [0, np.array(1)], {}),
            ("Unsqueeze", [1, np.array([0])], {}),
            ("Mul", [2, np.array([2])], {}),
            ("Concat", [np.array([-1]), 3], {"axis": 0}),
            ("Reshape", ["x", 4], {}),
        ],
        (4, 3),
        (2, 6),
    ),
}


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.slow("compiles trunks")
def test_it_compiles_and_agrees_with_onnxruntime(name: str, cache: Path) -> None:
    data = trunk_file(*TRUNKS[name])
    compiled = Trunk(data, backend="compiled", cache_dir=cache)
    reference = Trunk(data, backend="onnxruntime")
    for _ in range(5):
        x = numbers(*TRUNKS[name][1])
        h = reference(x)
        assert np.abs(compiled(x) - h).max() <= 1e-5 * np.abs(h).max()


def test_nan_passes_through_a_layer_normalisation_in_lanes(cache: Path) -> None:
    nodes = [("Sqrt", ["x"], {}), ("LayerNormalization", [0, numbers(40), numbers(40)], {})]
    trunk = Trunk(trunk_file(nodes, (2, 40), (2, 40)), backend="compiled", cache_dir=cache)
    x = np.abs(numbers(2, 40))
    assert np.isfinite(trunk(x)).all()
    x[1, 17] = -1
    with pytest.raises(NumericsError, match="not finite"):
        trunk(x)


def operators_of(data: bytes, kernels: bool) -> list[str]:
    from kbt_edge._generate import Translator

    return [node.op_type for node in Translator(kernels=kernels).prepared(data).graph.node]


def test_the_generator_gets_what_is_fast_to_run() -> None:
    assert operators_of(trunk_file(*TRUNKS["normalisation after a product"]), True) == ["Gemm", "Gemm"]
    assert operators_of(trunk_file(*TRUNKS["normalisation after a convolution"]), True) == ["Conv"]
    assert operators_of(trunk_file(*TRUNKS["a shape that is computed from constants"]), True) == ["Reshape"]
    patches = trunk_file(*TRUNKS["patches of an image"])
    assert "MatMul" in operators_of(patches, True)
    assert "Conv" not in operators_of(patches, True)
    assert "Conv" in operators_of(patches, False)  # smaller for a microcontroller, and the same sums


HOSTILE: dict[str, tuple[list[tuple[Any, ...]], str]] = {
    "an index beyond the data": ([("GatherND", ["x", np.array([[0], [10**9], [1]])], {})], "lies outside"),
    "an index before the data": ([("GatherND", ["x", np.array([[0], [-4], [1]])], {})], "lies outside"),
    "a batch of the wrong length": (
        [
            ("GatherND", ["x", np.zeros((2, 1), np.int64)], {"batch_dims": 1}),
            ("ReduceSum", [0], {}),
            ("Add", [1, "x"], {}),
        ],
        "indices do not fit",
    ),
    "training": (
        [("BatchNormalization", ["x", *normalisation(4)], {"training_mode": 1})],
        "still being trained|cannot translate",
    ),
    "constants of the wrong length": ([("BatchNormalization", ["x", *normalisation(3)], {})], "do not fit|translate"),
    "an expanded constant": (
        [
            ("Expand", [np.ones((1, 1), np.float32), rows(2**15, 2**15)], {}),
            ("ReduceSum", [0], {}),
            ("Add", [1, "x"], {}),
        ],
        "too large",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow("runs the generator")
def test_a_hostile_file_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    nodes, message = HOSTILE[name]
    with pytest.raises(BackendError, match=message):
        Trunk(trunk_file(nodes, (3, 4), (3, 4)), backend="compiled", cache_dir=tmp_path)


def test_an_index_that_depends_on_the_input_is_not_compiled(tmp_path: Path) -> None:
    nodes = [helper.make_node("GatherND", ["table", "ids"], ["h"])]
    info = helper.make_tensor_value_info
    table = numpy_helper.from_array(numbers(5, 3), "table")
    graph = helper.make_graph(nodes, "g", [info("ids", INT64, (2, 1))], [info("h", FLOAT, (2, 3))], [table])
    data = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    with pytest.raises(BackendError, match="GatherND with a computed shape, axis or index"):
        Trunk(data, backend="compiled", cache_dir=tmp_path)
    assert source.LAYOUT_OPERATORS <= source.OPERATORS
