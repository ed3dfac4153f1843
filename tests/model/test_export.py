"""Export: the file equals the module, tells nothing about the machine, and is not written when it would be wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import one_fast

torch = pytest.importorskip("torch", reason="export starts from torch, which is not installed")
for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"export needs {package}, which is not installed")

from kbt_edge.errors import BundleError, NumericsError, RangeError, ShapeError  # noqa: E402
from kbt_edge.export import export, export_trunk  # noqa: E402
from kbt_edge.model import Model  # noqa: E402
from kbt_edge.networks import DecisionTransformer  # noqa: E402
from kbt_edge.trunk import BackendError, Trunk  # noqa: E402


class Features(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Someone's own trunk: two inputs, dropout, a residual, GELU; (1, rows, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(3 + 2, 6)
        self.drop = torch.nn.Dropout(0.5)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, position: Any, wheels: Any) -> Any:
        z = torch.nn.functional.gelu(self.mix(torch.cat([position, wheels], dim=-1)))
        return self.norm(z + self.drop(z))[None]


@pytest.fixture
def features() -> Any:
    torch.manual_seed(2)
    return Features()


EXAMPLE = (torch.zeros(4, 3), torch.ones(4, 2))


def test_ones_own_module_becomes_a_file_that_equals_it(features: Any, tmp_path: Path) -> None:
    path = tmp_path / "trunk.onnx"
    report = export_trunk(features, EXAMPLE, path)
    trunk = Trunk(path, backend="onnxruntime")
    assert [(spec.name, spec.shape) for spec in trunk.inputs] == [("position", (4, 3)), ("wheels", (4, 2))]
    assert (report.inputs, report.rows, report.d, report.sha256) == (trunk.inputs, 4, 6, trunk.sha256)
    assert report.operators == trunk.operators
    assert report.nbytes == path.stat().st_size
    assert 0 < report.max_abs_diff < 1e-5 * report.scale
    features.eval()
    rng = np.random.default_rng(0)
    for _ in range(20):
        inputs = [rng.standard_normal(spec.shape).astype(np.float32) for spec in trunk.inputs]
        with torch.no_grad():
            expected = features(*map(torch.from_numpy, inputs))[0].numpy()
        np.testing.assert_allclose(trunk(*inputs), expected, atol=1e-5)


class Difference(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, a: Any, b: Any) -> Any:
        return a - b


def test_one_example_for_two_inputs_gives_two_inputs(tmp_path: Path) -> None:
    example = torch.ones(1, 3)
    export_trunk(Difference(), (example, example), tmp_path / "trunk.onnx")
    trunk = Trunk(tmp_path / "trunk.onnx", backend="onnxruntime")
    np.testing.assert_array_equal(trunk([5, 6, 7], [1, 1, 1]), [[4, 5, 6]])


class Rearranging(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, 3))

    def forward(self, x: Any) -> Any:
        query, key = self.weight.split([4, 8])
        return torch.cat([x @ query.T, (x @ key.T).relu()], dim=-1)


def test_weights_are_rearranged_before_and_not_in_every_run(tmp_path: Path) -> None:
    report = export_trunk(Rearranging(), (torch.ones(1, 3),), tmp_path / "trunk.onnx")
    assert report.operators == {"Concat": 1, "MatMul": 2, "Relu": 1}
    assert report.nbytes < 1000


def test_the_module_is_left_as_it_was(features: Any, tmp_path: Path) -> None:
    features.norm.eval()
    before = {name: value.clone() for name, value in features.state_dict().items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    export_trunk(features, EXAMPLE, tmp_path / "trunk.onnx")
    assert (features.training, features.drop.training, features.norm.training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in features.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.slow("exports twice")
def test_the_file_tells_nothing_about_the_machine_and_is_reproducible(features: Any, tmp_path: Path) -> None:
    contents = []
    for name in ("a.onnx", "b.onnx"):
        export_trunk(features, EXAMPLE, tmp_path / name, input_names=["p", "w"])
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    for trace in (b"stack_trace", b"site-packages", b".py", Path(__file__).stem.encode()):
        assert trace not in contents[0]
    assert [spec.name for spec in Trunk(contents[0], backend="onnxruntime").inputs] == ["p", "w"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


def test_the_exporter_says_nothing(features: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export_trunk(features, EXAMPLE, tmp_path / "trunk.onnx")
    assert capfd.readouterr() == ("", "")


class Forgetful(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Its answer depends on what export cannot see."""

    calls = 0

    def forward(self, x: Any) -> Any:
        Forgetful.calls += 1
        return x + float(Forgetful.calls)


