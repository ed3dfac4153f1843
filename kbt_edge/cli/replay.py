"""``kbt-edge replay LOG``"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kbt_edge.flight import FlightLog

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="file written by Head.save_flight_log, or by kbt_flight_log on a board")
    parser.add_argument("--expect", metavar="HASH", help="the final state must have this hash too, 16 hex digits")
    parser.add_argument("--out", metavar="FILE", help="write the state that was reached, for Head.load")


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    log = FlightLog.load(options.log)
    replay = log.replay()
    expected = log.state_hash if options.expect is None else options.expect.lower()
    reproduced = replay.reproduced and replay.state_hash == expected
    if options.out is not None:
        replay.head.save(options.out)
    nis = replay.nis
    return {
        "log": os.fspath(options.log),
        "head": repr(replay.head),
        "records": len(log),
        "before": log.before,
        "statuses": replay.statuses,
        "nis": {"mean": _finite(nis.mean()), "median": _finite(np.median(nis)), "max": _finite(nis.max())}
        if nis.size
        else None,
        "difference": None if replay.difference is None else replay.difference._asdict(),
        "expected": expected,
        "state": replay.state_hash,
        "reproduced": reproduced,
        "exit_code": 0 if reproduced else 1,
    }


def text(result: Mapping[str, Any]) -> str:
    lines = [result["log"], f"  head        {result['head']}"]
    lines.append(f"  records     {result['records']}, and {result['before']} before them that were overwritten")
    lines += [f"  {count:>10}  {status}" for status, count in result["statuses"].items()]
    if result["nis"]:
        lines.append("  NIS         " + ", ".join(f"{name} {value:.4g}" for name, value in result["nis"].items()))
    if result["difference"]:
        d = result["difference"]
        lines.append(f"  difference  first at record {d['record']} ({d['kind']})")
        lines += [f"              recorded  {d['recorded']}", f"              here      {d['replayed']}"]
    lines.append(f"  state       {result['state']}, expected {result['expected']}")
    lines.append("reproduced bit for bit" if result["reproduced"] else "NOT reproduced")
    return "\n".join(lines)


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
