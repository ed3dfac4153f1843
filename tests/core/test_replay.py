"""Flight logs: every call replays to the same bits, here and on other machines, and damaged logs are rejected."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import CSRC, ROOT, TESTS, build_core, library, run
from command import call

import kbt_edge as kbt
from kbt_edge import _core
from kbt_edge.errors import KbtError
from kbt_edge.flight import KINDS, FlightLog

LOGS = TESTS / "logs"
EXPECTED = json.loads((LOGS / "expected.json").read_text())
D = 3
ffi, C = library()


# ---- the recorded logs -----------------------------------------------------------------------------------------------


def test_every_log_has_its_expectation_and_its_history() -> None:
    assert len(EXPECTED["logs"]) >= 6
    assert {path.stem for path in LOGS.glob("*.kbtf")} == EXPECTED["logs"].keys()
    for name, expected in EXPECTED["logs"].items():
        last = [entry for entry in EXPECTED["history"] if entry["log"] == name][-1]
        assert last["after"] == expected["state"]
        assert last["reason"]


@pytest.mark.parametrize("name", EXPECTED["logs"])
def test_a_recorded_log_replays_to_the_expected_state(name: str) -> None:
    """A change of the core that alters a bit of what is learned shows here. If it is meant: tools/record_logs.py."""
    expected, data = EXPECTED["logs"][name], (LOGS / f"{name}.kbtf").read_bytes()
    assert f"{zlib.crc32(data):08x}" == expected["file_crc32"], "the log was replaced without its expectation"
    log = FlightLog(data)
    replay = log.replay()
    assert replay.difference is None
    assert replay.reproduced
    assert (len(log), log.state_hash, replay.state_hash) == (expected["records"], expected["state"], expected["state"])


@pytest.mark.host_only("cross compilers of a PC; on a board the other tests run natively")
@pytest.mark.slow("cross-compiles the core")
def test_the_logs_replay_to_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    cxx, cc, qemu = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
    missing = [tool for tool in (cxx, cc, qemu) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    sources = ("kbt", "recorder", "replay")
    objects = [build_core(cxx, ("-O0",), tmp_path / f"{name}.o", f"abi/{name}.cpp") for name in sources]
    options = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-static", f"-I{CSRC}/include")
    run(cc, *options, TESTS / "replay_log.c", *objects, "-lm", "-o", tmp_path / "replay_log")
    files = [LOGS / f"{name}.kbtf" for name in EXPECTED["logs"]]
    told = run(qemu, tmp_path / "replay_log", *files, timeout=300).split()
    assert told[1::3] == [expected["state"] for expected in EXPECTED["logs"].values()]
    assert set(told[2::3]) == {"1"}


@pytest.mark.host_only("writes where the tests lie")
def test_expectations_are_not_replaced_without_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools/record_logs.py", folder / "tools")
    shutil.copytree(LOGS, folder / "tests/logs")
    path = folder / "tests/logs/expected.json"
    changed = json.loads(path.read_text())
    changed["logs"]["drift"]["state"] = "0" * 16
    path.write_text(json.dumps(changed))

    def record(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(folder / "tools/record_logs.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    before = path.read_bytes()
    assert record("drift").returncode == 1
    assert record("drift", "--accept-change", "because").returncode == 2
    assert path.read_bytes() == before
    assert record("drift", "--accept-change", "the rounding has changed").returncode == 0
    told = json.loads(path.read_text())
    assert told["logs"]["drift"] == EXPECTED["logs"]["drift"]
    assert told["history"][-1]["reason"] == "the rounding has changed"
    assert told["history"][-1]["before"] == "0" * 16


# ---- recording -------------------------------------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "shared": {"noise": "adaptive", "drift": 0.0},
    "softmax, shared": {"output": "softmax", "covariance": "shared"},
    "neuron": {"hidden": (7,), "prior_var": (1e-3, 0.5), "noise_var": 1e-2},
    "full": {"covariance": "full", "noise_var": [[0.02, 0.01], [0.01, 0.03]]},
    "diagonal, adaptive": {"covariance": "diagonal", "noise": "adaptive", "forgetting": 0.98},
    "gate": {"gate": 9.0, "noise_var": 0.1},
    "replace": {"rule": "replace", "noise_var": 0.5},
    "softmax": {"output": "softmax"},
    "softmax, constant": {"output": "softmax", "noise_var": 0.1, "softmax_order": 2},
    "float64": {"hidden": (6,), "dtype": "float64", "input_var": 1e-3, "prior_var": (1e-3, 0.5)},
}


def feed(head: kbt.Head, steps: int, seed: int = 0) -> None:
    """Every way to teach a head, and some that are rejected."""
    rng = np.random.default_rng(seed)
    dtype, softmax = head.config["dtype"], head.config["output"] == "softmax"
    for step in range(steps):
        rows = 1 + step % 2
        h = rng.normal(size=(rows, D)).astype(dtype)
        y = rng.dirichlet([1, 1], size=rows).astype(dtype) if softmax else rng.normal(size=(rows, 2)).astype(dtype)
        if softmax and step % 3:
            y = rng.integers(0, 2, size=rows).astype(np.int32)
        noise = np.array([0.3, 0.2], dtype) if step % 5 == 0 and head.config["noise"] != "multinomial" else None
        if step % 4 == 0:
            head.predict(h)
            if step % 8 == 0:
                with pytest.raises(kbt.KbtError):
                    head.observe(np.full((rows, 2), np.nan, dtype))
            head.observe(y, noise)
        else:
            head.update(h, y, noise)
        if step % 7 == 0:
            with pytest.raises(kbt.NumericsError):
                head.update(np.full((rows, D), np.inf, dtype), y)
        if step % 11 == 0 and head.config["noise"] == "constant":
            assert head.core.set_noise(np.array([0.1 + 0.01 * step], dtype)) == 0


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(("samples", "steps"), [(1000, 40), (20, 40), (7, 61), (2, 9)])
def test_whatever_comes_replays_to_the_same_bits(settings: dict[str, Any], samples: int, steps: int) -> None:
    head, unseen = (kbt.Head(np.ones((2, D)), **settings, max_rows=2) for _ in range(2))
    feed(head, 5)
    feed(unseen, 5)
    head.record(samples)
    feed(head, steps, seed=1)
    feed(unseen, steps, seed=1)
    assert head.to_bytes() == unseen.to_bytes()  # recording changes nothing
    assert head.health() == unseen.health()
    log = FlightLog(head.flight_log())
    assert samples // 2 <= len(log) + (log.before == 0) * samples
    assert len(log) <= samples + 1
    replay = log.replay()
    assert replay.difference is None
    assert replay.reproduced
    assert replay.head.to_bytes() == head.to_bytes()
    assert sum(replay.statuses.values()) == len(log)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e20), ("float64", 1e155)])
def test_a_log_of_a_head_that_has_rejected_a_prediction_replays_to_the_same_bits(dtype: str, size: float) -> None:
    """Predictions are not recorded: a rejected one must not change what comes after it."""
    rng = np.random.default_rng(5)
    head = kbt.Head(
        rng.normal(size=(5, 2)), hidden=(4, 8), covariance="full", prior_var=(1e-6, 1e-6, 10.0), dtype=dtype
    )
    head.record(50)
    for step in range(40):
        if step % 4 == 3:
            with pytest.raises(KbtError):
                head.predict([size, size])
        with contextlib.suppress(KbtError):
            head.update(rng.normal(size=2), rng.normal(size=5))
    log = FlightLog(head.flight_log())
    assert log.replay().reproduced
    assert log.records["status"].tolist() == [0] * 40


def test_the_records_say_what_came() -> None:
    head = kbt.Head(np.ones((2, D)), drift=0.0, noise_var=0.1, max_rows=2, gate=100.0)
    head.record(10)
    h = np.arange(6, dtype=np.float32).reshape(2, D)
    head.update(h[0], [1.0, 2.0], noise_var=0.5)
    head.predict(h)
    head.observe([[1.0, 2.0], [3.0, 4.0]])
    head.update(h[0], [1e4, 0.0])
    with pytest.raises(kbt.NumericsError):
        head.update(h[1], np.array([np.nan, 1.0], np.float32))
    log = FlightLog(head.flight_log())
    r = log.records
    assert [KINDS[kind] for kind in r["kind"]] == ["update", "observe", "update", "update"]
    assert r["status"].tolist() == [0, 0, 1, 7]
    assert r["samples"].tolist() == [1, 2, 2, 2]
    np.testing.assert_array_equal(r["h"][0], [h[0], np.zeros(D)])
    np.testing.assert_array_equal(r["h"][1], h)
    np.testing.assert_array_equal(r["y"][1], [[1, 2], [3, 4]])
    assert r["noise"][0][0] == 0.5
    assert np.isnan(r["y"][3][0][0])
    assert log.replay().statuses == {"ok": 2, "gated": 1, "an input holds NaN or Inf": 1}


def test_labels_are_kept_as_they_came() -> None:
    head = kbt.Head(np.ones((3, D)), output="softmax", max_rows=2)
    head.record(10)
    head.update(np.eye(D)[:2], np.array([2, 1], np.int32))
    assert FlightLog(head.flight_log()).labels().tolist() == [[2, 1]]


def test_a_restored_state_begins_the_recording_anew() -> None:
    head = kbt.Head(np.ones((2, D)), drift=0.0, noise_var=0.1, covariance="neuron", max_rows=2)
    blob = head.to_bytes()
    head.record(10)
    feed(head, 30)
    head.restore(blob)
    log = FlightLog(head.flight_log())
    assert (len(log), log.base) == (0, blob)
    assert log.before > 30
    feed(head, 3)
    assert FlightLog(head.flight_log()).replay().reproduced


def test_without_a_recording_there_is_no_log() -> None:
    head = kbt.Head(np.ones((1, D)))
    with pytest.raises(kbt.RangeError, match="record"):
        head.flight_log()
    head.record(4)
    head.stop_recording()
    with pytest.raises(kbt.RangeError, match="record"):
        head.flight_log()
    head.update(np.ones(D), [1.0])
    for bad in (1, 0, -5, 1 << 31):
        with pytest.raises(kbt.RangeError, match=r"samples: expected .*, got"):
            head.record(bad)


def place_of_h(log: bytes, record: int) -> int:
    info = _core.flight_info(log)
    assert isinstance(info, tuple)
    records_offset, record_bytes = info[6:8]
    return records_offset + record * record_bytes + FlightLog(log).records.dtype.fields["h"][1]


def test_a_difference_is_found_where_it_is() -> None:
    """The same records on another state: the first sample already comes out differently."""
    head = kbt.Head(np.ones((1, D)), drift=0.0, noise_var=0.1)
    head.record(100)
    for step in range(10):
        head.update(np.eye(D)[step % D], [1.0 * step])
    log = bytearray(head.flight_log())
    struct.pack_into("<f", log, place_of_h(bytes(log), 4), 0.25)
    replay = FlightLog(sealed(bytes(log))).replay()
    assert not replay.reproduced
    assert replay.difference is not None
    assert replay.difference.record == 4
    assert replay.difference.kind == "update"


# ---- the C ABI -------------------------------------------------------------------------------------------------------


def test_calls_with_null_and_impossible_rows_are_recorded_and_rejected_again() -> None:
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, D, 2)
    cfg.max_rows, cfg.covariance = 2, C.KBT_NEURON
    arena = Aligned(C.kbt_arena_bytes(cfg))
    slot, flight = ffi.new("kbt_head **"), ffi.new("kbt_flight **")
    assert C.kbt_init(cfg, arena.start, arena.size, slot) == C.KBT_OK
    head, memory = slot[0], Aligned(C.kbt_flight_bytes(cfg, 100))
    assert C.kbt_flight_init(head, memory.start, memory.size, 100, flight) == C.KBT_OK
    h, y, noise = ffi.new("float[6]", [1, 2, 3]), ffi.new("float[4]", [1, 2]), ffi.new("float[4]", [1, 2, 3, 4])
    labels, mean = ffi.new("int32_t[2]"), ffi.new("float[4]")
    huge = ffi.new("float[6]", [1e38, 1e38, 1e38])
    statuses = [
        C.kbt_update(head, ffi.NULL, 1, y, ffi.NULL, 0, ffi.NULL),
        C.kbt_update(head, h, 1, ffi.NULL, ffi.NULL, 0, ffi.NULL),
        C.kbt_update(head, h, 3, y, ffi.NULL, 0, ffi.NULL),
        C.kbt_update(head, h, -(2**31), y, ffi.NULL, 0, ffi.NULL),
        C.kbt_update(head, h, 1, y, ffi.NULL, 2, ffi.NULL),
        C.kbt_update(head, h, 1, y, noise, 3, ffi.NULL),
        C.kbt_update(head, h, 1, y, noise, 0, ffi.NULL),
        C.kbt_update(head, h, 1, y, noise, 4, ffi.NULL),  # not symmetric
        C.kbt_update_labels(head, h, 1, labels, ffi.NULL, 0, ffi.NULL),
        C.kbt_observe(head, y, ffi.NULL, 0, ffi.NULL),
        C.kbt_update(head, h, 2, y, noise, 2, ffi.NULL),
    ]
    C.kbt_predict(head, h, 1, mean, ffi.NULL, ffi.NULL)
    statuses.append(C.kbt_observe(head, ffi.NULL, ffi.NULL, 0, ffi.NULL))
    assert C.kbt_predict(head, huge, 1, mean, ffi.NULL, ffi.NULL) == C.KBT_E_RANGE  # the prediction waits all the same
    statuses.append(C.kbt_observe(head, y, ffi.NULL, 0, ffi.NULL))
    statuses.append(C.kbt_observe(head, y, ffi.NULL, 0, ffi.NULL))
    statuses.append(C.kbt_update(head, h, 1, y, ffi.NULL, 0, ffi.NULL))
    assert statuses == [2, 2, 6, 6, 9, 9, 9, 9, 10, 11, 0, 2, 0, 11, 0]

    pieces: list[bytes] = []
    sink = ffi.callback("kbt_sink", lambda _, data, count: pieces.append(bytes(ffi.buffer(data, count))))
    assert C.kbt_flight_log(flight[0], sink, ffi.NULL) == C.KBT_OK
    log = b"".join(pieces)
    assert len(log) == C.kbt_flight_log_size(flight[0])
    assert FlightLog(log).records["status"].tolist() == statuses
    assert FlightLog(log).replay().reproduced
    assert memory.intact()
    assert arena.intact()
    assert C.kbt_flight_stop(head) == C.KBT_OK
    assert C.kbt_flight_log(flight[0], sink, ffi.NULL) == C.KBT_E_ORDER


def test_a_recorder_needs_its_room() -> None:
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, D, 2)
    arena = Aligned(C.kbt_arena_bytes(cfg))
    slot, flight = ffi.new("kbt_head **"), ffi.new("kbt_flight **")
    assert C.kbt_init(cfg, arena.start, arena.size, slot) == C.KBT_OK
    memory = Aligned(C.kbt_flight_bytes(cfg, 10) + 64)
    needed = memory.size - 64
    assert C.kbt_flight_init(slot[0], memory.start, needed - 1, 10, flight) == C.KBT_E_SIZE
    assert C.kbt_flight_init(slot[0], memory.start + 8, needed, 10, flight) == C.KBT_E_ALIGN
    assert C.kbt_flight_init(slot[0], memory.start, needed, 1, flight) == C.KBT_E_SIZE
    assert C.kbt_flight_init(slot[0], ffi.NULL, needed, 10, flight) == C.KBT_E_NULL
    assert C.kbt_flight_bytes(cfg, 1) == C.kbt_flight_bytes(ffi.NULL, 10) == C.kbt_flight_log_size(ffi.NULL) == 0
    assert C.kbt_flight_init(ffi.NULL, memory.start, needed, 10, flight) == C.KBT_E_NULL
    assert C.kbt_flight_init(slot[0], memory.start, needed, 10, ffi.NULL) == C.KBT_E_NULL
    assert C.kbt_flight_stop(ffi.NULL) == C.kbt_flight_log(ffi.NULL, ffi.NULL, ffi.NULL) == C.KBT_E_NULL
    assert C.kbt_flight_bytes(cfg, (1 << 30) + 1) == 0
    cfg.max_rows = 1 << 20
    cfg.widths[0] = 1 << 20
    assert C.kbt_flight_bytes(cfg, 10) == 0


def test_a_record_that_no_memory_could_hold_is_rejected() -> None:
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, 1 << 14, 1)
    cfg.covariance, cfg.max_rows = C.KBT_DIAGONAL, 1 << 14
    assert C.kbt_flight_bytes(cfg, 2) == 0


def test_a_recorder_that_was_replaced_has_no_log() -> None:
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, D, 2)
    arena, memory = Aligned(C.kbt_arena_bytes(cfg)), [Aligned(C.kbt_flight_bytes(cfg, 4)) for _ in range(2)]
    slot, flights = ffi.new("kbt_head **"), [ffi.new("kbt_flight **") for _ in range(2)]
    assert C.kbt_init(cfg, arena.start, arena.size, slot) == C.KBT_OK
    for room, flight in zip(memory, flights, strict=True):
        assert C.kbt_flight_init(slot[0], room.start, room.size, 4, flight) == C.KBT_OK
    sink = ffi.callback("kbt_sink", lambda _, data, count: None)
    assert C.kbt_flight_log(flights[0][0], sink, ffi.NULL) == C.KBT_E_ORDER
    assert C.kbt_flight_log_size(flights[0][0]) == 0
    assert C.kbt_flight_log(flights[1][0], sink, ffi.NULL) == C.KBT_OK
    assert C.kbt_flight_log(flights[1][0], ffi.NULL, ffi.NULL) == C.KBT_E_NULL


class Aligned:
    """Memory as a C program would have it, with a guard behind it."""

    def __init__(self, size: int) -> None:
        self.size, self._room = size, np.full(size + 192, 0xA5, np.uint8)
        self._offset = -self._room.ctypes.data % 64
        self.start = ffi.cast("unsigned char *", self._room.ctypes.data + self._offset)

    def intact(self) -> bool:
        return bool((self._room[self._offset + self.size :] == 0xA5).all())


# ---- hostile files ---------------------------------------------------------------------------------------------------


def sealed(data: bytes) -> bytes:
    """A log with its checksum made right again."""
    return data[:16] + struct.pack("<I", zlib.crc32(data[24:])) + data[20:]


@pytest.fixture(scope="module")
def small() -> bytes:
    head = kbt.Head(np.ones((2, D)), drift=0.0, noise_var=0.1, covariance="neuron", max_rows=2)
    head.record(6)
    feed(head, 8)
    return head.flight_log()


def test_a_log_that_ends_early_or_is_damaged_is_rejected(small: bytes) -> None:
    for length in range(len(small)):
        with pytest.raises(kbt.BundleError, match="flight log"):
            FlightLog(small[:length])
    for at in range(len(small)):
        with pytest.raises(kbt.BundleError):
            FlightLog(small[:at] + bytes([small[at] ^ 0x40]) + small[at + 1 :])
    with pytest.raises(kbt.BundleError):
        FlightLog(small + b"\0")


def test_forged_logs_are_rejected_or_not_reproduced_and_break_nothing(small: bytes) -> None:
    """Every byte behind the header changed, with a checksum that is right."""
    rng = np.random.default_rng(0)
    reproduced = 0
    for at in range(24, len(small)):
        forged = sealed(small[:at] + bytes([small[at] ^ int(rng.integers(1, 256))]) + small[at + 1 :])
        with contextlib.suppress(kbt.BundleError):
            reproduced += FlightLog(forged).replay().reproduced
    assert reproduced < 0.2 * len(small)  # what the records do not use of their room, and the count of those before


def test_replay_needs_a_log_its_room_and_a_head_of_its_configuration(small: bytes) -> None:
    info, outcome = ffi.new("kbt_flight_info *"), ffi.new("kbt_flight_outcome *")
    assert C.kbt_flight_check(ffi.NULL, 0, info) == C.kbt_flight_check(small, len(small), ffi.NULL) == C.KBT_E_NULL
    assert C.kbt_flight_check(small, len(small), info) == C.KBT_OK
    arena, room = Aligned(C.kbt_arena_bytes(ffi.addressof(info.cfg))), Aligned(info.replay_bytes + 64)
    slot = ffi.new("kbt_head **")
    assert C.kbt_init(ffi.addressof(info.cfg), arena.start, arena.size, slot) == C.KBT_OK
    head, start, size = slot[0], room.start, info.replay_bytes

    def replay(log: Any = small, head: Any = head, memory: Any = start, bytes: int = size, to: Any = outcome) -> int:
        return int(C.kbt_flight_replay(log, len(small), head, memory, bytes, ffi.NULL, ffi.NULL, to))

    assert replay(head=ffi.NULL) == replay(memory=ffi.NULL) == replay(to=ffi.NULL) == C.KBT_E_NULL
    assert replay(log=bytes(len(small))) == C.KBT_E_BLOB_FOREIGN
    assert replay(bytes=size - 1) == C.KBT_E_SIZE
    assert replay(memory=start + 8) == C.KBT_E_ALIGN
    other = ffi.new("kbt_config *", info.cfg)
    other.noise_var = 0.5
    arena_2 = Aligned(C.kbt_arena_bytes(other))
    assert C.kbt_init(other, arena_2.start, arena_2.size, slot) == C.KBT_OK
    assert replay(head=slot[0]) == C.KBT_E_BLOB_CONFIG
    assert replay() == C.KBT_OK
    assert outcome.reproduced == 1
    assert room.intact()


def test_a_log_whose_parts_do_not_fit_is_rejected(small: bytes) -> None:
    short = bytearray(small[:79])  # a sound header, and not even the numbers behind it
    struct.pack_into("<Q", short, 8, len(short))
    longer = bytearray(small + b"\0")  # a record and a bit
    struct.pack_into("<Q", longer, 8, len(longer))
    for forged in (short, longer):
        with pytest.raises(kbt.BundleError):
            FlightLog(sealed(bytes(forged)))


def test_a_log_that_asks_for_a_huge_head_is_rejected_before_memory_is_taken(small: bytes) -> None:
    log = FlightLog(small)
    base = bytearray(log.base)
    struct.pack_into("<i", base, 24 + 11 * 4, 1 << 15)  # max_rows of the configuration in the state
    base[16:20] = struct.pack("<I", zlib.crc32(bytes(base[24:])))
    front = bytearray(small[:80])
    struct.pack_into("<Q", front, 32, 0)  # no records
    struct.pack_into("<Q", front, 48, 0)
    record = 40 + 4 * ((1 << 15) * (D + 2) + 2)
    struct.pack_into("<I", front, 72, record)
    forged = bytes(front) + bytes(base)
    struct.pack_into("<Q", front, 8, len(forged))
    forged = sealed(bytes(front) + bytes(base))
    # In 32 bits the core rejects it first: such a head does not fit into the address space.
    said = "more than the limit of" if sys.maxsize > 1 << 32 else "impossible values"
    with pytest.raises(kbt.BundleError, match=said):
        FlightLog(forged).replay()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_replay_says_whether_the_state_was_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = LOGS / "outliers.kbtf", tmp_path / "head.kbt"
    code, text, err = call(capsys, "replay", str(path), "--json", "--out", str(out))
    told = json.loads(text)
    assert (code, err) == (0, "")
    assert told["reproduced"]
    assert told["state"] == told["expected"] == EXPECTED["logs"]["outliers"]["state"]
    assert told["statuses"]["ok"] > 100 > told["statuses"]["gated"] > 1
    assert kbt.Head.load(out).samples > 200

    code, text, err = call(capsys, "replay", str(path), "--expect", told["state"])
    assert code == 0
    assert "reproduced bit for bit" in text
    code, text, err = call(capsys, "replay", str(path), "--expect", "0" * 16)
    assert code == 1
    assert "NOT reproduced" in text


def test_replay_shows_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((LOGS / "drift.kbtf").read_bytes())
    struct.pack_into("<f", data, place_of_h(bytes(data), 7), 3.0)
    path = tmp_path / "changed.kbtf"
    path.write_bytes(sealed(bytes(data)))
    code, text, _ = call(capsys, "replay", str(path))
    assert code == 1
    assert "first at record 7 (update)" in text


def test_a_file_that_is_no_log_is_one_line_and_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.kbtf"
    for data in (b"", b"KBTF", b"nonsense" * 100, kbt.Head(np.ones((1, D))).to_bytes()):
        path.write_bytes(data)
        code, out, err = call(capsys, "replay", str(path))
        assert (code, out) == (1, "")
        assert str(path) in err
        assert "flight log" in err


def test_a_model_records_in_units_of_its_head() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = kbt.Model.load("cartpole", backend="onnxruntime")
    model.head.record(20)
    for step in range(15):
        model.predict(np.array([0.1 * step, 0.0, 0.01, 0.0]))
        model.observe(float(step))
    log = FlightLog(model.head.flight_log())
    assert [KINDS[kind] for kind in log.records["kind"]] == ["observe"] * 15
    assert log.replay().head.to_bytes() == model.head.to_bytes()
