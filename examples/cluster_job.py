"""The job of language_model.py for several machines: each has this file.

recycle coordinator examples/cluster_job.py --listen 10.0.0.1:29400 --token-file token --out runs/llama   # on one machine
recycle agent 10.0.0.1:29400 examples/cluster_job.py --token-file token --workers 2                      # on each machine
recycle train examples/cluster_job.py --kill W1_1@5                                                      # all on this one
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recycle
from recycle.models.text import Text


def job():
    torch.manual_seed(0)  # all machines start from the same weights
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))
    data = [{"input_ids": ids, "labels": ids} for ids, _ in map(Text(64).__getitem__, range(2048))]
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    return recycle.Job(recycle.Shape(2, 2, 4), recycle.cut(model, stages=2), data, None, optimizer, steps=30, samples=4)
