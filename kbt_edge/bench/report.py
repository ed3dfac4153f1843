"""One self-contained HTML file with all figures and plots."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

from kbt_edge.bench import tables
from kbt_edge.bench.figures import duration, figure

__all__ = ["html"]

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.note, figcaption { color: #555; font-size: .9rem; } figure { margin: 1rem 0; } img { max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
th { border-bottom: 2px solid #888; font-weight: 600; } tr.loop td { font-weight: 600; background: #f3f4f6; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: #555; } dd { margin: 0; } .good { color: #14692c; } .bad { color: #b00020; font-weight: 600; }
"""


def html(result: Mapping[str, Any]) -> str:
    files, work = result["files"], result["workload"]
    parts = [
        f"<h1>kbt-edge bench: {escape(work['bundle'])}</h1>",
        f"<p class=note>kbt_edge {escape(result['kbt_edge'])}, measured {escape(result['measured'])}</p>",
        _facts("The board", tables.board_lines(result)),
        _facts("While measuring", [*tables.setting_lines(result), *_joined(tables.harness_lines(result))]),
        _back_to_back(result["back_to_back"]),
        _picture(files, "latency", "How often each latency occurred, on logarithmic axes."),
    ]
    if "paced" in result:
        parts.append(_paced(result["paced"]))
        parts.append(
            _picture(files, "release", "Every release in turn; where points would overlap, the latest is drawn.")
        )
    if "sweep" in result:
        parts.append(_sweep(result["sweep"], _picture(files, "sweep", "Time and memory of a head over its size.")))
    if "baselines" in result:
        parts.append(_baselines(result["baselines"]))
    parts.append(_versions(result["board"]))
    title = f"kbt-edge bench: {escape(work['bundle'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _joined(lines: list[str]) -> list[str]:
    """A line that was wrapped for the terminal, unwrapped."""
    return [" ".join([lines[0], *(line.strip() for line in lines[1:])])]


def _facts(title: str, lines: list[str]) -> str:
    pairs = (line.split(maxsplit=1) for line in lines if line)
    return f"<h2>{title}</h2><dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs) + "</dl>"


def _table(head: list[str], rows: list[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _loop(name: str, columns: int) -> str:
    return f"<tr class=loop><td colspan={columns}>{escape(name)}</td></tr>"


def _figures(row: Mapping[str, Any]) -> list[str]:
    return [figure(row, key) for key in tables.COLUMNS]


def _back_to_back(part: Mapping[str, Any]) -> str:
    rows, loop = [], ""
    for row in part["rows"]:
        if row["loop"] != loop:
            loop = row["loop"]
            rows.append(_loop(tables.LOOPS[loop], 7))
        name = tables.STAGES[row["stage"]]
        if row.get("too_short"):
            rows.append(_row([name, f"below {duration(row['below_ns'])}", "", "", "", "", ""]))
        else:
            name += f" (mean of {row['repeat']})" if row["repeat"] > 1 else ""
            rows.append(_row([name, *_figures(row), f"{100 * row['overhead_share']:.1f} %"]))
    notes = (
        f"{part['steps']} steps of each loop, taking turns. The kernel took the core away "
        f"{part['involuntary_switches']} times; page faults: {part['major_faults']} from disk, {part['minor_faults']} "
        "in memory. Python's share is the difference between a Python step and the C step of the same sample."
    )
    head = ["", *tables.COLUMNS.values(), "harness"]
    return f"<h2>Back to back</h2>{_table(head, rows)}<p class=note>{escape(notes)}</p>"


def _paced(part: Mapping[str, Any]) -> str:
    rows, verdicts = [], []
    for loop in part["loops"]:
        rows.append(_loop(tables.LOOPS[loop["loop"]], 6))
        rows.append(_row(["late release (jitter)", *_figures(loop["release_jitter"])]))
        rows.append(_row(["the step itself", *_figures(loop["service"])]))
        rows.append(_row(["response, from due release", *_figures(loop["response"])]))
        missed, steps = loop["missed"], loop["steps"]
        mood = "bad" if missed else "good"
        run = f", at most {loop['longest_run_of_misses']} in a row" if missed else ""
        ratio = loop["service"]["p99_9_over_p50"]
        steadiness = "" if ratio is None else f"; p99.9 of the step itself is {ratio:.1f} × its p50"
        verdicts.append(
            f"<p>{escape(tables.LOOPS[loop['loop']])}: "
            f"<span class={mood}>{missed} of {steps} deadlines missed</span>{run}{steadiness}; "
            f"the kernel took the core away {loop['involuntary_switches']} times</p>"
        )
    title = tables.paced_title(part)
    return f"<h2>{title[0].upper()}{title[1:]}</h2>{_table(['', *tables.COLUMNS.values()], rows)}{''.join(verdicts)}"


def _sweep(part: Mapping[str, Any], picture: str) -> str:
    rows, axis = [], ""
    for point in part["points"]:
        if point["axis"] != axis:
            axis = point["axis"]
            rows.append(_loop(f"over {axis}", 7))
        widths = "→".join(map(str, [point["d"], *point["hidden"], point["outputs"]]))
        memory = f"{point['bytes'] / 1024:.0f} KiB"
        figures = [duration(point["p50"]), duration(point["p99"])]
        rows.append(_row([point["curve"], widths, str(point["rows"]), f"{point['factors']:,}", memory, *figures]))
    table = _table(["predict + observe in C", "widths", "rows", "factors", "memory", "p50", "p99"], rows)
    fits = [
        _row([f"{fit['curve']}, over {fit['axis']}", fit["of"], f"{fit['all']:.2f}", f"{fit['larger_half']:.2f}"])
        for fit in part["exponents"]
    ]
    exponents = _table(["growth of time", "exponent in", "all points", "larger half"], fits) if fits else ""
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in part["notes"])
    return f"<h2>Sweep</h2>{exponents}{notes}{picture}{table}"


def _baselines(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        _row([row["name"], row["missing"], "", ""])
        if "missing" in row
        else _row([row["name"], duration(row["p50"]), duration(row["p99"]), duration(row["p50"] / row["samples"])])
        for row in rows
    ]
    return f"<h2>Baselines</h2>{_table(['', 'p50', 'p99', 'p50 per sample'], lines)}"


def _picture(files: Mapping[str, str], name: str, caption: str) -> str:
    if name not in files:
        return ""
    data = base64.b64encode(Path(files[name]).read_bytes()).decode()
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def _versions(board: Mapping[str, Any]) -> str:
    lines = [f"{name} {version or 'not installed'}" for name, version in board["packages"].items()]
    lines += [f"python {board['python']}", f"compiler {board['compiler'] or 'none found'}"]
    lines += [f"core built by {board['core_compiler']}"]
    return _facts("Versions", [line.replace("core built by", "core") for line in lines])
