"""How fast kbt_edge is beside its peers, on this machine. For maintainers.

    python tools/compare_peers.py --setup peers      # once, and after every change: an environment with the peers in it
    peers/bin/python tools/compare_peers.py [--json] [--only RACE ...] [--cpu N] [--rounds N]

The races, each with the factor that it must be won by:

python      ``Head.update`` (6) and ``predict`` (2.5) against pytagi, which keeps a diagonal; 16 → 32 → 1, float32
c           ``kbt_update`` (forward and backward) in a C loop against pytagi's forward and update (10)
full        ``Head.update`` with the full covariance of each layer against an EKF compiled by JAX (1.5)
step        ``Model.predict`` + ``observe`` with a compiled trunk against onnxruntime and a pytagi head (10)
retraining  the same step against one retraining of the whole transformer from a memory, as in the paper (5,000)

All runners of a race live in one process, pinned to one core, with one thread each. They take turns in blocks, so that
all see the same disturbances and each its own warm caches. A ratio is the median over the rounds of a round's ratio of
medians; beside it stands the range of the middle 80 % of the rounds. The cost of reading the clock is printed and not
subtracted. Every head must first show that it learns. What cannot be set up is skipped, and the reason printed.

Exits with 1 when a race was lost, with 0 otherwise, also when races were skipped.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("pytagi==0.2.1", "nvidia-nccl-cu12", "jax")  # beside the train and codegen extras of the package
D, HIDDEN, NOISE_VAR = 16, 32, 1e-2
SAMPLES = 200  # of the stream that every head learns, again and again
FULL_SAMPLES = 50  # of them, where a call takes a hundred microseconds
MEMORIES = (10, 20, 25, 50, 75, 100)  # the paper's
RETRAININGS = 5  # rounds of that race: one takes tenths of a second
ENOUGH_FOR_P99 = 200  # calls

Nanoseconds = NDArray[np.int64]
Block = Callable[[], Nanoseconds]  # makes a block of calls and says how long each took


class SkipError(Exception):
    """A race that cannot be set up here, and why."""


@dataclass(frozen=True)
class Goal:
    ours: str
    peer: str
    factor: float | None  # None: for information


@dataclass(frozen=True)
class Race:
    title: str
    runners: dict[str, Block]
    goals: tuple[Goal, ...]
    rounds: int | None = None  # None: as many as asked for
    notes: Callable[[dict[str, float]], list[str]] = lambda medians: []  # from medians in µs


# ---- running and judging ---------------------------------------------------------------------------------------------


def run(race: Race, rounds: int) -> dict[str, list[Nanoseconds]]:
    """Runner → its blocks, one per round. The first block of each warms up and does not count."""
    taken: dict[str, list[Nanoseconds]] = {name: [] for name in race.runners}
    gc.collect()
    gc.disable()
    try:
        for turn in range(1 + (race.rounds or rounds)):
            for name, block in race.runners.items():
                nanoseconds = block()
                if turn:
                    taken[name].append(nanoseconds)
    finally:
        gc.enable()
    return taken


def figures(blocks: Sequence[Nanoseconds]) -> dict[str, float | int | None]:
    """Median and 99th percentile of single calls; of a few calls there is no such percentile."""
    calls = np.concatenate(blocks) / 1e3
    p99 = float(np.percentile(calls, 99)) if calls.size >= ENOUGH_FOR_P99 else None
    return {"median_us": float(np.median(calls)), "p99_us": p99, "max_us": float(calls.max()), "calls": calls.size}


def judged(goal: Goal, taken: dict[str, list[Nanoseconds]]) -> dict[str, Any]:
    """How many times as long the peer takes."""
    ratios = [
        float(np.median(peer) / np.median(ours)) for ours, peer in zip(taken[goal.ours], taken[goal.peer], strict=True)
    ]
    low, ratio, high = (float(q) for q in np.percentile(ratios, (10, 50, 90)))
    met = None if goal.factor is None else ratio >= goal.factor
    return {"ours": goal.ours, "peer": goal.peer, "ratio": ratio, "low": low, "high": high,
            "goal": goal.factor, "met": met}  # fmt: skip


def timed(call: Callable[..., Any], *columns: Sequence[Any]) -> Block:
    """A block of calls with one or two arguments each."""
    clock = time.perf_counter_ns

    def block() -> Nanoseconds:
        taken = []
        if len(columns) == 1:
            for x in columns[0]:
                started = clock()
                call(x)
                taken.append(clock() - started)
        else:
            for x, y in zip(*columns, strict=True):
                started = clock()
                call(x, y)
                taken.append(clock() - started)
        return np.array(taken)

    return block


# ---- the task of the heads -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """A readout that was trained, and samples of the one that it has become."""

    weight: NDArray[np.float64]  # (1, d)
    h: list[NDArray[np.float32]]  # (d,) each
    y: list[NDArray[np.float32]]  # (1,) each

    @classmethod
    def drawn(cls, samples: int) -> Stream:
        rng = np.random.default_rng(0)
        weight = rng.normal(size=(1, D))
        changed = weight + 0.5 * rng.normal(size=(1, D))
        h = rng.normal(size=(samples, D)).astype(np.float32)
        y = (h @ changed.T + 0.1 * rng.normal(size=(samples, 1))).astype(np.float32)
        return cls(weight, list(h), list(y))

    def must_teach(self, name: str, predict: Callable[[Any], Any], update: Callable[[Any, Any], Any]) -> None:
        """A runner that does not learn has nothing to do in a race."""

        def rmse() -> float:
            return float(np.sqrt(np.mean([(float(predict(h)) - float(y[0])) ** 2 for h, y in self.samples()])))

        before = rmse()
        for h, y in self.samples():
            update(h, y)
        after = rmse()
        if not after < 0.5 * before:
            raise RuntimeError(f"{name} does not learn: RMSE {before:.3g} before the stream, {after:.3g} after it")

    def samples(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        return zip(self.h, self.y, strict=True)


def our_head(stream: Stream, covariance: str) -> Any:
    import kbt_edge as kbt

    head = kbt.Head(stream.weight, np.zeros(1), hidden=(HIDDEN,), prior_var=(1e-5, 1.0), noise_var=NOISE_VAR,
                    covariance=covariance)  # fmt: skip
    stream.must_teach(f"Head, {covariance}", lambda h: head.predict(h).mean[0], head.update)
    return head


# ---- peers -----------------------------------------------------------------------------------------------------------


def pytagi() -> Any:
    """The package. It is linked against NCCL and Open MPI, which no call on a CPU uses."""
    found = importlib.util.find_spec("pytagi")
    if found is None:
        raise SkipError("pytagi is not installed")
    try:
        nccl = importlib.import_module("nvidia.nccl")
        ctypes.CDLL(str(Path(next(iter(nccl.__path__))) / "lib" / "libnccl.so.2"), mode=ctypes.RTLD_GLOBAL)
    except (ImportError, OSError):
        pass  # the system may have one; if not, the import below says so
    try:
        return importlib.import_module("pytagi.nn")
    except ImportError as error:
        raise SkipError(f"pytagi: {error} (Debian: apt install libopenmpi3; PyPI: nvidia-nccl-cu12)") from error


class PytagiHead:
    """Linear, ReLU, Linear on one thread: several would cost hundreds of microseconds in starting them."""

    def __init__(self) -> None:
        nn = pytagi()
        self.net = nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.net.set_threads(1)
        self.net.input_state_update = False
        self.updater = nn.OutputUpdater(self.net.device)
        self.noise = np.full(1, NOISE_VAR, np.float32)
        self.noise_list = [NOISE_VAR]
        self.core, self.core_updater = self.net._cpp_backend, self.updater._cpp_backend

    def mean(self, h: NDArray[np.float32]) -> float:
        return float(self.net(h)[0][0])

    def learn(self, y: NDArray[np.float32]) -> None:
        """The target of the latest forward pass."""
        net = self.net
        self.updater.update(net.output_z_buffer, y, self.noise, net.input_delta_z_buffer)
        net.backward()
        net.step()

    def update(self, h: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        self.net(h)
        self.learn(y)

    def lean_update(self, h: NDArray[np.float32], y: list[float]) -> None:
        """Past pytagi's Python: straight to its C++, targets as the lists it wants, outputs left where they are."""
        core = self.core
        core.forward(h, None)
        self.core_updater.update(core.output_z_buffer, y, self.noise_list, core.input_delta_z_buffer)
        core.backward()
        core.step()

    def empty_calls(self, _: object) -> tuple[int, ...]:
        """As many crossings into C++ as lean_update makes, with nothing to do there but to hand over a number."""
        core = self.core
        return (core.num_samples, core.num_samples, core.num_samples,
                core.num_samples, core.num_samples, core.num_samples)  # fmt: skip


