"""The runners of compare_peers.py: the stream that every head learns, our head, and the peers."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from racing import SkipError

D, HIDDEN, NOISE_VAR = 16, 32, 1e-2
SAMPLES = 200  # in the stream that every head learns, again and again


@dataclass(frozen=True)
class Stream:
    """A trained readout, and samples of a changed one."""

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
        """Check that a runner learns."""

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
        """Calls pytagi's C++ directly, with targets as lists and without reading the outputs."""
        core = self.core
        core.forward(h, None)
        self.core_updater.update(core.output_z_buffer, y, self.noise_list, core.input_delta_z_buffer)
        core.backward()
        core.step()

    def empty_calls(self, _: object) -> tuple[int, ...]:
        """As many calls into C++ as lean_update makes, each doing nothing."""
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
