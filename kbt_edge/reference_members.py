"""The watchful head in float64 NumPy, to be read beside docs/method.md §8 and §9.

Eight linear regressions learn the same samples. They differ in how they think the plant moves, and are weighed by what
they predicted. This is the textbook form: a full covariance matrix P per member and explicit Kalman gains. The C++ core
computes the same numbers in UD factors, so each checks the other.

Everything is in units of the noise, method.md (8.1): the weights of output o have covariance R_oo P, so P does not
depend on R and is the same for all outputs. Inputs are z = (1, h), bias first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import RangeError, ShapeError
from .reference import ADAPT_START, NOISE_FLOOR, Array, Prediction, _ud

__all__ = ["KINDS", "Kind", "Member", "MembersUpdate", "ReferenceMembers"]

WIDE = 2e4  #: variance of an output before any data, in units of the noise
NARROW = 30.0  #: the same, of the member for noisy targets
HUBER = 16.0  #: NIS per output that a sample counts as at most
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
NOISE_MEMORY = 100  #: samples that the learned noise remembers
BRIEF_MEMORY = 10  #: the same, of the member for noisy targets
SIZE_MEMORY = 1000  #: samples that the mean of |z|² remembers
LARGEST_NIS = 1e30  #: of one output
LEAST_DENSITY = 1e-30  #: of the mixture, relative to the best member

Noise = Literal["adaptive", "constant", "full"]


class Kind(NamedTuple):
    """How a member thinks that the plant moves. All in variance of an output, in units of the noise."""

    name: str
    prior: float = WIDE  # before any data
    walk: float = 0.0  # per sample, by a random walk of all weights
    bias_walk: float = 0.0  # the same, of the bias alone
    noise_memory: int = NOISE_MEMORY


KINDS = (
    Kind("still"),
    Kind("noisy", prior=NARROW, noise_memory=BRIEF_MEMORY),
    Kind("drifts slowly", walk=2e-4),
    Kind("drifts", walk=5e-3),
    Kind("drifts fast", walk=2e-1),
    Kind("offset drifts", bias_walk=1e-2),
    Kind("has changed"),  # the fresh member
    Kind("as before"),  # the best member before the latest change; it does not learn
)
REGULAR, FRESH, BEFORE = 6, 6, 7


@dataclass
class Member:
    """One regression. Arrays are replaced, never changed in place, so members may share them."""

    W: Array  # (d_o, d + 1), bias first
    P: Array  # (d + 1, d + 1)
    R: Array  # (d_o, d_o); diagonal unless noise="full"
    age: int = 0  # samples that the noise was learned from


@dataclass
class Challenger:
    """What speaks for the fresh member, or for the one before the change."""

    evidence: float = 0.0  # nats, at most MOST_PROOF: gives the weight
    lead: float = 0.0  # nats, all of them: proves a change
    age: int = 0  # samples

    def gain(self, nats: float) -> None:
        self.evidence = min(self.evidence + nats, MOST_PROOF)
        self.lead += nats
        self.age += 1

    def proves(self, patience: int) -> bool:
        return self.age >= patience and self.lead > LEAD_RATE * self.age


class MembersUpdate(NamedTuple):
    nis: float
    log_likelihood: float
    changed: Literal["none", "changed", "returned"]


class ReferenceMembers:
    """``kbt_edge.Head(weight, bias)`` of one gaussian linear layer with drift="auto", without a gate."""

    def __init__(
        self,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        prior_var: float | None = None,
        noise_var: npt.ArrayLike = 1e-2,
        noise: Noise = "adaptive",
    ) -> None:
        w = np.asarray(weight, np.float64)
        if w.ndim != 2:
            raise ShapeError(f"weight: expected (d_o, d), got {w.shape}")
        if noise not in ("adaptive", "constant", "full"):
            raise RangeError(f"noise: expected 'adaptive', 'constant' or 'full', got {noise!r}")
        self.d_o, self.d = w.shape
        b = np.zeros(self.d_o) if bias is None else np.asarray(bias, np.float64)
        self.noise, self.prior_var = noise, prior_var
        self.first_W, self.first_R = np.column_stack([b, w]), np.diag(self._given(noise_var))
        nothing = np.zeros((self.d + 1, self.d + 1))  # until the first sample
        self.members = [Member(self.first_W, nothing, self.first_R) for _ in KINDS]
        self.kept = self.members[0]  # the best regular member, as it was when the fresh one began
        self.log_weights = np.full(REGULAR, -math.log(REGULAR))
        self.fresh, self.before = Challenger(), Challenger()
        self.suspicious = self.has_before = False
        self.size, self.seen, self.returns, self.samples = 0.0, 0, 0, 0

    @property
    def weights(self) -> Array:
        """method.md (9.1): regular members by their evidence, a challenger by its odds against all of them."""
        regular = np.exp(self.log_weights)
        odds = [math.exp(min(c.evidence - DOUBT, 50.0)) for c in (self.fresh, self.before)]
        w = np.array([*(regular / regular.sum()), odds[0], odds[1] if self.has_before else 0.0])
        return np.asarray(w / w.sum())

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """Mean, epistemic covariance and total variance of the mixture, method.md (9.2), for (d,) or (rows, d)."""
        z = self._inputs(h)
        self._set_first_covariances(z[0])
        return self._mixture(z, np.shape(h)[:-1])

    def update(self, h: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> MembersUpdate:
        """Learns the rows one after another, which is exact. ``noise_var`` replaces R for this call."""
        z, target = self._inputs(h), np.asarray(y, np.float64)
        if target.shape != (*np.shape(h)[:-1], self.d_o):
            raise ShapeError(f"y: expected shape {(*np.shape(h)[:-1], self.d_o)}, got {target.shape}")
        given = None if noise_var is None else self._given(noise_var)
        self._set_first_covariances(z[0])
        rows = [self._learn(za, ya, given) for za, ya in zip(z, np.atleast_2d(target), strict=True)]
        self.samples += 1
        changed = [row.changed for row in rows if row.changed != "none"]
        return MembersUpdate(
            sum(row.nis for row in rows), sum(row.log_likelihood for row in rows), changed[-1] if changed else "none"
        )

    def _mixture(self, z: Array, lead: tuple[int, ...]) -> Prediction:
        w, n = self.weights, len(z) * self.d_o
        means = np.stack([(z @ m.W.T).ravel() for m in self.members])
        mean = w @ means
        cov, total = np.zeros((n, n)), np.zeros(n)
        for wl, m, mean_l in zip(w, self.members, means, strict=True):
            apart = np.outer(mean_l - mean, mean_l - mean)
            cov += wl * (np.kron(z @ m.P @ z.T, m.R) + apart)
            total += wl * np.diag(np.kron(z @ m.P @ z.T + np.eye(len(z)), m.R) + apart)
        return Prediction(mean.reshape(*lead, self.d_o), cov, total.reshape(*lead, self.d_o))

    def _learn(self, z: Array, y: Array, given: Array | None) -> MembersUpdate:
        mixture, w, size = self._mixture(z[None], ()), self.weights, float(z @ z)
        nis = float(np.minimum((y - mixture.mean) ** 2 / mixture.total_var, LARGEST_NIS).sum())
        self.size += (size - self.size) / min(self.seen + 1, SIZE_MEMORY)
        self.seen = min(self.seen + 1, SIZE_MEMORY)
        if nis > SURPRISE * self.d_o and not self.suspicious:  # perhaps the first sample of a changed plant
            self._begin_fresh(True)

        judged = [self._judge(m, z, y, given) for m in self.members]
        log_density = np.array([density for _, density in judged])
        top = float(log_density.max())
        log_likelihood = top + math.log(max(float(w @ np.exp(log_density - top)), LEAST_DENSITY))
        self._weigh_in(log_density)
        for kind, m, (own_nis, _) in zip(KINDS[:BEFORE], self.members, judged, strict=False):
            self._learn_member(kind, m, z, y, given, min(1.0, HUBER * self.d_o / max(own_nis, NOISE_FLOOR)))
        for kind, m in zip(KINDS[:REGULAR], self.members, strict=False):
            self._walk(kind, m)
        return MembersUpdate(nis, log_likelihood, self._decide())

    def _judge(self, m: Member, z: Array, y: Array, given: Array | None) -> tuple[float, float]:
        """NIS and log density of y as member m predicts it: normal with covariance R (1 + zᵀPz), method.md (8.1)."""
        e = y - m.W @ z
        S = (m.R if given is None else np.diag(given)) + m.R * float(z @ m.P @ z)
        nis = float(e @ np.linalg.solve(S, e))
        return nis, -0.5 * (nis + float(np.linalg.slogdet(S)[1]) + self.d_o * math.log(2 * math.pi))

    def _learn_member(self, kind: Kind, m: Member, z: Array, y: Array, given: Array | None, weight: float) -> None:
        """A Kalman step in units of the noise, whose noise is 1 / weight: the robust step, method.md (8.3)."""
        e, Pz = y - m.W @ z, m.P @ z
        c, noise = float(z @ Pz), 1.0 if given is None else float(np.mean(given / np.diag(m.R)))
        kept = noise / weight
        gain = Pz / (kept + c)
        keep = np.eye(len(z)) - np.outer(gain, z)
        m.W = m.W + np.outer(e, gain)
        m.P = keep @ m.P @ keep.T + kept * np.outer(gain, gain)  # Joseph's form of P - P z zᵀ P / (kept + c)
        if given is None:  # method.md (8.2)
            rate = 1 / min(m.age + ADAPT_START, kind.noise_memory)
            m.age = min(m.age + 1, SIZE_MEMORY)
            if self.noise != "constant":
                found = np.outer(e, e) * weight / (1 + c)
                R = m.R + rate * ((found if self.noise == "full" else np.diag(np.diag(found))) - m.R)
                m.R = R + np.diag(np.maximum(NOISE_FLOOR - np.diag(R), 0.0))

    def _weigh_in(self, log_density: Array) -> None:
        """method.md (9.1) for one sample: evidence of the challengers, then the weights of the regular members."""
        regular = log_density[:REGULAR]
        joint = self.log_weights + regular
        top = float(joint.max())
        mixture = top + math.log(float(np.exp(joint - top).sum() / np.exp(self.log_weights).sum()))
        gains = np.clip(log_density[[FRESH, BEFORE]] - mixture, -CAP, CAP)
        self.fresh.gain(float(gains[0]))
        if self.has_before:
            self.before.gain(float(gains[1]))
            if self.before.evidence <= 0:  # the lead counts from where it was last ahead
                self.before = Challenger()
        best = regular.max()
        x = FADE * self.log_weights + np.maximum(regular, best - CAP * self.d_o) - best
        w = np.exp(x - x.max())
        self.log_weights = np.log((1 - SHARE) * w / w.sum() + SHARE / REGULAR)

    def _walk(self, kind: Kind, m: Member) -> None:
        """method.md (9.3): P + Q, with Q diagonal in the basis U of P = U D Uᵀ, and no D raised above the prior."""
        if kind.walk or kind.bias_walk:
            U, D = _ud(m.P)
            step = np.full(len(D), kind.walk / self.size) if kind.walk else kind.bias_walk * (np.arange(len(D)) == 0)
            m.P = np.asarray((U * np.minimum(D + step, np.maximum(D, self._prior(kind, self.size)))) @ U.T)

    def _decide(self) -> Literal["none", "changed", "returned"]:
        """Has the plant changed, or gone back? Otherwise the fresh member may be due to begin again. method.md §9"""
        patience = YOUNG << self.returns
        if self.before.proves(patience):
            self._replace_members(BEFORE)
            self.returns = min(self.returns + 1, MOST_RETURNS)
            return "returned"
        if self.fresh.proves(patience):
            self._replace_members(FRESH)
            return "changed"
        if self.fresh.age >= LIVES * max(self.d + 1, patience) or self.fresh.evidence < -PROOF:
            self._begin_fresh(False)
        return "none"

    def _begin_fresh(self, suspicious: bool) -> None:
        self.kept = replace(self.members[int(self.log_weights.argmax())])
        P = self._prior(KINDS[FRESH], self.size) * np.eye(self.d + 1)
        self.members[FRESH] = Member(self.first_W, P, self.first_R)
        self.fresh, self.suspicious = Challenger(), suspicious

    def _replace_members(self, source: int) -> None:
        """The regular members go on from member ``source``. What was kept is the member before the change."""
        new = self.members[source]
        self.members[:REGULAR] = [replace(new) for _ in range(REGULAR)]
        self.members[BEFORE] = self.kept
        self.log_weights = np.full(REGULAR, -math.log(REGULAR))
        self.before, self.has_before = Challenger(), True
        self._begin_fresh(False)

    def _prior(self, kind: Kind, size: float) -> float:
        """Variance of a weight before any data, for inputs of this |z|², in units of the noise."""
        return kind.prior / size if self.prior_var is None else self.prior_var * kind.prior / WIDE

    def _set_first_covariances(self, z: Array) -> None:
        """Before the first sample the prior is as wide as the input asks for."""
        for kind, m in zip(KINDS if self.seen == 0 else (), self.members, strict=False):
            m.P = self._prior(kind, float(z @ z)) * np.eye(len(z))
            self.kept = replace(self.members[0])

    def _inputs(self, h: npt.ArrayLike) -> Array:
        rows = np.atleast_2d(np.asarray(h, np.float64))
        if rows.ndim != 2 or rows.shape[1] != self.d or len(rows) == 0:
            raise ShapeError(f"h: expected ({self.d},) or (rows, {self.d}), got {np.shape(h)}")
        return np.column_stack([np.ones(len(rows)), rows])

    def _given(self, noise_var: npt.ArrayLike) -> Array:
        """Variances (d_o,), raised to the floor."""
        return np.maximum(np.broadcast_to(np.asarray(noise_var, np.float64), (self.d_o,)), NOISE_FLOOR)
