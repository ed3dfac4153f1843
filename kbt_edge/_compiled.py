"""Trunk → C → shared library: how ``Trunk(backend="compiled")`` gets its code, once per model and machine.

    ONNX bytes ── emx-onnx-cgen ──> C ── local compiler ──> trunk.so ── cache folder ──> cffi

The generator writes plain C for fixed shapes, without heap: all intermediate values lie on the stack, so the library
has no state and every thread may run it. Around it we add one function, ``kbt_trunk_run``, that checks every input
value before the network runs and every output value before it is handed over.

A trunk may come from a stranger, and this file turns it into machine code. Three rules keep that harmless. Names and
comments of the ONNX file never reach the C file (the generator copies them into comments, which can be closed from
within). Only operators are compiled whose C stays within its arrays when shapes are constant. And the one among them
that is led by data, Gather, gets its index limited.
"""

from __future__ import annotations

import hashlib
import importlib
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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kbt_edge._onnxfile import OnnxModel, token_lookups
from kbt_edge.errors import KbtError

__all__ = ["CDEF", "BackendError", "Build", "CArray", "default_cache_dir", "generate_c", "library", "run_function"]

GENERATOR: Final = "emx-onnx-cgen"
RECIPE: Final = 1  # part of every cache key: raise it when this file changes what it builds from the same model

# -O3 without -march=native, -ffast-math or contraction: sums keep the order of the source, products are rounded before
# they are added, and the library means the same on every machine of this architecture (up to its libm's expf and
# erff). The price is that sums are not vectorised, which is why onnxruntime wins on large trunks.
FLAGS: Final = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
# Our signature and the generator's must agree, and a thread's stack is 8 MiB at best.
MAX_FRAME: Final = 2**20
CHECKS: Final = ("-Werror=incompatible-pointer-types", f"-Wframe-larger-than={MAX_FRAME}")
MAX_GROWTH: Final = 2**26  # bytes of all values between nodes, beside those that come from a large file
MAX_FILE: Final = 2**24
MAX_NODES: Final = 5000
COMPILE_SECONDS: Final = 600
# One function per node, not one for the whole network: about as fast to run, and gcc takes 1.4 s instead of 22 s for an
# encoder-decoder.
SEPARATE_NODES: Final = "#define EMX_NODE_FN static __attribute__((noinline))"

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
    source = "\n".join([SEPARATE_NODES, generate_c(data, model), run_function(inputs, output)])
    try:
        shelf.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=shelf) as folder:
            fresh = Path(folder) / "entry"
            fresh.mkdir()
            _compile(command, source, fresh / "trunk.so")
            _publish(fresh, entry, {**about, **check(fresh / "trunk.so")})
    except KbtError:
        raise
    except OSError as error:
        raise BackendError(f"the trunk cache {shelf.parent} cannot be written: {error}") from error
    build = _open(entry, about)
    if build is None:
        raise BackendError(f"the library just written to {entry} cannot be read back")
    return Build(build.path, build.record, cached=False)


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
    if unknown or model.functions:
        what = ", ".join(unknown) if unknown else "model-local functions"
        raise BackendError(f"a compiled trunk cannot contain {what}; onnxruntime may be able to run it")
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


def generate_c(data: bytes, model: OnnxModel, name: str = "trunk") -> str:
    """C source with the function ``void name(inputs…, output)``; no heap, and no text from the file."""
    _check_size(data, model)
    _check_operators(model)
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise BackendError(f"name: expected a C identifier, got {name!r}")
    _generator_version()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            onnx: Any = importlib.import_module("onnx")
            compiler: Any = importlib.import_module("emx_onnx_cgen.compiler")
        except ImportError as error:  # such as a distribution's onnx that is too old for the generator
            raise BackendError(f"{GENERATOR} is installed, but cannot be imported: {error}") from error
        # Thresholds of 0: temporaries on the stack, weights in the source, never on the heap or in a file beside it.
        options = compiler.CompilerOptions(model_name=name, large_temp_threshold_bytes=0, large_weight_threshold=0)
        try:
            anonymous = _anonymous(onnx, onnx.load_model_from_string(data))
            _check_growth(onnx.shape_inference.infer_shapes(anonymous), len(data))
            source = str(compiler.Compiler(options).compile(anonymous))
        except BackendError:
            raise
        except Exception as error:  # of many types: the generator meets whatever the file holds
            raise BackendError(f"{GENERATOR} cannot translate this trunk: {type(error).__name__}: {error}") from error
    return _limit_gathers(source)


