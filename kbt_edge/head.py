"""The Bayesian head: ``predict`` with uncertainty, ``update`` sample by sample, in fixed memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, cast, check_finite, labels_array, plain_array, real_array, shape_error
from kbt_edge._files import read_bounded, write_atomic
from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError

if TYPE_CHECKING:
    from kbt_edge.reader import Reader

__all__ = ["Counters", "Head", "Health", "Layer", "Prediction", "Update"]

_DTYPES = ("float32", "float64")
_OUTPUTS = ("gaussian", "softmax")
_COVARIANCES = ("full", "neuron", "diagonal")
_RULES = ("fuse", "replace")
_NOISES = ("constant", "adaptive", "multinomial")

_MAX_STATE_BYTES = 1 << 31
_MAX_MEMORY = 1 << 30

# What a head assumes if it is not told (docs/study.md has the figures). h of a transformer varies by 0.3 to 1 along the
# few directions that matter, and outputs are scaled to order one: a new readout needs weights of 1/0.3, variance 10. A
# softmax is settled by a few units of its logits, |h|² var ≈ 2 with var = 0.1. Copies of h in hidden layers must stay
# far below the signal. And noise is first taken for 10 % of the output.
_READOUT_VAR = (10.0, 0.1)  # of the last layer: gaussian, softmax
_COPIES_VAR = 1e-6  # of the layers below
_NOISE_VAR = 1e-2

# Statuses of csrc/kbt.h that a user can meet, by the kind of error they become.
_STATUS_ERRORS: dict[int, type[KbtError]] = {
    3: RangeError,
    4: RangeError,
    6: ShapeError,
    7: NumericsError,
    8: NumericsError,
    9: RangeError,
    10: RangeError,
    11: RangeError,
}
_E_SIZE, _E_ORDER = 4, 11
_OWN = 0  # who asks the core: the head itself
_BLOB_ERRORS = {
    13: "one that ends too early",
    14: "something that is no state blob",
    15: "one of a newer format than this version reads",
    16: "a damaged one: its checksum is wrong",
    17: "one of another configuration",
    18: "one with values that no head can have",
}


@final
class Prediction(NamedTuple):
    """What the head believes about an output, and how sure it is."""

    mean: Array
    """(d_o,) or (rows, d_o)"""
    cov: Array
    """Epistemic covariance, jointly over all rows and outputs: (rows * d_o, rows * d_o)."""
    total_var: Array
    """Variance of a new observation: epistemic plus noise, shaped like ``mean``."""

    @property
    def var(self) -> Array:
        """Epistemic variance, shaped like ``mean``."""
        return np.diagonal(self.cov).reshape(self.mean.shape)

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


@final
class Update(NamedTuple):
    """What one sample told the head, judged before learning from it."""

    status: str
    """``"ok"``, or ``"gated"`` when the innovation gate rejected the sample."""
    nis: float
    """Normalised innovation squared. Its mean is rows * d_o for a consistent gaussian head."""
    log_likelihood: float
    """Log predictive density (gaussian) or log probability (softmax) of the sample."""


_core.set_results(Prediction, Update, KbtError)


class Counters(NamedTuple):
    """Events since the head was made or loaded. Diagnostics: not part of the saved state."""

    rejected: int
    """Calls refused by the core for their input."""
    gated: int
    """Samples rejected by the gate."""
    floored: int
    """Variances held at a floor, and steps left out, because rounding had taken the rest."""


_VERDICTS = ("too few samples", "consistent", "overconfident", "underconfident", "diverging", "no band")


class Health(NamedTuple):
    """Whether the head's errors are as large as it says; see docs/health.md. Not part of the saved state."""

    verdict: str
    """``"consistent"``: the average is inside the band. ``"overconfident"``: errors are larger than the head says, or
    the gate rejects more than outliers. ``"underconfident"``: they are smaller. ``"diverging"``: far beyond the band
    and growing, or most samples rejected, or variances blown up. ``"too few samples"``: fewer than 30 since the prior,
    the noise or the state was set. ``"no band"``: rule "replace", whose average is not known beforehand."""
    seen: int
    """Samples in the average."""
    average: float
    """Running average over 200 samples. Gaussian: NIS / (rows * d_o), expected 1. Softmax: surprise -log p(y) less the
    entropy of the prediction, nats a row, expected 0."""
    low: float
    """The average of a head that is right lies between ``low`` and ``high`` in 99.9 % of checks."""
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


