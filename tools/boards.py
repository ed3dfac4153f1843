"""The machines that wheel.py builds for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Board:
    machine: str  # what ``uname -m`` says there, and the last word of the wheel's tag
    debian: str  # its name in Debian
    triplet: str  # in Debian's folders and in the names of extension modules
    target: str  # for zig; the number is the oldest C library
    qemu: tuple[str, ...] = ()  # nothing for the machine that builds
    debs: tuple[str, ...] = ()  # beside Python: what has no wheel for this machine
    wheels: tuple[str, ...] = ("pytest>=8", "mpmath>=1.3")  # beside the package: what its tests need
    extras: str = "[codegen]"
    cpuinfo: str = ""  # onnxruntime reads this file, and crashes on that of an x86 machine
    flags: str = ""  # for the C++ compiler


X86_64 = Board(
    "x86_64",
    "amd64",
    "x86_64-linux-gnu",
    "x86_64-linux-gnu.2.17",
    flags="-fno-unroll-loops",  # as gcc does; unrolled, the wheel is too large
)
AARCH64 = Board(
    "aarch64",
    "arm64",
    "aarch64-linux-gnu",
    "aarch64-linux-gnu.2.17",
    ("qemu-aarch64-static", "-cpu", "cortex-a72"),
    cpuinfo="processor : 0\nFeatures : fp asimd evtstrm crc32 cpuid\nCPU implementer : 0x41\n"
    "CPU architecture: 8\nCPU variant : 0x0\nCPU part : 0xd08\nCPU revision : 3\n",
)
ARMV7L = Board(
    "armv7l",
    "armhf",
    "arm-linux-gnueabihf",
    # Without NEON: on ARMv7 it flushes subnormals to zero, and the bits would differ from everywhere else.
    "arm-linux-gnueabihf.2.17 -mcpu=generic+v7a+vfp3d16-neon",
    ("qemu-arm-static", "-cpu", "cortex-a7"),
    debs=("python3-numpy", "python3-cffi", "python3-mpmath"),
    wheels=("pytest>=8",),
    extras="",
    cpuinfo="processor : 0\nFeatures : half thumb fastmult vfp edsp neon vfpv3 vfpv4\nCPU implementer : 0x41\n"
    "CPU architecture: 7\nCPU variant : 0x0\nCPU part : 0xc07\nCPU revision : 5\n",
)
BOARDS = {board.machine: board for board in (AARCH64, ARMV7L, X86_64)}
