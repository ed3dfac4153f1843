"""The result of a benchmark as text that fits a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kbt_edge.bench.figures import duration, figure

__all__ = ["COLUMNS", "LOOPS", "STAGES", "board_lines", "harness_lines", "paced_title", "setting_lines", "text"]

COLUMNS: Final = {"p50": "p50", "p90": "p90", "p99": "p99", "p99_9": "p99.9", "max": "max"}
LOOPS: Final = {"c": "C loop, no Python", "python": "Python loop"}
STAGES: Final = {
    "trunk": "trunk (with scaling)",
    "predict": "predict (head)",
    "trunk + predict": "predict (trunk and head)",
    "observe": "observe",
    "predict + observe": "predict + observe (head)",
    "step": "whole step",
    "overhead": "Python's share of the step",
}


def text(result: Mapping[str, Any]) -> str:
    lines = board_lines(result)
    lines += ["", *setting_lines(result), "", *_back_to_back(result["back_to_back"])]
    if "paced" in result:
        lines += ["", *_paced(result["paced"])]
    if "sweep" in result:
        lines += ["", *_sweep(result["sweep"])]
    if "baselines" in result:
        lines += ["", *_baselines(result)]
    lines += ["", *harness_lines(result)]
    lines += ["", *(f"{name}: {path}" for name, path in result["files"].items())]
    if "latency" not in result["files"]:
        lines.append("no pictures: matplotlib is not installed (pip install 'kbt-edge[demo]')")
    return "\n".join(lines)


def board_lines(result: Mapping[str, Any]) -> list[str]:
    board, before, after, work = result["board"], result["before"], result["after"], result["workload"]
    head = work["head"]
    kernel = f"Linux {board['kernel']}, preemption {board['kernel_preemption']}" + ", virtual" * board["virtual"]
    lines = [
        f"board      {', '.join(str(part) for part in (board['board'], board['cpu'], board['machine']) if part)}, "
        f"{board['cores']} cores",
        f"kernel     {kernel}",
    ]
    for policy_before, policy in zip(before["frequency"], after["frequency"], strict=False):
        lines.append(
            f"clock      cpu {policy['cpus']}: {policy['governor']}, {_mhz(policy_before['now_mhz'])} before, "
            f"{_mhz(policy['now_mhz'])} after, of {_mhz(policy['min_mhz'])} to {_mhz(policy['max_mhz'])}"
        )
    if not after["frequency"]:
        lines.append("clock      the kernel does not report frequency or governor")
    heat = [f"{name} {before['temperature_c'].get(name, value):.0f} → {value:.0f} °C"
            for name, value in after["temperature_c"].items()]  # fmt: skip
    lines.append(f"heat       {', '.join(heat) or 'no sensor'}")
    throttled = after["throttled"]
    lines.append(
        "throttled  " + ("the board does not say" if throttled is None else ", ".join(throttled) if throttled else "no")
    )
    if after["power_mode"]:
        lines.append(f"power      {after['power_mode']}")
    if result["load"] is not None:
        others, stolen = result["load"]["others_cores"], result["load"]["stolen_cores"]
        taken = f", the hypervisor took {stolen:.2f}" if stolen >= 0.005 else ""
        lines.append(f"load       other processes kept {others:.2f} cores busy meanwhile{taken}")
    if "stops" in result:  # not in results of versions before it
        lines.append(f"stops      {stops_text(result['stops'])}")
    lines.append(
        f"model      {work['bundle']}: trunk {work['trunk_backend']}, head {'→'.join(map(str, head['widths']))} "
        f"{head['covariance']} {head['dtype']}, {work['head_bytes'] / 1024:.1f} KiB"
    )
    return lines


def stops_text(stops: Mapping[str, Any]) -> str:
    what = (
        f"a busy loop was stopped {stops['per_second']:.0f} times a second for {duration(stops['shortest_ns'])} or more"
    )
    if stops["max"] is None:
        return what
    usual = "" if stops["p50"] is None else f"{duration(stops['p50'])} typically, "
    return f"{what}: {usual}{duration(stops['max'])} at most, {100 * stops['share']:.1f} % of the time"


def setting_lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for entry in result["settings"]:
        state = "on" if entry["applied"] else "off" if entry["asked"] == "no" else "REJECTED"
        asked = "" if entry["asked"] in ("no", "yes") else f" {entry['asked']}"
        detail = f": {entry['detail']}" if entry["detail"] else ""
        lines.append(f"{entry['name']:<10} {state}{asked if state != 'off' else ''}{detail}")
    return lines


def harness_lines(result: Mapping[str, Any]) -> list[str]:
    harness = result["harness"]
    return [
        f"harness    a reading costs {harness['c_overhead_ns']:.0f} ns in C, "
        f"{harness['python_overhead_ns']:.0f} ns in Python ({harness['clock']});",
        f"           at most {100 * harness['largest_overhead_share']:.1f} % of any figure here, whose smallest is "
        f"{duration(harness['smallest_figure_ns'])}",
    ]


def _back_to_back(part: Mapping[str, Any]) -> list[str]:
    lines = [_header(f"back to back, {part['steps']} steps")]
    loop = ""
    for row in part["rows"]:
        if row["loop"] != loop:
            loop = row["loop"]
            lines.append(LOOPS[loop])
        name = STAGES[row["stage"]] + (f" (mean of {row['repeat']})" if row.get("repeat", 1) > 1 else "")
        if row.get("too_short"):
            lines.append(f"  {name:<30} too short to be timed alone: below {duration(row['below_ns'])}")
        else:
            lines.append(_line(name, row))
    lines.append(_usage(part))
    return lines


def paced_title(part: Mapping[str, Any]) -> str:
    before = f", awake {part['spin_us']:g} µs before each release" if part.get("spin_us") else ""
    return f"paced, {part['rate_hz']:g} Hz for {part['duration_s']:g} s, deadline {part['deadline_ms']:g} ms{before}"


def _paced(part: Mapping[str, Any]) -> list[str]:
    lines = [_header(paced_title(part))]
    for loop in part["loops"]:
        lines.append(
            LOOPS[loop["loop"]] + ("" if part["whole"] or loop["loop"] == "python" else " (head only, from h)")
        )
        lines.append(_line("late release (jitter)", loop["release_jitter"]))
        lines.append(_line("the step itself", loop["service"]))
        lines.append(_line("response, from due release", loop["response"]))
        missed, steps = loop["missed"], loop["steps"]
        lines.append(
            f"  missed deadlines: {missed} of {steps}"
            + (f" ({100 * missed / steps:.3g} %), at most {loop['longest_run_of_misses']} in a row" if missed else "")
        )
        if loop["service"]["p99_9_over_p50"] is not None:
            lines.append(f"  steadiness of the step itself: p99.9 is {loop['service']['p99_9_over_p50']:.1f} × p50")
        lines.append(_usage(loop))
    return lines


def _sweep(part: Mapping[str, Any]) -> list[str]:
    lines = [f"{'sweep, predict + observe in C':<32}{'widths':>16}{'rows':>6}{'factors':>12}{'memory':>11}"
             f"{'p50':>10}{'p99':>10}"]  # fmt: skip
    axis = ""
    for point in part["points"]:
        if point["axis"] != axis:
            axis = point["axis"]
            lines.append(f"over {axis}")
        widths = "→".join(map(str, [point["d"], *point["hidden"], point["outputs"]]))
        lines.append(
            f"  {point['curve']:<30}{widths:>16}{point['rows']:>6}{point['factors']:>12}"
            f"{point['bytes'] / 1024:>7.0f} KiB{duration(point['p50']):>10}{duration(point['p99']):>10}"
        )
    lines += [f"  {note}" for note in part["notes"]]
    if part["exponents"]:
        lines.append("growth of time: exponent over all points (and over the larger half)")
        for fit in part["exponents"]:
            low, high = fit["from_to"]
            what = "stored factors" if fit["of"] == "factors" else fit["of"]
            lines.append(
                f"  {fit['curve']:<34} {fit['axis']} {low} to {high}: time ~ {what} ^ {fit['all']:.2f} "
                f"({fit['larger_half']:.2f})"
            )
    return lines


def _baselines(result: Mapping[str, Any]) -> list[str]:
    step = next(row for row in result["back_to_back"]["rows"] if (row["loop"], row["stage"]) == ("python", "step"))
    lines = [f"{'baselines':<46}{'p50':>10}{'p99':>10}   per sample, against one Python step of kbt_edge"]
    for row in result["baselines"]:
        if "missing" in row:
            lines.append(f"  {row['name']:<44}  {row['missing']}")
        else:
            ratio = "" if step.get("too_short") else f"{row['p50'] / row['samples'] / step['p50']:,.1f} ×"
            lines.append(f"  {row['name']:<44}{duration(row['p50']):>10}{duration(row['p99']):>10}   {ratio}")
    return lines


def _header(title: str) -> str:
    own_line = "\n" + " " * 50 if len(title) > 50 else ""
    return f"{title:<50}{own_line}" + "".join(f"{name:>10}" for name in COLUMNS.values())


def _line(name: str, row: Mapping[str, Any]) -> str:
    return f"  {name:<48}" + "".join(f"{figure(row, key):>10}" for key in COLUMNS)


def _usage(part: Mapping[str, Any]) -> str:
    return (
        f"  the kernel took the core away {part['involuntary_switches']} times; page faults: "
        f"{part['major_faults']} from disk, {part['minor_faults']} in memory"
    )


def _mhz(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} MHz"
