"""How much of csrc/ and kbt_edge/ the tests execute, slow ones included: ``python tools/cover.py``.

Makes a virtual environment in build/coverage, installs the package there with clang's source-based instrumentation,
runs ``pytest`` with coverage.py, and prints lines and branches of csrc/ and lines of kbt_edge/, file by file, then
what was never executed (``--missing``). ``cc`` is clang with the same instrumentation during the run, so that the C
programs that tests compile count too. A line of a template counts as executed when any of its instances executed it,
and so does each outcome of a condition; a condition that is decided at compile time in every instance has no outcomes.

    python tools/cover.py                      # everything, about half an hour
    python tools/cover.py --missing -- -k state     # what follows -- goes to pytest
    python tools/cover.py --report --missing   # of the last run
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections import defaultdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "coverage"
CSRC = ROOT / "csrc"
Place = tuple[int, int, int, int]  # of a condition: first line and column, last line and column
FLAGS = f"-fprofile-instr-generate={WORK}/raw/%8m.profraw -fcoverage-mapping"  # eight files at most for each program
# They look at the symbols of a library or an object, where the instrumentation puts its own.
LEFT_OUT = (
    "tests/core/test_cabi.py::test_the_library_exports_what_the_header_declares_and_nothing_else",
    "tests/codegen/test_codegen.py::test_the_weights_are_constants_and_no_name_can_collide",
)
SETTINGS = f"""[run]
source_pkgs = kbt_edge
parallel = true
patch = subprocess
data_file = {WORK}/python
disable_warnings = no-data-collected,module-not-measured,module-not-imported,module-not-python
[report]
exclude_also =
    if TYPE_CHECKING:
"""


def needed(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"{name}: not found; Debian has it in clang, llvm and libclang-rt-*-dev")
    return found


def install() -> None:
    """The package with its test requirements and instrumentation, in an environment and a build folder of its own."""
    clang = needed("clang")
    if not (WORK / "venv/bin/python").exists():
        venv.create(WORK / "venv", with_pip=True)
    (WORK / "settings").write_text(SETTINGS)
    (WORK / "bin").mkdir(exist_ok=True)
    wrapper = WORK / "bin" / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {clang} {FLAGS} "$@"\n')
    wrapper.chmod(0o755)
    flags = {"CC": clang, "CXX": f"{clang}++", "CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": FLAGS}
    pip = [WORK / "venv/bin/python", "-m", "pip", "install", "-q", "coverage>=7.10", "-e", f"{ROOT}[test,fuzz]"]
    options = (f"-Cbuild-dir={WORK}/cmake", "-Ccmake.build-type=RelWithDebInfo", "-Cinstall.strip=false")
    subprocess.run([*pip, *options], env=os.environ | flags, check=True)


def run_tests(arguments: list[str]) -> int:
    shutil.rmtree(WORK / "raw", ignore_errors=True)
    for old in WORK.glob("python*"):
        old.unlink()
    path = os.pathsep.join([str(WORK / "bin"), str(WORK / "venv/bin"), os.environ["PATH"]])
    python = WORK / "venv/bin/python"
    rc = f"--rcfile={WORK}/settings"
    pytest = ["-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", f"--basetemp={WORK}/tmp", *arguments]
    pytest += [f"--deselect={name}" for name in LEFT_OUT]
    # Instrumented trunks must not get into the usual cache.
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(WORK / "cache")}
    done = subprocess.run([python, "-m", "coverage", "run", rc, *pytest], cwd=ROOT, env=environment, check=False)
    subprocess.run([python, "-m", "coverage", "combine", "-q", rc], cwd=ROOT, check=True)
    return done.returncode


def report_python(missing: bool) -> None:
    call = [WORK / "venv/bin/python", "-m", "coverage", "report", f"--rcfile={WORK}/settings"]
    subprocess.run([*call, *(["-m"] if missing else [])], cwd=ROOT, check=True)


def measured_objects() -> list[Path]:
    """Every library and program of the run that carries a map from its counters to lines."""
    return [path for root in ("cmake", "tmp") for path in sorted((WORK / root).rglob("*")) if has_map(path)]


def has_map(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.suffix == ".o":
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF" and b"__llvm_covmap" in file.read()


def llvm_cov(*words: str, profile: Path, objects: list[Path]) -> str:
    call = [needed("llvm-cov"), *words, f"-instr-profile={profile}", str(objects[0])]
    call += [word for path in objects[1:] for word in ("-object", str(path))] + [str(CSRC)]
    return subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout


def counted_lines(lcov: str) -> dict[str, dict[int, int]]:
    """How often each line of each file ran."""
    lines: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for record in lcov.splitlines():
        kind, _, value = record.partition(":")
        if kind == "SF":
            name = Path(value).name
        elif kind == "DA":
            number, count = value.split(",")[:2]
            lines[name][int(number)] = lines[name].get(int(number), 0) + int(count)
    return lines


def conditions_of_run_time(shown: str) -> set[tuple[str, int, int]]:
    """File, line and column of every condition that some instance leaves to run time."""
    found, name = set(), ""
    for record in shown.splitlines():
        if record.startswith(f"{CSRC}/"):
            name = Path(record.rstrip(":")).name
        elif match := re.search(r"Branch \((\d+):(\d+)\): \[(?!Folded)", record):
            found.add((name, int(match[1]), int(match[2])))
    return found


def counted_outcomes(exported: str, judged: set[tuple[str, int, int]]) -> dict[str, dict[Place, tuple[int, int]]]:
    """How often each condition was true, and false."""
    outcomes: defaultdict[str, dict[Place, tuple[int, int]]] = defaultdict(dict)
    for file in json.loads(exported)["data"][0]["files"]:
        name = Path(file["filename"]).name
        for line, column, last_line, last, yes, no, *_ in file["branches"]:
            if (name, line, column) in judged:
                place = (line, column, last_line, last)
                before = outcomes[name].get(place, (0, 0))
                outcomes[name][place] = (before[0] + yes, before[1] + no)
    return outcomes


def report_core(missing: bool) -> None:
    profile, objects = WORK / "profile", measured_objects()
    raw = [str(path) for path in (WORK / "raw").glob("*.profraw")]
    subprocess.run([needed("llvm-profdata"), "merge", "-sparse", *raw, "-o", profile], check=True)
    run = partial(llvm_cov, profile=profile, objects=objects)
    lines = counted_lines(run("export", "-format=lcov"))
    judged = conditions_of_run_time(run("show", "-show-branches=count", "-use-color=0"))
    outcomes = counted_outcomes(run("export", "-format=text"), judged)
    totals = [0, 0, 0, 0]
    print(f"{'file':<20} {'lines':>6} {'missed':>6} {'':>6}  {'branches':>8} {'missed':>6}")
    for name, counted in sorted(lines.items()):
        never = [number for number, count in sorted(counted.items()) if count == 0]
        sides = [(place, way, n) for place, both in outcomes[name].items() for way, n in zip("tf", both, strict=True)]
        one_sided = sorted((place, way) for place, way, n in sides if n == 0)
        row = (len(counted), len(never), len(sides), len(one_sided))
        totals = [total + value for total, value in zip(totals, row, strict=True)]
        print_row(name, *row)
        text = next(CSRC.rglob(name)).read_text().splitlines()
        for number in never if missing else ():
            print(f"    {number:>4} never executed  {text[number - 1].strip()}")
        for (line, first, last_line, last), way in one_sided if missing else ():
            what = text[line - 1][first - 1 : last - 1 if last_line == line else None]
            print(f"    {line:>4} never {'true ' if way == 't' else 'false'}     {what}")
    print_row("csrc/", *totals)


def print_row(name: str, lines: int, missed: int, branches: int, one_sided: int) -> None:
    line_share = 100 * (1 - missed / max(lines, 1))
    branch_share = 100 * (1 - one_sided / max(branches, 1))
    print(f"{name:<20} {lines:>6} {missed:>6} {line_share:>5.1f}%  {branches:>8} {one_sided:>6} {branch_share:>5.1f}%")


def main() -> int:
    parser = argparse.ArgumentParser(description="Lines and branches that the tests execute.")
    parser.add_argument("--report", action="store_true", help="only report on the last run")
    parser.add_argument("--missing", action="store_true", help="also print what was never executed")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    failed = 0
    if not options.report:
        install()
        failed = run_tests(options.pytest)
    report_python(options.missing)
    report_core(options.missing)
    return failed


if __name__ == "__main__":
    sys.exit(main())