class Head:
    """A Bayesian MLP that takes the place of a readout ``weight @ h + bias`` and goes on learning.

    Before any data it reproduces the readout. METHOD section numbers refer to the mathematics in the documentation.

    weight, bias     the readout being replaced: (d_o, d) and (d_o,) or None
    hidden           widths of the hidden layers, each at least 2 d; () keeps a single linear layer
    prior_var        variance of the weights before any data, one number or one per layer; None: 10 in the last layer
                     (0.1 before a softmax), 1e-6 below. They suit h and outputs of order one; see docs/study.md
    noise_var        variance of the observation noise: a number, one per output, or a matrix; None: learn it
    output           "gaussian" for regression and control, "softmax" for classes and tokens
    covariance       what is kept of the posterior: "full" per layer, "neuron" blocks, or "diagonal"
    rule             "fuse" is a Kalman update; "replace" is the paper's, gaussian only
    relu_order       where the series for ReLU correlations stops, 2 to 12
    softmax_order    Taylor order of the softmax mean, 1 or 2
    noise            "constant"; "adaptive" learns noise_var (gaussian); "multinomial" needs none (softmax).
                     None: constant if noise_var is given, else adaptive from 1e-2 on, or multinomial
    input_var        variance of h itself
    forgetting       below 1 for drifting systems: the past fades by this factor per sample
    gate             samples with a normalised innovation squared above it are rejected; None accepts all
    max_rows         how many rows one joint update may have
    dtype            "float32" or "float64"
    seed             draws the input weights of spare hidden neurons (those beyond 2 d)
    max_memory       how many bytes the head may take (``nbytes``); 1 GiB unless more is asked for
    """

    __slots__ = ("_core", "_dtype")

    _core: _core.Core
    _dtype: np.dtype[Any]

    def __init__(
        self,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        hidden: Sequence[int] = (),
        prior_var: float | Sequence[float] | None = None,
        noise_var: npt.ArrayLike | None = None,
        output: str = "gaussian",
        covariance: str = "neuron",
        rule: str = "fuse",
        relu_order: int = 2,
        softmax_order: int = 1,
        noise: str | None = None,
        input_var: float = 0.0,
        forgetting: float = 1.0,
        gate: float | None = None,
        max_rows: int = 1,
        dtype: npt.DTypeLike = "float32",
        seed: int = 0,
        max_memory: int = _MAX_MEMORY,
    ) -> None:
        self._dtype = _dtype(dtype)
        w = real_array("weight", weight, self._dtype)
        if w.ndim != 2 or 0 in w.shape:
            raise shape_error("weight", "(d_o, d)", w)
        b = np.zeros(w.shape[0], self._dtype) if bias is None else real_array("bias", bias, self._dtype)
        if b.shape != (w.shape[0],):
            raise shape_error("bias", f"({w.shape[0]},), one per row of weight", b)
        widths = [w.shape[1], *_widths(hidden, at_least=2 * w.shape[1]), w.shape[0]]
        seed = _integer("seed", seed, 0, (1 << 64) - 1)
        self._make(widths, prior_var, noise_var, output, covariance, rule, relu_order, softmax_order, noise, input_var,
                   forgetting, gate, max_rows, max_memory)  # fmt: skip
        self._must(self._core.set_prior(w, b, seed))

    @classmethod
    def from_means(
        cls,
        means: Sequence[npt.ArrayLike],
        *,
        prior_var: float | Sequence[float] | None = None,
        noise_var: npt.ArrayLike | None = None,
        output: str = "gaussian",
        covariance: str = "neuron",
        rule: str = "fuse",
        relu_order: int = 2,
        softmax_order: int = 1,
        noise: str | None = None,
        input_var: float = 0.0,
        forgetting: float = 1.0,
        gate: float | None = None,
        max_rows: int = 1,
        dtype: npt.DTypeLike = "float32",
        max_memory: int = _MAX_MEMORY,
    ) -> Head:
        """A head whose prior means are given: one (n, m + 1) array per layer, bias in the last column."""
        head = cls.__new__(cls)
        head._dtype = _dtype(dtype)
        arrays = [real_array(f"means[{i}]", mean, head._dtype) for i, mean in enumerate(_sequence("means", means))]
        if not arrays:
            raise ShapeError("means: expected at least one layer, got none")
        widths = [arrays[0].shape[1] - 1 if arrays[0].ndim == 2 else 0]
        for i, array in enumerate(arrays):
            if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] != widths[-1] + 1 or widths[-1] < 1:
                raise shape_error(f"means[{i}]", f"(n, {widths[-1] + 1})" if i else "(n, d + 1)", array)
            widths.append(array.shape[0])
        head._make(widths, prior_var, noise_var, output, covariance, rule, relu_order, softmax_order, noise, input_var,
                   forgetting, gate, max_rows, max_memory)  # fmt: skip
        head._must(head._core.set_means(arrays))
        return head

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """Mean and covariance of the output at ``h``, (d,) or (rows, d)."""
        result = self._core.predict(h, _OWN)
        if type(result) is Prediction:  # what the core makes, and quicker than isinstance
            return result
        if result is None:  # not a plain array of the head's own dtype
            h = plain_array("h", h)
            result = self._core.predict(self._rows_of_h(h), _OWN)
            if type(result) is Prediction:
                return result
        self._refused(result, {"h": h})

    def update(self, h: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target ``y`` at ``h``.

        y          (d_o,) or (rows, d_o) like ``h``; a number will do for a single output; for softmax also integer
                   class labels, one per row
        noise_var  observation noise of this sample, instead of the head's own
        """
        if h is None:
            raise DtypeError("h: expected an array of numbers, got None")
        result = self._core.learn(h, y, noise_var, _OWN)
        return result if type(result) is Update else self._learn(result, h, y, noise_var)

    def observe(self, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target of the latest ``predict``, without a second forward pass. Once per prediction."""
        result = self._core.learn(None, y, noise_var, _OWN)
        return result if type(result) is Update else self._learn(result, None, y, noise_var)

    def reader(self) -> Reader:
        """One for each other thread that predicts while this one learns."""
        from kbt_edge.reader import Reader

        return Reader(self)

    def _learn(
        self, result: Update | int | None, h: npt.ArrayLike | None, y: npt.ArrayLike, noise_var: npt.ArrayLike | None
    ) -> Update:
        """Learn what was not given as plain arrays, or say why it was refused. The core is asked at most once."""
        if result is None:
            ticket = self._core.ticket
            h = None if h is None else plain_array("h", h)
            y = plain_array("y", y)
            noise_var = None if noise_var is None else plain_array("noise_var", noise_var)
            if h is None:
                self._must_be_latest(ticket)
                rows, lead = None, () if self._core.one_row else (self._core.predicted_rows,)
            else:
                rows = self._rows_of_h(h)
                lead = rows.shape[:-1]
            noise = None if noise_var is None else self._noise("noise_var", noise_var)
            result = self._core.learn(rows, self._targets(y, lead), noise, _OWN)
            if isinstance(result, Update):
                return result
        self._refused(result, {"h": h, "y": y, "noise_var": noise_var})

    # ---- what it knows -----------------------------------------------------------------------------------------------

    @property
    def d(self) -> int:
        """Width of the input h."""
        return self._core.config.widths[0]

    @property
    def d_o(self) -> int:
        """Number of outputs."""
        return self._core.config.widths[-1]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Copies of the posterior means and covariances, input side first."""
        return tuple(Layer(self._core.mean(i), self._core.cov(i)) for i in range(self._core.config.layers))

    @property
    def noise_var(self) -> Array:
        """The observation noise R now in use: (d_o,) variances, or (d_o, d_o) when a matrix was set."""
        return self._core.noise()

    @property
    def samples(self) -> int:
        """Updates learned since the prior."""
        return self._core.samples

    @property
    def nbytes(self) -> int:
        """Bytes of memory the head lives in. Nothing is allocated beyond them after construction."""
        return self._core.nbytes

    @property
    def counters(self) -> Counters:
        return Counters(*self._core.counters())

    def health(self) -> Health:
        """Whether the errors are as large as the head says: a running average of its NIS, its band, and a verdict."""
        found = self._core.health()
        return Health(_VERDICTS[found[0]], *found[1:], self.counters)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as the keywords of ``Head`` spell them."""
        c = self._core.config
        return {
            "widths": tuple(c.widths),
            "prior_var": tuple(c.prior_var),
            "noise_var": c.noise_var,
            "output": _OUTPUTS[c.output],
            "covariance": _COVARIANCES[c.covariance],
            "rule": _RULES[c.rule],
            "relu_order": c.relu_order,
            "softmax_order": c.softmax_order,
            "noise": _NOISES[c.noise],
            "input_var": c.input_var,
            "forgetting": c.forgetting,
            "gate": c.gate if c.gate > 0 else None,
            "max_rows": c.max_rows,
            "dtype": _DTYPES[c.dtype],
        }

    def factor_range(self, layer: int) -> tuple[float, float]:
        """Smallest and largest entry of D over the factors of one layer: a cheap sign of health."""
        return self._core.factor_range(_integer("layer", layer, 0, self._core.config.layers - 1))

    def __repr__(self) -> str:
        c = self.config
        shape = "→".join(str(n) for n in c["widths"])
        return (
            f"Head({shape}, {c['output']}, {c['covariance']}, {c['dtype']}, {c['rule']}; "
            f"{self.samples} samples, {self.nbytes / 1024:.1f} KiB)"
        )

    # ---- state -------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Configuration and learned state, the same bytes on every machine."""
        return self._core.save()

    @classmethod
    def from_bytes(cls, blob: bytes, *, max_memory: int | None = None) -> Head:
        """The head that ``to_bytes`` wrote, bit for bit.

        max_memory   how many bytes it may take (``nbytes``). None: 128 MiB and 64 times the blob, as a stranger's blob
                     of a few bytes can ask for any number of rows
        """
        blob = _bytes(blob)
        config = _core.state_config(blob)
        head = cls.__new__(cls)
        if isinstance(config, int):
            head._refused(config)
        most = memory_limit(blob) if max_memory is None else _integer("max_memory", max_memory, 0, 1 << 62)
        if config.arena_bytes() > most:
            raise BundleError(
                f"blob: expected a head of at most {most} bytes, got one of {config.arena_bytes()} "
                f"(widths {config.widths}, max_rows {config.max_rows}); max_memory allows more"
            )
        head._core = _allocated(config, BundleError)
        head._dtype = np.dtype(_DTYPES[config.dtype])
        head.restore(blob)
        return head

    def restore(self, blob: bytes) -> None:
        """Take over a state saved by a head of the same configuration. All or nothing."""
        self._must(self._core.load(_bytes(blob)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file. A power cut leaves the old file or the new one."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_memory: int | None = None) -> Head:
        """The head that ``save`` wrote; ``max_memory`` as in ``from_bytes``."""
        try:
            return cls.from_bytes(read_bounded(path, _MAX_STATE_BYTES), max_memory=max_memory)
        except BundleError as error:
            if os.fspath(path) in str(error):
                raise
            raise BundleError(f"{os.fspath(path)}: {str(error).removeprefix('blob: ')}", error.status) from None

    def __copy__(self) -> Head:
        return _again(self.to_bytes(), self.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Head:
        return _again(self.to_bytes(), self.nbytes)

    def __reduce__(self) -> tuple[Any, tuple[bytes, int]]:
        return _again, (self.to_bytes(), self.nbytes)

    # ---- flight recorder ---------------------------------------------------------------------------------------------

    def record(self, samples: int = 1000) -> None:
        """Keep what the head is given from now on, refused samples included, to be replayed on a desk.

        Memory is fixed: the latest ``samples`` / 2 to ``samples`` calls of update and observe, and two copies of the
        posterior. A new prior or a restored state begins the recording anew; so does calling this again.
        """
        count = _integer("samples", samples, 2, 1 << 30)
        try:
            recorded = self._core.record_flight(count)
        except MemoryError:
            recorded = False
        if not recorded:
            raise RangeError(f"samples: expected a recording that fits into memory, got {count}", _E_SIZE)

    def stop_recording(self) -> None:
        """Record no more, and give the memory back."""
        self._core.stop_flight()

    def flight_log(self) -> bytes:
        """What was recorded, for ``kbt-edge replay`` and ``kbt_edge.flight``: the same bytes on every machine."""
        log = self._core.flight_log()
        if log is None:
            raise RangeError("flight_log: expected a head that records, call record() first; got one that does not", 11)
        return log

    def save_flight_log(self, path: str | os.PathLike[str]) -> None:
        """Write the log to a file. A power cut leaves the old file or the new one."""
        write_atomic(path, self.flight_log())

    # ---- conversion and errors ---------------------------------------------------------------------------------------

    def _make(
        self,
        widths: list[int],
        prior_var: float | Sequence[float] | None,
        noise_var: npt.ArrayLike | None,
        output: str,
        covariance: str,
        rule: str,
        relu_order: int,
        softmax_order: int,
        noise: str | None,
        input_var: float,
        forgetting: float,
        gate: float | None,
        max_rows: int,
        max_memory: int,
    ) -> None:
        if prior_var is None:
            prior_var = [_COPIES_VAR] * (len(widths) - 2) + [_READOUT_VAR[output == "softmax"]]
        if noise is None:
            learned = "multinomial" if output == "softmax" else "adaptive" if rule == "fuse" else "constant"
            noise = learned if noise_var is None else "constant"
        if noise_var is None:
            noise_var = _NOISE_VAR
        if len(widths) - 1 > _core.MAX_LAYERS:
            raise RangeError(f"hidden: expected at most {_core.MAX_LAYERS - 1} layers, got {len(widths) - 2}")
        config = _core.Config(widths[0], widths[-1])
        config.widths = widths
        config.dtype = _DTYPES.index(self._dtype.name)
        config.output = _choice("output", output, _OUTPUTS)
        config.covariance = _choice("covariance", covariance, _COVARIANCES)
        config.rule = _choice("rule", rule, _RULES)
        config.noise = _choice("noise", noise, _NOISES)
        config.relu_order = _integer("relu_order", relu_order, 2, 12)
        config.softmax_order = _integer("softmax_order", softmax_order, 1, 2)
        config.max_rows = _integer("max_rows", max_rows, 1, 1 << 20)
        config.prior_var = _per_layer("prior_var", prior_var, len(widths) - 1)
        config.input_var = _number("input_var", input_var, 0.0, 1e12)
        config.forgetting = _number("forgetting", forgetting, 1e-3, 1.0)
        config.gate = 0.0 if gate is None else _number("gate", gate, 1e-300, 1e300)
        if output == "softmax" and widths[-1] < 2:
            raise RangeError(f"output: expected at least 2 outputs for a softmax, got {widths[-1]}")
        if output == "softmax" and rule == "replace":
            raise RangeError("rule: expected 'fuse' for a softmax, where 'replace' soon diverges, got 'replace'")
        if noise == "adaptive" and (output != "gaussian" or rule != "fuse"):
            raise RangeError(
                f"noise: expected a gaussian output and the rule 'fuse' for 'adaptive', got {output!r}, {rule!r}"
            )
        if noise == "multinomial" and output != "softmax":
            raise RangeError(f"noise: expected a softmax output for 'multinomial', got {output!r}")
        variances = self._noise("noise_var", noise_var, widths[-1], matrix_allowed=noise == "constant")
        config.noise_var = float(variances.flat[0]) if variances.size == 1 else 0.0
        status, field = config.check()
        if status == _E_SIZE:
            raise RangeError(
                f"hidden, max_rows: expected a head that fits into memory, got {widths}, {max_rows}", status
            )
        if status:
            raise RangeError(f"{field}: expected another value, got one that the core refuses", status)
        most = _integer("max_memory", max_memory, 0, 1 << 62)
        if config.arena_bytes() > most:
            raise RangeError(
                f"hidden, max_rows: expected a head of at most max_memory = {_bytes_in_words(most)}, got one of "
                f"{_bytes_in_words(config.arena_bytes())} (widths {' → '.join(map(str, widths))}, max_rows {max_rows}, "
                f"covariance {covariance!r}); use smaller hidden layers, covariance='diagonal' or a larger max_memory",
                _E_SIZE,
            )
        self._core = _allocated(config, RangeError)
        if noise != "multinomial":
            self._must(self._core.set_noise(variances))

    def _rows_of_h(self, h: Array) -> Array:
        array = cast("h", h, self._dtype)
        c = self._core.config
        if array.ndim not in (1, 2) or array.shape[-1] != self.d or array.size == 0:
            raise shape_error("h", f"({self.d},) or (rows, {self.d})", array)
        if array.ndim == 2 and array.shape[0] > c.max_rows:
            raise ShapeError(f"h: expected at most max_rows = {c.max_rows} rows, got {array.shape[0]}")
        return array

    def _targets(self, y: Array, lead: tuple[int, ...]) -> Array:
        """Targets of shape (*lead, d_o), with lead = () or (rows,); or int32 labels of shape lead."""
        expected = (*lead, self.d_o)
        if self._core.config.output == 1 and y.dtype.kind in "iu" and y.shape != expected:
            labels = labels_array("y", y, self.d_o)
            if labels.shape != lead:
                raise shape_error("y", f"{lead} class labels or {expected} probabilities", labels)
            return labels
        array = cast("y", y, self._dtype)
        if array.shape == () and set(expected) == {1}:
            return array.reshape(expected)
        if array.shape != expected:
            raise shape_error("y", f"{expected}" + " or a number" * (set(expected) == {1}), array)
        return array

    def _noise(self, name: str, value: npt.ArrayLike, d_o: int = 0, matrix_allowed: bool = True) -> Array:
        n = d_o or self.d_o
        if not d_o and self._core.config.noise == 2:
            raise RangeError(f"{name}: expected none, as noise='multinomial' needs none, got one")
        matrix_allowed = matrix_allowed and (bool(d_o) or self._core.config.noise == 0)
        array = real_array(name, value, self._dtype)
        shapes: list[tuple[int, ...]] = [(), (1,), (n,)] + ([(n, n)] if matrix_allowed else [])
        if array.shape not in shapes:
            raise shape_error(name, f"a number, ({n},)" + (f" or ({n}, {n})" if matrix_allowed else ""), array)
        variances = np.diagonal(array) if array.ndim == 2 else np.atleast_1d(array)
        if (variances < 0).any():
            raise RangeError(f"{name}: expected variances >= 0, got {variances.min()}")
        if array.ndim == 2:
            if not np.array_equal(array, array.T):
                raise RangeError(f"{name}: expected a symmetric matrix, got one that differs from its transpose")
            if n > 1 and np.linalg.eigvalsh(array.astype(np.float64)).min() < -1e-6 * variances.max():
                raise RangeError(f"{name}: expected a positive semi-definite matrix, got a negative eigenvalue")
            return array
        return array.reshape(-1)

    def _must(self, status: int) -> None:
        if status:
            self._refused(status)

    def _must_be_latest(self, ticket: int) -> None:
        """Converting an argument can run any code, and with it this head."""
        if self._core.ticket != ticket:
            raise RangeError(
                "observe: the head was used while y or noise_var was being converted to an array, so the latest "
                "prediction is another one now; pass NumPy arrays",
                _E_ORDER,
            )

    def _refused(self, result: object, arguments: Mapping[str, object] | None = None) -> NoReturn:
        """Raise the error that a status stands for, from the arguments of the call. Nothing runs again."""
        status = result if isinstance(result, int) else 0
        given = {name: value for name, value in (arguments or {}).items() if isinstance(value, np.ndarray)}
        if status == 7:
            for name, value in given.items():
                check_finite(name, value, cast(name, value, self._dtype))
        if status == 6:
            self._rows_of_h(given["h"])
        if status == 9 and "noise_var" in given:
            self._noise("noise_var", given["noise_var"])
        if status == 10:
            raise RangeError(
                "y: expected class labels, or rows of probabilities that sum to 1, got something else", status
            )
        if status == _E_ORDER:
            raise RangeError("observe: expected a predict before it, and one observe per prediction; got none", status)
        if status == _core.OTHER_OWNER:
            raise RangeError(
                "observe: expected a prediction of this head before it; the latest was made by a Model, in its own "
                "units: call the model's observe, or predict with the head first",
                _E_ORDER,
            )
        if status == 8:
            sizes = ", ".join(f"|{name}| up to {np.abs(value).max():.3g}" for name, value in given.items())
            raise NumericsError(
                f"{', '.join(given)}: expected numbers with a finite result that is more than rounding, got {sizes}",
                status,
            )
        if status in _BLOB_ERRORS:
            raise BundleError(f"blob: expected the state of a head, got {_BLOB_ERRORS[status]}", status)
        raise _STATUS_ERRORS.get(status, KbtError)(_core.status_str(status), status)


def memory_limit(blob: bytes) -> int:
    """Bytes that a head from this blob may take, unless its reader knows better."""
    return (1 << 27) + 64 * len(blob)


def _again(blob: bytes, nbytes: int) -> Head:
    """A copy of a head of this process, or of one that was pickled."""
    return Head.from_bytes(blob, max_memory=nbytes)


def _bytes_in_words(count: int) -> str:
    return (
        f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count} B"
    )


def _allocated(config: _core.Config, error: type[KbtError]) -> _core.Core:
    try:
        return _core.Core(config)
    except MemoryError:
        size, shape = config.arena_bytes(), f"widths {config.widths}, max_rows {config.max_rows}"
        message = f"hidden, max_rows: expected a head that fits into memory, got one of {size} bytes ({shape})"
        raise error(message, _E_SIZE) from None


def _dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in _DTYPES or not found.isnative:
        raise RangeError(f"dtype: expected 'float32' or 'float64', got {dtype!r}")
    return found


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> int:
    if value not in allowed:
        raise RangeError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")
    return allowed.index(str(value))


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DtypeError(f"{name}: expected an integer, got {value!r}")
    if not low <= value <= high:
        raise RangeError(f"{name}: expected {low}..{high}, got {value}")
    return int(value)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise DtypeError(f"{name}: expected a number, got {value!r}")
    if not low <= value <= high:  # false for NaN
        raise RangeError(f"{name}: expected {low:g}..{high:g}, got {value}")
    return float(value)


def _sequence(name: str, value: object) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise DtypeError(f"{name}: expected a sequence, got {value!r}")
    return list(value)


def _per_layer(name: str, value: float | Sequence[float], layers: int) -> list[float]:
    if isinstance(value, (int, float, np.integer, np.floating)):
        return [_number(name, value, 1e-30, 1e12)] * layers
    values = [_number(f"{name}[{i}]", x, 1e-30, 1e12) for i, x in enumerate(_sequence(name, value))]
    if len(values) != layers:
        raise ShapeError(f"{name}: expected one number or one per layer ({layers}), got {len(values)}")
    return values


def _widths(hidden: Sequence[int], at_least: int) -> list[int]:
    widths = [_integer(f"hidden[{i}]", n, 1, 1 << 20) for i, n in enumerate(_sequence("hidden", hidden))]
    for i, n in enumerate(widths):
        if n < at_least:
            raise RangeError(f"hidden[{i}]: expected at least 2 d = {at_least} neurons for the copies of h, got {n}")
    return widths


def _bytes(blob: object) -> bytes:
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise DtypeError(f"blob: expected bytes, got {type(blob).__name__}")
    return bytes(blob)
