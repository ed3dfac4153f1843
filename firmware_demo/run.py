#!/usr/bin/env python3
"""Build the demo for three Cortex-M, run it in QEMU, and print what it takes: ``python firmware_demo/run.py``.

Needs kbt_edge with the extra "codegen", and of Debian's packages cmake, gcc-arm-none-eabi, libnewlib-arm-none-eabi,
libstdc++-arm-none-eabi-newlib and qemu-system-arm. Exit code 0 says that on every machine the policy fell, learned,
survived the power cut and balanced, and that everything is within the budget at the top of this file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kbt_edge as kbt

HERE = Path(__file__).resolve().parent
MACHINES = {"mps2-an386": "Cortex-M4F", "mps2-an500": "Cortex-M7", "mps3-an547": "Cortex-M55"}

# Of the policy on the Cortex-M4F: bytes, and instructions. RAM is the arena, variables and the most stack in use. A
# hidden layer brings a larger state.
BUDGET = {
    "watchful": {"flash": 96 * 1024, "ram": 64 * 1024, "observe": 50_000},
    "hidden": {"flash": 128 * 1024, "ram": 64 * 1024, "observe": 100_000},
}
# Most against least instructions of the head alone, over 1,000 inputs. With a hidden layer no path depends on the data;
# a watchful head is surprised by some of the inputs, and notices that the plant has changed.
LARGEST_RATIO = {"hidden": 1.02, "watchful": 1.5}

# Part of the policy: the objects in whose names it is found. What is found nowhere belongs to the demo.
PARTS = {
    "core": r"libcartpole\.a\((?!cartpole_)\w+\.cpp\.",
    "network": r"_trunk\.c\.",
    "state": r"_state\.c\.",
    "arena": r"_arena\.cpp\.",
    "calls and store": r"libcartpole\.a\((cartpole|policy|store)\.c\.",
    "libraries": r"/lib(m|c|c_nano|g|gcc|g_nano|stdc\+\+|stdc\+\+_nano)\.a\(",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"some of {', '.join(MACHINES)} (default: all)")
    parser.add_argument("--hidden", type=int, default=0, help="neurons of a hidden layer (default: 0, none)")
    parser.add_argument("--build", type=Path, default=HERE / "build", help="folder for everything that is built")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    options = parser.parse_args()
    unknown = sorted(set(options.machines) - MACHINES.keys())
    if unknown:
        parser.error(f"MACHINE: expected some of {', '.join(MACHINES)}, got {', '.join(unknown)}")
    started = time.monotonic()
    try:
        policy = generate(options.build, options.hidden)

        def demonstrate(machine: str) -> tuple[int, str, dict[str, Any]]:
            firmware = build(machine, policy, options.build / machine)
            code, output = run(machine, firmware)
            return code, output, measured(machine, firmware, code, output)

        machines = options.machines or list(MACHINES)
        results = {}
        with ThreadPoolExecutor(2) as pool:
            for machine, (code, output, result) in zip(machines, pool.map(demonstrate, machines), strict=True):
                results[machine] = result
                if not options.json:
                    print(f"== {machine} ({MACHINES[machine]}), exit code {code}\n\n{output}", flush=True)
    except (RuntimeError, OSError, kbt.KbtError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    problems = [problem for result in results.values() for problem in result["problems"]]
    if options.json:
        print(json.dumps({"machines": results, "problems": problems}, indent=1))
    else:
        print(table(results))
        print(f"\n{time.monotonic() - started:.0f} s")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


# ---- build and run ---------------------------------------------------------------------------------------------------


def generate(folder: Path, hidden: int = 0) -> Path:
    """The shipped cart-pole as C, or its trunk and readout with a head of this many hidden neurons."""
    bundle, policy = make_bundle(folder / "cartpole", hidden), folder / "policy"
    call(sys.executable, "-m", "kbt_edge", "codegen", bundle, "-o", policy)
    return policy


def make_bundle(folder: Path, hidden: int) -> Path:
    shipped = kbt.Model.load("kbt_edge:cartpole")
    readout = shipped.head.layers[0].mean
    if len(shipped.head.layers) != 1:
        raise RuntimeError("the shipped cart-pole bundle was expected to have one linear layer, the readout itself")
    head = shipped.head
    if hidden:
        settings: dict[str, Any] = {"hidden": (hidden,), "prior_var": (1e-6, 10.0), "noise_var": 1e-3, "drift": 0.0}
        head = kbt.Head(readout[:, :-1], readout[:, -1], **settings)
    scaling = {name: getattr(shipped, name) for name in ("input_mean", "input_scale", "output_offset", "output_scale")}
    shutil.rmtree(folder, ignore_errors=True)
    return kbt.Model(shipped.bundle().trunk, head, **scaling).save(folder)


def build(machine: str, policy: Path, folder: Path, *settings: str) -> Path:
    """The firmware of a machine. ``settings`` go to CMake."""
    options = {
        "CMAKE_TOOLCHAIN_FILE": HERE / "toolchain.cmake",
        "MACHINE": machine,
        "POLICY": policy.resolve(),
        "Python_EXECUTABLE": sys.executable,  # whose cmeel-eigen has Eigen's headers
    }
    call("cmake", "-S", HERE, "-B", folder, *(f"-D{name}={value}" for name, value in options.items()), *settings)
    call("cmake", "--build", folder, "--parallel", "2")
    return folder / "firmware.elf"


def run(machine: str, firmware: Path, seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and output of the firmware in QEMU, where one instruction takes one nanosecond."""
    quiet = ["-nographic", "-monitor", "none", "-serial", "none"]
    counting = ["-icount", "shift=0", "-semihosting-config", "enable=on,target=native"]
    command = ["qemu-system-arm", "-M", machine, *quiet, *counting, "-kernel", str(firmware)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr


def call(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- what it takes ---------------------------------------------------------------------------------------------------


def measured(machine: str, firmware: Path, code: int, output: str) -> dict[str, Any]:
    """Flash and RAM by part from the linker's map, instructions and stack from what the firmware printed."""
    flash, ram = parts(firmware.with_suffix(".map").read_text())
    counts = {
        what: tuple(map(int, found))
        for what, *found in re.findall(r"^  ((?:predict|observe)[^:]*): (\d+) to (\d+), ratio", output, flags=re.M)
    }
    stack = re.search(r"^stack: (\d+) bytes", output, flags=re.M)
    changes = re.search(r"changes noticed: (\d+)$", output, flags=re.M)
    result: dict[str, Any] = {
        "exit_code": code,
        "flash": flash,
        "ram": ram,
        "stack": int(stack[1]) if stack else None,
        "instructions": counts,
        "changes": int(changes[1]) if changes else None,
    }
    result["problems"] = [f"{machine}: {problem}" for problem in problems(machine, result)]
    return result


def parts(linker_map: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of flash and of RAM by part, everything in the map counted once."""
    placed = linker_map.split("Linker script and memory map", 1)[1].split("\n.stack", 1)[0]  # the last in RAM
    flash, ram = dict.fromkeys([*PARTS, "demo"], 0), dict.fromkeys([*PARTS, "demo"], 0)
    section = r"^ (\.[\w.$]+|COMMON|\*fill\*)\s+0x([0-9a-f]+)\s+0x([0-9a-f]+)(?: +(\S.*?))? *$"
    part = "demo"
    for name, address, size, origin in re.findall(section, placed, flags=re.M):
        if name != "*fill*":  # padding belongs to what stands before it
            part = next((part for part, pattern in PARTS.items() if re.search(pattern, origin)), "demo")
        in_ram = int(address, 16) >= 0x20000000
        if in_ram:
            ram[part] += int(size, 16)
        if not in_ram or name.startswith(".data"):
            flash[part] += int(size, 16)
    return flash, ram


def of_policy(sizes: dict[str, int]) -> int:
    return sum(size for part, size in sizes.items() if part != "demo")


def problems(machine: str, result: dict[str, Any]) -> list[str]:
    found = []
    if result["exit_code"] != 0:
        found.append(f"exit code {result['exit_code']}")
    counts = result["instructions"]
    if len(counts) != 4 or result["stack"] is None or result["changes"] is None:
        return [*found, "figures are missing in its output"]
    kind = "watchful" if result["changes"] else "hidden"  # a watchful head must notice the change
    largest = LARGEST_RATIO[kind]
    for what in ("predict, head alone", "observe, head alone"):
        least, most = counts[what]
        if most > largest * least:
            found.append(f"{what}: {least} to {most} instructions, more than a factor {largest} apart")
    if MACHINES[machine] == "Cortex-M4F":
        used = {
            "flash": of_policy(result["flash"]),
            "ram": of_policy(result["ram"]) + result["stack"],
            "observe": counts["observe"][1],
        }
        over = [what for what, most in BUDGET[kind].items() if used[what] > most]
        found += [f"{what}: {used[what]} is over the budget of {BUDGET[kind][what]}" for what in over]
    return found


def table(results: dict[str, Any]) -> str:
    machines = list(results)
    lines = [f"{'':<28}" + "".join(f"{MACHINES[machine]:>13}" for machine in machines)]

    def row(name: str, values: Sequence[object]) -> None:
        texts = (f"{value:,}" if isinstance(value, int) else str(value) for value in values)
        lines.append((f"{name:<28}" + "".join(f"{text:>13}" for text in texts)).rstrip())

    for kind in ("flash", "ram"):
        row(f"{kind}, bytes", ["" for _ in machines])
        for part in [*PARTS, "demo"]:
            if any(results[machine][kind][part] for machine in machines):
                row(f"  {part}", [results[machine][kind][part] for machine in machines])
        if kind == "ram":
            row("  stack, most in use", [results[machine]["stack"] or 0 for machine in machines])
        extra = [results[machine]["stack"] or 0 if kind == "ram" else 0 for machine in machines]
        row("  policy together", [of_policy(results[m][kind]) + more for m, more in zip(machines, extra, strict=True)])
    row("instructions, most", ["" for _ in machines])
    for what in next(iter(results.values()))["instructions"]:
        row(f"  {what}", [results[machine]["instructions"].get(what, (0, 0))[1] for machine in machines])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
