"""The page that ``kbt-edge repro`` writes: one self-contained file with its figures."""

from __future__ import annotations

import base64
import html as markup
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import numpy as np

from kbt_edge.studies.common import HEADS, SINGLE, WATCHFUL

__all__ = ["STYLE", "embedded", "escaped", "html", "number"]

Result = Mapping[str, Any]

STYLE: Final = """
:root { --ink: #1d2730; --soft: #5b6770; --line: #e2e7ec; --blue: #0b5fa5; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f8fa; color: var(--ink); font: 17px/1.6 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; background: #fff; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { margin: 3.2rem 0 .4rem; font-size: 1.35rem; }
p { max-width: 46rem; } .lead { font-size: 1.15rem; color: var(--soft); }
figure { margin: 1.2rem 0; } figure img { width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .92rem; max-width: 46rem; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; margin: 1rem 0; }
th, td { text-align: right; padding: .38rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td.what { text-align: left; color: var(--soft); } tr.ours td { background: #eef5fb; font-weight: 600; }
ul.claims { list-style: none; padding: 0; }
ul.claims li { margin: .8rem 0; padding: .3rem 0 .3rem 1rem; border-left: 5px solid #2e8b57; }
ul.claims li.no { border-color: #c0392b; } ul.claims b { display: block; font-size: 1.1rem; }
ul.claims span { color: var(--soft); }
footer { margin-top: 4rem; color: var(--soft); font-size: .88rem; border-top: 1px solid var(--line); }
code { background: #f0f3f6; padding: .1em .3em; border-radius: 3px; font-size: .92em; }
"""


PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>kbt-edge: the study</title><style>$style</style></head><body><main>

<h1>A transformer policy meets a new plant</h1>
<p class=lead>A small decision transformer was trained to imitate the LQR of a cart-pole. Then the pole became ten times
as long and ten times as heavy. The network is frozen; only its last layer keeps learning, one sample at a time, by a
closed-form Bayesian update. How fast does it recover, what does that cost, and is its uncertainty right? This is the
paper's study, repeated, with corrections and additions.</p>

<p>Rows and lines called "$single" are one filter of a plant that stands still, the paper's setting. "$default" is
<code>Head(weight, bias)</code> with nothing set: a watchful head, which also notices when the plant changes. The page
changing.html beside this one shows what that is good for.</p>

<h2>What was found</h2>
$claims

<h2>Success against samples</h2>
<p>After every few samples the loop is closed on the nonlinear plant from $starts random starts, in $trials. A
start counts when the pole never falls and cart and pole stand within 2.4 m and 12° for the last 5 of 15 s. The box of
starts was fixed with the two LQRs alone: the old one drops every start, the new one loses none. Retraining waits until
its memory is full, trains the whole network for 100 epochs, and drops the memory.</p>
$success

<h2>Computation time per sample</h2>
<p>From a state and a force to an adapted policy, the frozen trunk included. Measured in this run, one method after the
other, in one process, as processor time.</p>
$time

<h2>Force error and likelihood</h2>
<p>Stabilising is a coarse measure. The force error on states that no method has seen tells more. And the likelihood of
the right force under the predicted distribution tells whether the uncertainty is honest: it penalises both
overconfidence and needless doubt. Networks that are retrained predict no variance.</p>
$error

<h2>What each correction is worth</h2>
<p>From the paper's own setting to one layer with learned noise, one change after the other; below them, the default
head, and what both are compared with. Force RMSE in newtons on unseen states after so many samples, the share of
starts balanced after 50, and the negative log likelihood at the end, each the mean over the trials.</p>
$ablation
<p>The first row keeps only the diagonal of the cross-covariance at each ReLU, which contradicts the full covariances
around it: $clipped eigenvalues of the weights' covariance became negative in a trial and had to be clipped. The last
row is as accurate as "$single", as it should be: with one layer it is that regression. It adds the variance, learned
noise, and hidden layers for laws that are not linear in h.</p>

<h2>Predicted variance</h2>
<p>Samples now carry noise of variance Σ_data, and the head predicts each observation before it learns from it:
$iterations iterations, moving average over $window as in the paper; the shaded part is what the paper shows. Under
<code>replace</code> the variance of the weights must carry the noise of the data; under <code>fuse</code> the two are
kept apart, and the variance of the model itself goes on shrinking. The default head has one layer and learns the noise;
the others are told it.</p>
$variance
$variances

<h2>Calibration</h2>
<p>Do intervals that should hold 90 % of the observations hold 90 %? After 400 noisy samples, on 1,000 unseen states per
trial, once with the variance of the noise given to the head, once learned.</p>
$calibration

<h2>Other plants</h2>
<p>Plants with random masses and lengths, used for nothing else. <code>tune</code> saw $tuned samples of each, and
chose the variances of "$single"; all were then judged on 400 others: log likelihood per sample, each predicted before
it was learned (higher is better), and force RMSE after 50 samples.</p>
$plants

