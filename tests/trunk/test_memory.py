"""Values of a compiled trunk share memory, never at the same time, and nothing else changes."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbt_edge._generate.limits import RejectedError
from kbt_edge._generate.memory import Value, packed, place
from kbt_edge.onnxfile import read_onnx
from kbt_edge.trunk import Trunk, build
from kbt_edge.trunk.source import CArray, generate_c, trunk_source

COMPILER = next(filter(shutil.which, ["cc", "gcc", "clang"]), None)
BYTES = {"float": 4, "double": 8, "int32_t": 4, "int64_t": 8, "bool": 1}


def transformer(length: int = 12, width: int = 32, heads: int = 2, layers: int = 2) -> bytes:
    """Layers of attention, with a mask and what exporters write against rows that are masked throughout."""
    onnx = pytest.importorskip("onnx", reason="the trunk is written with onnx")
    pytest.importorskip("emx_onnx_cgen", reason="the C generator is not installed")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    rng = np.random.default_rng(0)
    nodes, constants = [], {"zero": np.zeros((), np.float32), "row": np.array([length, width])}
    constants["split"] = np.array([length, heads, width // heads])
    constants["mask"] = np.triu(np.full((length, length), -1e9, np.float32), 1)

    def add(operator: str, *inputs: Any, **attributes: Any) -> str:
        names = []
        for array in inputs:
            names.append(array if isinstance(array, str) else f"c{len(constants)}")
            if not isinstance(array, str):
                constants[names[-1]] = array.astype(np.float32)
        nodes.append(helper.make_node(operator, names, [f"t{len(nodes)}"], **attributes))
        return f"t{len(nodes) - 1}"

    def dense(x: str, inputs: int, outputs: int) -> str:
        weight = rng.normal(size=(inputs, outputs)) / math.sqrt(inputs)
        return add("Add", add("MatMul", x, weight), 0.1 * rng.normal(size=outputs))

    h = "x"
    for _ in range(layers):
        q, k, v = (add("Reshape", dense(h, width, width), "split") for _ in range(3))
        q = add("Mul", add("Transpose", q, perm=[1, 0, 2]), np.array(math.sqrt(heads / width)))
        scores = add("MatMul", q, add("Transpose", k, perm=[1, 2, 0]))
        p = add("Softmax", add("Add", scores, "mask"))
        seen = add("MatMul", add("Where", add("IsNaN", p), "zero", p), add("Transpose", v, perm=[1, 0, 2]))
        h = add("Add", h, dense(add("Reshape", add("Transpose", seen, perm=[1, 0, 2]), "row"), width, width))
        h = add("LayerNormalization", h, np.ones(width), np.zeros(width))
        h = add("Add", h, dense(add("Relu", dense(h, width, 4 * width)), 4 * width, width))
    initialisers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    x = helper.make_tensor_value_info("x", 1, [length, width])
    graph = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info(h, 1, [length, width])], initialisers)
    opsets = [helper.make_opsetid("", 20)]
    return bytes(helper.make_model(graph, ir_version=10, opset_imports=opsets).SerializeToString())


def entry(source: str) -> tuple[list[str], list[str], list[str]]:
    """The arrays that lie apart, the memory they share otherwise, and the calls."""
    body = source.split("\nvoid trunk(")[1].split("\n}\n")[0]
    apart, shared, calls = re.split(r"#ifdef KBT_APART\n|#else\n|#endif\n", body)[1:]
    return apart.splitlines(), shared.splitlines(), calls.splitlines()


def bytes_of(kind: str, shape: str) -> int:
    return BYTES[kind] * math.prod(int(length) for length in re.findall(r"\d+", shape))


def simulate(source: str) -> tuple[int, int]:
    """Run the calls on intervals: each value is written once, and must be untouched whenever it is read later.

    Returns the bytes of the memory, and the most bytes of values that are needed at the same time.
    """
    apart, shared, calls = entry(source)
    size = {m[2]: bytes_of(m[1], m[3]) for m in (re.match(r" +static (\w+) (\w+)(\S+);", line) for line in apart) if m}
    memory = {
        m[1]: bytes_of(m[1], m[2]) for m in (re.match(r" +_Alignas.* memory_(\w+)(\S+);", line) for line in shared) if m
    }
    place_of = {}
    for line in shared:
        if m := re.match(r" +(\w+) \(\*const (\w+)\).*\(memory_(\w+) \+ (\d+)\);", line):
            assert m[1] == m[3]  # no memory holds two types
            start = BYTES[m[1]] * int(m[4])
            assert start + size[m[2]] <= memory[m[1]]
            place_of[m[2]] = m[1], start
    assert size.keys() == place_of.keys()
    owner: dict[tuple[str, int], str] = {}  # every byte → the value that was written to it last
    same = {name: name for name in size}
    last_read = {}
    steps = []
    for line in calls:
        if view := re.match(r" +\w+ \(\*const (\w+)\).* = .*\)(\w+);", line):
            same[view[1]] = same.get(view[2], view[2])
        elif call := re.match(r" +\w+\((.*)\);", line):
            steps.append([same.get(name, name) for name in call[1].split(", ")])
    written: set[str] = set()
    for number, names in enumerate(steps):
        fresh = {name for name in names if name in size and name not in written}
        for name in names:
            last_read[name] = number
            kind_start = place_of.get(name)
            if kind_start is not None and name in written:
                kind, start = kind_start
                assert all(owner[kind, start + i] == name for i in range(size[name])), f"{name} was overwritten"
        for name in fresh:
            kind, start = place_of[name]
            owner |= {(kind, start + i): name for i in range(size[name])}
        for name in set(names) - fresh:  # and a node never writes over what it reads
            if name in size:
                kind, start = place_of[name]
                assert all(owner[kind, start + i] == name for i in range(size[name])), f"{name} is overwritten"
        written |= fresh
    first = {name: min(i for i, names in enumerate(steps) if name in names) for name in size}
    live = [sum(size[n] for n in size if first[n] <= i <= last_read[n]) for i in range(len(steps))]
    return sum(memory.values()), max(live)


@pytest.mark.slow("runs the generator")
@pytest.mark.parametrize("kernels", [True, False])
def test_no_value_is_overwritten_while_it_is_needed(kernels: bool) -> None:
    data = transformer()
    taken, needed = simulate(generate_c(data, read_onnx(data), kernels=kernels))
    print(f"{taken} bytes for values of which {needed} are needed at the same time")
    assert needed <= taken <= 1.5 * needed


@pytest.mark.slow("runs the generator and a compiler")
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_sharing_memory_changes_no_bit_of_the_output(tmp_path: Path) -> None:
    data = transformer()
    arrays = [CArray((12, 32), "float")], CArray((12, 32), "float")
    main = """
    #include <stdio.h>
    int main(void) {
        float x[12 * 32], h[12 * 32];
        for (int i = 0; i < 12 * 32; ++i) x[i] = (float)((37 * i) % 101 - 50) / 16;
        const void *inputs[] = {x};
        if (kbt_trunk_run(inputs, h) != 0) return 1;
        for (int i = 0; i < 12 * 32; ++i) printf("%a\\n", h[i]);
        return 0;
    }"""
    answers = set()
    for kernels, flags in itertools.product((True, False), ([], ["-DKBT_APART"])):
        source = trunk_source(data, read_onnx(data), *arrays, kernels=kernels)
        build.compile_c([str(COMPILER), *build.LANGUAGE, "-O2", *flags], source + main, tmp_path / "run")
        done = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    assert len(answers) == 1
    assert len(set(next(iter(answers)).split())) > 100


@pytest.mark.slow("compiles a trunk")
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_values_may_exceed_the_stack_together_if_they_do_not_at_one_time(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is what the library is compared with")
    data = transformer(length=60, width=128, heads=1, layers=12)
    apart, _, _ = entry(generate_c(data, read_onnx(data)))
    together = sum(bytes_of(m[1], m[2]) for m in (re.match(r" +static (\w+) \w+?(\[.*);", line) for line in apart) if m)
    assert together > 8 * 2**20  # what a thread has
    trunk = Trunk(data, backend="compiled", cache_dir=tmp_path)
    x = np.random.default_rng(2).standard_normal((60, 128))
    h = Trunk(data, backend="onnxruntime")(x)
    assert np.abs(trunk(x) - h).max() <= 1e-5 * np.abs(h).max()


def test_random_values_are_placed_without_overlap() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        count = int(rng.integers(1, 30))
        starts = rng.integers(0, 40, size=count)
        spans = zip(starts, starts + rng.integers(0, 8, size=count), rng.integers(1, 3000, size=count), strict=True)
        values = [Value(f"v{i}", int(size), int(a), int(b)) for i, (a, b, size) in enumerate(spans)]
        offsets = place(values)
        for one, other in itertools.combinations(values, 2):
            if one.first <= other.last and other.first <= one.last:
                apart = (
                    offsets[one.name] + one.size <= offsets[other.name]
                    or offsets[other.name] + other.size <= offsets[one.name]
                )
                assert apart, (one, other)


def test_text_in_an_unknown_form_is_rejected_and_not_guessed() -> None:
    calls = ["    node0_f(x, a);", "    node1_f(a, b);", "    node2_f(b, h);"]
    lines = ["void trunk(const float x[4], float h[4]) {", "    float a[4];", "    float b[4];", *calls, "}", ""]
    good = "\n".join(lines)
    assert "float memory_float[8];" in packed(good, "trunk")
    for line in ("    float *c = a;", "    if (x) node1_f(a, b);", "    node1_f(a + 1, b);", "    static float c[4];"):
        with pytest.raises(RejectedError, match="unknown form"):
            packed(good.replace(calls[1], line), "trunk")
    with pytest.raises(RejectedError, match="unknown form"):
        packed(good, "another")
