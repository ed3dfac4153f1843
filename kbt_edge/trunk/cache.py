"""The cache of compiled trunks.

<cache>/<SHA-256 of the model>/<key>/ holds trunk.so and build.json, or failed.json, which says why there is no
library. The folder is put in place by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbt_edge.errors import BackendError

__all__ = ["Build", "default_cache_dir", "newest", "open_entry", "private", "publish", "remember", "remembered"]


@dataclass(frozen=True)
class Build:
    """A library in the cache, and its ``build.json``, which says how it was built and checked."""

    path: Path
    record: Mapping[str, Any]
    cached: bool

    def __str__(self) -> str:
        age = "found in the cache" if self.cached else "built now"
        return f"{self.record.get('generator')}, {self.record.get('compiler')}, {age}"


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kbt_edge/trunks``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "kbt_edge" / "trunks"


def private(folder: Path) -> Path:
    """Create ``folder`` if needed. Its files are executed, so no other user may be able to write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BackendError(f"the trunk cache {folder} cannot be made: {error}") from error
    if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o022:
        raise BackendError(f"the trunk cache {folder} can be written by other users; chmod go-w it, or set cache_dir")
    return folder


def open_entry(entry: Path, about: Mapping[str, str]) -> Build | None:
    """The library in ``entry`` if it was built as ``about`` says and is undamaged (a board may lose power)."""
    try:
        record = json.loads((entry / "build.json").read_bytes())
        content = (entry / "trunk.so").read_bytes()
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
        return None
    if any(record.get(key) != value for key, value in about.items()):
        return None
    return Build(entry / "trunk.so", record, cached=True)


def newest(shelf: Path, about: Mapping[str, str]) -> Build | None:
    try:
        entries = sorted(shelf.iterdir(), key=lambda entry: (entry.stat().st_mtime, entry.name), reverse=True)
    except OSError:
        return None
    return next((build for build in (open_entry(entry, about) for entry in entries) if build is not None), None)


def remembered(entry: Path, about: Mapping[str, str]) -> str | None:
    """Why an earlier attempt to build exactly this failed."""
    try:
        record = json.loads((entry / "failed.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or any(record.get(key) != value for key, value in about.items()):
        return None
    return str(record.get("failed"))[:2000]


def remember(fresh: Path, entry: Path, about: Mapping[str, Any]) -> None:
    (fresh / "trunk.so").unlink(missing_ok=True)
    (fresh / "failed.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="ascii")
    with contextlib.suppress(OSError):  # another builder was faster
        os.replace(fresh, entry)


def publish(fresh: Path, entry: Path, about: Mapping[str, Any]) -> None:
    """Move the finished folder to its place. If several builders race, one wins; their libraries are equal."""
    content = (fresh / "trunk.so").read_bytes()
    record = {**about, "sha256": hashlib.sha256(content).hexdigest()}
    (fresh / "build.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="ascii")
    for path in (fresh / "trunk.so", fresh / "build.json", fresh):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        os.replace(fresh, entry)
    except OSError:
        # The entry exists: from another builder, or damaged and to be replaced.
        if open_entry(entry, {}) is None:
            os.replace(entry, fresh.parent / "damaged")
            os.replace(fresh, entry)
