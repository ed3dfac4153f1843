"""Describes this board and its state: processor, clocks, temperature, throttling, kernel, versions.

Everything comes from files below /proc and /sys and from two vendor tools, ``vcgencmd`` (Raspberry Pi) and ``nvpmodel``
(Jetson), if installed. What a board does not report is None. Tests give another ``root`` and ``tool``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kbt_edge import _core
from kbt_edge.errors import BackendError
from kbt_edge.trunk.build import find_compiler

__all__ = ["PACKAGES", "Board", "compiler", "load_between", "run_tool", "versions"]

Tool = Callable[..., str | None]

PACKAGES: Final = ("kbt-edge", "numpy", "cffi", "onnxruntime", "emx-onnx-cgen", "matplotlib", "scipy", "torch")

# CPU implementer and part as /proc/cpuinfo has them, for the cores of boards in use.
ARM_PARTS: Final = {
    ("0x41", "0xb76"): "ARM1176",
    ("0x41", "0xc07"): "Cortex-A7",
    ("0x41", "0xc08"): "Cortex-A8",
    ("0x41", "0xc09"): "Cortex-A9",
    ("0x41", "0xc0f"): "Cortex-A15",
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd04"): "Cortex-A35",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd09"): "Cortex-A73",
    ("0x41", "0xd0a"): "Cortex-A75",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd0d"): "Cortex-A77",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd44"): "Cortex-X1",
    ("0x4e", "0x003"): "Denver 2",
    ("0x4e", "0x004"): "Carmel",
}

# The bits of vcgencmd get_throttled.
THROTTLED: Final = {
    0: "under-voltage now",
    1: "frequency capped now",
    2: "throttled now",
    3: "soft temperature limit now",
    16: "under-voltage since boot",
    17: "frequency capped since boot",
    18: "throttled since boot",
    19: "soft temperature limit since boot",
}


def run_tool(*command: str) -> str | None:
    """The output of a tool, or None if it is not installed or failed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


class Board:
    def __init__(self, root: Path = Path("/"), tool: Tool = run_tool, machine: str | None = None) -> None:
        self._root, self._tool = root, tool
        self.machine = machine or platform.machine()

    def read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text(errors="replace").strip(" \t\r\n\0") or None
        except OSError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        return sorted(self._root.glob(pattern))

    # ---- what it is --------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What does not change while a benchmark runs."""
        return {
            "board": self.name(),
            "machine": self.machine,
            "cpu": self.cpu(),
            "cores": len(self.glob("sys/devices/system/cpu/cpu[0-9]*")) or os.cpu_count(),
            "virtual": self.virtual(),
            "memory_bytes": self.memory(),
            "kernel": self.kernel(),
            "kernel_preemption": self.preemption(),
            "clocksource": self.clocksource(),
            "isolated_cpus": self.read("sys/devices/system/cpu/isolated"),
            "jetson_release": self.jetson_release(),
            "compiler": compiler(),
            "core_compiler": _core.COMPILER,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "packages": versions(),
        }

    def name(self) -> str | None:
        return self.read("proc/device-tree/model") or self.read("sys/class/dmi/id/product_name")

    def cpu(self) -> str | None:
        return parse_cpuinfo(self.read("proc/cpuinfo") or "")

    def virtual(self) -> bool:
        return bool(re.search(r"^flags\b.*\bhypervisor\b", self.read("proc/cpuinfo") or "", re.M))

    def memory(self) -> int | None:
        found = re.search(r"^MemTotal:\s+(\d+) kB", self.read("proc/meminfo") or "", re.M)
        return int(found[1]) * 1024 if found else None

    def kernel(self) -> str | None:
        return self.read("proc/sys/kernel/osrelease")

    def preemption(self) -> str:
        """PREEMPT_RT, PREEMPT_DYNAMIC, PREEMPT or none."""
        version = self.read("proc/sys/kernel/version") or ""
        if self.read("sys/kernel/realtime") == "1" or re.search(r"PREEMPT[_ ]RT", version):
            return "PREEMPT_RT"
        found = re.search(r"\bPREEMPT(_DYNAMIC)?\b", version)
        return found[0] if found else "none"

    def clocksource(self) -> str | None:
        return self.read("sys/devices/system/clocksource/clocksource0/current_clocksource")

    def jetson_release(self) -> str | None:
        found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", self.read("etc/nv_tegra_release") or "")
        return f"R{found[1]}.{found[2]}" if found else None

    # ---- what state it is in -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What may change while a benchmark runs: taken before and after."""
        return {
            "frequency": self.frequencies(),
            "temperature_c": self.temperatures(),
            "throttled": self.throttled(),
            "power_mode": parse_nvpmodel(self._tool("nvpmodel", "-q")),
            "load_average": [float(word) for word in (self.read("proc/loadavg") or "").split()[:3]],
            "cpu_seconds": parse_stat(self.read("proc/stat") or ""),
            "own_cpu_seconds": sum(os.times()[:4]),
        }

    def frequencies(self) -> list[dict[str, Any]]:
        """Governor and frequencies in MHz, once for all cores that share them."""
        found = []
        for policy in self.glob("sys/devices/system/cpu/cpufreq/policy[0-9]*"):
            folder = str(policy.relative_to(self._root))

            def mhz(name: str, folder: str = folder) -> float | None:
                text = self.read(f"{folder}/{name}")
                return int(text) / 1000 if text and text.isdigit() else None

            found.append(
                {
                    "cpus": self.read(f"{folder}/affected_cpus"),
                    "governor": self.read(f"{folder}/scaling_governor"),
                    "now_mhz": mhz("scaling_cur_freq"),
                    "min_mhz": mhz("scaling_min_freq"),
                    "max_mhz": mhz("scaling_max_freq"),
                    "hardware_max_mhz": mhz("cpuinfo_max_freq"),
                }
            )
        return found

    def temperatures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for zone in self.glob("sys/class/thermal/thermal_zone*"):
            folder = str(zone.relative_to(self._root))
            text = self.read(f"{folder}/temp")  # a zone that is switched off gives an error instead
            if text and re.fullmatch(r"-?\d+", text):
                found[self.read(f"{folder}/type") or zone.name] = int(text) / 1000
        measured = parse_vcgencmd_temp(self._tool("vcgencmd", "measure_temp"))
        if measured is not None:
            found["vcgencmd"] = measured
        return found

    def throttled(self) -> list[str] | None:
        """Reasons for a reduced clock; an empty list if there are none; None if the board does not report them."""
        said = parse_throttled(self._tool("vcgencmd", "get_throttled"))
        for counter in self.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count"):
            said = said or []
            count = self.read(str(counter.relative_to(self._root)))
            if count and count != "0":
                said.append(f"{counter.parent.parent.name} throttled {count} times since boot")
        for counter in self.glob("sys/class/hwmon/hwmon*/oc*_event_cnt"):  # Jetson: over-current
            said = said or []
            count = self.read(str(counter.relative_to(self._root)))
            if count and count != "0":
                said.append(f"{counter.name.split('_')[0]} over-current {count} times since boot")
        return said


