"""Train a Hugging Face model on a Hugging Face dataset, with a tokenizer that is made on the spot: nothing is downloaded."""

from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import recycle

texts = "\n\n".join(topics.values()).split("\n\n")  # any texts: these are of Python's help
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, vocab_size=1000, special_tokens=["<end>"], show_progress=False)
bpe.save("tokenizer.json")
tokenizer = PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", eos_token="<end>")  # or AutoTokenizer.from_pretrained(...)
rows = Dataset.from_dict({"text": texts}).map(lambda row: tokenizer(row["text"] + "<end>"), remove_columns="text")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))
# Texts lie one behind the other, in samples of 64 tokens; the model keeps them apart.
stages, data = recycle.cut(model, stages=2), recycle.pack(rows, 64)
trained = recycle.train((2, 2, 4), stages, data, None, torch.optim.AdamW, steps=30, samples=4, out="runs/text-{number}")
recycle.load(stages, trained.out)
model.save_pretrained("text-model")
tokenizer.save_pretrained("text-model")
print(f"loss {trained.losses[0]:.3f} at first, {trained.losses[-1]:.3f} at last; model and tokenizer are in text-model")
