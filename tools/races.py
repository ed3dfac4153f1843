"""The races of compare_peers.py."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import HIDDEN, NOISE_VAR, SAMPLES, D, PytagiHead, Stream, jax_filter, our_head
from racing import Block, Goal, Nanoseconds, Race, SkipError, timed

ROOT = Path(__file__).resolve().parents[1]
FULL_SAMPLES = 50  # where a call takes a hundred microseconds
MEMORIES = (10, 20, 25, 50, 75, 100)  # the paper's
RETRAININGS = 5  # rounds of that race: one takes tenths of a second


def python_race(_: Path) -> Race:
    stream = Stream.drawn(SAMPLES)
    peer, reader = PytagiHead(), PytagiHead()
    stream.must_teach("pytagi", peer.mean, peer.update)
    stream.must_teach("pytagi", reader.mean, reader.update)
    reader.net.eval()
    neuron, diagonal = our_head(stream, "neuron"), our_head(stream, "diagonal")
    return Race(
        f"Head {D} → {HIDDEN} → 1 from Python against pytagi",
        {
            "Head.update, neuron": timed(neuron.update, stream.h, stream.y),
            "Head.update, diagonal": timed(diagonal.update, stream.h, stream.y),
            "pytagi forward + update": timed(peer.update, stream.h, stream.y),
            "Head.predict, neuron": timed(neuron.predict, stream.h),
            "Head.predict, diagonal": timed(diagonal.predict, stream.h),
            "pytagi forward": timed(reader.net, stream.h),
        },
        (
            Goal("Head.update, neuron", "pytagi forward + update", 6.0),
            Goal("Head.update, diagonal", "pytagi forward + update", None),
            Goal("Head.predict, neuron", "pytagi forward", 2.5),
            Goal("Head.predict, diagonal", "pytagi forward", None),
        ),
    )


class Rls:
    """One filter in NumPy: recursive least squares of 16 inputs and a bias. No array is made in an update."""

    def __init__(self, weight: np.ndarray, dtype: type) -> None:
        self.w = np.append(weight, 0.0).astype(dtype)
        self.P = (1e3 * np.eye(D + 1)).astype(dtype)
        self.z, self.gain, self.outer = np.ones(D + 1, dtype), np.empty(D + 1, dtype), np.empty((D + 1, D + 1), dtype)
        self.scaled = np.empty(D + 1, dtype)
        self.column = self.scaled[:, None]
        self.noise = dtype(NOISE_VAR)

    def mean(self, h: np.ndarray) -> float:
        self.z[:-1] = h
        return float(self.w @ self.z)

    def update(self, h: np.ndarray, y: np.ndarray) -> None:
        z, P, gain = self.z, self.P, self.gain
        z[:-1] = h
        np.dot(P, z, out=gain)
        spread = self.noise + z.dot(gain)
        error = y[0] - self.w.dot(z)
        np.divide(gain, spread, out=self.scaled)
        np.multiply(self.column, gain, out=self.outer)
        P -= self.outer
        self.scaled *= error
        self.w += self.scaled


def default_race(_: Path) -> Race:
    import kbt_edge as kbt

    stream = Stream.drawn(SAMPLES)
    head, single = kbt.Head(stream.weight), kbt.Head(stream.weight, drift=0.0)
    peers = {
        "RLS in NumPy, float32": Rls(stream.weight, np.float32),
        "RLS in NumPy, float64": Rls(stream.weight, np.float64),
    }
    for name, ours in (("Head", head), ("Head, one filter", single)):
        stream.must_teach(name, lambda h, ours=ours: ours.predict(h).mean[0], ours.update)
    for name, peer in peers.items():
        stream.must_teach(name, peer.mean, peer.update)
    wide = [h.astype(np.float64) for h in stream.h], [y.astype(np.float64) for y in stream.y]
    columns = {"RLS in NumPy, float32": (stream.h, stream.y), "RLS in NumPy, float64": wide}
    return Race(
        f"the default head {D} → 1 from Python, eight members, against one filter in NumPy",
        {
            "Head.update": timed(head.update, stream.h, stream.y),
            "Head.update, drift=0": timed(single.update, stream.h, stream.y),
        }
        | {name: timed(peer.update, *columns[name]) for name, peer in peers.items()},
        (
            Goal("Head.update", "RLS in NumPy, float32", 1 / 0.7),
            Goal("Head.update", "RLS in NumPy, float64", 1 / 0.7),
            Goal("Head.update, drift=0", "RLS in NumPy, float32", None),
        ),
    )


def c_loop(folder: Path) -> ctypes.CDLL:
    """compare_peers.c, linked against the installed library."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    try:
        from cabi import build_with_installed, compiler

        cc = compiler("cc", "gcc", "clang")
        if cc is None:
            raise SkipError("no C compiler (cc, gcc or clang)")
        target = folder / "compare_peers.so"
        build_with_installed(cc, Path(__file__).with_suffix(".c"), target, "-shared", "-fPIC")
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        raise SkipError(f"the installed libkbt: {error}") from error
    library = ctypes.CDLL(str(target))
    library.open_head.restype = ctypes.c_void_p
    library.open_head.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.time_calls.argtypes = [pointer, integer, pointer, pointer, integer, integer, pointer]
    return library


