"""What the experiments of the study share: sizes, the network, and parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbt_edge._progress import Tell
from kbt_edge.errors import BackendError
from kbt_edge.studies import cartpole
from kbt_edge.studies.baselines import hidden, load_network

if TYPE_CHECKING:
    from kbt_edge.networks import DecisionTransformer

__all__ = [
    "FULL",
    "HEADS",
    "PAPER_EPSILON",
    "QUICK",
    "SINGLE",
    "WATCHFUL",
    "Array",
    "Result",
    "Settings",
    "parallel",
    "pretrained",
    "scaled",
]

Array = NDArray[np.float64]
Result = dict[str, Any]

SINGLE, WATCHFUL = "KBT, drift=0", "KBT, default"
HEADS: Final[dict[str, dict[str, Any]]] = {SINGLE: {"drift": 0.0}, WATCHFUL: {}}
"""One stationary filter, as in the paper, and a head with nothing set, which is watchful (method.md §9)."""

PAPER_EPSILON: Final = 1e-4  # prior variance of both layers; docs/study.md says how it was chosen


@dataclass(frozen=True)
class Settings:
    """Sizes of the experiments."""

    seed: int = 0
    trials: int = 10
    samples: int = 400
    starts: int = 50  # of the closed loop, per trial
    unseen: int = 500  # states on which forces are compared
    iterations: int = 70_000  # of the Σ_data study
    plants: int = 5
    timed: int = 400  # samples over which retraining is timed; a full memory at least
    changing_seeds: int = 3
    changing_before: int = 1000  # samples of the old plant before it changes
    changing_after: int = 1000  # samples of each part after that

    def moments(self) -> list[int]:
        """Sample counts at which the main rows are evaluated: where each memory fills up, and between."""
        counts = {*range(0, 50, 5), *range(50, self.samples + 1, 10), *range(75, self.samples + 1, 25)}
        return sorted(count for count in counts if count <= self.samples)

    def few_moments(self) -> list[int]:
        """Sample counts at which the other rows are evaluated."""
        return [count for count in (0, 10, 20, 50, 100, 200, 300, 400) if count <= self.samples]


FULL: Final = Settings()
QUICK: Final = Settings(trials=1, samples=100, starts=20, unseen=200, iterations=20_000, timed=1,
                        changing_seeds=1, changing_before=200, changing_after=200)  # fmt: skip


def pretrained() -> DecisionTransformer:
    import torch

    torch.set_num_threads(1)  # the network is too small for several threads, and trials already run in parallel
    return load_network()


def scaled(network: DecisionTransformer, states: Array, forces: Array) -> tuple[NDArray[np.float32], Array]:
    """Rows h and targets as a head takes them."""
    rows = [hidden(network, part) for part in np.array_split(states, max(1, len(states) // 1000))]
    return np.concatenate(rows).astype(np.float32), forces[:, None] / cartpole.FORCE_SCALE


def parallel(
    what: str, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], jobs: int | None, tell: Tell
) -> list[Any]:
    """``function`` over ``tasks`` through joblib, in order."""
    try:
        import joblib
    except ImportError as error:
        raise BackendError("repro needs joblib, SciPy, matplotlib and torch: pip install 'kbt-edge[repro]'") from error

    class Parallel(joblib.Parallel):  # type: ignore[misc]
        def print_progress(self) -> None:  # called by joblib after every task, whatever its back end
            tell(f"{what}: {self.n_completed_tasks} of {len(tasks)}")

    tell(f"{what}: starting")
    done: list[Any] = Parallel(n_jobs=jobs)(joblib.delayed(function)(*task) for task in tasks)
    tell(None)
    return done
