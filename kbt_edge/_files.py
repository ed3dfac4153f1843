"""Files that survive a power cut: the old content or the new, never a mixture."""

from __future__ import annotations

import contextlib
import os
import stat
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
        _sync(target.parent)
    except OSError as error:
        raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents. A new folder is lost in a power cut unless its parent was synced."""
    missing = [folder, *folder.parents]
    missing = missing[: next((i for i, path in enumerate(missing) if path.is_dir()), len(missing))]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bounded(path: str | os.PathLike[str], limit: int, option: str = "") -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes. Memory is allocated only for what the file holds.

    The path may come from an untrusted source: FIFOs do not block, and devices are not read. The last component may be
    a link; callers that must not follow links resolve the path first. ``option`` is the argument that raises the limit.
    """
    name = os.fspath(path)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise BundleError(f"{name}: not a regular file")
            if found.st_size > limit:
                more = f"; {option} allows more" if option else ""
                raise BundleError(f"{name}: expected at most {limit} bytes, the file has {found.st_size}{more}")
            data = file.read(found.st_size + 1)
    except BundleError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BundleError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) != found.st_size:  # it is being written, or the file system reports no sizes
        raise BundleError(f"{name}: read {len(data)} bytes, but its size is {found.st_size}; is it being written?")
    return data


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
