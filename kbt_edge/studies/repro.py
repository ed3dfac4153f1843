"""``kbt-edge repro``: the paper's study, repeated and extended, as figures, JSON and one HTML report.

Six experiments, each a function below that returns plain data:

    adaptation        success, force RMSE and log likelihood against samples: KBT, its ablation, and every baseline
    computation_time  seconds per sample of each, one after the other with nothing else of the study running
    data_variance     predicted variance against iterations for four Σ_data, under ``replace`` and ``fuse``
    calibration       nominal against observed coverage, the noise once known and once learned
    tuning            both heads and ``tune`` on plants used for nothing else
    changing          plants that change while the head runs: a page of its own

Trials are independent, and run through joblib: ``study(settings, jobs)`` uses processes on this machine; inside
``joblib.parallel_config(backend="dask")`` (or "ray", after ``ray.util.joblib.register_ray()``) and with ``jobs=None``
it uses that cluster. Every trial draws from its own seed, so results do not depend on where it runs.

The learning rates of retraining, the ε of the paper's setting and the settings of the row "tuned" were chosen on other
streams than those of the trials (``baselines.CHOICE_SEEDS``). The paper's rows are single filters, ``drift=0``; beside
them is "KBT, default", a ``Head`` with nothing set.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kbt_edge._progress import Tell, silent
from kbt_edge.errors import BackendError
from kbt_edge.studies.adaptation import adaptation, computation_time
from kbt_edge.studies.changing import changing
from kbt_edge.studies.claims import claims
from kbt_edge.studies.common import FULL, QUICK, Result, Settings
from kbt_edge.studies.tuning import tuned_settings, tuning
from kbt_edge.studies.uncertainty import calibration, data_variance

__all__ = ["FULL", "QUICK", "Settings", "run", "study"]


def study(settings: Settings, jobs: int | None = None, tell: Tell = silent) -> Result:
    """All experiments. ``jobs``: processes; None leaves it to joblib's configuration."""
    started = time.time()
    chosen = tuned_settings()
    result: Result = {
        "settings": asdict(settings),
        "machine": _machine(),
        "tuned": chosen,
        "adaptation": adaptation(settings, chosen, jobs, tell),
        "data_variance": data_variance(settings, jobs, tell),
        "calibration": calibration(settings, jobs, tell),
        "tuning": tuning(settings),
        "changing": changing(settings, jobs, tell),
        "computation_time": computation_time(settings, tell),
    }
    result["claims"] = claims(result)
    result["seconds"] = time.time() - started
    return result


def run(settings: Settings, jobs: int | None, out: Path, tell: Tell = silent) -> Result:
    """The study, written to ``out`` as JSON, figures and two HTML pages."""
    _require_packages()
    from kbt_edge.studies import changing_page, figures, report

    out.mkdir(parents=True, exist_ok=True)
    result = study(settings, jobs, tell)
    data = out / "results.json"
    data.write_text(json.dumps(_finite(result), indent=1, allow_nan=False), "utf-8")
    drawn = figures.draw_all(result, out)
    page = out / "report.html"
    page.write_text(report.html(result, drawn), "utf-8")
    changes = changing_page.draw_all(result, out)
    second = out / "changing.html"
    second.write_text(changing_page.html(result, changes), "utf-8")
    return {
        "claims": result["claims"],
        "seconds": result["seconds"],
        "report": str(page),
        "changing": str(second),
        "results": str(data),
        "figures": [str(path) for path in (*drawn.values(), *changes.values())],
    }


def _machine() -> Result:
    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: what diverged becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _require_packages(names: Iterable[str] = ("torch", "joblib", "scipy", "matplotlib")) -> None:
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise BackendError(f"repro needs {', '.join(missing)}: pip install 'kbt-edge[repro]'")
