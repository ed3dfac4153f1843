"""What the tools that train networks share: options and the training loop."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch


def add_options(parser: argparse.ArgumentParser, seed: int, steps: int, learning_rate: float, batch: int) -> None:
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--batch", type=int, default=batch)


def fit(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], steps: int, learning_rate: float, warm_up: float
) -> None:
    """Adam on a fresh loss in every step, its rate raised over the share ``warm_up`` and then decayed to nothing."""
    optimiser = torch.optim.Adam(model.parameters(), learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps, pct_start=warm_up)
    for step in range(1, steps + 1):
        loss = loss_of()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        if sys.stderr.isatty() and step % 100 == 0:
            print(f"\r{step} of {steps} steps, loss {loss.item():.1e}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
