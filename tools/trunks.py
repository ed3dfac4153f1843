"""Compiled trunks of transformers: memory, and time beside onnxruntime.

    python tools/trunks.py [NAME ...]        # some of the models below; default: all

Prints for each model: the most bytes of values that are needed at the same time, the stack that the compiled trunk
takes, microseconds of both backends (median and p99), the ratio of the medians, the largest difference relative to the
largest output, and what ``backend="auto"`` takes. Weights are random. Both backends run on one thread and take turns,
in one process that is pinned to one processor.

The decision transformer and the vision transformer need the package ``transformers``; without it they are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

from kbt_edge import bundle as bundles  # noqa: E402
from kbt_edge.onnxfile import read_onnx  # noqa: E402
from kbt_edge.trunk import Trunk, build  # noqa: E402
from kbt_edge.trunk.source import CArray, trunk_source  # noqa: E402

ROUNDS = 1000
# Operators whose output has the numbers of their input in the same order.
VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
BYTES = {1: 4, 6: 4, 7: 8, 9: 1, 11: 8}


# ---- models ----------------------------------------------------------------------------------------------------------


def decision_transformer() -> Any:
    """Hopper: 20 steps of return, state and action are 60 tokens."""
    import torch
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=11,
        act_dim=3,
        hidden_size=128,
        n_layer=3,
        n_head=1,
        max_ep_len=1000,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = DecisionTransformerModel(config)

    class Hopper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, states: Any, actions: Any, returns: Any, timesteps: Any) -> Any:
            mask = torch.ones(1, 20, dtype=torch.long)
            return self.model(states, actions, None, returns, timesteps, mask).last_hidden_state

    return Hopper(), (torch.randn(1, 20, 11), torch.randn(1, 20, 3), torch.randn(1, 20, 1), torch.arange(20)[None])


def vision_transformer() -> Any:
    import torch
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=8
    )
    model = ViTModel(config, add_pooling_layer=False)

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: Any) -> Any:
            return self.model(image).last_hidden_state

    return Rows(), (torch.randn(1, 3, 32, 32),)


def encoder(d: int, layers: int, length: int, causal: bool = False) -> Any:
    import torch
    from torch import nn

    activation = "gelu" if causal else "relu"
    layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, activation=activation, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
            return self.layers(x, mask=mask, is_causal=causal)

    network = Encoder()
    for parameter in network.parameters():  # untrained layers are copies of each other
        parameter.data += 0.02 * torch.randn_like(parameter)
    return network, (torch.randn(1, length, d),)


MODELS: dict[str, Callable[[], Any]] = {
    "decision-transformer": decision_transformer,
    "vision-transformer": vision_transformer,
    "encoder-64x2-16": lambda: encoder(64, 2, 16),
    "encoder-64x4-32": lambda: encoder(64, 4, 32),
    "encoder-256x2-16": lambda: encoder(256, 2, 16),
    "encoder-256x4-32": lambda: encoder(256, 4, 32),
    "causal-gelu-64x2-16": lambda: encoder(64, 2, 16, causal=True),
}
HUGGING_FACE = {"decision-transformer", "vision-transformer"}
SHIPPED = ("cartpole", "tokens")


def onnx_file(name: str, folder: Path) -> Path:
    if name in SHIPPED:
        return bundles.find(name) / "trunk.onnx"
    import torch

    from kbt_edge.export import export_trunk

    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, example = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_trunk(module.eval(), example, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


# ---- memory ----------------------------------------------------------------------------------------------------------


def needed_bytes(data: bytes) -> int:
    """The most bytes of values between the inputs and the output, itself included, that are needed at the same time."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(data))
    graph = model.graph
    sizes = {}
    for value in [*graph.value_info, *graph.output]:
        tensor = value.type.tensor_type
        sizes[value.name] = BYTES[tensor.elem_type] * math.prod(n.dim_value for n in tensor.shape.dim)
    base: dict[str, str] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, node in enumerate(graph.node):
        for name in (*node.input, *node.output):
            if node.op_type in VIEWS and name == node.output[0]:
                base[name] = base.get(node.input[0], node.input[0])
            value = base.get(name, name)
            if value in sizes and node.op_type != "Constant":
                first.setdefault(value, number)
                last[value] = number
    return max(
        sum(sizes[name] for name in first if first[name] <= number <= last[name]) for number in range(len(graph.node))
    )


