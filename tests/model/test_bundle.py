"""Bundles: a round trip keeps every bit, a killed save breaks nothing, a stranger's bundle is read without trust."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx

import kbt_edge as kbt
from kbt_edge import bundle as bundles
from kbt_edge.bundle import Bundle, BundleInput
from kbt_edge.errors import BundleError
from kbt_edge.trunk import Trunk

FILES = ("trunk.onnx", "head.kbt", "bundle.json")


def make_head(samples: int = 0, **settings: Any) -> kbt.Head:
    rng = np.random.default_rng(5)
    head = kbt.Head(rng.standard_normal((2, 3)), hidden=(7,), prior_var=(1e-3, 0.5), **settings)
    for _ in range(samples):
        head.update(rng.standard_normal(3), rng.standard_normal(2))
    return head


def make_bundle(head: kbt.Head | None = None, **changes: Any) -> Bundle:
    entry = BundleInput("x", (1, 4), "float32", (0.1, -2.0, 1e-7, 0.0), (1.0, 0.3, 1e4, np.pi))
    bundle = Bundle(
        trunk=tiny_onnx.Control().onnx,
        head=(head or make_head()).to_bytes(),
        inputs=(entry,),
        rows=1,
        d=3,
        offset=(0.0, 1 / 3),
        scale=(10.0,),
        made={"by": "a test", "für": "Ω"},
    )
    return replace(bundle, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundles.write(tmp_path / "b", make_bundle())
    return tmp_path / "b"


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


# Saving.


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    for dtype in ("float32", "float64"):
        bundle = make_bundle(make_head(samples=40, dtype=dtype))
        bundles.write(tmp_path / dtype, bundle)
        assert bundles.read(tmp_path / dtype) == bundle
        assert sorted(inodes(tmp_path / dtype)) == sorted(FILES)


def test_only_the_state_is_replaced_and_only_when_it_changed(folder: Path) -> None:
    before = inodes(folder)
    bundles.write(folder, make_bundle())
    assert inodes(folder) == before
    learned = make_bundle(make_head(samples=1), made={"by": "another version"})
    bundles.write(folder, learned)
    after = inodes(folder)
    assert {name for name in FILES if after[name] != before[name]} == {"head.kbt"}
    assert bundles.read(folder) == replace(learned, made=make_bundle().made)


def test_a_lost_trunk_is_written_again(folder: Path) -> None:
    (folder / "trunk.onnx").unlink()
    bundles.write(folder, make_bundle())
    assert bundles.read(folder) == make_bundle()


def test_a_first_save_that_stops_halfway_is_no_bundle_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic = bundles.write_atomic
    for allowed in range(3):
        folder = tmp_path / str(allowed)
        left = iter(range(allowed))

        def stops(path: Any, data: bytes, left: Any = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write_atomic(path, data)

        monkeypatch.setattr(bundles, "write_atomic", stops)
        with pytest.raises(KeyboardInterrupt):
            bundles.write(folder, make_bundle())
        with pytest.raises(BundleError, match=r"bundle\.json is missing"):
            bundles.read(folder)
        monkeypatch.setattr(bundles, "write_atomic", write_atomic)
        bundles.write(folder, make_bundle(make_head(samples=2)))
        assert bundles.read(folder) == make_bundle(make_head(samples=2))


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (make_bundle(trunk=tiny_onnx.Control(seed=1).onnx), r"trunk\.sha256"),
        (make_bundle(make_head(max_rows=2)), r"head\.max_rows is 1, not 2"),
        (make_bundle(make_head(dtype="float64")), r"head\.bytes"),
        (make_bundle(scale=(20.0,)), r"head\.scale\[0\] is 10\.0, not 20\.0"),
        (make_bundle(rows=2), r"trunk\.rows"),
    ],
)
def test_another_bundle_is_never_overwritten(folder: Path, other: Bundle, where: str) -> None:
    before = inodes(folder)
    with pytest.raises(BundleError, match=where):
        bundles.write(folder, other)
    assert inodes(folder) == before
    assert bundles.read(folder) == make_bundle()


def test_a_damaged_description_is_not_overwritten(folder: Path) -> None:
    (folder / "bundle.json").write_text("{")
    with pytest.raises(BundleError, match="not readable as JSON"):
        bundles.write(folder, make_bundle())
    assert (folder / "bundle.json").read_text() == "{"


@pytest.mark.parametrize(
    "wrong",
    [
        {"made": {"by": "two\nlines"}},
        {"made": {"": "no key"}},
        {"made": {str(i): "x" for i in range(65)}},
        {"scale": (0.0,)},
        {"scale": (float("nan"),)},
        {"offset": (1.0, 2.0, 3.0)},
        {"inputs": ()},
        {"d": 4},
        {"head": b"KBTS"},
        {"trunk": b""},
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        bundles.write(tmp_path / "b", replace(make_bundle(), **wrong))
    assert not (tmp_path / "b").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="file"):
        bundles.write(tmp_path / "file" / "b", make_bundle())
    with pytest.raises(BundleError, match="file"):
        bundles.write(tmp_path / "file", make_bundle())


def test_what_a_killed_save_left_behind_is_cleared_away(folder: Path) -> None:
    leftover, foreign = folder / ".head.kbt.abc123.tmp", folder / ".head.kbt.notes"
    leftover.write_bytes(b"half")
    foreign.write_bytes(b"mine")
    assert bundles.read(folder) == make_bundle()
    bundles.write(folder, make_bundle(make_head(samples=1)))
    assert not leftover.exists()
    assert foreign.exists()


def test_two_processes_cannot_save_at_once(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(BundleError, match="another process"):
            bundles.write(folder, make_bundle(make_head(samples=1)))
    finally:
        os.close(handle)
    assert bundles.read(folder) == make_bundle()


@pytest.mark.host_only("kills within 40 ms, hardly one emulated save; the files are the host kernel's anyway")
@pytest.mark.slow("starts and kills 500 saves")
def test_a_save_killed_500_times_leaves_the_old_or_the_new_state() -> None:
    tool = Path(__file__).parents[2] / "tools" / "kill_saves.py"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, str(tool), "--kills", "500", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    print(answer.stdout)
    assert found["lost"] == found["torn"] == 0
    assert found["between"] + found["before_rename"] + found["after_rename"] == found["kills"] == 500
    assert found["ended"] > 0  # the kills came at all moments: after whole saves
    assert found["leftovers"] > 0  # and in the midst of one


# Reading what a stranger sent. Each case changes one thing in a good bundle.


def edited(folder: Path, edit: Callable[[Any], Any]) -> None:
    path = folder / "bundle.json"
    said = json.loads(path.read_text())
    said = edit(said) or said
    path.write_text(json.dumps(said))


def put(*where: Any) -> Callable[[Any], Any]:
    """put("a", "b", 3) sets said["a"]["b"] = 3."""

    def edit(said: Any) -> None:
        *path, last, value = where
        for key in path:
            said = said[key]
        said[last] = value

    return edit


def drop(*where: str) -> Callable[[Any], Any]:
    def edit(said: Any) -> None:
        for key in where[:-1]:
            said = said[key]
        del said[where[-1]]

    return edit


ENTRY = ("trunk", "inputs", 0)

JSON_CASES: list[tuple[Callable[[Any], Any], str]] = [
    (put("format", 2), "its format is 2, newer than the 1 read here"),
    (put("format", 10**40), "its format is a huge integer, newer"),
    (put("format", 0), "format: expected an integer from 1"),
    (put("format", True), "format: expected an integer"),
    (put("format", "1"), "format: expected an integer"),
    (drop("format"), "format: expected an integer from 1, got None"),
    (lambda said: [said], "expected an object, got"),
    (drop("trunk"), "trunk is missing"),
    (put("notes", 1), "notes is not a known field"),
    (put("trunk", None), "trunk: expected an object, got None"),
    (put("trunk", "path", "/etc/passwd"), r"trunk\.path is not a known field"),
    (drop("trunk", "sha256"), r"trunk\.sha256 is missing"),
    (put("trunk", "sha256", "0" * 64), r"says trunk\.sha256 is 0{64}, the files say"),
    (put("trunk", "sha256", "../../trunk"), r"trunk\.sha256: expected the form"),
    (put("trunk", "bytes", -1), r"trunk\.bytes: expected an integer from 1"),
    (put("trunk", "bytes", 10**12), r"trunk\.onnx: expected at most max_bytes"),
    (put("trunk", "bytes", 1.0), r"trunk\.bytes: expected an integer"),
    (put("trunk", "bytes", 7), r"trunk\.onnx: bundle\.json says 7 bytes"),
    (put("trunk", "rows", 0), r"trunk\.rows: expected"),
    (put("trunk", "d", 4), r"head\.widths\[0\]: expected trunk\.d = 4, got 3"),
    (put("trunk", "inputs", []), r"trunk\.inputs: expected a list of 1 to"),
    (put("trunk", "inputs", [1] * 65), r"trunk\.inputs: expected a list of 1 to"),
    (put("trunk", "inputs", {}), r"trunk\.inputs: expected a list"),
    (put(*ENTRY[:2], [None]), r"trunk\.inputs\[0\]: expected an object"),
    (put(*ENTRY, "dtype", "float16"), r"trunk\.inputs\[0\]\.mean is not a known field"),
    (put(*ENTRY, "dtype", "int64"), r"trunk\.inputs\[0\]\.mean is not a known field"),
    (put(*ENTRY, "dtype", []), r"trunk\.inputs\[0\]\.mean is not a known field"),
    (put(*ENTRY, "name", ""), r"trunk\.inputs\[0\]\.name: expected a printable text"),
    (put(*ENTRY, "name", "\x1b[2J"), r"name: expected a printable text .* got '\\x1b\[2J'"),
    (put(*ENTRY, "name", 5), r"trunk\.inputs\[0\]\.name: expected"),
    (put(*ENTRY, "shape", [1, 0]), r"shape\[1\]: expected an integer from 1"),
    (put(*ENTRY, "shape", []), r"shape: expected a list"),
    (put(*ENTRY, "mean", [1.0, 2.0]), r"mean: expected a list of 1 or 4 numbers"),
    (put(*ENTRY, "mean", ["1"]), r"mean\[0\]: expected a number"),
    (put(*ENTRY, "mean", [False]), r"mean\[0\]: expected a number"),
    (put(*ENTRY, "mean", [1e31]), r"mean\[0\]: expected a number from -1e\+30"),
    (put(*ENTRY, "mean", [10**400]), r"mean\[0\]: expected a number .* got a huge integer"),
    (put(*ENTRY, "scale", [0]), r"scale\[0\]: expected a number from 1e-30"),
    (put(*ENTRY, "scale", [-1.0]), r"scale\[0\]: expected a number"),
    (lambda said: said["trunk"]["inputs"].append(said["trunk"]["inputs"][0]), "expected different names"),
    (put("head", []), "head: expected an object"),
    (put("head", "output", "softmax"), r"head\.offset is not a known field"),
    (drop("head", "scale"), r"head\.scale is missing"),
    (put("head", "output", "tanh"), r"head\.offset is not a known field"),
    (put("head", "dtype", "float16"), r"head\.dtype: expected float32 or float64"),
    (put("head", "dtype", "float64"), r"says head\.dtype is float64, the files say float32"),
    (put("head", "widths", [3, 8, 2]), r"says head\.widths\[1\] is 8, the files say 7"),
    (put("head", "widths", [3, 2]), r"says head\.widths is \[3, 2\]"),
    (put("head", "widths", [3] * 10), r"head\.widths: expected a list of 2 to 9"),
    (put("head", "max_rows", 5), r"says head\.max_rows is 5, the files say 1"),
    (put("head", "bytes", 5), r"head\.kbt: bundle\.json says 5 bytes"),
    (put("head", "offset", [1.0, 2.0, 3.0]), r"head\.offset: expected a list of 1 or 2 numbers"),
    (put("made", []), "made: expected an object of at most 64 texts"),
    (put("made", {"k": 3}), r"made\.k: expected a printable text"),
    (put("made", {"k\n": "v"}), "a key of made: expected a printable text"),
    (put("made", {"k": "x" * 1001}), "at most 1000 characters"),
]


@pytest.mark.parametrize(("edit", "message"), JSON_CASES, ids=[message[:50] for _, message in JSON_CASES])
def test_the_description_has_one_form(folder: Path, edit: Callable[[Any], Any], message: str) -> None:
    edited(folder, edit)
    with pytest.raises(BundleError, match=message) as error:
        bundles.read(folder)
    assert len(str(error.value)) < 600
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not readable as JSON"),
        (b"[" * 500_000, "three levels"),
        (b'{"format":1,"format":1}', "a key occurs twice"),
        (b'{"format": NaN}', "NaN is not a number"),
        (b'{"format": -Infinity}', "-Infinity is not a number"),
        (b'{"format": 1e999}', "format: expected an integer"),
        (b'{"format": ' + b"9" * 100_000 + b"}", "not readable as JSON"),
        (b'{"format": "\xff"}', "not readable as JSON"),
        ('{"format": 1}'.encode("utf-16"), "not readable as JSON"),
        (b"\x00" * 1000, "not readable as JSON"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_bytes_that_are_no_description_are_rejected(folder: Path, text: bytes, message: str) -> None:
    (folder / "bundle.json").write_bytes(text)
    with pytest.raises(BundleError, match=message):
        bundles.read(folder)


@pytest.mark.long("600 damaged bundles")
def test_no_random_damage_is_read_as_something_else(folder: Path) -> None:
    """Flip, cut and insert bytes in every file: what is still read is what was written, or the text in ``made``."""
    rng = random.Random(1)
    original = {name: (folder / name).read_bytes() for name in FILES}
    good = make_bundle()
    survived = 0
    for trial in range(600):
        name = FILES[trial % 3]
        data = bytearray(original[name])
        place = rng.randrange(len(data))
        kind = rng.randrange(3)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        else:
            data.insert(place, rng.randrange(256))
        (folder / name).write_bytes(data)
        try:
            found = bundles.read(folder)
        except BundleError:
            pass
        else:
            survived += 1
            assert name == "bundle.json"
            assert (found.trunk, found.head, found.rows, found.d) == (good.trunk, good.head, good.rows, good.d)
        (folder / name).write_bytes(original[name])
    assert 0 < survived < 200  # white space, digits of a scaling and letters of a name are not protected


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=name):
        bundles.read(folder)


def test_a_folder_that_is_none_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="expected the folder of a bundle"):
        bundles.read(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="expected the folder of a bundle"):
        bundles.read(tmp_path / "file")


def test_a_foreign_trunk_of_the_same_size_is_rejected(folder: Path) -> None:
    (folder / "trunk.onnx").write_bytes(tiny_onnx.Control(seed=1).onnx)
    with pytest.raises(BundleError, match=r"trunk\.sha256"):
        bundles.read(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_bundle_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    for target in (outside, Path("..") / "outside"):
        (folder / name).symlink_to(target)
        with pytest.raises(BundleError, match="leads out of the bundle"):
            bundles.read(folder)
        (folder / name).unlink()
    (folder / "inside").mkdir()
    outside.rename(folder / "inside" / name)
    (folder / name).symlink_to(folder / "inside" / name)
    with pytest.raises(BundleError, match="leads out of the bundle"):
        bundles.read(folder)


def test_the_folder_itself_may_be_a_link_and_so_may_a_file_within(folder: Path, tmp_path: Path) -> None:
    (folder / "head.kbt").rename(folder / "state")
    (folder / "head.kbt").symlink_to("state")
    (tmp_path / "link").symlink_to(folder)
    assert bundles.read(tmp_path / "link") == make_bundle()


@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_are_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would block
    with pytest.raises(BundleError, match="not a regular file"):
        bundles.read(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(BundleError, match="not a regular file"):
        bundles.read(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to(name)
    with pytest.raises(BundleError, match=name):
        bundles.read(folder)


def rejected_with_memory_below(limit: int, folder: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match=message):
            bundles.read(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@pytest.mark.parametrize("name", FILES)
def test_a_file_longer_than_declared_is_not_read(folder: Path, name: str) -> None:
    os.truncate(folder / name, 1 << 40)  # sparse: a terabyte of nothing
    rejected_with_memory_below(1 << 20, folder, f"{name}: .* the file has {1 << 40}")


def test_a_declared_terabyte_is_not_read(folder: Path) -> None:
    os.truncate(folder / "trunk.onnx", 1 << 40)
    edited(folder, put("trunk", "bytes", 1 << 40))
    rejected_with_memory_below(1 << 20, folder, r"trunk\.onnx: expected at most max_bytes = \d+, got 1099511627776")
    edited(folder, put("trunk", "bytes", 10**4000))
    rejected_with_memory_below(1 << 20, folder, r"trunk\.onnx: expected at most max_bytes = \d+, got a huge integer")


def test_the_limit_of_a_file_is_an_option(folder: Path) -> None:
    sizes = [(folder / name).stat().st_size for name in FILES[:2]]
    assert bundles.read(folder, max(sizes)) == bundles.read(folder)
    small, large = (FILES[sizes.index(pick(sizes))] for pick in (min, max))
    with pytest.raises(BundleError, match=rf"{large}: .* max_bytes = {max(sizes) - 1}, got {max(sizes)} .*larger"):
        bundles.read(folder, max(sizes) - 1)
    kbt.Model.load(folder, max_bytes=max(sizes))
    for limit in (max(sizes) - 1, 0):
        with pytest.raises(BundleError, match=rf"({large}|{small}): expected at most max_bytes"):
            kbt.Model.load(folder, max_bytes=limit)
    trunk = folder / "trunk.onnx"
    size = trunk.stat().st_size
    for file in (trunk, trunk.read_bytes()):
        with pytest.raises(BundleError, match=f"expected at most {size - 1} bytes, .*max_bytes allows more"):
            Trunk(file, backend="onnxruntime", max_bytes=size - 1)
        assert Trunk(file, backend="onnxruntime", max_bytes=size).d == 3


def test_a_copy_of_a_model_keeps_its_limit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = kbt.Model.load(folder, max_bytes=1 << 30)
    monkeypatch.setattr(Trunk.__init__, "__kwdefaults__", {**Trunk.__init__.__kwdefaults__, "max_bytes": 1})
    with pytest.raises(BundleError, match="expected at most 1 bytes"):
        Trunk(model.bundle().trunk)
    copy.copy(model)


def sealed(blob: bytearray) -> bytes:
    """A state blob with its checksum made right again (csrc/abi/state.hpp)."""
    struct.pack_into("<I", blob, 16, zlib.crc32(blob[24:]))
    return bytes(blob)


def exchange_head(folder: Path, blob: bytes) -> None:
    (folder / "head.kbt").write_bytes(blob)
    edited(folder, put("head", "bytes", len(blob)))


def test_a_head_that_asks_for_gigabytes_is_rejected(folder: Path) -> None:
    blob = bytearray((folder / "head.kbt").read_bytes())
    rows = 24 + 4 * (2 + 9)  # dtype, layers, nine widths, then max_rows
    assert struct.unpack_from("<i", blob, rows) == (1,)
    for many in (20_000, 1 << 20, (1 << 31) - 1):
        struct.pack_into("<i", blob, rows, many)
        exchange_head(folder, sealed(blob))
        edited(folder, put("head", "max_rows", min(many, 1 << 22)))
        rejected_with_memory_below(1 << 20, folder, r"head\.kbt")
    struct.pack_into("<i", blob, rows, 0)
    exchange_head(folder, sealed(blob))
    rejected_with_memory_below(1 << 20, folder, r"head\.kbt: the state blob")


def test_a_head_of_another_kind_is_rejected(folder: Path) -> None:
    blob = (folder / "head.kbt").read_bytes()
    for wrong in (b"not a head", blob[:-1], blob[:40], blob[:4] + b"\x09" + blob[5:]):
        exchange_head(folder, wrong)
        with pytest.raises(BundleError, match=r"head\.kbt"):
            bundles.read(folder)


def test_the_description_is_small_and_says_what_is_there(folder: Path) -> None:
    said = json.loads((folder / "bundle.json").read_text())
    assert said["format"] == bundles.FORMAT == 1
    assert said["trunk"]["sha256"] == hashlib.sha256((folder / "trunk.onnx").read_bytes()).hexdigest()
    assert [said[name]["bytes"] for name in ("trunk", "head")] == [
        (folder / name).stat().st_size for name in ("trunk.onnx", "head.kbt")
    ]
    assert said["head"]["widths"] == [3, 7, 2]
    again = copy.deepcopy(said)
    bundles.write(folder, make_bundle(make_head(samples=30)))
    assert json.loads((folder / "bundle.json").read_text()) == again


# Finding.


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped bundles: cartpole and tokens. The working directory is an empty folder."""
    folder = tmp_path / "package" / "bundles"
    monkeypatch.setattr(bundles, "SHIPPED", folder)
    for name in ("cartpole", "tokens"):
        bundles.write(folder / name, make_bundle())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_a_bare_name_finds_the_shipped_bundle_or_the_one_in_the_working_directory(shipped: Path) -> None:
    Path("cartpole").mkdir()  # a folder of that name, but no bundle
    assert bundles.find("cartpole") == bundles.find("kbt_edge:cartpole") == shipped / "cartpole"
    assert bundles.find("./cartpole") == Path("./cartpole")
    bundles.write("arm", make_bundle())
    assert bundles.find("arm") == Path("arm")
    with pytest.raises(
        BundleError, match=r"acrobot: expected a folder, or a bundle of the package \(cartpole, tokens\)"
    ):
        bundles.find("acrobot")
    for escape in ("..", ".", "../bundles/cartpole", str(shipped / "cartpole")):
        assert bundles.find(escape) == Path(escape)


def test_a_name_that_means_two_bundles_is_rejected(shipped: Path) -> None:
    bundles.write("cartpole", make_bundle())
    with pytest.raises(BundleError, match=r'cartpole: .*write "\./cartpole" for .* or "kbt_edge:cartpole" for'):
        bundles.find("cartpole")
    assert bundles.find("./cartpole") == bundles.find(Path("cartpole")) == Path("cartpole")
    assert bundles.find("kbt_edge:cartpole") == shipped / "cartpole"


@pytest.mark.parametrize("name", ["arm", "", "..", "../bundles/cartpole", "cartpole/", "*", "CARTPOLE"])
def test_the_prefix_finds_shipped_bundles_only(shipped: Path, name: str) -> None:
    bundles.write("arm", make_bundle())
    with pytest.raises(BundleError, match=r"expected a bundle of the package \(cartpole, tokens\)"):
        bundles.find(f"kbt_edge:{name}")


def test_a_head_for_fewer_rows_than_the_trunk_has_is_rejected(folder: Path) -> None:
    edited(folder, put("trunk", "rows", 2))
    with pytest.raises(BundleError, match=r"head\.max_rows: expected at least trunk\.rows = 2, got 1"):
        bundles.read(folder)
