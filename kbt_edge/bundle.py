"""The bundle: a folder that holds a model.

    trunk.onnx     the frozen network, never rewritten
    head.kbt       configuration and learned state of the head; the only file that learning changes
    bundle.json    what the two are: sizes, shapes, scaling, the SHA-256 of the trunk, how it was made

A bundle may come from an untrusted source, so ``read`` checks all of it: no file name is taken from the JSON, no link
may lead out of the folder, every size is limited before a byte is read, the JSON has one exact form, and it must match
the files. The only error raised is ``BundleError``.

``write`` never breaks a bundle. In a new folder ``bundle.json`` comes last, and without it there is no bundle. In the
bundle's own folder only ``head.kbt`` is replaced, by one atomic rename: if the process is killed,
the old state is there or the new one. A folder that holds another bundle is rejected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from kbt_edge import _core
from kbt_edge._files import make_folder, read_bounded, write_atomic
from kbt_edge._memory import memory_limit
from kbt_edge.errors import BundleError
from kbt_edge.onnxfile import MAX_BYTES
from kbt_edge.settings import DTYPES, OUTPUTS

__all__ = ["FORMAT", "Bundle", "BundleInput", "find", "read", "write"]

FORMAT: Final = 1
TRUNK, HEAD, JSON = "trunk.onnx", "head.kbt", "bundle.json"

# Limits far above any real bundle. With ``max_bytes`` they bound what a hostile one can allocate.
MAX_JSON_BYTES: Final = 2**20
GROWN: Final = 8  # bytes that a state of format 2 has more: an old bundle's head, saved again
MAX_RANK: Final = 8
MAX_INPUTS: Final = 64
MAX_WIDTH: Final = 2**22
MAX_MAGNITUDE: Final = 1e30
MAX_TEXT: Final = 1000

PREFIX: Final = "kbt_edge:"  # of the names of shipped bundles
SHIPPED = Path(__file__).parent / "bundles"


@dataclass(frozen=True)
class BundleInput:
    """An input of the trunk, and the scaling in front of it: the trunk gets (x - mean) / scale.

    ``mean`` and ``scale`` hold one number, or one for each entry of the last axis. Token ids (int64) have neither.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory. Outputs are y = offset + scale · u, with u the head's output; a softmax has no scaling."""

    trunk: bytes = field(repr=False)
    head: bytes = field(repr=False)
    inputs: tuple[BundleInput, ...]
    rows: int
    d: int
    offset: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    made: Mapping[str, str] = field(default_factory=dict)
    """How it was made: short texts by key."""


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a bundle: a path, or the name of a bundle shipped inside the package.

    "cartpole" is a folder of that name in the working directory, or the shipped bundle. If there are both, it is
    rejected: write "./cartpole" for the folder, "kbt_edge:cartpole" for the shipped one.
    """
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and name_or_path.startswith(PREFIX):
        name = name_or_path.removeprefix(PREFIX)
        if name not in _shipped():
            raise BundleError(f"{name_or_path}: expected a bundle of the package ({', '.join(_shipped()) or 'none'})")
        return SHIPPED / name
    if not isinstance(name_or_path, str) or path.name != name_or_path:
        return path
    local, shipped = (path / JSON).exists(), name_or_path in _shipped()
    if local and shipped:
        raise BundleError(
            f"{path}: the name of a bundle of the package and of a bundle in this folder; "
            f'write "./{path}" for the one in this folder or "{PREFIX}{path}" for the one of the package'
        )
    if shipped:
        return SHIPPED / path
    if not path.exists():
        names = ", ".join(_shipped()) or "none"
        raise BundleError(f"{path}: expected a folder, or a bundle of the package ({names}); there is neither")
    return path


def _shipped() -> list[str]:
    return sorted(entry.parent.name for entry in SHIPPED.glob(f"*/{JSON}"))


def is_shipped(folder: Path) -> bool:
    return folder.parent == SHIPPED


def read(folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Bundle:
    """The bundle in ``folder``, its files checked against each other. None may have more than ``max_bytes``."""
    with _named(folder := Path(folder)):
        said = _read_json(folder)
        for name, size in ((TRUNK, said["trunk"]["bytes"]), (HEAD, said["head"]["bytes"])):
            if size > max_bytes:
                got = f"got {_Check.shown(size)} bytes; load a file that you trust with a larger max_bytes"
                raise BundleError(f"{folder / name}: expected at most max_bytes = {max_bytes}, {got}")
        trunk = _read_file(folder, TRUNK, said["trunk"]["bytes"])
        head = _read_file(folder, HEAD, said["head"]["bytes"], GROWN)
    bundle = Bundle(
        trunk=trunk,
        head=head,
        inputs=tuple(
            BundleInput(entry["name"], tuple(entry["shape"]), entry["dtype"], *_scaling(entry, "mean"))
            for entry in said["trunk"]["inputs"]
        ),
        rows=said["trunk"]["rows"],
        d=said["trunk"]["d"],
        **dict(zip(("offset", "scale"), _scaling(said["head"], "offset"), strict=True)),
        made=said["made"],
    )
    try:
        found = _describe(bundle)
    except BundleError as error:
        raise BundleError(f"{folder / HEAD}: {error}", error.status) from None
    different = _first_difference(said, found)
    if different is not None:
        where, there, here = different
        raise BundleError(f"{folder}: {JSON} says {where} is {there}, the files say {here}")
    return bundle


def write(folder: str | os.PathLike[str], bundle: Bundle) -> None:
    """Save ``bundle``. In a folder that already holds it, only changed files are written."""
    folder = Path(folder)
    described = _describe(bundle)
    text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    _checked(_parse(text.encode(), folder / JSON), folder / JSON)  # what is written can be read
    with _named(folder):
        make_folder(folder)
        with _saving(folder):
            new = not (folder / JSON).exists()
            if not new:
                _must_be_the_same(folder, described)
            if new or not _has_size(folder / TRUNK, len(bundle.trunk)):
                write_atomic(folder / TRUNK, bundle.trunk)
            if new or not _holds(folder / HEAD, bundle.head):
                write_atomic(folder / HEAD, bundle.head)
            if new:
                write_atomic(folder / JSON, text.encode())


# The content of bundle.json.


def _describe(bundle: Bundle) -> dict[str, Any]:
    """The content of bundle.json. It does not change while the head learns."""
    config = _head_config(bundle.head)
    head: dict[str, Any] = {
        "bytes": len(bundle.head),
        "widths": list(config.widths),
        "max_rows": config.max_rows,
        "output": OUTPUTS[config.output],
        "dtype": DTYPES[config.dtype],
    }
    if bundle.offset is not None and bundle.scale is not None:
        head |= {"offset": list(bundle.offset), "scale": list(bundle.scale)}
    inputs = []
    for entry in bundle.inputs:
        inputs.append({"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype})
        if entry.mean is not None and entry.scale is not None:
            inputs[-1] |= {"mean": list(entry.mean), "scale": list(entry.scale)}
    trunk = {
        "bytes": len(bundle.trunk),
        "sha256": hashlib.sha256(bundle.trunk).hexdigest(),
        "inputs": inputs,
        "rows": bundle.rows,
        "d": bundle.d,
    }
    return {"format": FORMAT, "trunk": trunk, "head": head, "made": dict(bundle.made)}


def _head_config(blob: bytes) -> _core.Config:
    config = _core.state_config(blob)
    if isinstance(config, int):
        raise BundleError(_core.status_str(config), config)
    if config.arena_bytes() > memory_limit(blob):
        raise BundleError(f"expected a head of at most {memory_limit(blob)} bytes, it asks for {config.arena_bytes()}")
    return config


def _scaling(entry: dict[str, Any], first: str) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if first not in entry:
        return None, None
    return tuple(map(float, entry[first])), tuple(map(float, entry["scale"]))


def _first_difference(one: Any, other: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Where two descriptions differ first, and the two values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = ((f"{where}.{key}".lstrip("."), one[key], other[key]) for key in one)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)))
    else:
        return None if one == other else (where, one, other)
    return next((found for key, a, b in pairs if (found := _first_difference(a, b, key))), None)


def _must_be_the_same(folder: Path, described: dict[str, Any]) -> None:
    """``made`` may differ. Anything else would change two files at once, which no rename can do atomically."""
    there = _read_json(folder)
    if described["head"]["bytes"] == there["head"]["bytes"] + GROWN:
        described["head"]["bytes"] = there["head"]["bytes"]
    different = _first_difference(there | {"made": {}}, described | {"made": {}})
    if different is not None:
        where, that, this = different
        raise BundleError(f"{folder}: holds another bundle ({where} is {that}, not {this}); save to a new folder")


# The format of bundle.json.


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BundleError(f"{folder}: expected the folder of a bundle; there is no such folder")
    path = folder / JSON
    if not path.exists():
        raise BundleError(f"{folder}: {JSON} is missing: not a bundle, or a first save that was interrupted")
    return _checked(_parse(_read_file(folder, JSON), path), path)


def _parse(data: bytes, path: Path) -> Any:
    def reject(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return keys

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=reject)
    except RecursionError:
        raise BundleError(f"{path}: nested too deeply; expected three levels of JSON") from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError and integers of thousands of digits
        raise BundleError(f"{path}: not readable as JSON: {error}") from None


def _checked(value: Any, path: Path) -> dict[str, Any]:
    check = _Check(path)
    if not isinstance(value, dict):
        check.reject("the whole", "an object", value)
    check.integer("format", value.get("format"), 1)
    if value["format"] > FORMAT:
        raise BundleError(
            f"{path}: its format is {check.shown(value['format'])}, newer than the {FORMAT} read here; upgrade kbt-edge"
        )
    check.keys("", value, {"format", "trunk", "head", "made"})

    trunk = value["trunk"]
    check.keys("trunk", trunk, {"bytes", "sha256", "inputs", "rows", "d"})
    check.integer("trunk.bytes", trunk["bytes"], 1)
    check.text("trunk.sha256", trunk["sha256"], re.compile("[0-9a-f]{64}"))
    check.integer("trunk.rows", trunk["rows"], 1, MAX_WIDTH)
    check.integer("trunk.d", trunk["d"], 1, MAX_WIDTH)
    check.list("trunk.inputs", trunk["inputs"], 1, MAX_INPUTS)
    for i, entry in enumerate(trunk["inputs"]):
        where = f"trunk.inputs[{i}]"
        scaling = {"mean", "scale"} if isinstance(entry, dict) and entry.get("dtype") == "float32" else set()
        check.keys(where, entry, {"name", "shape", "dtype"} | scaling)
        check.text(f"{where}.name", entry["name"])
        check.choice(f"{where}.dtype", entry["dtype"], ("float32", "int64"))
        check.list(f"{where}.shape", entry["shape"], 1, MAX_RANK)
        for axis, length in enumerate(entry["shape"]):
            check.integer(f"{where}.shape[{axis}]", length, 1, MAX_WIDTH)
        if scaling:
            check.numbers(f"{where}.mean", entry["mean"], {1, entry["shape"][-1]}, -MAX_MAGNITUDE)
            check.numbers(f"{where}.scale", entry["scale"], {1, entry["shape"][-1]}, 1 / MAX_MAGNITUDE)
    names = [entry["name"] for entry in trunk["inputs"]]
    if len(set(names)) != len(names):
        check.reject("trunk.inputs", "different names", names)

    head = value["head"]
    scaling = {"offset", "scale"} if isinstance(head, dict) and head.get("output") == "gaussian" else set()
    check.keys("head", head, {"bytes", "widths", "max_rows", "output", "dtype"} | scaling)
    check.integer("head.bytes", head["bytes"], 1)
    check.integer("head.max_rows", head["max_rows"], 1, MAX_WIDTH)
    check.choice("head.output", head["output"], OUTPUTS)
    check.choice("head.dtype", head["dtype"], DTYPES)
    check.list("head.widths", head["widths"], 2, _core.MAX_LAYERS + 1)
    for i, width in enumerate(head["widths"]):
        check.integer(f"head.widths[{i}]", width, 1, MAX_WIDTH)
    if scaling:
        check.numbers("head.offset", head["offset"], {1, head["widths"][-1]}, -MAX_MAGNITUDE)
        check.numbers("head.scale", head["scale"], {1, head["widths"][-1]}, 1 / MAX_MAGNITUDE)
    if head["widths"][0] != trunk["d"]:
        check.reject("head.widths[0]", f"trunk.d = {trunk['d']}", head["widths"][0])
    if head["max_rows"] < trunk["rows"]:
        check.reject("head.max_rows", f"at least trunk.rows = {trunk['rows']}", head["max_rows"])

    made = value["made"]
    if not isinstance(made, dict) or len(made) > MAX_INPUTS:
        check.reject("made", f"an object of at most {MAX_INPUTS} texts", made)
    for key, text in made.items():
        check.text("a key of made", key)
        check.text(f"made.{key}", text)
    return value


class _Check:
    """Rejects values that do not have the required form."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reject(self, where: str, expected: str, got: object) -> NoReturn:
        raise BundleError(f"{self._path}: {where}: expected {expected}, got {self.shown(got)}")

    @staticmethod
    def shown(value: object) -> str:
        """A value from the file, short enough for a message. (An integer can have thousands of digits.)"""
        if isinstance(value, int) and abs(value) >= 10**30:
            return "a huge integer"
        if isinstance(value, (dict, list)) and len(value) > 8:
            return f"{type(value).__name__} of {len(value)}"
        text = ascii(value)
        return text if len(text) <= 80 else text[:77] + "..."

    def keys(self, where: str, value: object, expected: set[str]) -> None:
        if not isinstance(value, dict):
            self.reject(where, "an object", value)
        for key in sorted(expected ^ value.keys()):
            place = ascii(f"{where}.{key}".lstrip("."))[1:-1][:80]
            raise BundleError(f"{self._path}: {place} is {'missing' if key in expected else 'not a known field'}")

    def integer(self, where: str, value: object, low: int, high: int | None = None) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            self.reject(where, f"an integer from {low}" + (f" to {high}" if high is not None else ""), value)

    def numbers(self, where: str, value: object, lengths: set[int], low: float) -> None:
        if not isinstance(value, list) or len(value) not in lengths:
            self.reject(where, f"a list of {' or '.join(map(str, sorted(lengths)))} numbers", value)
        for i, number in enumerate(value):
            good = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not good or not low <= number <= MAX_MAGNITUDE or not math.isfinite(number):
                self.reject(f"{where}[{i}]", f"a number from {low:g} to {MAX_MAGNITUDE:g}", number)

    def list(self, where: str, value: object, shortest: int, longest: int) -> None:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            self.reject(where, f"a list of {shortest} to {longest}", value)

    def text(self, where: str, value: object, form: re.Pattern[str] | None = None) -> None:
        """Printable, so that showing it cannot move a terminal's cursor."""
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
            self.reject(ascii(where)[1:-1], f"a printable text of at most {MAX_TEXT} characters", value)
        if form is not None and not form.fullmatch(value):
            self.reject(where, f"the form {form.pattern}", value)

    def choice(self, where: str, value: object, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            self.reject(where, " or ".join(allowed), value)


# The files.


def _read_file(folder: Path, name: str, size: int | None = None, grown: int = 0) -> bytes:
    """A regular file of the folder itself, of exactly ``size`` bytes (or ``grown`` more), or up to the limit of
    bundle.json."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if real.parent != folder.resolve(strict=True):
            raise BundleError(f"{path}: a link that leads out of the bundle is not followed")
        found = os.stat(real)
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; a bundle holds {TRUNK}, {HEAD} and {JSON}") from None
    except RuntimeError as error:  # a loop of links; an OSError since Python 3.13
        raise BundleError(f"{path}: cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(f"{path}: not a regular file")
    if size is not None and found.st_size not in (size, size + grown):
        raise BundleError(f"{path}: {JSON} says {size} bytes, the file has {found.st_size}")
    return read_bounded(real, MAX_JSON_BYTES if size is None else size + grown)


def _has_size(path: Path, size: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _holds(path: Path, data: bytes) -> bool:
    return _has_size(path, len(data)) and read_bounded(path, len(data)) == data


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn other errors of the system, such as denied access, into a BundleError."""
    try:
        yield
    except BundleError:
        raise
    except OSError as error:
        raise BundleError(f"{error.filename or folder}: {error.strerror or error}") from error


@contextlib.contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Lock the folder. Only one process saves at a time, so temporary files are leftovers of a killed process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(f"{folder}: another process is saving this bundle now") from None
        except OSError:
            pass  # a file system without locks: leftovers cannot be told from files in use, so they stay
        else:
            for name in (TRUNK, HEAD, JSON):
                for leftover in folder.glob(f".{name}.*.tmp"):
                    with contextlib.suppress(OSError):
                        leftover.unlink()
        yield
    finally:
        os.close(handle)
