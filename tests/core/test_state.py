"""The state blob: documented little-endian bytes that carry everything learned, and reject to carry anything else."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import CONFIG, HEADER, library, parse_state

import kbt_edge as kbt
from kbt_edge import BundleError
from kbt_edge.flight import FlightLog

KINDS = [("gaussian", "fuse", "constant"), ("gaussian", "fuse", "adaptive"), ("gaussian", "replace", "constant"),
         ("softmax", "fuse", "constant"), ("softmax", "fuse", "multinomial")]  # fmt: skip
GRID = [
    {"output": output, "rule": rule, "noise": noise, "covariance": covariance, "hidden": hidden, "dtype": dtype}
    for (output, rule, noise), covariance, hidden, dtype in itertools.product(
        KINDS, ("full", "neuron", "diagonal"), ((), (5,), (4, 9)), ("float32", "float64")
    )
]


def name(settings: dict[str, Any]) -> str:
    return "-".join(map(str, settings.values()))


def make(settings: dict[str, Any] | None = None, samples: int = 8) -> kbt.Head:
    """A head with two inputs and two outputs that has learned ``samples`` rows."""
    settings = {"hidden": (5,), "forgetting": 0.99, "input_var": 1e-3, "gate": 1e6, "max_rows": 2, **(settings or {})}
    settings = {"drift": 0.0, **settings}
    head = kbt.Head([[1.0, -0.5], [0.25, 2.0]], [0.5, -0.5], prior_var=0.1, noise_var=0.2, seed=3, **settings)
    learn(head, samples)
    return head


def learn(head: kbt.Head, samples: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(samples):
        h = rng.normal(size=(2, 2))
        head.update(h, rng.integers(0, 2, 2) if head.config["output"] == "softmax" else rng.normal(size=(2, 2)))


SMALL = {"hidden": (), "covariance": "full", "noise": "constant"}


# ---- round trip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", GRID, ids=name)
def test_a_reloaded_head_has_the_same_bits_and_goes_on_learning_the_same_bits(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    head = make(settings)
    head.save(tmp_path / "head.kbt")
    twins = [kbt.Head.from_bytes(head.to_bytes()), kbt.Head.load(tmp_path / "head.kbt"), make(settings, samples=0)]
    twins[2].restore(head.to_bytes())
    learn(head, 5, seed=1)
    for twin in twins:
        assert twin.config == head.config
        learn(twin, 5, seed=1)
        assert twin.to_bytes() == head.to_bytes()
        assert twin.samples == head.samples == 13


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copies_and_pickles_are_independent_heads(clone: Callable[[kbt.Head], kbt.Head]) -> None:
    head = make()
    before = head.to_bytes()
    other = clone(head)
    assert other.to_bytes() == before
    learn(other, 1)
    assert other.to_bytes() != before
    assert head.to_bytes() == before


def test_a_noise_matrix_survives() -> None:
    R = np.array([[0.5, 0.2], [0.2, 0.3]], np.float32)
    head = kbt.Head(np.eye(2), drift=0.0, noise_var=R)
    loaded = kbt.Head.from_bytes(head.to_bytes())
    np.testing.assert_array_equal(loaded.noise_var, R)
    assert loaded.to_bytes() == head.to_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_is_a_blob(kind: type) -> None:
    head = make()
    assert kbt.Head.from_bytes(kind(head.to_bytes())).to_bytes() == head.to_bytes()


# ---- layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", GRID, ids=name)
def test_the_bytes_are_little_endian_and_laid_out_as_documented(settings: dict[str, Any]) -> None:
    head = make(settings)
    blob = head.to_bytes()
    state = parse_state(blob)
    assert (state.version, state.length) == (2, len(blob))
    assert state.crc == zlib.crc32(blob[24:])
    assert state.samples == head.samples

    layers, widths = len(head.layers), head.config["widths"]
    assert state.config == {
        "dtype": ["float32", "float64"].index(settings["dtype"]),
        "layers": layers,
        "widths": [*widths, *[0] * (9 - len(widths))],
        "max_rows": 2,
        "output": ["gaussian", "softmax"].index(settings["output"]),
        "covariance": ["full", "neuron", "diagonal"].index(settings["covariance"]),
        "rule": ["fuse", "replace"].index(settings["rule"]),
        "noise": ["constant", "adaptive", "multinomial"].index(settings["noise"]),
        "relu_order": 2,
        "softmax_order": 0,
        "prior_var": [0.1] * layers + [0.0] * (8 - layers),
        "noise_var": float(np.dtype(settings["dtype"]).type(0.2)),
        "input_var": 1e-3,
        "forgetting": 0.99,
        "gate": 1e6,
        "drift": 0.0,
    }
    np.testing.assert_array_equal(state.noise, head.noise_var)
    for found, layer in zip(state.layers, head.layers, strict=True):
        np.testing.assert_array_equal(found.mean, layer.mean)
        S = found.U @ (found.D[:, :, None] * found.U.transpose(0, 2, 1))
        if settings["covariance"] == "diagonal":
            S = found.D
        np.testing.assert_allclose(S.reshape(layer.cov.shape), layer.cov, rtol=0, atol=1e-6 * np.abs(S).max())


# ---- damage --------------------------------------------------------------------------------------------------------


def rejected(blob: bytes, match: str | None = None) -> None:
    """Rejected by both doors, and the head that should have taken it is unmoved."""
    head = make(SMALL)
    before = head.to_bytes()
    with pytest.raises(BundleError, match=match):
        kbt.Head.from_bytes(blob)
    with pytest.raises(BundleError):
        head.restore(blob)
    assert head.to_bytes() == before


@pytest.mark.long("tries every position of a state blob")
def test_every_truncation_is_rejected() -> None:
    blob = make(SMALL).to_bytes()
    for length in range(len(blob)):
        rejected(blob[:length])


@pytest.mark.long("tries every position of a state blob")
def test_every_flipped_bit_is_rejected() -> None:
    blob = make(SMALL).to_bytes()
    for position in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[position] ^= 1 << bit
            rejected(bytes(damaged))


@pytest.mark.long("tries every position of a state blob")
def test_every_byte_turned_to_00_or_ff_is_rejected() -> None:
    blob = make(SMALL).to_bytes()
    for position, value in itertools.product(range(len(blob)), (0x00, 0xFF)):
        if blob[position] != value:
            rejected(blob[:position] + bytes([value]) + blob[position + 1 :])


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 64, b"KBTS"])
def test_what_follows_the_end_is_rejected(tail: bytes) -> None:
    rejected(make(SMALL).to_bytes() + tail)


def test_a_newer_format_says_so() -> None:
    blob = bytearray(make(SMALL).to_bytes())
    blob[4:8] = (4).to_bytes(4, "little")
    rejected(bytes(blob), match="newer")


# ---- intact, but impossible ----------------------------------------------------------------------------------------


def sealed(body: bytes, version: int = 2) -> bytes:
    """A blob with a valid header and CRC around any body."""
    return HEADER.pack(b"KBTS", version, HEADER.size + len(body), zlib.crc32(body), 0) + body


# Offsets in the body of a full one-layer float32 head with two inputs and two outputs: M = 6 weights.
SAMPLES = CONFIG.size
NOISE = SAMPLES + 12
MEAN = NOISE + 2 * 4
VARIANCE = MEAN + 6 * 4
CORRELATION = VARIANCE + 6 * 4


def with_samples(blob: bytes, samples: int) -> bytes:
    body = bytearray(blob[HEADER.size :])
    struct.pack_into("<Q", body, SAMPLES, samples)
    return sealed(bytes(body))


def with_real(at: int, value: float) -> bytes:
    body = bytearray(make(SMALL).to_bytes()[HEADER.size :])
    struct.pack_into("<f", body, at, value)
    return sealed(bytes(body))


MANY = 10**6


@pytest.mark.parametrize("samples", [2**64 - 1, 2**64 - 2, 2**64 - 10, 2**64 - 11, 2**63])
@pytest.mark.parametrize("settings", [*GRID[::5], {**SMALL, "noise": "adaptive"}], ids=name)
def test_a_blob_of_any_number_of_samples_learns_as_one_of_a_million_does(
    settings: dict[str, Any], samples: int
) -> None:
    blob = make(settings).to_bytes()
    head, other = (kbt.Head.from_bytes(with_samples(blob, count)) for count in (samples, MANY))
    head.record(64)
    for each in (head, other):
        learn(each, 20, seed=1)
    assert with_samples(head.to_bytes(), 0) == with_samples(other.to_bytes(), 0) != with_samples(blob, 0)
    assert other.samples == MANY + 20
    assert head.samples == min(samples + 20, 2**64 - 1)
    assert kbt.Head.from_bytes(head.to_bytes()).to_bytes() == head.to_bytes()
    assert FlightLog(head.flight_log()).replay().reproduced


def test_sealing_an_unchanged_body_gives_the_blob_itself() -> None:
    blob = make(SMALL).to_bytes()
    assert sealed(blob[HEADER.size :]) == blob
    assert len(blob) == HEADER.size + CORRELATION + 15 * 4


@pytest.mark.parametrize(
    "at", [MEAN, MEAN + 20, VARIANCE, VARIANCE + 20, CORRELATION, CORRELATION + 56, NOISE, NOISE + 4]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_rejected(at: int, value: float) -> None:
    rejected(with_real(at, value))


@pytest.mark.parametrize("at", [VARIANCE, VARIANCE + 20, NOISE, NOISE + 4])
def test_a_negative_variance_is_rejected(at: int) -> None:
    rejected(with_real(at, -1e-30))


def test_a_noise_below_the_floor_is_rejected() -> None:
    rejected(with_real(NOISE, 0.0))


# float32 numbers from the log weights and from the ages of a watchful head 2 -> 1 to the end of its blob.
WATCHFUL = {"members": ({}, 44, 36), "bank": ({"hidden": (4,)}, 38, 22)}


@pytest.mark.parametrize(("settings", "weights", "ages"), WATCHFUL.values(), ids=WATCHFUL)
def test_log_weights_and_ages_that_no_head_can_reach_are_rejected(
    settings: dict[str, Any], weights: int, ages: int
) -> None:
    head = kbt.Head(np.zeros((1, 2)), **settings)
    for i in range(5):
        head.update([0.5, float(i)], [1.0])
    body = head.to_bytes()[HEADER.size :]

    def changed(numbers: int, value: float) -> bytes:
        return sealed(body[: -4 * numbers] + struct.pack("<f", value) + body[4 - 4 * numbers :])

    for numbers, reachable, wrong in (
        (weights, (-8.0, -1e-3, 0.0), (0.5, 1e4, 1e34, -21.0, -1e34)),
        (ages, (0.0, 7.0, 1000.0), (-1.0, 1001.0, 8e34)),
    ):
        for value in reachable:
            kbt.Head.from_bytes(changed(numbers, value)).update([0.5, 1.0], [1.0])
        for value in wrong:
            rejected(changed(numbers, value))


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 3, 4, 5, 2**31 - 1])
def test_a_wrong_number_of_noise_values_is_rejected(count: int) -> None:
    body = bytearray(make(SMALL).to_bytes()[HEADER.size :])
    struct.pack_into("<i", body, SAMPLES + 8, count)
    rejected(sealed(bytes(body)))


@pytest.mark.parametrize("change", [-4, -1, 1, 4, 24])
def test_a_body_of_the_wrong_length_is_rejected(change: int) -> None:
    body = make(SMALL).to_bytes()[HEADER.size :]
    rejected(sealed(body[:change] if change < 0 else body + bytes(change)))
    for length in (0, 1, CONFIG.size - 1, CONFIG.size, SAMPLES + 8):
        rejected(sealed(body[:length]))


FIELDS = ["dtype", "layers", *[f"widths[{i}]" for i in range(9)], "max_rows", "output", "covariance", "rule", "noise",
          "relu_order", "softmax_order", *[f"prior_var[{i}]" for i in range(8)], "noise_var", "input_var", "forgetting",
          "gate", "drift"]  # fmt: skip
BAD_CONFIG = [
    *itertools.product(FIELDS[:18], [-1, -(2**31), 99, 2**20 + 1, 2**31 - 1]),
    *itertools.product(["dtype", "output", "covariance", "rule", "noise"], [3, 256]),
    *itertools.product(["layers", "max_rows", "relu_order", "widths[0]", "widths[1]"], [0]),
    *itertools.product(["prior_var[0]", *FIELDS[26:]], [float("nan"), float("inf"), -1.5]),
    ("prior_var[0]", 0.0),
    ("forgetting", 0.0),
    ("forgetting", 1.5),
    ("widths[2]", 7),  # behind the last layer
    ("prior_var[1]", 1.0),
]


@pytest.mark.parametrize(("field", "value"), [case for case in BAD_CONFIG if case != ("max_rows", 99)])  # 99 is fine
def test_a_configuration_no_head_can_have_is_rejected(field: str, value: float) -> None:
    body = make(SMALL).to_bytes()[HEADER.size :]
    numbers = list(CONFIG.unpack_from(body))
    numbers[FIELDS.index(field)] = value
    rejected(sealed(CONFIG.pack(*numbers) + body[CONFIG.size :]))
    numbers[FIELDS.index("covariance")] = 3  # a format of its own, which depends on the widths
    for version in (2, 3):
        rejected(sealed(CONFIG.pack(*numbers) + body[CONFIG.size :], version))


@contextlib.contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Lets the process grow by no more than ``more`` bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to know the size of the process")
@pytest.mark.parametrize("covariance", [0, 1, 2])
@pytest.mark.parametrize(
    ("widths", "max_rows"),
    [
        ([2**20, 2**20], 1),
        ([2**20, 2**20, 2**20, 2**20, 2], 2**20),
        ([2, 2], 2**20),
        ([2**13, 2**13], 1),
        ([2**20, 2], 1),
        ([2, 2**20, 2], 1),
    ],
    ids=str,
)
def test_an_absurd_size_is_rejected_before_memory_is_asked_for(
    widths: list[int], max_rows: int, covariance: int
) -> None:
    body = make(SMALL).to_bytes()[HEADER.size :]
    numbers = list(CONFIG.unpack_from(body))
    numbers[1] = len(widths) - 1
    numbers[2:11] = [*widths, *[0] * (9 - len(widths))]
    numbers[11], numbers[13] = max_rows, covariance
    numbers[18:26] = [0.1] * (len(widths) - 1) + [0.0] * (9 - len(widths))
    blob = sealed(CONFIG.pack(*numbers) + body[CONFIG.size :])
    with little_memory(1 << 25):  # what the smallest of these would need is more
        rejected(blob)
    if widths != [2, 2]:  # rejected by its length, before the values are read
        ffi, lib = library()
        assert lib.kbt_state_config(blob, len(blob), ffi.new("kbt_config *")) == lib.KBT_E_BLOB_VALUE


def test_a_blob_fits_only_the_configuration_it_came_from() -> None:
    blobs = {name(settings): make(settings, samples=0).to_bytes() for settings in GRID}
    assert len(set(blobs.values())) == len(GRID)
    head = make(GRID[0])
    before = head.to_bytes()
    for other, blob in blobs.items():
        if other != name(GRID[0]):
            with pytest.raises(BundleError, match="configuration"):
                head.restore(blob)
            assert head.to_bytes() == before


# ---- files ---------------------------------------------------------------------------------------------------------


class PowerCutError(OSError):
    """Stands for whatever stops a save half-way."""


def test_save_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "head.kbt"
    path.write_bytes(b"old")
    head = make()
    head.save(path)
    assert path.read_bytes() == head.to_bytes()
    assert os.listdir(tmp_path) == ["head.kbt"]


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [PowerCutError("no space"), KeyboardInterrupt()], ids=["os", "interrupt"])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "head.kbt"
    old, new = make(samples=1), make(samples=2)
    old.save(path)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(BundleError if isinstance(error, OSError) else KeyboardInterrupt):
            new.save(path)
    assert path.read_bytes() == old.to_bytes()
    assert os.listdir(tmp_path) == ["head.kbt"]
    new.save(path)
    assert kbt.Head.load(path).to_bytes() == new.to_bytes()


def test_the_file_is_on_disk_before_it_has_its_name_and_the_name_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        steps.append("fsync " + ("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"))
        fsync(descriptor)

    def logged_replace(source: str, target: str) -> None:
        assert Path(source).parent == tmp_path
        assert Path(source).read_bytes() == head.to_bytes()
        steps.append("rename")
        replace(source, target)

    head = make()
    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    head.save(tmp_path / "head.kbt")
    assert steps == ["fsync file", "rename", "fsync folder"]


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head.kbt"
    old = make(samples=1)
    old.save(path)
    real = os.fdopen

    def full_disk(*arguments: Any, **options: Any) -> Any:
        with contextlib.closing(real(*arguments, **options)):
            raise PowerCutError("no space left")

    monkeypatch.setattr(os, "fdopen", full_disk)
    with pytest.raises(BundleError, match=r"head\.kbt"):
        make(samples=2).save(path)
    assert path.read_bytes() == old.to_bytes()
    assert os.listdir(tmp_path) == ["head.kbt"]
