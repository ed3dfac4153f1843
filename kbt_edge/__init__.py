"""A pre-trained transformer that keeps learning on the device, with uncertainty for every prediction.

``Model`` is a frozen trunk with a Bayesian head: ``predict`` returns a mean with its variance, ``observe`` learns the
target of that prediction in one closed-form step and fixed memory. ``Head`` is the head alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

try:
    importlib.import_module("kbt_edge._core")
except ModuleNotFoundError as error:
    if error.name != "kbt_edge._core":
        raise
    raise ImportError(
        f"{__path__[0]} has no compiled core. If it is a source checkout, run 'pip install -e .' in it, "
        "or start Python in another folder to use the installed package.",
        name="kbt_edge._core",
    ) from None

from kbt_edge._version import __version__
from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.head import Head, Prediction, Update

__all__ = [
    "BundleError",
    "DtypeError",
    "Head",
    "KbtError",
    "Model",
    "NumericsError",
    "Prediction",
    "RangeError",
    "Readout",
    "Sequences",
    "ShapeError",
    "Trunk",
    "Update",
    "__version__",
    "load_generated",
]

# Imported on first use, so that a program with only a head starts quickly. Type checkers see ordinary imports.
if TYPE_CHECKING:
    from kbt_edge.codegen.generated import load_generated
    from kbt_edge.model import Model
    from kbt_edge.readout import Readout
    from kbt_edge.sequence import Sequences
    from kbt_edge.trunk import Trunk
else:
    _LAZY = {
        "Model": "kbt_edge.model",
        "Readout": "kbt_edge.readout",
        "Sequences": "kbt_edge.sequence",
        "Trunk": "kbt_edge.trunk",
        "load_generated": "kbt_edge.codegen.generated",
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'kbt_edge' has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)

    def __dir__():
        return __all__
