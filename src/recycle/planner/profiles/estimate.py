"""estimate(): a profile computed from the numbers of a model and a GPU, for planning before anything is measured.

One transformer layer of hidden size h on a micro-batch of b samples of s tokens computes sbh(24h + 4s) FLOPs in F,
sbh(24h + 8s) in I and sbh(24h) in W; the output layer adds 2sbhV to each. An op takes

    matrix products / (peak * efficiency)  +  element-wise traffic / memory bandwidth  +  tensor-parallel all-reduces

on each GPU of a worker. What is left out: kernel launches (so small models come out too fast), causal masking (kernels
that skip the masked half are faster), and any overlap of the three terms. One efficiency for all kinds gives W/F of 0.7
to 0.95: measured were 0.97 to 1.02 on an H200, and 0.50 to 0.74 on A100s in Zero Bubble. On that H200 a forward, a weight
gradient and a whole backward came out within 7 % at hidden sizes 3072 and 4096, but up to 33 % too fast at 1024: measure
where it matters.

Every byte is of one GPU: a worker of tensor-parallel degree t is t GPUs that do the same at the same time, each with its
share of the parameters, its own memory and its own network card.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare, StageShares
from recycle.core.layers import split_layers
from recycle.core.op import Kind
from recycle.core.profile import Profile, StageProfile
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec, parse_gpu, parse_model

_SPLIT = (Kind.F, Kind.I, Kind.W)

# Element-wise traffic of one layer, in bytes for each of its sbh values (bf16), counted kernel by kernel. F: two norms
# (4 each), GeLU on 4h (16), two residual sums (6 each). I: two norms (6), GeLU (24), two sums of gradients (6). W: bias
# gradients read the output gradients of the four linear layers (18). Attention with flash runs inside its own kernel.
_LAYER_TRAFFIC = {Kind.F: 36, Kind.I: 48, Kind.W: 18}
# Without flash attention: soft-max and dropout of the scores, in bytes for each of the a*s*s*b scores.
_SCORE_TRAFFIC = {Kind.F: 9, Kind.I: 11, Kind.W: 0}
# The loss works in fp32: bytes for each of the sbV logits (cast and log-soft-max; in I the same backwards).
_LOGIT_TRAFFIC = {Kind.F: 14, Kind.I: 14, Kind.W: 0}
# The embedding: two look-ups and a sum forward, nothing to pass on backward, a scatter-add as weight gradient.
_EMBEDDING_TRAFFIC = {Kind.F: 6, Kind.I: 0, Kind.W: 6}
# All-reduces of sbh values with tensor parallelism (Megatron-LM): one for attention and one for the MLP in each direction.
_LAYER_REDUCES = {Kind.F: 2, Kind.I: 2, Kind.W: 0}
_EMBEDDING_REDUCES = {Kind.F: 1, Kind.I: 0, Kind.W: 0}
_HEAD_REDUCES = {Kind.F: 0, Kind.I: 1, Kind.W: 0}

_WEIGHT_BYTES = 2  # bf16
_MASTER_AND_MOMENTS_BYTES = 12  # fp32 master weight and Adam's two moments


@dataclass(frozen=True, slots=True)
class _Setting:
    """How the model is run, beside its shape.

    `gradient_bytes` 4 accumulates gradients in fp32, Megatron-LM's default with bf16, and makes 18 bytes for each
    parameter; 2 makes 16. `sequence_parallel` shares the activations between the linear layers, too, over the
    tensor-parallel GPUs, and with them the tensor sent to the next stage. `split_overhead` is (I + W) over the whole
    backward: 1.10 to 1.18 with PyTorch's private graph split, 0.96 to 0.99 with the public one on an H200.
    """

    tensor_parallel: int = 1
    flash: bool = True
    sequence_parallel: bool = True
    gradient_bytes: int = 4
    split_overhead: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.tensor_parallel, bool) or not isinstance(self.tensor_parallel, int) or self.tensor_parallel < 1:
            raise UserError(f"tensor_parallel is {self.tensor_parallel!r}, but it must be a whole number of at least 1")
        if self.gradient_bytes not in (2, 4):
            raise UserError(f"gradient_bytes is {self.gradient_bytes!r}, but a gradient takes 2 bytes (bf16) or 4 (fp32)")
        if not 0.5 <= self.split_overhead <= 2:
            raise UserError(f"split_overhead is {self.split_overhead!r}, but (I + W) / B lies between 0.5 and 2, and is about 1")

    @property
    def shared_by(self) -> int:
        """How many GPUs share the activations between the linear layers."""
        return self.tensor_parallel if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class _Work:
    """The cost of a layer, the embedding or the head on one GPU: seconds by kind, bytes, parameters."""

    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(_SPLIT, 0.0))
    activation_bytes: float = 0
    weight_held_bytes: float = 0
    num_parameters: float = 0

    def plus(self, other: "_Work", times: int = 1) -> "_Work":
        return _Work(
            {kind: value + times * other.seconds[kind] for kind, value in self.seconds.items()},
            self.activation_bytes + times * other.activation_bytes,
            self.weight_held_bytes + times * other.weight_held_bytes,
            self.num_parameters + times * other.num_parameters,
        )

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def estimate(
    model: ModelSpec | str,
    gpu: GpuSpec | str,
    num_stages: int,
    tensor_parallel: int = 1,
    *,
    flash: bool = True,
    sequence_parallel: bool = True,
    gradient_bytes: int = 4,
    split_overhead: float = 1.0,
    layers: Sequence[int] | None = None,
) -> Profile:
    """Return the estimated profile of a GPT model in `num_stages` stages.

    Args:
        model: The model, or its text form: "gpt3-6.7b", "gpt3-6.7b,microbatch=2", "layers=24,hidden=1024,heads=16".
        gpu: The GPU, or its text form: "a100-80", "h100,efficiency=0.5".
        num_stages: The number of stages of a pipeline.
        tensor_parallel: The number of GPUs that share a stage.
        flash: Whether attention runs as one fused kernel.
        sequence_parallel: Whether the tensor-parallel GPUs also share the activations between the linear layers.
        gradient_bytes: 4 to accumulate gradients in fp32, 2 for bf16.
        split_overhead: The time of I and W over that of a fused backward.
        layers: The number of layers of each stage. By default the slowest stage is made as fast as possible, which gives the last
            stage, where the head is, fewer layers than the others.

    Returns:
        A profile with times, bytes, links and device memory, and the layers of each stage with their shares of its costs. The
        embedding belongs to the first layer, the head to the last one.

    Raises:
        UserError: A text cannot be read, or the layers or heads cannot be divided so.

    Example:
        >>> import recycle
        >>> profile = recycle.estimate("gpt3-6.7b", "a100-80", num_stages=8)
        >>> profile.name, len(profile.stages)
        ('estimate gpt3-6.7b b=1 on a100-80', 8)
    """
    model = parse_model(model) if isinstance(model, str) else model
    gpu = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    setting = _Setting(tensor_parallel, flash, sequence_parallel, gradient_bytes, split_overhead)
    _refuse_misfit(model, num_stages, setting)
    layer, embedding, head = (make(model, gpu, setting) for make in (_layer_work, _embedding_work, _head_work))
    if num_stages > 1:  # the head has its own copy of the embedding matrix unless one worker holds both
        head = head.plus(_Work(num_parameters=model.vocabulary * model.hidden / setting.tensor_parallel))
    extra = [_Work()] * num_stages
    extra[0] = extra[0].plus(embedding)
    extra[-1] = extra[-1].plus(head)
    if layers is None:
        layers = split_layers(model.num_layers, layer.total_seconds, [work.total_seconds for work in extra])
    _refuse_split(model, num_stages, layers)
    boundary_bytes = 2 * model.sequence * model.microbatch * model.hidden // setting.shared_by
    stages = tuple(
        _stage(more.plus(layer, number), gpu, setting, boundary_bytes) for number, more in zip(layers, extra, strict=True)
    )
    degree = f" t={setting.tensor_parallel}" if setting.tensor_parallel > 1 else ""
    name = f"estimate {model.name} b={model.microbatch}{degree} on {gpu.name}"
    shares = _shares(layer, embedding, head, layers)
    return Profile(stages, gpu.inter_node, gpu.inter_node, gpu.memory_bytes, name, layers=shares)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer on one GPU, for systems that move layers between stages."""

    forward_us: float
    backward_us: float
    num_parameters: float
    activation_bytes: float


