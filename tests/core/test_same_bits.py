"""Compilers, optimisation levels and vector units do not change a single bit of what a head learns."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cabi import HEADERS, TESTS, build_core, installed, run

pytestmark = [
    pytest.mark.host_only("compares compilers of one machine; tools/wheel.py compares the machines"),
    pytest.mark.slow("builds the core with every compiler"),
]

UPDATES = 100_000
COMPILERS = {"gcc": "g++", "clang": "clang++"}
LEVELS = {"O1": ("-O1",), "O2": ("-O2",), "O3": ("-O3",), "avx2": ("-O3", "-mavx2")}
VARIANTS = [f"{cc}-{level}" for cc in COMPILERS for level in LEVELS] + ["installed"]

Hashes = dict[str, str]  # of each head, and of all


def missing(variant: str) -> str | None:
    """Why a variant cannot be built and run here."""
    cc, _, level = variant.partition("-")
    if variant == "installed":
        return None if shutil.which("cc") else "no C compiler"
    if not (shutil.which(cc) and shutil.which(COMPILERS[cc])):
        return f"no {cc}"
    cpu = Path("/proc/cpuinfo")
    if level == "avx2" and not (cpu.exists() and "avx2" in cpu.read_text().split()):
        return "no AVX2 in this processor"
    return None


def hashes(variant: str, folder: Path) -> Hashes:
    """Builds core and driver, and runs them."""
    cc, _, level = variant.partition("-")
    if variant == "installed":
        cc, core = "cc", installed("lib/libkbt.so")
    else:
        core = build_core(COMPILERS[cc], LEVELS[level], folder / f"{variant}.o")
    options = (
        "-std=c99",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        f"-DKBT_UPDATES={UPDATES}",
        f"-I{HEADERS}",
    )
    run(cc, *options, TESTS / "same_bits.c", core, f"-Wl,-rpath,{core.parent}", "-lm", "-o", folder / variant)
    lines = [line.split() for line in run(folder / variant).splitlines()]
    return {line[0]: line[-1] for line in lines}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hashes]:
    """Every variant this machine can build, two at a time."""
    folder = tmp_path_factory.mktemp("same_bits")
    possible = [variant for variant in VARIANTS if missing(variant) is None]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(possible, pool.map(lambda variant: hashes(variant, folder), possible), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_build_learns_the_same_bits(variant: str, built: dict[str, Hashes]) -> None:
    reason = missing(variant)
    if reason:
        pytest.skip(reason)
    first = next(iter(built.values()))
    print(variant, built[variant]["all"])
    assert built[variant] == first  # where only "installed" differs, it was not built from these sources
    assert len(set(first.values())) == len(first) == 17  # heads that differ, and the hash of all


def test_there_is_something_to_compare(built: dict[str, Hashes]) -> None:
    if not built:
        pytest.skip("no compiler")
    assert len(built) >= 2
