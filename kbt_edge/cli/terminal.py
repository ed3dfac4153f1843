"""What the commands share: progress on a terminal, and options that several of them have."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from kbt_edge.onnxfile import MAX_BYTES
from kbt_edge.trunk import Backend

__all__ = ["add_backend", "add_bundle", "add_max_bytes", "live", "progress"]


def progress(message: str) -> None:
    """Print to stderr if it is a terminal, and nothing otherwise."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def live(line: str | None) -> None:
    """Like ``progress``, but each line overwrites the one before; None clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line or ''}", end="", file=sys.stderr, flush=True)


def add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="folder of a bundle, or the name of one that ships with the package")


def add_max_bytes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MAX_BYTES,
        metavar="N",
        help=f"reject a trunk or a state of more bytes (default {MAX_BYTES}); raise it for networks that you trust",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="how to run the trunk (default: auto)"
    )
