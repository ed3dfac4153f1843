"""The model that the generator gets, and the C that is made of its answer.

The generator gets a model with numbered names, no text, and the type and shape of every value as inferred from the
inputs by ONNX's rules. Declarations of intermediate values are ignored, and that of the output must match the inferred
one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from .limits import BOOL, DOUBLE, FLOAT, INT64, MAX_GROWTH, MAX_MEMORY, TOO_LARGE, TYPES, RejectedError
from .memory import packed
from .rewrite import rewritten
from .text import safe, without_copies

__all__ = ["PRODUCTS", "Translator", "product_source"]

# Not for integers: C divides by zero or has no such function, and runtimes disagree about a sum that overflows.
REAL_ONLY: Final = frozenset({"Div", "Mean", "Pow", "ReduceMean", "ReduceSum"})

TEMPLATES: Final = Path(__file__).with_name("templates")

# Instruction sets for which the product is compiled, the best first: lanes and vectors of a block's row. 6 rows of each
# fit in the registers. No name: what every processor of the architecture has.
PRODUCTS: Final = (
    {"name": "avx512f", "suffix": "_avx512", "blocks": ((16, 4), (16, 2), (16, 1), (8, 1), (4, 1))},
    {"name": "avx2", "suffix": "_avx2", "blocks": ((8, 2), (8, 1), (4, 1))},
    {"name": "", "suffix": "_any", "blocks": ((4, 2), (4, 1))},
)

Info = tuple[int, tuple[int, ...]]  # element type and shape


class Translator:
    """``Translator()(data, name)``: C with the function ``void name(inputs…, output)``. Templates are read once.

    ``kernels``: products in blocks, for processors with vectors and a cache. Else plain loops, which are smaller. Both
    have the same bits.
    """

    def __init__(self, templates: str = "", kernels: bool = True) -> None:
        import jinja2
        import onnx
        import onnx.checker
        import onnx.shape_inference
        from emx_onnx_cgen import compiler
        from emx_onnx_cgen.codegen import c_emitter

        self._onnx: Any = onnx
        self._compiler: Any = compiler
        self._kernels = kernels
        self._emitters: dict[str, Any] = {}
        ours = jinja2.FileSystemLoader(TEMPLATES)
        # Compiling the templates for every model takes seconds.
        cache = jinja2.FileSystemBytecodeCache(templates) if templates and os.path.isdir(templates) else None

        def environment(loader: Any, **options: Any) -> Any:
            """The generator's templates, and ours in front of them."""
            loader = jinja2.ChoiceLoader([ours, loader, jinja2.PrefixLoader({"generator": loader})])
            made = jinja2.Environment(loader=loader, bytecode_cache=cache, **options)
            made.globals["kernels"] = kernels
            return made

        self._environment = environment
        self._c_emitter: Any = c_emitter
        _write_numbers_faster(c_emitter.CEmitter)

    def __call__(self, data: bytes, name: str) -> str:
        try:
            source = str(self._emitter(name).compile(self.prepared(data)))
            weights = source.rfind("\n};\n", 0, source.find("/*\n * Node ")) + 1  # they end there; long, and not code
            code = packed(without_copies(safe(source[weights:])), name)
            product = product_source() if "kbt_product(" in code else ""
            return "".join([product, source[:weights], code])
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
        known, made = self._inferred(model)
        if rewritten(onnx, model, known | made, self._kernels):
            known, made = self._inferred(model)
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

    def _inferred(self, model: Any) -> tuple[dict[str, Info | None], dict[str, Info | None]]:
        """Type and shape of inputs and constants, and of what the nodes make."""
        inferred = self._onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        known = {value.name: _info(value) for value in inferred.graph.input}
        known |= {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in inferred.graph.initializer}
        return known, {value.name: _info(value) for value in [*inferred.graph.value_info, *inferred.graph.output]}

    def _emitter(self, name: str) -> Any:
        if name not in self._emitters:
            # Thresholds of 0: temporaries on the stack and weights in the source, not on the heap or in another file.
            options = self._compiler.CompilerOptions(
                model_name=name, large_temp_threshold_bytes=0, large_weight_threshold=0
            )
            self._c_emitter.Environment = self._environment
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


def product_source() -> str:
    """C of the function ``kbt_product``, which the templates of products call."""
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    plain = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return str(plain.get_template("product.c.j2").render(isas=PRODUCTS))


def _write_numbers_faster(emitter: Any) -> None:
    """The same text for a float32, in a fifth of the time: a trunk has millions of them."""
    slow = emitter._format_weight_value
    if getattr(slow, "faster", False):
        return

    def written(self: Any, number: Any, kind: Any) -> str:
        if kind.c_type == "float" and math.isfinite(number):
            return float(number).hex().replace("0000000p", "p") + "f"
        return str(slow(self, number, kind))

    written.faster = True  # type: ignore[attr-defined]
    emitter._format_weight_value = written


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
        if each > max(MAX_MEMORY, size) or total > MAX_GROWTH + 16 * size:
            raise RejectedError(TOO_LARGE)
