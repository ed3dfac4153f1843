"""Flight logs: recorded calls of a head in the field, replayed elsewhere to the same bits.

    head.record(samples=1000)               # on the machine, once; then predict, observe and update as usual
    head.save_flight_log("flight.kbtf")     # when something went wrong

    log = FlightLog.load("flight.kbtf")     # elsewhere
    log.records["h"], log.records["nis"]    # inputs and results
    log.replay().reproduced                 # the core of this machine reaches the same state

The core writes, checks and replays logs (csrc/abi/flight_log.hpp has the format); this module reads them.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from kbt_edge import _core
from kbt_edge._arrays import Array
from kbt_edge._files import read_bounded
from kbt_edge._status import blob_error
from kbt_edge.errors import BundleError, DtypeError
from kbt_edge.head import Head
from kbt_edge.settings import DTYPES, NOISES

__all__ = ["KINDS", "Difference", "FlightLog", "Replay"]

MAX_BYTES: Final = 1 << 30
MAX_ARENA_BYTES: Final = 1 << 30  # of the head of a log: a short file can ask for a huge one
KINDS: Final = _core.FLIGHT_KINDS


class Difference(NamedTuple):
    """The first record whose replay differs."""

    record: int
    kind: str
    recorded: str
    """Status, samples and NIS in the field, and here."""
    replayed: str


class Replay(NamedTuple):
    """The result of replaying a log on this machine."""

    reproduced: bool
    """Every status and NIS as recorded, and the final state, bit for bit."""
    difference: Difference | None
    state_hash: str
    """FNV-1a of the state that was reached, 16 hexadecimal digits."""
    statuses: dict[str, int]
    """Status: number of records that ended with it here."""
    nis: Array
    """Of the records that were learned or gated."""
    head: Head
    """In the state that was reached."""


class FlightLog:
    """A log, checked to its last byte. Reading one takes time and memory in proportion to the file."""

    def __init__(self, data: bytes) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise DtypeError(f"data: expected bytes, got {type(data).__name__}")
        self._data = bytes(data)
        info = _core.flight_info(self._data)
        if isinstance(info, int):
            raise blob_error("log", "flight log", info)
        self._records, self.before, self.checkpoint, final, base, base_bytes, self._at, self._size, self._config = info
        self._base = self._data[base : base + base_bytes]
        self.state_hash = f"{final:016x}"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FlightLog:
        data = read_bounded(path, MAX_BYTES)
        try:
            return cls(data)
        except BundleError as error:
            raise BundleError(f"{os.fspath(path)}: {str(error).removeprefix('log: ')}", error.status) from None

    def __len__(self) -> int:
        """Number of records in the log; ``before`` earlier ones were overwritten."""
        return self._records

    def __repr__(self) -> str:
        shape = "→".join(map(str, self._config.widths))
        return f"FlightLog({len(self)} records of a {shape} head, {self.before} before; state {self.state_hash})"

    @property
    def base(self) -> bytes:
        """The state to start from, as ``Head.from_bytes`` takes it."""
        return self._base

    @cached_property
    def records(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A structured array: kind, rows, noise_count, status, samples, nis, h, y (or labels in its place), noise."""
        c = self._config
        rows, d, outputs = c.max_rows, c.widths[0], c.widths[-1]
        noise = {"multinomial": 0, "matrix": outputs * outputs}.get(NOISES[c.noise], outputs)
        real = {"float32": "<f4", "float64": "<f8"}[DTYPES[c.dtype]]
        head = [(name, "<i4") for name in ("kind", "given", "rows", "noise_count", "status", "spare")]
        room = [("h", real, (rows, d)), ("y", real, (rows, outputs)), ("noise", real, (noise,))]
        dtype = np.dtype([*head, ("samples", "<u8"), ("nis", "<f8"), *room])
        assert dtype.itemsize == self._size
        return np.frombuffer(self._data, dtype, self._records, self._at)

    def labels(self) -> Array:
        """The class labels, for records of the kinds that have labels: (records, max_rows)."""
        y = self.records["y"]
        flat = np.ascontiguousarray(y).view("<i4").reshape(len(y), -1)
        return flat[:, : y.shape[1]]

    def replay(self) -> Replay:
        """Repeat the recorded calls with the core of this machine."""
        needed = self._config.arena_bytes()
        if needed > MAX_ARENA_BYTES:
            raise BundleError(f"log: its head needs {needed} bytes, more than the limit of {MAX_ARENA_BYTES}")
        head = Head.from_bytes(self._base)
        found = head.core.replay(self._data)
        if isinstance(found, int):
            raise blob_error("log", "flight log", found)
        steps, first, state_hash, reproduced = found
        difference = None
        if first < len(steps):
            kind, recorded, status, samples_then, samples, nis_then, nis_now, _ = steps[first]
            then = f"{_status(recorded)}, {samples_then} samples, NIS {nis_then.hex()}"
            now = f"{_status(status)}, {samples} samples, NIS {nis_now.hex()}"
            difference = Difference(first, KINDS[kind], then, now)
        statuses = Counter(_status(step[2]) for step in steps)
        learned = (step for step in steps if KINDS[step[0]] != "set_noise" and step[2] in (_core.OK, _core.GATED))
        nis = np.array([step[6] for step in learned])
        return Replay(reproduced, difference, f"{state_hash:016x}", dict(statuses), nis, head)


def _status(status: int) -> str:
    return "ok" if status == _core.OK else "gated" if status == _core.GATED else _core.status_str(status)
