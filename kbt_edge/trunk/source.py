"""ONNX → C: the source of a trunk, from emx-onnx-cgen and a few functions around it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kbt_edge import _generate
from kbt_edge.errors import BackendError, UnfitError
from kbt_edge.onnxfile import OnnxModel, token_lookups

__all__ = [
    "CDEF",
    "CArray",
    "check_operators",
    "generate_c",
    "generator_version",
    "run_function",
    "trial_program",
    "trunk_source",
]

GENERATOR: Final = "emx-onnx-cgen"
MAX_FILE: Final = 2**24
MAX_NODES: Final = 5000
GENERATE_SECONDS: Final = 600
# One function per node, not one for the whole network: about as fast to run, and gcc takes 1.4 s instead of 22 s for an
# encoder-decoder. And NaN passes through maximum and minimum, where C's own functions drop it.
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
    Abs Add And BatchNormalization Cast Ceil Clip Concat Constant Conv Cos Div Elu Equal Erf Exp Expand Flatten Floor
    Gather GatherND Gelu Gemm Greater GreaterOrEqual HardSigmoid HardSwish Identity IsNaN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax MatMul Max Mean Min Mul Neg Not Or Pow RMSNormalization Reciprocal ReduceMax
    ReduceMean ReduceMin ReduceSum Relu Reshape Selu Shape Sigmoid Sign Sin Slice Softmax Softplus Split Sqrt Squeeze
    Sub Tanh Transpose Trilu Unsqueeze Where
    """
)
# Operators whose further inputs are shapes, axes, positions or trained numbers: constants, or the C would depend on
# data. GatherND becomes a Gather and BatchNormalization a part of its neighbours (_generate/rewrite.py).
LAYOUT_OPERATORS: Final = _words(
    """
    BatchNormalization Expand GatherND ReduceMax ReduceMean ReduceMin ReduceSum Reshape Slice Split Squeeze Trilu
    Unsqueeze
    """
)


@dataclass(frozen=True)
class CArray:
    """An input or the output of the network in C; ids of an integer input are below ``limit``."""

    shape: tuple[int, ...]
    c_type: str  # "float" or "int64_t"
    limit: int | None = None


def _check_size(data: bytes, model: OnnxModel) -> None:
    """Limit the size, because memory and time of the compiler are a large multiple of it."""
    nodes = sum(model.operators.values())
    if len(data) > MAX_FILE or nodes > MAX_NODES:
        raise BackendError(
            f"a compiled trunk may have {MAX_FILE} bytes and {MAX_NODES} nodes, this one has {len(data)} and {nodes}"
        )


def check_operators(model: OnnxModel) -> None:
    unknown = sorted(set(model.operators) - OPERATORS)
    if unknown:
        raise BackendError(f"a compiled trunk cannot contain {', '.join(unknown)}; onnxruntime may be able to run it")
    constants = set(model.graph.initialisers)
    lookups = token_lookups(model.graph)
    for position, node in enumerate(model.graph.nodes):
        folded = node.operator in _generate.FOLDED and constants.issuperset(filter(None, node.inputs))
        if node.operator in ("Constant", "Shape") or folded:
            constants.update(node.outputs)
        # The indices of a Gather: constants, or ids that are checked against the table before every run.
        leading = node.operator in LAYOUT_OPERATORS or (node.operator == "Gather" and position not in lookups)
        if leading and not constants.issuperset(filter(None, node.inputs[1:])):
            raise BackendError(
                f"a compiled trunk cannot contain a {node.operator} with a computed shape, axis or index; "
                "export with constant shapes, or use onnxruntime"
            )


def trunk_source(
    data: bytes,
    model: OnnxModel,
    inputs: Sequence[CArray],
    output: CArray,
    name: str = "trunk",
    templates: Path | None = None,
    kernels: bool = True,
) -> str:
    """C source of the network, as the function ``name``, and of ``kbt_trunk_run`` around it.

    ``kernels``: matrix products in blocks, for processors with vectors and a cache.
    """
    return "\n".join([PRELUDE, generate_c(data, model, name, templates, kernels), run_function(inputs, output, name)])


def generate_c(
    data: bytes, model: OnnxModel, name: str = "trunk", templates: Path | None = None, kernels: bool = True
) -> str:
    """C source with the function ``void name(inputs…, output)``; no heap, and no text from the file."""
    _check_size(data, model)
    check_operators(model)
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise BackendError(f"name: expected a C identifier, got {name!r}")
    generator_version()
    # The generator's folder first, so that its imports cannot find a file of the user.
    home = str(importlib.metadata.distribution(GENERATOR).locate_file(""))
    folders = [home, *(folder for folder in sys.path if os.path.isabs(folder))]
    program = str(Path(_generate.__file__).parent)
    kind = "fast" if kernels else "small"
    arguments = [sys.executable, "-I", program, name, kind, "\n".join(folders), str(templates or "")]
    try:
        done = subprocess.run(arguments, input=data, capture_output=True, timeout=GENERATE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{GENERATOR} could not be run: {error}") from None
    if done.returncode == 0:
        return done.stdout.decode("ascii")
    reason = done.stderr.decode(errors="replace").strip()[-1000:]
    if done.returncode == _generate.REJECTED:
        raise UnfitError(reason)
    raise BackendError(
        reason if done.returncode == 1 and reason else f"{GENERATOR} ended with {done.returncode}: {reason}"
    )


def run_function(inputs: Sequence[CArray], output: CArray, network: str = "trunk") -> str:
    """``kbt_trunk_run``: 0, or 1 for an input value that is not finite or not a token, 2 for such an output value."""
    checks, arguments = [], []
    for i, array in enumerate(inputs):
        if array.c_type == "float":
            reject = "!isfinite(v[i])"
        elif array.limit is not None:
            reject = f"v[i] < 0 || v[i] >= {array.limit}"
        else:
            reject = ""
        if reject:
            loop = f"for (long i = 0; i < {math.prod(array.shape)}; ++i) if ({reject}) return 1;"
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


def generator_version() -> str:
    try:
        return f"{GENERATOR} {importlib.metadata.version(GENERATOR)}"
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(f"the C generator is not installed (pip install {GENERATOR})") from None
