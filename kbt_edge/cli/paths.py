"""``kbt-edge paths [include|lib|pkgconfig|cmake]``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kbt_edge._paths import FOLDERS, installed

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", choices=tuple(FOLDERS), help="only this one, for use in a command")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    wanted = [options.folder] if options.folder else list(FOLDERS)
    return {name: str(installed(FOLDERS[name]).parent) for name in wanted}


def text(result: Mapping[str, Any]) -> str:
    if len(result) == 1:
        return "".join(result.values())
    return "\n".join(f"{name:<10} {path}" for name, path in result.items())