def jax_filter(stream: Stream, blocks: Sequence[int]) -> Callable[[NDArray[np.float32]], None]:
    """An EKF over the weights of the same network, its covariance kept in blocks of these sizes; one call, one sample.

    One compiled function without a copy of its own: donated buffers, h and y in a single array, no asynchronous
    dispatch. It returns nothing but its state, where ``Head.update`` also gives NIS and likelihood.
    """
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise SkipError(f"jax: {error}") from error
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    inner = D * HIDDEN
    ends = np.cumsum([0, *blocks])

    def network(w: Any, h: Any) -> Any:
        z = jax.nn.relu(w[:inner].reshape(HIDDEN, D) @ h + w[inner : inner + HIDDEN])
        return w[inner + HIDDEN : -1] @ z + w[-1]

    def step(w: Any, covariances: Any, sample: Any) -> Any:
        mean, gradient = jax.value_and_grad(network)(w, sample[:D])
        parts = [gradient[start:end] for start, end in itertools.pairwise(ends)]
        gains = [P @ H for P, H in zip(covariances, parts, strict=True)]
        spread = NOISE_VAR + sum(H @ g for H, g in zip(parts, gains, strict=True))
        w = w + jnp.concatenate(gains) * ((sample[D] - mean) / spread)
        roots = [g * jax.lax.rsqrt(spread) for g in gains]
        return w, tuple(P - jnp.outer(v, v) for P, v in zip(covariances, roots, strict=True))

    rng = np.random.default_rng(1)
    first, last = rng.normal(0, 1 / np.sqrt(D), inner), rng.normal(0, 1 / np.sqrt(HIDDEN), HIDDEN)
    w = jnp.asarray(np.concatenate((first, np.zeros(HIDDEN), last, np.zeros(1))), jnp.float32)
    state: list[Any] = [w, tuple(0.1 * jnp.eye(n, dtype=jnp.float32) for n in blocks)]
    compiled, predict = jax.jit(step, donate_argnums=(0, 1)), jax.jit(network)

    def update(sample: NDArray[np.float32]) -> None:
        state[0], state[1] = compiled(state[0], state[1], sample)
        state[1][0].block_until_ready()  # and with it all that the call returned

    stream.must_teach(
        "the JAX filter", lambda h: predict(state[0], h), lambda h, y: update(np.concatenate((h, y)).astype(np.float32))
    )
    return update


