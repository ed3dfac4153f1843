"""What is in a wheel: the right names for its machine and Python, nothing foreign, nothing that an old board lacks.

Looks at the wheels in ``dist/``, or in the folder that ``KBT_WHEELS`` names; ``tools/wheel.py`` lets every wheel it
builds pass here.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.host_only("reads wheel files, which the board does not have")

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted(Path(os.environ.get("KBT_WHEELS", ROOT / "dist")).glob("*.whl"))
NEWEST_GLIBC = (2, 28)  # Raspberry Pi OS 11 has 2.31, JetPack 5 2.31, RHEL 8 2.28
# Machine in the tag: number in the ELF header, triplet in the name of an extension module.
MACHINES = {
    "x86_64": (62, "x86_64-linux-gnu"),
    "aarch64": (183, "aarch64-linux-gnu"),
    "armv7l": (40, "arm-linux-gnueabihf"),
}
# What manylinux promises to find everywhere.
SYSTEM = re.compile(r"(lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s)|ld-linux[\w-]*)\.so\.\d+")
EXPECTED = (
    "kbt_edge/lib/libkbt.so",
    "kbt_edge/include/kbt.h",
    "kbt_edge/lib/pkgconfig/kbt.pc",
    "kbt_edge/lib/cmake/kbt/kbt-config.cmake",
    "kbt_edge/lib/cmake/kbt/kbt-config-version.cmake",
    "kbt_edge/py.typed",
    "kbt_edge/bundles/cartpole/trunk.onnx",
)


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        self.name, self.version, self.python, self.abi, self.platform = path.name.removesuffix(".whl").split("-")
        self.machine = next(machine for machine in MACHINES if self.platform.endswith(machine))
        self.libraries = {name: data for name, data in self.files.items() if data.startswith(b"\x7fELF")}

    def info(self, name: str) -> str:
        return self.files[f"{self.name}-{self.version}.dist-info/{name}"].decode()


def check_names(wheel: Wheel) -> None:
    """File name, tags, the suffix of the module and the machine in every library say the same."""
    tags = {f"{wheel.python}-{wheel.abi}-{platform}" for platform in wheel.platform.split(".")}
    assert set(email.message_from_string(wheel.info("WHEEL")).get_all("Tag", [])) == tags
    number, triplet = MACHINES[wheel.machine]
    module = f"kbt_edge/_core.{wheel.abi.replace('cp', 'cpython-')}-{triplet}.so"
    assert set(wheel.libraries) == {module, "kbt_edge/lib/libkbt.so"}
    for data in wheel.libraries.values():
        assert int.from_bytes(data[18:20], "little") == number


def check_contents(wheel: Wheel) -> None:
    assert set(EXPECTED) <= set(wheel.files)
    package = [path for path in (ROOT / "kbt_edge").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    assert {path.relative_to(ROOT).as_posix() for path in package} <= set(wheel.files)  # no file is left out
    strangers = [
        name for name in wheel.files if not name.startswith(("kbt_edge/", f"kbt_edge-{wheel.version}.dist-info/"))
    ]
    assert strangers == []  # such as a folder of vendored libraries, or the tests
    assert [name for name in wheel.files if name.endswith((".o", ".a", ".pyc"))] == []


def check_record(wheel: Wheel) -> None:
    record = {name: digest for name, digest, _ in csv.reader(wheel.info("RECORD").splitlines())}
    assert set(record) == set(wheel.files)
    for name, digest in record.items():
        if not name.endswith("RECORD"):
            found = base64.urlsafe_b64encode(hashlib.sha256(wheel.files[name]).digest()).decode().rstrip("=")
            assert digest == f"sha256={found}"


def check_libraries(wheel: Wheel) -> None:
    """The libraries need what manylinux promises, from a C library that old boards have; libkbt needs no C++ at all."""
    for name, data in wheel.libraries.items():
        needed = set(re.findall(rb"\0((?:lib|ld-)[\w+.-]+\.so[.\d]*)(?=\0)", data))
        foreign = {text.decode() for text in needed} - {"libkbt.so"}
        assert {text for text in foreign if not SYSTEM.fullmatch(text)} == set()
        if name.endswith("libkbt.so"):
            assert not any("stdc++" in text or "gcc_s" in text for text in foreign)
        versions = [tuple(map(int, text.split(b"."))) for text in re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", data)]
        assert versions or name.endswith("libkbt.so")  # which on armv7l needs nothing of the C library
        if "manylinux" in wheel.platform:  # one without is for the machine that built it
            assert all(version[:2] <= NEWEST_GLIBC for version in versions)


def check_one_core(wheel: Wheel) -> None:
    """The core is in libkbt alone, and the extension module finds it in the wheel wherever that is installed."""
    module = next(data for name, data in wheel.libraries.items() if "_core" in name)
    assert b"\0$ORIGIN/lib\0" in module
    assert b"\0libkbt.so\0" in module
    assert b"Eigen" not in module


def check_metadata(wheel: Wheel) -> None:
    metadata = email.message_from_string(wheel.info("METADATA"))
    version = re.search(r'__version__ = "(.+)"', (ROOT / "kbt_edge/_version.py").read_text())
    assert version is not None
    assert metadata["Version"] == wheel.version == version[1]
    assert metadata["Requires-Python"] == ">=3.10"
    requires = metadata.get_all("Requires-Dist", [])
    runtime = [requirement for requirement in requires if "extra ==" not in requirement]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in runtime} == {"numpy", "cffi", "onnxruntime"}
    assert all("armv7l" in requirement for requirement in runtime if requirement.startswith("onnxruntime"))
    for name in ("pkgconfig/kbt.pc", "cmake/kbt/kbt-config-version.cmake"):
        assert wheel.version in wheel.files[f"kbt_edge/lib/{name}"].decode()


CHECKS = [check_names, check_contents, check_record, check_libraries, check_one_core, check_metadata]


@pytest.fixture(params=WHEELS, ids=lambda path: str(path.name))
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return Wheel(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_a_wheel_is_what_its_name_says(wheel: Wheel, check: Callable[[Wheel], None]) -> None:
    check(wheel)


def test_a_wheel_is_at_most_a_megabyte(wheel: Wheel) -> None:
    print(f"{wheel.path.name}: {wheel.path.stat().st_size / 1000:.0f} kB")
    assert wheel.path.stat().st_size <= 1_000_000


def spoil_suffix(wheel: Wheel) -> None:
    other = MACHINES["x86_64" if wheel.machine != "x86_64" else "aarch64"][1]
    name = next(name for name in wheel.libraries if "_core" in name)
    wheel.libraries[name.replace(MACHINES[wheel.machine][1], other)] = wheel.libraries.pop(name)


def spoil_machine(wheel: Wheel) -> None:
    wheel.libraries["kbt_edge/lib/libkbt.so"] = b"\x7fELF" + bytes(14) + b"\x08\x00"  # MIPS


def spoil_glibc(wheel: Wheel) -> None:
    wheel.platform = f"manylinux_2_28_{wheel.machine}"
    wheel.libraries["kbt_edge/lib/libkbt.so"] += b"\0GLIBC_2.34\0"


def spoil_needs(wheel: Wheel) -> None:
    wheel.libraries["kbt_edge/lib/libkbt.so"] += b"\0libstdc++.so.6\0"


def spoil_path(wheel: Wheel) -> None:
    name = next(name for name in wheel.libraries if "_core" in name)
    wheel.libraries[name] = wheel.libraries[name].replace(b"$ORIGIN", b"/usr/lo")


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (spoil_suffix, check_names),
        (spoil_machine, check_names),
        (spoil_glibc, check_libraries),
        (spoil_needs, check_libraries),
        (spoil_path, check_one_core),
    ],
)
def test_a_wrong_wheel_is_found(wheel: Wheel, spoil: Callable[[Wheel], None], check: Callable[[Wheel], None]) -> None:
    spoil(wheel)
    with pytest.raises(AssertionError):
        check(wheel)
