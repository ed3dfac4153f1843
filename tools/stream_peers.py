"""The peers of streams.py, where they are installed: river and pytagi. They take long, so their scores are kept."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
from racing import SkipError
from stream_learners import Array, Factory, Frozen


class River(Frozen):
    """A river regressor per output."""

    def __init__(self, d: int, o: int, make: Callable[[], Any]) -> None:
        super().__init__(d, o)
        self.models = [make() for _ in range(o)]

    def value(self, h: Array) -> Array:
        self.x = dict(enumerate(h.tolist())) | {-1: 1.0}
        return np.nan_to_num(np.array([float(model.predict_one(self.x)) for model in self.models]))

    def learn(self, y: Array) -> None:
        super().learn(y)
        for model, value in zip(self.models, y.tolist(), strict=True):
            model.learn_one(self.x, value)


class RiverClasses:
    """A river classifier. A hundredth of the probability is spread evenly: none of them bounds its surprise."""

    def __init__(self, d: int, o: int, make: Callable[[], Any]) -> None:
        self.model, self.o = make(), o

    def predict(self, h: Array) -> Array:
        self.x = dict(enumerate(h.tolist()))
        given = self.model.predict_proba_one(self.x)
        p = np.nan_to_num(np.array([given.get(label, 0.0) for label in range(self.o)], np.float64))
        p = p / p.sum() if p.sum() > 0 else np.full(self.o, 1 / self.o)
        return 0.99 * p + 0.01 / self.o

    def learn(self, label: int) -> None:
        self.model.learn_one(self.x, int(label))


class Tagi(Frozen):
    """pytagi: one hidden layer of 32. The noise that it is told is the running variance of its errors."""

    def __init__(self, d: int, o: int) -> None:
        super().__init__(d, o)
        nn = peers.pytagi()
        import pytagi

        pytagi.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, o))
        self.net.set_threads(1)
        self.net.input_state_update = False
        self.updater = nn.OutputUpdater(self.net.device)

    def value(self, h: Array) -> Array:
        return np.array(self.net(h.astype(np.float32))[0][: len(self.b)], np.float64)

    def learn(self, y: Array) -> None:
        noise = np.clip(self.errors.var, 1e-4, None).astype(np.float32)
        self.updater.update(self.net.output_z_buffer, y.astype(np.float32), noise, self.net.input_delta_z_buffer)
        self.net.backward()
        self.net.step()
        super().learn(y)


def factories(kind: str) -> tuple[dict[str, Factory], dict[str, str]]:
    """The peers for "regression" or "classification", and why others are missing."""
    missing: dict[str, str] = {}
    made: dict[str, Factory] = {}
    try:
        made = river_peers(kind)
    except ImportError as error:
        missing["river"] = f"{error} (pip install river)"
    if kind == "regression":
        try:
            peers.pytagi()
            made["pytagi"] = Tagi
        except SkipError as reason:
            missing["pytagi"] = str(reason)
    return made, missing


def river_peers(kind: str) -> dict[str, Factory]:
    warnings.filterwarnings("ignore", module="river")
    from river import forest, linear_model, multiclass, naive_bayes, preprocessing

    scale = preprocessing.StandardScaler
    makers: dict[str, Callable[[], Any]]
    if kind == "regression":
        makers = {
            "river linear": lambda: scale() | linear_model.LinearRegression(),
            "river Bayesian": linear_model.BayesianLinearRegression,
            "river forest": lambda: forest.ARFRegressor(seed=0),
        }
        return {name: lambda d, o, make=make: River(d, o, make) for name, make in makers.items()}  # type: ignore[misc]
    makers = {
        "river logistic": lambda: scale() | multiclass.OneVsRestClassifier(linear_model.LogisticRegression()),
        "river softmax": lambda: scale() | linear_model.SoftmaxRegression(),
        "river Bayes": naive_bayes.GaussianNB,
        "river forest": lambda: forest.ARFClassifier(seed=0),
    }
    return {name: lambda d, o, make=make: RiverClasses(d, o, make) for name, make in makers.items()}  # type: ignore[misc]


def versions() -> str:
    """Of the peers, as one string."""
    out = []
    for package in ("river", "pytagi"):
        try:
            out.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{package} none")
    return ", ".join(out)
