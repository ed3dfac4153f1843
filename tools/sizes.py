"""Heads of real sizes beside six lines of NumPy, and how time and memory grow with width and outputs.

    python tools/sizes.py                      # the table: gaussian heads, chunks, many classes
    python tools/sizes.py --growth PICTURE     # exponents of growth, and a picture of them

Pinned to one processor, one thread. Everything that is compared runs side by side in one process: medians, and p99.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from cost import OUTPUTS, WIDTHS, layer_numbers  # noqa: E402

import kbt_edge as kbt  # noqa: E402
from kbt_edge.bench.figures import fit_exponent  # noqa: E402

Array = npt.NDArray[Any]
Settings = dict[str, Any]
LARGEST = 1 << 30  # bytes of a head
SEED = 0


class Plain:
    """One covariance for all outputs, in float32: the same means as one filter of a plant that stands still."""

    def __init__(self, outputs: int, d: int) -> None:
        self.W, self.P = np.zeros((outputs, d + 1), np.float32), np.eye(d + 1, dtype=np.float32)

    def update(self, z: Array, y: Array) -> None:
        Pz = self.P @ z
        q = 1 + z @ Pz
        e = y - self.W @ z
        self.W += np.outer(e, Pz) / q
        self.P -= np.outer(Pz, Pz) / q


@contextmanager
def pinned() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield
    os.sched_setaffinity(0, before)


def timed(calls: dict[str, Callable[[int], object]], count: int) -> dict[str, Array]:
    """Seconds of each call, one after the other in every round, without the first."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(count + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            taken[name].append(time.perf_counter() - start)
    return {name: np.array(each[1:]) for name, each in taken.items()}


def show(label: str, found: dict[str, Array], nbytes: dict[str, int]) -> None:
    base = float(np.median(found["NumPy"])) if "NumPy" in found else None
    for name, seconds in found.items():
        p50 = float(np.median(seconds))
        ratio = "" if base is None else f"{p50 / base:8.2f} x NumPy"
        size = f"{nbytes[name] / 1e6:9.2f} MB" if name in nbytes else " " * 12
        print(f"{label:28} {name:18} {size} {p50 * 1e3:9.3f} ms, p99 {np.quantile(seconds, 0.99) * 1e3:9.3f}{ratio}")


def gaussian(d: int, outputs: int, count: int, kinds: dict[str, Settings]) -> None:
    rng = np.random.default_rng(SEED)
    plant = rng.normal(size=(outputs, d)).astype(np.float32) / np.sqrt(d)
    h = rng.normal(size=(count + 1, d)).astype(np.float32)
    y = (h @ plant.T + 0.1 * rng.normal(size=(count + 1, outputs))).astype(np.float32)
    z = np.column_stack([h, np.ones(count + 1, np.float32)]).astype(np.float32)
    plain = Plain(outputs, d)
    heads = {name: kbt.Head(np.zeros((outputs, d)), max_memory=LARGEST, **given) for name, given in kinds.items()}
    calls: dict[str, Callable[[int], object]] = {"NumPy": lambda i: plain.update(z[i], y[i])}
    for name, head in heads.items():
        calls[name] = lambda i, head=head: head.update(h[i], y[i])  # type: ignore[misc]
    sizes = {"NumPy": plain.W.nbytes + plain.P.nbytes, **{name: head.nbytes for name, head in heads.items()}}
    show(f"{d} → {outputs}", timed(calls, count), sizes)


def chunk(d: int, outputs: int, rows: int, count: int) -> None:
    rng = np.random.default_rng(SEED)
    plant = rng.normal(size=(outputs, d)) / np.sqrt(d)
    h = rng.normal(size=(count + 1, rows, d)).astype(np.float32)
    y = (h @ plant.T + 0.1 * rng.normal(size=(count + 1, rows, outputs))).astype(np.float32)
    kinds: dict[str, Settings] = {"default": {}, "drift=0": {"drift": 0.0}}
    heads = {name: kbt.Head(np.zeros((outputs, d)), max_rows=rows, **given) for name, given in kinds.items()}
    calls: dict[str, Callable[[int], object]] = {
        name: lambda i, head=head: head.update(h[i], y[i])  # type: ignore[misc]
        for name, head in heads.items()
    }
    show(f"{d} → {rows} x {outputs}", timed(calls, count), {name: head.nbytes for name, head in heads.items()})


def hidden(d: int, units: int, outputs: int, count: int, output: Any = "gaussian") -> None:
    rng = np.random.default_rng(SEED)
    head = kbt.Head(rng.normal(size=(outputs, d)) / np.sqrt(d), hidden=(units,), output=output, drift=0.0)
    h = rng.normal(size=(count + 1, d)).astype(np.float32)
    y = rng.normal(size=(count + 1, outputs)) if output == "gaussian" else rng.integers(0, outputs, count + 1, np.int32)
    label = f"{d} → {units} → {outputs}" + " classes" * (output == "softmax")
    found = timed({"predict": lambda i: head.predict(h[i]), "observe": lambda i: head.observe(y[i])}, count)
    found["update"] = found["predict"] + found["observe"]
    show(label, found, {"update": head.nbytes})


