"""A softmax over many classes, such as the tokens of a language model, that keeps learning."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, check_finite, real_array, shape_error
from kbt_edge._files import read_bounded, write_atomic
from kbt_edge._status import blob_error, status_error
from kbt_edge.errors import DtypeError, NumericsError, RangeError
from kbt_edge.settings import integer

__all__ = ["Readout", "ReadoutPrediction", "ReadoutUpdate"]

_FLOAT32 = np.dtype(np.float32)
_MAX_STATE_BYTES = 1 << 31


class ReadoutPrediction(NamedTuple):
    p: Array
    """Probabilities of all classes."""
    logit_var: float
    """Variance of a logit, the same for all classes."""


class ReadoutUpdate(NamedTuple):
    """How well a label was predicted before it was learned, and what the step left out."""

    log_likelihood: float
    """Log probability of the label."""
    left_out: float
    """The probabilities at this input would differ by at most this (total variation) had all classes learned."""
    dropped: int
    """Rows that left the table for others, and are as in the readout again."""


class Readout:
    """A readout ``weight @ h + bias`` of a softmax that learns from labels, for thousands of classes.

    The readout itself is only read, where it is: a memory map will do. What was learned is kept for the rows that were
    touched, in a table of fixed size. A step updates the label, the most probable classes and all rows in the table.
    All classes share one covariance (method.md §10). Predictions are the probabilities of all classes.

    weight, bias  (classes, d) and (classes,) or None. A C-contiguous float32 array is not copied, and must not change
    top           classes that a step updates beside the label
    held          rows in the table. If it is full, the row leaves that has moved least; None: 4096, or all classes
    prior_var     variance of every weight before any data. None: 1 / (d + 1), which gives logits a variance of about
                  one where h is of order one

    It is float32 and takes one sample at a time. For fewer than about 2,000 classes, ``Head(output="softmax")`` knows
    more: whether the plant has changed, and a covariance for each class.
    """

    __slots__ = ("_core", "_weight")

    def __init__(
        self,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        top: int = 64,
        held: int | None = None,
        prior_var: float | None = None,
    ) -> None:
        w = real_array("weight", weight, _FLOAT32)
        if w.ndim != 2 or w.shape[0] < 2 or w.shape[1] < 1:
            raise shape_error("weight", "(classes, d) with at least 2 classes", w)
        classes, d = w.shape
        b = None if bias is None else real_array("bias", bias, _FLOAT32)
        if b is not None and b.shape != (classes,):
            raise shape_error("bias", f"({classes},), one per row of weight", b)
        top = min(integer("top", top, 1, 1 << 20), classes)
        held = min(4096 if held is None else integer("held", held, 1, 1 << 20), classes)
        if held <= top and held < classes:
            raise RangeError(f"held: expected more than top = {top} rows, or all {classes}, got {held}")
        prior = 1.0 / (d + 1) if prior_var is None else float(prior_var)
        if not 1e-30 <= prior <= 1e12:
            raise RangeError(f"prior_var: expected 1e-30..1e+12, got {prior_var}")
        self._weight = w
        self._core = _core.Readout(w, b, top, held, prior)

    def predict(self, h: npt.ArrayLike) -> ReadoutPrediction:
        """Probabilities of all classes at ``h``, (d,)."""
        row = self._row(h)
        found = self._core.predict(row)
        if isinstance(found, int):
            self._rejected(found, row)
        return ReadoutPrediction(*found)

    def update(self, h: npt.ArrayLike, label: int) -> ReadoutUpdate:
        """Learn the class at ``h``."""
        row = self._row(h)
        return self._learned(self._core.learn(row, self._label(label)), row)

    def observe(self, label: int) -> ReadoutUpdate:
        """Learn the class of the latest ``predict``, once."""
        return self._learned(self._core.learn(None, self._label(label)), None)

    @property
    def classes(self) -> int:
        return int(self._weight.shape[0])

    @property
    def d(self) -> int:
        return int(self._weight.shape[1])

    @property
    def samples(self) -> int:
        """Labels learned."""
        return self._core.samples

    @property
    def held(self) -> int:
        """Rows in the table."""
        return self._core.held

    @property
    def dropped(self) -> int:
        """Rows that left the table so far. If it grows fast, ``held`` is too small."""
        return self._core.dropped

    @property
    def nbytes(self) -> int:
        """Bytes beside the readout. Nothing else is allocated after construction, but the results."""
        return self._core.nbytes

    def reset(self) -> None:
        """Forget all that was learned."""
        self._core.reset()

    def to_bytes(self) -> bytes:
        """What was learned, the same bytes on every machine. The readout is not in it, only its checksum."""
        return self._core.save()

    def restore(self, blob: bytes) -> None:
        """Load what a ``Readout`` of the same weight, bias and settings has learned. On error nothing changes."""
        if not isinstance(blob, (bytes, bytearray, memoryview)):
            raise DtypeError(f"blob: expected bytes, got {type(blob).__name__}")
        status = self._core.load(bytes(blob))
        if status:
            raise blob_error("blob", "readout state", status)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was learned to a file. A power cut leaves the old file or the new one."""
        write_atomic(path, self.to_bytes())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore what ``save`` wrote."""
        self.restore(read_bounded(path, _MAX_STATE_BYTES))

    def __repr__(self) -> str:
        return (
            f"Readout({self.d}→{self.classes}; {self.samples} samples, {self.held} rows held, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )

    def _row(self, h: npt.ArrayLike) -> Array:
        row = real_array("h", h, _FLOAT32)
        if row.shape != (self.d,):
            raise shape_error("h", f"({self.d},)", row)
        return row

    def _label(self, label: Any) -> int:
        return integer("label", label, 0, self.classes - 1)

    def _learned(self, found: tuple[float, float, int] | int, row: Array | None) -> ReadoutUpdate:
        if isinstance(found, int):
            self._rejected(found, row)
        return ReadoutUpdate(*found)

    def _rejected(self, status: int, row: Array | None) -> NoReturn:
        if row is not None and status == _core.E_NONFINITE:
            check_finite("h", row, row)
        if status == _core.E_RANGE and row is not None:
            raise NumericsError(
                f"h: expected numbers whose logits stay finite, got |h| up to {np.abs(row).max():.3g}", status
            )
        if status == _core.E_ORDER:
            raise RangeError(
                "observe: no prediction is waiting; call predict first, one observe per prediction", status
            )
        raise status_error(status)
