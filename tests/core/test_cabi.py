"""The C ABI of the installed library: every function, every rejection, the same bytes as Python, and no allocation."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import build_with_installed, compiler, installed, library, run

import kbt_edge as kbt

ffi, C = library()
HEADER = installed("include/kbt.h")
NULL = ffi.NULL
GUARD = 0xA5


def guarded(count: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` bytes aligned for an arena, and the guard bytes right behind them."""
    raw = np.full(count + 192, GUARD, np.uint8)
    start = -raw.ctypes.data % C.KBT_ARENA_ALIGN
    return raw[start : start + count], raw[start + count :]


def pointer(array: np.ndarray | None) -> Any:
    return NULL if array is None else ffi.cast("void *", array.ctypes.data)


def config(*widths: int, **fields: Any) -> Any:
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, widths[0], widths[-1])
    cfg.layers = len(widths) - 1
    for i, width in enumerate(widths):
        cfg.widths[i] = width
    for name, value in fields.items():
        setattr(cfg, name, value)
    return cfg


class CHead:
    """A head made through the C ABI alone, in an arena of exactly the size it asked for."""

    def __init__(self, *widths: int, **fields: Any) -> None:
        self.made = widths, fields
        self.cfg = config(*widths, **fields)
        self.dtype = np.float64 if self.cfg.dtype == C.KBT_FLOAT64 else np.float32
        self.d, self.d_o = widths[0], widths[-1]
        self.arena, self.guard = guarded(C.kbt_arena_bytes(self.cfg))
        slot = ffi.new("kbt_head **")
        assert C.kbt_init(self.cfg, pointer(self.arena), self.arena.size, slot) == C.KBT_OK
        self.head = slot[0]

    def array(self, values: Any) -> np.ndarray:
        return np.ascontiguousarray(values, self.dtype)

    def set_prior(self, weight: Any, bias: Any, seed: int = 0) -> int:
        weight, bias = self.array(weight), self.array(bias)
        return int(C.kbt_set_prior(self.head, pointer(weight), pointer(bias), seed))

    def update(self, h: Any, y: Any, noise: Any = None, result: Any = NULL) -> int:
        h, y = self.array(h), self.array(y)
        R = None if noise is None else self.array(noise)
        rows = h.size // self.d
        return int(
            C.kbt_update(self.head, pointer(h), rows, pointer(y), pointer(R), 0 if R is None else R.size, result)
        )

    def predict(self, h: Any) -> tuple[int, bytes]:
        """Status, and all results: zeros where the call was rejected."""
        h = self.array(h)
        rows = h.size // self.d
        K = rows * self.d_o
        mean, cov, total = (np.zeros(n, self.dtype) for n in (K, K * K, K))
        status = C.kbt_predict(self.head, pointer(h), rows, pointer(mean), pointer(cov), pointer(total))
        return int(status), mean.tobytes() + cov.tobytes() + total.tobytes()

    def observe(self, y: Any, noise: Any = None, result: Any = NULL) -> int:
        y, R = self.array(y), None if noise is None else self.array(noise)
        return int(C.kbt_observe(self.head, pointer(y), pointer(R), 0 if R is None else R.size, result))

    def copy(self) -> CHead:
        """Another head, made from the bytes of this one."""
        widths, fields = self.made
        other, blob = CHead(*widths, **fields), self.state()
        assert C.kbt_state_load(other.head, blob, len(blob)) == C.KBT_OK
        return other

    def state(self) -> bytes:
        blob = np.zeros(C.kbt_state_size(self.head), np.uint8)
        assert C.kbt_state_save(self.head, pointer(blob), blob.size) == C.KBT_OK
        return blob.tobytes()

    def rejected(self) -> int:
        counters = ffi.new("kbt_counters *")
        assert C.kbt_get_counters(self.head, counters) == C.KBT_OK
        return int(counters.rejected)


@pytest.fixture
def head() -> CHead:
    """Small, with two layers, two outputs and two rows, and something learned."""
    head = CHead(3, 6, 2, max_rows=2)
    assert head.set_prior([[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]], [0.5, -0.5]) == C.KBT_OK
    assert head.update([1.0, -1.0, 0.5], [0.0, 1.0]) == C.KBT_OK
    return head


H, Y = np.array([0.5, -1.0, 2.0], np.float32), np.array([1.0, -2.0], np.float32)


# ---- header and library --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", ["gcc", "clang"])
@pytest.mark.parametrize(("language", "standard"), [("c", "c99"), ("c", "c17"), ("c++", "c++17")])
def test_the_header_compiles_alone_without_a_warning(cc: str, language: str, standard: str, tmp_path: Path) -> None:
    if not shutil.which(cc):
        pytest.skip(f"no {cc}")
    source = tmp_path / "alone.c"
    source.write_text(
        "".join(f'#include "{path.name}"\n' * 2 for path in HEADER.parent.glob("*.h"))
        + "int main(void) { return (int)kbt_abi_version() - KBT_ABI_VERSION; }\n"
    )
    warnings = ("-pedantic", "-Wall", "-Wextra", "-Werror", "-Wconversion")
    run(cc, "-x", language, f"-std={standard}", *warnings, f"-I{HEADER.parent}", "-fsyntax-only", source)


def functions() -> set[str]:
    headers = "".join(path.read_text() for path in HEADER.parent.glob("*.h"))
    return set(re.findall(r"^KBT_API [^;]*?\b(kbt_\w+)\(", headers, flags=re.M))


def test_the_library_exports_what_the_header_declares_and_nothing_else() -> None:
    if not shutil.which("nm"):
        pytest.skip("no nm")
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", installed("lib/libkbt.so")).splitlines()}
    assert len(functions()) >= 25
    assert functions() == {symbol for symbol in exported if symbol.startswith("kbt_")}
    assert {symbol for symbol in exported if not symbol.startswith(("kbt_", "_", "Eigen"))} == set()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("copied", [False, True])
def test_python_and_a_c_library_in_one_process_do_not_disturb_each_other(
    order: str, copied: bool, tmp_path: Path
) -> None:
    """The installed libkbt is loaded once; another copy of it, loaded for everyone, serves its own callers."""
    file = installed("lib/libkbt.so")
    if copied:
        file = Path(shutil.copy(file, tmp_path / "libkbt.so"))
    learn = """
import numpy as np, kbt_edge
head = kbt_edge.Head(np.ones((1, 3)))
for i in range(20):
    head.predict(np.full(3, i % 5 - 2.0)); head.observe(np.array([1.0]))
"""
    load = f"import ctypes; c = ctypes.CDLL({str(file)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    count = """
