"""Train a model of one's own, whose stages pass on a dict of tensors: states with a gradient, and a mask without one."""

from functools import partial

import torch
from torch import nn

import recycle

WIDTH, LENGTH = 16, 12


class Block(nn.TransformerEncoderLayer):
    def forward(self, given):
        return {**given, "states": super().forward(given["states"], src_key_padding_mask=given["padding"])}


class Sorted:
    """Vectors of different lengths, padded, and the sum of each; a sample depends on its number only."""

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        states = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(number))
        padding = torch.arange(LENGTH) >= LENGTH - number % 4
        return {"states": states, "padding": padding}, states[~padding].sum(0)


class Head(nn.Linear):
    def forward(self, given):
        return super().forward(given["states"].masked_fill(given["padding"][..., None], 0).sum(1))


torch.manual_seed(0)
model = nn.Sequential(*[Block(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(4)], Head(WIDTH, WIDTH))
optimizer = partial(torch.optim.AdamW, lr=3e-3)
trained = recycle.train((2, 2, 4), model, Sorted(), nn.functional.mse_loss, optimizer, steps=40, samples=8)
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; recorded in {trained.out}")
