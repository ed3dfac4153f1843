"""``kbt-edge doctor``: what works on this board, what is missing, and what to change for a steady loop, with reasons.

Nothing is changed. Every finding is one of

    ok        as it should be
    change    works, and would work better: why, and the command
    missing   something that can be installed: what it is for, and the command
    broken    the package does not do its job
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import tempfile
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from kbt_edge import Head, _core
from kbt_edge.bench.board import Board, compiler, versions
from kbt_edge.bench.loops import TRUSTED_CLOCKS
from kbt_edge.errors import KbtError
from kbt_edge.trunk.cache import default_cache_dir
from kbt_edge.trunk.onnxruntime import NOT_AVAILABLE_FOR

__all__ = ["Finding", "Probe", "examine", "examine_board", "examine_package"]

HOT: Final = 75.0  # °C; a Raspberry Pi begins to slow down at 80


class Finding(NamedTuple):
    name: str
    state: str
    found: str
    why: str = ""
    do: str = ""


def examine() -> dict[str, Any]:
    """All findings as plain data; ``exit_code`` is 1 if something is broken."""
    board, probe = Board(), Probe()
    package = list(examine_package(board, probe))
    setup = list(examine_board(board, probe))
    return {
        "board": board.describe(),
        "state": board.state(),
        "works": [finding._asdict() for finding in package],
        "steady_loop": [finding._asdict() for finding in setup],
        "exit_code": int(any(finding.state == "broken" for finding in package)),
    }


class Probe:
    """Checks that try something on this machine. Tests replace it."""

    def installed(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def versions(self) -> dict[str, str | None]:
        return versions()

    def compiler(self) -> str | None:
        return compiler()

    def head_learns(self) -> str | None:
        """None, or what went wrong when a small head learned y = 1."""
        head = Head(np.zeros((1, 4)), hidden=(8,), prior_var=(1e-5, 1.0), noise_var=1e-2)
        h = np.linspace(-1, 1, 4)
        for _ in range(20):
            head.update(h, [1.0])
        mean = float(head.predict(h).mean[0])
        return None if abs(mean - 1) < 0.05 else f"after 20 samples of 1 it predicts {mean:.3g}"

    def trunk(self) -> tuple[str, str]:
        """Backend and its reason, for the bundle that ships with the package."""
        from kbt_edge.model import Model

        model = Model.load("kbt_edge:cartpole")
        model.predict(np.zeros(4))
        return model.trunk.backend, model.trunk.backend_reason

    def cache_problem(self) -> str | None:
        folder = default_cache_dir()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return None
        except OSError as error:
            return f"{folder}: {error.strerror}"

    def may_use_fifo(self) -> bool:
        policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except OSError:
            return False
        os.sched_setscheduler(0, policy, parameters)
        return True

    def may_lock_memory(self) -> bool:
        libc = ctypes.CDLL(None)
        if libc.mlockall(1):
            return False
        libc.munlockall()
        return True

    def memory_limit(self) -> str:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


def examine_package(board: Board, probe: Probe) -> Iterator[Finding]:
    """The main purpose: a head that learns, and a trunk that runs."""
    problem = probe.head_learns()
    if problem is None:
        yield Finding("head", "ok", f"learns; the core was built by {_core.COMPILER}")
    else:
        yield Finding(
            "head", "broken", problem, "this build of the core computes wrongly", "report it, with this output"
        )

    try:
        backend, reason = probe.trunk()
        yield Finding("trunk", "ok", f"the shipped bundle runs {backend} ({reason})")
        runs: str | None = backend
    except KbtError as error:
        how = "install what is missing below" if _gaps(probe) else "read the message; kbt_edge.Head works alone"
        yield Finding("trunk", "broken", str(error), "no bundle can run; a Head fed with your own h can", how)
        runs = None

    yield from _trunk_tools(board, probe, runs)

    found = probe.versions()
    for module, package, use, extra in (
        ("matplotlib", "matplotlib", "pictures of bench and demo; text and JSON work without", "demo"),
        ("scipy", "scipy", "kbt-edge demo", "demo"),
    ):
        if probe.installed(module):
            yield Finding(package, "ok", found.get(package) or "installed")
        else:
            yield Finding(package, "missing", "not installed", f"needed for {use}", f"pip install 'kbt-edge[{extra}]'")


def _gaps(probe: Probe) -> bool:
    return probe.compiler() is None or not probe.installed("emx_onnx_cgen") or not probe.installed("onnxruntime")


def _trunk_tools(board: Board, probe: Probe, runs: str | None) -> Iterator[Finding]:
    """onnxruntime, or generator and compiler: one way to run a trunk is enough, and compiled is the faster one."""
    version = probe.versions().get("onnxruntime")
    if probe.installed("onnxruntime"):
        threads = "one thread per trunk, set by kbt_edge"
        yield Finding("onnxruntime", "ok", f"{version or 'installed'}, {threads}")
    elif board.machine in NOT_AVAILABLE_FOR:
        yield Finding("onnxruntime", "ok", f"none exists for {board.machine}; compiled trunks work without it")
    else:
        state = "missing" if runs is None else "ok"
        why = "" if runs else "it runs any trunk, and checks compiled ones when they are built"
        yield Finding("onnxruntime", state, "not installed", why, "" if runs else "pip install onnxruntime")

    found = probe.compiler()
    if found is not None:
        yield Finding("C compiler", "ok", found)
    else:
        why = "turns a trunk into machine code, which is several times faster than onnxruntime on small trunks"
        yield Finding("C compiler", "missing", "none ($CC, cc, gcc, clang)", why, "sudo apt install gcc libc6-dev")
    if probe.installed("emx_onnx_cgen"):
        yield Finding("C generator", "ok", f"emx-onnx-cgen {probe.versions().get('emx-onnx-cgen') or ''}".strip())
    else:
        why = "writes the C of a trunk; or copy the trunk cache from a board of the same kind that has it"
        yield Finding(
            "C generator", "missing", "emx-onnx-cgen is not installed", why, "pip install 'kbt-edge[codegen]'"
        )

    problem = probe.cache_problem()
    if problem is None:
        yield Finding("trunk cache", "ok", str(default_cache_dir()))
    else:
        why = "a compiled trunk is built once and kept there"
        yield Finding("trunk cache", "change", problem, why, "make it writable, or set XDG_CACHE_HOME")


def examine_board(board: Board, probe: Probe) -> Iterator[Finding]:
    """What can make a control loop late."""
    yield from _clock_speed(board)
    yield from _heat(board)
    yield _kernel(board)
    yield _isolation(board)
    yield from _permissions(board, probe)
    yield from _idle(board)
    yield _swap(board)
    yield _clocksource(board)
    yield _threads(board, probe)


def _clock_speed(board: Board) -> Iterator[Finding]:
    policies = board.frequencies()
    if not policies:
        found = "the kernel offers no choice" + " (a virtual machine)" * board.virtual()
        yield Finding("governor", "ok", found)
        return
    slow = [policy for policy in policies if policy["governor"] != "performance"]
    if slow:
        found = ", ".join(f"{policy['governor']} on cpu {policy['cpus']}" for policy in slow)
        why = "the clock drops between two steps, so the next step starts slowly: p99 suffers most at low rates"
        do = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        yield Finding("governor", "change", found, why, do)
    else:
        yield Finding("governor", "ok", "performance")
    for policy in policies:
        most, possible = policy["max_mhz"], policy["hardware_max_mhz"]
        if most and possible and most < 0.99 * possible:
            yield Finding(
                "clock limit",
                "change",
                f"cpu {policy['cpus']} limited to {most:.0f} of {possible:.0f} MHz",
                "every step takes longer in proportion",
                "sudo nvpmodel -m 0 (Jetson), or raise scaling_max_freq",
            )


def _heat(board: Board) -> Iterator[Finding]:
    throttled = board.throttled()
    if throttled:
        power = any("voltage" in reason or "current" in reason for reason in throttled)
        why = "the firmware lowers the clock, so measurements do not show what the board can do"
        do = "use the board's own power supply and a short cable" if power else "add a heat sink or a fan"
        yield Finding("throttling", "change", ", ".join(throttled), why, do)
    elif throttled is not None:
        yield Finding("throttling", "ok", "none since boot")
    warm = {name: value for name, value in board.temperatures().items() if value >= HOT}
    if warm:
        found = ", ".join(f"{name} {value:.0f} °C" for name, value in warm.items())
        yield Finding("temperature", "change", found, "close to the thermal limit", "add a heat sink or a fan")
    elif board.temperatures():
        yield Finding("temperature", "ok", f"{max(board.temperatures().values()):.0f} °C")
    mode = board.state()["power_mode"]
    if mode is not None and not mode.startswith("MAXN"):
        why = "this power mode switches cores off and limits the clock"
        yield Finding("power mode", "change", mode, why, "sudo nvpmodel -m 0 && sudo jetson_clocks")
    elif mode is not None:
        yield Finding("power mode", "ok", mode)


def _kernel(board: Board) -> Finding:
    found = f"{board.kernel()}, preemption {board.preemption()}"
    if board.preemption() == "PREEMPT_RT":
        return Finding("kernel", "ok", found)
    why = "other kernels may hold a core for milliseconds; below 1 kHz with a fast step that is often tolerable"
    return Finding("kernel", "change", found, why, "install your distribution's PREEMPT_RT kernel")


def _isolation(board: Board) -> Finding:
    cores = len(board.glob("sys/devices/system/cpu/cpu[0-9]*"))
    isolated = board.read("sys/devices/system/cpu/isolated")
    if isolated:
        return Finding("isolated core", "ok", f"cpu {isolated}; run there with --cpu, or taskset -c {isolated}")
    if cores < 2:
        return Finding("isolated core", "ok", "a single core cannot be set aside")
    last = cores - 1
    why = "other processes and their interrupts share the core of the loop"
    do = f"append isolcpus={last} nohz_full={last} rcu_nocbs={last} to the kernel command line, then run on cpu {last}"
    return Finding("isolated core", "change", "none", why, do)


def _permissions(board: Board, probe: Probe) -> Iterator[Finding]:
    if probe.may_use_fifo():
        yield Finding("FIFO priority", "ok", "permitted")
    else:
        why = "without it any process can preempt the loop in the middle of a step"
        do = 'echo "@realtime - rtprio 95" | sudo tee -a /etc/security/limits.d/realtime.conf; '
        do += "sudo groupadd -f realtime; sudo usermod -aG realtime $USER; log in again"
        yield Finding("FIFO priority", "change", "not permitted to this user", why, do)
    if probe.may_lock_memory():
        yield Finding("locked memory", "ok", "permitted")
    else:
        why = "a page fetched from disk takes milliseconds"
        do = 'echo "@realtime - memlock unlimited" | sudo tee -a /etc/security/limits.d/realtime.conf; log in again'
        yield Finding("locked memory", "change", f"limited to {probe.memory_limit()}", why, do)
    runtime = board.read("proc/sys/kernel/sched_rt_runtime_us")
    period = board.read("proc/sys/kernel/sched_rt_period_us")
    if runtime == "-1":
        yield Finding("FIFO share", "ok", "unlimited: a loop that never sleeps hangs its core")
    elif runtime and period and runtime.isdigit() and period.isdigit() and int(period):
        share = 100 * int(runtime) / int(period)
        yield Finding("FIFO share", "ok", f"{share:.0f} % of each {int(period) / 1e6:g} s; a paced loop stays below it")


def _idle(board: Board) -> Iterator[Finding]:
    """Sleep states that take longer to leave than a fast step takes."""
    slow = []
    for state in board.glob("sys/devices/system/cpu/cpu0/cpuidle/state[0-9]*"):
        folder = f"sys/devices/system/cpu/cpu0/cpuidle/{state.name}"
        latency, off = board.read(f"{folder}/latency"), board.read(f"{folder}/disable")
        if latency and latency.isdigit() and int(latency) >= 50 and off != "1":
            slow.append(f"{board.read(f'{folder}/name')} ({latency} µs)")
    if slow:
        why = "a core that sleeps deeply between two steps wakes up late"
        do = "hold /dev/cpu_dma_latency open with a 0 written to it while the loop runs, or boot with cpuidle.off=1"
        yield Finding("idle states", "change", ", ".join(slow), why, do)
    else:
        yield Finding("idle states", "ok", "none takes 50 µs or more to leave, or the kernel does not say")


def _swap(board: Board) -> Finding:
    areas = (board.read("proc/swaps") or "").splitlines()[1:]
    if not areas:
        return Finding("swap", "ok", "off")
    names = ", ".join(line.split()[0] for line in areas)
    why = "a page of the loop may be on disk when it is needed, unless memory is locked"
    return Finding("swap", "change", names, why, "lock memory (mlockall), or sudo swapoff -a")


def _clocksource(board: Board) -> Finding:
    source = board.clocksource()
    wanted = TRUSTED_CLOCKS.get(board.machine)
    if source is None or wanted is None or source == wanted:
        return Finding("clock source", "ok", source or "the kernel does not say")
    why = "every reading of the time is a system call and costs a microsecond"
    if board.virtual():
        return Finding("clock source", "ok", f"{source} (a virtual machine); bench uses CLOCK_MONOTONIC")
    return Finding("clock source", "change", f"{source} instead of {wanted}", why, f"boot with clocksource={wanted}")


def _threads(board: Board, probe: Probe) -> Finding:
    setting = probe.environment("OMP_NUM_THREADS")
    if setting == "1":
        return Finding("threads", "ok", "OMP_NUM_THREADS=1")
    why = "NumPy's BLAS and your own onnxruntime sessions start a thread per core, which compete with the loop"
    found = f"OMP_NUM_THREADS={setting}" if setting else "OMP_NUM_THREADS is not set"
    return Finding("threads", "change", found, why, "export OMP_NUM_THREADS=1; own sessions: intra_op_num_threads = 1")
