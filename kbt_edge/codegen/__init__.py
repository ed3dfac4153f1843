"""A bundle as C for a microcontroller: ``kbt-edge codegen BUNDLE -o DIR``. See ``generate`` for what is written."""

from kbt_edge.codegen.generator import generate

__all__ = ["generate"]
