"""Pre-train the cart-pole's DecisionTransformer on the LQR of the old plant (method.md §7). For maintainers.

    python tools/pretrain_cartpole.py kbt_edge/studies/cartpole.npz --bundle kbt_edge/bundles/cartpole

Writes the network's weights, which the baselines retrain, and with --bundle the bundle that the package ships, and
prints its scores. If they are too low, it writes nothing and exits with an error. Takes about a minute. One seed
gives one network on one machine with one version of torch.

Pre-training covers twice the box in which the policy works: a linear readout of h fitted to 50 samples then loses 0.4
to 0.8 % of each state, where pre-training over the box itself lost 0.9 to 2.2 %, as LayerNorm and ReLU bend h within
it. The seed was the best of 0 to 5 over the box itself, by ``state_misfit``. docs/study.md says what else was tried.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from training import add_options, fit

from kbt_edge.export import export
from kbt_edge.networks import DecisionTransformer
from kbt_edge.studies.baselines import hidden, network_policy, scaled_forces, scaled_states
from kbt_edge.studies.cartpole import (
    FORCE_SCALE,
    NEW,
    OLD,
    STATE_BOX,
    force_rmse,
    lqr_gain,
    lqr_policy,
    rollout,
    sample_starts,
    sample_states,
)

WORST_RMSE = 0.01  # of the deviation of the old LQR's force
PRETRAINING_BOX = 2.0 * STATE_BOX  # see the top of this file
EVALUATION_SEED = 1_000_003  # different from every training seed


def pretrain(seed: int, steps: int, learning_rate: float, batch: int) -> DecisionTransformer:
    """On fresh pairs in every step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    gain = lqr_gain(OLD)
    model = DecisionTransformer()

    def loss() -> torch.Tensor:
        states = rng.uniform(-PRETRAINING_BOX, PRETRAINING_BOX, (batch, 4))
        return torch.nn.functional.mse_loss(model(scaled_states(states)), scaled_forces(lqr_policy(gain)(states)))

    fit(model, loss, steps, learning_rate, warm_up=0.05)
    return model


def state_misfit(model: DecisionTransformer, rng: np.random.Generator) -> np.ndarray:
    """How much of each state is lost to a linear readout of h, as a share of its deviation.

    It bounds what any new linear law costs the head, and can be known before the plant has changed.
    """
    fit, test = sample_states(rng, 4000) / STATE_BOX, sample_states(rng, 4000) / STATE_BOX
    features = [np.column_stack([hidden(model, s * STATE_BOX), np.ones(len(s))]) for s in (fit, test)]
    weights = np.linalg.lstsq(features[0], fit, rcond=None)[0]
    return np.asarray((features[1] @ weights - test).std(axis=0) / test.std(axis=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file for the weights (.npz)")
    parser.add_argument("--bundle", type=Path, help="folder for the bundle: the network's trunk and a Bayesian head")
    add_options(parser, seed=1, steps=6000, learning_rate=1e-3, batch=256)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the network is small, and one thread always sums in one order
    started = time.perf_counter()
    model = pretrain(args.seed, args.steps, args.learning_rate, args.batch).eval()
    seconds = time.perf_counter() - started

    rng = np.random.default_rng(EVALUATION_SEED)
    gain = lqr_gain(OLD)
    states, starts = sample_states(rng, 10_000), sample_starts(rng, 1000)
    policy = network_policy(model)
    rmse = force_rmse(policy, gain, states)
    share = rmse / float(lqr_policy(gain)(states).std())
    on_old = rollout(OLD, policy, starts).success_rate
    on_new = rollout(NEW, policy, starts).success_rate
    print(f"trained in {seconds:.0f} s; seed {args.seed}, {args.steps} steps of {args.batch} pairs")
    print(f"force RMSE {rmse:.3f} N, {100 * share:.2f} % of the old LQR's deviation")
    print(f"stabilises {100 * on_old:.1f} % of 1000 starts on the old plant, {100 * on_new:.1f} % on the new one")
    lost = ", ".join(f"{100 * share:.2f} %" for share in state_misfit(model, rng))
    print(f"lost of x, v, θ, ω to a linear readout of h: {lost}")
    if share > WORST_RMSE or on_old < 1.0:
        print("not good enough: nothing written", file=sys.stderr)
        return 1
    with args.out.open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in model.state_dict().items()})
    print(f"wrote {args.out}")
    if args.bundle:
        write_bundle(model, args.bundle, f"tools/pretrain_cartpole.py --seed {args.seed} --steps {args.steps}")
        print(f"wrote {args.bundle}")
    return 0


def write_bundle(model: DecisionTransformer, path: Path, made: str) -> None:
    """The trunk and a head with the default settings."""
    export(
        model.trunk,
        model.readout,
        (torch.zeros(1, 4),),
        path,
        input_names=("state",),
        input_scale=STATE_BOX,
        output_scale=FORCE_SCALE,
        made={"by": made},
    )


if __name__ == "__main__":
    sys.exit(main())
