"""TokenCosts: what one token costs in one layer, by the family of the model; `layer_work` makes seconds and bytes of it.

For the family gpt it is counted as in the papers of Megatron-LM, for the family llama as Hugging Face's modules compute in bf16,
kernel by kernel and without compilation; `tests/planner/profiles/test_hugging_face_counts.py` has torch count the latter.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recycle.core.op import Kind
from recycle.planner.profiles.catalog import ModelSpec

SPLIT = (Kind.F, Kind.I, Kind.W)

# Element-wise traffic of one layer of family gpt, in bytes for each of its h values (bf16), counted kernel by kernel. F: two
# norms (4 each), GeLU on 4h (16), two residual sums (6 each). I: two norms (6), GeLU (24), two sums of gradients (6). W: bias
# gradients read the output gradients of the four linear layers (18). Attention with flash runs inside its own kernel.
_GPT_TRAFFIC = {Kind.F: 36, Kind.I: 48, Kind.W: 18}
# The same of family llama. A norm computes in fp32, in seven kernels (36 forward, 88 backward); W has the gradient of its weight.
NORM_TRAFFIC = {Kind.F: 36, Kind.I: 88, Kind.W: 8}
# Two residual sums forward; backward two, and sums of what comes from query, key and value, and from gate and up.
_SUM_TRAFFIC = {Kind.F: 12, Kind.I: 30, Kind.W: 0}
_ROTARY_TRAFFIC = {Kind.F: 20, Kind.I: 32, Kind.W: 0}  # for each value of queries and keys
_GATE_TRAFFIC = {Kind.F: 10, Kind.I: 18, Kind.W: 0}  # SiLU and product, for each value of the feed-forward
# For each value that an expert gets: it is gathered, the expert's output is weighted and added to the others.
_EXPERT_TRAFFIC = {Kind.F: 14, Kind.I: 20, Kind.W: 0}
NORM_BYTES = 6  # fp32 input, and bf16 output before the weight


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What a token costs in a layer, on all tensor-parallel GPUs together.

    Args:
        flops: Matrix products of F, I and W.
        kv_width: Width of the keys, and of the values.
        traffic: Bytes that element-wise kernels read and write, for each of the h values.
        between, inside: Activation bytes for each of the h values: between the linear layers, which only sequence parallelism
            shares, and inside them, which tensor parallelism shares.
        held_between, held_inside: The same of what W needs: inputs and output gradients of linear layers.
        score_bytes: Bytes for each attention score if attention is not one kernel.
    """

    flops: Mapping[Kind, int]
    kv_width: int
    traffic: Mapping[Kind, float]
    between: float
    inside: float
    held_between: float
    held_inside: float
    score_bytes: int


def token_costs(model: ModelSpec, tensor_parallel: int) -> TokenCosts:
    """Return what a token costs in a layer of `model`.

    Where there are fewer heads of keys and values than tensor-parallel GPUs, each GPU has one, and so some have the same.
    """
    kv_width = model.head_width * max(model.num_kv_heads, tensor_parallel)
    return _gpt(model, kv_width) if model.family == "gpt" else _llama(model, kv_width)


def _flops(linear: int, attention: int) -> dict[Kind, int]:
    """Forward, the input's and the weights' gradients: a linear layer has one product in each, attention two, four and none."""
    return {Kind.F: linear + attention, Kind.I: linear + 2 * attention, Kind.W: linear}


def _gpt(model: ModelSpec, kv_width: int) -> TokenCosts:
    # "Reducing Activation Recomputation in Large Transformer Models" (Megatron-LM): 34 = 10 between the linear layers and 24
    # inside them; scores, their soft-max and its dropout mask 5. Of W's 32, 14 are inputs and 18 output gradients.
    h = model.hidden
    return TokenCosts(_flops(24 * h * h, 4 * model.sequence * h), kv_width, _GPT_TRAFFIC, 10, 24, 8, 24, score_bytes=5)


def _llama(model: ModelSpec, kv_width: int) -> TokenCosts:
    """The same with queries of width q, keys and values of width k, and a feed-forward of width f in all experts of a token."""
    h, q, k, f = model.hidden, model.head_width * model.num_heads, kv_width, model.ffn_width
    linear = 2 * h * (2 * q + 2 * k + 3 * f + model.experts)
    traffic = {
        kind: 2 * NORM_TRAFFIC[kind]
        + _SUM_TRAFFIC[kind]
        + _ROTARY_TRAFFIC[kind] * (q + k) / h
        + _GATE_TRAFFIC[kind] * f / h
        + _EXPERT_TRAFFIC[kind] * model.top_k
        for kind in SPLIT
    }
    # Of each expert of a token: its copy of the input and its output, before it is weighted.
    copies = 4 * model.top_k
    # Two norms, and the inputs of attention and feed-forward.
    between = 2 * NORM_BYTES + 4 + copies
    # Queries, keys, values, output of attention and its fp32 sum by head; gate, up, SiLU and product, which is the input of down.
    inside = (4 * q + 4 * k + 4 * model.num_heads + 8 * f) / h
    # Inputs of attention and feed-forward, output gradients of the last matrix of each; copies of experts have their own.
    held_between = (4 if model.experts and not model.shared_experts else 8) + copies
    held_inside = (4 * q + 4 * k + 6 * f) / h
    return TokenCosts(
        _flops(linear, 4 * model.sequence * q), k, traffic, between, inside, held_between, held_inside, score_bytes=6
    )
