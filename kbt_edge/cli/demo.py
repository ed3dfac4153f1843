"""``kbt-edge demo``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbt_edge.cli.terminal import add_backend, live
from kbt_edge.studies import demo

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=100, help="how many samples to learn (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="draws samples, starts and test states (default 0)")
    parser.add_argument("--out", type=Path, default=Path("kbt-demo"), help="folder for results (default kbt-demo)")
    add_backend(parser)


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    return demo.run(options.samples, options.seed, options.out, options.backend, live)


def text(result: Mapping[str, Any]) -> str:
    lines = [
        "The policy was trained for a short, light pole. Now the pole is ten times as long and ten times as heavy.",
        "",
        f"  old plant, before   {_percent(result['success_old_plant_before'])} of {result['starts']} starts balanced",
        f"  new plant, before   {_percent(result['success_new_plant_before'])}",
        f"  new plant, after    {_percent(result['success_new_plant_after'])}",
        "",
        "  samples   force RMSE   uncertainty   balanced   per update",
    ]
    for row in result["progress"]:
        speed = "" if row["update_us"] is None else f"{row['update_us']:8.1f} µs"
        figures = f"{row['samples']:7d} {row['rmse']:9.2f} N   ± {row['std']:7.2f} N"
        lines.append(f"  {figures}   {_percent(row['success']):>8} {speed}".rstrip())
    lines += ["", f"trunk: {result['backend']} ({result['backend_reason']})", f"adapted bundle: {result['bundle']}"]
    if result["picture"]:
        lines.append(f"picture: {result['picture']}")
    else:
        lines.append("no picture: matplotlib is not installed (pip install 'kbt-edge[demo]')")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
