"""Tiny models of `transformers` and texts for them, which processes can import."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY, TOKENS, NUM_LAYERS = 48, 12, 3
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * TOKENS,
    **NO_ENDS,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 2 * TOKENS, "n_embd": 16, "n_head": 2, "n_layer": NUM_LAYERS, **NO_ENDS}
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=5)),
    "gpt2 with dropout": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}


def make_model(name):
    torch.manual_seed(0)
    return MODELS[name]()


class Sentences:
    """Token ids with a mask: some are padded, and padding has no label. A sample depends on its number only."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        ids = (torch.arange(TOKENS) * (number % 5 + 1) + torch.randint(VOCABULARY, (), generator=generator)) % VOCABULARY
        mask = (torch.arange(TOKENS) < TOKENS - number % 3).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


class Lines(Sentences):
    """Token ids alone, as pairs."""

    def __getitem__(self, number):
        ids = super().__getitem__(number)["input_ids"]
        return ids, ids
