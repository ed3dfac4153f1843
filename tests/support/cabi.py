"""The C ABI as tests and tools meet it: the installed library, and builds of the core with chosen flags."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt

import kbt_edge

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HEADERS = CSRC / "include"
INCLUDES = tuple(f"-I{CSRC / folder}" for folder in ("include", "core", "kernels", "abi"))
TESTS = ROOT / "tests"

# As in CMakeLists.txt: the options on which the same bits depend, and where the loops also exist for AVX2.
_AVX2_DEFINED = ("-DKBT_AVX2",) if platform.machine() == "x86_64" else ()
CORE_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti")


def installed(name: str) -> Path:
    """A file that the package installs, such as ``lib/libkbt.so``, also of an editable install."""
    folders = [Path(folder) for folder in kbt_edge.__path__]
    folders += [Path(str(importlib.metadata.distribution("kbt-edge").locate_file("kbt_edge")))]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: expected in one of {', '.join(map(str, folders))}")


@cache
def library() -> tuple[cffi.FFI, Any]:
    """The installed libkbt, declared by its own header."""
    header = "".join(
        installed(f"include/{name}.h").read_text() for name in ("kbt", "kbt_flight", "kbt_mailbox", "kbt_readout")
    )
    header = re.sub(r"#ifdef __cplusplus.*?#endif", "", header, flags=re.S)
    constants = re.findall(r"^#define KBT_\w+ \d+", header, flags=re.M)
    body = re.sub(r"^#.*$|\bKBT_API\b", "", header, flags=re.M)
    ffi = cffi.FFI()
    ffi.cdef("\n".join(constants) + body)
    return ffi, ffi.dlopen(str(installed("lib/libkbt.so")))


def compiler(*names: str) -> str | None:
    """The first of these compilers that this machine has."""
    return next((path for path in map(shutil.which, names) if path), None)


def eigen() -> Path:
    """Eigen's headers: the build requirement cmeel-eigen, or a system Eigen."""
    candidates = [Path(p) / "cmeel.prefix/include/eigen3" for p in sys.path]
    candidates += [Path("/usr/include/eigen3"), Path("/usr/local/include/eigen3")]
    for folder in candidates:
        if (folder / "Eigen/Core").is_file():
            return folder
    raise FileNotFoundError("Eigen headers: expected the package cmeel-eigen or a system Eigen, found neither")


def run(*command: object, **options: Any) -> str:
    """Standard output of a command. If it fails, the error says how."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def build_core(cxx: str, flags: tuple[str, ...], target: Path, source: str = "abi/kbt.cpp") -> Path:
    """A file of csrc/ as an object file; abi/kbt.cpp alone is the whole core, without the loops for AVX2."""
    run(cxx, *CORE_FLAGS, *flags, "-isystem", eigen(), *INCLUDES, "-c", CSRC / source, "-o", target)
    return target


def build_sanitized(folder: Path, *sanitizers: str) -> list[Path]:
    """All of the core with clang's sanitizers, the loops for AVX2 included: object files to link programs with."""
    clang = compiler("clang")
    assert clang is not None, "ask for clang before"
    flags = ("-O1", "-g", *sanitizers)
    objects = [folder / f"{source.name}.o" for source in sorted(CSRC.glob("abi/*.c*"))]
    for target in objects:
        if target.name.endswith(".c.o"):
            run(clang, "-std=c99", *flags, f"-I{HEADERS}", "-c", CSRC / "abi" / target.stem, "-o", target)
        else:
            build_core(f"{clang}++", (*flags, *_AVX2_DEFINED), target, f"abi/{target.stem}")
    if _AVX2_DEFINED:
        objects.append(build_core(f"{clang}++", (*flags, *_AVX2_DEFINED), folder / "avx2.o", "kernels/avx2.cpp"))
    return objects


def build_with_installed(cc: str, source: Path, target: Path, *more: object) -> Path:
    """A C program linked against the installed library."""
    lib, include = installed("lib/libkbt.so"), installed("include/kbt.h").parent
    options = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{include}", f"-Wl,-rpath,{lib.parent}")
    run(cc, *options, source, *more, lib, "-lm", "-o", target)
    return target


# ---- the state blob, read as csrc/abi/state.hpp documents it ---------------------------------------------------------

HEADER = struct.Struct("<4sIQII")  # magic, version, length, CRC-32 of the rest, 0
CONFIG = struct.Struct("<18i13d")
MAX_LAYERS = 8


@dataclass
class LayerState:
    mean: npt.NDArray[np.float64]  # n x (m + 1), bias last
    D: npt.NDArray[np.float64]  # matrices x M
    U: npt.NDArray[np.float64]  # matrices x M x M, unit upper triangular


@dataclass
class State:
    version: int
    length: int
    crc: int
    config: dict[str, int | float | list[int] | list[float]]
    samples: int
    noise: npt.NDArray[np.float64]
    layers: list[LayerState]


def parse_state(blob: bytes) -> State:
    """Every number of a state blob, found by the documented layout alone."""
    magic, version, length, crc, spare = HEADER.unpack_from(blob)
    assert (magic, spare) == (b"KBTS", 0)
    numbers = CONFIG.unpack_from(blob, HEADER.size)
    names = ("max_rows", "output", "covariance", "rule", "noise", "relu_order", "softmax_order")
    config = dict(zip(names, numbers[11:18], strict=True))
    dtype, layers, widths = numbers[0], numbers[1], numbers[2:11]
    config |= {"dtype": dtype, "layers": layers, "widths": list(widths), "prior_var": list(numbers[18:26])}
    config |= dict(zip(("noise_var", "input_var", "forgetting", "gate", "drift"), numbers[26:], strict=True))
    at = HEADER.size + CONFIG.size
    samples, noise_count = struct.unpack_from("<Qi", blob, at)
    at += 12

    def take(count: int) -> npt.NDArray[np.float64]:
        nonlocal at
        values = np.frombuffer(blob, "<f8" if dtype else "<f4", count, at)
        at += values.nbytes
        return values.astype(np.float64)

    noise, states = take(noise_count), []
    for m, n in itertools.pairwise(widths[: layers + 1]):
        mean = take(n * (m + 1)).reshape(n, m + 1)
        matrices, M = (1, n * (m + 1)) if config["covariance"] == 0 else (n, m + 1)
        D, U = np.zeros((matrices, M)), np.tile(np.eye(M), (matrices, 1, 1))
        for g in range(matrices):
            D[g] = take(M)
            for q in range(1, M if config["covariance"] != 2 else 0):
                U[g, :q, q] = take(q)
        states.append(LayerState(mean, D, U))
    assert at == len(blob)
    return State(version, length, crc, config, samples, noise, states)
