"""``kbt-edge demo tokens``"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kbt_edge.cli.terminal import add_backend, live
from kbt_edge.model import Model
from kbt_edge.studies.tokens import SEEDS, run_study

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"the first of {SEEDS} seeds (default 0)")
    parser.add_argument("--quick", action="store_true", help="one seed only")
    add_backend(parser)


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    model = Model.load("kbt_edge:tokens", backend=options.backend)
    return run_study(model, range(options.seed, options.seed + (1 if options.quick else SEEDS)), tell=live)


def text(result: Mapping[str, Any]) -> str:
    seeds, moments, last = result["seeds"], result["sequences"], result["sequences"][-1]
    spread = f", mean ± deviation of {len(seeds)} new rules" if len(seeds) > 1 else ""
    lines = [
        "The model was trained on one spelling rule. Now there is another: a new table, and letters after a",
        f"vowel are shifted the other way. On {result['held_out']} unseen words{spread}, in %,",
        f"before and after {', '.join(map(str, moments[1:]))} sequences:",
    ]
    titles = {"token": "next token right", "answer": "whole answer right", "confidence": "confidence"}
    for field, title in titles.items():
        lines += ["", f"{title:<20}{'before':>12}" + "".join(f"{moment:>13}" for moment in moments[1:])]
        for name, scores in result["methods"].items():
            cells = map(_percent, scores[field]["mean"], scores[field]["std"] or [None] * len(moments))
            lines.append(f"  {name:<17}" + "".join(f"{cell:>13}" for cell in cells))

    lines += ["", f"{'cost':<20}{'memory':>12}{'a step':>13}{'a sequence':>13}{'of kbt':>13}"]
    for name, cost in result["cost"].items():
        memory = cost["memory"] or last
        each = "" if cost["every"] is None else f"{cost['sequence_ms']:>10.2f} ms{cost['times_kbt']:>11.1f} ×"
        lines.append(f"  {name:<17}{memory:>13}{cost['step_ms']:>10.2f} ms{each}")

    share = result["share_of_reference"]
    lines += [
        "",
        f"After {last} sequences kbt, which keeps one of them, has {100 * share['token']:.1f} % of the tokens and "
        f"{100 * share['answer']:.1f} % of the answers",
        "that retraining on all of them gets right.",
        "",
        f"  {'word':<10} {'wanted':<10} {'before':<10} after",
    ]
    lines += [f"  {e['word']:<10} {e['wanted']:<10} {e['before']:<10} {e['after']}" for e in result["examples"]]
    lines += ["", f"trunk: {result['backend']} ({result['backend_reason']})"]
    return "\n".join(lines)


def _percent(mean: float, std: float | None) -> str:
    return f"{100 * mean:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")
