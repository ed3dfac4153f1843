"""Where the C library of this installation is."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Final

import kbt_edge
from kbt_edge.errors import BundleError

__all__ = ["FOLDERS", "installed"]

FOLDERS: Final = {
    "include": "include/kbt.h",
    "lib": "lib/libkbt.so",
    "pkgconfig": "lib/pkgconfig/kbt.pc",
    "cmake": "lib/cmake/kbt/kbt-config.cmake",
}


def installed(name: str) -> Path:
    """An installed file. An editable install has compiled files in another folder than sources."""
    folders = [Path(folder) for folder in kbt_edge.__path__]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders.append(Path(str(importlib.metadata.distribution("kbt-edge").locate_file("kbt_edge"))))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise BundleError(f"{name}: expected in one of {', '.join(map(str, folders))}; is kbt-edge installed?")