maps = {line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("libkbt.so")}
print(len(maps), c.kbt_abi_version(), head.to_bytes().hex())
"""
    program = load + learn if order == "before" else learn + load + learn
    loaded, version, state = run(sys.executable, "-c", program + count, cwd=tmp_path).split()
    assert int(version) == C.KBT_ABI_VERSION
    assert int(loaded) == (2 if copied and order == "after" else 1)
    alone: dict[str, Any] = {}
    exec(learn, alone)
    assert state == alone["head"].to_bytes().hex()


def test_the_abi_version_is_that_of_the_header() -> None:
    assert C.kbt_abi_version() == C.KBT_ABI_VERSION == 2


def test_every_status_has_its_own_words() -> None:
    listed = HEADER.read_text().partition("typedef enum kbt_status")[2].partition("}")[0]
    statuses = [getattr(C, name) for name in re.findall(r"^  (KBT_\w+) = \d+,?", listed, flags=re.M)]
    assert statuses == list(range(22))
    words = [ffi.string(C.kbt_status_str(status)).decode() for status in statuses]
    assert len(set(words)) == 22
    assert all(len(text) >= 2 and text.isascii() for text in words)
    for unknown in (22, 999):
        assert ffi.string(C.kbt_status_str(unknown)) == b"unknown status"


# ---- configuration and arena ---------------------------------------------------------------------------------------


def test_the_default_configuration_is_a_small_float32_head() -> None:
    cfg = config(4, 2)
    assert C.kbt_config_check(cfg, NULL) == C.KBT_OK
    assert (cfg.dtype, cfg.layers, cfg.max_rows, cfg.output) == (C.KBT_FLOAT32, 1, 1, C.KBT_GAUSSIAN)
    assert (cfg.covariance, cfg.rule, cfg.noise) == (C.KBT_COVARIANCE_AUTO, C.KBT_FUSE, C.KBT_NOISE_CONSTANT)
    assert list(cfg.widths) == [4, 2] + [0] * 7
    C.kbt_config_default(NULL, 4, 2)  # nothing to fill, nothing happens


nan, inf = float("nan"), float("inf")
BAD_FIELDS: list[tuple[str, Any]] = [
    *[("dtype", x) for x in (-1, 2)],
    *[("layers", x) for x in (-1, 0, 9)],
    *[("max_rows", x) for x in (-1, 0, 2**20 + 1)],
    *[(name, x) for name in ("output", "rule") for x in (-1, 2)],
    *[("covariance", x) for x in (-2, 4)],
    *[("noise", x) for x in (-1, 2, 3, 5)],
    *[("relu_order", x) for x in (1, 13)],
    *[("softmax_order", x) for x in (-1, 3)],
    *[(name, x) for name in ("noise_var", "input_var", "gate") for x in (-1e-9, nan, inf)],
    *[("forgetting", x) for x in (0.0, -1.0, 1.0001, nan)],
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_setting_is_named_before_any_memory_is_needed(field: str, value: Any) -> None:
    cfg = config(3, 6, 2, **{field: value})
    culprit, slot = ffi.new("const char **"), ffi.new("kbt_head **")
    assert C.kbt_config_check(cfg, culprit) == C.KBT_E_CONFIG
    assert ffi.string(culprit[0]).decode() == field
    assert C.kbt_arena_bytes(cfg) == 0
    arena, guard = guarded(1 << 16)
    assert C.kbt_init(cfg, pointer(arena), arena.size, slot) == C.KBT_E_CONFIG
    assert slot[0] == NULL
    assert (arena == GUARD).all()
    assert (guard == GUARD).all()


@pytest.mark.parametrize("entry", [("widths", 0, 0), ("widths", 2, -5), ("widths", 1, 2**20 + 1),
                                   ("prior_var", 0, -0.5), ("prior_var", 1, nan), ("prior_var", 1, -1.0),
                                   ("prior_var", 1, inf)])  # fmt: skip
def test_a_bad_entry_of_an_array_is_named(entry: tuple[str, int, Any]) -> None:
    field, index, value = entry
    cfg, culprit = config(3, 6, 2), ffi.new("const char **")
    getattr(cfg, field)[index] = value
    assert C.kbt_config_check(cfg, culprit) == C.KBT_E_CONFIG
    assert ffi.string(culprit[0]).decode() == field


@pytest.mark.parametrize("fields", [{"output": 1, "rule": 1}, {"output": 1, "noise": 1}, {"rule": 1, "noise": 1}])
def test_settings_that_contradict_each_other_are_rejected(fields: dict[str, int]) -> None:
    assert C.kbt_config_check(config(3, 6, 2, **fields), NULL) == C.KBT_E_CONFIG


def test_softmax_needs_two_outputs() -> None:
    assert C.kbt_config_check(config(3, 1, output=C.KBT_SOFTMAX), NULL) == C.KBT_E_CONFIG


@pytest.mark.parametrize("covariance", range(3))
@pytest.mark.parametrize("dtype", range(2))
def test_a_size_that_no_address_can_reach_is_rejected(covariance: int, dtype: int) -> None:
    cfg = config(*[2**20] * 9, max_rows=2**20, covariance=covariance, dtype=dtype)
    assert C.kbt_config_check(cfg, NULL) == C.KBT_E_SIZE
    assert C.kbt_arena_bytes(cfg) == 0


def test_the_arena_must_be_large_enough_and_aligned() -> None:
    cfg, slot = config(3, 6, 2), ffi.new("kbt_head **")
    need = C.kbt_arena_bytes(cfg)
    arena, _ = guarded(need + 64)
    for size in (0, 1, need - 1):
        assert C.kbt_init(cfg, pointer(arena), size, slot) == C.KBT_E_SIZE
    for offset in (1, 8, 32, 63):
        assert C.kbt_init(cfg, pointer(arena[offset:]), need, slot) == C.KBT_E_ALIGN
    assert (arena == GUARD).all()
    assert slot[0] == NULL
    assert C.kbt_init(cfg, pointer(arena), need, slot) == C.KBT_OK


KINDS = [
    {"covariance": covariance, "dtype": dtype, **kind}
    for covariance in range(3)
    for dtype in range(2)
    for kind in (
        {},
        {"rule": 1},
        {"noise": 1, "forgetting": 0.9},
        {"output": 1, "noise": 2},
        {"output": 1, "noise": 2, "softmax_order": 1},
        {"output": 1, "softmax_order": 2},
    )
]


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("widths", [(3, 2), (3, 6, 2), (3, 11, 7, 9)], ids=str)
def test_nothing_is_written_behind_the_arena_or_the_results(widths: tuple[int, ...], fields: dict[str, Any]) -> None:
    head = CHead(*widths, max_rows=2, input_var=1e-3, **fields)
    rng = np.random.default_rng(0)
    assert head.set_prior(rng.normal(size=(head.d_o, head.d)), np.zeros(head.d_o)) == C.KBT_OK
    size = head.dtype().itemsize
    (mean, a), (cov, b), (total, c) = (guarded(n * size) for n in (2 * head.d_o, 4 * head.d_o**2, 2 * head.d_o))
    for _ in range(30):
        h = head.array(rng.normal(size=(2, head.d)))
        y = head.array(np.eye(head.d_o)[:2] if fields.get("output") else rng.normal(size=(2, head.d_o)))
        assert C.kbt_predict(head.head, pointer(h), 2, pointer(mean), pointer(cov), pointer(total)) == C.KBT_OK
        assert C.kbt_observe(head.head, pointer(y), NULL, 0, NULL) == C.KBT_OK
    state, d = guarded(C.kbt_state_size(head.head))
    assert C.kbt_state_save(head.head, pointer(state), state.size) == C.KBT_OK
    for guard in (head.guard, a, b, c, d):
        assert (guard == GUARD).all()


# ---- rejections ------------------------------------------------------------------------------------------------------

NULL_CALLS: dict[str, Callable[[CHead, dict[str, Any]], int]] = {
    "config_check": lambda x, a: C.kbt_config_check(NULL, NULL),
    "init cfg": lambda x, a: C.kbt_init(NULL, a["void"], 4096, a["slot"]),
    "init arena": lambda x, a: C.kbt_init(x.cfg, NULL, 4096, a["slot"]),
    "init head": lambda x, a: C.kbt_init(x.cfg, a["void"], 4096, NULL),
    "set_prior head": lambda x, a: C.kbt_set_prior(NULL, a["void"], a["void"], 0),
    "set_prior weight": lambda x, a: C.kbt_set_prior(x.head, NULL, a["void"], 0),
    "set_means head": lambda x, a: C.kbt_set_means(NULL, a["means"]),
    "set_means means": lambda x, a: C.kbt_set_means(x.head, NULL),
    "set_means one layer": lambda x, a: C.kbt_set_means(x.head, a["means"]),
    "set_noise head": lambda x, a: C.kbt_set_noise(NULL, a["void"], 1),
    "set_noise noise": lambda x, a: C.kbt_set_noise(x.head, NULL, 1),
    "predict head": lambda x, a: C.kbt_predict(NULL, a["void"], 1, a["void"], NULL, NULL),
    "predict h": lambda x, a: C.kbt_predict(x.head, NULL, 1, a["void"], NULL, NULL),
    "predict mean": lambda x, a: C.kbt_predict(x.head, a["void"], 1, NULL, NULL, NULL),
    "update head": lambda x, a: C.kbt_update(NULL, a["void"], 1, a["void"], NULL, 0, NULL),
    "update h": lambda x, a: C.kbt_update(x.head, NULL, 1, a["void"], NULL, 0, NULL),
    "update y": lambda x, a: C.kbt_update(x.head, a["void"], 1, NULL, NULL, 0, NULL),
    "observe head": lambda x, a: C.kbt_observe(NULL, a["void"], NULL, 0, NULL),
    "observe y": lambda x, a: C.kbt_observe(x.head, NULL, NULL, 0, NULL),
    "update_labels head": lambda x, a: C.kbt_update_labels(NULL, a["void"], 1, a["labels"], NULL, 0, NULL),
    "update_labels h": lambda x, a: C.kbt_update_labels(x.head, NULL, 1, a["labels"], NULL, 0, NULL),
    "update_labels labels": lambda x, a: C.kbt_update_labels(x.head, a["void"], 1, NULL, NULL, 0, NULL),
    "observe_labels head": lambda x, a: C.kbt_observe_labels(NULL, a["labels"], NULL, 0, NULL),
    "observe_labels labels": lambda x, a: C.kbt_observe_labels(x.head, NULL, NULL, 0, NULL),
    "get_config head": lambda x, a: C.kbt_get_config(NULL, x.cfg),
    "get_config cfg": lambda x, a: C.kbt_get_config(x.head, NULL),
    "get_counters head": lambda x, a: C.kbt_get_counters(NULL, a["counters"]),
    "get_counters counters": lambda x, a: C.kbt_get_counters(x.head, NULL),
    "get_health head": lambda x, a: C.kbt_get_health(NULL, ffi.new("kbt_health *")),
    "get_health health": lambda x, a: C.kbt_get_health(x.head, NULL),
    "get_noise head": lambda x, a: C.kbt_get_noise(NULL, a["void"], a["count"]),
    "get_noise noise": lambda x, a: C.kbt_get_noise(x.head, NULL, a["count"]),
    "get_noise count": lambda x, a: C.kbt_get_noise(x.head, a["void"], NULL),
    "get_mean head": lambda x, a: C.kbt_get_mean(NULL, 0, a["void"]),
    "get_mean mean": lambda x, a: C.kbt_get_mean(x.head, 0, NULL),
    "get_cov head": lambda x, a: C.kbt_get_cov(NULL, 0, a["void"]),
    "get_cov cov": lambda x, a: C.kbt_get_cov(x.head, 0, NULL),
    "state_save head": lambda x, a: C.kbt_state_save(NULL, a["void"], 4096),
    "state_save blob": lambda x, a: C.kbt_state_save(x.head, NULL, 1 << 20),
    "state_stream head": lambda x, a: C.kbt_state_stream(NULL, ffi.cast("kbt_sink *", 64), NULL),
    "state_stream sink": lambda x, a: C.kbt_state_stream(x.head, NULL, NULL),
    "state_load head": lambda x, a: C.kbt_state_load(NULL, a["void"], 4096),
    "state_load blob": lambda x, a: C.kbt_state_load(x.head, NULL, 4096),
    "state_config blob": lambda x, a: C.kbt_state_config(NULL, 4096, x.cfg),
    "state_config cfg": lambda x, a: C.kbt_state_config(a["void"], 4096, NULL),
}


@pytest.mark.parametrize("call", NULL_CALLS.values(), ids=NULL_CALLS.keys())
def test_a_null_pointer_is_rejected(call: Callable[[CHead, dict[str, Any]], int], head: CHead) -> None:
    room, guard = guarded(4096)
    room[:] = 0
    h = pointer(room)
    arguments = {"void": h, "slot": ffi.new("kbt_head **"), "means": ffi.new("void *[2]", [h, NULL]),
                 "labels": ffi.new("int32_t[2]"), "counters": ffi.new("kbt_counters *"), "count": ffi.new("int32_t *"),
                 "double": ffi.new("double *")}  # fmt: skip
    C.kbt_predict(head.head, h, 1, pointer(room[2048:]), NULL, NULL)  # so that observe has something to observe
    before = head.state()
    assert call(head, arguments) == C.KBT_E_NULL
    assert head.state() == before
    assert (guard == GUARD).all()


def test_functions_without_a_status_answer_null_with_nothing() -> None:
    assert C.kbt_arena_bytes(NULL) == 0
    assert C.kbt_samples(NULL) == 0
    assert C.kbt_predicted_rows(NULL) == 0
    assert C.kbt_state_size(NULL) == 0


def test_rows_outside_the_range_are_rejected(head: CHead) -> None:
    h, y, mean = (np.zeros(64, np.float32) for _ in range(3))
    labels = ffi.new("int32_t[8]")
    before, rejected = head.state(), head.rejected()
    for rows in (0, -1, 3, -(2**31), 2**31 - 1):
        assert C.kbt_predict(head.head, pointer(h), rows, pointer(mean), NULL, NULL) == C.KBT_E_ROWS
        assert C.kbt_update(head.head, pointer(h), rows, pointer(y), NULL, 0, NULL) == C.KBT_E_ROWS
        assert C.kbt_update_labels(head.head, pointer(h), rows, labels, NULL, 0, NULL) == C.KBT_E_ROWS
    assert head.state() == before
    assert head.rejected() == rejected + 15


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_is_rejected(head: CHead, value: float) -> None:
    before = head.state()
    for i in range(3):
        h = H.copy()
        h[i] = value
        assert (
            C.kbt_predict(head.head, pointer(h), 1, pointer(np.zeros(2, np.float32)), NULL, NULL) == C.KBT_E_NONFINITE
        )
        assert head.update(h, Y) == C.KBT_E_NONFINITE
    for i in range(2):
        y = Y.copy()
        y[i] = value
        assert head.update(H, y) == C.KBT_E_NONFINITE
        assert head.set_prior(np.ones((2, 3)), y) == C.KBT_E_NONFINITE
        assert head.set_prior(np.outer(y, [1, 1, 1]), Y) == C.KBT_E_NONFINITE
    means = [np.ones((6, 4), np.float32), np.full((2, 7), value, np.float32)]
    assert C.kbt_set_means(head.head, ffi.new("void *[2]", [pointer(m) for m in means])) == C.KBT_E_NONFINITE
    assert head.state() == before


def test_what_would_overflow_is_rejected(head: CHead) -> None:
    before, result = head.state(), ffi.new("kbt_result *", [7.0, 7.0])
    assert head.update(np.full(3, 3e38), Y, result=result) == C.KBT_E_RANGE
    assert head.update(H, np.full(2, 3e38), result=result) == C.KBT_E_RANGE
    assert (result.nis, result.log_likelihood) == (7.0, 7.0)
    assert head.state() == before


@pytest.mark.parametrize(
    "noise",
    [[-1.0], [1.0, -1.0], [nan], [1.0, inf], [1.0] * 3, [1.0] * 5, [1.0, 2.0, 2.0, 1.0], [1.0, 0.5, 0.4, 1.0],
     [-1.0, 0.0, 0.0, 1.0]],
)  # fmt: skip
def test_bad_noise_is_rejected(head: CHead, noise: list[float]) -> None:
    before, R = head.state(), head.array(noise)
    assert C.kbt_set_noise(head.head, pointer(R), R.size) == C.KBT_E_NOISE
    assert head.update(H, Y, R) == C.KBT_E_NOISE
    C.kbt_predict(head.head, pointer(H), 1, pointer(np.zeros(2, np.float32)), NULL, NULL)
    assert C.kbt_observe(head.head, pointer(Y), pointer(R), R.size, NULL) == C.KBT_E_NOISE
    assert head.state() == before


def test_an_indefinite_noise_matrix_is_rejected_although_each_pair_is_possible() -> None:
    head = CHead(2, 3)
    before = head.state()
    R = head.array([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]])  # eigenvalue -0.8
    assert C.kbt_set_noise(head.head, pointer(R), 9) == C.KBT_E_NOISE
    assert head.update([1.0, 1.0], [0.0, 0.0, 0.0], R) == C.KBT_E_NOISE
    assert head.state() == before


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_a_noise_matrix_may_miss_being_semidefinite_by_rounding_alone(n: int, scale: float, dtype: int) -> None:
    """By 16 n roundings of its largest variance: half of that is accepted, twice as much rejected."""
    head = CHead(2, n, dtype=dtype, noise=C.KBT_NOISE_MATRIX)
    rounding = 16 * n * np.finfo(head.dtype).eps
    for missing, wanted in ((0.5 * rounding, C.KBT_OK), (2.0 * rounding, C.KBT_E_NOISE)):
        R = (1 + missing) * np.ones((n, n)) - missing * np.eye(n)  # eigenvalues 1 + (n - 1)(1 + missing), -missing
        assert C.kbt_set_noise(head.head, pointer(head.array(scale * R)), n * n) == wanted
        rejected = head.update([1.0, 1.0], np.zeros(n), scale * R) == C.KBT_E_NOISE  # or for its range, when it is huge
        assert rejected == (wanted == C.KBT_E_NOISE)
        if n == 2:
            continue
        R[0], R[:, 0], R[0, 0] = 0.0, 0.0, 64.0  # a large variance that has nothing to do with the others
        assert C.kbt_set_noise(head.head, pointer(head.array(scale * R)), n * n) == C.KBT_OK
        R[1:, 1:] = 1 + 64 * missing - 64 * missing * np.eye(n - 1)
        assert C.kbt_set_noise(head.head, pointer(head.array(scale * R)), n * n) == wanted


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_noise_of_one_direction_is_accepted_however_it_was_rounded(n: int, dtype: int) -> None:
    head, rng = CHead(2, n, dtype=dtype, noise=C.KBT_NOISE_MATRIX), np.random.default_rng(n)
    for size in 10.0 ** rng.uniform(-6, 6, 200):
        v = head.array(size * rng.normal(size=n))
        R = np.outer(v, v)  # rounded to the head's own type
        assert R.dtype == head.dtype
        assert C.kbt_set_noise(head.head, pointer(R), n * n) == C.KBT_OK


@pytest.mark.parametrize("count", [-1, 0, 3, 5, 2**31 - 1, -(2**31)])
def test_a_noise_count_that_fits_nothing_is_rejected(head: CHead, count: int) -> None:
    R, before = np.ones(8, np.float32), head.state()
    assert C.kbt_set_noise(head.head, pointer(R), count) == C.KBT_E_NOISE
    assert C.kbt_update(head.head, pointer(H), 1, pointer(Y), pointer(R), count, NULL) == C.KBT_E_NOISE
    if count:
        assert C.kbt_update(head.head, pointer(H), 1, pointer(Y), NULL, count, NULL) == C.KBT_E_NOISE
    assert head.state() == before


def test_labels_need_a_softmax_and_its_range(head: CHead) -> None:
    labels = ffi.new("int32_t[1]", [1])
    assert C.kbt_update_labels(head.head, pointer(H), 1, labels, NULL, 0, NULL) == C.KBT_E_LABEL
    softmax = CHead(3, 6, 2, output=C.KBT_SOFTMAX, noise=C.KBT_NOISE_MULTINOMIAL)
    assert softmax.set_prior(np.ones((2, 3)), np.zeros(2)) == C.KBT_OK
    before = softmax.state()
    for label in (-1, 2, 2**31 - 1, -(2**31)):
        labels[0] = label
        assert C.kbt_update_labels(softmax.head, pointer(H), 1, labels, NULL, 0, NULL) == C.KBT_E_LABEL
        C.kbt_predict(softmax.head, pointer(H), 1, pointer(np.zeros(2, np.float32)), NULL, NULL)
        assert C.kbt_observe_labels(softmax.head, labels, NULL, 0, NULL) == C.KBT_E_LABEL
    for y in ([0.5, 0.6], [-0.5, 1.5], [0.0, 0.0]):
        assert softmax.update(H, y) == C.KBT_E_LABEL
    assert softmax.update(H, [0.0, 1.0], [0.1]) == C.KBT_E_NOISE  # multinomial takes none
    assert softmax.state() == before


def test_observe_needs_a_prediction_of_its_own(head: CHead) -> None:
    mean, labels = np.zeros(2, np.float32), ffi.new("int32_t[1]")
    before = head.state()
    assert C.kbt_predicted_rows(head.head) == 0
    assert C.kbt_observe(head.head, pointer(Y), NULL, 0, NULL) == C.KBT_E_ORDER
    assert C.kbt_observe_labels(head.head, labels, NULL, 0, NULL) == C.KBT_E_ORDER
    assert C.kbt_predict(head.head, pointer(H), 1, pointer(mean), NULL, NULL) == C.KBT_OK
    assert C.kbt_predicted_rows(head.head) == 1
    assert head.state() == before
    assert C.kbt_observe(head.head, pointer(Y), NULL, 0, NULL) == C.KBT_OK
    assert C.kbt_predicted_rows(head.head) == 0
    assert C.kbt_observe(head.head, pointer(Y), NULL, 0, NULL) == C.KBT_E_ORDER


def test_setting_a_prior_or_a_state_forgets_the_prediction(head: CHead) -> None:
    mean, blob = np.zeros(2, np.float32), head.state()
    means = ffi.new("void *[2]", [pointer(np.ones(m, np.float32)) for m in ((6, 4), (2, 7))])
    for reset in (
        lambda: head.set_prior(np.ones((2, 3)), Y),
        lambda: C.kbt_set_means(head.head, means),
        lambda: C.kbt_state_load(head.head, blob, len(blob)),
    ):
        assert C.kbt_predict(head.head, pointer(H), 1, pointer(mean), NULL, NULL) == C.KBT_OK
        assert reset() == C.KBT_OK
        assert C.kbt_observe(head.head, pointer(Y), NULL, 0, NULL) == C.KBT_E_ORDER


def test_a_layer_that_is_not_there_is_rejected(head: CHead) -> None:
    room = np.full(4096, GUARD, np.uint8)
    for layer in (-1, 2, 2**31 - 1, -(2**31)):
        assert C.kbt_get_mean(head.head, layer, pointer(room)) == C.KBT_E_LAYER
        assert C.kbt_get_cov(head.head, layer, pointer(room)) == C.KBT_E_LAYER
    assert (room == GUARD).all()


def test_a_prior_needs_room_for_the_copies_of_h() -> None:
    head = CHead(3, 5, 2)
    before = head.state()
    assert head.set_prior(np.ones((2, 3)), Y) == C.KBT_E_CONFIG
    assert head.state() == before


def test_a_prior_needs_no_bias() -> None:
    with_zero, without = CHead(3, 6, 2), CHead(3, 6, 2)
    weight = with_zero.array([[1.0, 0.5, -0.5], [0.25, 0.0, 2.0]])
    assert with_zero.set_prior(weight, [0.0, 0.0], 5) == C.KBT_OK
    assert C.kbt_set_prior(without.head, pointer(weight), NULL, 5) == C.KBT_OK
    assert without.state() == with_zero.state()


def test_blobs_are_judged_before_they_are_loaded(head: CHead) -> None:
    good, cfg = head.state(), ffi.new("kbt_config *")
    other = CHead(3, 6, 2, max_rows=3).state()
    nan_mean = bytearray(good)
    nan_mean[-4:] = np.float32(nan).tobytes()
    cases = {
        b"": C.KBT_E_BLOB_SHORT,
        good[:10]: C.KBT_E_BLOB_SHORT,
        good[:-1]: C.KBT_E_BLOB_SHORT,
        b"nonsense" * 40: C.KBT_E_BLOB_FOREIGN,
        good[:4] + b"\x04\0\0\0" + good[8:]: C.KBT_E_BLOB_VERSION,
        good[:-1] + bytes([good[-1] ^ 4]): C.KBT_E_BLOB_CRC,
        bytes(nan_mean): C.KBT_E_BLOB_CRC,
    }
    for blob, status in cases.items():
        assert C.kbt_state_load(head.head, blob, len(blob)) == status
        assert C.kbt_state_config(blob, len(blob), cfg) == status
        assert head.state() == good
    assert C.kbt_state_load(head.head, other, len(other)) == C.KBT_E_BLOB_CONFIG
    assert C.kbt_state_config(other, len(other), cfg) == C.KBT_OK
    assert cfg.max_rows == 3
    assert head.state() == good


def test_a_blob_needs_its_room(head: CHead) -> None:
    size = C.kbt_state_size(head.head)
    blob, guard = guarded(size)
    assert C.kbt_state_save(head.head, pointer(blob), size - 1) == C.KBT_E_SIZE
    assert (blob == GUARD).all()
    assert C.kbt_state_save(head.head, pointer(blob), size) == C.KBT_OK
    assert (guard == GUARD).all()


def test_the_gate_reports_and_counts() -> None:
    head = CHead(2, 1, gate=4.0)
    result, counters = ffi.new("kbt_result *"), ffi.new("kbt_counters *")
    before = head.state()
    assert head.update([1.0, 1.0], [1e3], result=result) == C.KBT_GATED
    assert result.nis > 4.0
    assert head.state() == before
    C.kbt_get_counters(head.head, counters)
    assert (counters.gated, counters.rejected, C.kbt_samples(head.head)) == (1, 0, 0)
    assert head.update([1.0, 1.0], [0.1], result=result) == C.KBT_OK
    assert C.kbt_samples(head.head) == 1


# ---- a rejected call changes nothing: neither bytes nor any later answer ---------------------------------------------


def extremes(dtype: Any) -> list[float]:
    """What overflows squared, what overflows at once, denormals, and what is not finite."""
    most, least = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    return [1e19, np.sqrt(most), -np.sqrt(most), 0.9 * most, -0.9 * most, least, -9 * least, nan, inf]


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("widths", [(2, 4, 8, 5), (2, 5, 4, 3), (3, 12, 4), (4, 8, 12, 5)], ids=str)
def test_a_rejected_prediction_leaves_a_full_head_as_useful_as_before(widths: tuple[int, ...], dtype: int) -> None:
    """Inputs of every size, as each layer can be the first one that overflows, and leaves infinities behind."""
    prior_var, rng = [1e-6] * (len(widths) - 2) + [10.0], np.random.default_rng(1)
    head = CHead(*widths, covariance=C.KBT_FULL, dtype=dtype, prior_var=prior_var)
    assert head.set_prior(rng.normal(size=(head.d_o, head.d)), np.zeros(head.d_o)) == C.KBT_OK
    sane = rng.normal(size=(20, head.d))
    before, want = head.state(), [head.predict(h) for h in sane]
    assert {status for status, _ in want} == {C.KBT_OK}
    largest = np.log10(np.finfo(head.dtype).max)
    for exponent in np.linspace(0.4 * largest, 0.99 * largest, 60):
        head.predict(np.full(head.d, 10.0**exponent))
        assert [head.predict(h) for h in sane] == want
    assert head.state() == before
    assert head.rejected() > 0


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("widths", [(3, 2), (2, 4, 2), (2, 4, 8, 5), (4, 9, 3)], ids=str)
def test_a_long_lived_head_answers_like_a_copy_made_from_its_bytes(
    widths: tuple[int, ...], fields: dict[str, Any]
) -> None:
    head = CHead(*widths, max_rows=3, prior_var=[0.1] * 8, **fields)
    rng, softmax, pending = np.random.default_rng(2), fields.get("output", 0), None
    assert head.set_prior(rng.normal(size=(head.d_o, head.d)), np.zeros(head.d_o)) == C.KBT_OK
    statuses = set()
    for step in range(60):
        verb = ("predict", "observe", "update")[rng.integers(3)]
        rows = len(pending) if verb == "observe" and pending is not None else int(rng.integers(1, 4))
        h = rng.normal(size=(rows, head.d))
        y = np.eye(head.d_o)[rng.integers(0, head.d_o, rows)] if softmax else rng.normal(size=(rows, head.d_o))
        if step % 3 == 0:
            target = h if softmax or rng.random() < 0.7 else y
            target.flat[rng.integers(target.size)] = rng.choice(extremes(head.dtype))
        copy = head.copy()
        if pending is not None:
            assert copy.predict(pending)[0] == C.KBT_OK
        answers = []
        for each in (head, copy):
            result, told = ffi.new("kbt_result *"), b""
            if verb == "predict":
                status, told = each.predict(h)
            elif verb == "observe":
                status = each.observe(y, result=result)
            else:
                status = each.update(h, y, result=result)
            told += bytes(ffi.buffer(result))
            answers.append((status, told, each.state(), C.kbt_predicted_rows(each.head)))
        assert answers[0] == answers[1]
        statuses.add(status)
        if status == C.KBT_OK:
            pending = h if verb == "predict" else None
        assert C.kbt_predicted_rows(head.head) == (0 if pending is None else len(pending))
    assert {C.KBT_OK, C.KBT_E_RANGE, C.KBT_E_NONFINITE} <= statuses


REJECTED: dict[str, Callable[[CHead, float], int]] = {
    "predict range": lambda x, huge: x.predict(np.full((2, x.d), huge))[0],
    "predict finite": lambda x, huge: x.predict([nan] * x.d)[0],
    "update range h": lambda x, huge: x.update(np.full((1, x.d), huge), np.eye(x.d_o)[:1]),
    "update range y": lambda x, huge: x.update(np.ones((2, x.d)), np.full((2, x.d_o), huge)),
    "update finite": lambda x, huge: x.update(np.ones((1, x.d)), [nan] * x.d_o),
    "update noise": lambda x, huge: x.update(np.ones((1, x.d)), np.eye(x.d_o)[:1], [-1.0]),
    "observe range": lambda x, huge: x.observe(np.full((2, x.d_o), huge)),
    "observe finite": lambda x, huge: x.observe([inf] * 2 * x.d_o),
    "observe noise": lambda x, huge: x.observe(np.eye(x.d_o)[[0, 1]], [-1.0]),
    "observe matrix": lambda x, huge: x.observe(np.eye(x.d_o)[[0, 1]], np.ones((x.d_o, x.d_o)) - 0.5 * np.eye(x.d_o)),
    "set_noise": lambda x, huge: int(C.kbt_set_noise(x.head, pointer(x.array([-1.0])), 1)),
    "set_prior": lambda x, huge: x.set_prior([[nan] * x.d] * x.d_o, [0.0] * x.d_o),
    "state_load": lambda x, huge: int(C.kbt_state_load(x.head, x.state()[:-1], len(x.state()) - 1)),
}


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("widths", [(3, 2), (2, 4, 8, 3)], ids=str)
def test_a_prediction_waits_to_be_observed_whatever_is_rejected_meanwhile(
    widths: tuple[int, ...], fields: dict[str, Any]
) -> None:
    head = CHead(*widths, max_rows=2, prior_var=[0.1] * 8, **fields)
    rng = np.random.default_rng(3)
    assert head.set_prior(rng.normal(size=(head.d_o, head.d)), np.zeros(head.d_o)) == C.KBT_OK
    for name, call in REJECTED.items():
        h, y = rng.normal(size=(2, head.d)), np.eye(head.d_o)[[0, 1]]
        undisturbed, result, other = head.copy(), ffi.new("kbt_result *"), ffi.new("kbt_result *")
        assert head.predict(h)[0] == undisturbed.predict(h)[0] == C.KBT_OK
        before = head.state()
        assert call(head, 0.9 * float(np.finfo(head.dtype).max)) not in (C.KBT_OK, C.KBT_GATED), name
        assert head.state() == before
        assert C.kbt_predicted_rows(head.head) == 2, name
        assert head.observe(y, result=result) == undisturbed.observe(y, result=other) == C.KBT_OK, name
        assert bytes(ffi.buffer(result)) == bytes(ffi.buffer(other)), name
        assert head.state() == undisturbed.state(), name


# ---- what the getters say ------------------------------------------------------------------------------------------


def twins(fields: dict[str, Any]) -> tuple[kbt.Head, CHead]:
    """The same settings through both doors."""
    rng = np.random.default_rng(5)
    python = kbt.Head(
        rng.normal(size=(2, 3)),
        rng.normal(size=2),
        hidden=(7,),
        prior_var=(1e-3, 0.5),
        noise_var=0.25,
        drift=0.0,
        output=("gaussian", "softmax")[fields.get("output", 0)],
        covariance=("full", "neuron", "diagonal")[fields["covariance"]],
        rule=("fuse", "replace")[fields.get("rule", 0)],
        softmax_order=fields.get("softmax_order", 1),
        noise=("constant", "adaptive", "multinomial")[fields.get("noise", 0)],
        input_var=1e-3,
        forgetting=fields.get("forgetting", 1.0),
        max_rows=2,
        dtype=("float32", "float64")[fields["dtype"]],
        seed=9,
    )
    return python, CHead(3, 7, 2, prior_var=[1e-3, 0.5], noise_var=0.25, input_var=1e-3, max_rows=2, **fields)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_c_and_python_are_the_same_head(fields: dict[str, Any]) -> None:
    python, c = twins(fields)
    rng = np.random.default_rng(5)
    assert c.set_prior(rng.normal(size=(2, 3)), rng.normal(size=2), 9) == C.KBT_OK
    assert c.state() == python.to_bytes()

    result = ffi.new("kbt_result *")
    softmax = python.config["output"] == "softmax"
    for step in range(20):
        rows = 1 + step % 2
        h = c.array(rng.normal(size=(rows, 3)))
        labels = rng.integers(0, 2, rows).astype(np.int32)
        y = labels if softmax else c.array(rng.normal(size=(rows, 2)))
        mean, cov, total = (np.zeros(n, c.dtype) for n in (2 * rows, 4 * rows * rows, 2 * rows))
        p = python.predict(h)
        assert C.kbt_predict(c.head, pointer(h), rows, pointer(mean), pointer(cov), pointer(total)) == C.KBT_OK
        for mine, theirs in ((mean, p.mean), (cov, p.cov), (total, p.total_var)):
            np.testing.assert_array_equal(mine, theirs.ravel())
        u = python.update(h, y)
        if softmax:
            status = C.kbt_update_labels(
                c.head, pointer(h), rows, ffi.cast("int32_t *", y.ctypes.data), NULL, 0, result
            )
        else:
            status = C.kbt_update(c.head, pointer(h), rows, pointer(y), NULL, 0, result)
        assert status == C.KBT_OK
        assert (result.nis, result.log_likelihood) == (u.nis, u.log_likelihood)
        assert c.state() == python.to_bytes()

    for i, layer in enumerate(python.layers):
        mean, cov = np.zeros_like(layer.mean), np.zeros_like(layer.cov)
        assert C.kbt_get_mean(c.head, i, pointer(mean)) == C.KBT_OK
        assert C.kbt_get_cov(c.head, i, pointer(cov)) == C.KBT_OK
        np.testing.assert_array_equal(mean, layer.mean)
        np.testing.assert_array_equal(cov, layer.cov)
    noise, count = np.zeros(4, c.dtype), ffi.new("int32_t *")
    assert C.kbt_get_noise(c.head, pointer(noise), count) == C.KBT_OK
    assert count[0] == 2
    np.testing.assert_array_equal(noise[:2], python.noise_var)
    assert C.kbt_samples(c.head) == python.samples == 20


def test_the_configuration_comes_back_canonical(head: CHead) -> None:
    head.cfg.widths[5] = 77  # behind the last layer: of no meaning
    head.cfg.prior_var[6] = 3.0
    slot, found = ffi.new("kbt_head **"), ffi.new("kbt_config *")
    assert C.kbt_init(head.cfg, pointer(head.arena), head.arena.size, slot) == C.KBT_OK
    assert C.kbt_get_config(slot[0], found) == C.KBT_OK
    assert list(found.widths) == [3, 6, 2] + [0] * 6
    assert list(found.prior_var) == [1.0, 1.0] + [0.0] * 6
    assert found.max_rows == 2


def test_noise_can_be_a_number_variances_or_a_matrix() -> None:
    head = CHead(3, 6, 2, noise=C.KBT_NOISE_MATRIX)
    count = ffi.new("int32_t *")
    for given, want in (([0.5], [0.5, 0.5]), ([0.5, 0.25], [0.5, 0.25]), ([1, 0.5, 0.5, 1], [1, 0.5, 0.5, 1])):
        R, got = head.array(given), np.zeros(4, np.float32)
        assert C.kbt_set_noise(head.head, pointer(R), R.size) == C.KBT_OK
        assert C.kbt_get_noise(head.head, pointer(got), count) == C.KBT_OK
        assert got[: count[0]].tolist() == want
    assert head.update(H, Y, [[2.0, 1.0], [1.0, 2.0]]) == C.KBT_OK


def test_results_that_are_not_wanted_may_be_null(head: CHead) -> None:
    mean, alone = np.zeros(2, np.float32), np.zeros(2, np.float32)
    assert C.kbt_predict(head.head, pointer(H), 1, pointer(alone), NULL, NULL) == C.KBT_OK
    assert C.kbt_predict(head.head, pointer(H), 1, pointer(mean), NULL, pointer(np.zeros(2, np.float32))) == C.KBT_OK
    np.testing.assert_array_equal(mean, alone)
    assert C.kbt_observe(head.head, pointer(Y), NULL, 0, NULL) == C.KBT_OK


@pytest.mark.parametrize("dtype", ["FLOAT32", "FLOAT64"])
def test_a_predicted_variance_is_finite_even_beside_the_largest_noise(dtype: str) -> None:
    head = CHead(2, 1, dtype=getattr(C, f"KBT_{dtype}"))
    assert head.set_prior(np.ones((1, 2)), [0.0]) == C.KBT_OK
    largest = np.finfo(head.dtype).max
    assert C.kbt_set_noise(head.head, pointer(head.array([largest])), 1) == C.KBT_OK
    h = head.array([1.0, np.sqrt(largest) * 1e-5])
    mean, cov, total = head.array([0.0]), head.array([0.0]), head.array([0.0])
    assert C.kbt_predict(head.head, pointer(h), 1, pointer(mean), pointer(cov), pointer(total)) == C.KBT_OK
    assert total[0] == largest > cov[0] > largest * 1e-11


# ---- the mailbox -----------------------------------------------------------------------------------------------------


def mailbox_of(head: CHead) -> tuple[Any, np.ndarray]:
    memory, _ = guarded(C.kbt_mailbox_bytes(head.head))
    slot = ffi.new("kbt_mailbox **")
    assert C.kbt_mailbox_init(head.head, pointer(memory), memory.size, slot) == C.KBT_OK
    return slot[0], memory


def test_a_mailbox_carries_what_was_learned_to_a_head_of_its_configuration_only(head: CHead) -> None:
    box, _memory = mailbox_of(head)
    reader, other = CHead(3, 6, 2, max_rows=2), CHead(3, 6, 2, max_rows=1)
    unlearned, state = reader.state(), head.state()
    assert unlearned != state
    before = other.state()
    for verb in (C.kbt_post, C.kbt_take):
        assert verb(other.head, box) == C.KBT_E_CONFIG
    assert other.state() == before
    assert C.kbt_take(reader.head, box) == C.KBT_OK
    assert reader.state() == state
    assert head.update(H, Y) == C.KBT_OK
    assert C.kbt_take(reader.head, box) == C.KBT_OK  # nothing new was posted
    assert reader.state() == state
    assert C.kbt_post(head.head, box) == C.KBT_OK
    assert C.kbt_take(reader.head, box) == C.KBT_OK
    assert reader.state() == head.state() != state


def test_what_a_reader_learns_by_itself_stays_with_it_and_is_gone_with_the_next_post(head: CHead) -> None:
    box, _memory = mailbox_of(head)
    reader, mirror = CHead(3, 6, 2, max_rows=2), CHead(3, 6, 2, max_rows=2)
    for _ in range(5):
        assert C.kbt_take(reader.head, box) == C.KBT_OK
        state = head.state()
        assert C.kbt_state_load(mirror.head, state, len(state)) == C.KBT_OK
        assert reader.state() == mirror.state() == head.state()
        for other in (reader, mirror):  # in the mailbox's memory as in its own
            assert other.update(2 * H, -Y) == C.KBT_OK
        assert reader.state() == mirror.state() != head.state()
        assert C.kbt_take(reader.head, box) == C.KBT_OK  # nothing new was posted
        assert reader.state() == mirror.state()
        assert head.update(H, Y) == C.KBT_OK
        assert C.kbt_post(head.head, box) == C.KBT_OK
        assert reader.state() == mirror.state()  # until it takes
    assert C.kbt_take(reader.head, box) == C.KBT_OK
    assert reader.state() == head.state()


def test_a_mailbox_needs_its_room_and_no_null(head: CHead) -> None:
    needed = C.kbt_mailbox_bytes(head.head)
    memory, guard = guarded(needed + 64)
    slot = ffi.new("kbt_mailbox **")
    start = pointer(memory)
    assert C.kbt_mailbox_bytes(NULL) == 0
    assert C.kbt_mailbox_init(head.head, start, needed - 1, slot) == C.KBT_E_SIZE
    assert C.kbt_mailbox_init(head.head, start + 8, needed, slot) == C.KBT_E_ALIGN
    for arguments in ((NULL, start, needed, slot), (head.head, NULL, needed, slot), (head.head, start, needed, NULL)):
        assert C.kbt_mailbox_init(*arguments) == C.KBT_E_NULL
    assert (memory == GUARD).all()
    box, _memory = mailbox_of(head)
    for verb in (C.kbt_post, C.kbt_take):
        assert verb(NULL, box) == verb(head.head, NULL) == C.KBT_E_NULL
    assert (guard == GUARD).all()


def test_a_recorder_begins_anew_with_what_its_head_takes(head: CHead) -> None:
    box, _memory = mailbox_of(head)
    reader = CHead(3, 6, 2, max_rows=2)
    room, _ = guarded(C.kbt_flight_bytes(reader.cfg, 4))
    flight = ffi.new("kbt_flight **")
    assert C.kbt_flight_init(reader.head, pointer(room), room.size, 4, flight) == C.KBT_OK
    assert reader.update(H, Y) == C.KBT_OK
    empty = C.kbt_flight_log_size(flight[0])
    assert C.kbt_take(reader.head, box) == C.KBT_OK
    assert C.kbt_flight_log_size(flight[0]) < empty
    pieces: list[bytes] = []
    sink = ffi.callback("kbt_sink", lambda _, data, count: pieces.append(bytes(ffi.buffer(data, count))))
    assert C.kbt_flight_log(flight[0], sink, NULL) == C.KBT_OK
    assert reader.state() in b"".join(pieces)


# ---- no allocation -------------------------------------------------------------------------------------------------

ALLOCATIONS = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kbt.h"

size_t alloc_count(void);

enum { UPDATES = 10000 };

static long count_of(kbt_config cfg) {
  static float h[2 * 16], y[2 * 3], mean[2 * 3], cov[6 * 6], total_var[2 * 3];
  int32_t labels[2];
  kbt_head *head;
  kbt_result result;
  const size_t bytes = kbt_arena_bytes(&cfg);
  void *arena = aligned_alloc(KBT_ARENA_ALIGN, bytes), *blob;
  size_t before;
  long k;
  int i;
  if (kbt_init(&cfg, arena, bytes, &head) != KBT_OK || kbt_set_prior(head, h, NULL, 0) != KBT_OK) return -1;
  blob = malloc(kbt_state_size(head));
  before = alloc_count();
  for (k = 0; k < UPDATES; ++k) {
    const int rows = cfg.max_rows, d = cfg.widths[0], outputs = cfg.widths[cfg.layers];
    kbt_status status;
    for (i = 0; i < rows * d; ++i) h[i] = (float)((k * 7 + i * 13) % 17) / 8.0F - 1.0F;
    for (i = 0; i < rows * outputs; ++i) y[i] = h[(i / outputs) * d + i % outputs];
    for (i = 0; i < rows * outputs; ++i) { /* a plant that changes and goes back */
      y[i] += 0.01F * (float)((k * 37 + i * 5) % 11 - 5);
      if (cfg.drift < 0.0 && k >= UPDATES / 3 && k < 2 * (UPDATES / 3)) y[i] = -y[i];
    }
    for (i = 0; i < rows; ++i) labels[i] = (int32_t)((k + i) % outputs);
    if (kbt_predict(head, h, rows, mean, cov, total_var) != KBT_OK) return -1;
    status = cfg.output == KBT_SOFTMAX ? kbt_update_labels(head, h, rows, labels, NULL, 0, &result)
                                       : kbt_update(head, h, rows, y, NULL, 0, &result);
    if (status != KBT_OK) return -1;
  }
  if (cfg.drift < 0.0) {
    kbt_belief belief;
    if (kbt_get_belief(head, &belief) != KBT_OK || belief.changes < 2) return -1;
  }
  if (kbt_state_save(head, blob, kbt_state_size(head)) || kbt_state_load(head, blob, kbt_state_size(head))) return -1;
  return (long)(alloc_count() - before);
}

int main(void) {
  kbt_config cfg;
  size_t before;
  int covariance, kind;
  for (covariance = 0; covariance < 3; ++covariance) {
    for (kind = 0; kind < 3; ++kind) {
      kbt_config_single(&cfg, 3, 3);
      cfg.layers = 2;
      cfg.widths[1] = 8;
      cfg.widths[2] = 3;
      cfg.prior_var[0] = 1e-3;
      cfg.max_rows = 2;
      cfg.covariance = covariance;
      cfg.rule = kind == 1 ? KBT_REPLACE : KBT_FUSE;
      cfg.output = kind == 2 ? KBT_SOFTMAX : KBT_GAUSSIAN;
      printf("%d-%d %ld\\n", covariance, kind, count_of(cfg));
    }
  }
  for (kind = 0; kind < 3; ++kind) {
    kbt_config_default(&cfg, kind == 0 ? 16 : 3, kind == 0 ? 1 : 3);
    cfg.max_rows = kind == 0 ? 1 : 2;
    if (kind == 2) cfg.noise = KBT_NOISE_FULL;
    printf("watchful-%d %ld\\n", kind, count_of(cfg));
  }
  before = alloc_count();
  free(malloc(100));
  free(aligned_alloc(64, 128));
  free(strdup("counted inside the C library"));
  printf("control %ld\\n", (long)(alloc_count() - before));
  return 0;
}
"""


@pytest.mark.long("counts the allocations of 90,000 updates, minutes of emulation")
def test_predict_and_update_allocate_nothing(tmp_path: Path, alloc_counter: Path) -> None:
    source = tmp_path / "allocations.c"
    source.write_text(ALLOCATIONS)
    options = ("-D_GNU_SOURCE", "-fno-builtin", alloc_counter)
    driver = build_with_installed(str(compiler("cc", "gcc", "clang")), source, tmp_path / "allocations", *options)
    lines = dict(line.split() for line in run(driver, env={"LD_PRELOAD": str(alloc_counter)}).splitlines())
    assert lines.pop("control") == "3"  # the counter sees what there is to see, also from inside other libraries
    assert len(lines) == 12
    assert set(lines.values()) == {"0"}
