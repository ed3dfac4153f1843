"""Progress of long-running work, reported through a function that the caller passes."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Tell", "silent"]

Tell = Callable[[str | None], None]  # a line that replaces the one before; None clears it


def silent(line: str | None) -> None:
    """Report nothing."""
