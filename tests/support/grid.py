"""Parameters of a test, of which a plain ``pytest`` runs a few and ``pytest -m slow`` the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow("one of many configurations")
Setting = tuple[Any, str]  # a name or position, and the value as text


def pairwise(cases: Iterable[Mapping[str, Any] | Sequence[Any]]) -> list[Any]:
    """The cases in their order, for ``parametrize``; those that add no pair of settings are ``slow``."""
    listed = list(cases)
    kept = covering([pairs_of(case) for case in listed])
    return [parameter(case, i in kept) for i, case in enumerate(listed)]


def one_fast(cases: Iterable[Any]) -> list[Any]:
    """The cases in their order, for ``parametrize``; all but the first are marked ``slow``."""
    return [parameter(case, i == 0) for i, case in enumerate(cases)]


def parameter(case: Any, fast: bool) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if fast else SLOW)


def pairs_of(case: Mapping[str, Any] | Sequence[Any]) -> set[tuple[Setting, Setting]]:
    items = case.items() if isinstance(case, Mapping) else enumerate(case)
    return set(itertools.combinations([(name, str(value)) for name, value in items], 2))


def covering(pairs: list[set[tuple[Setting, Setting]]]) -> set[int]:
    """Indices that together have every pair: each time the first of those that add most."""
    kept: set[int] = set()
    missing = set().union(*pairs)
    while missing:
        best = max(range(len(pairs)), key=lambda i: (len(pairs[i] & missing), -i))
        kept.add(best)
        missing -= pairs[best]
    return kept
