"""``--baselines``: other ways to learn a sample, timed on the same board. Packages that are not installed are named."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kbt_edge._progress import Tell
from kbt_edge.bench.figures import summary
from kbt_edge.bench.workload import Workload
from kbt_edge.head import Head
from kbt_edge.reference import ReferenceHead
from kbt_edge.reference_bank import ReferenceBank
from kbt_edge.reference_members import ReferenceMembers
from kbt_edge.trunk import Trunk

__all__ = ["run"]

_SECONDS: Final = 1.0  # for each baseline, and not fewer than _LEAST runs
_LEAST, _MOST = 3, 5000
_MEMORY: Final = 50


class _MissingError(Exception):
    pass


def run(work: Workload, tell: Tell) -> list[dict[str, Any]]:
    rows = []
    for name, (samples, make) in _BASELINES.items():
        tell(f"baseline: {name}")
        try:
            rows.append({"name": name, "samples": samples, **_timed(make(work))})
        except _MissingError as missing:
            rows.append({"name": name, "missing": str(missing)})
    return rows


def _timed(step: Callable[[int], object]) -> dict[str, Any]:
    started = time.perf_counter_ns()
    step(0)
    estimate = max(1, time.perf_counter_ns() - started)
    count = int(max(_LEAST, min(_MOST, _SECONDS * 1e9 / estimate)))
    taken = np.zeros(count)
    for i in range(count):
        started = time.perf_counter_ns()
        step(i)
        taken[i] = time.perf_counter_ns() - started
    return summary(taken)


def _samples(work: Workload) -> tuple[list[Any], list[Any]]:
    """Rows h in float64, and targets in the head's units or labels."""
    rows = [work.model.features(*x).astype(np.float64) for x in work.inputs]
    return rows, [work.model.to_head_units(y) for y in work.targets]


def _reference(work: Workload) -> Callable[[int], object]:
    head = work.model.head
    reference = _reference_of(head)
    h, y = _samples(work)
    if head.config["output"] == "softmax":
        y = [np.eye(head.d_o)[labels] for labels in y]
    return lambda i: reference.update(h[i % len(h)], y[i % len(y)])


def _reference_of(head: Head) -> ReferenceHead | ReferenceBank | ReferenceMembers:
    c, means = head.config, [layer.mean for layer in head.layers]
    config = {key: value for key, value in c.items() if key not in ("widths", "dtype", "max_rows")}
    if c["drift"] != "auto":
        return ReferenceHead(means, **config)
    del config["drift"], config["rule"]
    linear = len(means) == 1 and c["output"] == "gaussian" and c["covariance"] != "diagonal"
    if not linear or c["input_var"] > 0:
        return ReferenceBank(means, **config)
    prior_var = None if c["prior_var"] is None else c["prior_var"][0]
    noise = {"noise_var": c["noise_var"], "noise": c["noise"]}
    return ReferenceMembers(means[0][:, :-1], means[0][:, -1], prior_var=prior_var, **noise)


def _onnxruntime(work: Workload) -> Callable[[int], object]:
    _need("onnxruntime")
    trunk = Trunk(work.model.bundle().trunk, backend="onnxruntime")
    inputs = work.inputs
    return lambda i: trunk(*inputs[i % len(inputs)])


def _adam(work: Workload) -> Callable[[int], object]:
    _need("torch")
    import torch

    torch.set_num_threads(1)
    head = work.model.head
    readout = torch.nn.Linear(head.d, head.d_o)
    optimiser = torch.optim.Adam(readout.parameters(), 1e-3)
    rows, targets = _samples(work)
    h = [torch.tensor(row, dtype=torch.float32) for row in rows]
    labels = head.config["output"] == "softmax"
    y = [torch.tensor(target, dtype=torch.int64 if labels else torch.float32) for target in targets]
    loss_of = torch.nn.functional.cross_entropy if labels else torch.nn.functional.mse_loss

    def step(i: int) -> None:
        loss = loss_of(readout(h[i % len(h)]), y[i % len(y)])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()

    return step


def _retraining(work: Workload) -> Callable[[int], object]:
    _need("torch")
    if work.description["bundle"] != "cartpole":
        raise _MissingError("the network in torch is known only for the bundle cartpole")
    import torch

    from kbt_edge.networks import DecisionTransformer
    from kbt_edge.studies.baselines import Retraining

    torch.set_num_threads(1)
    learner = Retraining(DecisionTransformer(), memory=_MEMORY, learning_rate=1e-2)
    states, forces = [inputs[0] for inputs in work.inputs], [float(y) for y in work.targets]

    def retrain(_: int) -> None:
        for state, force in zip(states[:_MEMORY], forces[:_MEMORY], strict=True):
            learner.observe(state, force)

    return retrain


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise _MissingError(f"{package} is not installed")


# name: (how many samples one run takes in, what makes the function to be timed)
_BASELINES: Final[dict[str, tuple[int, Callable[[Workload], Callable[[int], object]]]]] = {
    "NumPy reference, update of the head": (1, _reference),
    "onnxruntime, trunk alone": (1, _onnxruntime),
    "torch, one Adam step on the readout": (1, _adam),
    f"torch, retraining 100 epochs on {_MEMORY} samples": (_MEMORY, _retraining),
}
