"""A pre-trained transformer that keeps learning on the device, and knows how sure it is.

``Model`` is a frozen trunk with a Bayesian head: ``predict`` gives a mean with its variance, ``observe`` learns the
target of that prediction in one closed-form step and fixed memory. ``Head`` is the head alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kbt_edge._version import __version__
from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.head import Head, Prediction, Update

if TYPE_CHECKING:
    from kbt_edge.generated import load_generated
    from kbt_edge.model import Model
    from kbt_edge.sequence import Sequences
    from kbt_edge.trunk import Trunk

__all__ = [
    "BundleError",
    "DtypeError",
    "Head",
    "KbtError",
    "Model",
    "NumericsError",
    "Prediction",
    "RangeError",
    "Sequences",
    "ShapeError",
    "Trunk",
    "Update",
    "__version__",
    "load_generated",
]

# Imported when first used, so that a program with only a head starts quickly.
_LATER = {
    "Model": "kbt_edge.model",
    "Sequences": "kbt_edge.sequence",
    "Trunk": "kbt_edge.trunk",
    "load_generated": "kbt_edge.generated",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kbt_edge' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
