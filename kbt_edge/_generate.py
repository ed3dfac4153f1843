"""ONNX to C: runs the C generator in a separate process.

    python -I _generate.py NAME PATHS TEMPLATES < model.onnx > trunk.c

The generator imports a top-level package called ``shared``, reads untrusted files, and uses as much memory and time as
they require. A separate process isolates the user's process from that: it finds the generator's packages first (PATHS,
one folder per line), has limits, and may crash. For a file that cannot be translated it exits with code 3 and the
reason on standard error.

The generator gets a model with numbered names, no text, and the type and shape of every value as inferred from the
inputs by ONNX's rules. Declarations of intermediate values are ignored, and that of the output must match the inferred
one.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

__all__ = ["REJECTED", "RejectedError", "Translator"]

REJECTED: Final = 3  # exit code
MEMORY: Final = 8 * 2**30
SECONDS: Final = 300

MAX_FRAME: Final = 2**20  # bytes of one array of the C file, which is on the stack
MAX_GROWTH: Final = 2**26  # bytes of all values between nodes, in addition to the size of the file

FLOAT, INT32, INT64, BOOL, DOUBLE = 1, 6, 7, 9, 11
TYPES: Final = frozenset({FLOAT, INT32, INT64, BOOL, DOUBLE})
# Not for integers: C divides by zero or has no such function, and runtimes disagree about a sum that overflows.
REAL_ONLY: Final = frozenset({"Div", "Mean", "Pow", "ReduceMean", "ReduceSum"})

Info = tuple[int, tuple[int, ...]]  # element type and shape


class RejectedError(Exception):
    """This model cannot be translated."""


class Translator:
    """``Translator()(data, name)``: C with the function ``void name(inputs…, output)``. Templates are read once."""

    def __init__(self, templates: str = "") -> None:
        import onnx
        import onnx.checker
        import onnx.shape_inference
        from emx_onnx_cgen import compiler

        self._onnx: Any = onnx
        self._compiler: Any = compiler
        self._emitters: dict[str, Any] = {}
        if templates and os.path.isdir(templates):  # compiling the templates for every model takes seconds
            import jinja2
            from emx_onnx_cgen.codegen import c_emitter

            kept = jinja2.FileSystemBytecodeCache(templates)
            c_emitter.Environment = partial(jinja2.Environment, bytecode_cache=kept)

    def __call__(self, data: bytes, name: str) -> str:
        try:
            model = self.prepared(data)
            return _without_copies(_safe(str(self._emitter(name).compile(model))))
        except RejectedError:
            raise
        except Exception as error:  # of many types, depending on the file
            text = " ".join(str(error).split())[:400]
            raise RejectedError(f"emx-onnx-cgen cannot translate this trunk: {type(error).__name__}: {text}") from error

    def prepared(self, data: bytes) -> Any:
        """The model that is passed to the generator."""
        onnx = self._onnx
        model = self._anonymous(onnx.load_model_from_string(data))
        onnx.checker.check_model(model)
        declared = {value.name: _info(value) for value in model.graph.output}
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        known = {value.name: _info(value) for value in inferred.graph.input}
        known |= {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in inferred.graph.initializer}
        made = {value.name: _info(value) for value in [*inferred.graph.value_info, *inferred.graph.output]}
        for node in model.graph.node:
            for output in filter(None, node.output):
                _check_shape(node.op_type, made.get(output))
                known[output] = made[output]
            _check_types(node, known)
        for output, said in declared.items():
            if said != known.get(output):
                raise RejectedError(
                    f"the trunk declares its output as {_shown(said)}, its nodes make {_shown(known.get(output))}"
                )
        _check_growth((known[name] for name in made), len(data))
        del model.graph.output[:]
        for name in (*declared, *sorted(made.keys() - declared.keys())):
            target = model.graph.output if name in declared else model.graph.value_info
            element_type, shape = known[name] or (0, ())
            target.append(onnx.helper.make_tensor_value_info(name, element_type, shape))
        return model

    def _emitter(self, name: str) -> Any:
        if name not in self._emitters:
            # Thresholds of 0: temporaries on the stack and weights in the source, not on the heap or in another file.
            options = self._compiler.CompilerOptions(
                model_name=name, large_temp_threshold_bytes=0, large_weight_threshold=0
            )
            self._emitters[name] = self._compiler.Compiler(options)
        return self._emitters[name]

    def _anonymous(self, model: Any) -> Any:
        """The same model with numbered names: numbers and operators are kept, other text is dropped."""
        onnx = self._onnx
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
        constants = {initialiser.name for initialiser in model.graph.initializer}
        for source, target in ((model.graph.input, graph.input), (model.graph.output, graph.output)):
            for value in source:
                if source is model.graph.input and value.name in constants:
                    continue  # a default that a caller could replace; here it is a constant
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
                        raise RejectedError(f"a compiled trunk cannot contain the attribute text {text[:40]!r}")
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


def _info(value: Any) -> Info | None:
    """Type and shape of a ValueInfoProto; None if any of it is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(dimension.HasField("dim_value") for dimension in tensor.shape.dim):
        return None
    return int(tensor.elem_type), tuple(int(dimension.dim_value) for dimension in tensor.shape.dim)


