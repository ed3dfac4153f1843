"""The Bayesian head: ``predict`` with uncertainty, ``update`` sample by sample, in fixed memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from kbt_edge import _core
from kbt_edge._arrays import Array, plain_array, real_array, shape_error
from kbt_edge._files import read_bounded, write_atomic
from kbt_edge._memory import memory_limit, new_core, too_large
from kbt_edge._samples import must_be_latest, raise_rejection, rows_of_h, sample_noise, targets
from kbt_edge._status import blob_error
from kbt_edge.errors import BundleError, DtypeError, KbtError, RangeError, ShapeError
from kbt_edge.results import Change, Counters, Health, Layer, Prediction, Update
from kbt_edge.settings import (
    DEFAULTS,
    NOISES,
    HeadSettings,
    checked_dtype,
    described,
    entries,
    hidden_widths,
    integer,
    make_config,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kbt_edge._core import Core
    from kbt_edge.reader import Reader

__all__ = ["Change", "Counters", "Head", "Health", "Layer", "Prediction", "Update"]

_MAX_STATE_BYTES = 1 << 31
_MAX_MEMORY = 1 << 30

_core.set_results(Prediction, Update, KbtError)


class Head:
    """A Bayesian MLP that replaces a readout ``weight @ h + bias`` and keeps learning. method.md has the mathematics.

    Before any data it reproduces the readout. A softmax reproduces the logits, and its probabilities are nearer to each
    other the wider the prior is.

    weight, bias     the readout to replace: (d_o, d) and (d_o,) or None
    hidden           widths of the hidden layers, each at least 2 d; () keeps a single linear layer
    drift            how the plant moves. "auto": a watchful head, several filters weighed by what each predicted. It
                     finds out whether the plant stands still, drifts or has changed. Not for rule "replace", nor for
                     one linear layer with a noise matrix: they are one filter. 0.0: one filter of a plant that stands
                     still, which for one linear layer is exact Bayesian regression. q > 0: one filter of a plant whose
                     outputs move by a variance of q per sample, in units of the noise
    prior_var        variance of the weights before any data, one number or one per layer; None: automatic. For a
                     watchful head, and where the noise is learned, it is a ratio to the noise variance. None follows
                     the scale of h in watchful heads; for one filter it suits h of order one
    noise_var        variance of the observation noise: a number, one per output, or a matrix; None: learn it
    noise            "constant"; "matrix" is constant too, and takes a matrix; "adaptive" learns noise_var (gaussian);
                     "full" learns a matrix, for outputs whose noise is correlated (watchful, one linear layer);
                     "multinomial" has no variance (softmax). None: constant or matrix if noise_var is given, else
                     adaptive starting at 1e-2, or multinomial
    output           "gaussian" for regression and control, "softmax" for classes and tokens
    covariance       what is kept of the posterior: "full" per layer, one block for each "neuron", one block that all
                     outputs of a single layer have "shared", or a "diagonal". "auto": "shared" where it is exact, which
                     is one linear layer with learned noise or the same noise for all outputs; else "neuron"
    rule             "fuse" is a Kalman update; "replace" is the paper's rule, gaussian only
    forgetting       below 1: the weight of past samples decays by this factor per sample. For one filter; a watchful
                     head does not use it
    gate             samples with a normalised innovation squared above it are rejected; None accepts all
    max_rows         the most rows that one joint update may have
    dtype            "float32" or "float64"
    seed             seeds the input weights of spare hidden neurons (those beyond 2 d)
    max_memory       the most bytes that the head may take (``nbytes``); default 1 GiB

    Rarely needed:

    relu_order       order at which the series for ReLU correlations is cut off, 2 to 12
    softmax_order    0: the moment softmax, which knows that its logits are uncertain; 1 or 2: Taylor order of the mean
    input_var        variance of h itself

    What a watchful head assumes (method.md §9):

    - Without ``hidden``, targets are linear in h, with a readout that may change.
    - Noise is roughly gaussian, with outliers, and the same for a while. If it is strongly correlated, it is followed
      as an offset.
    - Changes last longer than 120 samples. Shorter ones are followed, but not reported.
    - Inputs excite what is to be learned, and have no huge outliers.
    - Targets are measured, not produced by the head itself.
    - All outputs change together. Otherwise use one head per output.
    - It takes eight filters for one linear layer, computed side by side, and four for any other head.
    """

    __slots__ = ("_core",)

    _core: Core

    def __init__(
        self,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        hidden: Sequence[int] = (),
        seed: int = 0,
        max_memory: int = _MAX_MEMORY,
        **settings: Unpack[HeadSettings],
    ) -> None:
        dtype = checked_dtype(settings.get("dtype", DEFAULTS["dtype"]))
        w = real_array("weight", weight, dtype)
        if w.ndim != 2 or 0 in w.shape:
            raise shape_error("weight", "(d_o, d)", w)
        b = np.zeros(w.shape[0], dtype) if bias is None else real_array("bias", bias, dtype)
        if b.shape != (w.shape[0],):
            raise shape_error("bias", f"({w.shape[0]},), one per row of weight", b)
        d_o, d = w.shape
        seed = integer("seed", seed, 0, (1 << 64) - 1)
        self._make([d, *hidden_widths(hidden, d), d_o], settings, max_memory)
        self._must(self._core.set_prior(w, b, seed))

    @classmethod
    def from_means(
        cls, means: Sequence[npt.ArrayLike], *, max_memory: int = _MAX_MEMORY, **settings: Unpack[HeadSettings]
    ) -> Head:
        """A head with the given prior means: one (n, m + 1) array per layer, bias in the last column."""
        head = cls.__new__(cls)
        dtype = checked_dtype(settings.get("dtype", DEFAULTS["dtype"]))
        arrays = [real_array(f"means[{i}]", mean, dtype) for i, mean in enumerate(entries("means", means))]
        if not arrays:
            raise ShapeError("means: expected at least one layer, got none")
        widths = [arrays[0].shape[1] - 1 if arrays[0].ndim == 2 else 0]
        for i, array in enumerate(arrays):
            if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] != widths[-1] + 1 or widths[-1] < 1:
                raise shape_error(f"means[{i}]", f"(n, {widths[-1] + 1})" if i else "(n, d + 1)", array)
            widths.append(array.shape[0])
        head._make(widths, settings, max_memory)
        head._must(head._core.set_means(arrays))
        return head

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """Mean and variances of the output at ``h``, (d,) or (rows, d); its covariance if it is asked for."""
        core = self._core
        result = core.predict(h)
        if result is None:  # not a plain array of the head's own dtype
            h = plain_array("h", h)
            result = core.predict(rows_of_h(h, core.config))
        if type(result) is Prediction:  # faster than isinstance
            result._origin = core, core, core.ticket
            return result
        self._rejected(result, {"h": h})

    def update(self, h: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target ``y`` at ``h``.

        y          (d_o,) or (rows, d_o) like ``h``; a number will do for a single output; for softmax also integer
                   class labels, one per row
        noise_var  observation noise of this sample, instead of the head's own
        """
        if h is None:
            raise DtypeError("h: expected an array of numbers, got None")
        result = self._core.learn(h, y, noise_var)
        return result if type(result) is Update else self._learn(result, h, y, noise_var)

    def observe(self, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn the target of the latest ``predict``, without a second forward pass. Once per prediction."""
        result = self._core.learn(None, y, noise_var)
        return result if type(result) is Update else self._learn(result, None, y, noise_var)

    def reader(self) -> Reader:
        """A reader for another thread that predicts while this one learns; each thread needs its own."""
        from kbt_edge.reader import Reader

        return Reader(self)

    def _learn(
        self, result: Update | int | None, h: npt.ArrayLike | None, y: npt.ArrayLike, noise_var: npt.ArrayLike | None
    ) -> Update:
        """Convert the arguments and learn, or raise an error. The core learns at most once."""
        if result is None:
            ticket = self._core.ticket
            h = None if h is None else plain_array("h", h)
            y = plain_array("y", y)
            noise_var = None if noise_var is None else plain_array("noise_var", noise_var)
            if h is None:
                must_be_latest(ticket, self._core)
                rows, lead = None, () if self._core.one_row else (self._core.predicted_rows,)
            else:
                rows = rows_of_h(h, self._core.config)
                lead = rows.shape[:-1]
            noise = None if noise_var is None else sample_noise("noise_var", noise_var, self._core.config)
            result = self._core.learn(rows, targets(y, lead, self._core.config), noise)
            if isinstance(result, Update):
                return result
        self._rejected(result, {"h": h, "y": y, "noise_var": noise_var})

    # ---- what it knows -----------------------------------------------------------------------------------------------

    @property
    def core(self) -> Core:
        """The compiled head, for the other modules of this package."""
        return self._core

    @property
    def d(self) -> int:
        """Width of the input h."""
        return self._core.config.widths[0]

    @property
    def d_o(self) -> int:
        """Number of outputs."""
        return self._core.config.widths[-1]

    @property
    def means(self) -> tuple[Array, ...]:
        """Copies of the posterior means, input side first, as ``from_means`` takes them."""
        return tuple(self._core.mean(i) for i in range(self._core.config.layers))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Copies of the posterior means and covariances, input side first. Covariances of wide layers are large."""
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
        """Bytes of memory that the head uses. Nothing else is allocated after construction."""
        return self._core.nbytes

    @property
    def counters(self) -> Counters:
        return Counters(*self._core.counters())

    def health(self) -> Health:
        """Whether the errors are as large as predicted: a running average of the NIS, its band, and a verdict."""
        found = self._core.health()
        return Health(_core.VERDICTS[found[0]], *found[1:], self.counters)

    @property
    def belief(self) -> dict[str, float]:
        """What the head thinks of the plant: the weight of each member. Only "still" without members."""
        weights = self._core.belief()
        if not self._watchful:
            return {_core.MEMBERS[0]: 1.0}
        return dict(zip(_core.MEMBERS, weights, strict=True))

    @property
    def changes(self) -> tuple[Change, ...]:
        """The latest changes of the plant that the head has noticed, at most 16, oldest first. Not saved."""
        return tuple(
            Change(sample, noticed, evidence, _core.CHANGES[kind])  # type: ignore[arg-type]
            for sample, noticed, evidence, kind in self._core.changes()
        )

    def suppose_changed(self) -> None:
        """Tell the head that the plant has changed (a tool was swapped): it begins anew from the readout.

        A head of one linear layer keeps what it had learned in case the plant goes back. Only for a watchful head: one
        filter has not kept its readout, and rejects this with a ``RangeError``.
        """
        self._only_watchful("suppose_changed", self._core.suppose_changed())

    def reset(self) -> None:
        """Forget all that was learned: the head is the readout again.

        Only for a watchful head: one filter has not kept its readout, and rejects this with a ``RangeError``.
        """
        self._only_watchful("reset", self._core.reset())

    @property
    def _watchful(self) -> bool:
        return self._core.config.drift < 0

    def _only_watchful(self, verb: str, status: int) -> None:
        if status == _core.E_CONFIG:
            raise RangeError(
                f"{verb}: expected a head with drift='auto', which keeps its readout, got one filter; "
                "make a new Head instead",
                status,
            )
        self._must(status)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as the keywords of ``Head``."""
        return described(self._core.config)

    def __repr__(self) -> str:
        c = self.config
        shape = "→".join(str(n) for n in c["widths"])
        structure = "watchful" if self._watchful else c["covariance"]
        return (
            f"Head({shape}, {c['output']}, {structure}, {c['dtype']}, {c['rule']}; "
            f"{self.samples} samples, {self.nbytes / 1024:.1f} KiB)"
        )

    # ---- state -------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Configuration and learned state, the same bytes on every machine."""
        return self._core.save()

    @classmethod
    def from_bytes(cls, blob: bytes, *, max_memory: int | None = None) -> Head:
        """The head that ``to_bytes`` wrote, bit for bit.

        max_memory   the limit for its ``nbytes``. None: 128 MiB plus 64 times the size of the blob, because a few
                     untrusted bytes can ask for any number of rows
        """
        blob = _bytes(blob)
        config = _core.state_config(blob)
        head = cls.__new__(cls)
        if isinstance(config, int):
            raise blob_error("blob", "head state", config)
        most = memory_limit(blob) if max_memory is None else integer("max_memory", max_memory, 0, 1 << 62)
        if config.arena_bytes() > most:
            raise BundleError(
                f"blob: expected a head of at most {most} bytes, got one of {config.arena_bytes()} "
                f"(widths {config.widths}, max_rows {config.max_rows}); max_memory allows more"
            )
        head._core = new_core(config, BundleError)
        head.restore(blob)
        return head

    def restore(self, blob: bytes) -> None:
        """Load a state saved by a head of the same configuration. On error nothing changes."""
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
        """Record every call from now on, rejected samples included, to be replayed later (docs/flight.md).

        Memory is fixed: the latest ``samples`` / 2 to ``samples`` calls of update and observe, and two copies of the
        posterior. A new prior, a restored state or another call of this restarts the recording.
        """
        count = integer("samples", samples, 2, 1 << 30)
        try:
            recorded = self._core.record_flight(count)
        except MemoryError:
            recorded = False
        if not recorded:
            raise RangeError(f"samples: no memory to record {count} samples", _core.E_SIZE)

    def stop_recording(self) -> None:
        """Stop recording and free its memory."""
        self._core.stop_flight()

    def flight_log(self) -> bytes:
        """The recording, for ``kbt-edge replay`` and ``kbt_edge.flight``: the same bytes on every machine."""
        log = self._core.flight_log()
        if log is None:
            raise RangeError("flight_log: nothing is recorded; call record() first", _core.E_ORDER)
        return log

    def save_flight_log(self, path: str | os.PathLike[str]) -> None:
        """Write the log to a file. A power cut leaves the old file or the new one."""
        write_atomic(path, self.flight_log())

    # ---- conversion and errors ---------------------------------------------------------------------------------------

    def _make(self, widths: list[int], settings: HeadSettings, max_memory: int) -> None:
        config, noise = make_config(widths, settings)
        most = integer("max_memory", max_memory, 0, 1 << 62)
        if not 0 < config.arena_bytes() <= most:
            raise RangeError(too_large(config, settings.get("covariance", DEFAULTS["covariance"]), most), _core.E_SIZE)
        self._core = new_core(config, RangeError)
        if NOISES[config.noise] != "multinomial":
            self._must(self._core.set_noise(noise))

    def _must(self, status: int) -> None:
        if status:
            self._rejected(status)

    def _rejected(self, result: object, arguments: Mapping[str, object] | None = None) -> NoReturn:
        """Raise the error for a status that the core returned."""
        raise_rejection(result if isinstance(result, int) else 0, arguments or {}, self._core.config)


def _again(blob: bytes, nbytes: int) -> Head:
    """A copy of a head of this process, or of one that was pickled."""
    return Head.from_bytes(blob, max_memory=nbytes)


def _bytes(blob: object) -> bytes:
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise DtypeError(f"blob: expected bytes, got {type(blob).__name__}")
    return bytes(blob)
