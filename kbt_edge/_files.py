"""Files that survive a power cut: the old content or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kbt_edge.errors import BundleError


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace ``path`` by ``data``: temporary file in the same folder, fsync, rename, fsync of the folder."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a file that must not be longer than ``limit``; no more than that is ever read."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BundleError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise BundleError(f"{os.fspath(path)}: expected at most {limit} bytes, the file is longer")
    return data


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
