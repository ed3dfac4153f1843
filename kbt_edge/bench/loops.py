"""The measuring loops: back to back and paced, in C and in Python, with a preallocated recorder.

Readings of the clock are stored raw and converted to nanoseconds afterwards. In a Python loop the recorder's ``mark``
is a C function without arguments, so that no integer is allocated while measuring. Every step is recorded.
"""

from __future__ import annotations

import itertools
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kbt_edge import _core
from kbt_edge._progress import Tell
from kbt_edge.bench.figures import PERCENTILES, histogram, paced_figures, summary
from kbt_edge.bench.workload import SAMPLES, Workload
from kbt_edge.errors import KbtError

__all__ = ["TRUSTED_CLOCKS", "Harness", "LoopName", "back_to_back", "paced", "stops"]

Nanoseconds = NDArray[np.float64]
LoopName = Literal["c", "python"]

# If the kernel keeps time by the processor's counter, we do too: it is cheaper to read than the kernel's clock.
TRUSTED_CLOCKS: Final = {"x86_64": "tsc", "aarch64": "arch_sys_counter"}
SHARE: Final = 0.05  # of a figure may be the cost of the harness
_CALIBRATION_STEPS: Final = 20_000
_STEPS: Final = 20_000
_SECONDS: Final = 10.0
_WATCHED_NS: Final = 500_000_000
_MAX_STOPS: Final = 100_000


class Harness:
    """The clock and its cost, measured with an empty step by the same loops."""

    def __init__(self, clocksource: str | None, machine: str) -> None:
        trusted = clocksource is not None and TRUSTED_CLOCKS.get(machine) == clocksource
        self.use_counter = bool(_core.HAS_COUNTER) and trusted
        self.clock = f"processor counter ({clocksource})" if self.use_counter else "CLOCK_MONOTONIC"
        self._origin = _core.clocks()
        c, python = self._empty(self.use_counter)
        c_paced, python_paced = self._empty(False)  # a paced loop is timed by the clock that releases it
        while time.monotonic_ns() - self._origin[1] < 50_000_000:  # so that the counter's rate is known accurately
            pass
        rate = self._rate() if self.use_counter else 1.0
        self.c_overhead = rate * float(np.median(c))
        self.python_overhead = rate * float(np.median(python))
        self.python_spread = rate * float(np.percentile(python, 90)) - self.python_overhead
        self.paced_overhead = {"c": float(np.median(c_paced)), "python": float(np.median(python_paced))}

    def _empty(self, use_counter: bool) -> tuple[Nanoseconds, Nanoseconds]:
        """Intervals of an empty step, in C and in Python, in ticks of the clock."""
        stages = _core.Recorder(4 * _CALIBRATION_STEPS, use_counter)
        _core.Loop().stages(0, _CALIBRATION_STEPS, 1, 1, stages)
        marks = _core.Recorder(2 * _CALIBRATION_STEPS, use_counter)
        mark = marks.mark
        for _ in range(_CALIBRATION_STEPS):
            mark()
            mark()
        c, python = (np.diff(taken.stamps.reshape(-1, n), axis=1) for taken, n in ((stages, 4), (marks, 2)))
        return c.astype(np.float64), python.astype(np.float64)

    def recorder(self, marks: int) -> _core.Recorder:
        return _core.Recorder(marks, self.use_counter)

    def ns(self, recorder: _core.Recorder) -> Nanoseconds:
        """Readings since the recorder's first, in nanoseconds."""
        stamps = recorder.stamps
        ns: Nanoseconds = (stamps - stamps[0]).astype(np.float64) * (self._rate() if self.use_counter else 1.0)
        return ns

    def _rate(self) -> float:
        """Nanoseconds per tick since the harness was made."""
        ticks, now = _core.clocks()
        return (now - self._origin[1]) / (ticks - self._origin[0])

    def repeats(self, ns: float) -> int:
        """How often work of this length must run between two readings for the clock to cost at most half its share."""
        return max(1, math.ceil(2 * self.c_overhead / (SHARE * max(ns, 0.1))))

    def row(self, loop: str, stage: str, ns: Nanoseconds, overhead: float, repeat: int = 1) -> dict[str, Any]:
        """One line of the result. ``overhead``: the part of the interval that the harness costs."""
        each = ns / repeat
        figures = summary(each)
        overhead /= repeat
        share = overhead / figures["p50"] if figures["p50"] > 0 else math.inf
        if share > SHARE:  # too short for the clock
            return {"loop": loop, "stage": stage, "too_short": True, "below_ns": overhead / SHARE}
        return {
            "loop": loop,
            "stage": stage,
            "repeat": repeat,
            **figures,
            "overhead_share": share,
            "histogram": histogram(each),
        }


