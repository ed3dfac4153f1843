"""``kbt-edge codegen BUNDLE -o DIR``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbt_edge.cli.terminal import add_bundle
from kbt_edge.codegen import generate

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    parser.add_argument("-o", "--out", required=True, type=Path, help="folder for the C files")
    parser.add_argument("--name", help="prefix of every C name (default: the name of the bundle)")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    manifest = generate(options.bundle, options.out, options.name)
    return {"path": str(options.out.absolute()), **manifest}


def text(result: Mapping[str, Any]) -> str:
    name = result["name"]
    lines = [result["path"], "", f"  {name}.h has the calls, README.md how to use them", ""]
    size = result["size"]
    if size is None:
        lines.append("  sizes: not measured, arm-none-eabi-g++ is not installed")
        return "\n".join(lines)
    lines.append(f"  {size['target']}")
    for kind in ("flash", "ram", "stack"):
        lines += [f"  {kind:<6} {part:<8} {count:>8,} B" for part, count in size[kind].items()]
    return "\n".join(lines)