def stack_bytes(data: bytes, trunk: Trunk) -> int:
    """Frames of the run function, the network, its largest node, and the product and what it calls."""
    kinds = {"float32": "float", "int64": "int64_t"}
    inputs = [CArray(spec.shape, kinds[spec.dtype], spec.limit) for spec in trunk.inputs]
    model = read_onnx(data)
    shape = tuple(n for n in model.graph.outputs[0].shape or () if isinstance(n, int))
    command, _ = build.find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = trunk_source(data, model, inputs, CArray(shape, "float"))
        (Path(folder) / "trunk.c").write_text(source)
        flags = [flag for flag in build.FLAGS if flag != "-shared"]
        subprocess.run([*command, *flags, "-c", "-w", "-fstack-usage", "trunk.c"], cwd=folder, check=True)
        frames = [int(line.split("\t")[1]) for line in (Path(folder) / "trunk.su").read_text().splitlines()]
    return sum(sorted(frames)[-5:])


# ---- time ------------------------------------------------------------------------------------------------------------


def measured(compiled: Trunk, reference: Trunk) -> tuple[dict[str, Any], float]:
    """Microseconds of each run, and the largest difference relative to the largest output."""
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {"compiled": [], "onnxruntime": []}
    worst = 0.0
    for turn in range(ROUNDS):
        x = [
            rng.standard_normal(spec.shape).astype(np.float32)
            if spec.dtype == "float32"
            else rng.integers(0, spec.limit or 1, spec.shape)
            for spec in compiled.inputs
        ]
        h = {}
        for trunk in (compiled, reference) if turn % 2 else (reference, compiled):
            start = time.perf_counter()
            h[trunk.backend] = trunk(*x)
            taken[trunk.backend].append(1e6 * (time.perf_counter() - start))
        largest = float(np.abs(h["onnxruntime"]).max())
        worst = max(worst, float(np.abs(h["compiled"] - h["onnxruntime"]).max()) / largest)
    return {name: np.array(times[ROUNDS // 10 :]) for name, times in taken.items()}, worst


def report(name: str, path: Path, cache: Path) -> str:
    data = path.read_bytes()
    begun = time.perf_counter()
    compiled = Trunk(path, backend="compiled", cache_dir=cache)
    built = time.perf_counter() - begun
    times, worst = measured(compiled, Trunk(path, backend="onnxruntime"))
    needed, stack = needed_bytes(data), stack_bytes(data, compiled)
    ours, theirs = times["compiled"], times["onnxruntime"]
    columns = [
        f"{needed:,}",
        f"{stack:,}",
        f"{stack / needed:.2f}",
        f"{np.median(ours):,.1f} / {np.percentile(ours, 99):,.1f}",
        f"{np.median(theirs):,.1f} / {np.percentile(theirs, 99):,.1f}",
        f"{np.median(ours) / np.median(theirs):.2f}",
        f"{worst:.1e}",
        Trunk(path, cache_dir=cache).backend,
        f"{built:.1f}",
    ]
    return f"| {name} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join([*MODELS, *SHIPPED])}")
    names = parser.parse_args().names or [*MODELS, *SHIPPED]
    unknown = sorted(set(names) - {*MODELS, *SHIPPED})
    if unknown:
        parser.error(f"NAME: expected some of {', '.join([*MODELS, *SHIPPED])}, got {', '.join(unknown)}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    head = ["model", "values, bytes", "stack, bytes", "ratio", "compiled, µs", "onnxruntime, µs", "ratio"]
    head += ["difference", "auto", "built, s"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            if name in HUGGING_FACE and importlib.util.find_spec("transformers") is None:
                print(f"{name} needs the package transformers; left out", file=sys.stderr)
                continue
            print(report(name, onnx_file(name, Path(scratch)), Path(scratch) / "cache"), flush=True)


if __name__ == "__main__":
    main()
