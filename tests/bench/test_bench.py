"""The latency harness: its arithmetic against other means, its loops against the model itself, its files."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_onnx
from boards import PI4_CPUINFO, X86_CPUINFO, tree
from cabi import compiler
from command import call

import kbt_edge as kbt
from kbt_edge import _core
from kbt_edge.bench import board as boards
from kbt_edge.bench import compare, figures, loops, pictures, realtime, sweep, tables, workload
from kbt_edge.model import Model

pytestmark = pytest.mark.host_only("measures time, and an emulated board has no time of its own")

NO_COMPILED_TRUNK = compiler("cc", "gcc", "clang") is None or shutil.which("python3") is None


def quiet(message: str | None) -> None:
    pass


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control trunk of 4 states, 3 features, and a head for two outputs in other units."""
    head = kbt.Head(np.ones((2, 3)), hidden=(8,), prior_var=(1e-4, 0.25), noise_var=0.04)
    scaling: dict[str, Any] = {"input_mean": [1, 2, 3, 4], "input_scale": 0.5, "output_scale": [10.0, 3.0]}
    model = Model(tiny_onnx.Control().onnx, head, output_offset=[5.0, 0.0], **scaling)
    return model.save(tmp_path_factory.mktemp("bench") / "bundle")


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1000, 1001, 2999, 20_000])
def test_percentiles_are_those_of_the_empirical_distribution(count: int) -> None:
    ns = np.random.default_rng(count).lognormal(8, 2, count)
    told = figures.summary(ns)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999)):
        assert told[name] == np.quantile(ns, share, method="inverted_cdf"), name
    assert (told["min"], told["max"], told["count"]) == (ns.min(), ns.max(), count)


def test_a_percentile_that_no_sample_supports_is_not_told() -> None:
    told = figures.summary(np.arange(1.0, 1000.0))
    assert told["p99_9"] is None
    assert told["p99"] == 990
    assert figures.summary(np.arange(5.0))["p90"] is None


def test_histogram_counts_every_sample_where_it_belongs() -> None:
    ns = np.random.default_rng(0).lognormal(9, 1.5, 5000)
    binned = figures.histogram(ns)
    edges = figures.histogram_edges(binned)
    counts, _ = np.histogram(ns, edges)
    assert counts.tolist() == binned["counts"]
    assert sum(binned["counts"]) == 5000
    np.testing.assert_allclose(np.diff(np.log10(edges)), 1 / figures.BINS_PER_DECADE)


