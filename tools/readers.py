"""Two threads predict while one learns: torn predictions, and what a reader waits. ``python tools/readers.py``.

Builds tests/readers.c against the installed library. First the learner updates in a tight loop, then at 1 kHz, as a
control loop would; the readers take the newest state before each prediction. Exits with 1 when a prediction was torn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
from cabi import TESTS, build_with_installed, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=5_000_000, help="of each of the readers (default 5 million)")
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        program = build_with_installed("cc", TESTS / "readers.c", Path(folder) / "readers", "-pthread")
        for title, period in (("a learner in a tight loop", 0), ("a learner of 1 kHz", 1000)):
            told = json.loads(run(program, calls, period))
            alone, writing, first = told["alone_us"], told["writing_us"], told["first_us"]
            print(
                f"{title}: {told['reads'] + told['updates']} calls, {told['updates']} of them updates, "
                f"{told['versions_seen']} posteriors seen, {told['torn']} torn; reader alone p50 {alone[0]:.2f} "
                f"and p99 {alone[1]:.2f} µs, while it learns p50 {writing[0]:.2f} and p99 {writing[1]:.2f} µs "
                f"({writing[1] / alone[1]:.2f} times), the first from a new posterior p50 {first[0]:.2f} and p99 "
                f"{first[1]:.2f} µs"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
