"""A pre-trained transformer that keeps learning on the device, and knows how sure it is.

``Head`` is the Bayesian readout: ``predict`` gives a mean with its covariance, ``update`` learns one sample in closed
form and fixed memory.
"""

from __future__ import annotations

from kbt_edge.errors import BundleError, DtypeError, KbtError, NumericsError, RangeError, ShapeError
from kbt_edge.head import Counters, Head, Layer, Prediction, Update

__all__ = [
    "BundleError",
    "Counters",
    "DtypeError",
    "Head",
    "KbtError",
    "Layer",
    "NumericsError",
    "Prediction",
    "RangeError",
    "ShapeError",
    "Update",
    "__version__",
]

__version__ = "0.1.0"
