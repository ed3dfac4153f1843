"""How much memory a head may take, and what to do if it is too much."""

from __future__ import annotations

from kbt_edge import _core
from kbt_edge.errors import KbtError
from kbt_edge.settings import COVARIANCES, OUTPUTS

__all__ = ["memory_limit", "new_core", "too_large"]


def memory_limit(blob: bytes) -> int:
    """Default limit for the memory of a head from this blob."""
    return (1 << 27) + 64 * len(blob)


def new_core(config: _core.Config, error: type[KbtError]) -> _core.Core:
    try:
        return _core.Core(config)
    except MemoryError:
        size, shape = _bytes_in_words(config.arena_bytes()), f"widths {config.widths}, max_rows {config.max_rows}"
        raise error(f"hidden, max_rows: no memory for a head of {size} ({shape})", _core.E_SIZE) from None


def too_large(config: _core.Config, covariance: str, most: int) -> str:
    """What the head would take, and which structures would fit."""
    given, fits = config.covariance, []
    needed = config.arena_bytes()
    for i, name in enumerate(COVARIANCES):
        config.covariance = i
        if not config.check()[0] and 0 < config.arena_bytes() <= most:
            fits.append(f"covariance={name!r} takes {_bytes_in_words(config.arena_bytes())}")
    config.covariance = given
    drift, config.drift = config.drift, 0.0
    if drift < 0 and not config.check()[0] and 0 < config.arena_bytes() <= most:
        fits.append(f"drift=0.0 takes {_bytes_in_words(config.arena_bytes())}")
    config.drift = drift
    if OUTPUTS[config.output] == "softmax" and config.layers == 1:
        fits.append("kbt_edge.Readout is for thousands of classes")
    size = f"one of {_bytes_in_words(needed)}" if needed else "one beyond the address space"
    return (
        f"weight, hidden, max_rows: expected a head of at most max_memory = {_bytes_in_words(most)}, got {size} "
        f"(outputs x width: {config.widths[-1]} x {config.widths[-2]}, widths {' → '.join(map(str, config.widths))}, "
        f"max_rows {config.max_rows}, covariance {covariance!r}); "
        f"{'; '.join(fits) or 'no structure fits: use smaller hidden layers'}; or use a larger max_memory"
    )


def _bytes_in_words(count: int) -> str:
    return (
        f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count} B"
    )
