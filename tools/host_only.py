"""pytest plugin of tools/arm_wheel.py: leaves out what need not be emulated, and says how much, and why.

Tests marked ``host_only`` are left out. With ``--one-in N``, so are all but every N-th configuration of a test function
that has more than 50: each was proven on the host, and a board that computes the same bits fails in many or in none. An
N that divides none of a grid's sides, such as 7, still meets every value of every side.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

MANY = 50
LEFT_OUT: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="of many configurations, run every N-th")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    configurations: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        configurations[item.location[0], item.name.partition("[")[0]].append(item)
    one_in, reasons = config.getoption("--one-in"), {}
    for same in configurations.values():
        for number, item in enumerate(same):
            if mark := item.get_closest_marker("host_only"):
                reasons[item] = str(mark.args[0])
            elif len(same) > MANY and number % one_in:
                reasons[item] = f"of more than {MANY} configurations, one in {one_in} runs"
    LEFT_OUT.update(reasons.values())
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in LEFT_OUT.most_common():
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")