def one_by_one(d: int, units: int, outputs: int, rows: int, count: int) -> None:
    """Rows behind hidden units in one update, beside as many updates: time of all, and the error at new inputs."""
    rng = np.random.default_rng(SEED)
    weight, bend = (rng.normal(size=(n, d)) / np.sqrt(d) for n in (outputs, d))
    new = rng.normal(size=(500, d))
    heads = {name: kbt.Head(weight, hidden=(units,), max_rows=most, drift=0.0)
             for name, most in (("joint", rows), ("one by one", 1))}  # fmt: skip
    h = rng.normal(size=(count + 1, rows, d))
    y = np.tanh(h @ bend) @ weight.T + 0.05 * rng.normal(size=(count + 1, rows, outputs))
    calls: dict[str, Callable[[int], object]] = {
        "joint": lambda i: heads["joint"].update(h[i], y[i]),
        "one by one": lambda i: [heads["one by one"].update(*row) for row in zip(h[i], y[i], strict=True)],
    }
    show(f"{d} → {units} → {rows} x {outputs}", timed(calls, count), {name: x.nbytes for name, x in heads.items()})
    for name, head in heads.items():
        errors = np.array([head.predict(x).mean.ravel() for x in new]) - np.tanh(new @ bend) @ weight.T
        print(f"{'':28} {name:18} error after {(count + 1) * rows} rows: {np.sqrt(np.mean(errors**2)):.4f}")


