"""On three Cortex-M in QEMU: the demo balances within its budget, no heap can creep in, and the bits are the host's."""

from __future__ import annotations

import re
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cabi import CORE_FLAGS, TESTS, eigen, run
from firmware import demo

import kbt_edge as kbt
from kbt_edge.studies import cartpole

pytest.importorskip("emx_onnx_cgen", reason="the C generator is not installed")
MISSING = [tool for tool in ("cmake", "arm-none-eabi-g++", "qemu-system-arm") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.host_only("firmware is generated and compiled on a PC"),
    pytest.mark.slow("builds firmware and emulates boards"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

UPDATES = 1000
PROGRAMS = ("same_bits", "trunk_bits")
# What must not link, each with a heap behind it that no optimiser can remove; and what must.
ESCAPES = {
    "malloc": "#include <stdlib.h>\nvoid *volatile kept;\nint main(void) { kept = malloc(100); return 0; }\n",
    "calloc": "#include <stdlib.h>\nvoid *volatile kept;\nint main(void) { kept = calloc(3, 9); return 0; }\n",
    "decimals": '#include <stdio.h>\nint main(int n, char **to) { return snprintf(*to, 9, "%f", n * 0.1); }\n',
    "constructor": "#include <stdlib.h>\nvoid *volatile kept;\nint main(void) { return 0; }\n"
    "__attribute__((constructor)) static void early(void) { kept = realloc(0, 64); }\n",
}
HARMLESS = "static char room[100];\nchar *volatile kept;\nint main(void) { kept = room; return 0; }\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated policy, and sources of the programs that are built beside the demo."""
    path = tmp_path_factory.mktemp("firmware")
    demo.generate(path)
    (path / "same_bits.c").write_text(f'#define KBT_UPDATES {UPDATES}\n#include "{TESTS / "same_bits.c"}"\n')
    (path / "trunk_bits.c").write_text((TESTS / "trunk_bits.c").read_text())
    for name, source in ESCAPES.items():
        (path / f"heap_{name}.c").write_text(source)
    (path / "heap_none.c").write_text(HARMLESS)
    return path


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, Path]:
    """Build folders by machine, each with the demo in it."""
    sources = ";".join(str(path) for path in folder.glob("*.c"))

    def build(machine: str) -> Path:
        return Path(demo.build(machine, folder / "policy", folder / machine, f"-DPROGRAMS={sources}")).parent

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(demo.MACHINES, pool.map(build, demo.MACHINES), strict=True))


@pytest.fixture(scope="module")
def results(built: dict[str, Path]) -> dict[str, Any]:
    """What the demo says on each machine."""

    def play(machine: str) -> Any:
        code, output = demo.run(machine, built[machine] / "firmware.elf", seconds=600)
        return {**demo.measured(machine, built[machine] / "firmware.elf", code, output), "output": output}

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(built, pool.map(play, built), strict=True))


@pytest.mark.parametrize("machine", demo.MACHINES)
def test_the_policy_falls_learns_survives_a_power_cut_and_balances(machine: str, results: dict[str, Any]) -> None:
    output = results[machine]["output"]
    assert results[machine]["exit_code"] == 0, output
    told = [output.index(words) for words in ("fell after", "the power fails", "found 25 samples", "balanced")]
    assert told == sorted(told)
    assert output.count("fell after") == output.count(": balanced") == 5


def test_flash_ram_stack_and_instructions_are_within_the_budget(results: dict[str, Any]) -> None:
    print(demo.table(results))
    assert [problem for result in results.values() for problem in result["problems"]] == []


