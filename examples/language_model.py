"""Train a Hugging Face model on this machine, with four worker processes: kill one of them, and the others go on."""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recycle
from recycle.models.text import Text

CONTEXT, STEPS = 64, 30
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))
# Any map-style dataset; labels are the ids themselves, because the model's own loss (None below) shifts them.
data = [{"input_ids": ids, "labels": ids} for ids, _ in map(Text(CONTEXT).__getitem__, range(2048))]
stages = recycle.cut(model, stages=2)
optimizer = partial(torch.optim.AdamW, lr=3e-3)
# 2 pipelines of 2 stages, each with 4 micro-batches of 4 samples
trained = recycle.train((2, 2, 4), stages, data, None, optimizer, steps=STEPS, samples=4, out="runs/llama-{number}")
recycle.load(stages, trained.out)
model.save_pretrained("llama")
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; the model is in llama")