def test_a_growth_exponent_is_found_through_noise() -> None:
    sizes = [8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    rng = np.random.default_rng(0)
    times = [3 * size**1.7 * rng.lognormal(0, 0.02) for size in sizes]
    found = figures.fit_exponent(sizes, times)
    assert found["all"] == pytest.approx(np.polyfit(np.log(sizes), np.log(times), 1)[0])
    assert found["all"] == pytest.approx(1.7, abs=0.05)
    with_fixed_cost = [1e4 + size**2 for size in sizes]
    found = figures.fit_exponent(sizes, with_fixed_cost)
    assert found["all"] < found["larger_half"] < 2


@pytest.mark.parametrize(
    ("ns", "said"),
    [(0.4, "0 ns"), (999, "999 ns"), (1000, "1.00 µs"), (12_345, "12.3 µs"), (1.5e6, "1.50 ms"), (2e9, "2.00 s")],
)
def test_durations_are_readable(ns: float, said: str) -> None:
    assert figures.duration(ns) == said
    assert figures.duration(None) == "–"


def queue(service: list[float], period: float) -> tuple[list[float], list[float]]:
    """A loop that serves releases in order, simulated step by step: when each started and was done."""
    started, done, free = [], [], 0.0
    for k, work in enumerate(service):
        start = max(free, k * period)
        free = start + work
        started.append(start)
        done.append(free)
    return started, done


def test_one_stall_is_charged_to_every_release_that_it_delayed() -> None:
    service = [0.1e6] * 2000  # 0.1 ms of each 1 ms
    service[500] = 50e6
    started, done = queue(service, 1e6)
    told = figures.paced_figures(np.array(started), np.array(done), 1e6, 1e6, 0)
    late = [done[k] - k * 1e6 > 1e6 for k in range(2000)]
    assert told["missed"] == sum(late) == told["longest_run_of_misses"]
    assert told["missed"] > 50  # what the stall held up, and what had to be caught up with afterwards
    # Timed from when the loop got round to each step, one step in 2000 would have been slow, and p99.9 perfect.
    assert told["service"]["p99_9"] == pytest.approx(0.1e6)
    assert told["response"]["p99"] > 30e6
    assert told["response"]["max"] == pytest.approx(50e6)


def test_misses_in_a_row_are_counted() -> None:
    done = np.array([5.0, 12, 13, 5, 16, 17, 18, 5])
    told = figures.paced_figures(np.zeros(8) + 10 * np.arange(8), done + 10 * np.arange(8), 10, 10, 0)
    assert (told["missed"], told["longest_run_of_misses"]) == (5, 3)


def test_what_is_mostly_clock_is_reported_as_a_bound() -> None:
    releases = 1e6 * np.arange(2000)
    late = np.where(np.arange(2000) < 100, 5000.0, 60.0)  # 5 % of the releases are late
    told = figures.paced_figures(releases + late, releases + late + 900, 1e6, 1e6, 400.0)
    jitter = told["release_jitter"]
    assert [jitter[key] for key in ("min", "p50", "p90", "p99", "max")] == [400, 400, 400, 5000, 5000]
    assert [figures.figure(jitter, key) for key in ("p90", "p99")] == ["≤ 400 ns", "5.00 µs"]
    assert sum(jitter["histogram"]["counts"]) == 2000
    assert figures.figure(told["response"], "p50") == "960 ns"
    assert told["service"]["p99_9_over_p50"] == 1.0
    shorter = figures.paced_figures(releases, releases + 300, 1e6, 1e6, 400.0)
    assert shorter["service"]["p99_9_over_p50"] is None  # a bound over a bound is no ratio


# ---- the recorder ----------------------------------------------------------------------------------------------------


def test_a_full_recorder_writes_nowhere() -> None:
    recorder = _core.Recorder(3, False)
    for _ in range(5):
        recorder.mark()
    assert recorder.room == 0
    assert len(recorder.stamps) == 3
    recorder.clear()
    assert (recorder.room, len(recorder.stamps)) == (3, 0)


def test_mark_outlives_the_name_of_its_recorder() -> None:
    mark = _core.Recorder(10, False).mark
    gc.collect()
    mark()


@pytest.mark.parametrize("clock", sorted({loops.TRUSTED_CLOCKS.get(os.uname().machine), None}, key=str))
def test_an_interval_lies_between_the_intervals_inside_and_around_it(clock: str | None) -> None:
    harness = loops.Harness(clock, os.uname().machine)
    assert harness.use_counter == (clock is not None)
    recorder = harness.recorder(2)
    outer = time.monotonic_ns()
    recorder.mark()
    inner = time.monotonic_ns()
    time.sleep(0.05)
    inner = time.monotonic_ns() - inner
    recorder.mark()
    outer = time.monotonic_ns() - outer
    told = np.diff(harness.ns(recorder))[0]
    assert 0.999 * inner <= told <= 1.001 * outer


@pytest.mark.parametrize("spin", [0, 300_000])
def test_no_release_comes_early_and_a_stalled_loop_is_late_for_all_it_missed(spin: int) -> None:
    """The recorder itself, with a step that once takes 60 ms: whatever else this machine does, 58 releases are late."""
    period, steps = 1_000_000, 150
    recorder = _core.Recorder(2 * steps, False)
    wait, mark = recorder.wait, recorder.mark
    epoch = time.monotonic_ns() + 5_000_000
    recorder.pace(epoch, period, spin)
    for k in range(steps):
        wait()
        mark()
        if k == 20:
            time.sleep(0.06)
        mark()
    stamps = recorder.stamps.astype(np.int64).reshape(-1, 2) - epoch
    assert (stamps[:, 0] >= period * np.arange(steps)).all()
    told = figures.paced_figures(stamps[:, 0].astype(float), stamps[:, 1].astype(float), period, period, 0)
    assert told["missed"] >= 58
    assert told["response"]["max"] >= 60e6


def test_a_stop_of_the_whole_process_is_seen() -> None:
    script = """
from kbt_edge import _core
recorder = _core.Recorder(2000, False)
print("ready", flush=True)
recorder.watch(2_000_000_000, 80_000_000)
print(*recorder.stamps)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)  # into the watch
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        child.send_signal(signal.SIGCONT)
        stamps = np.array(child.stdout.read().split(), np.int64)
    lengths = np.diff(stamps.reshape(-1, 2), axis=1)
    assert lengths.min() >= 80_000_000
    assert lengths.max() >= 95_000_000  # the signals themselves take their time
    assert (np.diff(stamps) >= 0).all()


def test_stops_are_counted_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(_core.Recorder):
        def watch(self, duration_ns: int, shortest_ns: int) -> None:
            assert shortest_ns == 2000  # a reading is 5 % of it
            self.ends = np.array([[k * 10**6, k * 10**6 + (8000 if k else 3 * 10**6)] for k in range(50)], np.uint64)

        @property
        def stamps(self) -> Any:
            return self.ends.ravel()

    monkeypatch.setattr(_core, "Recorder", Stopped)
    harness = loops.Harness.__new__(loops.Harness)
    harness.paced_overhead = {"c": 100.0, "python": 200.0}
    told = loops.stops(harness)
    assert (told["per_second"], told["p50"], told["max"]) == (100, 8000, 3e6)  # 50 in half a second
    assert told["share"] == pytest.approx((3e6 + 49 * 8000) / 5e8)
    assert tables.stops_text(told) == (
        "a busy loop was stopped 100 times a second for 2.00 µs or more: 8.00 µs typically, 3.00 ms at most, "
        "0.7 % of the time"
    )
    monkeypatch.setattr(Stopped, "stamps", np.zeros(0, np.uint64))
    assert tables.stops_text(loops.stops(harness)) == "a busy loop was stopped 0 times a second for 2.00 µs or more"


# ---- the loops -------------------------------------------------------------------------------------------------------


def backends() -> list[str]:
    return ["onnxruntime"] if NO_COMPILED_TRUNK else ["compiled", "onnxruntime"]


@pytest.mark.parametrize("backend", backends())
def test_the_c_loop_learns_what_python_learns(bundle: Path, backend: str) -> None:
    pytest.importorskip("emx_onnx_cgen" if backend == "compiled" else "onnxruntime")
    work = workload.load(str(bundle), backend, seed=3)
    assert work.whole == (backend == "compiled")
    same = Model.load(bundle, backend=backend)
    for inputs, y in zip(work.inputs, work.targets, strict=True):
        same.predict(*inputs)
        same.observe(y)
    recorder = _core.Recorder(10_000, False)
    assert work.loop.steps(0, workload.SAMPLES, 1, recorder) == 0
    assert work.c_model.head.to_bytes() == same.head.to_bytes()
    for inputs, y in zip(work.inputs, work.targets, strict=True):
        for _ in range(2):  # repeating a prediction learns nothing, learning twice is learning twice
            same.predict(*inputs)
            same.observe(y)
    assert work.loop.stages(0, workload.SAMPLES, 3, 2, recorder) == 0
    assert work.c_model.head.to_bytes() == same.head.to_bytes()
    assert len(recorder.stamps) == (2 + 4) * workload.SAMPLES


def test_the_c_loop_takes_labels_rows_and_float64() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(5, 4))
    settings: dict[str, Any] = {"output": "softmax", "noise": "multinomial", "max_rows": 3, "dtype": "float64"}
    head, same = kbt.Head(weight, **settings), kbt.Head(weight, **settings)
    h, labels = rng.normal(size=(10, 3, 4)), rng.integers(0, 5, (10, 3)).astype(np.int32)
    for rows, targets in zip(h, labels, strict=True):
        same.predict(rows)
        same.observe(targets)
    loop = _core.Loop(head.core, 3, h.reshape(10, -1), labels)
    assert loop.steps(0, 10, 1, _core.Recorder(20, False)) == 0
    assert head.to_bytes() == same.to_bytes()


def test_the_c_loop_stops_at_a_sample_that_is_rejected() -> None:
    head = kbt.Head(np.ones((1, 2)))
    h = np.ones((4, 2), np.float32)
    h[2] = np.nan
    loop = _core.Loop(head.core, 1, h, np.ones((4, 1), np.float32))
    assert loop.steps(0, 4, 1, _core.Recorder(8, False)) != 0
    assert head.samples == 2


def test_arrays_of_another_size_never_reach_the_c_loop() -> None:
    head = kbt.Head(np.ones((1, 2)))
    good = np.ones((4, 2), np.float32)
    for x, y in (
        (good[:, :1], good[:, :1]),
        (good, good),
        (good.astype(np.float64), good[:, :1]),
        (good, good[:2, :1]),
    ):
        with pytest.raises(ValueError, match="x, y"):
            _core.Loop(head.core, 1, np.ascontiguousarray(x), np.ascontiguousarray(y))


def test_nothing_is_allocated_while_measuring(alloc_counter: Path) -> None:
    script = """
import ctypes, itertools
import numpy as np
from kbt_edge import Head, _core
count = ctypes.CDLL(None).alloc_count
head = Head(np.ones((1, 4)), hidden=(8,))
loop = _core.Loop(head.core, 1, np.ones((4, 4), np.float32), np.ones((4, 1), np.float32))
recorder = _core.Recorder(100_000, True)
recorder.pace(1, 1, 0)
mark, wait = recorder.mark, recorder.wait
def times(n):
    loop.stages(0, n, 1, 1, recorder)
    loop.steps(0, n, 1, recorder)
    loop.paced(0, n, recorder)
    for _ in itertools.repeat(None, n):
        wait()
        mark()
times(10)
taken = []
for n in (10, 5000):
    before = count()
    times(n)
    taken.append(count() - before)
before = count()
again = [bytes(5000) for _ in range(7)]
print(*taken, count() - before >= 7)
"""
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_PRELOAD": str(alloc_counter), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert int(told[1]) <= int(told[0]) < 20  # a call may cost a few, its steps nothing
    assert told[2] == "True"  # the counter sees what there is


# ---- the harness -----------------------------------------------------------------------------------------------------


def test_a_figure_that_is_mostly_clock_is_not_reported() -> None:
    harness = loops.Harness(None, "other")
    harness.c_overhead = 20.0
    assert harness.row("c", "observe", np.full(1000, 399.0), 20.0)["too_short"]
    row = harness.row("c", "observe", np.full(1000, 401.0), 20.0)
    assert row["overhead_share"] == pytest.approx(20 / 401)
    for length in (1.0, 10.0, 100.0, 399.0):
        repeat = harness.repeats(length)
        row = harness.row("c", "trunk", np.full(1000, repeat * length + 20.0), 20.0, repeat)
        assert row["overhead_share"] <= 0.025
        assert row["p50"] == pytest.approx(length, rel=0.026)
    assert harness.repeats(1e6) == 1


def test_settings_are_given_back() -> None:
    affinity, policy, collecting = os.sched_getaffinity(0), os.sched_getscheduler(0), gc.isenabled()
    tiny = np.float32(1e-38)
    with realtime.settings(fifo=1, cpu=min(affinity), ftz=True) as told:
        state = {entry["name"]: entry for entry in told}
        assert os.sched_getaffinity(0) == {min(affinity)}
        assert not gc.isenabled()
        assert state["gc"]["applied"]
        assert state["cpu"]["applied"]
        assert state["fifo"]["applied"] == (os.sched_getscheduler(0) == os.SCHED_FIFO)
        if state["ftz"]["applied"]:
            assert tiny / np.float32(10) == 0
    assert os.sched_getaffinity(0) == affinity
    assert os.sched_getscheduler(0) == policy
    assert gc.isenabled() == collecting
    assert gc.get_freeze_count() == 0
    assert tiny / np.float32(10) > 0


def test_what_the_system_rejects_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", reject)
    with realtime.settings(fifo=50, cpu=4095, ftz=False) as told:
        state = {entry["name"]: entry for entry in told}
    assert not state["fifo"]["applied"]
    assert "not permitted" in state["fifo"]["detail"]
    assert not state["cpu"]["applied"]
    assert state["cpu"]["detail"]
    assert state["ftz"]["asked"] == "no"


# ---- the board -------------------------------------------------------------------------------------------------------


def test_a_raspberry_pi_is_described(tmp_path: Path) -> None:
    policy = "sys/devices/system/cpu/cpufreq/policy0/"
    root = tree(
        tmp_path,
        {
            "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0",
            "proc/cpuinfo": PI4_CPUINFO,
            "proc/sys/kernel/osrelease": "6.6.51+rpt-rpi-v8\n",
            "proc/sys/kernel/version": "#1 SMP PREEMPT Debian 1:6.6.51-1+rpt3 (2024-10-08)\n",
            "proc/meminfo": "MemTotal:        3884404 kB\nMemFree:         2884404 kB\n",
            "proc/loadavg": "0.52 0.41 0.30 2/180 1234\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "arch_sys_counter\n",
            policy + "affected_cpus": "0 1 2 3\n",
            policy + "scaling_governor": "ondemand\n",
            policy + "scaling_cur_freq": "600000\n",
            policy + "scaling_min_freq": "600000\n",
            policy + "scaling_max_freq": "1800000\n",
            policy + "cpuinfo_max_freq": "1800000\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "48686\n",
        },
    )
    answers = {"measure_temp": "temp=48.3'C\n", "get_throttled": "throttled=0x50005\n"}

    def tool(name: str, *arguments: str) -> str | None:
        return answers.get(arguments[0]) if name == "vcgencmd" else None

    board = boards.Board(root, tool, "aarch64")
    told, state = board.describe(), board.state()
    assert told["board"] == "Raspberry Pi 4 Model B Rev 1.4"
    assert told["cpu"] == "2 × Cortex-A72 (part 0xd08)"
    assert (told["kernel"], told["kernel_preemption"]) == ("6.6.51+rpt-rpi-v8", "PREEMPT")
    assert told["memory_bytes"] == 3884404 * 1024
    assert told["clocksource"] == "arch_sys_counter"
    assert not told["virtual"]
    (policy_told,) = state["frequency"]
    assert policy_told["governor"] == "ondemand"
    assert (policy_told["now_mhz"], policy_told["min_mhz"], policy_told["max_mhz"]) == (600, 600, 1800)
    assert state["temperature_c"] == {"cpu-thermal": pytest.approx(48.686), "vcgencmd": 48.3}
    assert state["throttled"] == [
        "under-voltage now",
        "throttled now",
        "under-voltage since boot",
        "throttled since boot",
    ]
    assert state["load_average"] == [0.52, 0.41, 0.30]
    json.dumps([told, state], allow_nan=False)


def test_a_jetson_is_described(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
            "proc/cpuinfo": PI4_CPUINFO.replace("0xd08", "0xd42"),
            "proc/sys/kernel/version": "#1 SMP PREEMPT_RT Wed Jan 8 01:13:04 PST 2025\n",
            "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "51062\n",
            "sys/class/thermal/thermal_zone1/type": "cv0-thermal\n",  # no temp: a sensor that is switched off
            "sys/class/hwmon/hwmon3/oc1_event_cnt": "0\n",
            "sys/class/hwmon/hwmon3/oc3_event_cnt": "7\n",
        },
    )

    def tool(name: str, *arguments: str) -> str | None:
        return "NV Power Mode: 15W\n1\n" if name == "nvpmodel" else None

    board = boards.Board(root, tool, "aarch64")
    assert board.describe()["cpu"] == "2 × Cortex-A78AE (part 0xd42)"
    assert board.jetson_release() == "R36.4.3"
    assert board.preemption() == "PREEMPT_RT"
    state = board.state()
    assert state["power_mode"] == "15W"
    assert state["temperature_c"] == {"cpu-thermal": pytest.approx(51.062)}
    assert state["throttled"] == ["oc3 over-current 7 times since boot"]


def test_what_a_board_does_not_tell_is_not_guessed(tmp_path: Path) -> None:
    board = boards.Board(tmp_path, lambda *_: None, "riscv64")
    told, state = board.describe(), board.state()
    assert (told["board"], told["cpu"], told["kernel"], told["clocksource"]) == (None, None, None, None)
    assert (state["frequency"], state["temperature_c"], state["throttled"]) == ([], {}, None)
    assert boards.load_between(state, state) is None


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("#1 SMP PREEMPT_DYNAMIC Debian 6.1.0", "PREEMPT_DYNAMIC"),
        ("#1 SMP PREEMPT RT Debian 5.10", "PREEMPT_RT"),
        ("#1 SMP Debian 6.1.0", "none"),
    ],
)
def test_preemption_is_read_from_the_kernel(tmp_path: Path, version: str, said: str) -> None:
    root = tree(tmp_path, {"proc/sys/kernel/version": version})
    assert boards.Board(root, lambda *_: None).preemption() == said


def test_parsers_take_nothing_for_something() -> None:
    assert boards.parse_cpuinfo(X86_CPUINFO) == "Some CPU @ 3.00GHz"
    assert boards.parse_cpuinfo("CPU implementer : 0x99\nCPU part : 0x123\n") == "1 × implementer 0x99 part 0x123"
    assert boards.parse_throttled("throttled=0x0\n") == []
    assert boards.parse_throttled("VCHI initialization failed\n") is None
    assert boards.parse_vcgencmd_temp("error") is None
    assert boards.parse_nvpmodel("NV Fan Mode:quiet\nNV Power Mode: MAXN\n0\n") == "MAXN"
    assert boards.parse_nvpmodel(None) is None


def test_the_load_of_others_is_what_is_left_of_the_busy_time() -> None:
    hz, cores = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    before = {"cpu_seconds": boards.parse_stat("cpu  100 0 100 1000 0 0 0 0 0 0\n"), "own_cpu_seconds": 1.0}
    busy, steal, wall = 3 * hz, hz // 2, 10 * hz  # in ticks, over ten seconds
    idle = wall * cores - busy - steal
    after = {"cpu_seconds": boards.parse_stat(f"cpu  {100 + busy} 0 100 {1000 + idle} 0 0 0 {steal} 0 0\n")}
    load = boards.load_between(before, after | {"own_cpu_seconds": 2.0})
    assert load is not None
    assert load["others_cores"] == pytest.approx(0.2)
    assert load["stolen_cores"] == pytest.approx(0.05)


# ---- the sweep -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "neuron", "diagonal"])
@pytest.mark.parametrize("hidden", [0, 12])
def test_factors_are_as_many_as_the_head_stores(structure: str, hidden: int) -> None:
    size = sweep.Size(d=5, hidden=hidden, outputs=3, structure=structure)
    head = kbt.Head(np.ones((3, 5)), hidden=(12,) if hidden else (), covariance=structure, drift=0.0)
    stored = 0
    for layer in head.layers:
        blocks = layer.cov if layer.cov.ndim == 3 else layer.cov[None]
        stored += layer.cov.size if structure == "diagonal" else sum(len(np.tril_indices(len(b))[0]) for b in blocks)
    assert sweep.factors(size) == stored


def test_a_sweep_leaves_out_what_would_not_fit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SIZES", {"d": (4, 8, 16, 64)})
    monkeypatch.setattr(sweep, "MAX_BYTES", 2**20)
    monkeypatch.setattr(sweep, "SECONDS", 0.002)
    harness = loops.Harness(None, "other")
    told = sweep.run(["d", "structure"], harness, 0, quiet)
    assert {point["structure"] for point in told["points"]} == {"full", "neuron", "diagonal", "shared"}
    assert any("full float32: d = 64 left out" in note for note in told["notes"])
    flat = [point for point in told["points"] if "no hidden layer" in point["curve"]]
    assert [point["d"] for point in flat] == [4, 8, 16, 64]
    assert all(point["overhead_share"] <= 0.05 and point["bytes"] <= 2**20 for point in told["points"])
    assert [fit["of"] for fit in told["exponents"]] == ["factors"] * 5


def test_unknown_axes_are_rejected() -> None:
    with pytest.raises(kbt.RangeError, match="'width'"):
        sweep.axes("d,width")
    assert sweep.axes("dtype, d") == ["d", "dtype"]


# ---- the command -----------------------------------------------------------------------------------------------------


def bench(capsys: pytest.CaptureFixture[str], bundle: Path, out: Path, *more: str) -> tuple[str, dict[str, Any]]:
    paced = ("--rate", "1000", "--duration", "0.1", "--deadline-ms", "2")
    code, text, err = call(capsys, "bench", str(bundle), "--steps", "1000", "--out", str(out), *paced, *more)
    assert (code, err) == (0, "")
    return text, json.loads((out / "bench.json").read_text())


def test_a_benchmark_from_end_to_end(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sweep, "SIZES", {"d": (4, 8, 16)})
    monkeypatch.setattr(sweep, "SECONDS", 0.002)
    text, told = bench(capsys, bundle, tmp_path / "out", "--sweep", "d,structure")
    rows = {(row["loop"], row["stage"]): row for row in told["back_to_back"]["rows"]}
    assert ("python", "step") in rows
    assert ("c", "step") in rows or ("c", "predict + observe") in rows
    for row in rows.values():
        assert row.get("too_short") or row["p50"] <= row["p90"] <= row["p99"] <= row["max"]
    assert told["harness"]["largest_overhead_share"] <= 0.05
    assert told["harness"]["smallest_figure_ns"] <= min(row["p50"] for row in rows.values() if "p50" in row)
    assert [loop["loop"] for loop in told["paced"]["loops"]] == ["c", "python"]
    for loop in told["paced"]["loops"]:
        assert loop["steps"] == 100
        assert loop["response"]["p50"] >= loop["service"]["p50"]
        assert 0 < loop["overhead_share"] <= told["harness"]["largest_overhead_share"]
    assert told["board"]["machine"] == os.uname().machine
    assert {entry["name"] for entry in told["settings"]} == {"cpu", "fifo", "memory", "timer", "gc", "ftz"}
    assert told["stops"]["per_second"] >= 0
    for words in (
        "p99.9",
        "whole step",
        "a busy loop was stopped",
        "missed deadlines",
        "harness",
        "stored factors",
        "load",
    ):
        assert words in text
    for name in ("latency", "release", "sweep"):
        assert Path(told["files"][name]).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert set(re.findall(r"""(?:src|href)\s*=\s*["']?([^"'> ]{0,5})""", page)) == {"data:"}  # nothing to be fetched
    assert "<script" not in page


@pytest.mark.slow("takes seconds")
def test_a_benchmark_without_matplotlib_says_so(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    text, told = bench(capsys, bundle, tmp_path / "out", "--baselines", "--backend", "onnxruntime", "--loop", "c")
    assert set(told["files"]) == {"json", "html"}
    assert "matplotlib is not installed" in text
    missing = {row["name"]: row.get("missing") for row in told["baselines"]}
    assert missing["torch, one Adam step on the readout"] == "torch is not installed"
    assert missing["NumPy reference, update of the head"] is None
    stages = [(row["loop"], row["stage"]) for row in told["back_to_back"]["rows"]]
    assert ("python", "trunk") in stages  # onnxruntime is called from Python
    assert ("c", "predict + observe") in stages


@pytest.mark.slow("compiles a trunk")
def test_token_models_are_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    code, out, _ = call(
        capsys, "bench", "tokens", "--backend", "onnxruntime", "--steps", "256", "--out", str(tmp_path), "--json"
    )
    assert code == 0
    told = json.loads(out)
    assert told["workload"]["head"]["output"] == "softmax"
    assert not any(row["stage"] == "overhead" for row in told["back_to_back"]["rows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "10"], "--steps"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "100000", "--duration", "3600"], "releases"),
        (["--deadline-ms", "5"], "--rate"),
        (["--spin", "5"], "--rate"),
        (["--rate", "1000", "--spin", "1001"], "--spin"),
        (["--fifo", "100"], "--fifo"),
        (["--sweep", "width"], "width"),
        (["--compare", "one.json"], "two"),
    ],
)
def test_options_that_make_no_sense_are_rejected(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = call(capsys, "bench", *arguments, "--out", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    assert said in err
    assert not (tmp_path / "out").exists()


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """A result as bench writes it, cut down to what is compared."""

    p50: float
    board: str = "Board A"
    sha: str = "0"

    def write(self, path: Path) -> Path:
        figures = {"p50": self.p50, "p90": 1.5 * self.p50, "p99": 2 * self.p50, "p99_9": None, "max": 9 * self.p50}
        loop = {"loop": "c", "missed": 3, "release_jitter": figures, "service": figures, "response": figures}
        result = {
            "format": "kbt-edge bench 1",
            "kbt_edge": "0",
            "board": {"board": self.board, "cpu": "cpu", "machine": "m", "kernel": "6", "kernel_preemption": "none"},
            "workload": {"trunk_sha256": self.sha, "trunk_backend": "compiled", "head": {"widths": [4, 1]}},
            "after": {"frequency": [{"governor": "performance"}]},
            "load": {"others_cores": 0.25, "stolen_cores": 0.0},
            "settings": [{"name": "fifo", "asked": "80", "applied": True}],
            "back_to_back": {"rows": [{"loop": "c", "stage": "step", **figures}]},
            "paced": {"rate_hz": 200, "loops": [loop]},
        }
        path.write_text(json.dumps(result))
        return path


def test_results_are_compared_figure_by_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = Result(1000).write(tmp_path / "a.json"), Result(2500, "Board B").write(tmp_path / "b.json")
    told = compare.side_by_side([a, b])
    rows = {row["name"]: row for row in told["rows"]}
    step = rows["C loop, no Python: whole step, p50"]
    assert (step["figures"], step["ratios"]) == ([1000, 2500], [2.5])
    assert rows["C loop, no Python: whole step, p99.9"]["ratios"] == [None]
    assert rows["paced 200 Hz, C loop, no Python: missed"]["figures"] == [3, 3]
    assert told["same_model"]
    code, out, _ = call(capsys, "bench", "--compare", str(a), str(b))
    assert code == 0
    assert re.search(r"whole step, p50 +1\.00 µs +2\.50 µs +2\.50", out)
    assert "Board B" in out
    assert "governor performance, fifo 80, 0.25 cores busy with others" in out


def test_other_models_are_not_passed_off_as_other_boards(tmp_path: Path) -> None:
    files = [Result(1, sha=sha).write(tmp_path / f"{sha}.json") for sha in ("x", "y")]
    told = compare.side_by_side(files)
    assert not told["same_model"]
    assert "models differ" in compare.text(told)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "something else"}', "\x00\x01"])
def test_foreign_files_are_rejected(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Result(1).write(tmp_path / "good.json"), tmp_path / "bad.json"
    bad.write_text(content)
    code, _, err = call(capsys, "bench", "--compare", str(good), str(bad))
    assert code == 1
    assert "bad.json" in err


def test_a_loop_that_is_awake_before_its_release_says_so() -> None:
    part = {"rate_hz": 1000.0, "duration_s": 1.0, "deadline_ms": 1.0, "spin_us": 300.0}
    assert tables.paced_title(part).endswith("deadline 1 ms, awake 300 µs before each release")
    assert tables.paced_title({**part, "spin_us": 0.0}).endswith("deadline 1 ms")
