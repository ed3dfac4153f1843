"""The C example builds against the installed package, the way its Makefile and its CMakeLists.txt say, and learns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cabi import ROOT, run

from kbt_edge import cli
from kbt_edge._paths import FOLDERS, installed

EXAMPLE = ROOT / "examples/c"


def needs(*tools: str) -> None:
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")


def path_of(folder: str) -> str:
    return run(sys.executable, "-m", "kbt_edge", "paths", folder).strip()


def learns(program: Path) -> None:
    text = run(program)
    print(text)
    first, last = map(float, re.findall(r"10(?: predictions)? (\d+\.\d+)", text))
    assert last < first / 10


def test_the_example_builds_with_nothing_but_the_two_folders(tmp_path: Path) -> None:
    needs("cc")
    lib = path_of("lib")
    options = ("-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{path_of('include')}", f"-L{lib}", f"-Wl,-rpath,{lib}")
    run("cc", *options, EXAMPLE / "balance.c", "-lkbt", "-lm", "-o", tmp_path / "balance")
    learns(tmp_path / "balance")


@pytest.mark.host_only("the emulated root has no make; the program itself is built there by another test")
def test_the_makefile_finds_the_library_by_pkg_config(tmp_path: Path) -> None:
    needs("make", "pkg-config", "cc")
    shutil.copytree(EXAMPLE, tmp_path / "c")
    run("make", "-C", tmp_path / "c", f"PKG_CONFIG_PATH={path_of('pkgconfig')}", "CFLAGS=-O2 -Wall -Wextra -Werror")
    learns(tmp_path / "c/balance")


@pytest.mark.host_only("the emulated root has no CMake; the program itself is built there by another test")
def test_cmake_finds_the_library_by_its_configuration(tmp_path: Path) -> None:
    needs("cmake", "cc")
    run("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-Dkbt_DIR={path_of('cmake')}")
    run("cmake", "--build", tmp_path)
    learns(tmp_path / "balance")


def test_paths_are_of_files_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paths"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(FOLDERS)
    for name, folder in lines.items():
        assert installed(FOLDERS[name]).parent == Path(folder)
    assert cli.main(["paths", "cmake"]) == 0
    assert capsys.readouterr().out.strip() == lines["cmake"]


def test_the_package_can_be_moved(tmp_path: Path) -> None:
    """A wheel is built in one place and installed in another: nothing in it may name a folder of the first."""
    for name in ("lib/pkgconfig/kbt.pc", "lib/cmake/kbt/kbt-config.cmake"):
        text = installed(name).read_text()
        assert not re.search(r"(?<![\w}.])/(usr|home|tmp|opt|root|work)/", text)
    assert "${pcfiledir}" in installed("lib/pkgconfig/kbt.pc").read_text()


@pytest.mark.long("starts Python once more, seconds of emulation")
def test_importing_needs_no_onnxruntime() -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None; import kbt_edge, kbt_edge.trunk, kbt_edge.model, kbt_edge.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
