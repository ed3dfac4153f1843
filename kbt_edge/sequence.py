"""Learning from pairs of token sequences: the rows of one pair (X, Y) form one joint update (method.md §6).

    pairs = Sequences(model, start=1, pad=0)
    pairs.update(x, y)                  # learn that x becomes y
    pairs.predict(x, y[:3]).mean        # distribution of the fourth token
    pairs.generate(x, end=2)            # the most probable answer, token after token

Write Y = [start, y_1 … y_n]. Step i of the paper's Algorithm 1 runs T1(X, Y[1..i]), whose i rows have the next tokens
Y[2..i+1] as targets. Which of these rows are learned:

    "unique"   one row per token, from a single run of T1. Right for a causal trunk, where the rows of step i are the
               first i of step n; rejected for another, whose rows would have seen their own targets
    "paper"    Algorithm 1 as printed: all rows of all steps, n (n + 1) / 2 of them. On a causal trunk this counts the
               first tokens n times
    "stream"   the last row of each step, one update after the other: memory for one row, however long Y is

A trunk from a file has fixed lengths, and shorter sequences are padded at the end. In the target this changes nothing,
because such a trunk must be causal (which is checked) and only the rows of real tokens are used. In the source the
trunk must ignore a padding token: name it in ``pad`` (``networks.TokenTransformer`` masks its own). Without one,
sources must have the full length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from kbt_edge._arrays import Array, real_array
from kbt_edge.errors import DtypeError, RangeError, ShapeError
from kbt_edge.head import Head, Prediction, Update
from kbt_edge.trunk import Trunk

if TYPE_CHECKING:
    from kbt_edge.model import Model

__all__ = ["Sequences"]

Tokens = npt.NDArray[np.int64]
TokenTrunk = Callable[[Tokens, Tokens], npt.ArrayLike]

Rows = Literal["unique", "paper", "stream"]
SAME: Final = 1e-4  # rows closer than this, relative to the largest entry, differ by rounding only


class Sequences:
    """A token model that learns from pairs of sequences.

    model    a ``Model`` with two token inputs, source and target; or a pair (trunk, head), where the trunk is a
             ``Trunk`` or any function (source ids, target ids) → (len(target), d). The head has a softmax output over
             the target tokens
    start    the token in front of every target, Y[1]
    pad      the token that the trunk ignores in a source, rejected in x and y; None if there is none
    rows     "unique" (default for a causal trunk), "paper" (default for another) or "stream"
    """

    def __init__(
        self,
        model: Model | tuple[Trunk | TokenTrunk, Head],
        *,
        start: int,
        pad: int | None = None,
        rows: Rows | None = None,
    ) -> None:
        trunk, self._head = model if isinstance(model, tuple) else (model.trunk, model.head)
        config = self._head.config
        if config["output"] != "softmax":
            raise RangeError(f"head: expected output='softmax', got {config['output']!r}")
        self._trunk: _FixedTrunk | _FreeTrunk
        if isinstance(trunk, Trunk):
            self._trunk = _FixedTrunk(trunk, self._head.d, start, pad)
        else:
            self._trunk = _FreeTrunk(trunk, self._head.d, config["dtype"])
        self._pad = None if pad is None else _token("pad", pad, self._trunk.source_limit)
        self._start = _token("start", start, self._trunk.target_limit)
        self._vocabulary = min(self._head.d_o, self._trunk.target_limit or self._head.d_o)
        self._causal = self._is_causal()
        if not self._causal and isinstance(trunk, Trunk):
            raise RangeError("trunk: expected a causal one, as its lengths are fixed; its rows depend on later targets")
        self._rows: Rows = rows if rows is not None else "unique" if self._causal else "paper"
        if self._rows not in get_args(Rows):
            raise RangeError(f"rows: expected one of {', '.join(map(repr, get_args(Rows)))}, got {rows!r}")
        if not self._causal and self._rows == "unique":
            raise RangeError("rows: 'unique' needs a causal trunk; the rows of this one depend on later targets")
        kept = 1 if self._rows == "stream" else config["max_rows"]
        self._h = np.zeros((kept, self._head.d), config["dtype"])
        self._labels = np.zeros(kept, np.int32)

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def update(self, x: npt.ArrayLike, y: npt.ArrayLike, noise_var: npt.ArrayLike | None = None) -> Update:
        """Learn that the source ``x`` has the target ``y``, both token ids; y without the start token.

        With rows="stream", ``nis`` and ``log_likelihood`` are sums over the rows, and the status is "gated" only if the
        gate rejected all of them.
        """
        source, target = self._source(x), self._target("y", y, 1, self.max_len)
        inputs = np.concatenate([[self._start], target[:-1]])
        if self._rows == "stream":
            return self._stream(source, inputs, target, noise_var)
        steps = [len(target)] if self._rows == "unique" else range(1, len(target) + 1)
        used = 0
        for i in steps:
            self._h[used : used + i] = self._trunk(source, inputs[:i])
            self._labels[used : used + i] = target[:i]
            used += i
        return self._head.update(self._h[:used], self._labels[:used], noise_var)

    def predict(self, x: npt.ArrayLike, y: npt.ArrayLike = ()) -> Prediction:
        """Distribution of the token that follows ``y``, and how sure the head is of it: mean (d_o,), cov (d_o, d_o)."""
        longest = None if self._trunk.target_len is None else self._trunk.target_len - 1
        return self._next(self._source(x), self._target("y", y, 0, longest))

    def generate(self, x: npt.ArrayLike, max_len: int | None = None, end: int | None = None) -> Tokens:
        """The answer to ``x``, taking the most probable token each time, until ``end`` (included) or ``max_len``."""
        source = self._source(x)
        limit = self._trunk.target_len
        if max_len is None:
            if limit is None:
                raise RangeError("max_len: expected a number, as this trunk has no fixed length")
            max_len = limit
        if not isinstance(max_len, (int, np.integer)) or not 1 <= max_len <= (limit or max_len):
            raise RangeError(f"max_len: expected 1 to {limit or 'any number'}, got {max_len!r}")
        end = None if end is None else _token("end", end, self._vocabulary)
        answer = np.empty(0, np.int64)
        while len(answer) < max_len and (end is None or end not in answer[-1:]):
            p = self._next(source, answer).mean[: self._vocabulary]
            if self._pad is not None and self._pad < len(p):
                p[self._pad] = -1.0  # not a token, so never an answer
            answer = np.append(answer, p.argmax())
        return answer

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        return self._head

    @property
    def rows(self) -> Rows:
        return self._rows

    @property
    def causal(self) -> bool:
        """Whether the rows of T1 are independent of later target tokens, as a test at construction showed."""
        return self._causal

    @property
    def max_len(self) -> int | None:
        """How many tokens a target may have in ``update``; None if nothing limits it."""
        length = self._trunk.target_len
        if self._rows == "stream":
            return length
        most = int(self._head.config["max_rows"])
        if self._rows == "paper":
            most = (math.isqrt(8 * most + 1) - 1) // 2  # n (n + 1) / 2 rows
        return most if length is None else min(most, length)

    def __repr__(self) -> str:
        longest = "any length" if self.max_len is None else f"up to {self.max_len} tokens"
        return f"Sequences(rows={self._rows!r}, {longest}; {self._head!r})"

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _next(self, source: Tokens, answer: Tokens) -> Prediction:
        h = self._trunk(source, np.concatenate([[self._start], answer]))
        self._h[0] = h[-1]
        return self._head.predict(self._h[0])

    def _stream(self, source: Tokens, inputs: Tokens, target: Tokens, noise_var: npt.ArrayLike | None) -> Update:
        """Learn row after row. If one is rejected, none is learned."""
        rows = self._trunk(source, inputs).copy() if self._causal else None
        before = self._head.to_bytes()
        learned, changed, nis, log_likelihood = False, False, 0.0, 0.0
        try:
            for i in range(len(target)):
                self._h[0] = rows[i] if rows is not None else self._trunk(source, inputs[: i + 1])[-1]
                self._labels[0] = target[i]
                u = self._head.update(self._h, self._labels, noise_var)
                learned |= u.status == "ok"
                changed |= u.changed
                nis, log_likelihood = nis + u.nis, log_likelihood + u.log_likelihood
        except BaseException:
            self._head.restore(before)
            raise
        return Update("ok" if learned else "gated", nis, log_likelihood, changed)

    def _is_causal(self) -> bool:
        """Test whether the rows of a short target are the first rows of a longer one."""
        length = 4 if self._trunk.target_len is None else min(4, self._trunk.target_len)
        if length == 1:
            return True
        few = length // 2
        source = np.full(self._trunk.probe_len, 0 if self._pad != 0 else 1)
        target = np.full(length, self._start)
        for last in range(min(self._vocabulary, 3)):  # some of them differ from the padding of a short target
            target[few:] = last
            rows = self._trunk(source, target)[:few].copy()
            if np.abs(self._trunk(source, target[:few]) - rows).max() > SAME * np.abs(rows).max():
                return False
        return True

    def _source(self, x: npt.ArrayLike) -> Tokens:
        source = _tokens("x", x, 1, self._trunk.source_len, self._trunk.source_limit, self._pad)
        if self._pad is None and len(source) != (self._trunk.source_len or len(source)):
            raise ShapeError(
                f"x: expected {self._trunk.source_len} tokens, as this trunk has no padding token; got {len(source)}"
            )
        return source

    def _target(self, name: str, y: npt.ArrayLike, shortest: int, longest: int | None) -> Tokens:
        return _tokens(name, y, shortest, longest, self._vocabulary, self._pad)


class _FixedTrunk:
    """A trunk from a file: fixed lengths, padded at the end."""

    def __init__(self, trunk: Trunk, d: int, start: int, pad: int | None) -> None:
        self._trunk = trunk
        specs = trunk.inputs
        if len(specs) != 2 or any(spec.dtype != "int64" or math.prod(spec.shape) != spec.shape[-1] for spec in specs):
            raise ShapeError(f"trunk: expected two inputs of token ids, source and target, got {specs}")
        self.source_len, self.target_len = specs[0].shape[-1], specs[1].shape[-1]
        self.source_limit, self.target_limit = specs[0].limit, specs[1].limit
        self.probe_len = self.source_len if pad is None else 1
        if (trunk.rows, trunk.d) != (self.target_len, d):
            raise ShapeError(
                f"trunk: expected {self.target_len} rows, one per target token, of the head's width d = {d}, "
                f"got {trunk.rows} rows of {trunk.d}"
            )
        self._ids = np.zeros(self.source_len, np.int64), np.zeros(self.target_len, np.int64)
        self._fill = pad, start  # the padding of a target may be any token

    def __call__(self, source: Tokens, target: Tokens) -> Array:
        for ids, given, fill in zip(self._ids, (source, target), self._fill, strict=True):
            ids[: len(given)] = given
            if fill is not None:
                ids[len(given) :] = fill
        return self._trunk(*self._ids)[: len(target)]


class _FreeTrunk:
    """A function, called with the sequences as they are."""

    source_len = target_len = source_limit = target_limit = None
    probe_len = 1

    def __init__(self, trunk: TokenTrunk, d: int, dtype: str) -> None:
        if not callable(trunk):
            raise DtypeError(f"trunk: expected a Trunk or a function, got {type(trunk).__name__}")
        self._trunk, self._d, self._dtype = trunk, d, dtype

    def __call__(self, source: Tokens, target: Tokens) -> Array:
        h = real_array("trunk", self._trunk(source, target), self._dtype)
        if h.shape != (len(target), self._d):
            raise ShapeError(f"trunk: expected rows of shape {(len(target), self._d)}, got {h.shape}")
        return h


def _token(name: str, value: int, limit: int | None) -> int:
    return int(_tokens(name, [value], 1, 1, limit, None)[0])


def _tokens(
    name: str, value: npt.ArrayLike, shortest: int, longest: int | None, limit: int | None, pad: int | None
) -> Tokens:
    """Token ids 0 … limit - 1 as int64, none of them ``pad``, ``shortest`` to ``longest`` of them."""
    ids: npt.NDArray[Any] = np.asarray(value)
    if ids.ndim != 1:
        raise ShapeError(f"{name}: expected one sequence of token ids, got an array of shape {ids.shape}")
    if len(ids) < shortest:
        raise ShapeError(f"{name}: expected at least one token, got none")
    if longest is not None and len(ids) > longest:
        raise ShapeError(f"{name}: expected at most {longest} tokens, got {len(ids)}")
    if len(ids) and ids.dtype.kind not in "iu":
        raise DtypeError(f"{name}: expected integer token ids, got an array of dtype {ids.dtype}")
    unknown = (ids < 0) | (ids >= (limit or np.inf))
    if unknown.any():
        where = int(unknown.argmax())
        known = "token ids from 0" + (f" to {limit - 1}" if limit else "")
        raise RangeError(f"{name}: expected {known}, got {ids[where]} at {where}")
    if pad is not None and (ids == pad).any():
        raise RangeError(f"{name}: expected no padding, got the padding token {pad} at {int((ids == pad).argmax())}")
    return ids.astype(np.int64)
