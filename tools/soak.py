"""Long runs of the scenarios of tests/core/test_stability.py. For maintainers.

    python tools/soak.py [--updates 10000000] [--scenario NAME ...]

Runs every scenario in float32 and float64 side by side and prints how far they end apart. Exits with 1 if a sample was
rejected, a number was not finite or negative, the float32 run ended more than 5 % (--within) from the float64 run, or
the average NIS of a correct model is outside its band.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/core"))
from test_stability import CORRECT, HEADS, SCENARIOS, SENSITIVE, build, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=10_000_000, help="per scenario and head (default 10^7)")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument(
        "--covariance", nargs="+", choices=("neuron", "diagonal", "full"), default=("neuron", "diagonal")
    )
    parser.add_argument("--within", type=float, default=5.0, help="percent from float64 (default 5)")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs side by side")
    arguments = parser.parse_args()
    cases = [
        (scenario, covariance, layers, outputs)
        for scenario in arguments.scenario
        for covariance, layers, outputs, _ in HEADS
        if covariance in arguments.covariance
    ]
    failed = False

    def soak(driver: Path, case: tuple[str, str, int, int]) -> list[str]:
        nonlocal failed
        scenario, covariance, layers, outputs = case
        title = f"{scenario}, {covariance}, {layers} layer{'s' * (layers > 1)}, {outputs} output{'s' * (outputs > 1)}"
        start = time.monotonic()
        try:
            found = simulate(driver, scenario, covariance, layers, outputs, arguments.updates)
        except RuntimeError as error:
            failed = True
            return [f"{title}: {error}"]
        apart = case != SENSITIVE and not all(layer.agrees(arguments.within / 100) for layer in found.layers)
        correct = scenario in CORRECT and layers == 1
        inconsistent = correct and not found.consistent()
        failed |= apart or inconsistent
        verdict = "APART" if apart else "INCONSISTENT" if inconsistent else "ok"
        lines = [f"{title}: {verdict}, {arguments.updates} updates twice in {time.monotonic() - start:.0f} s"]
        off = f" ({(found.nis - 1) / found.spread:+.1f} standard deviations)" if correct else ""
        lines.append(f"    average NIS {found.nis:.6g}{off}")
        return lines + [f"    layer {i}: {layer}" for i, layer in enumerate(found.layers)]

    with tempfile.TemporaryDirectory() as folder:
        driver = build(Path(folder))
        if driver is None:
            print("soak: needs a C compiler", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for lines in pool.map(partial(soak, driver), cases):
                print("\n".join(lines), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