def _shown(info: Info | None) -> str:
    return "of unknown shape" if info is None else f"{info[1]}"


def _check_shape(operator: str, info: Info | None) -> None:
    if info is None:
        raise RejectedError(
            f"the shape that {operator} makes is not known before the trunk runs; export with constant shapes"
        )
    if info[0] not in TYPES:
        raise RejectedError(
            f"{operator} makes values of the element type {info[0]}, which a compiled trunk cannot hold"
        )
    if any(length < 1 for length in info[1]):
        raise RejectedError(f"{operator} makes an empty array, {info[1]}")


def _check_types(node: Any, known: Mapping[str, Info | None]) -> None:
    """Operators whose behaviour C leaves undefined for some integers, or for numbers that do not fit in an integer."""
    types = [info[0] for info in map(known.get, (*node.input, *node.output)) if info is not None]
    real = {FLOAT, DOUBLE}
    if node.op_type in REAL_ONLY and types[0] not in real:
        raise RejectedError(f"a compiled trunk cannot contain {node.op_type} of integers")
    if node.op_type == "Cast" and types[0] in real and types[1] not in real | {BOOL}:
        raise RejectedError("a compiled trunk cannot contain a Cast of real numbers to integers")


def _check_growth(infos: Iterable[Info | None], size: int) -> None:
    """A few bytes become a gigabyte by repeated doubling, and the generator would compute it if it is constant."""
    total = 0
    for info in infos:
        each = 0 if info is None else (8 if info[0] in (INT64, DOUBLE) else 4) * math.prod(info[1])
        total += each
        if each > max(MAX_FRAME, size) or total > MAX_GROWTH + 16 * size:
            raise RejectedError(
                f"a compiled trunk may use {MAX_FRAME} bytes of stack, its values between nodes need more: too large"
            )


def _safe(source: str) -> str:
    """Clamp the index of every Gather, and let NaN pass through ReLU, maximum and minimum."""
    limited, count = re.subn(
        r"(gather_index \+= (\d+);\s*\})",
        r"\1 gather_index = gather_index < 0 ? 0 : gather_index >= \2 ? \2 - 1 : gather_index;",
        source,
    )
    if count != source.count("idx_t gather_index ="):
        raise RejectedError("this version of emx-onnx-cgen writes Gather in an unknown form")
    kept = re.sub(r"return a > (0\.0f?) \? a : \1;", r"return a <= \1 ? \1 : a;", limited)
    return re.sub(r"if \((\S+) ([<>]) acc\) acc = \1;", r"if (\1 \2 acc || \1 != \1) acc = \1;", kept)


def _without_copies(source: str) -> str:
    """A temporary array with the numbers of another one, in another shape, becomes a pointer to that one."""
    arrays = {
        name: (kind, tuple(map(int, re.findall(r"\d+", shape))))
        for kind, name, shape in re.findall(r"^    (\w+) (tmp\w+)((?:\[\d+\])+);\n", source, flags=re.M)
    }
    call = r"^    (node(\d+)_(?:reshape|squeeze|transpose|unsqueeze))\((tmp\w+), (tmp\w+)\);\n"
    for function, number, old, new in re.findall(call, source, flags=re.M):
        definition = re.search(
            rf"^/\*\n \* Node {number}:((?!\*/).)*\*/\nEMX_NODE_FN void {function}\(.*?^}}\n\n?",
            source,
            flags=re.M | re.S,
        )
        if definition is None or old not in arrays or new not in arrays:
            continue
        (kind, shape), (new_kind, new_shape) = arrays[old], arrays[new]
        order = re.search(r"perm: \[([\d, ]+)\]", definition[0])
        axes = [axis for axis in map(int, order[1].split(",")) if shape[axis] > 1] if order else []
        moved = axes != sorted(axes) or (order is None and function.endswith("transpose"))
        if moved or kind != new_kind or math.prod(shape) != math.prod(new_shape):
            continue
        row = "".join(f"[{length}]" for length in new_shape[1:])
        source = source.replace(f"    {kind} {new}[{new_shape[0]}]{row};\n", "")
        source = source.replace(
            f"    {function}({old}, {new});\n", f"    {kind} (*const {new}){row} = ({kind} (*){row}){old};\n"
        )
        source = source.replace(definition[0], "")
    return source


def main() -> int:
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    name, paths, templates = sys.argv[1:]
    sys.path[:] = dict.fromkeys([*paths.splitlines()[:1], *sys.path, *paths.splitlines()[1:]])
    warnings.simplefilter("ignore")
    try:
        source = Translator(templates)(sys.stdin.buffer.read(), name)
    except ImportError as error:  # such as a distribution's onnx that is too old for the generator
        print(f"emx-onnx-cgen is installed, but cannot be imported: {error}", file=sys.stderr)
        return 1
    except RejectedError as error:
        print(error, file=sys.stderr)
        return REJECTED
    sys.stdout.write(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
