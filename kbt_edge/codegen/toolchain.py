"""Compilers for generated folders: the sources and flags, building object files, and measuring flash and RAM."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kbt_edge.codegen import manifest
from kbt_edge.errors import BackendError

__all__ = [
    "CORE",
    "CXX_FLAGS",
    "C_FLAGS",
    "FLAGS",
    "INLINE",
    "RECORDER",
    "build_objects",
    "call",
    "core_sources",
    "find_compiler",
    "measure",
]

CORE: Final = ("kbt.cpp", "policy.c", "store.c")
RECORDER: Final = ("recorder.cpp", "replay.cpp")  # packed as well; linked only if the firmware calls them

# The generated CMakeLists.txt has these from here. The bits depend on FLAGS; the rest keeps exceptions and what C
# leaves undefined out.
FLAGS: Final = ("-ffp-contract=off", "-fno-math-errno")
C_FLAGS: Final = ("-fwrapv",)
CXX_FLAGS: Final = ("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
INLINE: Final = ("--param", "max-inline-insns-size=30")  # for GCC with -Os

_CROSS: Final = "arm-none-eabi-"
_M4F: Final = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
_SMALL: Final = ("-Os", *INLINE)
_COMPILE_SECONDS: Final = 600


# ---- sources ---------------------------------------------------------------------------------------------------------


def core_sources() -> list[Path]:
    """The core as this package was built from it: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    parts = ("core", "kernels", "abi")
    for folders in (
        [package / "include", package / "csrc", *(package / "csrc" / part for part in parts)],
        [checkout / "cmake", checkout / "csrc/include", *(checkout / "csrc" / part for part in parts)],
    ):
        found: list[Path] = []
        names = [*CORE, *RECORDER, "KbtEigen.cmake"]
        for name in names:  # and what they include, and what that includes
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is None:
                break
            found.append(path)
            included = re.findall(r'^#include "(\w+\.\w+)"', path.read_text(encoding="utf-8"), flags=re.M)
            names += [name for name in dict.fromkeys(included) if name not in names]
        else:
            return found
    raise BackendError("the sources of the core are not in this installation of kbt_edge; reinstall it")


def _eigen() -> Path | None:
    """Eigen's headers: the package cmeel-eigen, or a system Eigen."""
    candidates = [Path(entry) / "cmeel.prefix/include/eigen3" for entry in sys.path]
    candidates += [Path(os.environ.get("EIGEN3_INCLUDE_DIR", "/usr/include/eigen3")), Path("/usr/local/include/eigen3")]
    return next((folder for folder in candidates if (folder / "Eigen/Core").is_file()), None)


# ---- compiling -------------------------------------------------------------------------------------------------------


def find_compiler(variable: str, *names: str) -> list[str]:
    """The command in an environment variable, or the first of ``names`` that is installed."""
    for command in (shlex.split(os.environ.get(variable, "")), *([name] for name in names)):
        if command and shutil.which(command[0]) is not None:
            return command
    raise BackendError(f"no compiler was found (${variable}, {', '.join(names)})")


def call(command: Sequence[str]) -> str:
    """Standard output of a compiler or a similar tool."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"{shlex.join(command)} failed: {error}") from None
    if done.returncode != 0:
        raise BackendError(f"{shlex.join(command)} failed: {done.stderr.strip()[:1000]}")
    return done.stdout


def build_objects(
    folder: Path, cc: Sequence[str], cxx: Sequence[str], flags: Sequence[str], level: Sequence[str]
) -> list[Path]:
    """Object files of a generated folder, beside their sources. ``level`` optimises the core."""
    about = manifest.read(folder)
    name = about["name"]
    eigen = _eigen()
    if eigen is None:
        raise BackendError("Eigen's headers were not found (pip install cmeel-eigen)")
    # No include path for the folder: its sources find each other by their quotes, and nothing else finds them.
    common = [*flags, *FLAGS, "-Wall", "-Wextra"]
    common += [f"-D{name}" for name in about["defines"]]
    objects = []
    own = (f"{name}.c", f"{name}_trunk.c", f"{name}_state.c", f"{name}_arena.cpp")
    for source in (*own, *(f"kbt/{file}" for file in CORE)):
        if source.endswith(".cpp"):
            language = [*cxx, "-std=c++17", *CXX_FLAGS, *level, "-isystem", str(eigen)]
        else:
            language = [*cc, "-std=gnu11", *C_FLAGS, "-O2" if source == f"{name}_trunk.c" else "-Os"]
        objects.append((folder / source).with_suffix(".o"))
        call([*language, *common, "-c", str(folder / source), "-o", str(objects[-1])])
    return objects


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, Any] | None:
    """Bytes of each part on a Cortex-M4F; None if arm-none-eabi-g++ or Eigen is not installed."""
    if shutil.which(f"{_CROSS}g++") is None or _eigen() is None:
        return None
    name = manifest.read(folder)["name"]
    with tempfile.TemporaryDirectory(prefix="kbt-codegen-") as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch) / "source"))
        objects = build_objects(copy, [f"{_CROSS}gcc"], [f"{_CROSS}g++"], (*_M4F, "-fstack-usage"), _SMALL)
        rows = [line.split() for line in call([f"{_CROSS}size", *map(str, objects)]).splitlines()[1:]]
        frames = [int(line.split("\t")[1]) for line in (copy / f"{name}_trunk.su").read_text().splitlines()]
    part_of = {
        f"{name}.o": "calls",
        "kbt/policy.o": "calls",
        "kbt/store.o": "store",
        f"{name}_trunk.o": "network",
        f"{name}_state.o": "state",
        f"{name}_arena.o": "arena",
    }
    flash = dict.fromkeys(("core", "network", "state", "calls", "store"), 0)
    ram = dict.fromkeys(("arena", "calls"), 0)
    for text, data, bss, _, _, path in rows:
        part = part_of.get(str(Path(path).relative_to(copy)), "core")
        if part in flash:
            flash[part] += int(text) + int(data)
        if part in ram:
            ram[part] += int(data) + int(bss)
    version = call([f"{_CROSS}g++", "-dumpversion"]).strip()
    return {
        "target": f"Cortex-M4F, {_CROSS}g++ {version}, {shlex.join(_SMALL)} for the core",
        "flash": flash,
        "ram": ram,
        "stack": {"network": sum(sorted(frames)[-3:])},  # the run function, the network and the largest of its nodes
    }
