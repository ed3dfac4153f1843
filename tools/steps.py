"""Commands, folders that are made once, and timed steps, for wheel.py."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

STARTED = time.monotonic()


class StepError(Exception):
    """A missing program or a failed step, with a message for the user."""


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kbt_edge" / "wheel"


def run(*command: object, **options: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise StepError(f"{shlex.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@contextmanager
def once(folder: Path, made_of: list[str]) -> Iterator[Path | None]:
    """The folder, empty, to be filled; or None if it was filled before from the same things, to the end."""
    stamp, words = folder / ".made-of", json.dumps(made_of)
    if stamp.is_file() and stamp.read_text() == words:
        yield None
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    stamp.write_text(words)


@contextmanager
def timed(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)


def together(*parts: Callable[[], object]) -> list[object]:
    """Run all at the same time; returns their results."""

    def one(part: Callable[[], object]) -> object:
        with timed(part.__name__.replace("<lambda>", "tests")):
            return part()

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, parts))