class Choosing(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


class Two(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return x, 2 * x


REJECTED = {
    "differs": (Forgetful(), (torch.zeros(1, 3),), NumericsError, "onnxruntime and torch differ by"),
    "data decides": (Choosing(), (torch.ones(1, 3),), BundleError, "torch cannot turn this module into ONNX"),
    "two outputs": (Two(), (torch.ones(1, 3),), BundleError, "expected one output"),
    "batch": (
        torch.nn.Linear(3, 2),
        (torch.ones(5, 1, 3),),
        BundleError,
        r"shape \(d,\), \(rows, d\) or \(1, rows, d\)",
    ),
    "float64": (torch.nn.Linear(3, 2).double(), (torch.ones(1, 3).double(),), BundleError, "must be float32 or int64"),
    "no example": (torch.nn.Linear(3, 2), (), RangeError, "example_inputs: expected at least one tensor"),
}


@pytest.mark.parametrize("case", one_fast(REJECTED))
def test_what_cannot_become_a_trunk_is_rejected_and_an_older_file_stays(case: str, tmp_path: Path) -> None:
    module, example, error, message = REJECTED[case]
    path = tmp_path / "trunk.onnx"
    path.write_bytes(b"older")
    with pytest.raises(error, match=message):
        export_trunk(module, example, path)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow("exports many times")
def test_wrong_names_and_places_are_rejected(features: Any, tmp_path: Path) -> None:
    with pytest.raises(RangeError, match="input_names: expected 2, one per example input, got 1"):
        export_trunk(features, EXAMPLE, tmp_path / "trunk.onnx", input_names=["x"])
    with pytest.raises(BundleError, match="cannot be written"):
        export_trunk(DecisionTransformer().trunk, (torch.zeros(1, 4),), tmp_path / "absent" / "trunk.onnx")


def test_a_missing_train_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(BackendError, match=r"export needs onnxscript \(pip install 'kbt-edge\[train\]'\)"):
        export_trunk(torch.nn.Linear(3, 2), (torch.ones(1, 3),), tmp_path / "trunk.onnx")


# A whole bundle.


@pytest.mark.slow("exports many times")
def test_a_batch_of_samples_is_rejected_and_told_what_to_do(tmp_path: Path) -> None:
    trunk, readout = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)
    with pytest.raises(ShapeError, match=r"output of shape \(32, 6\) .* a batch of 32 samples.*max_rows=32"):
        export(trunk, readout, (torch.zeros(32, 4),), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    one = export(trunk, readout, (torch.zeros(1, 4),), tmp_path / "one")
    assert one.predict(np.zeros(4)).mean.shape == (2,)
    rows = export(trunk, readout, (torch.zeros(32, 4),), tmp_path / "rows", max_rows=32)
    assert rows.predict(np.zeros((32, 4))).mean.shape == (32, 2)


@pytest.mark.slow("exports many times")
def test_a_bundle_has_room_for_the_rows_of_its_trunk(features: Any, tmp_path: Path) -> None:
    export(features, torch.nn.Linear(6, 2), EXAMPLE, tmp_path / "b")
    model = Model.load(tmp_path / "b", backend="onnxruntime")
    assert model.head.config["max_rows"] == 4
    model.predict(np.zeros((4, 3)), np.ones((4, 2)))
    model.observe(np.zeros((4, 2)))
    with pytest.raises(ShapeError, match="head: expected max_rows >= 4"):
        export(features, torch.nn.Linear(6, 2), EXAMPLE, tmp_path / "c", max_rows=3)
    assert not (tmp_path / "c").exists()


class Conv1D(torch.nn.Module):  # type: ignore[misc, name-defined]
    """As in transformers: a linear layer that keeps its weight as (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Renamed(Conv1D):
    """The same under an unknown name."""


class Squashed(torch.nn.Linear):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return super().forward(x).tanh()


@pytest.mark.parametrize("outputs", [2, 6], ids=["2 outputs", "square"])
@pytest.mark.slow("exports twice")
def test_a_readout_with_a_transposed_weight_is_exported_as_it_computes(outputs: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk, readout = torch.nn.Linear(4, 6), Conv1D(outputs, 6)
    model = export(trunk, readout, (torch.zeros(1, 4),), tmp_path / "b")
    x = np.array([0.1, -0.2, 0.3, 0.4])
    with torch.no_grad():
        expected = readout(trunk(torch.tensor(x, dtype=torch.float32))).numpy()
    np.testing.assert_allclose(model.predict(x).mean, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("readout", "error", "message"),
    one_fast(
        [
            (
                Renamed(6, 6),
                NumericsError,
                r"readout: .* differ by .* stored transposed, \(inputs, outputs\).*torch\.nn\.Linear",
            ),
            (
                Renamed(2, 6),
                ShapeError,
                r"readout: expected a weight of shape \(outputs, 6\), .* got \(6, 2\) in a Renamed",
            ),
            (Squashed(6, 2), NumericsError, "readout: .* differ by .* do more than multiply and add"),
            (torch.nn.Linear(5, 2), ShapeError, r"readout: expected a weight of shape \(outputs, 6\), .* got \(2, 5\)"),
            (
                torch.nn.Sequential(torch.nn.Linear(6, 2)),
                RangeError,
                "readout: expected a torch.nn.Linear, .* Sequential",
            ),
        ]
    ),
    ids=["square, transposed", "transposed", "more than linear", "another width", "no weight"],
)
def test_a_readout_that_the_head_would_not_reproduce_is_rejected(
    readout: Any, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export(torch.nn.Linear(4, 6), readout, (torch.zeros(1, 4),), tmp_path / "b")
    assert not (tmp_path / "b").exists()
