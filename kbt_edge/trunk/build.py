"""Trunk → C → shared library: how ``Trunk(backend="compiled")`` gets its code, once per model and machine.

    ONNX bytes ── emx-onnx-cgen ──> C ── local compiler ──> trunk.so ── cache folder ──> cffi
                                      └─ with sanitizers ──> a first run in a child process

The generator writes plain C for fixed shapes, without heap: all intermediate values are on the stack, so the library
has no state and any thread may run it. Products of matrices are ours (``_generate/templates``). We add one function,
``kbt_trunk_run``, that checks every input value before the network runs and every output value before it is returned.

A trunk may come from an untrusted source, and this file turns it into machine code. These rules make that safe:

- No text of the ONNX file reaches the C file, and no shape between its inputs and its output is taken from it
  (``_generate.py``).
- Only operators whose addresses do not depend on data are compiled. The one exception is Gather, whose index is
  clamped.
- The generated C is not trusted to stay within its arrays. Every new trunk is first built with the address and the
  undefined behaviour sanitizer and run in a child process, with an array of its own for every value (``KBT_APART``). As
  no address depends on data, one clean run covers all of them. In the library itself values share memory; which ones is
  decided by a few lines that do not depend on the generator (``_generate/memory.py``).
- Integers wrap around where they overflow.

If a trunk cannot be compiled, the cache keeps the reason, so that the attempt is made only once.
"""

from __future__ import annotations

import hashlib
import json
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
from pathlib import Path
from typing import Any, Final

from kbt_edge import _generate
from kbt_edge.errors import BackendError, KbtError, UnfitError
from kbt_edge.onnxfile import OnnxModel
from kbt_edge.trunk.cache import Build, default_cache_dir, newest, open_entry, private, publish, remember, remembered
from kbt_edge.trunk.source import CArray, check_operators, generator_version, trial_program, trunk_source

__all__ = ["compile_c", "find_compiler", "library", "try_out"]

RECIPE: Final = 4  # part of every cache key: raise it when this file changes what it builds from the same model

# -O3 without -march=native, -ffast-math or contraction: sums keep the order of the source, products are rounded before
# they are added, and the library computes the same on every machine of this architecture (up to its libm's expf and
# erff). Matrix products use the vectors of the processor they run on, across columns, which changes no bit.
LANGUAGE: Final = ("-std=gnu11", "-ffp-contract=off", "-fwrapv")
FLAGS: Final = (*LANGUAGE, "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
# Our signature and the generator's must agree, and a thread's stack is 8 MiB at best.
MAX_FRAME: Final = _generate.MAX_MEMORY
CHECKS: Final = ("-Werror=incompatible-pointer-types", f"-Wframe-larger-than={MAX_FRAME}")
SANITIZE: Final = (*LANGUAGE, "-O1", "-DKBT_APART", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILE_SECONDS: Final = 600
TRIAL_SECONDS: Final = 120  # of the first run, with sanitizers


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
    model, recipe, machine, generator, compiler and flags. On a board without generator or compiler that key is
    unknown, and the newest library in the cache for this model, recipe and machine is used.
    """
    if os.name != "posix":
        raise BackendError(f"a compiled trunk needs Linux or another POSIX system, this is {sys.platform}")
    check_operators(model)
    digest = hashlib.sha256(data).hexdigest()
    shelf = private(cache_dir if cache_dir is not None else default_cache_dir()) / digest
    about = {"model": digest, "recipe": str(RECIPE), "machine": _machine()}
    try:
        generator = generator_version()
        command, compiler = find_compiler()
    except BackendError as missing:
        build = newest(shelf, about)
        if build is None:
            raise BackendError(f"{missing}, and no library for this trunk is in {shelf.parent}") from None
        return build
    about |= {"generator": generator, "compiler": compiler, "flags": " ".join([*command[1:], *FLAGS])}
    entry = shelf / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    build = open_entry(entry, about)
    if build is not None:
        return build
    failure = remembered(entry, about)
    if failure is not None:
        raise UnfitError(f"{failure} (remembered; delete {entry} to try again)")
    try:
        shelf.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=shelf) as folder:
            fresh = Path(folder) / "entry"
            fresh.mkdir()
            try:
                source = trunk_source(data, model, inputs, output, templates=_templates(shelf.parent))
                compile_c([*command, *FLAGS, *CHECKS], source, fresh / "trunk.so")
                try_out(source, inputs, output, command)
                publish(fresh, entry, {**about, **check(fresh / "trunk.so")})
            except UnfitError as error:
                remember(fresh, entry, {**about, "failed": str(error)})
                raise
    except KbtError:
        raise
    except OSError as error:
        raise BackendError(f"the trunk cache {shelf.parent} cannot be written: {error}") from error
    build = open_entry(entry, about)
    if build is None:
        raise BackendError(f"the library just written to {entry} cannot be read back")
    return Build(build.path, build.record, cached=False)


def _templates(cache: Path) -> Path:
    """Where the generator caches its compiled templates, which saves seconds."""
    folder = cache / ".templates"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _machine() -> str:
    return f"{sys.platform}-{platform.machine()}-{8 * struct.calcsize('P')}"


def try_out(source: str, inputs: Sequence[CArray], output: CArray, command: Sequence[str]) -> None:
    """Run ``source`` once with sanitizers in a child process, and reject it if they find anything."""
    with tempfile.TemporaryDirectory(prefix="kbt-trial-") as folder:
        trial = Path(folder) / "trial"
        try:
            compile_c([*command, *SANITIZE], source + trial_program(inputs, output), trial)
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


def find_compiler() -> tuple[list[str], str]:
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


def compile_c(command: Sequence[str], source: str, target: Path) -> None:
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
    """Check that this compiler has sanitizers."""
    try:
        compile_c([*command, *SANITIZE], "int main(void) { return 0; }\n", folder / "empty")
    except UnfitError as error:
        raise BackendError(
            f"{command[0]} cannot build with -fsanitize=address,undefined, which checks a new trunk before its first "
            f"use; install its sanitizer libraries, or use onnxruntime ({str(error)[-200:]})"
        ) from None


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # messages in English, so that they can be recognised
