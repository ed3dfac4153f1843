"""The documents hold together: citations resolve, files named exist, and the code blocks run as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.host_only("reads the repository and runs the commands of its documents")

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cmake", "csrc", "docs", "examples", "firmware_demo", "kbt_edge", "tests", "tools")
SUFFIXES = (".c", ".cpp", ".h", ".hpp", ".j2", ".md", ".py", ".pyi", ".cmake", ".txt", ".toml", ".yml")


def files() -> Iterator[Path]:
    for path in sorted(ROOT.glob("*")):
        if path.is_file() and path.suffix in SUFFIXES:
            yield path
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES:
                yield path


def lines() -> Iterator[tuple[str, str]]:
    """Every line of the repository as ("file:line", text), this file excepted."""
    for path in files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


# --- citations --------------------------------------------------------------------------------------------------------

METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")
SECTIONS = set(re.findall(r"^## §(\d+) \S", METHOD, re.MULTILINE))
EQUATIONS = re.findall(r"\\tag\{(\d+\.\d+)\}", METHOD)
CITATION = re.compile(r"method\.md (?:§(\d+)|\((\d+\.\d+)\))")
FORMER = re.compile(r"METHOD section|METHOD\.md|METHOD §")


def test_each_equation_is_numbered_once_and_in_its_section() -> None:
    assert len(EQUATIONS) == len(set(EQUATIONS))
    section = ""
    for line in METHOD.splitlines():
        section = m[1] if (m := re.match(r"## §(\d+) ", line)) else section
        for number in re.findall(r"\\tag\{(\d+)\.\d+\}", line):
            assert number == section, line


def test_every_citation_resolves_to_a_section_or_an_equation() -> None:
    wrong = [
        f"{where}: {m[0]}"
        for where, line in lines()
        for m in CITATION.finditer(line)
        if (m[1] is not None and m[1] not in SECTIONS) or (m[2] is not None and m[2] not in EQUATIONS)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_of_the_method_has_one_name() -> None:
    wrong = [f"{where}: {line.strip()}" for where, line in lines() if FORMER.search(line)]
    assert not wrong, "write `method.md §4` or `method.md (4.2)`:\n" + "\n".join(wrong)


# --- names ------------------------------------------------------------------------------------------------------------

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "firmware_demo/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_named_tests_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in source, name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name
    for name in re.findall(r"`((?:csrc|kbt_edge|tests|tools|docs|examples|firmware_demo)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


def test_the_table_of_formulas_has_every_equation_and_functions_that_exist() -> None:
    """That its files exist is part of the test above."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if re.match(r"\| \(\d", line)]
    assert re.findall(r"\d+\.\d+", " ".join(row[0] for row in rows)) == EQUATIONS
    source = (ROOT / "kbt_edge/reference.py").read_text(encoding="utf-8")
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[3]):
            assert f"def {name}(" in source, name


# --- code blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    note: str  # of an HTML comment on the line before: "slow", or "not run: REASON"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[object]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").splitlines()
        start = -1
        for i, line in enumerate(text):
            if not line.strip().startswith("```"):
                continue
            if start < 0:
                start = i
                continue
            language = text[start].strip()[3:]
            comment = re.fullmatch(r"\s*<!-- (.*) -->", text[start - 1])
            block = Block(page, start + 2, language, "\n".join(text[start + 1 : i]), comment[1] if comment else "")
            start = -1
            if language in languages and not block.note.startswith("not run: "):
                marks = [pytest.mark.slow("runs for seconds")] if block.note == "slow" else []
                found.append(pytest.param(block, marks=marks, id=str(block)))
        assert start < 0, f"{page}: a block is not closed"
    return found


def run(command: list[str], cwd: Path, **environment: str) -> str:
    tools = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_run_as_printed(block: Block, tmp_path: Path) -> None:
    """Each on its own. Those of README run in the clone, where they must find the built core."""
    where = ROOT if block.page.name == "README.md" else tmp_path
    run([sys.executable, "-c", block.code], where, MPLBACKEND="agg")


@pytest.mark.parametrize("block", blocks("sh"))
def test_shell_blocks_run_as_printed(block: Block, tmp_path: Path) -> None:
    """In a copy of what they need. ``pip install`` only checks that the extras exist: the package is installed here."""
    for name in ("examples", "firmware_demo", "tools", "csrc", "tests/fuzz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"pip install.*\[([\w,]+)\]", block.code):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", project, re.MULTILINE), name
    stand_in = tmp_path / "bin/pip"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\nexit 0\n")
    stand_in.chmod(0o755)
    script = f'PATH="{stand_in.parent}:$PATH"\n{block.code}'
    run(["bash", "-euo", "pipefail", "-c", script], tmp_path, MPLBACKEND="agg")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("block", blocks("c"))
def test_c_blocks_compile_and_run_against_the_installed_library(block: Block, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(block.code)
    flags = run(["sh", "-c", "PKG_CONFIG_PATH=$(kbt-edge paths pkgconfig) pkg-config --cflags --libs kbt"], tmp_path)
    run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "main.c", *flags.split(), "-lm", "-o", "main"], tmp_path)
    run(["./main"], tmp_path)
