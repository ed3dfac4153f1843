"""The command ``kbt-edge``.

Results go to stdout, as text or with ``--json`` as one JSON object; progress goes to stderr, and only to a terminal.
Exit codes: 0 for success, 1 for an error (one line on stderr: of kbt_edge, of the system, or a package that is not
installed), 2 for a call that was not understood.

A command is a line in ``COMMANDS`` and a class with three functions: ``arguments`` adds its options to a parser,
``run`` does the work and returns the result as plain data, ``text`` writes that result for people. Its module is
imported when it is called, so no command needs a package that only another one uses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from kbt_edge.errors import KbtError, RangeError

if TYPE_CHECKING:
    from kbt_edge.model import Model

__all__ = ["COMMANDS", "Command", "live", "main", "progress"]

Result = Mapping[str, Any]


class Command(Protocol):
    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> Result: ...

    def text(self, result: Result) -> str: ...


# name: (where its Command is, what it does)
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "bench": ("kbt_edge.bench.command:Bench", "measure the latency of a model on this board, stage by stage"),
    "doctor": ("kbt_edge.bench.doctor:Doctor", "say what works on this board, what is missing, and what to change"),
    "demo": ("kbt_edge.studies.demo:Demo", "show a policy learn a changed plant: the cart-pole, sample by sample"),
    "demo tokens": ("kbt_edge.studies.tokens:Demo", "show a token model learn a changed rule, against retraining"),
    "codegen": ("kbt_edge.codegen:Codegen", "write a bundle as C for a microcontroller"),
    "repro": ("kbt_edge.studies.repro:Repro", "run the study again: KBT against retraining, figures and a report"),
    "tune": ("kbt_edge.tune:Tune", "choose prior and noise variances of a bundle from a short stream"),
    "export": ("kbt_edge.cli:Export", "turn a torch model into a bundle"),
    "inspect": ("kbt_edge.cli:Inspect", "show what is in a bundle"),
    "replay": ("kbt_edge.flight:ReplayCommand", "replay a flight log: does it lead to the same state, bit for bit?"),
    "paths": ("kbt_edge._paths:Paths", "say where the C library is, for pkg-config, CMake and compilers"),
}


# The extra of kbt-edge that brings a package.
EXTRAS: Final = {
    "scipy": "demo",
    "matplotlib": "demo",
    "torch": "train",
    "onnx": "train",
    "onnxscript": "train",
    "emx_onnx_cgen": "codegen",
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
            raise  # a bug, or a broken installation: the traceback says more
        return _failed(f"this command needs {package} (pip install 'kbt-edge[{EXTRAS[package]}]')")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0
    except OSError as error:
        return _failed(": ".join(str(part) for part in (error.filename, error.strerror) if part) or str(error))


def _run(argv: list[str]) -> int:
    if " ".join(argv[:2]) in COMMANDS:  # a command of two words
        argv[:2] = [" ".join(argv[:2])]
    parser = argparse.ArgumentParser(prog="kbt-edge", description="A pre-trained transformer that keeps learning.")
    parser.add_argument("--version", action="version", version=f"kbt-edge {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((word for word in argv if not word.startswith("-")), None)
    command: Command | None = None
    for name, (where, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == called:
            command = _find(where)
            command.arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="write the result as JSON")
    options = parser.parse_args(argv)  # leaves with code 2 unless the first word is a command
    assert command is not None
    result = command.run(options)
    text = json.dumps(result, indent=2, allow_nan=False) if options.json else command.text(result)
    try:
        print(_printable(text), flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # or the interpreter would try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return int(result.get("exit_code", 0))  # a command may have something to say to a script


def _failed(message: str) -> int:
    print("kbt-edge: " + " ".join(_printable(message).split("\n")), file=sys.stderr)
    return 1


def progress(message: str) -> None:
    """Tell a person at a terminal what takes so long, and nobody else."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def live(line: str | None) -> None:
    """The same in a line that the next one is written over; None leaves it empty."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line or ''}", end="", file=sys.stderr, flush=True)


def _find(where: str) -> Command:
    module, _, name = where.partition(":")
    command: Command = getattr(importlib.import_module(module), name)()
    return command


def _printable(text: str) -> str:
    """Names in a bundle may come from anyone, and must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _version() -> str:
    from kbt_edge import __version__

    return __version__


