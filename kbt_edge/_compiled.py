"""Trunk → C → shared library: how ``Trunk(backend="compiled")`` gets its code, once per model and machine.

    ONNX bytes ── emx-onnx-cgen ──> C ── local compiler ──> trunk.so ── cache folder ──> cffi
                                      └─ with sanitizers ──> a first run in a process that may die

The generator writes plain C for fixed shapes, without heap: all intermediate values lie on the stack, so the library
has no state and every thread may run it. Around it we add one function, ``kbt_trunk_run``, that checks every input
value before the network runs and every output value before it is handed over.

A trunk may come from a stranger, and this file turns it into machine code. These rules keep that harmless:

- No text of the ONNX file reaches the C file, and no shape between its inputs and its output is taken from it
  (``_generate.py``).
- Only operators are compiled whose addresses do not depend on data. The one exception, Gather, gets its index limited.
- The generated C is not trusted to stay within its arrays. Every new trunk is first built with the address and the
  undefined behaviour sanitizer and run in a child process. As no address depends on data, one clean run speaks for
  all of them.
- Integers wrap around where they overflow.

What cannot be compiled is remembered in the cache with the reason, so that it costs its seconds once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kbt_edge import _generate
from kbt_edge._onnxfile import OnnxModel, token_lookups
from kbt_edge.errors import KbtError

__all__ = [
    "CDEF",
    "BackendError",
    "Build",
    "CArray",
    "MissingError",
    "UnfitError",
    "default_cache_dir",
    "library",
    "trunk_source",
    "try_out",
]

GENERATOR: Final = "emx-onnx-cgen"
RECIPE: Final = 2  # part of every cache key: raise it when this file changes what it builds from the same model

# -O3 without -march=native, -ffast-math or contraction: sums keep the order of the source, products are rounded before
# they are added, and the library means the same on every machine of this architecture (up to its libm's expf and
# erff). The price is that sums are not vectorised, which is why onnxruntime wins on large trunks.
LANGUAGE: Final = ("-std=gnu11", "-ffp-contract=off", "-fwrapv")
FLAGS: Final = (*LANGUAGE, "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
# Our signature and the generator's must agree, and a thread's stack is 8 MiB at best.
MAX_FRAME: Final = _generate.MAX_FRAME
CHECKS: Final = ("-Werror=incompatible-pointer-types", f"-Wframe-larger-than={MAX_FRAME}")
SANITIZE: Final = (*LANGUAGE, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MAX_FILE: Final = 2**24
MAX_NODES: Final = 5000
COMPILE_SECONDS: Final = 600
TRIAL_SECONDS: Final = 120  # of the first run, with sanitizers
# One function per node, not one for the whole network: about as fast to run, and gcc takes 1.4 s instead of 22 s for an
# encoder-decoder. And NaN is not lost in a maximum or minimum, where C's own functions drop it.
PRELUDE: Final = """\
#include <math.h>
#define EMX_NODE_FN static __attribute__((noinline))
static inline float kbt_maxf(float a, float b) { return a > b || a != a ? a : b; }
static inline float kbt_minf(float a, float b) { return a < b || a != a ? a : b; }
static inline double kbt_max(double a, double b) { return a > b || a != a ? a : b; }
static inline double kbt_min(double a, double b) { return a < b || a != a ? a : b; }
#define fmaxf kbt_maxf
#define fminf kbt_minf
#define fmax kbt_max
#define fmin kbt_min"""

CDEF: Final = "int kbt_trunk_run(const void *const *inputs, float *output);"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS: Final = _words(
    """
    Abs Add And Cast Ceil Clip Concat Constant Cos Div Elu Equal Erf Exp Expand Flatten Floor Gather Gelu Gemm Greater
    GreaterOrEqual HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul
    Max Mean Min Mul Neg Not Or Pow RMSNormalization Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape
    Selu Sigmoid Sign Sin Slice Softmax Softplus Split Sqrt Squeeze Sub Tanh Transpose Trilu Unsqueeze Where
    """
)
# Operators whose further inputs are shapes, axes or positions: constants, or the C would depend on data.
LAYOUT_OPERATORS: Final = _words(
    "Expand ReduceMax ReduceMean ReduceMin ReduceSum Reshape Slice Split Squeeze Trilu Unsqueeze"
)


