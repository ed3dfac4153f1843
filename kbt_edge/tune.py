"""The settings of a head that fit a short stream best, by what each head would have predicted.

    tuned = tune(model, x, y)       # a few hundred samples will do
    print(tuned.report())
    model = tuned.model             # the same trunk, a fresh head with the chosen settings

A setting is judged by its prequential log likelihood: every sample is predicted before it is learned, and the log
densities are added up. It needs no held-out data and no ground truth, and it punishes a head that is too sure of itself
as well as one that is too slow (method.md §1, §7).

The candidates are a short list: watchful or one filter, hidden layers or none, a noise matrix or variances, and a few
priors. The prior of the best ones is then refined. A candidate is chosen only if its gain is more than two standard
errors. One filter in place of a watchful head must gain another 0.1 nats per sample, because it would not follow a
plant that changes; so must added hidden layers, because they take more time and memory. Noise is learned, never chosen;
a constant ``noise_var`` that was given is kept, or learned instead.

The search draws no random numbers: the same stream gives the same answer.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kbt_edge._candidates import Search, Settings, choice, log_likelihoods
from kbt_edge.errors import RangeError, ShapeError
from kbt_edge.head import Head
from kbt_edge.model import Model

__all__ = ["Candidate", "Tuned", "prequential", "tune"]

Subject = TypeVar("Subject", Head, Model)

_SHOWN = 10  # lines of a report


@dataclass(frozen=True)
class Candidate:
    """The settings of a head, and how well it predicted the stream."""

    settings: Settings  # keywords of ``Head``; those that are missing have their defaults
    log_likelihood: float  # per sample
    gain: float  # over the default head, per sample
    error: float  # standard error of the gain

    def __str__(self) -> str:
        return ", ".join(f"{name}={_plain(value)}" for name, value in self.settings.items()) or "defaults"


@dataclass(frozen=True)
class Tuned(Generic[Subject]):
    """The chosen settings, what they were chosen from, and the head or model that has them and has learned nothing."""

    subject: Subject
    default: Candidate  # ``Head(weight, bias)``
    before: Candidate  # the settings of the head that was tuned
    best: Candidate  # the chosen one
    tried: tuple[Candidate, ...]  # in the order of the search
    samples: int
    seconds: float
    note: str | None = None  # why nothing was chosen

    @property
    def head(self) -> Head:
        """A fresh head with the chosen settings."""
        return self.subject.head if isinstance(self.subject, Model) else self.subject

    @property
    def model(self) -> Model:
        """The model with that head, if a model was tuned."""
        if not isinstance(self.subject, Model):
            raise RangeError("model: expected a tuned Model, got a tuned Head; use .head")
        return self.subject

    def report(self) -> str:
        """What was chosen, its gain over the default head, and a table of the candidates."""
        lines = [
            f"{self.samples} samples, {len(self.tried)} settings tried in {self.seconds:.1f} s",
            f"chosen: {self.best}",
            f"gain over the default head: {_gain(self.best)} nats per sample (± standard error)",
        ]
        if self.note is not None:
            lines.append(f"note: {self.note}")
        lines += ["", f"  {'':<8}{'log likelihood':>14}{'gain':>17}   settings"]
        ranked = sorted(self.tried, key=lambda candidate: -candidate.log_likelihood)
        for i, candidate in enumerate(ranked):
            marks = (("chosen", self.best), ("default", self.default), ("before", self.before))
            mark = next((name for name, marked in marks if candidate is marked), "")
            if mark or i < _SHOWN:
                lines.append(f"  {mark:<8}{candidate.log_likelihood:>14.3f}{_gain(candidate):>17}   {candidate}")
        lines += ["", "per sample, each predicted before it was learned; in the units of the network's output"]
        return "\n".join(lines)


def tune(subject: Subject, x: Sequence[Any] | npt.ArrayLike, y: Sequence[Any] | npt.ArrayLike) -> Tuned[Subject]:
    """Choose the settings of a ``Head`` or a ``Model`` for the stream (x[0], y[0]), (x[1], y[1]), …

    x   what ``update`` takes, one entry per sample: rows h for a ``Head``, inputs for a ``Model``
    y   the targets, as ``update`` takes them

    It chooses ``drift``, ``hidden``, ``noise`` and ``prior_var``; other settings stay as they are. The present settings
    and those of ``Head(weight, bias)`` are among the candidates. The better of the two stays unless another candidate
    gains more than two standard errors, so on this stream the result is never worse than either. With fewer samples
    than inputs, d + 1, the present settings stay, and a warning says so.

    All candidates start from the readout that the head has now: tune a fresh head, or one that has learned to go on
    from there. The readout inside a head with hidden layers is known only before it has learned. After that, its hidden
    layers stay. ``subject`` itself is left alone.
    """
    started = time.perf_counter()
    pairs = _stream(subject, x, y)
    search = Search(subject.head if isinstance(subject, Model) else subject, pairs)
    before = search.present()
    default = search.score(search.default) or before
    rows, needed = sum(np.atleast_2d(h).shape[0] for h, _ in pairs), search.inputs
    note = None
    if rows < needed:
        best = before
        note = f"{rows} samples are too few to choose settings for {needed} inputs; the present ones stay"
        warnings.warn(f"tune: {note}", UserWarning, stacklevel=2)
    else:
        search.run()
        best = choice(before if before.mean > default.mean else default, search.tried)
    judged = {id(one): Candidate(one.settings, one.mean, *one.gain(default)) for one in search.tried}
    return Tuned(
        subject=_with_head(subject, search.head(best.settings)),
        default=judged[id(default)],
        before=judged[id(before)],
        best=judged[id(best)],
        tried=tuple(judged.values()),
        samples=len(pairs),
        seconds=time.perf_counter() - started,
        note=note,
    )


def prequential(head: Head, pairs: Sequence[tuple[Any, Any]]) -> float:
    """Mean log likelihood of the pairs (h, y), each predicted before it is learned. ``head`` learns them."""
    return math.fsum(log_likelihoods(head, pairs)) / len(pairs)


def _plain(value: object) -> str:
    """A setting with few digits."""
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_plain, value)) + ("," if len(value) == 1 else "") + ")"
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _gain(candidate: Candidate) -> str:
    return f"{candidate.gain:+.3f} ± {candidate.error:.3f}"


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