def layer_costs(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int = 1) -> tuple[LayerCost, ...]:
    """Return the layers of `model` in order: the embedding, the transformer layers, the head with its own embedding matrix."""
    setting = _Setting(tensor_parallel)
    embedding, layer, head = (make(model, gpu, setting) for make in (_embedding_work, _layer_work, _head_work))
    head = head.plus(_Work(num_parameters=model.vocabulary * model.hidden / tensor_parallel))
    return tuple(_layer_cost(work) for work in (embedding, *[layer] * model.num_layers, head))


def _layer_cost(work: _Work) -> LayerCost:
    forward, split, weight = (work.seconds[kind] * 1e6 for kind in _SPLIT)
    return LayerCost(forward, split + weight, work.num_parameters, work.activation_bytes)


def _shares(layer: _Work, embedding: _Work, head: _Work, numbers: Sequence[int]) -> tuple[StageShares, ...]:
    """The shares of the layers of each stage."""
    works = [[layer] * number for number in numbers]
    works[0][0] = works[0][0].plus(embedding)
    works[-1][-1] = works[-1][-1].plus(head)
    return tuple(tuple(_share(work, layer) for work in own) for own in works)


def _share(work: _Work, plain: _Work) -> LayerShare:
    """What a layer costs beside a plain one."""
    forward, split, weight = (work.seconds[kind] / plain.seconds[kind] for kind in _SPLIT)
    return LayerShare(
        forward, split, weight, work.activation_bytes / plain.activation_bytes, work.num_parameters / plain.num_parameters
    )