class BackendError(KbtError, RuntimeError):
    """This trunk cannot run in the way asked for on this machine: something is not installed or not supported."""


class MissingError(BackendError):
    """A package that is needed for this is not installed."""


class UnfitError(BackendError):
    """This trunk cannot be compiled here, and will not be if it is tried again."""


@dataclass(frozen=True)
class CArray:
    """An input or the output of the network as C sees it; ``limit`` bounds the ids of an integer input from above."""

    shape: tuple[int, ...]
    c_type: str  # "float" or "int64_t"
    limit: int | None = None


@dataclass(frozen=True)
class Build:
    """A library in the cache, and what its ``build.json`` says of how it was made and checked."""

    path: Path
    record: Mapping[str, Any]
    cached: bool

    def __str__(self) -> str:
        age = "found in the cache" if self.cached else "built now"
        return f"{self.record.get('generator')}, {self.record.get('compiler')}, {age}"


def library(
    data: bytes,
    model: OnnxModel,
    inputs: Sequence[CArray],
    output: CArray,
    cache_dir: Path | None,
    check: Callable[[Path], Mapping[str, Any]],
) -> Build:
    """The library for the ONNX file ``data``: from the cache, or built, passed to ``check``, and put there.

    ``check`` runs a fresh library and returns its findings for the record, or raises. The cache key is the SHA-256 of
    model, recipe, machine, generator, compiler and flags. On a board that has no generator or no compiler that key
    cannot be known, and the newest library in the cache that was built for this model, recipe and machine is used.
    """
    if os.name != "posix":
        raise BackendError(f"a compiled trunk needs Linux or another POSIX system, this is {sys.platform}")
    _check_operators(model)
    digest = hashlib.sha256(data).hexdigest()
    shelf = _private(cache_dir if cache_dir is not None else default_cache_dir()) / digest
    about = {"model": digest, "recipe": str(RECIPE), "machine": _machine()}
    try:
        generator = _generator_version()
        command, compiler = _compiler()
    except BackendError as missing:
        build = _newest(shelf, about)
        if build is None:
            raise BackendError(f"{missing}, and no library for this trunk is in {shelf.parent}") from None
        return build
    about |= {"generator": generator, "compiler": compiler, "flags": " ".join([*command[1:], *FLAGS])}
    entry = shelf / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    build = _open(entry, about)
    if build is not None:
        return build
    failure = _remembered(entry, about)
    if failure is not None:
        raise UnfitError(f"{failure} (remembered; delete {entry} to try again)")
    try:
        shelf.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=shelf) as folder:
            fresh = Path(folder) / "entry"
            fresh.mkdir()
            try:
                source = trunk_source(data, model, inputs, output, templates=_templates(shelf.parent))
                _compile([*command, *FLAGS, *CHECKS], source, fresh / "trunk.so")
                try_out(source, inputs, output, command)
                _publish(fresh, entry, {**about, **check(fresh / "trunk.so")})
            except UnfitError as error:
                _remember(fresh, entry, {**about, "failed": str(error)})
                raise
    except KbtError:
        raise
    except OSError as error:
        raise BackendError(f"the trunk cache {shelf.parent} cannot be written: {error}") from error
    build = _open(entry, about)
    if build is None:
        raise BackendError(f"the library just written to {entry} cannot be read back")
    return Build(build.path, build.record, cached=False)


def _templates(cache: Path) -> Path:
    """Where the generator keeps its templates as it has read them; it takes seconds without."""
    folder = cache / ".templates"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kbt_edge/trunks``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "kbt_edge" / "trunks"


# From ONNX to C.


