"""Small ONNX files for tests, written byte by byte, so that no test needs the ``onnx`` package for its trunk.

Field numbers are those of onnx.proto; the wire format is https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT, INT64 = 1, 7
TYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64}


def varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low]) if high == 0 else bytes([low | 0x80]) + varint(high)


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: np.ndarray[Any, Any]) -> bytes:
    dims = b"".join(field(1, n) for n in array.shape)
    return dims + field(2, TYPES[array.dtype]) + field(8, name) + field(9, array.tobytes())


def value_info(name: str, shape: tuple[int, ...], element_type: int) -> bytes:
    dims = b"".join(field(1, field(1, n)) for n in shape)
    return field(1, name) + field(2, field(1, field(1, element_type) + field(2, dims)))


def node(operator: str, inputs: list[str], output: str) -> bytes:
    return b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, operator)


def model(
    nodes: list[bytes],
    inputs: list[tuple[str, tuple[int, ...], int]],
    output: tuple[str, tuple[int, ...]],
    constants: dict[str, np.ndarray[Any, Any]],
) -> bytes:
    graph = b"".join(field(1, entry) for entry in nodes) + field(2, "g")
    graph += b"".join(field(5, tensor(name, array)) for name, array in constants.items())
    graph += b"".join(field(11, value_info(*entry)) for entry in inputs) + field(12, value_info(*output, FLOAT))
    return field(1, 10) + field(7, graph) + field(8, field(2, 20))


# Trunks. Each comes with the same function in NumPy.


class Control:
    """States x (rows, 4) → h = tanh(x W + b), (rows, d)."""

    def __init__(self, rows: int = 1, d: int = 3, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.W = rng.standard_normal((4, d)).astype(np.float32)
        self.b = rng.standard_normal(d).astype(np.float32)
        nodes = [node("MatMul", ["x", "W"], "a"), node("Add", ["a", "b"], "u"), node("Tanh", ["u"], "h")]
        constants = {"W": self.W, "b": self.b}
        self.onnx = model(nodes, [("x", (rows, 4), FLOAT)], ("h", (rows, d)), constants)

    def __call__(self, x: Any) -> Any:
        return np.tanh(np.atleast_2d(np.asarray(x, np.float64)) @ self.W + self.b)


class TwoInputs:
    """position (1, 2) and wheels (1, 3) → h = tanh(position A + wheels B), (1, d)."""

    def __init__(self, d: int = 3, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.A = rng.standard_normal((2, d)).astype(np.float32)
        self.B = rng.standard_normal((3, d)).astype(np.float32)
        nodes = [
            node("MatMul", ["position", "A"], "a"),
            node("MatMul", ["wheels", "B"], "b"),
            node("Add", ["a", "b"], "u"),
            node("Tanh", ["u"], "h"),
        ]
        inputs = [("position", (1, 2), FLOAT), ("wheels", (1, 3), FLOAT)]
        self.onnx = model(nodes, inputs, ("h", (1, d)), {"A": self.A, "B": self.B})

    def __call__(self, position: Any, wheels: Any) -> Any:
        return np.tanh(np.atleast_2d(np.asarray(position) @ self.A + np.asarray(wheels) @ self.B))


class Tokens:
    """Source (S,) and target (T,) ids → h_i = tanh(Σ_s source[s] + Σ_t mix[i, t] target[t]), (T, d).

    ``mix`` is lower triangular for a causal trunk. Token 0 of the source counts nothing: it is the padding.
    """

    def __init__(self, vocabulary: int, length: int, d: int = 4, causal: bool = True, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.source = (0.5 * rng.standard_normal((vocabulary, d))).astype(np.float32)
        self.source[0] = 0
        self.target = rng.standard_normal((vocabulary, d)).astype(np.float32)
        self.mix = (rng.standard_normal((length, length)) / np.sqrt(length)).astype(np.float32)
        if causal:
            self.mix = np.tril(self.mix)
        nodes = [
            node("Gather", ["source", "source_ids"], "s"),
            node("MatMul", ["ones", "s"], "S"),
            node("Gather", ["target", "target_ids"], "t"),
            node("MatMul", ["mix", "t"], "T"),
            node("Add", ["T", "S"], "u"),
            node("Tanh", ["u"], "h"),
        ]
        constants = {
            "source": self.source,
            "target": self.target,
            "mix": self.mix,
            "ones": np.ones((1, length), np.float32),
        }
        inputs = [("source_ids", (length,), INT64), ("target_ids", (length,), INT64)]
        self.onnx = model(nodes, inputs, ("h", (length, d)), constants)

    def __call__(self, source_ids: Any, target_ids: Any) -> Any:
        """For sequences of any length up to ``length``."""
        n = len(target_ids)
        target = self.mix[:n, :n].astype(np.float64) @ self.target[target_ids]
        return np.tanh(self.source[source_ids].sum(axis=0, dtype=np.float64) + target)
