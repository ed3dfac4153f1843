"""The candidates of ``tune``: heads like a given one with other settings, and what each of them predicted."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kbt_edge._arrays import Array
from kbt_edge.errors import KbtError, NumericsError, RangeError
from kbt_edge.head import Head
from kbt_edge.settings import DEFAULTS

__all__ = ["Scored", "Search", "Settings", "choice", "log_likelihoods"]

Settings = dict[str, Any]  # keywords of ``Head``

_BASIC = ("output", "dtype", "max_rows")  # what the default head has in common with the one that is tuned
_KEPT = (*_BASIC, "covariance", "rule", "forgetting", "gate", "relu_order", "softmax_order", "input_var")

# Prior variances of the hidden layers and of the last one, besides the default.
_HIDDEN_PRIORS = ((1e-4, 1.0), (1e-2, 0.1), (1e-2, 10.0), (1.0, 10.0))
_WIDEST = 64  # hidden layer that is tried: its cost grows with the cube of the width
_REFINEMENTS = (10.0, 10.0**0.5)  # factors on prior variances
_NARROWEST = 1e-2  # factor on prior variances: with narrower ones, a head could not follow a later change
_ROUNDS = 3  # of one refinement at most
_WATCHFUL_PRIOR = 20_000.0  # automatic, variance of an output in units of the noise (method.md §9)
_NOISE_START = 1e-2  # of a head with default settings
_STANDARD_ERRORS = 2.0  # that a gain must exceed
# Nats per sample that a candidate must gain on top: if it is one filter in place of a watchful head, because it would
# not follow a plant that changes, and if it adds hidden layers, because they take more time and memory.
_PRICE = 0.1
_WORTH = 0.01  # nats per sample that a choice, or a step of a refinement, must gain


def log_likelihoods(head: Head, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    return [head.update(h, y).log_likelihood for h, y in pairs]


class Scored:
    """Settings, and the log likelihood of each sample."""

    def __init__(self, settings: Settings, watchful: bool, log_likelihoods: list[float]) -> None:
        self.settings = settings
        self.watchful = watchful
        self.deep = "hidden" in settings
        self.values = np.array(log_likelihoods)
        self.mean = math.fsum(log_likelihoods) / len(log_likelihoods)

    def gain(self, other: Scored) -> tuple[float, float]:
        """Mean difference per sample, and its standard error."""
        if other is self:
            return 0.0, 0.0
        difference = self.values - other.values
        return self.mean - other.mean, float(difference.std(ddof=1)) / math.sqrt(difference.size)


def choice(incumbent: Scored, tried: Sequence[Scored]) -> Scored:
    """The best of those that are better than the incumbent by more than chance; the incumbent if there is none."""

    def lead(one: Scored) -> float:
        blind = incumbent.watchful and not one.watchful
        deeper = one.deep and not incumbent.deep
        return one.gain(incumbent)[0] - _PRICE * (blind + deeper)

    better = [one for one in tried if lead(one) > max(_WORTH, _STANDARD_ERRORS * one.gain(incumbent)[1])]
    return max(better, key=lead, default=incumbent)


class Search:
    """Heads like a given one with other settings, and what they predicted."""

    def __init__(self, head: Head, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = pairs
        self._config = head.config
        self._hidden: tuple[int, ...] = self._config["widths"][1:-1]
        self.inputs = head.d + 1
        self._means = [layer.mean for layer in head.layers]
        self._readout = _readout(head)
        self._max_memory = max(head.nbytes, 1 << 30)
        defaults: Mapping[str, Any] = DEFAULTS
        self._kept = {name: self._config[name] for name in _KEPT if self._config[name] != defaults[name]}
        self._noise = _noise(head)
        kept = {name: value for name, value in {**self._noise, **self._kept}.items() if name != "covariance"}
        usual = Head.from_means(self._means, drift=self._config["drift"], max_memory=self._max_memory, **kept)
        if self._config["covariance"] == usual.config["covariance"]:
            self._kept.pop("covariance", None)
        basic = {name: value for name, value in self._kept.items() if name in _BASIC}
        self.default = {**_shape(() if self._readout else self._hidden), **basic}
        self._scores: dict[bytes, Scored] = {}

    @property
    def tried(self) -> list[Scored]:
        return list(self._scores.values())

    def head(self, settings: Mapping[str, Any]) -> Head:
        """A fresh head."""
        given = {"max_memory": self._max_memory, **settings}
        hidden = given.pop("hidden", ())
        if hidden == self._hidden or self._readout is None:
            return Head.from_means(self._means, **given)
        return Head(*self._readout, hidden=hidden, **given)

    def present(self) -> Scored:
        """The settings of the given head. Raises what is wrong with it or with the stream."""
        settings = {**_shape(self._hidden), **self._noise, **self._kept}
        usual = self.head(self.default).config
        for name in ("drift", "prior_var"):
            if self._config[name] != usual[name]:
                settings[name] = self._config[name]
        return self._score(settings, given=True)

    def score(self, settings: Settings) -> Scored | None:
        """None if the head or the stream is rejected."""
        try:
            return self._score(settings)
        except KbtError:
            return None

    def run(self) -> None:
        """Score every candidate, then refine the prior of the best of each kind."""
        for settings in self._candidates():
            self.score(settings)
        best: dict[tuple[bool, bool], Scored] = {}
        for one in sorted(self.tried, key=lambda one: one.mean):
            best[one.watchful, one.deep] = one
        for one in best.values():
            self._refine(one)

    def _score(self, settings: Settings, *, given: bool = False) -> Scored:
        head = self.head(settings)
        key = hashlib.sha256(head.to_bytes()).digest()  # different settings can mean the same head
        if key not in self._scores:
            found = Scored(settings, head.config["drift"] == "auto", log_likelihoods(head, self._pairs))
            if not math.isfinite(found.mean):
                raise NumericsError(f"tune: expected a stream of finite log likelihood, got {found.mean}")
            health = head.health()
            if not given and head.config["noise"] == "constant" and health.average > health.high:
                raise RangeError("noise_var: expected a noise that explains the errors, got a smaller one")
            self._scores[key] = found
        return self._scores[key]

    def _candidates(self) -> Iterator[Settings]:
        drifts = dict.fromkeys(("auto", 0.0, self._config["drift"]))
        for hidden in self._shapes():
            priors = (None, *_HIDDEN_PRIORS) if len(hidden) == 1 else (None,)
            for noise, drift, prior in itertools.product(self._noises(), drifts, priors):
                settings = {**_shape(hidden), **noise, **self._kept}
                if drift != "auto":
                    settings["drift"] = drift
                if prior is not None:
                    settings["prior_var"] = prior
                yield settings

    def _shapes(self) -> list[tuple[int, ...]]:
        """Widths of the hidden layers."""
        if self._readout is None:
            return [self._hidden]
        shapes = [(), self._hidden]
        if self._config["output"] == "gaussian":
            d = self._config["widths"][0]
            shapes += [(width,) for width in (2 * d, 4 * d) if width <= _WIDEST]
        return list(dict.fromkeys(shapes))

    def _noises(self) -> list[Settings]:
        """Learned noise, and the constant one that the head has. The core rejects what does not go together."""
        constant = [self._noise] if self._config["noise"] in ("constant", "matrix") else []
        if constant and self._config["rule"] == "replace":
            return constant
        several = self._config["output"] == "gaussian" and self._config["widths"][-1] > 1
        start = self._noise.get("noise_var") if not constant else None
        return [_learned(kind, start) for kind in (("adaptive", "full") if several else ("adaptive",))] + constant

    def _refine(self, best: Scored) -> None:
        """Steps of the prior variances, one after the other, until none helps."""
        prior = best.settings.get("prior_var") or self._prior(best.settings)
        least = [_NARROWEST * variance for variance in prior]
        for factor in _REFINEMENTS:
            for _ in range(_ROUNDS):
                start = best
                for i, step in itertools.product(range(len(prior)), (factor, 1 / factor)):
                    there = (*prior[:i], float(f"{prior[i] * step:.2g}"), *prior[i + 1 :])
                    found = self.score({**best.settings, "prior_var": there}) if there[i] >= least[i] else None
                    if found is not None and found.mean > best.mean + _WORTH:
                        best, prior = found, there
                if best is start:
                    break

    def _prior(self, settings: Settings) -> tuple[float, ...]:
        """The automatic prior as numbers, or others to begin with if they are not known."""
        config = self.head(settings).config
        if config["prior_var"] is not None:
            return tuple(config["prior_var"])
        if config["output"] != "gaussian" or len(config["widths"]) > 2:
            return (*[1e-2] * (len(config["widths"]) - 2), 1.0)
        h = np.concatenate([np.atleast_2d(h) for h, _ in self._pairs]).astype(np.float64)
        return (float(f"{_WATCHFUL_PRIOR / (1.0 + np.mean(np.sum(h**2, axis=-1))):.2g}"),)


def _shape(hidden: tuple[int, ...]) -> Settings:
    return {"hidden": hidden} if hidden else {}


def _learned(kind: str, start: Any) -> Settings:
    """Noise that is learned from a given start."""
    if start is not None:
        return {"noise": kind, "noise_var": start}
    return {} if kind == "adaptive" else {"noise": kind}


def _noise(head: Head) -> Settings:
    """The noise of a head as keywords; what is learned starts where it is now."""
    kind = head.config["noise"]
    if kind == "multinomial":
        return {}
    noise = np.diagonal(head.noise_var) if kind == "full" else head.noise_var
    same = noise.ndim == 1 and bool((noise == noise[0]).all())
    value = float(noise[0]) if same else noise.tolist()
    if kind in ("constant", "matrix"):
        return {"noise_var": value}
    return _learned(kind, None if same and math.isclose(noise[0], _NOISE_START, rel_tol=1e-6) else value)


def _readout(head: Head) -> tuple[Array, Array] | None:
    """Weight and bias; None if hidden layers have learned, and the readout is lost in them."""
    means = [layer.mean for layer in head.layers]
    d = head.d
    weight, bias = means[-1][:, :d], means[-1][:, -1]
    if len(means) == 1:
        return weight, bias
    hidden = head.config["widths"][1:-1]
    again = Head(weight, bias, hidden=hidden, covariance="diagonal", drift=0.0, dtype=head.config["dtype"])
    for mean, layer in zip(means[:-1], again.layers, strict=False):
        if not np.array_equal(mean[: 2 * d], layer.mean[: 2 * d]):  # the others are spare
            return None
    return (weight, bias) if np.array_equal(means[-1], again.layers[-1].mean) else None
