"""``kbt-edge bench --compare a.json b.json``: results of several boards or builds side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kbt_edge.bench.figures import duration
from kbt_edge.bench.tables import COLUMNS, LOOPS, STAGES
from kbt_edge.errors import BundleError, RangeError

__all__ = ["FORMAT", "side_by_side", "text"]

FORMAT: Final = "kbt-edge bench 1"
_MAX_BYTES: Final = 64 * 2**20


def side_by_side(paths: Sequence[Path]) -> dict[str, Any]:
    """Rows of figures, one per column; None if a result does not have it."""
    if len(paths) < 2:
        raise RangeError(f"--compare: expected at least two files, got {len(paths)}")
    results = [_read(path) for path in paths]
    tables = [_rows(result) for result in results]
    names = list(dict.fromkeys(name for table in tables for name in table))
    return {
        "columns": [_column(path, result) for path, result in zip(paths, results, strict=True)],
        "same_model": len({json.dumps(_model(result), sort_keys=True) for result in results}) == 1,
        "rows": [
            {"name": name, "figures": [table.get(name) for table in tables], "ratios": _ratios(name, tables)}
            for name in names
        ],
    }


def text(result: Mapping[str, Any]) -> str:
    letters = [chr(ord("A") + i) for i in range(len(result["columns"]))]
    lines = []
    for letter, column in zip(letters, result["columns"], strict=True):
        lines += [f"{letter}  {column['file']}", f"   {column['board']}", f"   {column['conditions']}"]
    if not result["same_model"]:
        lines.append("The models differ, so this compares more than the boards.")
    head = "".join(f"{letter:>12}" for letter in letters) + "".join(f"{letter + '/A':>8}" for letter in letters[1:])
    lines += ["", f"{'':<52}{head}"]
    for row in result["rows"]:
        cells = "".join(f"{_cell(row['name'], figure):>12}" for figure in row["figures"])
        ratios = "".join(f"{'–' if ratio is None else f'{ratio:.2f}':>8}" for ratio in row["ratios"])
        lines.append(f"{row['name']:<52}{cells}{ratios}")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BundleError(f"{path}: expected a result of kbt-edge bench, got a file above {_MAX_BYTES >> 20} MiB")
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: expected a result of kbt-edge bench, got {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise BundleError(f"{path}: not a result of kbt-edge bench in the format {FORMAT!r}")
    return result


def _rows(result: Mapping[str, Any]) -> dict[str, float | None]:
    rows: dict[str, float | None] = {}
    for row in result["back_to_back"]["rows"]:
        for key in ("p50", "p99", "p99_9"):
            rows[f"{LOOPS[row['loop']]}: {STAGES[row['stage']]}, {COLUMNS[key]}"] = row.get(key)
    for loop in result.get("paced", {}).get("loops", []):
        name = f"paced {result['paced']['rate_hz']:g} Hz, {LOOPS[loop['loop']]}:"
        for part, words in (("release_jitter", "jitter"), ("service", "step"), ("response", "response")):
            for key in ("p50", "p99_9", "max"):
                rows[f"{name} {words}, {COLUMNS[key]}"] = loop[part][key]
        rows[f"{name} missed"] = loop["missed"]
    return rows


def _ratios(name: str, tables: Sequence[Mapping[str, float | None]]) -> list[float | None]:
    first = tables[0].get(name)
    others = [table.get(name) for table in tables[1:]]
    return [other / first if first and other is not None else None for other in others]


def _cell(name: str, figure: float | None) -> str:
    return "–" if figure is None else str(figure) if name.endswith("missed") else duration(figure)


def _model(result: Mapping[str, Any]) -> list[Any]:
    work = result["workload"]
    return [work["trunk_sha256"], work["trunk_backend"], work["head"]]


def _column(path: Path, result: Mapping[str, Any]) -> dict[str, str]:
    board, work = result["board"], result["workload"]
    governors = {policy["governor"] for policy in result["after"]["frequency"]} - {None}
    applied = [f"{entry['name']} {entry['asked']}" for entry in result["settings"] if entry["applied"]]
    load = result["load"]
    conditions = [
        f"kernel {board['kernel']} {board['kernel_preemption']}",
        f"governor {', '.join(sorted(governors)) or 'unknown'}",
        *applied,
        *([] if load is None else [f"{load['others_cores']:.2f} cores busy with others"]),
        f"trunk {work['trunk_backend']}",
        f"kbt_edge {result['kbt_edge']}",
    ]
    name = ", ".join(str(part) for part in (board["board"], board["cpu"], board["machine"]) if part)
    return {"file": str(path), "board": name, "conditions": ", ".join(conditions)}