def back_to_back(work: Workload, harness: Harness, steps: int | None, rest: bool, tell: Tell) -> dict[str, Any]:
    """Stages and whole steps, one after the other without a pause, C and Python taking turns in blocks.

    ``steps``: None for the default number, or as many as fit into ``_SECONDS``.
    ``rest``: sleep between two blocks, because the kernel throttles a real-time process that never sleeps.
    """
    started = time.monotonic()
    _python_block(work, harness.recorder(3 * SAMPLES))  # warm
    if steps is None:
        fitting = _SECONDS / max(time.monotonic() - started, 1e-6) * SAMPLES / 3  # C twice, Python once
        steps = round(min(_STEPS, max(1000, fitting)))
    blocks = math.ceil(steps / SAMPLES)
    trunk, head, step = _repeats(work, harness)
    stages = harness.recorder(4 * SAMPLES * blocks)
    whole = harness.recorder(2 * SAMPLES * blocks)
    python = harness.recorder(3 * SAMPLES * blocks)
    trunk_alone = harness.recorder(0 if work.whole else 2 * SAMPLES * blocks)
    used = _Usage()
    for block in range(blocks):
        tell(f"back to back: {100 * block // blocks} % of {blocks * SAMPLES} steps")
        with used.counting():
            _must(work.loop.stages(0, SAMPLES, trunk, head, stages))
            _must(work.loop.steps(0, SAMPLES, step, whole))
            _python_block(work, python)
            if not work.whole:
                _trunk_block(work, trunk_alone)
        if rest:
            time.sleep(0.002)

    cuts = np.diff(harness.ns(stages).reshape(-1, 4), axis=1)
    c_step = np.diff(harness.ns(whole).reshape(-1, 2), axis=1)[:, 0]
    py = np.diff(harness.ns(python).reshape(-1, 3), axis=1)
    py_step = py.sum(axis=1)
    c_cost, py_cost = harness.c_overhead, harness.python_overhead
    rows = []
    if work.whole:
        rows.append(harness.row("c", "trunk", cuts[:, 0], c_cost, trunk))
    rows += [
        harness.row("c", "predict", cuts[:, 1], c_cost, head),
        harness.row("c", "observe", cuts[:, 2] - np.median(cuts[:, 1]) * (head - 1) / head, c_cost, head),
        harness.row("c", "step" if work.whole else "predict + observe", c_step, c_cost, step),
    ]
    if not work.whole:
        alone = np.diff(harness.ns(trunk_alone).reshape(-1, 2), axis=1)[:, 0]
        rows.append(harness.row("python", "trunk", alone, py_cost))
    rows += [
        harness.row("python", "trunk + predict", py[:, 0], py_cost),
        harness.row("python", "observe", py[:, 1], py_cost),
        harness.row("python", "step", py_step, 2 * py_cost),
    ]
    if work.whole and step == 1:
        # The same samples in the same order, so each Python step has its C step. The cost of the readings is
        # subtracted; what remains is their variation.
        difference = (py_step - 2 * py_cost) - (c_step - c_cost)
        rows.append(harness.row("python", "overhead", difference, harness.python_spread))
    return {"steps": blocks * SAMPLES, "rows": rows, **used.told()}


def stops(harness: Harness) -> dict[str, Any]:
    """How often a loop that only reads the clock is stopped on this core, and for how long.

    By interrupts, the kernel, firmware or a hypervisor: no step on this core can be steadier. It takes half a second,
    because the kernel throttles a real-time process that is busy for a whole one.
    """
    recorder = _core.Recorder(_MAX_STOPS * 2, False)
    shortest = max(1000, math.ceil(harness.paced_overhead["c"] / SHARE))
    recorder.watch(_WATCHED_NS, shortest)
    ends = recorder.stamps.astype(np.float64).reshape(-1, 2)
    lengths = ends[:, 1] - ends[:, 0]
    figures = summary(lengths) if len(lengths) else dict.fromkeys((*PERCENTILES, "max"))
    share = float(lengths.sum()) / _WATCHED_NS
    return {**figures, "per_second": len(lengths) * 1e9 / _WATCHED_NS, "share": share, "shortest_ns": shortest}


