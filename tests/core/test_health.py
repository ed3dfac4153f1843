"""The verdict on a head, by Monte Carlo: for heads that are right, and for those that are wrong by a known amount."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from cabi import library

import kbt_edge as kbt
from kbt_edge.head import Health

pytestmark = pytest.mark.long("statistics over many streams")

D = 4


def plant(seed: int, head: kbt.Head, weight: np.ndarray, noise_var: float, samples: int) -> tuple[np.ndarray, ...]:
    """A linear plant whose weights are drawn from the head's own prior: what the head assumes is true."""
    rng = np.random.default_rng(seed)
    outputs, rows = head.d_o, head.config["max_rows"]
    unit = head.noise_var.mean() if head.config["noise"] == "adaptive" else 1.0  # then the prior is a ratio to it
    deviation = np.sqrt(head.config["prior_var"][-1] * unit)
    w = weight + deviation * rng.normal(size=weight.shape)
    h = rng.normal(size=(samples, rows, D))
    y = h @ w.T + deviation * rng.normal(size=outputs) + np.sqrt(noise_var) * rng.normal(size=(samples, rows, outputs))
    return h.astype(np.float32), y.astype(np.float32)


def verdicts(
    seeds: int, samples: int = 400, true_var: float = 0.01, outliers: float = 0.0, outputs: int = 1, **settings: Any
) -> Counter[str]:
    """How often each verdict was given: a check after every tenth sample from the 30th on."""
    found: Counter[str] = Counter()
    for seed in range(seeds):
        rng = np.random.default_rng(1000 + seed)
        weight = rng.normal(size=(outputs, D))
        head = kbt.Head(weight, **{"drift": 0.0, "prior_var": 1.0, "noise_var": 0.01, **settings})
        h, y = plant(seed, head, weight, true_var, samples)
        y[rng.random(samples) < outliers] += 50.0
        for step in range(samples):
            head.update(h[step], y[step])
            if step >= 29 and step % 10 == 9:
                found[head.health().verdict] += 1
    return found


def share(found: Counter[str], verdict: str) -> float:
    return found[verdict] / found.total()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outputs": 3, "max_rows": 2},
        {"hidden": (8,), "prior_var": (1e-6, 1.0)},
        {"forgetting": 0.995},
        {"noise": "adaptive"},
        {"gate": 16.0},
        {"gate": 6.63},  # rejects 1 % of good samples: the band knows
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_head_that_is_right_is_called_consistent(settings: dict[str, Any]) -> None:
    found = verdicts(40, **settings)
    false_alarms = found.total() - found["consistent"] - found["too few samples"]
    print(f"{false_alarms} false alarms in {found.total()} checks")
    assert false_alarms <= 0.01 * found.total()
    assert found["too few samples"] <= 0.01 * found.total()


def test_noise_understated_by_four_is_called_overconfident() -> None:
    assert share(verdicts(20, true_var=0.04), "overconfident") > 0.98


def test_noise_overstated_by_four_is_called_underconfident() -> None:
    found = verdicts(20, true_var=0.0025)
    assert share(found, "underconfident") > 0.9  # not at once: 30 samples of the prior's own uncertainty come first
    assert found.total() == found["underconfident"] + found["consistent"]


def test_a_gate_against_outliers_is_no_alarm_and_one_that_rejects_much_more_is() -> None:
    assert share(verdicts(15, outliers=0.03, gate=16.0), "consistent") > 0.97
    many = verdicts(15, outliers=0.3, gate=16.0)
    assert share(many, "overconfident") + share(many, "diverging") > 0.8
    assert share(verdicts(10, outliers=0.7, gate=16.0), "diverging") > 0.9


def test_a_gate_that_locks_a_changed_plant_out_is_called_diverging() -> None:
    head = kbt.Head(np.ones((1, D)), prior_var=1.0, drift=0.0, noise_var=0.01, gate=16.0)
    h, y = plant(0, head, np.ones((1, D)), 0.01, 600)
    told = []
    for step in range(600):
        head.update(h[step], y[step] + (20.0 if step >= 300 else 0.0))
        told.append(head.health().verdict)
    assert told[299] == "consistent"
    assert told[-1] == "diverging"
    assert head.samples < 310  # it has learned nothing since


def test_errors_that_grow_without_end_are_called_diverging() -> None:
    """A head that forgets nothing behind a plant that runs away from it."""
    head = kbt.Head(np.ones((1, D)), prior_var=1.0, drift=0.0, noise_var=0.01)
    h, y = plant(1, head, np.ones((1, D)), 0.01, 800)
    told = []
    for step in range(800):
        head.update(h[step], y[step] + 0.01 * np.exp(max(0, step - 300) / 40))
        told.append(head.health().verdict)
    assert told[299] == "consistent"
    assert "overconfident" in told[300:]
    assert told[-1] == "diverging"
    assert told.index("overconfident") < told.index("diverging")