def bandwidth(d: int, outputs: int, lanes: int, count: int) -> None:
    """What an update moves through memory, beside a copy and a sum of arrays as large as the head."""
    head = kbt.Head(np.zeros((outputs, d)), max_memory=LARGEST, **({} if lanes > 1 else {"drift": 0.0}))
    rng = np.random.default_rng(SEED)
    h, y = rng.normal(size=(16, d)).astype(np.float32), rng.normal(size=(16, outputs)).astype(np.float32)
    source = np.ones(head.nbytes // 4, np.float32)
    target = source.copy()
    found = timed(
        {
            "update": lambda i: head.update(h[i % 16], y[i % 16]),
            "copy": lambda i: np.copyto(target, source),
            "sum": lambda i: np.add(target, source, out=target),
        },
        count,
    )
    # Factor and means are read to predict, and read and written to learn.
    moved = {"update": 3 * 4 * lanes * layer_numbers(d, outputs), "copy": 2 * source.nbytes, "sum": 3 * source.nbytes}
    rates = [f"{name} {moved[name] / float(np.median(each)) / 1e9:.0f} GB/s" for name, each in found.items()]
    name = "default" if lanes > 1 else "drift=0"
    print(f"{f'{d} → {outputs}':28} {name:18} {head.nbytes / 1e6:9.2f} MB: {', '.join(rates)}")


def classes(d: int, count: int, outputs: int) -> None:
    rng = np.random.default_rng(SEED)
    weight = (rng.normal(size=(outputs, d)) / np.sqrt(d)).astype(np.float32)
    h, labels = rng.normal(size=(count + 1, d)).astype(np.float32), rng.integers(0, outputs, count + 1, np.int32)
    kinds: dict[str, Settings] = {"shared, drift=0": {"drift": 0.0}, "shared, default": {}}
    found, sizes = {}, {}
    for name, given in kinds.items():
        head = kbt.Head(weight, output="softmax", covariance="shared", **given)
        learn = timed({"predict": lambda i, head=head: head.predict(h[i]),  # type: ignore[misc]
                       "observe": lambda i, head=head: head.observe(labels[i])}, count)  # type: ignore[misc]  # fmt: skip
        found[name], sizes[name] = learn["observe"], head.nbytes
    show(f"{d} → {outputs} classes", found, sizes)


def readout(d: int, count: int, outputs: int, top: int) -> None:
    """A readout like that of a language model: some words are frequent, contexts come back, labels have moved."""
    rng = np.random.default_rng(SEED)
    weight = (0.25 * rng.normal(size=(outputs, d))).astype(np.float32)
    bias = -np.log(np.arange(1, outputs + 1)).astype(np.float32)
    true = weight.copy()
    moved = rng.choice(outputs, outputs // 80)
    true[moved] += 0.3 * rng.normal(size=(len(moved), d)).astype(np.float32)
    topics = rng.normal(size=(200, d))
    few, whole = kbt.Readout(weight, bias, top=top), kbt.Readout(weight, bias, top=outputs, held=outputs)
    taken: dict[str, list[float]] = {"predict": [], "observe": []}
    worst, left_out, loss = [], [], []
    for _ in range(count):
        h = (topics[int(rng.zipf(1.3)) % 200] + 0.3 * rng.normal(size=d)).astype(np.float32)
        start = time.perf_counter()
        p = few.predict(h).p
        taken["predict"].append(time.perf_counter() - start)
        label = int((true @ h + bias + rng.gumbel(size=outputs)).argmax())
        worst.append(float(np.abs(p - whole.predict(h).p).max()))
        start = time.perf_counter()
        update = few.observe(label)
        taken["observe"].append(time.perf_counter() - start)
        left_out.append(update.left_out)
        loss.append((update.log_likelihood, whole.observe(label).log_likelihood))
    found = {name: np.array(each) for name, each in taken.items()}
    found["update"] = found["predict"] + found["observe"]
    show(f"{d} → {outputs} top={top}", found, {"update": few.nbytes})
    mean = -np.mean(loss, axis=0)
    print(
        f"{'':28} probabilities beside all classes learning, {count} samples: apart by at most {max(worst):.2g}; "
        f"loss {mean[0]:.4f} and {mean[1]:.4f} nats; left_out {np.median(left_out):.2g}, at most {max(left_out):.2g}; "
        f"{few.dropped} rows dropped"
    )


# ---- growth ----------------------------------------------------------------------------------------------------------


def point(d: int, outputs: int, settings: Settings) -> tuple[float, int] | None:
    """Median seconds of an update, and bytes; None if the head is too large."""
    try:
        head = kbt.Head(np.zeros((outputs, d)), max_memory=LARGEST, **settings)
    except kbt.RangeError:
        return None
    rng = np.random.default_rng(SEED)
    h, y = rng.normal(size=(16, d)).astype(np.float32), rng.normal(size=(16, outputs)).astype(np.float32)
    count = 20 if layer_numbers(d, outputs) > 1e6 else 60
    seconds = timed({"update": lambda i: head.update(h[i % 16], y[i % 16])}, count)["update"]
    return float(np.median(seconds)), head.nbytes


def growth(picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex="col")
    kinds: dict[str, Settings] = {"drift=0": {"drift": 0.0}, "default": {}}
    every: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    for column, axis in enumerate(("width", "outputs")):
        for colour, (name, settings) in zip(("tab:blue", "tab:orange"), kinds.items(), strict=True):
            for style, fixed in zip(("-o", "--s"), (1, 100) if axis == "width" else (64, 512), strict=True):
                at = [(d, fixed) for d in WIDTHS] if axis == "width" else [(fixed, o) for o in OUTPUTS]
                found = [(layer_numbers(*each), point(*each, settings)) for each in at]
                x = [numbers for numbers, each in found if each is not None]
                seconds = [each[0] for _, each in found if each is not None]
                nbytes = [each[1] for _, each in found if each is not None]
                label = f"{name}, {fixed} output{'s' * (fixed > 1)}" if axis == "width" else f"{name}, width {fixed}"
                slopes = [fit_exponent(x, each)["all"] for each in (seconds, nbytes)]
                every[name] += zip(x, seconds, nbytes, strict=True)
                print(f"{axis:8} {label:24} time {slopes[0]:5.2f}, memory {slopes[1]:5.2f}   ({len(x)} sizes)")
                for row, values in enumerate((np.array(seconds) * 1e3, np.array(nbytes) / 1e6)):
                    panels[row, column].loglog(
                        x, values, style, color=colour, markersize=4, label=f"{label}: exponent {slopes[row]:.2f}"
                    )
        panels[0, column].set_title(
            "width 16 to 1,024" if axis == "width" else f"outputs 1 to {OUTPUTS[-1]:,}", fontsize=11
        )
        panels[1, column].set_xlabel("numbers that one filter stores")
    for name, points in every.items():
        x, *both = zip(*points, strict=True)
        slopes = [fit_exponent(x, each)["all"] for each in both]
        print(f"all      {name:24} time {slopes[0]:5.2f}, memory {slopes[1]:5.2f}   ({len(x)} sizes)")
    panels[0, 0].set_ylabel("one update, ms")
    panels[1, 0].set_ylabel("memory, MB")
    for panel in panels.flat:
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--growth", type=Path, metavar="PICTURE", help="measure exponents of growth, and draw them")
    given = parser.parse_args()
    with pinned():
        if given.growth is not None:
            return growth(given.growth)
        default: Settings = {"default": {}, "drift=0": {"drift": 0.0}}
        gaussian(512, 7, 100, default)
        gaussian(512, 350, 100, default)
        gaussian(768, 8000, 20, {"drift=0": {"drift": 0.0}})
        chunk(512, 14, 100, 15)
        hidden(64, 128, 350, 15)
        hidden(64, 128, 1000, 15)
        hidden(64, 128, 1000, 15, "softmax")
        one_by_one(64, 128, 14, 20, 40)
        classes(192, 60, 1000)
        readout(128, 1000, 32000, 64)
        for d, outputs, lanes in ((512, 350, 1), (512, 350, 8), (768, 8000, 1), (512, 8000, 8)):
            bandwidth(d, outputs, lanes, 20)


if __name__ == "__main__":
    main()