def paced(
    work: Workload,
    harness: Harness,
    loop: LoopName,
    rate_hz: float,
    deadline_ns: float,
    duration_s: float,
    spin_ns: int,
    tell: Tell,
) -> tuple[dict[str, Any], Nanoseconds, Nanoseconds]:
    """A control loop: released on absolute times, ``rate_hz`` a second. Returns figures, release jitter and response.

    It sleeps until ``spin_ns`` before a release and then busy-waits, so that the core is out of its power saving state
    when the step starts.

    Once a second, between two steps, it checks for Ctrl-C and shows progress. A delay by that counts like any other.
    """
    period = round(1e9 / rate_hz)
    steps = max(1, round(duration_s * 1e9 / period))
    at_a_time = max(1, round(1e9 / period))
    recorder = _core.Recorder(2 * steps, False)  # releases are times of CLOCK_MONOTONIC, so readings are too
    run = _paced_python if loop == "python" else _paced_c
    for _ in range(4):
        _warm(work, loop)
    used = _Usage()
    epoch = time.monotonic_ns() + 2 * period + 10_000_000
    recorder.pace(epoch, period, spin_ns)
    with used.counting():
        for first in range(0, steps, at_a_time):
            tell(f"paced, {loop}: {first * period / 1e9:.0f} of {steps * period / 1e9:.0f} s")
            run(work, first, min(at_a_time, steps - first), recorder)
    stamps = (recorder.stamps - np.uint64(epoch)).astype(np.int64).astype(np.float64).reshape(-1, 2)
    started, done = stamps[:, 0], stamps[:, 1]
    floor = harness.paced_overhead[loop] / SHARE
    figures = {"loop": loop, **paced_figures(started, done, float(period), deadline_ns, floor), **used.told()}
    rows = [figures[part] for part in ("release_jitter", "service", "response")]
    told = [row[name] for row in rows for name in PERCENTILES if row[name] is not None and row[name] > floor]
    smallest = min(told, default=floor)
    figures |= {"smallest_ns": smallest, "overhead_share": harness.paced_overhead[loop] / smallest}
    releases = period * np.arange(steps)
    return figures, started - releases, done - releases


# One block each.


def _python_block(work: Workload, recorder: _core.Recorder) -> None:
    mark, predict, observe = recorder.mark, work.model.predict, work.model.observe
    if len(work.inputs[0]) == 1:
        for (x,), y in zip(work.inputs, work.targets, strict=True):
            mark()
            predict(x)
            mark()
            observe(y)
            mark()
    else:
        for inputs, y in zip(work.inputs, work.targets, strict=True):
            mark()
            predict(*inputs)
            mark()
            observe(y)
            mark()


def _trunk_block(work: Workload, recorder: _core.Recorder) -> None:
    mark, features = recorder.mark, work.model.features
    for inputs in work.inputs:
        mark()
        features(*inputs)
        mark()


def _paced_c(work: Workload, first: int, steps: int, recorder: _core.Recorder) -> None:
    _must(work.loop.paced(first, steps, recorder))


def _paced_python(work: Workload, first: int, steps: int, recorder: _core.Recorder) -> None:
    wait, mark = recorder.wait, recorder.mark
    predict, observe = work.model.predict, work.model.observe
    samples = itertools.cycle(zip(work.inputs, work.targets, strict=True))
    for inputs, y in itertools.islice(samples, first % SAMPLES, first % SAMPLES + steps):
        wait()
        mark()
        predict(*inputs)
        observe(y)
        mark()


def _warm(work: Workload, loop: LoopName) -> None:
    if loop == "python":
        _python_block(work, _core.Recorder(0, False))
    else:
        _must(work.loop.steps(0, SAMPLES, 1, _core.Recorder(0, False)))


def _repeats(work: Workload, harness: Harness) -> tuple[int, int, int]:
    """How often trunk, head (predict, observe) and the whole step run between two readings."""
    recorder = harness.recorder(4 * SAMPLES)
    for _ in range(3):
        recorder.clear()
        _must(work.loop.stages(0, SAMPLES, 1, 1, recorder))
    trunk, predict, observe = np.median(np.diff(harness.ns(recorder).reshape(-1, 4), axis=1), axis=0).tolist()
    # Without the reading itself, which matters most for short stages.
    trunk, predict, observe = (max(0.1, ns - harness.c_overhead) for ns in (trunk, predict, observe))
    return harness.repeats(trunk), harness.repeats(min(predict, observe)), harness.repeats(trunk + predict + observe)


def _must(status: int) -> None:
    if status:
        raise KbtError("bench: the loop was stopped by a sample that the trunk or the head rejected", status)


class _Usage:
    """Context switches and page faults of this thread while it is measured."""

    _NAMES: Final = {"involuntary_switches": "ru_nivcsw", "major_faults": "ru_majflt", "minor_faults": "ru_minflt"}

    def __init__(self) -> None:
        self._total = dict.fromkeys(self._NAMES, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        yield
        after = resource.getrusage(resource.RUSAGE_THREAD)
        for name, field in self._NAMES.items():
            self._total[name] += getattr(after, field) - getattr(before, field)

    def told(self) -> dict[str, int]:
        return dict(self._total)