def test_a_constant_error_however_large_is_not_called_diverging() -> None:
    found = verdicts(10, true_var=0.16)
    assert share(found, "diverging") < 0.02
    assert share(found, "overconfident") > 0.97


def test_variances_that_blow_up_are_called_diverging() -> None:
    head = kbt.Head(np.ones((1, D)), prior_var=1.0, drift=0.0, noise_var=10.0, rule="replace")
    for step in range(8):  # a variance of 10 at the output is one of 2 in the weights, and nothing unusual
        head.update(np.eye(D)[step % D], [0.0])
    assert head.health().verdict == "no band"
    head.update(np.eye(D)[0], [0.0], noise_var=1e5)  # the noise of one call in the wrong units
    assert head.health().largest_var > 1000
    assert head.health().verdict == "diverging"


# ---- softmax ---------------------------------------------------------------------------------------------------------


def softmax_verdicts(seeds: int, temperature: float = 1.0, prior_var: float = 0.1, samples: int = 300) -> Counter[str]:
    """Labels drawn with logits of weights from the prior, divided by a temperature that the head does not know."""
    found: Counter[str] = Counter()
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        weight = rng.normal(size=(4, D))
        true = weight + np.sqrt(prior_var) * rng.normal(size=weight.shape)
        head = kbt.Head(weight, prior_var=prior_var, output="softmax", drift=0.0)
        h = rng.normal(size=(samples, D)).astype(np.float32)
        labels = np.argmax(h @ true.T / temperature + rng.gumbel(size=(samples, 4)), axis=1).astype(np.int32)
        for step in range(samples):
            head.update(h[step], labels[step])
            if step >= 29 and step % 10 == 9:
                found[head.health().verdict] += 1
    return found


def test_a_softmax_is_judged_by_how_much_its_labels_surprise_it() -> None:
    right = softmax_verdicts(30)
    assert share(right, "consistent") >= 0.99
    assert share(softmax_verdicts(10, temperature=3.0, prior_var=1e-6), "overconfident") > 0.9
    assert share(softmax_verdicts(10, temperature=0.33, prior_var=1e-6), "underconfident") > 0.9


def test_the_band_of_a_sure_softmax_allows_for_rare_labels() -> None:
    """One label in 2,000 is the other one, as predicted: most of the time none, now and then a great surprise."""
    alarms = checks = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        head = kbt.Head([[np.log(1999.0)], [0.0]], prior_var=1e-12, output="softmax", drift=0.0)
        for step in range(300):
            head.update([1.0], int(rng.random() < 1 / 2000))
            if step >= 29 and step % 10 == 9:
                checks += 1
                alarms += head.health().verdict != "consistent"
    assert alarms <= 0.01 * checks


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("rare", [0.05, 0.3])
def test_the_band_of_a_softmax_is_that_of_its_mean_surprise_whatever_the_rows(rows: int, rare: float) -> None:
    """The mean of independent surprises has known moments. The gamma distribution with them is Pearson's type III."""
    stats = pytest.importorskip("scipy.stats")
    head = kbt.Head([[np.log((1 - rare) / rare)], [0.0]], prior_var=1e-12, output="softmax", max_rows=rows, drift=0.0)
    for _ in range(40):
        head.update(np.ones((rows, 1)), np.zeros(rows, np.int32))
    p = np.array([1 - rare, rare])
    away = -np.log(p) + p @ np.log(p)
    variance, third = p @ away**2, p @ away**3
    deviation, skew = np.sqrt(variance / (40 * rows)), third / variance**1.5 / np.sqrt(40 * rows)
    low, high = stats.pearson3.ppf([0.0005, 0.9995], skew, 0.0, deviation)
    assert head.health().low + 0.01 == pytest.approx(low, abs=0.03 * deviation)  # 0.01 nats of slack on either side
    assert head.health().high - 0.01 == pytest.approx(high, abs=0.03 * deviation)


# ---- the average itself ----------------------------------------------------------------------------------------------


def test_the_average_is_that_of_the_last_updates() -> None:
    head = kbt.Head(np.ones((2, D)), prior_var=1.0, drift=0.0, noise_var=0.01)
    h, y = plant(3, head, np.ones((2, D)), 0.01, 500)
    nis = [head.update(h[step], y[step]).nis / 2 for step in range(150)]
    assert head.health().average == pytest.approx(np.mean(nis), rel=1e-5)
    average = head.health().average
    for step in range(150, 500):
        x = head.update(h[step], y[step]).nis / 2
        average += (x - average) / min(step + 1, 200)
    assert head.health().average == pytest.approx(average, rel=1e-5)


