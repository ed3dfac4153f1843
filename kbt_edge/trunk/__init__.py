"""The frozen network below the head: an ONNX file, run by onnxruntime or as compiled C."""

from __future__ import annotations

from kbt_edge.errors import BackendError
from kbt_edge.trunk.inputs import TensorSpec
from kbt_edge.trunk.trunk import Backend, Trunk

__all__ = ["Backend", "BackendError", "TensorSpec", "Trunk"]