class Inspect:
    """``kbt-edge inspect BUNDLE``"""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("bundle", help="folder of a bundle, or the name of one that ships with the package")
        choices = ("auto", "compiled", "onnxruntime")
        parser.add_argument("--backend", choices=choices, default="auto", help="how to run the trunk (default: auto)")

    def run(self, options: argparse.Namespace) -> Result:
        from kbt_edge.bundle import find
        from kbt_edge.model import Model

        folder = find(options.bundle)
        progress(f"reading {folder} and starting its trunk ...")
        return _described(Model.load(options.bundle, backend=options.backend), folder)

    def text(self, result: Result) -> str:
        trunk, head = result["trunk"], result["head"]
        lines = [result["path"], ""]

        def line(name: str, *parts: object) -> None:
            lines.append(f"  {name:<11} " + "  ".join(str(part) for part in parts if part not in (None, "")))

        lines.append("trunk")
        line("file", _size(trunk["bytes"]), f"sha256 {trunk['sha256'][:16]}…")
        for entry in trunk["inputs"]:
            scaling = f"(x - {_row(entry['mean'])}) / {_row(entry['scale'])}" if entry["mean"] is not None else None
            line("input", entry["name"], tuple(entry["shape"]), entry["dtype"], scaling)
        line("output", f"{trunk['rows']} row{'s' * (trunk['rows'] > 1)} of {trunk['d']}")
        line("operators", ", ".join(f"{name} {count}" for name, count in trunk["operators"].items()))
        line("backend", trunk["backend"], f"({trunk['reason']})")

        lines += ["", "head"]
        line("structure", " → ".join(map(str, head["widths"])), head["output"], head["covariance"], head["dtype"])
        line(
            "rule",
            head["rule"],
            f"noise {head['noise']}" + f" {_row(head['noise_var'])}" * (head["noise"] != "multinomial"),
        )
        line("settings", *(f"{key} {head[key]}" for key in _SETTINGS))
        if head["offset"] is not None:
            line("units", f"y = {_row(head['offset'])} + {_row(head['scale'])} · u")
        line("memory", _size(head["memory"]), f"({_size(head['bytes'])} in the file)")
        line("samples", head["samples"])
        line("layer", f"{'weights':>12}  {'smallest std':>12}  {'largest std':>12}")
        for number, layer in enumerate(head["layers"], 1):
            shape = f"{layer['shape'][0]} × {layer['shape'][1]}"
            line(f"  {number}", f"{shape:>12}  {layer['smallest_std']:>12.3g}  {layer['largest_std']:>12.3g}")
        if result["made"]:
            lines += ["", "made"]
            for key, value in result["made"].items():
                line(key, value)
        return "\n".join(lines)


class Export(Inspect):
    """``kbt-edge export FILE.py:FUNCTION BUNDLE``"""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "source",
            metavar="FILE.py:FUNCTION",
            help="a function without arguments, in a file or a module, that returns a dict with the arguments of "
            "kbt_edge.export.export: module, readout, example_inputs and whatever differs from the defaults",
        )
        parser.add_argument("bundle", help="folder for the bundle")

    def run(self, options: argparse.Namespace) -> Result:
        from kbt_edge.export import export

        progress(f"running {options.source} ...")
        arguments = _function(options.source)()
        if not isinstance(arguments, Mapping) or not {"module", "readout", "example_inputs"} <= arguments.keys():
            raise RangeError(f"{options.source}: expected a dict with module, readout and example_inputs")
        progress("exporting ...")
        model = export(**arguments, path=options.bundle)
        return _described(model, Path(options.bundle))


def _function(source: str) -> Callable[[], Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names."""
    where, _, name = source.rpartition(":")
    if not where or not name:
        raise RangeError(f"source: expected FILE.py:FUNCTION or MODULE:FUNCTION, got {source}")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise RangeError(f"source: {source} cannot be loaded: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise RangeError(f"source: expected a function {name!r} in {where}, there is none")
    return function  # type: ignore[no-any-return]


def _described(model: Model, folder: Path) -> Result:
    bundle, head, trunk = model.bundle(), model.head, model.trunk
    return {
        "path": str(folder.absolute()),
        "made": model.made,
        "trunk": {
            "bytes": len(bundle.trunk),
            "sha256": trunk.sha256,
            "inputs": [
                {"name": i.name, "shape": list(i.shape), "dtype": i.dtype, "mean": i.mean, "scale": i.scale}
                for i in bundle.inputs
            ],
            "rows": trunk.rows,
            "d": trunk.d,
            "operators": trunk.operators,
            "backend": trunk.backend,
            "reason": trunk.backend_reason,
        },
        "head": {
            "bytes": len(bundle.head),
            "memory": head.nbytes,
            **head.config,
            "noise_var": np.asarray(model.noise_var, np.float64).tolist(),
            "offset": bundle.offset,
            "scale": bundle.scale,
            "samples": head.samples,
            "layers": [_layer(layer.mean, layer.cov) for layer in head.layers],
        },
    }


_SETTINGS = ("prior_var", "relu_order", "softmax_order", "input_var", "forgetting", "gate", "max_rows")


def _layer(mean: Any, cov: Any) -> dict[str, Any]:
    """Size of a layer, and the range of its weights' standard deviations. ``cov`` is full, per neuron or a diagonal."""
    var = cov if cov.shape == mean.shape else np.diagonal(cov, axis1=-2, axis2=-1)
    std = np.sqrt(np.asarray(var, np.float64))
    return {"shape": list(mean.shape), "smallest_std": float(std.min()), "largest_std": float(std.max())}


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def _row(values: Any) -> str:
    """A number, or a few, or how many there are."""
    flat = np.ravel(values)
    if len(flat) == 1:
        return f"{flat[0]:.4g}"
    return f"[{', '.join(f'{value:.4g}' for value in flat)}]" if len(flat) <= 8 else f"[{len(flat)} numbers]"
