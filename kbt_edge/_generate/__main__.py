"""The process that ``__init__.py`` describes. It imports this folder by its path and nothing else of the user's."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import warnings
from typing import Any, Final

MEMORY: Final = 8 * 2**30
SECONDS: Final = 300


def this_folder() -> Any:
    """This folder as a package, without ``kbt_edge`` above it."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]  # where Python puts a folder that it runs
    spec = importlib.util.spec_from_file_location(
        "kbt_generate", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["kbt_generate"] = package
    spec.loader.exec_module(package)
    return package


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    name, kernels, paths, templates = sys.argv[1:]
    generate = this_folder()
    sys.path[:] = dict.fromkeys([*paths.splitlines()[:1], *sys.path, *paths.splitlines()[1:]])
    warnings.simplefilter("ignore")
    try:
        source = generate.Translator(templates, kernels=kernels == "fast")(sys.stdin.buffer.read(), name)
    except ImportError as error:  # such as a distribution's onnx that is too old for the generator
        print(f"emx-onnx-cgen is installed, but cannot be imported: {error}", file=sys.stderr)
        return 1
    except generate.RejectedError as error:
        print(error, file=sys.stderr)
        return int(generate.REJECTED)
    sys.stdout.write(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
