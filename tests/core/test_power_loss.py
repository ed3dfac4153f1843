"""A power cut at every step of a save, on a disk that keeps no promise but fsync's: the old bundle or the new one.

The calls that ``_files`` makes are recorded while they run. Then they are replayed up to every step, and everything
that was not synced by then may be on the disk or not: each change of a folder by itself, so a rename may arrive before
the data it names, and of each file nothing, half, zeros or all.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx

import kbt_edge as kbt
from kbt_edge import _files
from kbt_edge import bundle as bundles
from kbt_edge.bundle import Bundle, BundleInput
from kbt_edge.errors import BundleError

Operation = tuple[Any, ...]


class Recorder:
    """``os`` and ``tempfile`` for ``_files``: does what they do, and remembers it."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, []
        self.log: list[Operation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _name(self, path: Any) -> str:
        return os.path.relpath(os.fspath(path), self.root)

    def _of(self, handle: int) -> str:
        return self._name(os.readlink(f"/proc/self/fd/{handle}"))

    def mkstemp(self, **settings: Any) -> tuple[int, str]:
        handle, path = tempfile.mkstemp(**settings)
        self.log.append(("create", self._name(path)))
        return handle, path

    def fdopen(self, handle: int, mode: str) -> Any:
        file, recorder = os.fdopen(handle, mode), self

        class Written:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                recorder.log.append(("write", recorder._of(handle), bytes(data)))
                file.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Written()

    def fsync(self, handle: int) -> None:
        self.log.append(("sync", self._of(handle)))
        os.fsync(handle)

    def replace(self, old: Any, new: Any) -> None:
        self.log.append(("rename", self._name(old), self._name(new)))
        os.replace(old, new)


@dataclass
class Inode:
    content: bytes | None  # None: a folder
    synced: bytes = b""

    def possible(self) -> list[bytes | None]:
        data = self.content
        if data is None or data == self.synced:
            return [data]
        return [self.synced, b"", data[: len(data) // 2], bytes(len(data)), data]


class Disk:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.names: dict[str, Inode] = {name: Inode(data, data) for name, data in files.items()}
        self.certain = dict(self.names)
        self.pending: list[Operation] = []  # (folder, old name or None, new name, inode)

    def do(self, operation: Operation) -> None:
        kind, name, *rest = operation
        if kind in ("create", "mkdir"):
            self.names[name] = Inode(b"" if kind == "create" else None)
            self.pending.append((os.path.dirname(name) or ".", None, name, self.names[name]))
        elif kind == "write":
            self.names[name].content = (self.names[name].content or b"") + rest[0]
        elif kind == "rename":
            inode = self.names[rest[0]] = self.names.pop(name)
            self.pending.append((os.path.dirname(name) or ".", name, rest[0], inode))
        elif name in self.names and self.names[name].content is not None:
            self.names[name].synced = self.names[name].content or b""
        else:  # a folder is synced
            for change in [change for change in self.pending if change[0] == name]:
                apply(self.certain, change)
                self.pending.remove(change)

    def after_a_cut(self) -> Iterator[dict[str, bytes | None]]:
        """Every content that the disk can have when the power comes back."""
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            names = dict(self.certain)
            for change in itertools.compress(self.pending, kept):
                apply(names, change)
            for contents in itertools.product(*(inode.possible() for inode in names.values())):
                yield dict(zip(names, contents, strict=True))


def apply(names: dict[str, Inode], change: Operation) -> None:
    _, old, new, inode = change
    if old is not None:
        names.pop(old, None)
    names[new] = inode


def restored(files: dict[str, bytes | None], folder: Path) -> Path:
    """They as real files. What lies in a folder that was lost is lost too."""
    folder.mkdir()
    for name, content in sorted(files.items()):
        parents = [str(parent) for parent in Path(name).parents if str(parent) != "."]
        if content is None:
            (folder / name).mkdir(exist_ok=True)
        elif all(files.get(parent, b"") is None for parent in parents):
            (folder / name).write_bytes(content)
    return folder


def make_bundle(samples: int) -> Bundle:
    head = kbt.Head(np.arange(6.0).reshape(2, 3))
    for i in range(samples):
        head.update(np.full(3, 0.1 * i), np.ones(2))
    entry = BundleInput("x", (1, 4), "float32", (0.0,), (1.0,))
    trunk = tiny_onnx.Control().onnx
    return Bundle(trunk=trunk, head=head.to_bytes(), inputs=(entry,), rows=1, d=3, offset=(0.0,), scale=(1.0,))


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    root = tmp_path / "real"
    root.mkdir()
    made = Recorder(root)
    monkeypatch.setattr(_files, "os", made)
    monkeypatch.setattr(_files, "tempfile", made)
    mkdir = Path.mkdir

    def recorded(path: Path, *arguments: Any, **settings: Any) -> None:
        if path.is_relative_to(root):
            made.log.append(("mkdir", made._name(path)))
        mkdir(path, *arguments, **settings)

    monkeypatch.setattr(Path, "mkdir", recorded)
    return made


def outcomes(disk: Disk, log: list[Operation], folder: Path) -> Iterator[tuple[int, Bundle | BundleError]]:
    """(how many operations were done, what is read afterwards), for every way a cut can end."""
    numbers = itertools.count()
    for done in range(len(log) + 1):
        seen = set()
        for files in disk.after_a_cut():
            key = tuple(sorted(files.items(), key=lambda item: item[0]))
            if key in seen:
                continue
            seen.add(key)
            there = restored(files, folder / str(next(numbers)))
            try:
                yield done, bundles.read(there / "b")
            except BundleError as error:
                yield done, error
        if done < len(log):
            disk.do(log[done])


def on_disk(folder: Path) -> dict[str, bytes]:
    return {f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}


def saved_again(recorder: Recorder) -> Disk:
    """A bundle that is safe on the disk; the log holds what saving its next state does."""
    bundles.write(recorder.root / "b", make_bundle(0))
    disk = Disk(on_disk(recorder.root / "b"))
    disk.names["b"] = disk.certain["b"] = Inode(None)
    recorder.log.clear()
    bundles.write(recorder.root / "b", make_bundle(4))
    return disk


def test_a_power_cut_at_any_step_of_a_save_leaves_the_old_or_the_new_state(recorder: Recorder, tmp_path: Path) -> None:
    disk = saved_again(recorder)
    assert [entry[0] for entry in recorder.log] == ["create", "write", "sync", "rename", "sync"]
    old, new = make_bundle(0), make_bundle(4)
    found = list(outcomes(disk, recorder.log, tmp_path))
    assert all(bundle in (old, new) for _, bundle in found), "0 unrecoverable"
    assert {bundle == new for _, bundle in found} == {False, True}
    assert all(bundle == new for done, bundle in found if done == len(recorder.log)), "a save that had ended is lost"
    print(f"{len(found)} ends of a power cut over {len(recorder.log)} steps, 0 unrecoverable")


def test_a_power_cut_at_any_step_of_a_first_save_leaves_no_bundle_or_a_whole_one(
    recorder: Recorder, tmp_path: Path
) -> None:
    new = make_bundle(2)
    bundles.write(recorder.root / "b", new)
    found = list(outcomes(Disk({}), recorder.log, tmp_path))
    for done, bundle in found:
        assert bundle == new or "missing" in str(bundle) or "no such folder" in str(bundle), (done, bundle)
    assert all(bundle == new for done, bundle in found if done == len(recorder.log)), "a save that had ended is lost"
    assert sum(bundle == new for _, bundle in found) >= 2
    print(f"{len(found)} ends of a power cut over {len(recorder.log)} steps, 0 unrecoverable")


@pytest.mark.parametrize(("left_out", "fault"), [(2, "torn"), (4, "lost")])
def test_the_simulation_finds_a_sync_that_is_left_out(
    recorder: Recorder, tmp_path: Path, left_out: int, fault: str
) -> None:
    disk = saved_again(recorder)
    assert recorder.log[left_out][0] == "sync"
    del recorder.log[left_out]
    found = list(outcomes(disk, recorder.log, tmp_path))
    torn = [bundle for _, bundle in found if isinstance(bundle, BundleError)]
    lost = [bundle for done, bundle in found if done == len(recorder.log) and bundle == make_bundle(0)]
    assert torn if fault == "torn" else lost


def test_folders_on_the_way_are_made_and_synced(recorder: Recorder) -> None:
    bundles.write(recorder.root / "a" / "b", replace(make_bundle(1), made={"by": "a test"}))
    assert recorder.log[:4] == [("mkdir", "a"), ("sync", "."), ("mkdir", "a/b"), ("sync", "a")]
