"""Record the flight logs in tests/logs, and the file with the state that each must lead to.

    python tools/record_logs.py                                    # logs that are missing; compares the others
    python tools/record_logs.py --accept-change "why" [NAME ...]   # replaces them, and keeps the reason

A log that exists is never replaced without a reason, which is written into the history of tests/logs/expected.json with
the hashes before and after.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kbt_edge as kbt
from kbt_edge.flight import FlightLog
from kbt_edge.studies import cartpole, tokens

LOGS = Path(__file__).resolve().parents[1] / "tests/logs"
EXPECTED = LOGS / "expected.json"
D = 6
ORDER = 1  # softmax_order is part of every state: as the logs have it


def cart_pole() -> kbt.Head:
    """The shipped policy learns the changed plant, in the loop of examples/control_loop.py; noise is learned."""
    model = kbt.Model.load("kbt_edge:cartpole")
    model.head.record(300)
    gain = cartpole.lqr_gain(cartpole.NEW)
    state = np.array([0.5, 0.0, 0.1, 0.0])
    for _ in range(400):
        model.predict(state)
        target = -gain @ state
        model.observe(target)
        state = cartpole.NEW.step(state, np.array(target), 1 / 200)
    return model.head


def token_pairs() -> kbt.Head:
    """The shipped token model with a first-order head learns a changed rule, rows of a pair at once, from labels."""
    model = kbt.Model.load("kbt_edge:tokens")
    weight = model.head.layers[0].mean
    head = kbt.Head(
        weight[:, :-1],
        weight[:, -1],
        prior_var=0.1,
        output="softmax",
        softmax_order=ORDER,
        max_rows=tokens.MAX_LEN,
        drift=0.0,
    )
    head.record(16)
    pairs = kbt.Sequences((model.trunk, head), start=tokens.START, pad=tokens.PAD)
    rng = np.random.default_rng(1)
    for pair in tokens.sample_pairs(rng, 12, tokens.new_rule(rng)):
        pairs.update(pair.source, pair.target)
    return head


def drift() -> kbt.Head:
    """Weights that wander, behind a hidden layer, with some samples noisier than others."""
    rng = np.random.default_rng(2)
    head = kbt.Head(
        rng.normal(size=(2, D)),
        hidden=(12,),
        prior_var=(1e-3, 0.5),
        noise_var=[0.01, 0.04],
        softmax_order=ORDER,
        drift=0.0,
    )
    head.record(120)
    weight = rng.normal(size=(2, D))
    for step in range(150):
        weight += 0.02 * rng.normal(size=weight.shape)
        h = rng.normal(size=D)
        head.update(h, weight @ h, noise_var=0.5 if step % 10 == 0 else None)
    return head


def outliers() -> kbt.Head:
    """A gate, spikes that it rejects, and a sensor that sometimes reports NaN or far too large values."""
    rng = np.random.default_rng(3)
    head = kbt.Head(np.zeros((1, D)), noise_var=0.01, gate=16.0, prior_var=1.0, softmax_order=ORDER)
    head.record(200)
    for step in range(260):
        h, spike = rng.normal(size=D), 50.0 * (step % 23 == 22)
        y = np.array([h[0] - h[1] + spike + 0.1 * rng.normal()], np.float32)
        bad = {40: np.nan, 180: np.inf, 220: 1e38}.get(step)
        try:
            if bad is not None:
                head.update(h.astype(np.float32), np.full(1, bad, np.float32))
            elif step % 2:
                head.update(h, y)
            else:
                head.predict(h)
                head.observe(y)
        except kbt.NumericsError:
            pass
    return head


def steady_input() -> kbt.Head:
    """The same h every time, in a full float64 head: variances go down to their floors."""
    head = kbt.Head(
        np.ones((1, 4)),
        hidden=(8,),
        covariance="full",
        prior_var=(1e-2, 1.0),
        noise_var=1e-6,
        dtype="float64",
        softmax_order=ORDER,
        drift=0.0,
    )
    head.record(300)
    h = np.array([0.5, -0.25, 1.0, 2.0])
    for step in range(400):
        head.update(h, [1.0 + 1e-3 * (step % 3)])
    return head


def forgetting() -> kbt.Head:
    """Forgetting, learned noise, diagonal factors, and three rows at a time."""
    rng = np.random.default_rng(5)
    head = kbt.Head(
        np.zeros((1, D)),
        noise="adaptive",
        forgetting=0.97,
        covariance="diagonal",
        max_rows=3,
        softmax_order=ORDER,
        drift=0.0,
    )
    head.record(160)
    for step in range(220):
        h = rng.normal(size=(1 + step % 3, D))
        head.update(h, (h[:, :1] * np.sin(step / 30) - h[:, 1:2]) + 0.05 * rng.normal(size=(len(h), 1)))
    return head


RECORDED: dict[str, Callable[[], kbt.Head]] = {
    "cartpole": cart_pole,
    "tokens": token_pairs,
    "drift": drift,
    "outliers": outliers,
    "steady_input": steady_input,
    "forgetting": forgetting,
}


def described(data: bytes) -> dict[str, Any]:
    log = FlightLog(data)
    return {"records": len(log), "state": log.state_hash, "file_crc32": f"{zlib.crc32(data):08x}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(RECORDED)} (default: all)")
    parser.add_argument("--accept-change", metavar="REASON", help="replace what exists, and keep the reason")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - RECORDED.keys())
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(RECORDED)}, got {', '.join(unknown)}")
    if options.accept_change is not None and len(options.accept_change.split()) < 3:
        parser.error("--accept-change: expected a reason of three words or more")
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {"logs": {}, "history": []}
    rejected = False
    for name in options.names or RECORDED:
        path, known = LOGS / f"{name}.kbtf", expected["logs"].get(name)
        data = RECORDED[name]().flight_log()
        made = described(data)
        if known is None or options.accept_change is not None:
            path.write_bytes(data)
            expected["logs"][name] = made
            entry = {"log": name, "date": datetime.date.today().isoformat(), "before": known and known["state"]}
            reason = options.accept_change or "first recording"
            expected["history"].append({**entry, "after": made["state"], "reason": reason})
            print(f"{name}: {len(data)} bytes, {made['records']} records, state {made['state']}")
        elif made != known:
            rejected = True
            print(f"{name}: state {made['state']}, {known['state']} expected; not replaced", file=sys.stderr)
        else:
            print(f"{name}: as it was")
    if rejected:
        print("give --accept-change REASON if the core is meant to compute something else now", file=sys.stderr)
        return 1
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
