"""Prior and noise variances from a short stream, by what the head itself would have predicted.

    tuned = tune(model, x, y)       # a hundred samples will do
    print(tuned.report())
    model = tuned.model             # the same trunk, a fresh head with the chosen variances

A setting is judged by its prequential log likelihood: every sample is predicted before it is learned, and the log
densities are added up. It needs no held-out data and no ground truth, it punishes a head that is too sure of itself as
well as one that is too slow, and it is the log evidence of the stream, so it does not overfit with the number of
candidates as a training error would (method.md §1, §7).

The search is a grid in decades around the present setting, then a refinement by factors of √10 and √√10, one variance
after the other. It draws no random numbers: the same stream gives the same answer. The present setting is among the
candidates, so on the stream itself the result is never worse.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kbt_edge.errors import KbtError, RangeError, ShapeError
from kbt_edge.head import Head
from kbt_edge.model import Model

__all__ = ["Candidate", "Tuned", "prequential", "tune"]

Subject = TypeVar("Subject", Head, Model)

Steps = tuple[float, ...]

_DECADES = (-3, -2, -1, 0, 1, 2, 3)  # of the grid, around the present setting
_REFINEMENTS = (1.0, 0.5, 0.25)  # steps of the refinement, in decades; the first leaves the grid if its edge is best
_ROUNDS = 12  # of one refinement at most


@dataclass(frozen=True)
class Candidate:
    """A setting and its score."""

    prior_var: tuple[float, ...]  # one per layer
    noise_var: float | None  # in the head's own units; None where the head needs none (multinomial)
    log_likelihood: float  # per sample; −∞ if the head broke down


@dataclass(frozen=True)
class Tuned(Generic[Subject]):
    """The chosen setting, what it was chosen from, and the head or model that has it and has learned nothing yet."""

    subject: Subject
    before: Candidate
    best: Candidate
    tried: tuple[Candidate, ...]  # in the order of the search
    samples: int
    seconds: float

    @property
    def head(self) -> Head:
        """A fresh head with the chosen setting."""
        return self.subject.head if isinstance(self.subject, Model) else self.subject

    @property
    def model(self) -> Model:
        """The model with that head, if a model was tuned."""
        if not isinstance(self.subject, Model):
            raise RangeError("model: expected a tuned Model, got a tuned Head; use .head")
        return self.subject

    def report(self) -> str:
        """A table of the setting before, the best one, and the runners-up."""
        ranked: list[Candidate] = sorted(self.tried, key=lambda candidate: -candidate.log_likelihood)
        rows = [("before", self.before), ("best", self.best), *(("", candidate) for candidate in ranked[1:4])]
        lines = [f"{self.samples} samples, {len(self.tried)} settings tried in {self.seconds:.1f} s", ""]
        lines.append(f"  {'':<8}{'log likelihood':>14}   {'noise_var':>9}   prior_var")
        for name, candidate in rows:
            noise = "" if candidate.noise_var is None else f"{candidate.noise_var:.2g}"
            prior = ", ".join(f"{v:.2g}" for v in candidate.prior_var)
            lines.append(f"  {name:<8}{candidate.log_likelihood:>14.3f}   {noise:>9}   {prior}")
        lines += [
            "",
            "per sample, each predicted before it was learned; variances in the units of the network's output",
        ]
        return "\n".join(lines)


def tune(subject: Subject, x: Sequence[Any] | npt.ArrayLike, y: Sequence[Any] | npt.ArrayLike) -> Tuned[Subject]:
    """Choose ``prior_var`` and ``noise_var`` of a ``Head`` or a ``Model`` for the stream (x[0], y[0]), (x[1], y[1]), …

    x   what ``update`` takes, one entry per sample: rows h for a ``Head``, inputs for a ``Model``
    y   the targets, as ``update`` takes them

    The weights' means are taken as they are: tune a fresh head for a prior, or one that has learned to go on from
    there. ``subject`` itself is left alone. Noise per output, or a noise matrix, is scaled as a whole.
    """
    started = time.perf_counter()
    pairs = _stream(subject, x, y)
    family = _Family(subject.head if isinstance(subject, Model) else subject)
    scores: dict[Steps, Candidate] = {}

    def score(steps: Steps) -> float:
        if steps not in scores:
            scores[steps] = family.candidate(steps, pairs)
        return scores[steps].log_likelihood

    best = origin = (0.0,) * family.variances
    before = score(origin)
    if not math.isfinite(before):
        family.head(origin)  # raises what is wrong with the head or
        prequential(family.head(origin), pairs)  # with the stream
    if family.variances <= 3:  # beyond, a grid is too large, and the search climbs from the start
        grid = itertools.product(_DECADES, repeat=family.variances)
        best = max((tuple(map(float, steps)) for steps in grid), key=score)
    for width in _REFINEMENTS:
        best = _climb(best, width, score)
    if not score(best) > before:
        best = origin
    return Tuned(
        subject=_with_head(subject, family.head(best)),
        before=scores[origin],
        best=scores[best],
        tried=tuple(scores.values()),
        samples=len(pairs),
        seconds=time.perf_counter() - started,
    )


def prequential(head: Head, pairs: Sequence[tuple[Any, Any]]) -> float:
    """Mean log likelihood of the pairs (h, y), each predicted before it is learned. ``head`` learns them."""
    return math.fsum(head.update(h, y).log_likelihood for h, y in pairs) / len(pairs)


class _Family:
    """Heads like a given one with other variances: ``steps`` decades away, one per layer and one for the noise."""

    def __init__(self, head: Head) -> None:
        self._settings = head.config
        self._prior: tuple[float, ...] = self._settings.pop("prior_var")
        for settled in ("widths", "noise_var"):
            del self._settings[settled]
        self._means = [layer.mean for layer in head.layers]
        self._nbytes = head.nbytes
        self._noise = None if self._settings["noise"] == "multinomial" else np.asarray(head.noise_var, np.float64)
        self.variances = len(self._prior) + (self._noise is not None)

    def head(self, steps: Steps) -> Head:
        prior = [v * 10.0**step for v, step in zip(self._prior, steps, strict=False)]
        noise = {} if self._noise is None else {"noise_var": self._noise * 10.0 ** steps[-1]}
        return Head.from_means(self._means, prior_var=prior, **noise, **self._settings, max_memory=self._nbytes)

    def candidate(self, steps: Steps, pairs: Sequence[tuple[Any, Any]]) -> Candidate:
        try:
            head = self.head(steps)
            log_likelihood = prequential(head, pairs)
        except KbtError:  # a variance out of range, or an overflow: not a usable setting
            log_likelihood = -math.inf
        prior = tuple(v * 10.0**step for v, step in zip(self._prior, steps, strict=False))
        if self._noise is None:
            return Candidate(prior, None, log_likelihood)
        level = float(self._noise.mean() if self._noise.ndim == 1 else np.diagonal(self._noise).mean())
        return Candidate(prior, level * 10.0 ** steps[-1], log_likelihood)


def _climb(best: Steps, width: float, score: Callable[[Steps], float]) -> Steps:
    """Steps of ``width`` decades, one variance after the other, until none helps."""
    for _ in range(_ROUNDS):
        start = best
        for i in range(len(best)):
            for step in (-width, width):
                there = (*best[:i], best[i] + step, *best[i + 1 :])
                if score(there) > score(best):
                    best = there
        if best == start:
            break
    return best


def _stream(
    subject: Head | Model, x: Sequence[Any] | npt.ArrayLike, y: Sequence[Any] | npt.ArrayLike
) -> list[tuple[Any, Any]]:
    """Pairs (h, y) in the head's own units. The trunk of a model runs once per sample."""
    inputs, targets = _entries("x", x), _entries("y", y)
    if len(inputs) != len(targets):
        raise ShapeError(f"y: expected {len(inputs)} targets, one per sample of x, got {len(targets)}")
    if len(inputs) < 2:
        raise ShapeError(f"x: expected at least 2 samples to tune on, got {len(inputs)}")
    if isinstance(subject, Head):
        return list(zip(inputs, targets, strict=True))
    return [(subject.features(one), subject.to_head_units(y)) for one, y in zip(inputs, targets, strict=True)]


def _entries(name: str, values: Sequence[Any] | npt.ArrayLike) -> list[Any]:
    try:
        return list(values)  # type: ignore[arg-type]
    except TypeError:
        raise ShapeError(f"{name}: expected one entry per sample, got {values!r}") from None


def _with_head(subject: Subject, head: Head) -> Subject:
    if isinstance(subject, Head):
        return head
    bundle = subject.bundle()
    gaussian = bundle.scale is not None
    return Model(
        bundle.trunk,
        head,
        input_mean=subject.input_mean or 0.0,
        input_scale=subject.input_scale or 1.0,
        output_offset=subject.output_offset if gaussian else 0.0,
        output_scale=subject.output_scale if gaussian else 1.0,
        made=subject.made,
        backend=subject.trunk.backend,
    )
