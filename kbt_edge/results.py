"""The results of a head: predictions, updates, and its health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import numpy as np

from kbt_edge import _core
from kbt_edge._arrays import Array
from kbt_edge.errors import RangeError

if TYPE_CHECKING:
    from kbt_edge._core import Core, Policy

__all__ = ["Change", "Counters", "Health", "Layer", "Prediction", "Update", "Verdict"]

# For type checkers. The core has the names (``_core.VERDICTS``).
Verdict = Literal[
    "too few samples", "consistent", "overconfident", "underconfident", "diverging", "no band",
    "changed", "drifting", "noisy",
]  # fmt: skip


class _Moments(NamedTuple):
    mean: Array
    """(d_o,) or (rows, d_o)"""
    var: Array
    """Epistemic variance, shaped like ``mean``."""
    total_var: Array
    """Variance of a new observation: epistemic plus noise, shaped like ``mean``."""


@final
class Prediction(_Moments):
    """The predicted output and its uncertainty."""

    _origin: tuple[Core | Policy, Core, int] | None = None  # who computes the covariance; the head, and its ticket
    _cov: Array | None = None

    @property
    def cov(self) -> Array:
        """Epistemic covariance, jointly over all rows and outputs: (rows * d_o, rows * d_o).

        It is computed when it is first asked for, which must be before the head predicts or learns again.
        """
        if self._cov is None:
            if self.mean.size == 1:
                self._cov = self.var.reshape(1, 1)
            else:
                self._cov = self._computed()
        return self._cov

    def _computed(self) -> Array:
        found: Array | int = _core.E_ORDER
        if self._origin is not None:
            source, core, ticket = self._origin
            if core.ticket == ticket:
                found = source.predicted_cov()
        if isinstance(found, int):
            raise RangeError(
                "cov: expected to be read before the head predicts or learns again, got a prediction that is no longer "
                "the latest; var and total_var stay, and a copy of cov that was read before does",
                found,
            )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return prediction, (*self, self._cov)

    @property
    def std(self) -> Array:
        """Epistemic standard deviation."""
        return np.sqrt(self.var)

    @property
    def total_std(self) -> Array:
        """Standard deviation of a new observation."""
        return np.sqrt(self.total_var)

    def __repr__(self) -> str:
        if self.mean.size > 6:
            return f"Prediction(mean of shape {self.mean.shape}, std up to {self.std.max():.3g})"
        pairs = zip(self.mean.flat, self.std.flat, self.total_std.flat, strict=True)
        return "Prediction(" + ", ".join(f"{m:.4g} ± {s:.2g} (total {t:.2g})" for m, s, t in pairs) + ")"


def prediction(mean: Array, var: Array, total_var: Array, cov: Array | None) -> Prediction:
    """A prediction that has its covariance already, or never will."""
    made = Prediction(mean, var, total_var)
    made._cov = cov
    return made


@final
class Update(NamedTuple):
    """How well a sample was predicted before it was learned."""

    status: Literal["ok", "gated"]
    """``"ok"``, or ``"gated"`` when the innovation gate rejected the sample."""
    nis: float
    """Normalised innovation squared. Its mean is rows * d_o for a consistent gaussian head."""
    log_likelihood: float
    """Log predictive density (gaussian) or log probability (softmax) of the sample."""
    changed: bool
    """Whether the head has just noticed that the plant has changed, or gone back; ``head.changes`` says more."""


class Change(NamedTuple):
    """A change of the plant that the head has noticed."""

    sample: int
    """Where the plant changed, as the head sees it: the number of samples learned before."""
    noticed: int
    """The number of samples when the head was sure."""
    evidence: float
    """Nats by which the changed plant explains the samples better; 0 if ``suppose_changed`` said so."""
    kind: Literal["changed", "returned"]
    """``"returned"``: the plant is as it was before the change before."""


class Counters(NamedTuple):
    """Events since the head was made or loaded. Diagnostics: not part of the saved state."""

    rejected: int
    """Calls that the core rejected for their input."""
    gated: int
    """Samples rejected by the gate."""
    floored: int
    """Variances held at a floor, and steps skipped, because only rounding error was left."""


class Health(NamedTuple):
    """Whether the errors are as large as predicted; see docs/health.md. Not part of the saved state."""

    verdict: Verdict
    """``"consistent"``: the average is inside the band. ``"overconfident"``: errors are larger than predicted, or
    the gate rejects more than outliers. ``"underconfident"``: they are smaller. ``"diverging"``: far beyond the band
    and growing, or most samples rejected, or variances blown up. ``"too few samples"``: fewer than 30 since the prior,
    the noise or the state was set. ``"no band"``: rule "replace", whose expected average is unknown. Of a
    watchful head: ``"changed"``: the plant changed within the last 200 samples. ``"drifting"``: a random walk explains
    the samples better than a plant that stands still. ``"noisy"``: the noise variance is over four times its usual
    level. ``"diverging"``: the samples keep surprising it."""
    seen: int
    """Samples in the average."""
    average: float
    """Running average over 200 samples. Gaussian: NIS / (rows * d_o), expected 1. Softmax: surprise -log p(y) less the
    entropy of the prediction, nats a row, expected 0."""
    low: float
    """The average of a consistent head lies between ``low`` and ``high`` in 99.9 % of checks."""
    high: float
    gated: float
    """Recent share of samples that the gate rejected."""
    smallest_var: float
    """Smallest entry of D over the factors of all layers."""
    largest_var: float
    counters: Counters

    def __repr__(self) -> str:
        if self.seen == 0:
            return f"Health({self.verdict})"
        gated = f", {self.gated:.0%} gated" if self.gated else ""
        return (
            f"Health({self.verdict}: average {self.average:.3g}, band {self.low:.3g} to {self.high:.3g}, "
            f"{self.seen} samples{gated}; variances {self.smallest_var:.2g} to {self.largest_var:.2g})"
        )


class Layer(NamedTuple):
    """A copy of one layer's posterior."""

    mean: Array
    """(n, m + 1), bias in the last column."""
    cov: Array
    """full: (n (m+1), n (m+1)); neuron: (n, m+1, m+1); diagonal: (n, m+1)."""