# ---- races -----------------------------------------------------------------------------------------------------------


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


def c_loop(folder: Path) -> ctypes.CDLL:
    """compare_peers.c, linked against the installed library."""
    sys.path.insert(0, str(ROOT / "tests"))
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
        raise RuntimeError("libkbt refuses the state of a Head")
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
    "python": python_race,
    "c": c_race,
    "full": full_race,
    "step": step_race,
    "retraining": retraining_race,
}


# ---- the machine, and what is printed --------------------------------------------------------------------------------


def pin(cpu: int) -> int:
    """One core, one thread for every library that is loaded from now on."""
    os.sched_setaffinity(0, {cpu})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    return cpu


def setting(cpu: int) -> dict[str, Any]:
    import kbt_edge

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    versions = {"python": platform.python_version(), "kbt-edge": kbt_edge.__version__}
    for package in ("numpy", "pytagi", "jax", "jaxlib", "torch", "onnxruntime"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    ticks = [-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(10_000)]
    return {
        "machine": platform.machine(),
        "cpu": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "pinned_to": cpu,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
        "clock_us": float(np.median(ticks)) / 1e3,
        "versions": versions,
        "kbt_edge_from": str(Path(kbt_edge.__file__).parent),
    }


def text(race: dict[str, Any]) -> str:
    lines = [race["title"], f"  {'':<42}{'median µs':>14}{'p99 µs':>14}{'calls':>9}"]
    for name, row in race["runners"].items():
        median, p99 = microseconds(row["median_us"]), microseconds(row["p99_us"])
        lines.append(f"  {name:<42}{median:>14}{p99:>14}{row['calls']:>9,}")
    for row in race["ratios"]:
        digits = 0 if row["ratio"] >= 100 else 2
        value, low, high = (f"{row[key]:,.{digits}f}" for key in ("ratio", "low", "high"))
        verdict = "" if row["goal"] is None else f"   goal {row['goal']:,g}: {'met' if row['met'] else 'MISSED'}"
        lines.append(f"  {row['ours']} is {value} ({low} to {high}) times as fast as {row['peer']}{verdict}")
    lines += [textwrap.fill(note, 120, initial_indent="  ", subsequent_indent="  ") for note in race["notes"]]
    return "\n".join(lines)


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.{0 if value >= 10_000 else 2}f}"


