"""How time and memory grow with the size of a head: ``--sweep d,hidden,outputs,rows,structure,dtype``.

Sizes (d, hidden, outputs, rows) vary one at a time around ``BASE``; structure and dtype multiply the curves. Each point
is a head run in C on random rows: predict + observe. The exponent is that of time against the number of stored
covariance factors, all of which an update touches (for outputs and rows: against their number).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kbt_edge import Head, _core
from kbt_edge._progress import Tell
from kbt_edge.bench.figures import fit_exponent, summary
from kbt_edge.bench.loops import Harness
from kbt_edge.errors import KbtError, RangeError
from kbt_edge.settings import COVARIANCES, DTYPES, Covariance, Dtype

__all__ = ["AXES", "MAX_BYTES", "Size", "axes", "factors", "run"]

SIZES: Final = {
    "d": (8, 16, 32, 64, 128, 256),
    "hidden": (32, 64, 128, 256, 512),
    "outputs": (1, 2, 4, 8, 16),
    "rows": (1, 2, 4, 8, 16),
}
AXES: Final = (*SIZES, "structure", "dtype")
MAX_BYTES: Final = 256 * 2**20  # of a head in a sweep: `full` grows with the fourth power of d
_SAMPLES: Final = 64
SECONDS: Final = 0.25  # for each point, and not fewer than _LEAST readings
_LEAST, _MOST = 15, 2000


@dataclass(frozen=True)
class Size:
    d: int = 16
    hidden: int | None = None  # neurons of the hidden layer; None: 2 d, the least that can copy h; 0: no hidden layer
    outputs: int = 1
    rows: int = 1
    structure: Covariance = "neuron"
    dtype: Dtype = "float32"

    @property
    def widths(self) -> tuple[int, ...]:
        hidden = 2 * self.d if self.hidden is None else self.hidden
        return (self.d, *((hidden,) if hidden else ()), self.outputs)


BASE: Final = Size()


def axes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in AXES:
            raise RangeError(f"--sweep: expected some of {', '.join(AXES)}, got {name!r}")
    return [name for name in AXES if name in names]


def factors(size: Size) -> int:
    """Covariance factors that a head of this size stores, over all layers."""
    total = 0
    for inputs, neurons in itertools.pairwise(size.widths):
        m = inputs + 1  # with the bias
        if size.structure == "full":
            total += neurons * m * (neurons * m + 1) // 2
        elif size.structure == "neuron":
            total += neurons * m * (m + 1) // 2
        elif size.structure == "shared":
            total += m * (m + 1) // 2
        else:
            total += neurons * m
    return total


def run(names: Sequence[str], harness: Harness, seed: int, tell: Tell) -> dict[str, Any]:
    curves = _curves(names)
    points: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    notes: list[str] = []
    for label, axis, sizes in curves:
        fitting = [size for size in sizes if _bytes(size) <= MAX_BYTES]
        if len(fitting) < len(sizes):
            left = ", ".join(str(getattr(size, axis)) for size in sizes if size not in fitting)
            notes.append(f"{label}: {axis} = {left} left out, as the head would need more than {MAX_BYTES >> 20} MiB")
        measured = []
        for size in fitting:
            at = getattr(size, axis) if axis else None
            tell(f"sweep: {label} {f'{axis} = {at}' if axis else ''}")
            try:
                measured.append({"curve": label, "axis": axis, "at": at, **_measure(size, harness, seed)})
            except KbtError as error:  # locked memory may be limited
                notes.append(f"{label}: {axis} = {at} left out: {error}")
        points += measured
        if axis and len(measured) >= 3:
            variable = "factors" if axis in ("d", "hidden") else axis
            fit = fit_exponent([point[variable] for point in measured], [point["p50"] for point in measured])
            span = [measured[0]["at"], measured[-1]["at"]]
            fits.append({"curve": label, "axis": axis, "of": variable, "from_to": span, **fit})
    return {"axes": list(names), "points": points, "exponents": fits, "notes": notes}


def _curves(names: Sequence[str]) -> list[tuple[str, str, list[Size]]]:
    """Label, axis and sizes of every curve; the axis is empty for single points."""
    structures = COVARIANCES if "structure" in names else (BASE.structure,)
    dtypes = DTYPES if "dtype" in names else (BASE.dtype,)
    curves = []
    for axis in [name for name in SIZES if name in names] or [""]:
        for structure, dtype in itertools.product(structures, dtypes):
            base = replace(BASE, structure=structure, dtype=dtype)
            if structure == "shared":  # is for one layer
                base = replace(base, hidden=0)
            sizes = [replace(base, **{axis: value}) for value in SIZES[axis]] if axis else [base]  # type: ignore[arg-type]
            if structure != "shared" or axis != "hidden":
                curves.append((f"{structure} {dtype}", axis, sizes))
            if axis == "d" and structure == "full":  # reaches the largest d in a small memory
                flat = [replace(size, hidden=0) for size in sizes]
                curves.append((f"{structure} {dtype}, no hidden layer", axis, flat))
    return curves


def _bytes(size: Size) -> int:
    config = _core.Config(size.d, size.outputs)
    config.widths = list(size.widths)
    config.prior_var = [1.0] * (len(size.widths) - 1)
    config.drift = 0.0
    config.max_rows = size.rows
    config.dtype = DTYPES.index(size.dtype)
    config.covariance = COVARIANCES.index(size.structure)
    return config.arena_bytes()


def _measure(size: Size, harness: Harness, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(size.outputs, size.d)) / np.sqrt(size.d)
    layers = len(size.widths) - 1
    head = Head(
        weight,
        hidden=size.widths[1:-1],
        prior_var=(1e-4,) * (layers - 1) + (0.1,),
        noise_var=0.1,
        drift=0.0,
        covariance=size.structure,
        max_rows=size.rows,
        dtype=size.dtype,
    )
    h = rng.normal(size=(_SAMPLES, size.rows, size.d))
    y = h @ weight.T + 0.3 * rng.normal(size=(_SAMPLES, size.rows, size.outputs))
    flat = (np.ascontiguousarray(array.reshape(_SAMPLES, -1), size.dtype) for array in (h, y))
    loop = _core.Loop(head.core, size.rows, *flat)

    recorder = harness.recorder(2 * _LEAST)
    loop.steps(0, _LEAST, 1, recorder)
    first = float(np.median(np.diff(harness.ns(recorder).reshape(-1, 2), axis=1)))
    repeat = harness.repeats(first)
    count = max(_LEAST, min(_MOST, round(SECONDS * 1e9 / (first * repeat))))
    recorder = harness.recorder(2 * count)
    loop.steps(0, count, repeat, recorder)
    ns = np.diff(harness.ns(recorder).reshape(-1, 2), axis=1)[:, 0] / repeat
    figures = summary(ns)
    return {
        "d": size.d,
        "hidden": list(size.widths[1:-1]),
        "outputs": size.outputs,
        "rows": size.rows,
        "structure": size.structure,
        "dtype": size.dtype,
        "factors": factors(size),
        "bytes": head.nbytes,
        "repeat": repeat,
        **figures,
        "overhead_share": harness.c_overhead / repeat / figures["p50"],
    }