def c_block(library: ctypes.CDLL, head: Any, verb: int, stream: Stream) -> Block:
    """Calls of ``kbt_predict`` (0) or ``kbt_update`` (1) on a head that starts in the state of ``head``."""
    blob = head.to_bytes()
    twin = library.open_head(blob, len(blob))
    if not twin:
        raise RuntimeError("libkbt rejects the state of a Head")
    h, y, taken = np.array(stream.h), np.array(stream.y), np.zeros(len(stream.h), np.int64)

    def block() -> Nanoseconds:
        status = library.time_calls(twin, verb, h.ctypes.data, y.ctypes.data, D, len(h), taken.ctypes.data)
        if status:
            raise RuntimeError(f"libkbt: status {status}")
        return taken.copy()

    return block


def c_race(folder: Path) -> Race:
    stream = Stream.drawn(SAMPLES)
    peer, lean = PytagiHead(), PytagiHead()
    library = c_loop(folder)
    lists = [[float(y[0])] for y in stream.y]
    stream.must_teach("pytagi", peer.mean, peer.update)
    stream.must_teach("pytagi, lean", lean.mean, lambda h, y: lean.lean_update(h, y.tolist()))
    neuron, diagonal = our_head(stream, "neuron"), our_head(stream, "diagonal")

    def notes(medians: dict[str, float]) -> list[str]:
        crossings = medians["six empty calls into pytagi"]
        ratio = (medians["pytagi forward + update, lean"] - crossings) / medians["kbt_update, neuron"]
        return [
            "pytagi ships no C or C++ interface. The lean way goes straight to its extension module, in six calls, and "
            f"leaves the outputs there; six empty calls take {crossings:.2f} µs. Without them: {ratio:.2f} times."
        ]

    return Race(
        f"the same head in C against pytagi's forward + update, {D} → {HIDDEN} → 1",
        {
            "kbt_update, neuron": c_block(library, neuron, 1, stream),
            "kbt_update, diagonal": c_block(library, diagonal, 1, stream),
            "kbt_predict, neuron": c_block(library, neuron, 0, stream),
            "pytagi forward + update": timed(peer.update, stream.h, stream.y),
            "pytagi forward + update, lean": timed(lean.lean_update, stream.h, lists),
            "six empty calls into pytagi": timed(lean.empty_calls, stream.h),
        },
        (
            Goal("kbt_update, neuron", "pytagi forward + update", 10.0),
            Goal("kbt_update, neuron", "pytagi forward + update, lean", None),
            Goal("kbt_update, diagonal", "pytagi forward + update", None),
        ),
        notes=notes,
    )


def full_race(folder: Path) -> Race:
    stream = Stream.drawn(SAMPLES)
    short = Stream(stream.weight, stream.h[:FULL_SAMPLES], stream.y[:FULL_SAMPLES])
    layers = (HIDDEN * (D + 1), HIDDEN + 1)
    joint, per_layer = jax_filter(stream, (sum(layers),)), jax_filter(stream, layers)
    head = our_head(stream, "full")
    packed = list(np.hstack((np.array(short.h), np.array(short.y))))
    notes = []
    runners = {
        "Head.update, full": timed(head.update, short.h, short.y),
        "JAX filter, joint": timed(joint, packed),
        "JAX filter, per layer": timed(per_layer, packed),
    }
    try:
        runners["kbt_update, full (in C)"] = c_block(c_loop(folder), head, 1, short)
    except SkipError as reason:
        notes.append(f"not timed in C: {reason}")
    return Race(
        f"full covariance, {sum(layers)} weights ({layers[0]} + {layers[1]}), against an EKF compiled by JAX",
        runners,
        (
            Goal("Head.update, full", "JAX filter, joint", 1.5),
            Goal("Head.update, full", "JAX filter, per layer", 1.5),
        ),
        notes=lambda _: notes,
    )


