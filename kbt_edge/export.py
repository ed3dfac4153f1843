"""From torch to the board: ``export`` makes a bundle from a trunk module and the readout that follows it.

``export_trunk`` is the first half: one self-contained ONNX file with fixed shapes that computes the same as the module.
Both need the ``train`` extra (torch, onnx, onnxscript); running the result does not. ``docs/export.md`` has an example.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kbt_edge._arrays import Array
from kbt_edge.errors import BundleError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.head import Head
from kbt_edge.model import Model
from kbt_edge.scaling import Scaling, per_output, scaled_noise
from kbt_edge.trunk import BackendError, TensorSpec, Trunk

if TYPE_CHECKING:
    import torch

__all__ = ["TrunkReport", "export", "export_trunk"]

OPSET: Final = 20
TOLERANCE: Final = 1e-5  # of ONNX against torch, relative to the largest output
READOUT_TOLERANCE: Final = 1e-4  # of the readout against torch, relative to the sum of its terms
LAYOUT: Final = {
    "Cast",
    "Concat",
    "Expand",
    "Identity",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
TRIALS: Final = 8  # inputs on which the two are compared, the example among them


@dataclass(frozen=True)
class TrunkReport:
    """The file that was written, and its largest difference from the module."""

    path: Path
    sha256: str
    nbytes: int
    inputs: tuple[TensorSpec, ...]
    rows: int
    d: int
    operators: dict[str, int]
    max_abs_diff: float  # of onnxruntime against torch
    scale: float  # the largest output in magnitude


def export_trunk(
    module: torch.nn.Module,
    example_inputs: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
) -> TrunkReport:
    """Write ``module`` as the ONNX file ``path``, after comparing the two on several inputs.

    ``example_inputs`` fix the shapes: one sample or a batch of one (float32, or int64 for token ids), such that
    ``module(*example_inputs)`` is (d,), (rows, d) or (1, rows, d). Input names default to those of ``forward``. The
    module is exported in evaluation mode and left as it was. If it cannot be exported, or torch and onnxruntime differ
    by more than 1e-5 of the largest output, an error says so and no file is written.
    """
    torch, _, _ = _train_extra()
    # Copies, because torch would make one input of a tensor that is given twice.
    examples = tuple(torch.as_tensor(example).clone() for example in example_inputs)
    if not examples:
        raise RangeError("example_inputs: expected at least one tensor, got none")
    if input_names is not None and len(input_names) != len(examples):
        raise RangeError(f"input_names: expected {len(examples)}, one per example input, got {len(input_names)}")
    path = Path(path)
    with _evaluation(torch, module), torch.no_grad():
        data = _onnx_bytes(torch, module, examples, input_names)
        trunk = Trunk(data, backend="onnxruntime", max_bytes=len(data))
        difference, scale = _compare(torch, module, trunk, examples)
    if not difference <= TOLERANCE * scale:
        raise NumericsError(
            f"export: onnxruntime and torch differ by {difference:.1e} where outputs reach {scale:.1e}; "
            f"expected at most {TOLERANCE:.0e} of that"
        )
    _write(path, data)
    return TrunkReport(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        nbytes=len(data),
        inputs=trunk.inputs,
        rows=trunk.rows,
        d=trunk.d,
        operators=trunk.operators,
        max_abs_diff=difference,
        scale=scale,
    )


def export(
    module: torch.nn.Module,
    readout: torch.nn.Module,
    example_inputs: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    input_names: Sequence[str] | None = None,
    input_mean: Scaling = 0.0,
    input_scale: Scaling = 1.0,
    output_offset: npt.ArrayLike = 0.0,
    output_scale: npt.ArrayLike = 1.0,
    made: Mapping[str, str] | None = None,
    **settings: Any,
) -> Model:
    """Write the bundle ``path``: ``module`` as its trunk, and a head that starts as ``readout``. Returns the model.

    ``example_inputs`` are as the module takes them, see ``export_trunk``. The scaling says in which units it was
    trained, see ``Model``: it gets (x - input_mean) / input_scale, and y = output_offset + output_scale · readout.
    ``settings`` are those of ``Head``, with ``noise_var`` in squared units of y, and ``max_rows`` as many as the trunk
    has by default. ``made`` is kept in the bundle.

    ``readout`` is a ``torch.nn.Linear``, or a module that has its ``weight`` and ``bias`` and computes the same; a
    ``Conv1D`` keeps its weight transposed and is recognised by its name. The head is compared with it on the inputs of
    ``export_trunk``. A batch of several samples is rejected, as it would become the rows of one sample.
    """
    torch, _, _ = _train_extra()
    weight, bias = _weights(readout)
    examples = tuple(map(torch.as_tensor, example_inputs))
    if settings.get("noise_var") is not None:
        settings["noise_var"] = scaled_noise(settings["noise_var"], per_output(output_scale, len(weight)))
    with tempfile.TemporaryDirectory() as folder:
        report = export_trunk(module, examples, Path(folder, "trunk.onnx"), input_names=input_names)
        file = report.path.read_bytes()
    if "max_rows" not in settings:
        _reject_a_batch(torch, module, examples, report)
    trunk = Trunk(file, backend="onnxruntime", max_bytes=len(file))
    _compare_readout(torch, module, readout, weight, bias, trunk, examples)
    head = Head(weight, bias, **{"max_rows": report.rows, **settings})
    how = {
        "torch": str(torch.__version__),
        "onnxruntime against torch": f"largest difference {report.max_abs_diff:.1e}, largest output {report.scale:.1e}",
    }
    model = Model(
        file,
        head,
        input_mean=input_mean,
        input_scale=input_scale,
        output_offset=output_offset,
        output_scale=output_scale,
        made={**how, **(made or {})},
        backend="onnxruntime",
        max_bytes=len(file),
    )
    model.save(path)
    return model


def _weights(readout: torch.nn.Module) -> tuple[Array, Array | None]:
    """Weight (d_o, d) and bias of the readout."""
    try:
        weight: Array = readout.weight.detach().cpu().double().numpy()  # type: ignore[operator]
        bias: Array | None = None
        if readout.bias is not None:
            bias = readout.bias.detach().cpu().double().numpy()  # type: ignore[operator]
    except AttributeError as error:
        raise RangeError(
            f"readout: expected a torch.nn.Linear, or a module with its weight and bias, got "
            f"{type(readout).__name__} ({error})"
        ) from None
    return (weight.T if type(readout).__name__ == "Conv1D" and weight.ndim == 2 else weight), bias


def _reject_a_batch(
    torch: Any, module: torch.nn.Module, examples: tuple[torch.Tensor, ...], report: TrunkReport
) -> None:
    """Rows from the first axis of an input may be one sample or a batch; only the caller knows."""
    with _evaluation(torch, module), torch.no_grad():
        shape = tuple(module(*examples).shape)
    batched = [
        spec.name
        for spec, example in zip(report.inputs, examples, strict=True)
        if example.ndim > 1 and len(example) == report.rows
    ]
    if len(shape) == 2 and report.rows > 1 and batched:
        raise ShapeError(
            f"example_inputs: expected one sample, got an output of shape {shape} and {report.rows} as the first axis "
            f"of {', '.join(map(repr, batched))}, which looks like a batch of {report.rows} samples. Pass one of them, "
            f"with 1 as the first axis; or, if these are the rows of one sample, say so with max_rows={report.rows}"
        )


def _compare_readout(
    torch: Any,
    module: torch.nn.Module,
    readout: torch.nn.Module,
    weight: Array,
    bias: Array | None,
    trunk: Trunk,
    examples: tuple[torch.Tensor, ...],
) -> None:
    """Compare weight · trunk(x) + bias, as the head computes it, with readout(module(x)) in torch."""
    kind = type(readout).__name__
    if weight.ndim != 2 or weight.shape[1] != trunk.d:
        raise ShapeError(
            f"readout: expected a weight of shape (outputs, {trunk.d}), as the trunk's rows have {trunk.d} numbers, "
            f"got {weight.shape} in a {kind}"
        )
    difference = largest = terms = 0.0
    with _evaluation(torch, module), _evaluation(torch, readout), torch.no_grad():
        for inputs in _trials(torch, examples):
            expected = readout(module(*inputs)).detach().cpu().double().numpy().reshape(trunk.rows, -1)
            h = trunk(*(value.numpy() for value in inputs)).astype(np.float64)
            u = h @ weight.T + (0.0 if bias is None else bias)
            if u.shape != expected.shape:
                raise ShapeError(
                    f"readout: expected outputs of shape {u.shape}, as its weight says, got {expected.shape}"
                )
            difference = max(difference, float(np.abs(u - expected).max()))
            largest = max(largest, float(np.abs(expected).max()))
            terms = max(terms, float((np.abs(h) @ np.abs(weight.T)).max()))
    if not difference <= READOUT_TOLERANCE * terms:
        raise NumericsError(
            f"readout: expected weight · h + bias to be what {kind} computes, they differ by {difference:.1e} where "
            f"outputs reach {largest:.1e}. Its weight may be stored transposed, (inputs, outputs), or it may do more "
            "than multiply and add; put the same weights into a torch.nn.Linear"
        )


def _train_extra() -> tuple[Any, Any, Any]:
    try:
        return tuple(map(importlib.import_module, ("torch", "onnx", "onnxscript")))  # type: ignore[return-value]
    except ImportError as error:
        raise BackendError(f"export needs {error.name} (pip install 'kbt-edge[train]')") from error


@contextmanager
def _evaluation(torch: Any, module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, and attention as separate operators: torch's fused kernel has no ONNX form."""
    modes = [(part, part.training) for part in module.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part, training in modes:
            part.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's logs; errors are raised."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _onnx_bytes(torch: Any, module: torch.nn.Module, examples: tuple[Any, ...], names: Sequence[str] | None) -> bytes:
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                examples,
                dynamo=True,  # the older exporter leaves computed shapes, which cannot be compiled to C
                opset_version=OPSET,
                input_names=None if names is None else list(names),
                output_names=["h"],
                verbose=False,
            )
            model = program.model_proto
    except KbtError:
        raise
    except Exception as error:  # of many types, as export runs the user's code
        raise BundleError(f"export: torch cannot turn this module into ONNX: {error}") from error
    _fold(model)
    _strip(model)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _fold(model: Any) -> None:
    """Split and transpose weights now, which the exporter leaves to every run of the trunk."""
    onnx: Any = importlib.import_module("onnx")
    graph = model.graph
    known = {tensor.name for tensor in graph.initializer}
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        return  # an inner graph may use any name of the outer one
    fixed, rest = [], []
    for node in graph.node:
        if node.op_type in LAYOUT and known.issuperset(filter(None, node.input)):
            fixed.append(node)
            known.update(node.output)
        else:
            rest.append(node)
    used = {name for node in rest for name in node.input} | {value.name for value in graph.output}
    results = sorted(used.intersection(name for node in fixed for name in node.output))
    body = onnx.helper.make_graph(
        fixed, "fixed", [], list(map(onnx.helper.make_empty_tensor_value_info, results)), list(graph.initializer)
    )
    small = onnx.helper.make_model(body, opset_imports=model.opset_import, ir_version=model.ir_version)
    reference: Any = importlib.import_module("onnx.reference")
    values = reference.ReferenceEvaluator(small).run(results, {}) if results else []
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    kept += [onnx.numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in zip(results, values, strict=True)]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(rest)
    graph.initializer.extend(kept)


