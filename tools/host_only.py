"""pytest plugin of tools/wheel.py: leaves out what need not be emulated, and says how much, and why.

Tests marked ``host_only`` are always left out. ``--quick`` also leaves out those marked ``slow`` or ``long``, and of
any other test function it runs one configuration: all of them ran on the host, and a board that computes the same bits
fails in many or in none. A file marked as a whole is not imported, but named, and its tests are not counted.
``--part I/N`` takes the I-th of N shares of the test files, for N processes.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

LEFT_OUT: Counter[str] = Counter()
LEFT_OUT_FILES: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out slow and long tests and most of many configurations"
    )
    parser.addoption("--part", default="1/1", metavar="I/N", help="the I-th of N shares of the test files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.match("test_*.py"):
        return None
    part, parts = map(int, config.getoption("--part").split("/"))
    quick = config.getoption("--quick")
    if shares(config.rootpath / "tests", quick, parts)[collection_path] != part - 1:
        return True
    if quick and (reason := left_out_file(collection_path)):
        LEFT_OUT_FILES[collection_path.name] = reason
        return True
    return None


@cache
def shares(folder: Path, quick: bool, parts: int) -> dict[Path, int]:
    """Files in turn, the heaviest first, each to the share that has least. To compile a trunk weighs most."""
    weights = {}
    for file in folder.rglob("test_*.py"):
        text = file.read_text()
        weights[file] = 0 if quick and left_out_file(file) else len(text) * (5 if "BackendError" in text else 1)
    found, load = {}, [0] * parts
    for file in sorted(weights, key=lambda file: (-weights[file], file.name)):
        found[file] = load.index(min(load))
        load[found[file]] += weights[file]
    return found


@cache
def left_out_file(file: Path) -> str | None:
    """The reason in the file's ``pytestmark``, if it has one; read, not imported: some imports take long."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.host_only":
                    return str(ast.literal_eval(call.args[0]))
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pytest.mark.slow", "pytest.mark.long"):
                    return f"quick: {ast.literal_eval(call.args[0])} (--all runs it)"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    configurations: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        configurations[item.location[0], item.name.partition("[")[0]].append(item)
    quick, reasons = config.getoption("--quick"), {}
    for same in configurations.values():
        for number, item in enumerate(same):
            if mark := item.get_closest_marker("host_only"):
                reasons[item] = str(mark.args[0])
            elif quick and (mark := item.get_closest_marker("slow") or item.get_closest_marker("long")):
                reasons[item] = f"quick: {mark.args[0]} (--all runs it)"
            elif quick and number != len(same) // 2:
                reasons[item] = "quick: another configuration of the same test ran (--all runs them all)"
    LEFT_OUT.update(reasons.values())
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file, reason in LEFT_OUT_FILES.items():
        terminalreporter.write_line(f"LEFT OUT {file}: {reason}")
    for reason, count in LEFT_OUT.most_common():
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")
