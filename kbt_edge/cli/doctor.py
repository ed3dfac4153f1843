"""``kbt-edge doctor``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kbt_edge.bench import doctor

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    return doctor.examine()


def text(result: Mapping[str, Any]) -> str:
    board = result["board"]
    name = ", ".join(str(part) for part in (board["board"], board["cpu"], board["machine"]) if part)
    lines = [f"{name}, {board['cores']} cores", ""]
    for title, key in (("what works here", "works"), ("for a steady loop", "steady_loop")):
        lines.append(title)
        for finding in result[key]:
            lines.append(f"  {finding['state']:<8} {finding['name']:<14} {finding['found']}")
            lines += [f"  {'':<8}   why  {finding['why']}"] * bool(finding["why"])
            lines += [f"  {'':<8}   do   {finding['do']}"] * bool(finding["do"])
        lines.append("")
    counts = {state: _count(result, state) for state in ("broken", "missing", "change")}
    lines.append(
        f"{counts['broken']} broken, {counts['missing']} missing, {counts['change']} to change for a steady loop"
        if any(counts.values())
        else "everything is as it should be"
    )
    if not counts["broken"]:
        lines.append("kbt_edge works on this board. How fast and how steadily: kbt-edge bench --rate 200")
    return "\n".join(lines)


def _count(result: Mapping[str, Any], state: str) -> int:
    return sum(finding["state"] == state for key in ("works", "steady_loop") for finding in result[key])