def _check_size(data: bytes, model: OnnxModel) -> None:
    """The compiler's memory and time are a large multiple of these."""
    nodes = sum(model.operators.values())
    if len(data) > MAX_FILE or nodes > MAX_NODES:
        raise BackendError(
            f"a compiled trunk may have {MAX_FILE} bytes and {MAX_NODES} nodes, this one has {len(data)} and {nodes}"
        )


def _check_operators(model: OnnxModel) -> None:
    unknown = sorted(set(model.operators) - OPERATORS)
    if unknown:
        raise BackendError(f"a compiled trunk cannot contain {', '.join(unknown)}; onnxruntime may be able to run it")
    constants = set(model.graph.initialisers)
    lookups = token_lookups(model.graph)
    for position, node in enumerate(model.graph.nodes):
        if node.operator == "Constant":
            constants.update(node.outputs)
        # The indices of a Gather: constants, or ids that are checked against the table before every run.
        leading = node.operator in LAYOUT_OPERATORS or (node.operator == "Gather" and position not in lookups)
        if leading and not constants.issuperset(filter(None, node.inputs[1:])):
            raise BackendError(
                f"a compiled trunk cannot contain a {node.operator} that is led by a computed tensor; "
                "export with constant shapes, or use onnxruntime"
            )


def trunk_source(
    data: bytes,
    model: OnnxModel,
    inputs: Sequence[CArray],
    output: CArray,
    name: str = "trunk",
    templates: Path | None = None,
) -> str:
    """C source of the network, as the function ``name``, and of ``kbt_trunk_run`` around it."""
    return "\n".join([PRELUDE, generate_c(data, model, name, templates), run_function(inputs, output, name)])


def try_out(source: str, inputs: Sequence[CArray], output: CArray, command: Sequence[str]) -> None:
    """Run ``source`` once with sanitizers, in a process that may die, and refuse it if they find anything."""
    with tempfile.TemporaryDirectory(prefix="kbt-trial-") as folder:
        trial = Path(folder) / "trial"
        try:
            _compile([*command, *SANITIZE], source + trial_program(inputs, output), trial)
        except UnfitError:
            _check_sanitizers(command, Path(folder))
            raise
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": ""}
        try:
            done = subprocess.run(
                [trial], capture_output=True, text=True, timeout=TRIAL_SECONDS, env=_environment() | options
            )
        except subprocess.TimeoutExpired:
            raise UnfitError(f"the first run of this trunk did not end within {TRIAL_SECONDS} s") from None
    if done.returncode != 0:
        report = re.search(r"(runtime error|AddressSanitizer): .*", done.stderr)
        said = report[0] if report is not None else f"exit code {done.returncode}"
        raise UnfitError(f"the C of this trunk does not stay within its arrays: {said[:200]}")


