"""What speaks for each member of a watchful head, in float64 NumPy: method.md §9.

The rules by which members are weighed, replaced and begun anew. ``reference_members`` and ``reference_bank`` share
them. Members 0 to ``regular`` - 1 are regular, the next one is fresh, and the one behind it, where there is one, is
the best before the latest change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .reference import Array

__all__ = ["Challenger", "Evidence", "mixed_density"]

SURPRISE = 16.0  #: NIS per output of the mixture at which the fresh member begins
CAP = 2.0  #: nats of evidence that one sample may bring
PROOF = 16.0  #: nats against the fresh member at which it begins anew
DOUBT = 8.0  #: nats at which a challenger is as probable as the regular members
YOUNG = 120  #: samples for which a challenger must have been ahead
LIVES = 3  #: the fresh member begins anew after 3 (d + 1) samples, and not before 3 times the above
MOST_RETURNS = 3  #: each return doubles the patience, up to this many times
LEAD_RATE = 0.5  #: nats per sample by which a challenger must have been ahead
MOST_PROOF = 24.0  #: nats: evidence beyond is not saved up
FADE = 0.998  #: of the log weights, per sample
SHARE = 1e-3  #: of the weights is spread evenly
SIZE_MEMORY = 1000  #: samples that the mean of |z|² remembers
LEAST_DENSITY = 1e-30  #: of the mixture, relative to the best member

Event = Literal["none", "changed", "returned"]


@dataclass
class Challenger:
    """What speaks for the fresh member, or for the one before the change."""

    evidence: float = 0.0  # nats, at most MOST_PROOF: gives the weight
    lead: float = 0.0  # nats, all of them: proves a change
    age: int = 0  # samples

    @property
    def odds(self) -> float:
        """None against evidence: a member that has just begun is wide, and would widen the mixture."""
        return math.exp(min(self.evidence - DOUBT, 50.0)) - math.exp(-DOUBT) if self.evidence > 0 else 0.0

    def gain(self, nats: float) -> None:
        self.evidence = min(self.evidence + nats, MOST_PROOF)
        self.lead += nats
        self.age += 1

    def proves(self, patience: int) -> bool:
        return self.age >= patience and self.lead > LEAD_RATE * self.age


class Evidence:
    """Of ``regular`` members and the challengers."""

    def __init__(self, regular: int) -> None:
        self.regular = regular
        self.log_weights = self._even()
        self.fresh, self.before = Challenger(), Challenger()
        self.suspicious = self.has_before = False
        self.size, self.seen, self.returns = 0.0, 0, 0

    @property
    def weights(self) -> Array:
        """method.md (9.1): regular members by their evidence, a challenger by its odds against all of them."""
        regular = np.exp(self.log_weights)
        w = np.array([*(regular / regular.sum()), self.fresh.odds, self.before.odds])
        return np.asarray(w / w.sum())

    @property
    def best(self) -> int:
        return int(self.log_weights.argmax())

    def note_size(self, size: float) -> None:
        """Of an input z, |z|²."""
        self.size += (size - self.size) / min(self.seen + 1, SIZE_MEMORY)
        self.seen = min(self.seen + 1, SIZE_MEMORY)

    def weigh_in(self, log_density: Array, outputs: int) -> None:
        """method.md (9.1) for one sample of ``outputs`` numbers: challengers, then the weights of the regular."""
        regular = log_density[: self.regular]
        joint = self.log_weights + regular
        top = float(joint.max())
        mixture = top + math.log(float(np.exp(joint - top).sum() / np.exp(self.log_weights).sum()))
        gains = np.clip(log_density[self.regular :] - mixture, -CAP, CAP)
        self.fresh.gain(float(gains[0]))
        if self.has_before:
            self.before.gain(float(gains[1]))
            if self.before.evidence <= 0:  # the lead counts from where it was last ahead
                self.before = Challenger()
        best = regular.max()
        x = FADE * self.log_weights + np.maximum(regular, best - CAP * outputs) - best
        w = np.exp(x - x.max())
        self.log_weights = np.log((1 - SHARE) * w / w.sum() + SHARE / self.regular)

    def decide(self) -> Event:
        """After a sample: has the plant changed, or gone back?"""
        if self.before.proves(self._patience):
            self.returns = min(self.returns + 1, MOST_RETURNS)
            return "returned"
        return "changed" if self.fresh.proves(self._patience) else "none"

    def fresh_is_due(self, inputs: int) -> bool:
        """The fresh member, with this many inputs, has lived long enough or has been proved wrong."""
        return self.fresh.age >= LIVES * max(inputs, self._patience) or self.fresh.evidence < -PROOF

    def begin_fresh(self, suspicious: bool) -> None:
        self.fresh, self.suspicious = Challenger(), suspicious

    def members_replaced(self, keep_before: bool) -> None:
        self.log_weights = self._even()
        self.before, self.has_before = Challenger(), keep_before

    @property
    def _patience(self) -> int:
        return YOUNG << self.returns

    def _even(self) -> Array:
        return np.full(self.regular, -math.log(self.regular))


def mixed_density(w: Array, log_density: Array) -> float:
    """log Σ w_l p_l"""
    top = float(log_density.max())
    return top + math.log(max(float(w @ np.exp(log_density - top)), LEAST_DENSITY))