def _strip(model: Any) -> None:
    """Remove what no backend needs: inferred shapes, and traces that show the paths of the exporting machine.

    They are nine tenths of the file of a small trunk.
    """
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _compare(torch: Any, module: torch.nn.Module, trunk: Trunk, examples: tuple[Any, ...]) -> tuple[float, float]:
    """Largest difference and largest output over the example and variations of it."""
    difference = scale = 0.0
    for inputs in _trials(torch, examples):
        expected = module(*inputs).detach().numpy().astype(np.float64).reshape(trunk.rows, trunk.d)
        h = trunk(*(value.numpy() for value in inputs))
        difference = max(difference, float(np.abs(h - expected).max()))
        scale = max(scale, float(np.abs(expected).max()))
    return difference, scale


def _trials(torch: Any, examples: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The example, and variations of it."""
    generator = torch.Generator().manual_seed(0)
    yield examples
    for _ in range(TRIALS - 1):
        yield tuple(_variation(torch, example, generator) for example in examples)


def _variation(torch: Any, example: Any, generator: Any) -> Any:
    """Noise on states; token ids in another order, because the valid ids are unknown."""
    if example.is_floating_point():
        return example + torch.randn(example.shape, generator=generator)
    return example.flatten()[torch.randperm(example.numel(), generator=generator)].reshape(example.shape)


def _write(path: Path, data: bytes) -> None:
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise BundleError(f"export: {path} cannot be written: {error}") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        raise BundleError(f"export: {path} cannot be written: {error}") from error
