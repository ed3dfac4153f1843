"""kbt-edge doctor: what it finds on boards of several kinds, and what it advises."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from boards import PI4_CPUINFO, X86_CPUINFO, tree
from command import call

from kbt_edge.bench import doctor
from kbt_edge.bench.board import Board
from kbt_edge.bench.doctor import Finding, Probe, examine_board, examine_package
from kbt_edge.errors import BackendError


class Fake(Probe):
    """A board where all is well, unless told otherwise."""

    def __init__(self, without: tuple[str, ...] = (), trunk: str = "", permitted: bool = True, cc: str | None = "cc 1"):
        self.without, self.trunk_error, self.permitted, self.cc = without, trunk, permitted, cc

    def installed(self, module: str) -> bool:
        return module not in self.without

    def versions(self) -> dict[str, str | None]:
        return {"onnxruntime": "1.0", "matplotlib": "3.0"}

    def compiler(self) -> str | None:
        return self.cc

    def trunk(self) -> tuple[str, str]:
        if self.trunk_error:
            raise BackendError(self.trunk_error)
        return "compiled", "built now"

    def cache_problem(self) -> str | None:
        return None

    def may_use_fifo(self) -> bool:
        return self.permitted

    def may_lock_memory(self) -> bool:
        return self.permitted

    def memory_limit(self) -> str:
        return "8192 KiB"

    def environment(self, name: str) -> str | None:
        return "1"


def no_tool(*_: str) -> str | None:
    return None


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def can_run_a_trunk() -> bool:
    """Found without loading one, as the doctor does. armv7l has no onnxruntime, and seldom the generator."""
    generator = find_spec("emx_onnx_cgen") and any(map(shutil.which, ("cc", "gcc", "clang")))
    return bool(find_spec("onnxruntime") or generator)


@pytest.mark.slow("compiles trunks")
def test_the_doctor_says_whether_this_machine_can_do_the_main_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a library found in the cache would do as well
    able = can_run_a_trunk()
    code, out, err = call(capsys, "doctor", "--json")
    assert (code, err) == (0 if able else 1, "")
    works = {finding["name"]: finding for finding in json.loads(out)["works"]}
    assert (works["head"]["state"], works["trunk"]["state"]) == ("ok", "ok" if able else "broken")
    assert able or "a Head fed with your own h can" in works["trunk"]["why"]
    code, out, _ = call(capsys, "doctor")
    assert code == (0 if able else 1)
    assert ("kbt_edge works on this board" in out) == able


def test_a_head_that_computes_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Probe().head_learns() is None
    monkeypatch.setattr(doctor.Head, "update", lambda self, h, y: None)
    assert "predicts 0" in str(Probe().head_learns())


def test_armv7l_without_onnxruntime_lacks_nothing(tmp_path: Path) -> None:
    found = by_name(list(examine_package(Board(tmp_path, no_tool, "armv7l"), Fake(("onnxruntime",)))))
    assert found["onnxruntime"].state == "ok"
    assert "none exists for armv7l" in found["onnxruntime"].found
    assert all(finding.state == "ok" for finding in found.values())


def test_a_board_that_cannot_run_a_trunk_is_told_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Fake(("onnxruntime", "emx_onnx_cgen"), trunk="onnxruntime is not installed", cc=None)
    found = by_name(list(examine_package(Board(tmp_path, no_tool, "aarch64"), probe)))
    assert found["trunk"].state == "broken"
    assert found["onnxruntime"].do == "pip install onnxruntime"
    assert found["C compiler"].do == "sudo apt install gcc libc6-dev"
    assert "kbt-edge[codegen]" in found["C generator"].do
    on_armv7l = by_name(list(examine_package(Board(tmp_path, no_tool, "armv7l"), probe)))
    assert not on_armv7l["onnxruntime"].do  # it cannot be installed there

    monkeypatch.setattr(doctor, "Probe", lambda: probe)
    code, out, err = call(capsys, "doctor")
    assert (code, err) == (1, "")
    assert "broken   trunk" in out
    assert "kbt_edge works on this board" not in out


def test_without_pictures_the_doctor_names_the_extra(tmp_path: Path) -> None:
    found = by_name(list(examine_package(Board(tmp_path, no_tool), Fake(("matplotlib", "scipy")))))
    assert found["matplotlib"].state == "missing"
    assert "kbt-edge[demo]" in found["matplotlib"].do


def raspberry_pi(root: Path) -> Board:
    policy, idle = "sys/devices/system/cpu/cpufreq/policy0/", "sys/devices/system/cpu/cpu0/cpuidle/state1/"
    tree(
        root,
        {
            "proc/cpuinfo": PI4_CPUINFO,
            "proc/sys/kernel/osrelease": "6.6.51+rpt-rpi-v8\n",
            "proc/sys/kernel/version": "#1 SMP PREEMPT Debian\n",
            "proc/sys/kernel/sched_rt_runtime_us": "950000\n",
            "proc/sys/kernel/sched_rt_period_us": "1000000\n",
            "proc/swaps": "Filename Type Size Used Priority\n/var/swap file 524284 0 -2\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "arch_sys_counter\n",
            "sys/devices/system/cpu/isolated": "\n",
            policy + "affected_cpus": "0 1 2 3\n",
            policy + "scaling_governor": "ondemand\n",
            policy + "scaling_max_freq": "1000000\n",
            policy + "cpuinfo_max_freq": "1800000\n",
            idle + "name": "cpu-sleep-0\n",
            idle + "latency": "250\n",
            idle + "disable": "0\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "81000\n",
            **{f"sys/devices/system/cpu/cpu{i}/uevent": "" for i in range(4)},
        },
    )
    answers = {"measure_temp": "temp=81.0'C\n", "get_throttled": "throttled=0x50005\n"}
    return Board(root, lambda name, *words: answers.get(words[0]) if name == "vcgencmd" else None, "aarch64")


def test_a_board_as_it_comes_is_told_what_to_change_and_why(tmp_path: Path) -> None:
    found = by_name(list(examine_board(raspberry_pi(tmp_path), Fake(permitted=False))))
    changes = {name for name, finding in found.items() if finding.state == "change"}
    assert changes == {
        "governor",
        "clock limit",
        "throttling",
        "temperature",
        "kernel",
        "isolated core",
        "FIFO priority",
        "locked memory",
        "idle states",
        "swap",
    }
    assert all(found[name].why and found[name].do for name in changes)
    assert "ondemand on cpu 0 1 2 3" in found["governor"].found
    assert "performance" in found["governor"].do
    assert "isolcpus=3" in found["isolated core"].do
    assert "power supply" in found["throttling"].do
    assert "1000 of 1800 MHz" in found["clock limit"].found
    assert "rtprio" in found["FIFO priority"].do
    assert "8192 KiB" in found["locked memory"].found
    assert "cpu-sleep-0 (250 µs)" in found["idle states"].found
    assert "95 %" in found["FIFO share"].found


def test_a_board_set_up_well_is_left_alone(tmp_path: Path) -> None:
    raspberry_pi(tmp_path)
    policy = "sys/devices/system/cpu/cpufreq/policy0/"
    tree(
        tmp_path,
        {
            "proc/sys/kernel/version": "#1 SMP PREEMPT_RT Debian\n",
            "proc/swaps": "Filename Type Size Used Priority\n",
            "sys/devices/system/cpu/isolated": "3\n",
            "sys/devices/system/cpu/cpu0/cpuidle/state1/disable": "1\n",
            policy + "scaling_governor": "performance\n",
            policy + "scaling_max_freq": "1800000\n",
            "sys/class/thermal/thermal_zone0/temp": "45000\n",
        },
    )
    answers = {"measure_temp": "temp=45.0'C\n", "get_throttled": "throttled=0x0\n"}
    board = Board(tmp_path, lambda name, *words: answers.get(words[0]) if name == "vcgencmd" else None, "aarch64")
    assert {finding.name: finding.state for finding in examine_board(board, Fake()) if finding.state != "ok"} == {}


def test_a_jetson_in_a_low_power_mode_is_noticed(tmp_path: Path) -> None:
    board = Board(tmp_path, lambda name, *_: "NV Power Mode: 15W\n2\n" if name == "nvpmodel" else None, "aarch64")
    assert by_name(list(examine_board(board, Fake())))["power mode"].state == "change"
    board = Board(tmp_path, lambda name, *_: "NV Power Mode: MAXN\n0\n" if name == "nvpmodel" else None, "aarch64")
    assert by_name(list(examine_board(board, Fake())))["power mode"].state == "ok"


def test_a_slow_clock_source_is_blamed_only_on_real_machines(tmp_path: Path) -> None:
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    root = tree(tmp_path, {source: "hpet\n", "proc/cpuinfo": X86_CPUINFO.replace("hypervisor", "")})
    assert by_name(list(examine_board(Board(root, no_tool, "x86_64"), Fake())))["clock source"].state == "change"
    tree(tmp_path, {"proc/cpuinfo": X86_CPUINFO})
    assert by_name(list(examine_board(Board(root, no_tool, "x86_64"), Fake())))["clock source"].state == "ok"
