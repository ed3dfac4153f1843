"""``kbt-edge export FILE.py:FUNCTION BUNDLE``"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kbt_edge.cli.inspect import described, text
from kbt_edge.cli.terminal import progress
from kbt_edge.errors import RangeError

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments, in a file or a module, that returns a dict with the arguments of "
        "kbt_edge.export.export: module, readout, example_inputs and whatever differs from the defaults",
    )
    parser.add_argument("bundle", help="folder for the bundle")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    from kbt_edge.export import export

    progress(f"running {options.source} ...")
    arguments = _function(options.source)()
    if not isinstance(arguments, Mapping) or not {"module", "readout", "example_inputs"} <= arguments.keys():
        raise RangeError(f"{options.source}: expected a dict with module, readout and example_inputs")
    progress("exporting ...")
    model = export(**arguments, path=options.bundle)
    return described(model, Path(options.bundle))


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
        raise RangeError(f"source: expected a function {name!r} in {where}, but it has none")
    return function  # type: ignore[no-any-return]