def test_the_budget_can_be_exceeded(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = results["mps2-an386"]
    monkeypatch.setattr(demo, "BUDGET", {"watchful": {"flash": 50_000, "ram": 10_000, "observe": 1000}})
    monkeypatch.setattr(demo, "LARGEST_RATIO", {"watchful": 1.0})
    found = " ".join(demo.problems("mps2-an386", result))
    for word in ("flash", "ram", "observe", "predict, head alone"):
        assert word in found


def test_the_parts_add_up_to_what_the_linker_placed(built: dict[str, Path], results: dict[str, Any]) -> None:
    for machine, path in built.items():
        sections = {
            line.split()[0]: int(line.split()[1])
            for line in run("arm-none-eabi-size", "-A", path / "firmware.elf").splitlines()
            if line.startswith(".")
        }
        flash = sum(sections.get(name, 0) for name in (".text", ".ARM.exidx", ".data"))
        ram = sum(sections[name] for name in (".data", ".bss", ".noinit"))
        assert abs(sum(results[machine]["flash"].values()) - flash) <= 8  # the ends of sections
        assert abs(sum(results[machine]["ram"].values()) - ram) <= 8
        assert results[machine]["stack"] < sections[".stack"]


# ---- no heap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESCAPES)
def test_an_allocation_that_escapes_does_not_link(name: str, built: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match=r"__wrap__?malloc"):
        demo.call("cmake", "--build", built["mps2-an386"], "--target", f"heap_{name}")


def test_a_program_without_heap_links(built: dict[str, Path]) -> None:
    demo.call("cmake", "--build", built["mps2-an386"], "--target", "heap_none")
    assert "malloc" not in run("arm-none-eabi-nm", built["mps2-an386"] / "firmware.elf")


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(folder: Path, built: dict[str, Path]) -> dict[str, dict[str, str]]:
    """What same_bits.c and trunk_bits.c print, by program and target."""
    found: dict[str, dict[str, str]] = {program: {} for program in PROGRAMS}
    for machine in built:  # the streams have heads of every kind
        path = folder / f"{machine}-whole"
        sources = ";".join(str(folder / f"{program}.c") for program in PROGRAMS)
        demo.build(machine, folder / "policy", path, f"-DPROGRAMS={sources}", "-DKBT_WHOLE_CORE=ON")
        demo.call("cmake", "--build", path, "--target", *PROGRAMS)
        for program in PROGRAMS:
            code, output = demo.run(machine, path / f"{program}.elf", seconds=600)
            assert code == 0, output
            found[program][machine] = output
    for target, prefix, runner in (("x86-64", "", ()), ("AArch64", "aarch64-linux-gnu-", ("qemu-aarch64-static",))):
        if shutil.which(f"{prefix}g++") is None or not all(map(shutil.which, runner)):
            print(f"{target} is left out: its compiler or QEMU is not installed")
            continue
        core, policy = folder / f"{target}.o", folder / "policy"
        flags = ("-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-DKBT_NO_FLOAT64", f"-I{policy / 'kbt'}")
        run(f"{prefix}g++", *CORE_FLAGS, *flags, "-isystem", eigen(), "-c", policy / "kbt/kbt.cpp", "-o", core)
        for program, more in (("same_bits", core), ("trunk_bits", policy / "cartpole_trunk.c")):
            target_file = folder / f"{program}-{target}"
            run(
                f"{prefix}gcc", "-std=gnu11", *flags, "-static", folder / f"{program}.c", more, "-lm", "-o", target_file
            )
            found[program][target] = run(*runner, target_file)
    return found


def test_the_head_learns_the_same_bits_on_every_target(printed: dict[str, dict[str, str]]) -> None:
    outputs = printed["same_bits"]
    assert {"x86-64", *demo.MACHINES} <= outputs.keys()
    first = next(iter(outputs.values()))
    assert f"neuron {UPDATES} " in first
    print(first)
    for target, output in outputs.items():
        assert output == first, target


def test_the_trunk_gives_the_same_bits_on_every_target_and_agrees_with_onnxruntime(
    printed: dict[str, dict[str, str]], folder: Path
) -> None:
    """The bits agree because this trunk's softmax is over one token. In general libm's expf decides: within 1e-5."""
    onnxruntime = kbt.Trunk(folder / "cartpole/trunk.onnx", backend="onnxruntime")
    lcg, inputs = 1, np.zeros((200, 4), np.float32)
    for i in range(inputs.size):
        lcg = (lcg * 1664525 + 1013904223) % 2**32
        inputs.flat[i] = np.float32((lcg >> 16) - 32768) * np.float32(1.5 / 32768)
    expected = np.array([onnxruntime(x, copy=True)[0] for x in inputs])
    outputs = printed["trunk_bits"]
    for target, output in outputs.items():
        rows = [[struct.unpack(">f", bytes.fromhex(word))[0] for word in line.split()] for line in output.splitlines()]
        difference = np.abs(np.array(rows) - expected).max()
        print(f"{target}: {difference:.1e} from onnxruntime")
        assert difference <= 1e-5, target
        assert output == next(iter(outputs.values())), target


def test_the_device_has_learned_what_the_host_learns_to_the_bit(folder: Path, results: dict[str, Any]) -> None:
    """50 samples, across a power cut, against the generated code on the host."""
    policy = kbt.load_generated(folder / "policy")
    gain = np.array([1.0, 3.6719014, 80.848429, 60.281677], np.float32)  # plant.c
    np.testing.assert_allclose(gain, -cartpole.lqr_gain(cartpole.NEW), rtol=1e-6)
    for k in range(50):
        lcg, state = (k * 2654435769 + 1) % 2**32, np.zeros(4, np.float32)
        for i, limit in enumerate(np.float32([16.0, 12.0, 0.6, 1.0])):
            lcg = (lcg * 1664525 + 1013904223) % 2**32
            signed = lcg - 2**32 if lcg >= 2**31 else lcg
            state[i] = limit * (np.float32(signed) * np.float32(1.0 / 2147483648.0))
        force = gain[0] * state[0]
        for i in range(1, 4):
            force = force + gain[i] * state[i]
        policy.update(state, float(force))
    hashed = 2166136261
    for byte in policy.to_bytes():
        hashed = (hashed ^ byte) * 16777619 % 2**32
    for machine, result in results.items():
        (found,) = re.findall(r"state ([0-9a-f]{8})", result["output"])
        assert int(found, 16) == hashed, machine
