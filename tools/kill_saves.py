"""Kill a process that saves a bundle, again and again, and check the bundle: ``python tools/kill_saves.py``.

A child saves two states in turn and says when each save begins and ends. It gets SIGKILL at a random moment. Then the
bundle must be whole (else it is torn), and hold the last state whose save had ended or the one being saved (else a save
is lost).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

import kbt_edge as kbt
from kbt_edge import bundle as bundles


def versions() -> list[bundles.Bundle]:
    """The shipped cart-pole bundle with two states of its head."""
    base = bundles.read(bundles.find("kbt_edge:cartpole"))
    head = kbt.Head.from_bytes(base.head)
    for i in range(25):
        head.update(np.full(head.d, 0.1 * i), np.ones(head.d_o))
    return [base, replace(base, head=head.to_bytes())]


def kill_once(folder: Path, states: list[bundles.Bundle], saved: int, delay: float) -> bytes:
    """Save from number ``saved`` + 1 on, until killed. Answers "(" for each that began, ")" for each that ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            number = saved
            while True:
                number += 1
                os.write(writer, b"(")
                bundles.write(folder, states[number % 2])
                os.write(writer, b")")
        finally:
            os._exit(1)
    os.close(writer)
    story = os.read(reader, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(reader, 65536):
        story += part
    os.close(reader)
    return story


def run(kills: int, seed: int, folder: Path) -> dict[str, int]:
    states = versions()
    bundles.write(folder, states[0])
    started = time.perf_counter()
    for _ in range(5):
        for state in reversed(states):
            bundles.write(folder, state)
    longest = min(2 * (time.perf_counter() - started) / 10, 0.04)  # kill within the time of two saves
    rng = random.Random(seed)
    count = Counter({name: 0 for name in ("lost", "torn", "between", "before_rename", "after_rename", "leftovers")})
    saved = 0  # the number of the last save that ended; even numbers are states[0]
    for _ in range(kills):
        story = kill_once(folder, states, saved, rng.uniform(0, longest))
        ended = story.count(b")")
        saved += ended
        count["ended"] += ended
        count["leftovers"] += any(path.name.endswith(".tmp") for path in folder.iterdir())
        try:
            now = states.index(bundles.read(folder))
        except (kbt.KbtError, ValueError):
            count["torn"] += 1
            bundles.write(folder, states[saved % 2])
            continue
        if story.endswith(b")"):
            count["between"] += 1
            count["lost"] += now != saved % 2
        elif now != saved % 2:  # the save in progress was complete
            count["after_rename"] += 1
            saved += 1
        else:
            count["before_rename"] += 1
    return {"kills": kills, **count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.kills, options.seed, Path(folder) / "bundle")
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name.replace('_', ' '):<15}{number:>8}" for name, number in found.items()))
    raise SystemExit(1 if found["lost"] or found["torn"] else 0)


if __name__ == "__main__":
    main()
