"""The workload of the loops: a bundle's model and samples, for a C loop and a Python loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbt_edge import _core
from kbt_edge import bundle as bundles
from kbt_edge.model import Model
from kbt_edge.onnxfile import MAX_BYTES
from kbt_edge.trunk import Backend

__all__ = ["Workload", "load"]

SAMPLES: Final = 256  # taken in turn; few enough to stay in the cache, as a sensor's buffer would


@dataclass(frozen=True)
class Workload:
    """Two copies of one model, each with its own head: the C loop and the Python loop learn the same samples."""

    model: Model  # for the Python loop
    inputs: list[tuple[Any, ...]]  # arguments of model.predict
    targets: list[Any]  # arguments of model.observe
    loop: _core.Loop  # the other copy in C
    whole: bool  # whether the C loop holds the trunk as well; otherwise it starts at h
    description: dict[str, Any]
    c_model: Model  # the model of the C loop, whose memory it uses


def load(name: str, backend: Backend, seed: int, max_bytes: int = MAX_BYTES) -> Workload:
    folder = bundles.find(name)
    model, other = (Model.load(name, backend=backend, max_bytes=max_bytes) for _ in range(2))
    rng = np.random.default_rng(seed)
    inputs = [_input(model, rng) for _ in range(SAMPLES)]
    targets = [_target(model, x, rng) for x in inputs]
    head, trunk = model.head.config, model.trunk
    whole = other.policy.runs_alone and head["output"] == "gaussian"
    description = {
        "bundle": folder.name if bundles.is_shipped(folder) else str(name),
        "trunk_backend": trunk.backend,
        "trunk_reason": trunk.backend_reason,
        "trunk_sha256": trunk.sha256,
        "inputs": [{"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in trunk.inputs],
        "rows": trunk.rows,
        "head": {key: list(value) if isinstance(value, tuple) else value for key, value in head.items()},
        "head_bytes": model.head.nbytes,
        "seed": seed,
        "samples": SAMPLES,
    }
    loop = _c_loop(other, inputs, targets, whole)
    return Workload(model, inputs, targets, loop, whole, description, other)


def _input(model: Model, rng: np.random.Generator) -> tuple[Any, ...]:
    """One sample as in a control loop: float64 in physical units, or token ids."""
    values: list[Any] = []
    for spec in model.trunk.inputs:
        shape = spec.shape[1:] if len(spec.shape) > 1 and spec.shape[0] == 1 else spec.shape
        if spec.dtype == "float32":
            mean, scale = model.input_mean[spec.name], model.input_scale[spec.name]
            values.append(np.ascontiguousarray(mean + scale * rng.uniform(-1, 1, shape)))
        else:
            values.append(rng.integers(0, spec.limit or 1, shape))
    return tuple(values)


def _target(model: Model, x: tuple[Any, ...], rng: np.random.Generator) -> Any:
    """A likely target at x according to the model, so that the head learns under normal conditions."""
    p = model.predict(*x)
    if model.head.config["output"] == "softmax":
        return rng.integers(0, model.head.d_o, p.mean.shape[:-1]).astype(np.int32)
    y = np.asarray(p.mean + p.total_std * rng.normal(size=p.mean.shape), np.float64)
    return float(y[0]) if y.shape == (1,) else y


def _c_loop(model: Model, inputs: list[tuple[Any, ...]], targets: list[Any], whole: bool) -> _core.Loop:
    if whole:
        x: NDArray[Any] = np.array([np.ravel(arguments[0]) for arguments in inputs], np.float64)
        return _core.Loop(model.policy, x, np.array([np.ravel(y) for y in targets], np.float64))
    h = np.array([np.ravel(model.features(*x)) for x in inputs])
    y = np.array([np.ravel(model.to_head_units(y)) for y in targets])
    dtype = np.int32 if model.head.config["output"] == "softmax" else model.head.config["dtype"]
    return _core.Loop(model.head.core, model.trunk.rows, h, np.ascontiguousarray(y, dtype))
