"""Reads untrusted ONNX files.

``wire.py`` parses the protobuf, ``rules.py`` rejects graphs that are not safe to run.
"""

from __future__ import annotations

from kbt_edge.onnxfile.rules import read_onnx, token_limits, token_lookups
from kbt_edge.onnxfile.wire import ELEMENT_TYPES, MAX_BYTES, Graph, OnnxModel, Value

__all__ = ["ELEMENT_TYPES", "MAX_BYTES", "Graph", "OnnxModel", "Value", "read_onnx", "token_limits", "token_lookups"]
