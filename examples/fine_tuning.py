"""Train a Hugging Face model further, from a folder that `save_pretrained` wrote: python examples/fine_tuning.py llama tuned."""

import sys
from functools import partial

import torch
from transformers import AutoModelForCausalLM

import recycle
from recycle.models.text import Text

source, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # on GPUs, compute in bfloat16 by autocast below
for parameter in model.get_input_embeddings().parameters():
    parameter.requires_grad_(False)  # frozen parameters have no gradient and no optimizer state
data = [{"input_ids": ids, "labels": ids} for ids, _ in map(Text(64).__getitem__, range(2048, 4096))]
stages = recycle.cut(model, stages=2)
options = recycle.TrainOptions(autocast=None, max_norm=1.0, schedule=lambda iteration: 0.95**iteration)
optimizer = partial(torch.optim.AdamW, lr=1e-3)
trained = recycle.train((2, 2, 4), stages, data, None, optimizer, steps=10, samples=4, out="runs/tuned-{number}", options=options)
recycle.load(stages, trained.out)
model.save_pretrained(target)
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; the model is in {target}")
