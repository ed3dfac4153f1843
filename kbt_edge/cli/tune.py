"""``kbt-edge tune BUNDLE SAMPLES.npz --out FOLDER``"""

from __future__ import annotations

import argparse
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kbt_edge.cli.terminal import add_backend, add_bundle, add_max_bytes, progress
from kbt_edge.errors import BundleError
from kbt_edge.model import Model
from kbt_edge.tune import tune

__all__ = ["arguments", "run", "text"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    parser.add_argument("samples", type=Path, help="a .npz file with arrays x and y, one row per sample")
    parser.add_argument("--out", type=Path, help="folder for the bundle with the chosen settings")
    add_backend(parser)
    add_max_bytes(parser)


def run(options: argparse.Namespace) -> Mapping[str, Any]:
    model = Model.load(options.bundle, backend=options.backend, max_bytes=options.max_bytes)
    try:
        with np.load(options.samples, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BundleError(f"samples: expected a .npz file with x and y, got {options.samples}: {error}") from None
    progress("tuning ...")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tune:")  # it is in the report
        tuned = tune(model, x, y)
    if options.out:
        tuned.model.save(options.out)
    return {
        "samples": tuned.samples,
        "settings_tried": len(tuned.tried),
        "seconds": tuned.seconds,
        "default": asdict(tuned.default),
        "before": asdict(tuned.before),
        "best": asdict(tuned.best),
        "candidates": [asdict(candidate) for candidate in tuned.tried],
        "note": tuned.note,
        "bundle": str(options.out) if options.out else None,
        "report": tuned.report(),
    }


def text(result: Mapping[str, Any]) -> str:
    where = result["bundle"]
    return f"{result['report']}\n\n" + (f"bundle: {where}" if where else "nothing written: no --out")
