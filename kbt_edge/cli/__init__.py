"""The command ``kbt-edge``. Nothing in the library imports this package.

Results go to stdout, as text or with ``--json`` as one JSON object. Progress goes to stderr, and only on a terminal.
Exit codes: 0 for success, 1 for an error (one line on stderr), 2 for wrong usage, or what the command says.

Each command is a module with three functions: ``arguments`` adds its options to a parser, ``run`` returns the result
as plain data, ``text`` formats that result. The module is imported only when its command is called, so that no command
needs a package that only another one uses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

from kbt_edge._version import __version__
from kbt_edge.errors import KbtError

__all__ = ["COMMANDS", "Command", "main"]

Result = Mapping[str, Any]


class Command(Protocol):
    """What each module of this package provides."""

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> Result: ...

    def text(self, result: Result) -> str: ...


# Name: module, summary.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "bench": ("kbt_edge.cli.bench", "measure the latency of a model on this board, stage by stage"),
    "doctor": ("kbt_edge.cli.doctor", "check what works on this board, what is missing, and what to change"),
    "demo": ("kbt_edge.cli.demo", "adapt a cart-pole policy to a changed plant, sample by sample"),
    "demo tokens": ("kbt_edge.cli.demo_tokens", "adapt a token model to a changed rule, compared with retraining"),
    "codegen": ("kbt_edge.cli.codegen", "write a bundle as C for a microcontroller"),
    "repro": ("kbt_edge.cli.repro", "reproduce the study: KBT against retraining, with figures and a report"),
    "tune": ("kbt_edge.cli.tune", "choose the settings of a bundle's head from a short stream"),
    "export": ("kbt_edge.cli.export", "turn a torch model into a bundle"),
    "inspect": ("kbt_edge.cli.inspect", "show what is in a bundle"),
    "replay": ("kbt_edge.cli.replay", "replay a flight log and check that it reaches the same state, bit for bit"),
    "paths": ("kbt_edge.cli.paths", "print where the C library is, for pkg-config, CMake and compilers"),
}

# Package: the extra of kbt-edge that installs it.
EXTRAS: Final = {
    "scipy": "demo",
    "matplotlib": "demo",
    "torch": "train",
    "onnx": "train",
    "onnxscript": "train",
    "emx_onnx_cgen": "codegen",
    "jinja2": "codegen",
    "joblib": "repro",
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KbtError as error:
        return _failed(str(error))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise  # a bug or a broken installation: show the traceback
        return _failed(f"this command needs {package} (pip install 'kbt-edge[{EXTRAS[package]}]')")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        return 0
    except OSError as error:
        return _failed(": ".join(str(part) for part in (error.filename, error.strerror) if part) or str(error))


def _run(argv: list[str]) -> int:
    if " ".join(argv[:2]) in COMMANDS:  # a command of two words
        argv[:2] = [" ".join(argv[:2])]
    parser = argparse.ArgumentParser(prog="kbt-edge", description="A pre-trained transformer that keeps learning.")
    parser.add_argument("--version", action="version", version=f"kbt-edge {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((word for word in argv if not word.startswith("-")), None)
    command: Command | None = None
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == called:
            command = cast(Command, importlib.import_module(module))
            command.arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="write the result as JSON")
    options = parser.parse_args(argv)  # leaves with code 2 unless the first word is a command
    assert command is not None
    result = command.run(options)
    text = json.dumps(result, indent=2, allow_nan=False) if options.json else command.text(result)
    try:
        print(_printable(text), flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # otherwise the interpreter flushes again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return int(result.get("exit_code", 0))  # some commands report a result to scripts this way


def _failed(message: str) -> int:
    print("kbt-edge: " + " ".join(_printable(message).split("\n")), file=sys.stderr)
    return 1


def _printable(text: str) -> str:
    """Escape names from untrusted bundles, which must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