def _refuse_misfit(model: ModelSpec, num_stages: int, setting: _Setting) -> None:
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise UserError(f"the number of stages is {num_stages!r}, but it must be a whole number of at least 1")
    if num_stages > model.num_layers:
        raise UserError(
            f"{num_stages} stages are more than the {model.num_layers} layers of {model.name}: every stage needs a layer"
        )
    if model.num_heads % setting.tensor_parallel:
        raise UserError(
            f"a tensor-parallel degree of {setting.tensor_parallel} does not divide the {model.num_heads} heads of {model.name}: "
            "choose one that does"
        )


def _refuse_split(model: ModelSpec, num_stages: int, layers: Sequence[int]) -> None:
    if len(layers) != num_stages or min(layers) < 1 or sum(layers) != model.num_layers:
        raise UserError(
            f"the split {', '.join(map(str, layers))} does not give {model.num_layers} layers to {num_stages} stages, "
            "at least one to each"
        )


def _layer_work(model: ModelSpec, gpu: GpuSpec, setting: _Setting) -> _Work:
    s, b, h, t = model.sequence, model.microbatch, model.hidden, setting.tensor_parallel
    products = {Kind.F: 24 * h + 4 * s, Kind.I: 24 * h + 8 * s, Kind.W: 24 * h}
    scores = 0 if setting.flash else model.num_heads * s * s * b
    seconds = {
        kind: s * b * h * products[kind] / (gpu.flops * gpu.efficiency * t)
        + (s * b * h * _LAYER_TRAFFIC[kind] + scores * _SCORE_TRAFFIC[kind]) / t / gpu.hbm_bytes_per_s
        + _LAYER_REDUCES[kind] * _reduce_seconds(model, gpu, setting)
        for kind in _SPLIT
    }
    # "Reducing Activation Recomputation in Large Transformer Models" (Megatron-LM): 34 = 10 between the linear layers,
    # shared only with sequence parallelism, and 24 inside them. Of W's 32, 14 are inputs and 18 output gradients.
    activation = s * b * h * (10 / setting.shared_by + 24 / t) + 5 * scores / t
    held = s * b * h * (8 / setting.shared_by + 24 / t)
    return _Work(seconds, activation, held, model.layer_parameters / t)


