"""Train a model of one's own, whose stages pass on a dict of tensors: states with a gradient, and a mask without one."""

from functools import partial

import torch
from torch import nn

import recycle


class Block(nn.TransformerEncoderLayer):
    def forward(self, given):
        return {**given, "states": super().forward(given["states"], src_key_padding_mask=given["padding"])}


class Head(nn.Linear):
    def forward(self, given):
        return super().forward(given["states"].masked_fill(given["padding"][..., None], 0).sum(1))


def sample(number):  # vectors of different lengths, padded, and their sum
    states = torch.randn(12, 16, generator=torch.Generator().manual_seed(number))
    padding = torch.arange(12) >= 12 - number % 4
    return {"states": states, "padding": padding}, states[~padding].sum(0)


torch.manual_seed(0)
model = nn.Sequential(*[Block(16, 2, 64, dropout=0.1, batch_first=True) for _ in range(4)], Head(16, 16))
data, optimizer = [sample(number) for number in range(4096)], partial(torch.optim.AdamW, lr=3e-3)
trained = recycle.train((2, 2, 4), model, data, nn.functional.mse_loss, optimizer, steps=40, samples=8)
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; recorded in {trained.out}")