def our_model() -> Any:
    import kbt_edge as kbt

    try:
        shipped = kbt.Model.load("kbt_edge:cartpole", backend="compiled")
        readout = shipped.head.layers[-1].mean  # the shipped head is linear: give it the hidden layer of the peers
        head = kbt.Head(readout[:, :-1], readout[:, -1], hidden=(HIDDEN,), prior_var=(1e-6, 10.0), noise_var=1e-3)
        scaling = ("input_mean", "input_scale", "output_offset", "output_scale")
        units = {name: getattr(shipped, name) for name in scaling}
        return kbt.Model(shipped.bundle().trunk, head, backend="compiled", **units)
    except kbt.KbtError as error:
        raise SkipError(f"the compiled trunk: {error}") from error


def cartpole_samples() -> tuple[list[Any], list[float]]:
    from kbt_edge.studies import cartpole

    try:
        gain = cartpole.lqr_gain(cartpole.NEW)
    except ImportError as error:
        raise SkipError(f"the cart-pole's samples: {error}") from error
    states, forces = cartpole.sample_pairs(np.random.default_rng(0), SAMPLES, gain)
    return list(states), forces.tolist()


def step_of(model: Any) -> Callable[[Any, Any], None]:
    def step(state: Any, force: float) -> None:
        model.predict(state)
        model.observe(force)

    return step


def step_race(_: Path) -> Race:
    head = PytagiHead()
    states, forces = cartpole_samples()
    model = our_model()
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise SkipError(f"onnxruntime: {error}") from error
    bundle = model.bundle()
    (given,) = bundle.inputs
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(bundle.trunk, options, providers=["CPUExecutionProvider"])
    binding, output = session.io_binding(), session.get_outputs()[0]
    x, rows = np.zeros(given.shape, np.float32), np.zeros(output.shape, np.float32)
    binding.bind_input(given.name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output(output.name, "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
    h, target = rows.reshape(-1), np.zeros(1, np.float32)
    in_scale, out_scale = np.array(given.scale), bundle.scale[0]

    def peer_step(state: Any, force: float) -> None:
        """The shortest way: bound buffers, and the prediction left in the units of the network."""
        np.divide(state, in_scale, out=x[0], casting="same_kind")
        session.run_with_iobinding(binding)
        head.net(h)
        target[0] = force / out_scale
        head.learn(target)

    def trunk_alone(state: Any) -> None:
        np.divide(state, in_scale, out=x[0], casting="same_kind")
        session.run_with_iobinding(binding)

    ours = "Model.predict + observe, compiled trunk"
    return Race(
        "the whole step of the shipped cart-pole, 4 → transformer → 16 → 32 → 1, against onnxruntime + pytagi",
        {
            ours: timed(step_of(model), states, forces),
            "onnxruntime + pytagi": timed(peer_step, states, forces),
            "of which onnxruntime": timed(trunk_alone, states),
        },
        (Goal(ours, "onnxruntime + pytagi", 10.0),),
    )


def retraining_race(_: Path) -> Race:
    states, forces = cartpole_samples()
    model = our_model()
    try:
        import torch

        from kbt_edge.networks import DecisionTransformer
        from kbt_edge.studies.baselines import Retraining
    except ImportError as error:
        raise SkipError(f"torch: {error}") from error
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = DecisionTransformer()

    def one_retraining(memory: int) -> Block:
        """In CPU time: other processes interrupt something this long, but not the median of our steps."""
        learner = Retraining(network, memory, learning_rate=1e-3)

        def block() -> Nanoseconds:
            for state, force in zip(states[: memory - 1], forces[: memory - 1], strict=True):
                learner.observe(state, force)
            started = time.process_time_ns()
            learner.observe(states[memory - 1], forces[memory - 1])
            return np.array([time.process_time_ns() - started])

        return block

    ours = "Model.predict + observe, compiled trunk"
    names = {memory: f"retraining, memory {memory}" for memory in MEMORIES}

    def notes(medians: dict[str, float]) -> list[str]:
        shared = [f"{memory}: {medians[name] / memory / medians[ours]:,.0f}" for memory, name in names.items()]
        return [
            "The paper retrains once a memory is full. The cost of one retraining shared out over the samples that it "
            f"waited for, against our step, by memory: {', '.join(shared)}."
        ]

    return Race(
        "the whole step against one retraining of the transformer: Adam, 100 epochs over a memory in batches of 25",
        {ours: timed(step_of(model), states, forces)} | {name: one_retraining(m) for m, name in names.items()},
        tuple(Goal(ours, name, 5000.0) for name in names.values()),
        rounds=RETRAININGS,
        notes=notes,
    )


RACES: dict[str, Callable[[Path], Race]] = {
    "default": default_race,
    "python": python_race,
    "c": c_race,
    "full": full_race,
    "step": step_race,
    "retraining": retraining_race,
}