def _check_growth(inferred: Any, size: int) -> None:
    """Twenty doublings make a gigabyte of a few bytes, and the generator would compute it if it is constant."""
    total = 0
    for value in inferred.graph.value_info:
        each = 4 * math.prod(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)
        total += each
        if each > max(MAX_FRAME, size) or total > MAX_GROWTH + 16 * size:
            raise BackendError(
                f"a compiled trunk may use {MAX_FRAME} bytes of stack, its values between nodes need more: too large"
            )


def _anonymous(onnx: Any, model: Any) -> Any:
    """The same model with numbered names, and nothing a stranger wrote that is not a number or an operator."""
    names: dict[str, str] = {"": ""}  # the empty name marks an optional input that is left out

    def renamed(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    graph = onnx.GraphProto(name="trunk")
    for initialiser in model.graph.initializer:
        copy = graph.initializer.add()
        copy.CopyFrom(initialiser)
        copy.name = renamed(initialiser.name)
        copy.ClearField("doc_string")
        copy.ClearField("metadata_props")
    for source, target in ((model.graph.input, graph.input), (model.graph.output, graph.output)):
        for value in source:
            tensor = value.type.tensor_type
            shape = [dimension.dim_value for dimension in tensor.shape.dim]
            target.append(onnx.helper.make_tensor_value_info(renamed(value.name), tensor.elem_type, shape))
    for node in model.graph.node:
        copy = graph.node.add(op_type=node.op_type)
        copy.input.extend(map(renamed, node.input))
        copy.output.extend(map(renamed, node.output))
        for attribute in node.attribute:
            for text in (attribute.name.encode(), attribute.s, *attribute.strings):
                if not re.fullmatch(rb"\w*", text):
                    raise BackendError(f"a compiled trunk cannot contain the attribute text {text[:40]!r}")
            inner = copy.attribute.add()
            inner.CopyFrom(attribute)
            inner.ClearField("doc_string")
            inner.ClearField("ref_attr_name")
            if attribute.HasField("t"):
                inner.t.name = ""
                inner.t.ClearField("doc_string")
                inner.t.ClearField("metadata_props")
    opsets = [onnx.helper.make_opsetid("", entry.version) for entry in model.opset_import if entry.domain == ""]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def _limit_gathers(source: str) -> str:
    """Keep every Gather within its table, whatever its index; valid indices are not affected."""
    limited, count = re.subn(
        r"(gather_index \+= (\d+);\s*\})",
        r"\1 gather_index = gather_index < 0 ? 0 : gather_index >= \2 ? \2 - 1 : gather_index;",
        source,
    )
    if count != source.count("idx_t gather_index ="):
        raise BackendError(f"this version of {GENERATOR} writes Gather in a form that is not known here")
    return limited


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


def _compile(command: list[str], source: str, target: Path) -> None:
    (target.parent / "trunk.c").write_text(source, encoding="ascii")
    call = [*command, *FLAGS, *CHECKS, "-o", target.name, "trunk.c", "-lm"]
    try:
        result = subprocess.run(
            call, cwd=target.parent, capture_output=True, text=True, timeout=COMPILE_SECONDS, env=_environment()
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"{command[0]} did not finish this trunk within {COMPILE_SECONDS} s") from None
    (target.parent / "trunk.c").unlink()
    if result.returncode != 0:
        raise BackendError(f"{shlex.join(call)} failed: {result.stderr.strip()[:1000]}")
    if re.search(r"frame size", result.stderr):
        raise BackendError(f"a compiled trunk may use {MAX_FRAME} bytes of stack, this one needs more: too large")


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # so that messages can be recognised


# The cache: <cache>/<SHA-256 of the model>/<key>/ with trunk.so and build.json, published by one rename.


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
