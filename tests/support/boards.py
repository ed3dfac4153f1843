"""Files of /proc and /sys as boards have them, for the tests that describe and examine one."""

from __future__ import annotations

from pathlib import Path

PI4_CPUINFO = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

processor\t: 1
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd08
CPU revision\t: 3

Revision\t: c03114
Serial\t\t: 10000000abcdef01
Model\t\t: Raspberry Pi 4 Model B Rev 1.4
"""
X86_CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 3.00GHz\nflags\t\t: fpu tsc hypervisor lahf_lm\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
