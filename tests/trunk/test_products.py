"""The matrix product of compiled trunks: the bits of a plain loop, for every shape and instruction set."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kbt_edge.trunk import build

pytest.importorskip("emx_onnx_cgen", reason="the C generator is not installed")
pytest.importorskip("jinja2", reason="the kernel is a template")

from kbt_edge._generate.translator import PRODUCTS, product_source

COMPILERS = list(filter(shutil.which, ["gcc", "clang"]))
X86_64 = platform.machine() in ("x86_64", "AMD64")

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static unsigned state = 1;
static float number(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(int)(state >> 8) * 0x1p-23f - 1.0f;
}
static float *array(int count) {  /* of exactly this size, so that the address sanitizer sees what lies beyond */
    float *made = malloc(sizeof(float) * count);
    for (int i = 0; i < count; ++i) made[i] = number();
    return made;
}
static int check(int m, int n, int depth, int biased) {
    float *a = array(m * depth), *b = array(depth * n), *bias = array(n), *got = array(m * n), *want = array(m * n);
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            float sum = 0.0f;
            for (int k = 0; k < depth; ++k) sum += a[i * depth + k] * b[k * n + j];
            want[i * n + j] = biased ? sum + bias[j] : sum;
        }
    FUNCTION(m, n, depth, a, b, biased ? bias : NULL, got);
    int same = memcmp(want, got, sizeof(float) * m * n) == 0;
    if (!same) printf("%d x %d, depth %d, bias %d\\n", m, n, depth, biased);
    free(a), free(b), free(bias), free(got), free(want);
    return same;
}
int main(void) {
    SUPPORTED
    int same = 1;
    for (int m = 1; m <= 14; ++m)
        for (int n = 1; n <= 150; n += n < 70 ? 1 : 7)
            for (int depth = 1; depth <= 20; depth += depth < 3 ? 1 : 17) same &= check(m, n, depth, (m + n) % 2);
    return !same;
}
"""


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("suffix", ["", *(str(kind["suffix"]) for kind in PRODUCTS)])
@pytest.mark.slow("compiles the kernel with the address sanitizer")
def test_every_product_has_the_bits_of_a_plain_loop(suffix: str, compiler: str, tmp_path: Path) -> None:
    name = next((kind["name"] for kind in PRODUCTS if kind["suffix"] == suffix), "")
    if name and not X86_64:
        pytest.skip(f"{name} is x86-64's")
    supported = f'if (!__builtin_cpu_supports("{name}")) return 77;' if name else ""
    program = PROGRAM.replace("FUNCTION", f"kbt_product{suffix}").replace("SUPPORTED", supported)
    for flags in ([*build.LANGUAGE, "-O3"], list(build.SANITIZE)):
        build.compile_c([compiler, *flags], product_source() + program, tmp_path / "check")
        done = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
        if done.returncode == 77:
            pytest.skip(f"this processor has no {name}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not X86_64, reason="looks at x86-64 code")
@pytest.mark.slow("compiles the kernel")
def test_products_are_neither_contracted_nor_left_to_scalars(tmp_path: Path) -> None:
    build.compile_c(["cc", *build.FLAGS], product_source() + "void *used = kbt_product;", tmp_path / "kernel.so")
    code = subprocess.run(["objdump", "-d", tmp_path / "kernel.so"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\tvf(n?m)(add|sub)", code)
    for registers in ("zmm", "ymm"):
        assert len(re.findall(rf"\tvmulps .*%{registers}", code)) > 4
