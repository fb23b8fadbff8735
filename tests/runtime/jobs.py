"""A small job whose parts processes can import: data made from its address, stages, loss, optimizer."""

import torch
from torch import nn

import recycle
from recycle.runtime.compute.seeds import seed_of

# Sums inside an op depend on how many threads share it; workers have one each.
torch.set_num_threads(1)
WIDTH, BATCH = 16, 2
# A killed process is known at once, by its connection; one that lives may be late on a busy machine, and must not be fenced.
LEASE_S = 15.0


def greedy_plan(shape, fail="", techniques="adaptive,decoupled,staggered", **options):
    """A plan of the greedy method with a short search, with unequal costs; `options` are those of `recycle.problem`."""
    problem = recycle.problem(*shape, fail=fail, techniques=techniques, **{"costs": (10, 13, 9), **options})
    return recycle.solve(problem, "greedy", effort=20_000)


class Numbers:
    """Micro-batches made from their address: regression data that any worker can make."""

    def get(self, step, pipeline, index):
        generator = torch.Generator().manual_seed(seed_of("data", step, pipeline, index))
        given = torch.randn(BATCH, 5, WIDTH, generator=generator)
        return given, given.roll(1, -1).tanh()


class Fails(Numbers):
    """Data that one worker cannot load in the second step."""

    def get(self, step, pipeline, index):
        if (step, pipeline, index) == (1, 1, 2):
            raise RuntimeError("the disk is gone")
        return super().get(step, pipeline, index)


class Explodes(Numbers):
    """Data whose gradients are infinite in one step."""

    def __init__(self, at):
        self.at = at

    def get(self, step, pipeline, index):
        given, targets = super().get(step, pipeline, index)
        return given, targets * (float("inf") if step == self.at and (pipeline, index) == (1, 1) else 1.0)


def make_stages(num_stages, dropout=0.0):
    torch.manual_seed(11)
    layer = {"dropout": dropout, "batch_first": True, "norm_first": True}
    return [
        nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, **layer), nn.Linear(WIDTH, WIDTH))
        for _ in range(num_stages)
    ]


def small_stages(num_stages):
    """Stages of a few layers, for runs of many processes or steps: a transformer's layer takes three times as long."""
    torch.manual_seed(11)
    return [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(num_stages)
    ]


def reduced_bytes(module, number_bytes):
    """What peers reduce: marks, and the parameters, each from a multiple of 256 bytes on."""
    return 256 + sum(-(-parameter.numel() * number_bytes // 256) * 256 for parameter in module.parameters())


class Bounded(Numbers):
    """Targets with which `scaled_loss` has infinite gradients in the first step."""

    def get(self, step, pipeline, index):
        given, _ = super().get(step, pipeline, index)
        return given, torch.full_like(given, 1e38 if step == 0 else 1e-3)


class Refuses(nn.Module):
    """A module that does not take what is not finite, as many do."""

    def forward(self, x):
        if not bool(torch.isfinite(x).all()):
            raise RuntimeError("this is not finite")
        return x


def scaled_loss(made, scales):
    return (made * scales).mean() * 1e3


def careful_stages(num_stages):
    return [nn.Sequential(stage, Refuses()) for stage in make_stages(num_stages)]


def tied_stages(num_stages):
    return tie(make_stages(num_stages))


def tie(stages):
    """Have the first and the last stage share a matrix, as embedding and head of GPT-2 do."""
    stages[-1][-1].weight = stages[0][-1].weight
    return stages


def loss(made, targets):
    return nn.functional.mse_loss(made, targets)


def adamw(parameters):
    # The gradient of an attention's key bias is zero but for rounding; a small eps would make steps of full size from that.
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