<footer><p>kbt-edge repro: $trials of $samples samples, seed $seed, $seconds s on $machine. All figures are in
results.json beside this page.</p></footer>
</main></body></html>
"""


def html(result: Result, figures: Mapping[str, Path]) -> str:
    """The page. ``figures``: SVG files by name, as ``figures.draw_all`` returns them."""
    settings, machine = result["settings"], result["machine"]
    captions = {
        "success": "Mean over the trials. The heads keep one sample in memory.",
        "time": "Mean over the samples; log scale.",
        "error": "Mean over the trials; bands from the best to the worst trial. Lower is better.",
        "variance": "Dashed: the variance of the noise that was added.",
        "calibration": "The red bar is the range from 87 to 93 % at 90 %.",
    }
    return Template(PAGE).substitute(
        {name: embedded(figures[name], caption) for name, caption in captions.items()},
        style=STYLE,
        single=SINGLE,
        default=WATCHFUL,
        claims=_claims(result["claims"]),
        ablation=_ablation(result["adaptation"]),
        clipped=f"{np.mean(result['adaptation']['paper']['clipped']):.0f}",
        variances=_variances(result["data_variance"]["runs"]),
        plants=_plants(result["tuning"]),
        starts=settings["starts"],
        trials=f"{settings['trials']} trial" + "s" * (settings["trials"] != 1),
        samples=settings["samples"],
        seed=settings["seed"],
        iterations=f"{settings['iterations']:,}",
        window=result["data_variance"]["window"],
        tuned=result["tuning"]["samples"],
        seconds=f"{result['seconds']:.0f}",
        machine=f"{machine['processor']} with {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}, torch {machine['torch']}",
    )


def _claims(claims: list[Result]) -> str:
    items = [
        f"<li{'' if claim['met'] else ' class=no'}>"
        f"<b>{'' if claim['met'] else 'Not met: '}{escaped(claim['found'])}</b>"
        f"<span>{escaped(claim['head'])}. {escaped(claim['claim'])}.</span></li>"
        for claim in claims
    ]
    return f"<ul class=claims>{''.join(items)}</ul>"


def embedded(path: Path, caption: str) -> str:
    """A figure as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure><img alt="{escaped(caption)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escaped(caption)}</figcaption></figure>"
    )


def _ablation(rows: Result) -> str:
    counts = [count for count in (10, 20, 50, 100, 400) if count in rows["paper"]["samples"]]
    head = "".join(f"<th>{count}</th>" for count in counts)
    lines = [f"<tr><th>setting</th><th></th>{head}<th>success</th><th>NLL</th></tr>"]
    for name, row in rows.items():
        at = [row["samples"].index(count) for count in counts]
        rmse = np.mean(np.array(row["rmse"], float), axis=0)
        success = np.mean(row["success"], axis=0)[row["samples"].index(50)]
        nll = "" if row["nll"][0][0] is None else number(np.mean(np.array(row["nll"], float)[:, -1]))
        figures = "".join(f"<td>{number(rmse[i])}</td>" for i in at)
        label = name if row["what"] else name.replace("retrain", "retraining").replace("readout", "readout only,")
        lines.append(
            f"<tr{' class=ours' if name in HEADS else ''}><td>{escaped(label)}</td>"
            f"<td class=what>{escaped(row['what'])}</td>{figures}<td>{100 * success:.0f} %</td><td>{nll}</td></tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def _variances(runs: list[Result]) -> str:
    lines = ["<tr><th>head</th><th>Σ_data</th><th>predicted</th><th>of it the model's own</th></tr>"]
    lines += [
        f"<tr><td>{escaped(run['row'])}</td><td>{run['sigma']:g}</td><td>{run['settled_total']:.3g}</td>"
        f"<td>{run['settled_epistemic']:.3g}</td></tr>"
        for run in runs
    ]
    return f"<table>{''.join(lines)}</table>"


def _plants(tuning: Result) -> str:
    names = (*HEADS, "tuned")
    lines = [
        "<tr><th>cart, pole (kg), length (m)</th>"
        + "".join(f"<th>log lik., {escaped(name)}</th>" for name in names)
        + "".join(f"<th>RMSE (N), {escaped(name)}</th>" for name in names)
        + "<th>tuned in</th></tr>"
    ]
    for run in tuning["runs"]:
        plant = run["plant"]
        lines.append(
            f"<tr><td>{plant['cart_mass']:.2f}, {plant['pole_mass']:.2f}, {plant['length']:.2f}</td>"
            + "".join(f"<td>{run[name]['log_likelihood']:.2f}</td>" for name in names)
            + "".join(f"<td>{run[name]['rmse_50']:.2f}</td>" for name in names)
            + f"<td>{run['seconds']:.1f} s</td></tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def number(value: float) -> str:
    """With as many digits as matter."""
    return f"{value:.2f}" if abs(value) < 100.0 else f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}"


def escaped(value: object) -> str:
    """As text of the page."""
    return markup.escape(str(value))
