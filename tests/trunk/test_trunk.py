"""The trunk: both backends equal the network and reject what is wrong by name; the compiled one never allocates."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import one_fast

from kbt_edge import trunk as trunks
from kbt_edge.errors import BundleError, DtypeError, NumericsError, RangeError, ShapeError
from kbt_edge.onnxfile import read_onnx
from kbt_edge.trunk import BackendError, Trunk, build
from kbt_edge.trunk import cache as cache_module
from kbt_edge.trunk import source as source_module

onnx = pytest.importorskip("onnx", reason="the trunks of these tests are written with onnx, which is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64

COMPILER = next(filter(shutil.which, [os.environ.get("CC", ""), "cc", "gcc", "clang"]), None)
try:
    GENERATOR: str | None = importlib.metadata.version("emx-onnx-cgen")
except importlib.metadata.PackageNotFoundError:
    GENERATOR = None
needs_build = pytest.mark.skipif(
    COMPILER is None or GENERATOR is None,
    reason=f"a compiled trunk needs a C compiler (found: {COMPILER}) and emx-onnx-cgen (found: {GENERATOR})",
)
BACKENDS = ["onnxruntime", pytest.param("compiled", marks=needs_build)]


# Small networks whose answer NumPy knows.

RNG = np.random.default_rng(3)
W = RNG.standard_normal((4, 3)).astype(np.float32)
B = RNG.standard_normal(3).astype(np.float32)
TABLE = RNG.standard_normal((7, 3)).astype(np.float32)


def make(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: dict[str, Any]) -> Any:
    initialisers = [numpy_helper.from_array(np.asarray(constant), name) for name, constant in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initialisers)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def value(name: str, shape: list[Any], element_type: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, element_type, shape)


def mlp(
    shape: tuple[int, ...] = (1, 4), output: tuple[int, ...] = (1, 3), weight: Any = W, operator: str = "Relu"
) -> Any:
    """h = relu(x W + b), reshaped to ``output``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["u"]),
        helper.make_node(operator, ["u"], ["z"]),
        helper.make_node("Reshape", ["z", "shape"], ["h"]),
    ]
    constants = {"w": weight, "b": B, "shape": np.array(output)}
    return make(nodes, [value("x", list(shape))], [value("h", list(output))], constants)


def lookup() -> Any:
    """Two inputs, ids and gain: h = table[ids] · gain."""
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("Mul", ["rows", "gain"], ["h"])]
    return make(nodes, [value("ids", [5], INT64), value("gain", [5, 3])], [value("h", [5, 3])], {"table": TABLE})


def relu_mlp(x: Any) -> Any:
    return np.maximum(np.asarray(x, np.float32) @ W + B, 0)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_trunk(backend: str, cache: Path) -> Callable[[Any], Trunk]:
    return lambda model: Trunk(model.SerializeToString(), backend=backend, cache_dir=cache)


# What a trunk computes.


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Name → (torch module, its ONNX file)."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from kbt_edge.export import export_trunk
    from kbt_edge.networks import DecisionTransformer, TokenTransformer

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("exported")
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 0, 0])
    networks = {
        "control, 1 state": (DecisionTransformer(context=1), (torch.zeros(1, 4),)),
        "control, 20 states": (DecisionTransformer(context=20), (torch.zeros(20, 4),)),
        "tokens": (TokenTransformer(vocab=11, max_len=10), (ids, ids.flip(0))),
    }
    made = {}
    for name, (network, example) in networks.items():
        for parameter in network.parameters():  # untrained layers are copies of each other; make them differ
            parameter.data += 0.1 * torch.randn_like(parameter)
        network.eval()
        path = folder / f"{name}.onnx"
        export_trunk(network.trunk, example, path)
        made[name] = (network.trunk, path)
    return made


def random_inputs(trunk: Trunk, rng: np.random.Generator) -> list[Any]:
    return [
        rng.standard_normal(spec.shape).astype(np.float32)
        if spec.dtype == "float32"
        else rng.integers(0, spec.limit, spec.shape)
        for spec in trunk.inputs
    ]