def heading(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"{where['cpu']}, {where['machine']}, {where['cores']} cores, pinned to {where['pinned_to']}, one thread each; "
        f"load average {where['load_before']:.1f} at the start\n{versions}\n"
        f"kbt_edge from {where['kbt_edge_from']}; reading the clock takes {where['clock_us']:.2f} µs, in every figure\n"
    )


def set_up(folder: Path) -> int:
    print(f"an environment in {folder}: {', '.join(PEERS)}, and kbt-edge from {ROOT}", file=sys.stderr)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", *PEERS, f"{ROOT}[demo,train,codegen]",
               "--config-settings", f"build-dir={folder.resolve() / 'build'}"]  # fmt: skip
    if subprocess.run(install).returncode:
        print("compare_peers: pip failed", file=sys.stderr)
        return 2
    print(f"pytagi also needs Open MPI's libraries (Debian: apt install libopenmpi3). Then:\n  {python} {__file__}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make a virtual environment with the peers, and stop")
    parser.add_argument("--only", nargs="+", choices=RACES, metavar="RACE", help=f"some of: {', '.join(RACES)}")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each runner (default 40)")
    parser.add_argument("--cpu", type=int, help="the core to run on (default: the last one)")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    options = parser.parse_args()
    if options.setup is not None:
        return set_up(options.setup)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    allowed = sorted(os.sched_getaffinity(0))
    if options.cpu is not None and options.cpu not in allowed:
        parser.error(f"--cpu: expected one of {allowed}, got {options.cpu}")
    if importlib.util.find_spec("kbt_edge") is None:
        print("compare_peers: kbt_edge is not installed for this Python; --setup makes one with it", file=sys.stderr)
        return 2
    where = setting(pin(allowed[-1] if options.cpu is None else options.cpu))
    if not options.json:
        print(heading(where))
    races: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or RACES:
            try:
                race = RACES[name](Path(folder))
            except SkipError as reason:
                skipped[name] = str(reason)
                if not options.json:
                    print(f"{name}: skipped: {reason}\n", flush=True)
                continue
            taken = run(race, options.rounds)
            rows = {runner: figures(blocks) for runner, blocks in taken.items()}
            races[name] = {
                "title": race.title,
                "runners": rows,
                "ratios": [judged(goal, taken) for goal in race.goals],
                "notes": race.notes({runner: float(row["median_us"] or 0) for runner, row in rows.items()}),
            }
            if not options.json:
                print(text(races[name]) + "\n", flush=True)
    where["load_after"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps({"setting": where, "races": races, "skipped": skipped}, indent=2, ensure_ascii=False))
    lost = any(row["met"] is False for race in races.values() for row in race["ratios"])
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
