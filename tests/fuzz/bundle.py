"""Coverage-guided fuzzing of bundles: what the reader accepts must mean the same after it is written and read again.

    python tests/fuzz/bundle.py corpus seeds -max_total_time=600      (or tools/fuzz.py bundle)

An input is the three files of a bundle in a row (``pack``). The mutator changes one of them and then, mostly, makes the
rest fit again: checksum and length of the state, sizes and SHA-256 in the description. Else nothing would be tested but
the checksum.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import random
import shutil
import struct
import sys
import tempfile
import types
import warnings
import zlib
from pathlib import Path
from typing import Any

import atheris
import numpy as np

import kbt_edge as kbt
from kbt_edge import bundle as bundles
from kbt_edge.errors import BundleError, KbtError, NumericsError
from kbt_edge.onnxfile import read_onnx

LENGTHS = struct.Struct("<II")  # of bundle.json and head.kbt; trunk.onnx is the rest
HEADER, CONFIG = 24, 4 * 18 + 8 * 12  # csrc/abi/state.hpp: bytes of the header, and of the configuration behind it
MOST_MEMORY = 1 << 22  # a larger head is read, but not asked for predictions: it would only cost time


def pack(text: bytes, head: bytes, trunk: bytes) -> bytes:
    return LENGTHS.pack(len(text), len(head)) + text + head + trunk


def unpack(data: bytes) -> tuple[bytes, bytes, bytes]:
    if len(data) < LENGTHS.size:
        return data, b"", b""
    first, second = LENGTHS.unpack_from(data)
    rest = data[LENGTHS.size :]
    return rest[:first], rest[first : first + second], rest[first + second :]


# The property.


class Reader:
    """Reads inputs as a bundle and says what must hold of every one that is accepted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accepted = 0

    def __call__(self, data: bytes) -> None:
        text, head, trunk = unpack(data)
        self.state(head)
        try:
            read_onnx(trunk)
        except BundleError as error:
            assert_plain(error)
        there = self.folder / "there"
        there.mkdir(exist_ok=True)
        for name, content in (("bundle.json", text), ("head.kbt", head), ("trunk.onnx", trunk)):
            (there / name).write_bytes(content)
        try:
            found = bundles.read(there)
        except BundleError as error:
            assert_plain(error)
            return
        self.accepted += 1
        again = self.folder / "again"
        bundles.write(again, found)
        assert bundles.read(again) == found, "written and read again it is another bundle"
        shutil.rmtree(again)

    def state(self, blob: bytes) -> None:
        try:
            head = kbt.Head.from_bytes(blob)
        except BundleError as error:
            assert_plain(error)
            return
        assert head.to_bytes() == blob, "an accepted state is saved as another"
        if head.nbytes > MOST_MEMORY:
            return
        assert 0 <= head.health().smallest_var <= head.health().largest_var < math.inf
        assert (np.diagonal(head.noise_var) if head.noise_var.ndim == 2 else head.noise_var).min() >= 0
        for h in (np.zeros(head.d), np.ones(head.d)):
            try:
                p = head.predict(h)
                assert all(np.isfinite(part).all() for part in p), "a prediction that is not finite"
                assert (p.var >= 0).all()
                assert (p.total_var >= 0).all()
            except NumericsError:
                pass  # finite weights whose product is not
            assert head.to_bytes() == blob, "a prediction changed the state"
            try:
                head.update(h, np.full(head.d_o, 1 / head.d_o))
            except KbtError:
                assert head.to_bytes() == blob, "a rejected update changed the state"
            else:
                assert kbt.Head.from_bytes(head.to_bytes()).to_bytes() == head.to_bytes()
            head.restore(blob)


def assert_plain(error: BundleError) -> None:
    """A message that can be shown: short, and without a way to move a terminal's cursor."""
    assert str(error).isprintable(), ascii(str(error))
    assert len(str(error)) < 2000


# The mutator.


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    text, head, trunk = unpack(data)
    part = rng.randrange(3)
    if part == 0:
        text = mutated_json(text, rng) if rng.random() < 0.7 else some_bytes(text, rng)
    elif part == 1:
        head = mutated_state(head, rng) if rng.random() < 0.7 else some_bytes(head, rng)
    else:
        trunk = some_bytes(trunk, rng)
    if rng.random() < 0.9:
        head = sealed(head)
    if rng.random() < 0.9 and part != 0:
        text = fitting(text, head, trunk)
    return pack(text, head, trunk)[:max_size]


