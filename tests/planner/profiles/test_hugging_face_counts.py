"""Estimates of Llama and MoE models, against what torch counts in the modules of Hugging Face's transformers.

The modules are transformers' own, in bf16, and as they are: no compilation, no recomputation. Tensors of real sizes are torch's
fake tensors, which have shapes and no contents. *Parameters* are counted by `numel`. *FLOPs* are those of torch's
FlopCounterMode, forward and backward; attention is the eager one, because of a fused kernel the counter also counts the scores
that it computes again in its backward, which an estimate has in its efficiency. *Activations* are all that autograd saves
between forward and backward, each storage once, without parameters; attention is torch's fused kernel (SDPA). *Traffic* is what
kernels read and write that are neither matrix products nor attention.
"""

import importlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recycle.core.profile import Link
from recycle.planner.profiles.catalog import MODELS, GpuSpec, ModelSpec
from recycle.planner.profiles.estimate import estimate
from recycle.planner.profiles.token_costs import token_costs

pytestmark = pytest.mark.timeout(240)
# 1e12 FLOP/s at efficiency 1 make 1e6 FLOPs a microsecond, and memory is so fast that nothing else takes time.
COUNTING = GpuSpec("counting", 2**49, 1e12, 1e16, 1.0, Link(0, 1e12), Link(0, 1e12))

