"""Pre-train the token study's encoder-decoder on the old rule and write the bundle "tokens". For maintainers.

    python tools/pretrain_tokens.py kbt_edge/bundles/tokens

The folder must be new. Takes some minutes, and ends with the settings of kbt_edge/studies/tokens.py, chosen again for
this network. One seed gives one network on one machine with one version of torch.

One fifth of the decoder's inputs are random letters. A decoder that has only seen answers of the old rule relies on
them, and they are gone once the rule has changed: trained without, retraining the readout on 500 sequences of a new
rule got 87 % of the tokens right, with it 99.8 % (three rules, Adam with 1000 steps at 0.03).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from training import add_options, fit

from kbt_edge.export import export_trunk
from kbt_edge.model import Model
from kbt_edge.networks import TokenTransformer
from kbt_edge.studies.tokens import (
    FIRST,
    MAX_LEN,
    OLD,
    PAD,
    VOCABULARY,
    Adam,
    one_layer,
    padded,
    prequential,
    sample_pairs,
    two_layers,
    unseen_accuracy,
)
from kbt_edge.trunk import Trunk

WIDTH = 24
CORRUPTED = 0.2  # share of the decoder's inputs that are random letters
WORST_ACCURACY = 0.999
EVALUATION_SEED = 1_000_003  # different from every training seed
CHOICE_SEEDS = range(3)

PRIORS = (0.1, 0.3, 1.0, 3.0, 10.0)  # labels have no noise: beyond 10 next to nothing is gained
TWO_LAYER_PRIORS = tuple((first, last) for first in (1e-4, 1e-3, 1e-2) for last in (1.0, 3.0, 10.0))
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)

Setting = TypeVar("Setting")


def pretrain(seed: int, steps: int, learning_rate: float, batch: int) -> TokenTransformer:
    """On fresh words in every step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = TokenTransformer(VOCABULARY, WIDTH, max_len=MAX_LEN, pad=PAD)

    def loss() -> torch.Tensor:
        sources, inputs, targets = padded(sample_pairs(rng, batch, OLD))
        corrupted = rng.random(inputs.shape) < CORRUPTED
        corrupted[:, 0] = False  # the start token
        inputs = np.where(corrupted, rng.integers(FIRST, VOCABULARY, inputs.shape), inputs)
        logits = model(torch.from_numpy(sources), torch.from_numpy(inputs))
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=PAD
        )

    fit(model, loss, steps, learning_rate, warm_up=0.1)
    return model.eval()


def token_accuracy(model: TokenTransformer) -> float:
    """On unseen words of the old rule, given the right tokens before."""
    sources, inputs, targets = padded(sample_pairs(np.random.default_rng(EVALUATION_SEED), 2000, OLD))
    with torch.no_grad():
        answers = model(torch.from_numpy(sources), torch.from_numpy(inputs)).argmax(-1).numpy()
    return float((answers == targets)[targets != PAD].mean())


def choose(title: str, candidates: Sequence[Setting], score: Callable[[Setting], float]) -> Setting:
    """The candidate with the largest score, with all of them printed."""
    scores = {candidate: score(candidate) for candidate in candidates}
    best = max(candidates, key=scores.__getitem__)
    print(f"  {title} {best}, of", ", ".join(f"{candidate}: {value:.4f}" for candidate, value in scores.items()))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the new bundle")
    add_options(parser, seed=0, steps=2000, learning_rate=3e-3, batch=64)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists already")

    torch.set_num_threads(1)  # the network is small, and one thread always sums in one order
    started = time.perf_counter()
    network = pretrain(args.seed, args.steps, args.learning_rate, args.batch)
    accuracy = token_accuracy(network)
    print(f"trained in {time.perf_counter() - started:.0f} s: {100 * accuracy:.2f} % of the old rule's tokens")
    if accuracy < WORST_ACCURACY:
        print("not good enough: nothing written", file=sys.stderr)
        return 1

    weights = np.column_stack([network.readout.weight.detach().numpy(), network.readout.bias.detach().numpy()])
    with tempfile.TemporaryDirectory() as folder:
        example = torch.full((MAX_LEN,), FIRST)
        report = export_trunk(network.trunk, (example, example), Path(folder) / "trunk.onnx")
        data = report.path.read_bytes()
    print(f"exported {report.nbytes} bytes, within {report.max_abs_diff:.1e} of torch")
    trunk = Trunk(data)

    print("by the prequential log likelihood of a sequence:")
    prior = choose("prior_var", PRIORS, lambda v: prequential(trunk, lambda: one_layer(weights, v), CHOICE_SEEDS))
    made = {
        "by": "tools/pretrain_tokens.py",
        "trained": f"{args.steps} steps of {args.batch} words, seed {args.seed}, torch {torch.__version__}",
        "accuracy": f"{100 * accuracy:.2f} % of the old rule's tokens",
        "prior_var": "by the prequential log likelihood, on streams of new rules that the study does not use",
    }
    Model(data, one_layer(weights, prior), made=made).save(args.out)
    print(f"wrote {args.out}")
    choose(
        "prior_var of two layers",
        TWO_LAYER_PRIORS,
        lambda v: prequential(trunk, lambda: two_layers(weights, v), CHOICE_SEEDS),
    )

    def choose_rate(memory: int | None, every: int | None, steps: int) -> None:
        def accuracy(rate: float) -> float:
            start = one_layer(weights, prior)
            return unseen_accuracy(trunk, lambda: Adam(trunk, start, memory, every, steps, rate), CHOICE_SEEDS)

        choose(f"learning rate of Adam, memory {memory or 'all'}", RATES, accuracy)

    print("by the share of right tokens on unseen words:")
    choose_rate(memory=1, every=1, steps=10)
    choose_rate(memory=20, every=10, steps=100)
    choose_rate(memory=100, every=10, steps=100)
    choose_rate(memory=None, every=None, steps=1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
