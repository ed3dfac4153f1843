"""``kbt-edge paths``: where the C library of this installation is, for pkg-config, CMake and compilers."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import kbt_edge
from kbt_edge.errors import BundleError

__all__ = ["Paths", "installed"]

FOLDERS: Final = {
    "include": "include/kbt.h",
    "lib": "lib/libkbt.so",
    "pkgconfig": "lib/pkgconfig/kbt.pc",
    "cmake": "lib/cmake/kbt/kbt-config.cmake",
}


def installed(name: str) -> Path:
    """A file that the package installs. An editable install keeps what is compiled away from what is written."""
    folders = [Path(folder) for folder in kbt_edge.__path__]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders.append(Path(str(importlib.metadata.distribution("kbt-edge").locate_file("kbt_edge"))))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise BundleError(f"{name}: expected in one of {', '.join(map(str, folders))}; is kbt-edge installed?")


class Paths:
    """``kbt-edge paths [include|lib|pkgconfig|cmake]``"""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", nargs="?", choices=tuple(FOLDERS), help="only this one, for use in a command")

    def run(self, options: argparse.Namespace) -> Mapping[str, Any]:
        wanted = [options.folder] if options.folder else list(FOLDERS)
        return {name: str(installed(FOLDERS[name]).parent) for name in wanted}

    def text(self, result: Mapping[str, Any]) -> str:
        if len(result) == 1:
            return "".join(result.values())
        return "\n".join(f"{name:<10} {path}" for name, path in result.items())
