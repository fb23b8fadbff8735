"""GpuWork: the seconds and bytes of a layer, the embedding or the head on one GPU of a worker."""

from dataclasses import dataclass, field

from recycle.core.errors import UserError
from recycle.core.op import Kind
from recycle.core.profile import Link
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec
from recycle.planner.profiles.token_costs import NORM_BYTES, NORM_TRAFFIC, SPLIT, token_costs

# Without flash attention: soft-max and dropout of the scores, in bytes for each of the a*s*s*b scores.
_SCORE_TRAFFIC = {Kind.F: 9, Kind.I: 11, Kind.W: 0}
# The loss works in fp32: bytes for each of the sbV logits (cast and log-soft-max; in I the same backwards).
_LOGIT_TRAFFIC = {Kind.F: 14, Kind.I: 14, Kind.W: 0}
# The embedding: two look-ups and a sum forward (llama: one look-up), nothing to pass on backward, a scatter-add in W.
_EMBEDDING_TRAFFIC = {"gpt": {Kind.F: 6, Kind.I: 0, Kind.W: 6}, "llama": {Kind.F: 4, Kind.I: 0, Kind.W: 6}}
# All-reduces of sbh values with tensor parallelism (Megatron-LM): one for attention and one for the MLP in each direction.
_LAYER_REDUCES = {Kind.F: 2, Kind.I: 2, Kind.W: 0}
_EMBEDDING_REDUCES = {Kind.F: 1, Kind.I: 0, Kind.W: 0}
_HEAD_REDUCES = {Kind.F: 0, Kind.I: 1, Kind.W: 0}
# Rounds of keys and values through the context-parallel GPUs (ring attention): one forward; backward again, and their gradients.
_LAYER_RINGS = {Kind.F: 1, Kind.I: 2, Kind.W: 0}
_SERVER_GPUS = 8  # GPUs of a server: the context-parallel GPUs of a larger worker exchange keys and values over the network


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """How the model is run, beside its shape.

    `gradient_bytes` 4 accumulates gradients in fp32, Megatron-LM's default with bf16, and makes 18 bytes for each
    parameter; 2 makes 16. `sequence_parallel` shares the activations between the linear layers, too, over the
    tensor-parallel GPUs, and with them the tensor sent to the next stage. `split_overhead` is (I + W) over the whole
    backward: 1.10 to 1.18 with PyTorch's private graph split, 0.96 to 0.99 with the public one on an H200.
    `context_parallel` GPUs have an equal part of every sequence each, and all parameters.
    """

    tensor_parallel: int = 1
    flash: bool = True
    sequence_parallel: bool = True
    gradient_bytes: int = 4
    split_overhead: float = 1.0
    context_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "context_parallel"):
            degree = getattr(self, name)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise UserError(f"{name} is {degree!r}, but it must be a whole number of at least 1")
        if self.gradient_bytes not in (2, 4):
            raise UserError(f"gradient_bytes is {self.gradient_bytes!r}, but a gradient takes 2 bytes (bf16) or 4 (fp32)")
        if not 0.5 <= self.split_overhead <= 2:
            raise UserError(f"split_overhead is {self.split_overhead!r}, but (I + W) / B lies between 0.5 and 2, and is about 1")

    @property
    def shared_by(self) -> int:
        """How many GPUs share the activations between the linear layers."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def num_tokens(self, model: ModelSpec) -> int:
        """The tokens of a micro-batch on each GPU."""
        return model.sequence // self.context_parallel * model.microbatch

    def ring_link(self, gpu: GpuSpec) -> Link:
        """The link between context-parallel GPUs."""
        return gpu.intra_node if self.tensor_parallel * self.context_parallel <= _SERVER_GPUS else gpu.inter_node

    def refuse_misfit(self, model: ModelSpec) -> None:
        """Raise unless the heads and the sequence of `model` can be divided so."""
        t, c = self.tensor_parallel, self.context_parallel
        if model.num_heads % t:
            raise UserError(
                f"a tensor-parallel degree of {t} does not divide the {model.num_heads} heads of {model.name}: "
                "choose one that does"
            )
        if model.num_kv_heads % t and t % model.num_kv_heads:
            raise UserError(
                f"a tensor-parallel degree of {t} neither divides the {model.num_kv_heads} kv_heads of {model.name} nor is a "
                "multiple of them: choose one that does or is"
            )
        if model.sequence % c:
            raise UserError(
                f"a context-parallel degree of {c} does not divide the {model.sequence} tokens of a sequence of {model.name}: "
                "choose one that does"
            )


@dataclass(frozen=True, slots=True)
class GpuWork:
    """The cost of a layer, the embedding or the head on one GPU: seconds by kind, bytes, parameters."""

    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0.0))
    activation_bytes: float = 0
    weight_held_bytes: float = 0
    num_parameters: float = 0

    def plus(self, other: "GpuWork", times: int = 1) -> "GpuWork":
        return GpuWork(
            {kind: value + times * other.seconds[kind] for kind, value in self.seconds.items()},
            self.activation_bytes + times * other.activation_bytes,
            self.weight_held_bytes + times * other.weight_held_bytes,
            self.num_parameters + times * other.num_parameters,
        )

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def layer_work(model: ModelSpec, gpu: GpuSpec, options: EstimateOptions) -> GpuWork:
    """The work of one transformer layer."""
    tokens, h, t = options.num_tokens(model), model.hidden, options.tensor_parallel
    costs = token_costs(model, t)
    scores = 0 if options.flash else model.num_heads * model.sequence * tokens
    seconds = {
        kind: tokens * costs.flops[kind] / (gpu.flops * gpu.efficiency * t)
        + (tokens * h * costs.traffic[kind] + scores * _SCORE_TRAFFIC[kind]) / t / gpu.hbm_bytes_per_s
        + _LAYER_REDUCES[kind] * _reduce_seconds(model, gpu, options)
        + _LAYER_RINGS[kind] * _ring_seconds(4 * tokens * costs.kv_width / t, gpu, options)
        for kind in SPLIT
    }
    activation = tokens * h * (costs.between / options.shared_by + costs.inside / t) + costs.score_bytes * scores / t
    held = tokens * h * (costs.held_between / options.shared_by + costs.held_inside / t)
    # The matrices of keys and values that several GPUs have, because there are more GPUs than heads of keys and values.
    copied = 2 * h * (costs.kv_width - model.num_kv_heads * model.head_width)
    return GpuWork(seconds, activation, held, (model.layer_parameters + copied) / t)


def embedding_work(model: ModelSpec, gpu: GpuSpec, options: EstimateOptions) -> GpuWork:
    """The look-up of tokens and positions on the first stage: memory-bound, and only token ids are kept for it."""
    tokens, h = options.num_tokens(model), model.hidden
    seconds = {
        kind: tokens * h * _EMBEDDING_TRAFFIC[model.family][kind] / gpu.hbm_bytes_per_s
        + _EMBEDDING_REDUCES[kind] * _reduce_seconds(model, gpu, options)
        for kind in SPLIT
    }
    return GpuWork(seconds, 8 * tokens, 8 * tokens, model.embedding_parameters / options.tensor_parallel)


def head_work(model: ModelSpec, gpu: GpuSpec, options: EstimateOptions, own_matrix: bool) -> GpuWork:
    """The logits and the loss on the last stage, both shared over the tensor-parallel GPUs by vocabulary.

    Between F and I it keeps its input (2sbh) and fp32 soft-max (4sbV); W needs the input and bf16 output gradients. The norm
    before the head is counted for the family llama only, as in the formulas of the papers. The head has a matrix of its own
    unless it shares that of the embedding, and one worker holds both.
    """
    tokens, h, v, t = options.num_tokens(model), model.hidden, model.vocabulary, options.tensor_parallel
    norm = model.family == "llama"
    seconds = {
        kind: 2 * tokens * h * v / (gpu.flops * gpu.efficiency * t)
        + tokens * v * _LOGIT_TRAFFIC[kind] / t / gpu.hbm_bytes_per_s
        + _HEAD_REDUCES[kind] * _reduce_seconds(model, gpu, options)
        + norm * tokens * h * NORM_TRAFFIC[kind] / t / gpu.hbm_bytes_per_s
        for kind in SPLIT
    }
    inputs = 2 * tokens * h / options.shared_by
    kept = inputs + norm * NORM_BYTES * tokens * h / options.shared_by + 4 * tokens * v / t
    return GpuWork(seconds, kept, inputs + 2 * tokens * v / t, (norm * h + own_matrix * v * h) / t)


def _reduce_seconds(model: ModelSpec, gpu: GpuSpec, options: EstimateOptions) -> float:
    """A ring all-reduce of one sbh tensor inside the server; a reduce-scatter and an all-gather take as long."""
    size_bytes = 2 * options.num_tokens(model) * model.hidden
    return ring_reduce_seconds(size_bytes, options.tensor_parallel, gpu.intra_node)


def ring_reduce_seconds(size_bytes: float, num_gpus: int, link: Link) -> float:
    """A ring all-reduce over GPUs of a worker."""
    steps = 2 * (num_gpus - 1)
    return (steps * link.latency_us + steps / num_gpus * size_bytes / link.bytes_per_us) / 1e6


def _ring_seconds(block_bytes: float, gpu: GpuSpec, options: EstimateOptions) -> float:
    """Blocks of keys and values that pass every other context-parallel GPU, one step for each, without overlap."""
    link = options.ring_link(gpu)
    return (options.context_parallel - 1) * (link.latency_us + block_bytes / link.bytes_per_us) / 1e6
