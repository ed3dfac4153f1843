"""The watchful head with hidden layers or a softmax in float64 NumPy, to be read beside docs/method.md §9.

Four filters learn the same samples. They differ in their prior and in how they think the plant moves, and are weighed
by what they predicted. Each is a ``ReferenceHead``: plain covariance matrices and explicit gains.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .reference import SMOOTHING, Array, Prediction, ReferenceHead
from .reference_evidence import SURPRISE, Event, Evidence, mixed_density

__all__ = ["BankUpdate", "FilterKind", "ReferenceBank", "automatic_prior", "kinds"]

WIDE = 2e4  #: variance of an output before any data, in units of the noise
COPIES = 1e-4  #: of a weight of a hidden layer, in units of the noise
CLASSES, LOGIT, CLASS_COPIES = 1.0, 16.0, 1e-6  #: of a weight before a softmax, of a logit, of a hidden weight below
SURPRISE_NATS = 4.0  #: of a row of a softmax: the fresh filter begins
REGULAR, FRESH = 3, 3

Output = Literal["gaussian", "softmax"]


class FilterKind(NamedTuple):
    """What a filter thinks of the plant."""

    name: str
    hidden: float  # its prior relative to the automatic one: in hidden layers
    last: float  # the same, in the last layer
    walk: float  # variance of an output per sample, in units of the noise; of a softmax that of a logit


def kinds(output: Output, prior_is_given: bool) -> list[FilterKind]:
    """Two that stand still, one that drifts, and one that has just begun. A prior that is given is that of all."""
    if output == "gaussian":
        found = [
            FilterKind("still", 1.0, 1.0, 0.0),
            FilterKind("still, less linear", 1e4, 1e-2, 0.0),
            FilterKind("drifts", 1e4, 1e-2, 2e-2),
            FilterKind("has changed", 1.0, 1.0, 0.0),
        ]
    else:
        found = [
            FilterKind("still", 1.0, 5.0, 0.0),
            FilterKind("still, less linear", 1e5, 0.3, 0.0),
            FilterKind("drifts", 1.0, 1.0, 1e-2),
            FilterKind("has changed", 1.0, 5.0, 0.0),
        ]
    return [kind._replace(hidden=1.0, last=1.0) if prior_is_given else kind for kind in found]


def automatic_prior(output: Output, d: int, layers: int) -> list[float]:
    """Variance of a weight per layer. Of a gaussian it is a ratio to the noise, for inputs with |z|² = d + 1."""
    if output == "gaussian":
        return [COPIES] * (layers - 1) + [WIDE / (d + 1)]
    return [CLASS_COPIES] * (layers - 1) + [min(CLASSES, LOGIT / d)]


class BankUpdate(NamedTuple):
    status: Literal["ok", "gated"]
    nis: float
    log_likelihood: float
    changed: Event


class ReferenceBank:
    """``kbt_edge.Head.from_means(means)`` with hidden layers or a softmax, and drift="auto".

    ``settings`` are those of ``ReferenceHead``, without ``rule``, ``drift`` and ``backward``. A bank has no use for
    ``forgetting``.
    """

    def __init__(
        self,
        means: Sequence[npt.ArrayLike],
        *,
        prior_var: float | Sequence[float] | None = None,
        noise_var: npt.ArrayLike = 1e-2,
        output: Output = "gaussian",
        gate: float | None = None,
        forgetting: float = 1.0,
        **settings: Any,
    ) -> None:
        self.means, self.noise_var, self.output, self.gate = list(means), noise_var, output, gate
        self.automatic, self.settings = prior_var is None, settings
        self.d, self.layers = np.shape(means[0])[1] - 1, len(self.means)
        self.prior_var = np.broadcast_to(
            automatic_prior(output, self.d, self.layers) if prior_var is None else prior_var, (self.layers,)
        )
        self.kinds = kinds(output, not self.automatic)
        self.filters = [self._begun(kind) for kind in self.kinds]
        self.evidence, self.samples = Evidence(REGULAR), 0

    @property
    def weights(self) -> Array:
        return self.evidence.weights[: REGULAR + 1]

    @property
    def leading(self) -> ReferenceHead:
        """The filter to ask about weights and noise."""
        return self.filters[int(self.weights.argmax())]

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """Mean, epistemic covariance and total variance of the mixture, method.md (9.2), for (d,) or (rows, d)."""
        w, each = self.weights, [f.predict(h) for f in self.filters]
        mean = np.asarray(sum(wl * p.mean for wl, p in zip(w, each, strict=True)))
        cov, total = np.zeros((mean.size, mean.size)), np.zeros(mean.shape)
        for wl, p in zip(w, each, strict=True):
            apart = p.mean - mean
            cov += wl * (p.cov + np.outer(apart, apart))
            total += wl * (p.total_var + apart**2)
        return Prediction(mean, cov, total)

    def update(self, h: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> BankUpdate:
        """Learns the target y of h in every filter. ``noise_var`` replaces R for this sample."""
        rows = np.atleast_2d(np.asarray(h, np.float64))
        size = float((rows**2).sum()) / len(rows) + 1  # of z = [h, 1]
        first = self.evidence.seen == 0 and self.automatic
        before, w = copy.deepcopy(self.filters), self.weights
        if first:  # the prior is as wide as the input asks for
            for f in self.filters:
                f.set_prior((self.d + 1) / size)
        nis = self._nis(self.predict(h), np.asarray(y))
        log_density = np.array([f.update(h, y, noise_var).log_likelihood for f in self.filters])
        log_likelihood = mixed_density(w, log_density)
        if self.gate is not None and nis > self.gate:
            self.filters = before
            return BankUpdate("gated", nis, log_likelihood, "none")

        outputs = len(rows) * (1 if self.output == "softmax" else self.filters[0].d_o)
        self.evidence.note_size(size)
        self.evidence.weigh_in(log_density, outputs)
        self.samples += 1
        event = self.evidence.decide()
        if event != "none":
            self._change()
        elif self.evidence.fresh_is_due(self.d + 1):
            self._begin_fresh(False)
        elif not self.evidence.suspicious and self._surprised(nis, log_likelihood, outputs):
            self._begin_fresh(True)
        return BankUpdate("ok", nis, log_likelihood, event)

    def suppose_changed(self) -> None:
        """The plant is known to have changed: all filters begin anew."""
        if self.samples > 0:
            self._begin_fresh(False)
            self._change()

    def _nis(self, p: Prediction, y: Array) -> float:
        """Of the mixture, output by output. Of a softmax as for its rows alone: Σ e² / p."""
        if self.output == "gaussian":
            return float(((y - p.mean) ** 2 / p.total_var).sum())
        target = y if y.shape == p.mean.shape else np.eye(p.mean.shape[-1])[y]
        return float(((target - p.mean) ** 2 / (p.mean + SMOOTHING)).sum())

    def _surprised(self, nis: float, log_likelihood: float, outputs: int) -> bool:
        if self.output == "softmax":
            return log_likelihood < -SURPRISE_NATS * outputs
        return nis > SURPRISE * outputs

    def _begun(self, kind: FilterKind, relative: float = 1.0) -> ReferenceHead:
        """A filter that has learned nothing; its prior in the last layer is ``relative`` times as wide."""
        found = ReferenceHead(
            self.means,
            prior_var=[*(self.prior_var[:-1] * kind.hidden), self.prior_var[-1] * kind.last],
            noise_var=self.noise_var,
            output=self.output,
            drift=kind.walk,
            in_units_of_noise=self.output == "gaussian",
            **self.settings,
        )
        found.set_prior(relative)
        return found

    def _begin_fresh(self, suspicious: bool) -> None:
        sized = self.automatic and self.evidence.seen > 0
        self.filters[FRESH] = self._begun(self.kinds[FRESH], (self.d + 1) / self.evidence.size if sized else 1.0)
        self.evidence.begin_fresh(suspicious)

    def _change(self) -> None:
        """The regular filters go on from the fresh one, which begins anew."""
        fresh = self.filters[FRESH]
        for k, kind in enumerate(self.kinds[:REGULAR]):
            new = self._begun(kind)
            new.noise_var, new.samples = fresh.noise_var.copy(), fresh.samples
            new.set_prior()
            for i, (layer, source) in enumerate(zip(new.layers, fresh.layers, strict=True)):
                layer.mean = source.mean.copy()
                if i == self.layers - 1 or kind.hidden == self.kinds[FRESH].hidden:
                    layer.cov = source.cov.copy()  # otherwise the hidden layers have their own prior again
            self.filters[k] = new
        self.evidence.members_replaced(keep_before=False)
        self._begin_fresh(False)