def generate_c(data: bytes, model: OnnxModel, name: str = "trunk", templates: Path | None = None) -> str:
    """C source with the function ``void name(inputs…, output)``; no heap, and no text from the file."""
    _check_size(data, model)
    _check_operators(model)
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise BackendError(f"name: expected a C identifier, got {name!r}")
    _generator_version()
    # The generator's own folder first, so that its imports cannot meet a file of the user's.
    home = str(importlib.metadata.distribution(GENERATOR).locate_file(""))
    folders = [home, *(folder for folder in sys.path if os.path.isabs(folder))]
    arguments = [sys.executable, "-I", _generate.__file__, name, "\n".join(folders), str(templates or "")]
    try:
        done = subprocess.run(arguments, input=data, capture_output=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{GENERATOR} could not be run: {error}") from None
    if done.returncode == 0:
        return done.stdout.decode("ascii")
    reason = done.stderr.decode(errors="replace").strip()[-1000:]
    if done.returncode == _generate.REFUSED:
        raise UnfitError(reason)
    raise BackendError(
        reason if done.returncode == 1 and reason else f"{GENERATOR} ended with {done.returncode}: {reason}"
    )


def run_function(inputs: Sequence[CArray], output: CArray, network: str = "trunk") -> str:
    """``kbt_trunk_run``: 0, or 1 for an input value that is not finite or not a token, 2 for such an output value."""
    checks, arguments = [], []
    for i, array in enumerate(inputs):
        if array.c_type == "float":
            refuse = "!isfinite(v[i])"
        elif array.limit is not None:
            refuse = f"v[i] < 0 || v[i] >= {array.limit}"
        else:
            refuse = ""
        if refuse:
            loop = f"for (long i = 0; i < {math.prod(array.shape)}; ++i) if ({refuse}) return 1;"
            checks.append(f"    {{ const {array.c_type} *v = inputs[{i}]; {loop} }}")
        rest = "".join(f"[{length}]" for length in array.shape[1:])
        pointer = f"const {array.c_type} (*){rest}" if rest else f"const {array.c_type} *"
        arguments.append(f"({pointer})inputs[{i}]")
    shape = "".join(f"[{length}]" for length in output.shape)
    return "\n".join(
        [
            "#include <math.h>",
            "#include <stdint.h>",
            "#include <string.h>",
            '__attribute__((visibility("default")))',
            CDEF.rstrip(";") + " {",
            *checks,
            f"    float h{shape};",
            f"    {network}({', '.join(arguments)}, h);",
            f"    {{ const float *v = (const float *)h; for (long i = 0; i < {math.prod(output.shape)}; ++i)"
            " if (!isfinite(v[i])) return 2; }",
            "    memcpy(output, h, sizeof h);",
            "    return 0;",
            "}",
            "",
        ]
    )


def trial_program(inputs: Sequence[CArray], output: CArray) -> str:
    """``main`` for the first run: buffers of exactly their size, filled with zeros, ones or last ids, and numbers."""
    lines = ["#include <stdlib.h>", "int main(void) {", "  for (int round = 0; round < 3; ++round) {"]
    for i, array in enumerate(inputs):
        count = math.prod(array.shape)
        value = f"(k * 7 + {i}) % {array.limit or 5}" if array.c_type == "int64_t" else "(float)(k % 13 - 6) / 4"
        last = f"{array.limit - 1}" if array.limit is not None else "1"
        lines += [
            f"    {array.c_type} *x{i} = malloc({count} * sizeof *x{i});",
            f"    for (long k = 0; k < {count}; ++k) x{i}[k] = round == 0 ? 0 : round == 1 ? {last} : {value};",
        ]
    pointers = ", ".join(f"x{i}" for i in range(len(inputs)))
    lines += [
        f"    const void *inputs[] = {{{pointers}}};",
        f"    float *h = malloc({math.prod(output.shape)} * sizeof *h);",
        "    (void)kbt_trunk_run(inputs, h);",
        *(f"    free(x{i});" for i in range(len(inputs))),
        "    free(h);",
        "  }",
        "  return 0;",
        "}",
        "",
    ]
    return "\n".join(lines)


# From C to a library.


def _generator_version() -> str:
    try:
        return f"{GENERATOR} {importlib.metadata.version(GENERATOR)}"
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(f"the C generator is not installed (pip install {GENERATOR})") from None


def _compiler() -> tuple[list[str], str]:
    """The command of the local C compiler, and its name and version as it states them."""
    candidates = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if command and shutil.which(command[0]) is not None:
            try:
                answer = subprocess.run(
                    [*command, "--version"], capture_output=True, text=True, timeout=60, check=True, env=_environment()
                )
            except (OSError, subprocess.SubprocessError):
                continue
            return command, answer.stdout.strip().split("\n")[0]
    raise BackendError("no C compiler was found ($CC, cc, gcc, clang)")


def _compile(command: Sequence[str], source: str, target: Path) -> None:
    (target.parent / "trunk.c").write_text(source, encoding="ascii")
    call = [*command, "-o", target.name, "trunk.c", "-lm"]
    try:
        result = subprocess.run(
            call, cwd=target.parent, capture_output=True, text=True, timeout=COMPILE_SECONDS, env=_environment()
        )
    except subprocess.TimeoutExpired:
        raise UnfitError(f"{command[0]} did not finish this trunk within {COMPILE_SECONDS} s") from None
    (target.parent / "trunk.c").unlink()
    if result.returncode != 0:
        killed = result.returncode < 0 or re.search(r"[Kk]illed|out of memory|No space left", result.stderr)
        raise (BackendError if killed else UnfitError)(f"{shlex.join(call)} failed: {result.stderr.strip()[:1000]}")
    if re.search(r"frame size", result.stderr):
        raise UnfitError(f"a compiled trunk may use {MAX_FRAME} bytes of stack, this one needs more: too large")


def _check_sanitizers(command: Sequence[str], folder: Path) -> None:
    """Whether this compiler has them at all."""
    try:
        _compile([*command, *SANITIZE], "int main(void) { return 0; }\n", folder / "empty")
    except UnfitError as error:
        raise BackendError(
            f"{command[0]} cannot build with -fsanitize=address,undefined, which checks a new trunk before its first "
            f"use; install its sanitizer libraries, or use onnxruntime ({str(error)[-200:]})"
        ) from None


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # so that messages can be recognised


# The cache: <cache>/<SHA-256 of the model>/<key>/ with trunk.so and build.json, published by one rename. Instead of the
# library there may be failed.json, which says why there is none.


def _machine() -> str:
    return f"{sys.platform}-{platform.machine()}-{8 * struct.calcsize('P')}"


def _private(folder: Path) -> Path:
    """``folder``, made if need be. What lies there is executed, so nobody else may be able to write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BackendError(f"the trunk cache {folder} cannot be made: {error}") from error
    if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o022:
        raise BackendError(f"the trunk cache {folder} can be written by other users; chmod go-w it, or set cache_dir")
    return folder


def _open(entry: Path, about: Mapping[str, str]) -> Build | None:
    """The library in ``entry`` if it was built as ``about`` says and is undamaged (a board may lose power)."""
    try:
        record = json.loads((entry / "build.json").read_bytes())
        content = (entry / "trunk.so").read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    if any(record.get(key) != value for key, value in about.items()):
        return None
    return Build(entry / "trunk.so", record, cached=True)


def _newest(shelf: Path, about: Mapping[str, str]) -> Build | None:
    try:
        entries = sorted(shelf.iterdir(), key=lambda entry: (entry.stat().st_mtime, entry.name), reverse=True)
    except OSError:
        return None
    return next((build for build in (_open(entry, about) for entry in entries) if build is not None), None)


def _remembered(entry: Path, about: Mapping[str, str]) -> str | None:
    """Why an earlier attempt to build exactly this failed."""
    try:
        record = json.loads((entry / "failed.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or any(record.get(key) != value for key, value in about.items()):
        return None
    return str(record.get("failed"))[:2000]


def _remember(fresh: Path, entry: Path, about: Mapping[str, Any]) -> None:
    (fresh / "trunk.so").unlink(missing_ok=True)
    (fresh / "failed.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="ascii")
    with contextlib.suppress(OSError):  # it is there already, from another builder
        os.replace(fresh, entry)


def _publish(fresh: Path, entry: Path, about: Mapping[str, Any]) -> None:
    """Move the finished folder to its place. Of builders racing for it one wins; their libraries are equal."""
    content = (fresh / "trunk.so").read_bytes()
    record = {**about, "sha256": hashlib.sha256(content).hexdigest()}
    (fresh / "build.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="ascii")
    for path in (fresh / "trunk.so", fresh / "build.json", fresh):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        os.replace(fresh, entry)
    except OSError:
        # Something is there already: the work of another builder, or a damaged entry, which has to make room.
        if _open(entry, {}) is None:
            os.replace(entry, fresh.parent / "damaged")
            os.replace(fresh, entry)
