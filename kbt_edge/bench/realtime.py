"""Real-time settings of this process while it measures. Those that the system does not permit are reported.

fifo      SCHED_FIFO at a priority: nothing but the kernel and higher priorities interrupt the loop
cpu       the loop stays on one core, and its caches stay warm
memory    mlockall: no page of the process is written to disk or fetched in the loop
timer     the kernel may wake a process of normal priority 50 µs late to save power; here it may not
gc        Python's garbage collector does not run, and ignores existing objects
ftz       denormal numbers are flushed to zero; changes bits, so only on request
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from typing import Any, Final

from kbt_edge import _core

__all__ = ["settings"]

_MCL_CURRENT: Final = 1
_MCL_FUTURE: Final = 2
_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30


@contextlib.contextmanager
def settings(fifo: int | None, cpu: int | None, ftz: bool) -> Iterator[list[dict[str, Any]]]:
    """Apply the requested settings, as far as permitted, and undo them at the end. Yields what was applied."""
    told: list[dict[str, Any]] = []
    with contextlib.ExitStack() as undo:

        def note(name: str, asked: str, applied: bool, detail: str = "") -> None:
            told.append({"name": name, "asked": asked, "applied": applied, "detail": detail})

        if cpu is None:
            note("cpu", "no", False, f"any of {len(os.sched_getaffinity(0))} cores; --cpu N pins the loop to one")
        else:
            before = os.sched_getaffinity(0)
            try:
                os.sched_setaffinity(0, {cpu})
                undo.callback(os.sched_setaffinity, 0, before)
                note("cpu", str(cpu), True)
            except OSError as error:
                note("cpu", str(cpu), False, f"{error.strerror}; this process may use {sorted(before)}")

        if fifo is None:
            note("fifo", "no", False, "normal priority; --fifo PRIO asks for real-time priority")
        else:
            policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
            try:
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(fifo))
                undo.callback(os.sched_setscheduler, 0, policy, parameters)
                note("fifo", str(fifo), True)
            except OSError as error:
                note("fifo", str(fifo), False, f"{error.strerror}; kbt-edge doctor says how to permit it")

        problem = _lock_memory()
        if problem is None:
            undo.callback(_unlock_memory)
        note("memory", "locked", problem is None, problem or "")

        libc = ctypes.CDLL(None, use_errno=True)
        slack = libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
        precise = slack >= 0 and libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0
        if precise:
            undo.callback(libc.prctl, _PR_SET_TIMERSLACK, slack, 0, 0, 0)
        note("timer", "precise", precise, "" if precise else os.strerror(ctypes.get_errno()))

        gc.collect()
        gc.freeze()
        enabled = gc.isenabled()
        gc.disable()
        undo.callback(gc.unfreeze)
        if enabled:
            undo.callback(gc.enable)
        note("gc", "frozen", True)

        if not ftz:
            note("ftz", "no", False, "denormal numbers are computed exactly; --ftz flushes them to zero")
        elif _core.set_flush_to_zero(True):
            undo.callback(_core.set_flush_to_zero, False)
            note("ftz", "yes", True)
        else:
            note("ftz", "yes", False, "this processor has no such mode")

        yield told


def _lock_memory() -> str | None:
    """None, or why the memory of this process cannot be locked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE) == 0:
        return None
    return f"{os.strerror(ctypes.get_errno())}; kbt-edge doctor says how to permit it"


def _unlock_memory() -> None:
    ctypes.CDLL(None).munlockall()
