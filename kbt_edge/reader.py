"""Predictions in one thread while another one learns."""

from __future__ import annotations

import numpy.typing as npt

from kbt_edge import _core
from kbt_edge.head import Head, Prediction

__all__ = ["Reader"]


class Reader:
    """Predicts with a head's state after its latest complete update. Made by ``Head.reader``.

    A reader has its own memory: neither thread waits for the other, and a prediction here does not affect the one
    that the learning thread will observe. Use one reader per thread.
    """

    __slots__ = ("_head", "_mailbox")

    def __init__(self, head: Head) -> None:
        self._mailbox = _core.Mailbox(head.core)
        self._head = Head.from_bytes(head.to_bytes())
        head.core.post_to(self._mailbox)

    def predict(self, h: npt.ArrayLike) -> Prediction:
        """Mean and covariance of the output at ``h``, (d,) or (rows, d), as ``Head.predict`` gives them."""
        self._head.core.take(self._mailbox)
        return self._head.predict(h)

    @property
    def samples(self) -> int:
        """Number of updates in the state that the latest prediction used."""
        return self._head.samples

    def __repr__(self) -> str:
        return f"Reader({self._head!r})"