def some_bytes(data: bytes, rng: random.Random) -> bytes:
    return bytes(atheris.Mutate(bytes(data), len(data) + rng.randrange(1, 65)))


def sealed(blob: bytes) -> bytes:
    """Length and checksum made right again."""
    if len(blob) < HEADER:
        return blob
    out = bytearray(blob)
    struct.pack_into("<Q", out, 8, len(out))
    struct.pack_into("<I", out, 16, zlib.crc32(out[HEADER:]))
    return bytes(out)


INTEGERS = (-(2**31), -1, 0, 1, 2, 3, 7, 8, 9, 64, 2**20, 2**31 - 1)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-300, 5e-324, 1e-45, 1e30, 3e38, 1e300, math.inf, -math.inf, math.nan)


def mutated_state(blob: bytes, rng: random.Random) -> bytes:
    """One number of the configuration or of the learned values, or the length."""
    out = bytearray(blob)
    kind = rng.randrange(5)
    if kind == 0 and len(out) >= HEADER + 4 * 18:
        struct.pack_into("<i", out, HEADER + 4 * rng.randrange(18), rng.choice(INTEGERS))
    elif kind == 1 and len(out) >= HEADER + CONFIG:
        struct.pack_into("<d", out, HEADER + 4 * 18 + 8 * rng.randrange(12), rng.choice(NUMBERS))
    elif kind in (2, 3) and len(out) >= HEADER + CONFIG + 16:
        place = rng.randrange(HEADER + CONFIG, len(out) - 7) & ~3
        number = rng.choice(NUMBERS)
        narrow = rng.random() < 0.7
        out[place : place + (4 if narrow else 8)] = np.array(number, "<f4" if narrow else "<f8").tobytes()
    else:
        out = out[: -rng.randrange(1, 9)] if rng.random() < 0.5 else out + bytes(rng.randrange(1, 9))
    return bytes(out)


def mutated_json(text: bytes, rng: random.Random) -> bytes:
    """One value replaced, removed or doubled."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return some_bytes(text, rng)
    places = list(nodes(value))
    if not places:
        return some_bytes(text, rng)
    parent, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == 2:
        other, place = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[place]))
    else:
        parent[key] = rng.choice([*INTEGERS, *NUMBERS, True, None, "", "x", "\x1b[2J", [], {}, 10**400, "é" * 1001])
    return json.dumps(value).encode()


def nodes(value: Any) -> Any:
    """(container, key) of everything within ``value``."""
    pending = [value]
    while pending:
        parent = pending.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent)) if isinstance(parent, list) else ()
        for key in keys:
            yield parent, key
            pending.append(parent[key])


def fitting(text: bytes, head: bytes, trunk: bytes) -> bytes:
    """The description of these files, where it has the usual form."""
    try:
        said = json.loads(text)
        said["trunk"]["bytes"], said["trunk"]["sha256"] = len(trunk), hashlib.sha256(trunk).hexdigest()
        said["head"]["bytes"] = len(head)
        config = kbt._core.state_config(head)
        if not isinstance(config, int):
            said["head"]["widths"], said["head"]["max_rows"] = list(config.widths), config.max_rows
            said["head"]["output"] = ("gaussian", "softmax")[config.output]
            said["head"]["dtype"] = ("float32", "float64")[config.dtype]
            said["trunk"]["d"] = config.widths[0]
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return text
    return json.dumps(said).encode()


def main() -> None:
    warnings.simplefilter("ignore")  # of NumPy, about numbers near the end of their range
    folder = Path(tempfile.mkdtemp(prefix="kbt-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    reader = Reader(folder)
    for function in gc.get_objects():  # instrument_imports does not see through the loader of an editable install
        if isinstance(function, types.FunctionType) and str(function.__module__).startswith("kbt_edge."):
            atheris.instrument_func(function)
    atheris.Setup(sys.argv, reader, custom_mutator=mutate)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
