"""Estimates of Llama and MoE models, against what torch counts in the modules of Hugging Face's transformers.

The modules are transformers' own, in bf16, and as they are: no compilation, no recomputation. Tensors of real sizes are torch's fake
tensors, which have shapes and no contents. *Parameters* are counted by `numel`. *FLOPs* are torch's FlopCounterMode over forward and
backward; attention is the eager one, because the counter adds the scores that a fused kernel computes again in its backward, and no
schedule has a say in that. *Activations* are all that autograd saves between forward and backward, each storage once, without
parameters; attention is torch's fused kernel (SDPA). *Traffic* is what kernels other than matrix products and attention read and write.
"""

import importlib
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

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
COUNTING = GpuSpec("counting", 2**50, 1e12, 1e16, 1.0, Link(0, 1e12), Link(0, 1e12))

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
    """FLOPs of F, and of I and W together."""
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def storage(tensor):
    return tensor.untyped_storage()._cdata


def count_activations(model, ids):
    """Bytes that autograd saves for the backward pass, each storage once, without parameters."""
    parameters = {storage(parameter) for parameter in model.parameters()}
    saved = {}

    def keep(tensor):
        if storage(tensor) not in parameters:
            saved[storage(tensor)] = tensor  # which keeps it alive, so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_that_of_transformers(transformers, name):
    family, values = PUBLISHED[name]
    with FakeTensorMode():
        model = make(transformers, family, values)
        counted = sum(parameter.numel() for parameter in model.parameters())
    # The estimate leaves out biases of queries, keys and values and the gate of the shared expert (Qwen1.5), and norms of heads (Qwen3).
    tolerance = 3e-4 if name.startswith("qwen") else 0
    assert MODELS[name].num_parameters == pytest.approx(counted, rel=tolerance, abs=0)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_a_step_of_llama_3_has_the_flops_that_torch_counts(transformers, name):
    family, values = PUBLISHED[name]
    stages = estimate(MODELS[name], COUNTING, 1).stages
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make(transformers, family, values)
        forward, backward = count_flops(model, torch.zeros(1, 8192, dtype=torch.long))
    assert stages[0].forward_us * 1e6 == pytest.approx(forward, rel=0.001)
    assert (stages[0].input_us + stages[0].weight_us) * 1e6 == pytest.approx(backward, rel=0.001)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_a_micro_batch_of_llama_3_keeps_the_activations_that_autograd_saves(transformers, name):
    family, values = PUBLISHED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make(transformers, family, values, "sdpa_without_mask")
        counted = count_activations(model, torch.zeros(1, 8192, dtype=torch.long))
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
    family, values = PUBLISHED[name]
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


# Small enough to compute for real: which expert gets which token is decided by the data.
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
SMALL_SPEC = ModelSpec("small", 2, 256, 8, 512, 1000, family="llama", kv_heads=2, ffn=896, experts=8, top_k=2)
SMALL_MODELS = {
    "mixtral": ("Mixtral", SMALL | {"intermediate_size": 896}, SMALL_SPEC),
}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_experts_compute_and_keep_what_torch_counts(transformers, name):
    family, values, spec = SMALL_MODELS[name]
    ids = torch.randint(1000, (1, 512), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    model = make(transformers, family, values, "sdpa")
    stage = estimate(spec, COUNTING, 1).stages[0]
    print(stage.activation_bytes, count_activations(model, ids))
    print(estimate(spec, COUNTING, 1).stages[0])
    model = make(transformers, family, values, "eager")
    print(count_flops(model, ids))
    assert 0