# ---- parsers ---------------------------------------------------------------------------------------------------------


def parse_cpuinfo(text: str) -> str | None:
    """The name of the processor; on ARM the names of its kinds of cores with their parts."""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    implementers = re.findall(r"^CPU implementer\s*:\s*(\S+)", text, re.M)
    parts = re.findall(r"^CPU part\s*:\s*(\S+)", text, re.M)
    if not parts:
        return found[1].strip() if found else None
    kinds: dict[str, int] = {}
    for implementer, part in zip(implementers, parts, strict=False):
        name = ARM_PARTS.get((implementer, part))
        kind = f"{name} (part {part})" if name else f"implementer {implementer} part {part}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items())


def parse_vcgencmd_temp(text: str | None) -> float | None:
    found = re.match(r"temp=([\d.]+)'C", text or "")
    return float(found[1]) if found else None


def parse_throttled(text: str | None) -> list[str] | None:
    found = re.match(r"throttled=0x([0-9a-fA-F]+)", text or "")
    if not found:
        return None
    bits = int(found[1], 16)
    return [words for bit, words in THROTTLED.items() if bits >> bit & 1]


def parse_nvpmodel(text: str | None) -> str | None:
    found = re.search(r"^NV Power Mode\s*:\s*(\S+)", text or "", re.M)
    return found[1] if found else None


def parse_stat(text: str) -> dict[str, float] | None:
    """Seconds that all cores spent busy, idle, and waiting for a hypervisor, since boot."""
    found = re.match(r"cpu\s+([\d ]+)", text)
    if not found:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(word) / ticks for word in [*found[1].split(), *["0"] * 8][:8]
    )
    return {"busy": user + nice + system + irq + softirq, "idle": idle + iowait, "steal": steal}


def load_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float] | None:
    """How many cores, on average, other processes and the hypervisor kept busy between two states."""
    first, last = before["cpu_seconds"], after["cpu_seconds"]
    if first is None or last is None:
        return None
    passed = {name: last[name] - first[name] for name in first}
    cores = os.cpu_count() or 1
    wall = sum(passed.values()) / cores
    if wall <= 0:
        return None
    own = after["own_cpu_seconds"] - before["own_cpu_seconds"]
    return {"others_cores": max(0.0, passed["busy"] - own) / wall, "stolen_cores": passed["steal"] / wall}


def compiler() -> str | None:
    """The C compiler that would build a trunk, or None."""
    try:
        return find_compiler()[1]
    except BackendError:
        return None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if found["kbt-edge"] is None:  # run from a checkout that is not installed
        found["kbt-edge"] = getattr(sys.modules["kbt_edge"], "__version__", None)
    return found
