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
from .reference import ADAPT_START, HUBER, NOISE_FLOOR, NOISE_MEMORY, Array, Prediction, _ud
from .reference_evidence import SIZE_MEMORY, SURPRISE, Event, Evidence, mixed_density

__all__ = ["KINDS", "Kind", "Member", "MembersUpdate", "ReferenceMembers"]

WIDE = 2e4  #: variance of an output before any data, in units of the noise
NARROW = 30.0  #: the same, of the member for noisy targets
BRIEF_MEMORY = 10  #: the same, of the member for noisy targets
LARGEST_NIS = 1e30  #: of one output

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


class MembersUpdate(NamedTuple):
    nis: float
    log_likelihood: float
    changed: Event


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
        self.evidence, self.samples = Evidence(REGULAR), 0

    @property
    def weights(self) -> Array:
        return self.evidence.weights

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
        self.evidence.note_size(size)
        if nis > SURPRISE * self.d_o and not self.evidence.suspicious:  # perhaps the first sample of a changed plant
            self._begin_fresh(True)

        judged = [self._judge(m, z, y, given) for m in self.members]
        log_density = np.array([density for _, density in judged])
        log_likelihood = mixed_density(w, log_density)
        self.evidence.weigh_in(log_density, self.d_o)
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

    def _walk(self, kind: Kind, m: Member) -> None:
        """method.md (9.3): P + Q, with Q diagonal in the basis U of P = U D Uᵀ, and no D raised above the prior."""
        if kind.walk or kind.bias_walk:
            U, D = _ud(m.P)
            step = (
                np.full(len(D), kind.walk / self.evidence.size)
                if kind.walk
                else kind.bias_walk * (np.arange(len(D)) == 0)
            )
            m.P = np.asarray((U * np.minimum(D + step, np.maximum(D, self._prior(kind, self.evidence.size)))) @ U.T)

    def _decide(self) -> Event:
        """Has the plant changed, or gone back? Otherwise the fresh member may be due to begin again. method.md §9"""
        event = self.evidence.decide()
        if event != "none":
            self._replace_members(BEFORE if event == "returned" else FRESH)
        elif self.evidence.fresh_is_due(self.d + 1):
            self._begin_fresh(False)
        return event

    def _begin_fresh(self, suspicious: bool) -> None:
        self.kept = replace(self.members[self.evidence.best])
        P = self._prior(KINDS[FRESH], self.evidence.size) * np.eye(self.d + 1)
        self.members[FRESH] = Member(self.first_W, P, self.first_R)
        self.evidence.begin_fresh(suspicious)

    def _replace_members(self, source: int) -> None:
        """The regular members go on from member ``source``. What was kept is the member before the change."""
        new = self.members[source]
        self.members[:REGULAR] = [replace(new) for _ in range(REGULAR)]
        self.members[BEFORE] = self.kept
        self.evidence.members_replaced(keep_before=True)
        self._begin_fresh(False)

    def _prior(self, kind: Kind, size: float) -> float:
        """Variance of a weight before any data, for inputs of this |z|², in units of the noise."""
        return kind.prior / size if self.prior_var is None else self.prior_var * kind.prior / WIDE

    def _set_first_covariances(self, z: Array) -> None:
        """Before the first sample the prior is as wide as the input asks for."""
        for kind, m in zip(KINDS if self.evidence.seen == 0 else (), self.members, strict=False):
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