@pytest.mark.parametrize(("outputs", "samples"), [(1, 30), (1, 100), (3, 200)])
def test_the_band_is_that_of_the_chi_square_distribution(outputs: int, samples: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    head = kbt.Head(np.ones((outputs, D)), drift=0.0, noise_var=0.01)
    for step in range(samples):
        head.update(np.eye(D)[step % D], np.zeros(outputs))
    dof = samples * outputs
    assert head.health().low == pytest.approx(stats.chi2.ppf(0.0005, dof) / dof, rel=0.01, abs=0.005)
    assert head.health().high == pytest.approx(stats.chi2.ppf(0.9995, dof) / dof, rel=0.01)


@pytest.mark.parametrize("outputs", [1, 2, 5])
@pytest.mark.parametrize("gate", [3.0, 10.0, 30.0])
def test_the_band_behind_a_gate_is_that_of_what_passes(gate: float, outputs: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    head = kbt.Head(np.ones((outputs, D)), drift=0.0, noise_var=1e6, prior_var=1e-6, gate=gate)
    for _ in range(2000):
        head.update(np.zeros(D), np.zeros(outputs))
    passing = stats.chi2(outputs).cdf(gate)
    mean = stats.chi2(outputs + 2).cdf(gate) / passing
    variance = outputs * (outputs + 2) * stats.chi2(outputs + 4).cdf(gate) / passing - (outputs * mean) ** 2
    health = head.health()
    assert (health.low + health.high) / 2 == pytest.approx(mean, rel=0.03)
    width = 2 * 3.2905 * np.sqrt(variance / 399) / outputs
    assert health.high - health.low == pytest.approx(width, rel=0.02)


def test_too_few_samples_is_said_until_there_are_thirty_and_again_after_a_new_start() -> None:
    head = kbt.Head(np.ones((1, D)), drift=0.0, noise_var=0.01)
    blob = head.to_bytes()
    assert repr(head.health()) == "Health(too few samples)"
    for step in range(30):
        assert head.health().verdict == "too few samples"
        head.update(np.eye(D)[step % D], [1.0 + 0.1 * (-1) ** step])
    assert head.health().verdict != "too few samples"
    assert head.health().seen == 30
    head.restore(blob)
    assert head.health()[:2] == ("too few samples", 0)


def test_a_rejected_sample_is_not_judged_and_the_state_knows_nothing_of_it_all() -> None:
    head, other = (kbt.Head(np.ones((1, D)), drift=0.0, noise_var=0.01) for _ in range(2))
    for step in range(40):
        head.update(np.eye(D)[step % D], [1.0])
    before, blob = head.health(), head.to_bytes()
    for bad in (np.full(D, np.nan, np.float32), np.full(D, 1e30, np.float32)):
        with pytest.raises(kbt.NumericsError):
            head.update(bad, np.ones(1, np.float32))
    after = head.health()
    assert after.counters.rejected == 2
    assert after._replace(counters=before.counters) == before
    other.restore(blob)
    assert other.to_bytes() == blob


def test_health_is_a_record_that_says_what_it_is() -> None:
    head = kbt.Head(np.ones((1, D)), drift=0.0, noise_var=0.01, gate=9.0)
    for step in range(60):
        head.update(np.eye(D)[step % D], [1.0 if step != 50 else 99.0])
    health = head.health()
    assert isinstance(health, Health)
    assert "underconfident: average 0, band" in repr(health)
    assert "gated" in repr(health)
    variances = np.diagonal(head.layers[0].cov[0])
    assert 0 < health.smallest_var <= variances.min() <= variances.max() <= (D + 1) * health.largest_var
    with pytest.raises(AttributeError):
        health.verdict = "consistent"  # type: ignore[misc]


def test_c_says_the_same_as_python() -> None:
    ffi, C = library()
    head = kbt.Head(np.ones((1, D)), prior_var=1.0, drift=0.0, noise_var=0.01)
    h, y = plant(0, head, np.ones((1, D)), 0.01, 50)
    cfg = ffi.new("kbt_config *")
    C.kbt_config_single(cfg, D, 1)
    room = np.zeros(C.kbt_arena_bytes(cfg) + 64, np.uint8)
    arena = ffi.cast("char *", room.ctypes.data) + (-room.ctypes.data) % 64
    other, told = ffi.new("kbt_head **"), ffi.new("kbt_health *")
    assert C.kbt_init(cfg, arena, C.kbt_arena_bytes(cfg), other) == C.KBT_OK
    weight = np.ones(D, np.float32)
    C.kbt_set_prior(other[0], ffi.from_buffer(weight), ffi.NULL, 0)
    for step in range(50):
        head.update(h[step], y[step])
        C.kbt_update(other[0], ffi.from_buffer(h[step]), 1, ffi.from_buffer(y[step]), ffi.NULL, 0, ffi.NULL)
    assert C.kbt_get_health(other[0], told) == C.KBT_OK
    health = head.health()
    assert told.verdict == C.KBT_CONSISTENT
    for name in ("seen", "average", "low", "high", "gated", "smallest_var", "largest_var"):
        assert getattr(told, name) == getattr(health, name)
