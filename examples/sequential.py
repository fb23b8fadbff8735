"""Train an nn.Sequential with 2 pipelines of 3 stages, with and without a dead worker: the weights are equal bit for bit.

    python examples/sequential.py
    recycle train examples/sequential.py --kill W1_1@5       # as a job file, which other machines can train, too

The model is a small convolutional classifier; its data are pictures of bars in four directions under noise, made from a seed.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import recycle
from recycle.core.events.record import Event, Stepped
from recycle.runtime.coordinator.ledger.run_ledger import Trained

SIDE, NUM_CLASSES = 12, 4
DEAD = "W1_1"


class Bars(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures of horizontal, vertical and diagonal bars; a sample depends on its number only."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a picture [1, SIDE, SIDE] and its direction."""
        generator = torch.Generator().manual_seed(number)
        across = torch.arange(SIDE).expand(SIDE, SIDE)
        down = across.t()
        direction = number % NUM_CLASSES
        along = (down, across, down + across, down - across)[direction]
        shift = int(torch.randint(4, (), generator=generator))
        picture = ((along + shift) % 4 < 2) + 0.5 * torch.randn(SIDE, SIDE, generator=generator)
        return picture[None], torch.tensor(direction)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),  # a BatchNorm would depend on which worker ran which micro-batch, and is refused
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, NUM_CLASSES),
    )


def job() -> recycle.Job:
    """The job of this file, for `recycle train`, `recycle coordinator` and `recycle agent`."""
    optimizer, options = partial(torch.optim.AdamW, lr=2e-3), recycle.TrainOptions(is_exact=True)
    stages, shape = recycle.cut(make_model(), [3, 7]), recycle.Shape(2, 3, 4)
    return recycle.Job(shape, stages, Bars(), nn.functional.cross_entropy, optimizer, steps=30, samples=8, options=options)


def show(event: Event) -> None:
    """Print every fifth step."""
    match event:
        case Stepped(iteration=iteration, loss=float(loss)) if iteration % 5 == 0:
            print(f"  step {iteration + 1:3}  loss {loss:.4f}")


def train(dead: str, steps: int, out: Path | None = None) -> Trained:
    """Train the classifier while the workers in `dead` ("W1_1", or "" for none) are dead from the start."""
    plan = recycle.solve(recycle.problem(2, 3, 4, fail=dead, costs=(1, 1, 1)))
    return recycle.train(
        plan,
        recycle.cut(make_model(), [3, 7]),
        Bars(),
        nn.functional.cross_entropy,
        partial(torch.optim.AdamW, lr=2e-3),
        steps=steps,
        samples=8,
        out=out,
        options=recycle.TrainOptions(is_exact=True),
        watch=show,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train an nn.Sequential, first with a dead worker, then with nobody dead.")
    parser.add_argument("--steps", type=int, default=30, help="how many steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="record the run with the dead worker there, with checkpoints")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}, but it must be at least 1")
    weights = {}
    for dead in (DEAD, ""):
        print(f"{dead or 'nobody'} is dead")
        try:
            trained = train(dead, given.steps, given.out if dead else None)
        except recycle.UserError as problem:
            parser.error(str(problem))
        weights[dead] = trained.weights_sha256
        print(f"  loss {trained.losses[0]:.4f} at first, {trained.losses[-1]:.4f} at last; weights sha256 {weights[dead]}")
    is_same = weights[DEAD] == weights[""]
    print("the weights are the same, bit for bit" if is_same else "the weights differ")
    return 0 if is_same else 1


if __name__ == "__main__":  # the recycle command and the agents import this file for its function job
    raise SystemExit(main())