def _embedding_work(model: ModelSpec, gpu: GpuSpec, setting: _Setting) -> _Work:
    """The look-up of tokens and positions on the first stage: memory-bound, and only token ids are kept for it."""
    s, b, h, t = model.sequence, model.microbatch, model.hidden, setting.tensor_parallel
    seconds = {
        kind: s * b * h * _EMBEDDING_TRAFFIC[kind] / gpu.hbm_bytes_per_s
        + _EMBEDDING_REDUCES[kind] * _reduce_seconds(model, gpu, setting)
        for kind in _SPLIT
    }
    return _Work(seconds, 8 * s * b, 8 * s * b, (model.vocabulary + s) * h / t)


def _head_work(model: ModelSpec, gpu: GpuSpec, setting: _Setting) -> _Work:
    """The logits and the loss on the last stage, both shared over the tensor-parallel GPUs by vocabulary.

    Between F and I it keeps its input (2sbh) and fp32 soft-max (4sbV); W needs the input and bf16 output gradients.
    """
    s, b, h, v, t = model.sequence, model.microbatch, model.hidden, model.vocabulary, setting.tensor_parallel
    seconds = {
        kind: 2 * s * b * h * v / (gpu.flops * gpu.efficiency * t)
        + s * b * v * _LOGIT_TRAFFIC[kind] / t / gpu.hbm_bytes_per_s
        + _HEAD_REDUCES[kind] * _reduce_seconds(model, gpu, setting)
        for kind in _SPLIT
    }
    inputs = 2 * s * b * h / setting.shared_by
    return _Work(seconds, inputs + 4 * s * b * v / t, inputs + 2 * s * b * v / t)


def _reduce_seconds(model: ModelSpec, gpu: GpuSpec, setting: _Setting) -> float:
    """A ring all-reduce of one sbh tensor inside the server; a reduce-scatter and an all-gather take as long."""
    t = setting.tensor_parallel
    steps = 2 * (t - 1)
    size_bytes = 2 * model.sequence * model.microbatch * model.hidden
    return (steps * gpu.intra_node.latency_us + steps / t * size_bytes / gpu.intra_node.bytes_per_us) / 1e6


def _stage(work: _Work, gpu: GpuSpec, setting: _Setting, boundary_bytes: int) -> StageProfile:
    forward, split, weight = (max(1, round(work.seconds[kind] * 1e6)) for kind in _SPLIT)
    # Adam reads gradient, master weight and moments, and writes the latter three and the bf16 weight.
    touched = setting.gradient_bytes + 2 * _MASTER_AND_MOMENTS_BYTES + _WEIGHT_BYTES
    return StageProfile(
        forward,
        split,
        weight,
        fused_us=max(split, round((split + weight) / setting.split_overhead)),
        optimizer_us=max(1, round(work.num_parameters * touched / gpu.hbm_bytes_per_s * 1e6)),
        activation_bytes=round(work.activation_bytes),
        weight_held_bytes=round(work.weight_held_bytes),
        static_bytes=round(work.num_parameters * (_WEIGHT_BYTES + setting.gradient_bytes + _MASTER_AND_MOMENTS_BYTES)),
        gradient_bytes=round(work.num_parameters * setting.gradient_bytes),
        output_bytes=boundary_bytes,
    )