@pytest.mark.slow("exports networks and compiles trunks")
@pytest.mark.parametrize("network", ["control, 1 state", "control, 20 states", "tokens"])
def test_both_backends_equal_torch_to_1e5(network: str, backend: str, exported: Any, cache: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module, path = exported[network]
    trunk = Trunk(path, backend=backend, cache_dir=cache)
    rng = np.random.default_rng(5)
    worst = 0.0
    for _ in range(50):
        inputs = random_inputs(trunk, rng)
        with torch.no_grad():
            expected = module(*map(torch.from_numpy, inputs)).numpy()
        worst = max(worst, float(np.abs(trunk(*inputs) - expected).max()))
    print(f"{network}, {backend}: largest difference from torch {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_named_inputs_of_both_kinds_arrive_in_order(open_trunk: Callable[[Any], Trunk]) -> None:
    trunk = open_trunk(lookup())
    ids, gain = np.array([6, 0, 3, 3, 1]), np.full((5, 3), 2.0)
    np.testing.assert_array_equal(trunk(ids, gain), 2 * TABLE[ids])
    assert [(spec.name, spec.shape, spec.dtype, spec.limit) for spec in trunk.inputs] == [
        ("ids", (5,), "int64", 7),
        ("gain", (5, 3), "float32", None),
    ]


@pytest.mark.parametrize(
    ("shape", "output", "rows"),
    one_fast([((1, 5, 4), (1, 5, 3), 5), ((4,), (3,), 1), ((1, 4), (1, 3), 1), ((5, 4), (5, 3), 5)]),
)
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_every_output_layout_becomes_rows_of_width_d(
    shape: tuple[int, ...], output: tuple[int, ...], rows: int, open_trunk: Callable[[Any], Trunk]
) -> None:
    trunk = open_trunk(mlp(shape, output))
    x = np.random.default_rng(4).standard_normal(shape)
    assert (trunk.rows, trunk.d) == (rows, 3)
    np.testing.assert_allclose(trunk(x), relu_mlp(x).reshape(rows, 3), atol=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        np.array([[1, 2, 3, 4]], np.float32),
        np.array([1, 2, 3, 4], np.float64),
        np.array([1, 2, 3, 4], np.float16),
        np.array([1, 2, 3, 4], np.int16),
        [1, 2, 3, 4],
        np.array([1, 9, 2, 9, 3, 9, 4, 9], np.float32)[::2],
        np.asfortranarray(np.array([[1, 2, 3, 4]], ">f8")),
    ],
    ids=["float32", "float64", "float16", "int16", "list", "strided", "big-endian"],
)
def test_states_of_any_real_type_mean_the_same(x: Any, open_trunk: Callable[[Any], Trunk]) -> None:
    np.testing.assert_allclose(open_trunk(mlp())(x), relu_mlp([[1, 2, 3, 4]]), rtol=1e-6)


def test_the_result_is_one_buffer_unless_a_copy_is_asked_for(open_trunk: Callable[[Any], Trunk]) -> None:
    trunk = open_trunk(mlp())
    first, second = trunk([1, 1, 1, 1]), trunk([2, 2, 2, 2])
    assert first is second
    kept = trunk([1, 1, 1, 1], copy=True)
    trunk([3, 3, 3, 3])
    np.testing.assert_allclose(kept, relu_mlp([[1, 1, 1, 1]]), atol=1e-6)


def test_it_describes_itself(open_trunk: Callable[[Any], Trunk], backend: str) -> None:
    model = mlp()
    trunk = open_trunk(model)
    assert trunk.backend == backend
    assert trunk.operators == {"Add": 1, "MatMul": 1, "Relu": 1, "Reshape": 1}
    assert trunk.sha256 == hashlib.sha256(model.SerializeToString()).hexdigest()
    assert "x (1, 4) float32 -> (1, 3)" in repr(trunk)


@pytest.mark.slow("takes seconds")
@needs_build
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_trunks_of_one_library_run_in_several_threads(cache: Path) -> None:
    data = mlp((5, 4), (5, 3)).SerializeToString()
    wrong: list[int] = []

    def work(seed: int) -> None:
        trunk = Trunk(data, backend="compiled", cache_dir=cache)
        rng = np.random.default_rng(seed)
        for _ in range(500):
            x = rng.standard_normal((5, 4)).astype(np.float32)
            if not np.allclose(trunk(x), relu_mlp(x), atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# What a call rejects.

GAIN = np.ones((5, 3))
IDS = np.zeros(5, int)
BAD_CALLS: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "too few inputs": ((IDS,), ShapeError, r"expected 2 inputs \(ids, gain\), got 1"),
    "too many inputs": ((IDS, GAIN, GAIN), ShapeError, r"got 3"),
    "short": ((IDS[:4], GAIN), ShapeError, r"'ids': expected shape \(5,\), got \(4,\)"),
    "transposed": ((IDS, GAIN.T), ShapeError, r"'gain': expected shape \(5, 3\), got \(3, 5\)"),
    "batched": ((IDS, GAIN[None]), ShapeError, r"'gain': expected shape \(5, 3\), got \(1, 5, 3\)"),
    "scalar": ((1, GAIN), ShapeError, r"'ids': expected shape \(5,\), got \(\)"),
    "ragged": (([[1], [1, 2]], GAIN), ShapeError, r"'ids'"),
    "fractional ids": ((IDS + 0.5, GAIN), DtypeError, r"'ids': expected int64, got float64"),
    "unsigned 64-bit ids": ((IDS.astype(np.uint64), GAIN), DtypeError, r"'ids': expected int64, got uint64"),
    "truth values": ((IDS, GAIN > 0), DtypeError, r"'gain': expected float32, got bool"),
    "complex": ((IDS, GAIN + 0j), DtypeError, r"'gain': expected float32, got complex128"),
    "objects": ((IDS, GAIN.astype(object)), DtypeError, r"'gain': expected float32, got object"),
    "text": ((np.array(list("abcde")), GAIN), DtypeError, r"'ids': expected int64, got <U1"),
    "nothing": ((IDS, None), DtypeError, r"'gain': expected float32, got object"),
    "NaN": ((IDS, np.where(np.eye(5, 3) > 0, np.nan, 1)), NumericsError, r"'gain': expected finite.*nan at \(0, 0\)"),
    "infinite": ((IDS, -np.inf * GAIN), NumericsError, r"'gain': expected finite values, got -inf at \(0, 0\)"),
    "beyond float32": ((IDS, 1e39 * GAIN), NumericsError, r"'gain': expected finite values, got inf"),
    "unknown token": (([0, 0, 7, 0, 0], GAIN), RangeError, r"'ids': expected ids from 0 to 6, got 7 at \(2,\)"),
    "negative token": (([0, 0, 0, 0, -1], GAIN), RangeError, r"'ids': expected ids from 0 to 6, got -1 at \(4,\)"),
    "huge token": ((IDS + 2**32, GAIN), RangeError, r"got 4294967296"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_rejected_by_name_and_changes_nothing(case: str, open_trunk: Callable[[Any], Trunk]) -> None:
    inputs, error, message = BAD_CALLS[case]
    trunk = open_trunk(lookup())
    h = trunk([1, 2, 3, 4, 5], GAIN)
    with pytest.raises(error, match=message):
        trunk(*inputs)
    np.testing.assert_array_equal(h, TABLE[1:6])
    np.testing.assert_array_equal(trunk(IDS, GAIN), TABLE[IDS])


def test_an_output_that_overflows_is_rejected_and_h_stays(open_trunk: Callable[[Any], Trunk]) -> None:
    trunk = open_trunk(mlp(weight=np.abs(W) + 1))
    h = trunk([1, 1, 1, 1])
    before = h.copy()
    with pytest.raises(NumericsError, match="output is not finite"):
        trunk([3e38, 3e38, 3e38, 3e38])
    np.testing.assert_array_equal(h, before)


def test_a_network_that_cannot_take_zeros_is_still_a_trunk(open_trunk: Callable[[Any], Trunk]) -> None:
    """As when a direction is divided by its length."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["sum"], keepdims=1),
        helper.make_node("Sqrt", ["sum"], ["length"]),
        helper.make_node("Div", ["x", "length"], ["h"]),
    ]
    trunk = open_trunk(make(nodes, [value("x", [1, 2])], [value("h", [1, 2])], {}))
    np.testing.assert_allclose(trunk([3, 4]), [[0.6, 0.8]], rtol=1e-6)
    with pytest.raises(NumericsError, match="output is not finite"):
        trunk([0, 0])


@pytest.mark.slow("exports networks and compiles trunks")
def test_a_trained_token_trunk_survives_an_empty_source(exported: Any, backend: str, cache: Path) -> None:
    trunk = Trunk(exported["tokens"][1], backend=backend, cache_dir=cache)
    assert np.isfinite(trunk(np.zeros(10, int), np.arange(10))).all()


# What the constructor rejects.


def external() -> Any:
    model = mlp()
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../weights.bin")
    return model


def two_outputs() -> Any:
    model = mlp()
    model.graph.output.append(value("u", [1, 3]))
    return model


def typed(element_type: int) -> Any:
    nodes = [helper.make_node("Cast", ["x"], ["h"], to=FLOAT)]
    return make(nodes, [value("x", [1, 3], element_type)], [value("h", [1, 3])], {})


def shaped(inputs: list[Any], outputs: list[Any]) -> Any:
    return make([helper.make_node("Identity", ["x"], ["h"])], [value("x", inputs)], [value("h", outputs)], {})


BAD_FILES: dict[str, tuple[Callable[[], Any], str]] = {
    "external data": (external, "another file"),
    "two outputs": (two_outputs, "expected one output"),
    "no input": (lambda: make([], [], [value("b", [3])], {"b": B}), "no inputs"),
    "symbolic axis": (lambda: shaped(["batch", 4], [1, 4]), r"input 'x' must have a fixed shape .*'batch'"),
    "unknown axis": (lambda: shaped([1, 4], [None, 4]), "output 'h' must have a fixed shape"),
    "empty axis": (lambda: shaped([0, 4], [0, 4]), "without empty axes"),
    "scalar": (lambda: shaped([], []), "must have a fixed shape"),
    "gigantic": (lambda: shaped([2**31, 2**31], [1, 4]), "more than 4194304 elements"),
    "batch of 2": (lambda: shaped([2, 5, 4], [2, 5, 4]), r"must be float32 of shape \(d,\), \(rows, d\)"),
    "float64 input": (lambda: typed(onnx.TensorProto.DOUBLE), "input 'x' must be float32 or int64, .* float64"),
    "text input": (lambda: typed(onnx.TensorProto.STRING), "input 'x' must be float32 or int64, .* another type"),
    "unknown operator": (lambda: mlp(operator="NoSuchOperator"), "onnxruntime cannot load this trunk"),
    "NaN weights": (lambda: mlp(weight=W * np.nan), "weights are damaged"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_rejected(case: str, cache: Path) -> None:
    build, message = BAD_FILES[case]
    with pytest.raises(BundleError, match=message):
        Trunk(build().SerializeToString(), backend="onnxruntime", cache_dir=cache)


def test_an_output_that_no_input_reaches_is_rejected(cache: Path) -> None:
    """Its C would never be written, and h would be what lay on the stack."""
    for nodes in ([helper.make_node("Identity", ["w"], ["h"])], []):
        model = make(
            nodes, [value("x", [1, 4])], [value("h" if nodes else "x", [1, 4])], {"w": np.ones((1, 4), np.float32)}
        )
        with pytest.raises(BundleError, match="is not computed from an input"):
            Trunk(model.SerializeToString(), cache_dir=cache)


def test_a_missing_or_foreign_file_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(BundleError, match="cannot be read"):
            Trunk(path)
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(BundleError, match="ONNX file"):
        Trunk(tmp_path / "text.onnx")


def test_contradictory_or_unknown_choices_are_rejected() -> None:
    data = mlp().SerializeToString()
    with pytest.raises(RangeError, match="backend: expected 'auto', 'compiled' or 'onnxruntime', got 'tvm'"):
        Trunk(data, backend="tvm")
    with pytest.raises(RangeError, match="providers are onnxruntime's"):
        Trunk(data, backend="compiled", providers=["CPUExecutionProvider"])
    with pytest.raises(RangeError, match="got 'NoSuchProvider'"):
        Trunk(data, providers=["NoSuchProvider"])


# Which backend runs, and why.


@needs_build
def test_auto_prefers_compiled(cache: Path) -> None:
    trunk = Trunk(mlp().SerializeToString(), cache_dir=cache)
    assert trunk.backend == "compiled"
    assert "emx-onnx-cgen" in trunk.backend_reason


@needs_build
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_auto_takes_what_was_faster_when_the_library_was_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mlp(weight=3 * W).SerializeToString()
    record_file = cache_entry(data, cache) / "build.json"
    record = json.loads(record_file.read_text())
    assert record["compiled_us"] > 0
    assert record["onnxruntime_us"] > 0
    for compiled, onnxruntime, expected in [
        (90.0, 89.0, "compiled"),
        (90.0, 80.0, "onnxruntime"),
        (90.0, 30.0, "onnxruntime"),
    ]:
        record_file.write_text(json.dumps({**record, "compiled_us": compiled, "onnxruntime_us": onnxruntime}))
        assert Trunk(data, cache_dir=cache).backend == expected
        assert Trunk(data, backend="compiled", cache_dir=cache).backend == "compiled"
    assert Trunk(data, cache_dir=cache).backend_reason == "compiled, this trunk took 90.0 µs, onnxruntime 30.0 µs"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert Trunk(data, cache_dir=cache).backend == "compiled"


def cache_entry(data: bytes, cache: Path) -> Path:
    """The folder of the trunk's library in the cache."""
    sha256 = Trunk(data, backend="compiled", cache_dir=cache).sha256
    (entry,) = (cache / sha256).iterdir()
    return entry


def test_providers_choose_onnxruntime(cache: Path) -> None:
    trunk = Trunk(mlp().SerializeToString(), providers=[("CPUExecutionProvider", {})], cache_dir=cache)
    assert (trunk.backend, trunk.backend_reason) == ("onnxruntime", "providers were given")


def led_by_data() -> Any:
    """A Gather whose table is computed, so that its ids cannot be checked before the run."""
    nodes = [helper.make_node("Add", ["table", "table"], ["t"]), helper.make_node("Gather", ["t", "ids"], ["h"])]
    return make(nodes, [value("ids", [5], INT64)], [value("h", [5, 3])], {"table": TABLE})


def computed_shape() -> Any:
    """By an operator that is not evaluated before the C is written."""
    nodes = [helper.make_node("Abs", ["c"], ["s"]), helper.make_node("Reshape", ["x", "s"], ["h"])]
    return make(nodes, [value("x", [1, 4])], [value("h", [1, 4])], {"c": np.array([-1, 4])})


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "operator": (lambda: mlp(operator="Hardmax"), "Hardmax"),
    "computed table": (led_by_data, "Gather with a computed shape, axis or index"),
    "computed shape": (computed_shape, "Reshape with a computed shape, axis or index"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_be_compiled_is_said_and_auto_falls_back(case: str, cache: Path) -> None:
    build, message = UNSUPPORTED[case]
    data = build().SerializeToString()
    with pytest.raises(BackendError, match=message):
        Trunk(data, backend="compiled", cache_dir=cache)
    trunk = Trunk(data, cache_dir=cache)
    assert trunk.backend == "onnxruntime"
    assert "not compiled: " in trunk.backend_reason
    assert message in trunk.backend_reason


def hide_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def hide_generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


HIDE = {"no C compiler was found": hide_compiler, "pip install emx-onnx-cgen": hide_generator}


@pytest.mark.parametrize("message", HIDE)
def test_a_missing_tool_is_named_and_auto_falls_back(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HIDE[message](monkeypatch, tmp_path)
    if message.startswith("no C compiler") and GENERATOR is None:
        pytest.skip("emx-onnx-cgen is not installed, so its absence is reported first")
    data = mlp().SerializeToString()
    with pytest.raises(BackendError, match=message):
        Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")
    trunk = Trunk(data, cache_dir=tmp_path / "cache")
    assert trunk.backend == "onnxruntime"
    assert message in trunk.backend_reason


@needs_build
def test_a_generator_that_cannot_be_imported_is_named_and_auto_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emx_onnx_cgen").mkdir()
    (tmp_path / "emx_onnx_cgen" / "__init__.py").write_text("raise ImportError('made for another onnx')\n")
    found = types.SimpleNamespace(version="1.4.0", locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    data = mlp().SerializeToString()
    with pytest.raises(BackendError, match="is installed, but cannot be imported: made for another onnx"):
        Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")
    assert Trunk(data, cache_dir=tmp_path / "cache").backend == "onnxruntime"


@needs_build
@pytest.mark.parametrize("message", HIDE)
def test_a_library_in_the_cache_needs_neither_generator_nor_compiler(
    message: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mlp().SerializeToString()
    Trunk(data, backend="compiled", cache_dir=cache)
    HIDE[message](monkeypatch, tmp_path)
    trunk = Trunk(data, cache_dir=cache)
    assert trunk.backend == "compiled"
    assert "found in the cache" in trunk.backend_reason
    np.testing.assert_allclose(trunk([1, 2, 3, 4]), relu_mlp([[1, 2, 3, 4]]), rtol=1e-6)


def test_without_onnxruntime_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    data = mlp(operator="Hardmax").SerializeToString()
    with pytest.raises(BackendError, match="pip install onnxruntime"):
        Trunk(data, backend="onnxruntime")
    with pytest.raises(BackendError, match=r"pip install onnxruntime.*not compiled:.*Hardmax"):
        Trunk(data, cache_dir=tmp_path)


@needs_build
@pytest.mark.slow("compiles a trunk")
def test_compiled_works_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    trunk = Trunk(mlp().SerializeToString(), cache_dir=tmp_path)
    assert trunk.backend == "compiled"
    assert json.loads(next(tmp_path.glob("*/*/build.json")).read_text())["check"] == "onnxruntime is not installed"


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_importing_the_module_imports_no_backend() -> None:
    code = (
        "import sys, kbt_edge.trunk, kbt_edge.export;"
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'onnxscript', 'emx_onnx_cgen'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# The cache.


@pytest.fixture
def logging_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$CC is the real compiler and notes every trunk that it compiles; returns the notes."""
    notes, script = tmp_path / "notes", tmp_path / "cc"
    notes.touch()
    real = shutil.which(COMPILER or "cc")
    script.write_text(f'#!/bin/sh\ncase "$*" in *trunk.c*) echo "$*" >> "{notes}";; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return notes


def compiled_times(notes: Path) -> int:
    """How many libraries; each comes with a program for its first run, with sanitizers."""
    calls = notes.read_text().splitlines()
    libraries = sum("-shared" in call for call in calls)
    assert sum("-fsanitize=" in call for call in calls) == libraries
    return libraries


@needs_build
@pytest.mark.slow("compiles many trunks")
def test_a_trunk_is_compiled_once_per_model_compiler_and_flags(
    logging_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    data = mlp().SerializeToString()
    first = Trunk(data, backend="compiled", cache_dir=cache)
    assert "built now" in first.backend_reason
    second = Trunk(data, backend="compiled", cache_dir=cache)
    assert "found in the cache" in second.backend_reason
    assert compiled_times(logging_compiler) == 1
    x = np.random.default_rng(0).standard_normal(4)
    np.testing.assert_array_equal(first(x), second(x))

    monkeypatch.setenv("CC", os.environ["CC"] + " -DOTHER")
    Trunk(data, backend="compiled", cache_dir=cache)
    assert compiled_times(logging_compiler) == 2
    Trunk(mlp(weight=2 * W).SerializeToString(), backend="compiled", cache_dir=cache)
    assert compiled_times(logging_compiler) == 3
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    Trunk(data, backend="compiled", cache_dir=cache)
    assert compiled_times(logging_compiler) == 4


@needs_build
@pytest.mark.slow("compiles a trunk")
def test_the_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = mlp()
    Trunk(data.SerializeToString(), backend="compiled")
    (library,) = tmp_path.glob("kbt_edge/trunks/*/*/trunk.so")
    assert (tmp_path / "kbt_edge" / "trunks").stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in library.parent.iterdir()) == ["build.json", "trunk.so"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_module.default_cache_dir() == Path("/home/someone/.cache/kbt_edge/trunks")


@needs_build
@pytest.mark.parametrize("damage", one_fast(["cut", "flipped", "empty record", "missing library"]))
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_a_damaged_library_is_built_again_and_never_loaded(
    damage: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mlp().SerializeToString()
    source = cache_entry(data, cache)
    entry = tmp_path / "cache" / source.parent.name / source.name
    shutil.copytree(source, entry)
    entry.parent.parent.chmod(0o700)
    library = entry / "trunk.so"
    content = library.read_bytes()
    if damage == "cut":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        library.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    elif damage == "empty record":
        (entry / "build.json").write_text("[]")
    else:
        library.unlink()
    trunk = Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")
    assert "built now" in trunk.backend_reason
    assert library.read_bytes()[:4] == content[:4]
    np.testing.assert_allclose(trunk([1, 2, 3, 4]), relu_mlp([[1, 2, 3, 4]]), rtol=1e-6)

    library.unlink()  # and not overwritten: it is mapped into this process
    library.write_bytes(b"")
    hide_generator(monkeypatch, tmp_path)
    with pytest.raises(BackendError, match="no library for this trunk"):
        Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")


@pytest.mark.skipif(os.name != "posix", reason="permissions of this kind are POSIX")
def test_a_cache_that_others_can_write_to_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BackendError, match="can be written by other users"):
        Trunk(mlp().SerializeToString(), backend="compiled", cache_dir=tmp_path)


@needs_build
@pytest.mark.slow("compiles trunks")
def test_builders_that_compile_at_the_same_time_share_one_library(tmp_path: Path) -> None:
    """The compiler of each waits for that of the other, so both are at work when the first one finishes."""
    (tmp_path / "trunk.onnx").write_bytes(mlp().SerializeToString())
    script = tmp_path / "cc"
    wait = f'touch "{tmp_path}/$PPID.here"; while [ $(ls "{tmp_path}" | grep -c here) -lt 2 ]; do sleep 0.05; done'
    script.write_text(f'#!/bin/sh\ncase "$*" in *trunk.c*) {wait};; esac\nexec {shutil.which(COMPILER or "cc")} "$@"\n')
    script.chmod(0o755)
    code = (
        "import sys; from kbt_edge.trunk import Trunk\n"
        "trunk = Trunk(sys.argv[1], backend='compiled', cache_dir=sys.argv[2])\n"
        "print(trunk([1, 2, 3, 4]).tobytes().hex())"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "trunk.onnx"), str(tmp_path / "cache")]
    environment = {**os.environ, "CC": str(script)}
    builders = [
        subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    results = [builder.communicate(timeout=300) for builder in builders]
    assert [errors for _, errors in results] == ["", ""]
    assert results[0] == results[1]
    assert np.frombuffer(bytes.fromhex(results[0][0].strip()), np.float32) == pytest.approx(relu_mlp([1, 2, 3, 4]))
    (shelf,) = (tmp_path / "cache").glob("[!.]*")
    assert len(list(shelf.iterdir())) == 1


@needs_build
@pytest.mark.long("compiles trunks, which takes long under emulation")
def test_a_library_that_disagrees_with_onnxruntime_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_source = source_module.generate_c
    monkeypatch.setattr(source_module, "generate_c", lambda *a, **k: true_source(*a, **k).replace("0x1.", "0x1.1", 1))
    with pytest.raises(BackendError, match="differs from onnxruntime"):
        Trunk(mlp().SerializeToString(), backend="compiled", cache_dir=tmp_path)
    assert not list(tmp_path.glob("*/*/trunk.so"))
    assert Trunk(mlp().SerializeToString(), cache_dir=tmp_path).backend == "onnxruntime"


# A trunk from a stranger, turned into machine code.


@needs_build
@pytest.mark.slow("compiles trunks")
def test_no_text_of_the_file_reaches_the_c_source(tmp_path: Path) -> None:
    evil = "*/\n#error evil\nint evil(void) { return 1; } /*"
    model = mlp()
    one_line = evil.replace("\n", " ")  # names have to be printable
    rename = {name: f"{name} {one_line}" for name in ("a", "u", "z", "w", "b")}
    for i, node in enumerate(model.graph.node):
        node.name, node.doc_string = f"{i} {evil}", evil
        for names in (node.input, node.output):
            names[:] = [rename.get(name, name) for name in names]
    for constant in model.graph.initializer:
        constant.name = rename.get(constant.name, constant.name)
        constant.doc_string = evil
    model.graph.value_info.append(value(rename["u"], ["n", 3]))
    model.graph.name = model.graph.doc_string = model.doc_string = model.producer_name = model.domain = evil
    model.metadata_props.add(key="evil", value=evil)
    data = model.SerializeToString()
    assert "evil" not in source_module.generate_c(data, read_onnx(data))
    trunk = Trunk(data, backend="compiled", cache_dir=tmp_path)
    np.testing.assert_allclose(trunk([1, 2, 3, 4]), relu_mlp([[1, 2, 3, 4]]), rtol=1e-6)

    model.graph.node[3].attribute.append(helper.make_attribute("mode", evil))
    with pytest.raises(BackendError, match="attribute text"):
        Trunk(model.SerializeToString(), backend="compiled", cache_dir=tmp_path)


@needs_build
@pytest.mark.slow("compiles trunks")
def test_a_constant_index_beyond_its_table_reads_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # it would reject such a file
    nodes = [helper.make_node("Gather", ["x", "far"], ["h"], axis=1)]
    model = make(nodes, [value("x", [1, 4])], [value("h", [1, 3])], {"far": np.array([10**8, 1, -(10**8)])})
    trunk = Trunk(model.SerializeToString(), backend="compiled", cache_dir=tmp_path)
    np.testing.assert_array_equal(trunk([1, 2, 3, 4]), [[4, 2, 1]])


@needs_build
def test_a_trunk_too_large_for_the_stack_is_rejected(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Sigmoid", ["a"], ["h"])]
    model = make(nodes, [value("x", [300, 1000])], [value("h", [300, 1000])], {})
    with pytest.raises(BackendError, match="1048576 bytes of stack"):
        Trunk(model.SerializeToString(), backend="compiled", cache_dir=tmp_path)


def lying(operator: str, *constants: Any, output: tuple[int, ...] = (1, 4)) -> bytes:
    """operator(x, constants) is declared as (1, 4) and is larger."""
    names = [f"c{i}" for i in range(len(constants))]
    nodes = [helper.make_node(operator, ["x", *names], ["h"])]
    model = make(nodes, [value("x", [1, 4])], [value("h", list(output))], dict(zip(names, constants, strict=True)))
    return bytes(model.SerializeToString())


MANY = np.full((64, 4), 1.5, np.float32)
LIES = {
    "Add": lying("Add", MANY),
    "Sub": lying("Sub", MANY),
    "Div": lying("Div", MANY),
    "Pow": lying("Pow", MANY),
    "Max": lying("Max", MANY),
    "Clip": lying("Clip", MANY, MANY),
    "MatMul": lying("MatMul", np.ones((64, 4, 4), np.float32)),
    "Expand": lying("Expand", np.array([64, 4])),
    "Reshape": lying("Reshape", np.array([4, 1])),
    "Unsqueeze": lying("Unsqueeze", np.array([0])),
    "Squeeze": lying("Squeeze", np.array([0])),
    "Transpose": lying("Transpose"),
    "Relu, smaller": lying("Relu", output=(1, 3)),
    "Relu, larger": lying("Relu", output=(1, 400)),
}

LOADING = """
import sys
import kbt_edge as kbt
backend, cache, *files = sys.argv[1:]
for file in files:
    try:
        print(kbt.Trunk(file, backend=backend, cache_dir=cache))
    except kbt.KbtError as error:
        print("rejected:", " ".join(str(error).split()))
"""


@needs_build
@pytest.mark.slow("runs the generator on fourteen files")
@pytest.mark.parametrize("backend", ["compiled", "auto"])
def test_a_trunk_that_lies_about_the_shape_of_its_output_is_rejected(backend: str, cache: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.onnx" for name in LIES]
    for file, lie in zip(files, LIES.values(), strict=True):
        file.write_bytes(lie)
    call = [sys.executable, "-c", LOADING, backend, str(cache), *map(str, files)]
    child = subprocess.run(call, capture_output=True, text=True)  # these files once took over the process
    assert (child.returncode, child.stderr) == (0, "")
    for lie, line in zip(LIES, child.stdout.splitlines(), strict=True):
        assert line.startswith("rejected: "), lie


@needs_build
@pytest.mark.slow("compiles trunks")
def test_c_that_leaves_its_arrays_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_source = source_module.generate_c
    for limit, number in [("i1 < 3", 9), ("kbt_product(1, 3, 4", 4000)]:  # one writes too much, the other reads it
        source = [true_source(data := mlp().SerializeToString(), read_onnx(data)).replace(limit, f"{limit}{number}")]
        monkeypatch.setattr(source_module, "generate_c", lambda *a, source=source, **k: source[0])
        with pytest.raises(BackendError, match=r"does not stay within its arrays: .*(overflow|out of bounds)"):
            Trunk(data, backend="compiled", cache_dir=tmp_path / limit)
        assert not list(tmp_path.glob("*/*/*/trunk.so"))


@needs_build
@pytest.mark.slow("compiles trunks")
def test_a_compiler_without_sanitizers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-fsanitize*) echo "no libasan" >&2; exit 1;; esac\nexec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    for _ in range(2):  # and is not remembered: the libraries may be installed tomorrow
        with pytest.raises(BackendError, match="install its sanitizer libraries, or use onnxruntime") as error:
            Trunk(mlp().SerializeToString(), backend="compiled", cache_dir=tmp_path / "cache")
        assert "remembered" not in str(error.value)


@needs_build
@pytest.mark.slow("compiles a trunk")
def test_what_onnxruntime_notices_is_not_taken_for_its_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> Any:
        raise BackendError("onnxruntime failed to run the trunk: another shape")

    monkeypatch.setattr(trunks.trunk, "Onnxruntime", failing)
    with pytest.raises(BackendError, match="another shape"):
        Trunk(mlp().SerializeToString(), backend="compiled", cache_dir=tmp_path)
    assert not list(tmp_path.glob("*/*/trunk.so"))


@needs_build
@pytest.mark.parametrize("operator", ["Mul", "Add", "Sub"])
@pytest.mark.slow("compiles trunks")
def test_integers_that_overflow_wrap_around_on_both_backends(operator: str, tmp_path: Path) -> None:
    """Also with the undefined behaviour sanitizer, which every new trunk goes through."""
    nodes = [helper.make_node(operator, ["i", "c"], ["a"]), helper.make_node("Less", ["a", "zero"], ["b"])]
    nodes.append(helper.make_node("Cast", ["b"], ["h"], to=FLOAT))
    far = np.array([2**62, 2**63 - 1, -(2**63), 3])
    model = make(nodes, [value("i", [4], INT64)], [value("h", [4])], {"c": far, "zero": np.array(0)})
    ids = np.array([5, 2**63 - 1, -(2**63), -(2**63)])
    with np.errstate(over="ignore"):
        wrapped = {"Mul": np.multiply, "Add": np.add, "Sub": np.subtract}[operator](ids, far)
    for backend in ("compiled", "onnxruntime"):
        trunk = Trunk(model.SerializeToString(), backend=backend, cache_dir=tmp_path)
        np.testing.assert_array_equal(trunk(ids)[0], wrapped < 0)


@pytest.mark.parametrize("backend", ["compiled", "onnxruntime", "auto"])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_integer_division_is_rejected_before_it_ends_the_process(operator: str, backend: str, tmp_path: Path) -> None:
    nodes = [helper.make_node(operator, ["i", "c"], ["a"]), helper.make_node("Cast", ["a"], ["h"], to=FLOAT)]
    model = make(nodes, [value("i", [2], INT64)], [value("h", [2])], {"c": np.array([-1, -1])})
    with pytest.raises(BundleError, match=f"{operator} of integers"):
        Trunk(model.SerializeToString(), backend=backend, cache_dir=tmp_path)


@needs_build
def test_nan_within_a_network_is_never_turned_into_a_number(backend: str, tmp_path: Path) -> None:
    """Row k of x goes through log and the k-th operator: after log(-1), h has to be rejected."""
    operators = [
        "Relu",
        "HardSigmoid",
        "HardSwish",
        "Softplus",
        "LeakyRelu",
        "Sigmoid",
        "ReduceMax",
        "ReduceMin",
        "Max",
        "Min",
        "Clip",
    ]
    nodes = [helper.make_node("Log", ["x"], ["log"])]
    constants: dict[str, Any] = {"big": np.float32(9), "small": np.float32(-9), "row": np.array([1, -1])}
    for k, operator in enumerate(operators):
        constants[f"k{k}"] = np.array([k])
        bounds = {"Max": ["small"], "Min": ["big"], "Clip": ["small", "big"]}.get(operator, [])
        nodes += [
            helper.make_node("Gather", ["log", f"k{k}"], [f"a{k}"]),
            helper.make_node(
                operator, [*bounds[:1], f"a{k}"][:: -1 if operator == "Clip" else 1] + bounds[1:], [f"b{k}"]
            ),
            helper.make_node("ReduceSum", [f"b{k}"], [f"c{k}"]),
            helper.make_node("Reshape", [f"c{k}", "row"], [f"d{k}"]),
        ]
    count = len(operators)
    nodes.append(helper.make_node("Concat", [f"d{k}" for k in range(count)], ["h"], axis=1))
    model = make(nodes, [value("x", [count, 2])], [value("h", [1, count])], constants)
    trunk = Trunk(model.SerializeToString(), backend=backend, cache_dir=tmp_path)
    assert np.isfinite(trunk(np.full((count, 2), 0.5))).all()
    for k in range(count):
        x = np.full((count, 2), 0.5)
        x[k, 0] = -1.0
        with pytest.raises(NumericsError, match="not finite"):
            trunk(x)


@needs_build
def test_numbers_are_not_cast_to_integers_in_c(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=INT64), helper.make_node("Cast", ["i"], ["h"], to=FLOAT)]
    data = make(nodes, [value("x", [1, 4])], [value("h", [1, 4])], {}).SerializeToString()
    with pytest.raises(BackendError, match="Cast of real numbers to integers"):
        Trunk(data, backend="compiled", cache_dir=tmp_path)
    assert Trunk(data, cache_dir=tmp_path).backend == "onnxruntime"


@needs_build
@pytest.mark.slow("compiles trunks")
def test_a_trunk_that_cannot_be_compiled_is_tried_once(logging_compiler: Path, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Sigmoid", ["a"], ["h"])]
    data = make(nodes, [value("x", [300, 800])], [value("h", [300, 800])], {}).SerializeToString()
    reasons = []
    for _ in range(3):
        with pytest.raises(BackendError, match="1048576 bytes of stack") as error:
            Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")
        reasons.append(str(error.value))
    assert len(logging_compiler.read_text().splitlines()) == 1
    assert "remembered; delete" not in reasons[0]
    assert "remembered; delete" in reasons[1]
    assert "remembered; delete" in Trunk(data, cache_dir=tmp_path / "cache").backend_reason
    entry = Path(reasons[1].split("delete ")[1].split(" to try")[0])
    shutil.rmtree(entry)
    with pytest.raises(BackendError, match=r"bytes of stack, this one needs more: too large$"):
        Trunk(data, backend="compiled", cache_dir=tmp_path / "cache")


@needs_build
@pytest.mark.slow("compiles a trunk in a new process")
def test_the_generator_never_imports_a_file_of_the_user(tmp_path: Path) -> None:
    """It imports a package called ``shared``, and so may the user's own program be called."""
    (tmp_path / "trunk.onnx").write_bytes(mlp().SerializeToString())
    for name in ("shared", "onnx", "jinja2", "emx_onnx_cgen"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()\n")
    (tmp_path / "main.py").write_text(LOADING)
    call = [sys.executable, "main.py", "compiled", "cache", "trunk.onnx"]
    child = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert (child.returncode, child.stdout[:6], child.stderr) == (0, "Trunk(", "")
    assert not (tmp_path / "executed").exists()


# The heap.

HEAP_CHILD = """
import ctypes, json, sys
import numpy as np
from kbt_edge.trunk import Trunk
allocations = ctypes.CDLL(None).alloc_count
allocations.restype = ctypes.c_size_t
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def count(call):
    for _ in range(100):
        call()
    before = allocations()
    for _ in range(1000):
        call()
    return allocations() - before

result = {"nothing": count(lambda: None), "malloc": count(lambda: free(malloc(100)))}
for backend in ("compiled", "onnxruntime"):
    trunk = Trunk(sys.argv[1], backend=backend, cache_dir=sys.argv[2])
    inputs = [np.zeros(spec.shape, spec.dtype) for spec in trunk.inputs]
    result[backend] = count(lambda: trunk(*inputs))
print(json.dumps(result))
"""


@needs_build
@pytest.mark.parametrize("network", ["control, 1 state", "control, 20 states", "tokens"])
@pytest.mark.slow("exports networks and compiles trunks")
def test_the_compiled_trunk_never_allocates(network: str, exported: Any, cache: Path, alloc_counter: Path) -> None:
    _, path = exported[network]
    Trunk(path, backend="compiled", cache_dir=cache)
    call = [sys.executable, "-c", HEAP_CHILD, str(path), str(cache)]
    environment = {**os.environ, "LD_PRELOAD": str(alloc_counter), "PYTHONMALLOC": "pymalloc"}
    answer = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
    counts = json.loads(answer.stdout)
    print(f"{network}, allocations in 1000 calls: {counts}")
    assert counts["nothing"] == 0
    assert counts["malloc"] == 1000  # the counter does count
    assert counts["compiled"] == 0
    assert counts["onnxruntime"] > 0