# The published config.json files, in transformers' words: what is given here is compared with the catalog of `recycle estimate`.
LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
PUBLISHED = {
    "llama-2-7b": ("Llama", {"num_hidden_layers": 32, "max_position_embeddings": 4096}),
    "llama-3-8b": (
        "Llama",
        LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "llama-3-70b": (
        "Llama",
        LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "llama-3.1-405b": (
        "Llama",
        LLAMA_3 | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    ),
    "llama-3.2-1b": (
        "Llama",
        LLAMA_3
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"tie_word_embeddings": True},
    ),
    "mistral-7b": ("Mistral", {}),  # transformers' defaults are Mistral-7B-v0.1
    "mixtral-8x7b": ("Mixtral", {}),  # Mixtral-8x7B-v0.1
    "qwen1.5-moe-a2.7b": ("Qwen2Moe", {}),  # Qwen1.5-MoE-A2.7B
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
}


@pytest.fixture(scope="module")
def transformers():
    """Loaded by the test process that runs these tests alone, because that takes seconds."""
    library = importlib.import_module("transformers")
    sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
    # The same function as "sdpa" under a name for which no mask is made: a fake tensor cannot be asked whether a mask is needed.
    library.AttentionInterface.register("sdpa_without_mask", sdpa.sdpa_attention_forward)
    return library


@contextmanager
def bf16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make(transformers, family, values, attention="eager"):
    """A model of transformers as it is trained in bf16."""
    config = getattr(transformers, f"{family}Config")(**values, use_cache=False)
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    with bf16():
        return getattr(transformers, f"{family}ForCausalLM")(config)


def count_flops(model, ids):
    """An array with the FLOPs of F, and of I and W together."""
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return np.array([forward.get_total_flops(), backward.get_total_flops()])


def storage(tensor):
    return tensor.untyped_storage()._cdata


def count_activations(model, ids):
    return count_saved(model, lambda: model(input_ids=ids, labels=ids))


def count_saved(model, forward):
    """Bytes that autograd saves for the backward pass, each storage once, without parameters."""
    parameters = {storage(parameter) for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        if storage(tensor) not in parameters:
            saved[storage(tensor)] = tensor  # which keeps it alive, so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_that_of_transformers(transformers, name):
    family, values = PUBLISHED[name]
    with FakeTensorMode():
        model = make(transformers, family, values)
        counted = sum(parameter.numel() for parameter in model.parameters())
    # The estimate leaves out the biases and the gate of the shared expert of Qwen1.5, and the norms of heads of Qwen3.
    tolerance = 3e-4 if name.startswith("qwen") else 0
    assert MODELS[name].num_parameters == pytest.approx(counted, rel=tolerance, abs=0)


def count_whole(transformers, name, attention, count):
    """What `count` counts in the whole model, from models with one and with two of its equal layers."""
    family, values = PUBLISHED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, 8192, dtype=torch.long)
        models = (make(transformers, family, values | {"num_hidden_layers": number}, attention) for number in (1, 2))
        one, two = (count(model, ids) for model in models)
    return one + (values["num_hidden_layers"] - 1) * (two - one)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_a_micro_batch_of_llama_3_has_the_flops_that_torch_counts(transformers, name):
    forward, backward = count_whole(transformers, name, "eager", count_flops)
    (stage,) = estimate(MODELS[name], COUNTING, 1).stages
    assert stage.forward_us * 1e6 == pytest.approx(forward, rel=0.001)
    assert (stage.input_us + stage.weight_us) * 1e6 == pytest.approx(backward, rel=0.001)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_a_micro_batch_of_llama_3_keeps_the_activations_that_autograd_saves(transformers, name):
    counted = count_whole(transformers, name, "sdpa_without_mask", count_activations)
    assert estimate(MODELS[name], COUNTING, 1).stages[0].activation_bytes == pytest.approx(counted, rel=0.001)


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels read and write, matrix products and attention aside."""

    def __init__(self):
        super().__init__()
        self.by_kernel = Counter()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result = kernel(*args, **(kwargs or {}))
        read, written = (
            [leaf for leaf in tree_leaves(some) if isinstance(leaf, torch.Tensor)] for some in ((args, kwargs), result)
        )
        name = kernel.overloadpacket.__name__
        is_view = not name.endswith("_") and {storage(tensor) for tensor in written} <= {storage(tensor) for tensor in read}
        if not (is_view or "mm" in name or "attention" in name or "empty" in name):
            self.by_kernel[name] += sum(tensor.numel() * tensor.element_size() for tensor in read + written)
        return result


def test_element_wise_kernels_of_a_llama_layer_have_the_traffic_that_torch_counts(transformers):
    from transformers.models.llama import modeling_llama

    name, tokens = "llama-3-8b", 1024
    _, values = PUBLISHED[name]
    config = transformers.LlamaConfig(**values)
    config._attn_implementation = "sdpa"
    with FakeTensorMode(), bf16():
        layer = modeling_llama.LlamaDecoderLayer(config, 0)
        given = torch.empty(1, tokens, config.hidden_size, requires_grad=True)
        angles = torch.empty(1, tokens, 128), torch.empty(1, tokens, 128)
        with Traffic() as forward:
            made = layer(given, position_embeddings=angles)
        gradient = torch.empty_like(made)
        with Traffic() as backward:
            made.backward(gradient)
    expected = token_costs(MODELS[name], 1).traffic
    values = tokens * config.hidden_size
    (f, i, w) = expected.values()
    assert f == pytest.approx(forward.by_kernel.total() / values, rel=0.01)
    assert i + w == pytest.approx(backward.by_kernel.total() / values, rel=0.01)


# Small enough to compute for real: which expert gets which token depends on the data.
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
SMALL_MODELS = {
    "mixtral": ("Mixtral", {"intermediate_size": 224, "num_local_experts": 8, "num_experts_per_tok": 2}, (224, 8, 2, 0)),
    "shared experts": (
        "Qwen2Moe",
        {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 64},
        (32, 6, 3, 2),
    ),
}


def small_spec(ffn, experts, top_k, shared_experts):
    shape = {"ffn": ffn, "experts": experts, "top_k": top_k, "shared_experts": shared_experts}
    return ModelSpec("small", 2, 64, 4, 128, 100, family="llama", kv_heads=2, **shape)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_token_costs_the_flops_of_the_experts_that_compute_it(transformers, name):
    family, values, shape = SMALL_MODELS[name]
    model = make(transformers, family, SMALL | values).float()  # bf16 is slow on processors, and FLOPs are the same
    forward, backward = count_flops(model, torch.arange(128)[None] % 100)
    slow = replace(COUNTING, flops=1e9)
    (stage,) = estimate(small_spec(*shape), slow, 1).stages
    assert stage.forward_us * 1e3 == pytest.approx(forward, rel=0.003)
    assert (stage.input_us + stage.weight_us) * 1e3 == pytest.approx(backward, rel=0.003)


def test_experts_keep_the_activations_that_autograd_saves(transformers):
    from transformers.models.mixtral import modeling_mixtral

    (hidden, ffn), tokens = (128, 448), 128
    config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=ffn, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    with bf16():
        block = modeling_mixtral.MixtralSparseMoeBlock(config)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
        given = torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(2), requires_grad=True)
    counted = count_saved(block, lambda: block(given))
    dense = ModelSpec("dense", 2, hidden, 8, tokens, 100, family="llama", kv_heads=2, ffn=ffn)
    with_experts, without = (token_costs(model, 1) for model in (replace(dense, experts=8, top_k=2), dense))
    # Beyond a dense layer: one more feed-forward, and what each expert gets and gives.
    extra = (with_experts.between - without.between + with_experts.inside - without.inside) * hidden
    assert tokens * (extra + 2 * hidden + 8 * ffn) == pytest.approx(counted, rel=0.02)
