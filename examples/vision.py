"""Train a convolutional network, and a learning-rate schedule with it: in which of nine fields of an image is the bright spot?"""

from functools import partial

import torch
from torch import nn

import recycle


def image(number):
    pixels, field = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(number)), number % 9
    pixels[:, 8 * (field // 3) :, 8 * (field % 3) :][:, :8, :8] += 0.7
    return pixels, field


def block(given, made):  # no BatchNorm: its averages would depend on which worker saw which images
    return [nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(4, made), nn.ReLU(), nn.MaxPool2d(2)]


torch.manual_seed(0)
model = nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 32), nn.Flatten(), nn.Linear(32 * 9, 9))
images, optimizer = [image(number) for number in range(2048)], partial(torch.optim.AdamW, lr=3e-3)
options = recycle.TrainOptions(schedule=lambda step: 0.97**step, evaluation=recycle.EvaluationOptions(images[:128], every=20))
trained = recycle.train((2, 2, 4), model, images, nn.CrossEntropyLoss(), optimizer, steps=40, samples=8, options=options)
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; recorded in {trained.out}")
