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
from dataclasses import dataclass

from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare, StageShares
from recycle.core.layers import split_layers
from recycle.core.profile import Profile, StageProfile
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec, parse_gpu, parse_model
from recycle.planner.profiles.gpu_work import (
    EstimateOptions,
    GpuWork,
    embedding_work,
    head_work,
    layer_work,
    ring_reduce_seconds,
)
from recycle.planner.profiles.token_costs import SPLIT

_WEIGHT_BYTES = 2  # bf16
_MASTER_AND_MOMENTS_BYTES = 12  # fp32 master weight and Adam's two moments


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
    context_parallel: int = 1,
    layers: Sequence[int] | None = None,
) -> Profile:
    """Return the estimated profile of a model in `num_stages` stages.

    Args:
        model: The model, or its text form: "llama-3-8b", "gpt3-6.7b,microbatch=2", "layers=24,hidden=1024,heads=16".
        gpu: The GPU, or its text form: "a100-80", "h100,efficiency=0.5".
        num_stages: The number of stages of a pipeline.
        tensor_parallel: The number of GPUs that share a stage.
        flash: Whether attention runs as one fused kernel.
        sequence_parallel: Whether the tensor-parallel GPUs also share the activations between the linear layers.
        gradient_bytes: 4 to accumulate gradients in fp32, 2 for bf16.
        split_overhead: The time of I and W over that of a fused backward.
        context_parallel: The number of groups of such GPUs that share a stage by dividing every sequence.
        layers: The number of layers of each stage. By default the slowest stage is made as fast as possible, which gives the last
            stage, where the head is, fewer layers than the others.

    Returns:
        A profile with times, bytes, links and device memory, and the layers of each stage with their shares of its costs. The
        embedding belongs to the first layer, the head to the last one.

    Raises:
        UserError: A text cannot be read, or the layers, the heads or the sequence cannot be divided so.

    Example:
        >>> import recycle
        >>> profile = recycle.estimate("gpt3-6.7b", "a100-80", num_stages=8)
        >>> profile.name, len(profile.stages)
        ('estimate gpt3-6.7b b=1 on a100-80', 8)
    """
    model = parse_model(model) if isinstance(model, str) else model
    gpu = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    options = EstimateOptions(tensor_parallel, flash, sequence_parallel, gradient_bytes, split_overhead, context_parallel)
    _refuse_misfit(model, num_stages, options)
    layer, embedding = layer_work(model, gpu, options), embedding_work(model, gpu, options)
    head = head_work(model, gpu, options, own_matrix=num_stages > 1 or not model.shares_embedding)
    extra = [GpuWork()] * num_stages
    extra[0] = extra[0].plus(embedding)
    extra[-1] = extra[-1].plus(head)
    if layers is None:
        layers = split_layers(model.num_layers, layer.total_seconds, [work.total_seconds for work in extra])
    _refuse_split(model, num_stages, layers)
    boundary_bytes = 2 * options.num_tokens(model) * model.hidden // options.shared_by
    stages = tuple(
        _stage(more.plus(layer, number), gpu, options, boundary_bytes) for number, more in zip(layers, extra, strict=True)
    )
    degrees = "".join(f" {letter}={degree}" for letter, degree in (("t", tensor_parallel), ("c", context_parallel)) if degree > 1)
    name = f"estimate {model.name} b={model.microbatch}{degrees} on {gpu.name}"
    shares = _shares(layer, embedding, head, layers)
    return Profile(stages, gpu.inter_node, gpu.inter_node, gpu.memory_bytes, name, layers=shares)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer on one GPU, for systems that move layers between stages."""

    forward_us: float
    backward_us: float
    num_parameters: float
    activation_bytes: float


def layer_costs(model: ModelSpec, gpu: GpuSpec, tensor_parallel: int = 1, context_parallel: int = 1) -> tuple[LayerCost, ...]:
    """Return the layers of `model` in order: the embedding, the transformer layers, the head with its own embedding matrix."""
    options = EstimateOptions(tensor_parallel, context_parallel=context_parallel)
    embedding, layer = embedding_work(model, gpu, options), layer_work(model, gpu, options)
    head = head_work(model, gpu, options, own_matrix=True)
    return tuple(_layer_cost(work) for work in (embedding, *[layer] * model.num_layers, head))


def _layer_cost(work: GpuWork) -> LayerCost:
    forward, split, weight = (work.seconds[kind] * 1e6 for kind in SPLIT)
    return LayerCost(forward, split + weight, work.num_parameters, work.activation_bytes)


def _shares(layer: GpuWork, embedding: GpuWork, head: GpuWork, numbers: Sequence[int]) -> tuple[StageShares, ...]:
    """The shares of the layers of each stage."""
    works = [[layer] * number for number in numbers]
    works[0][0] = works[0][0].plus(embedding)
    works[-1][-1] = works[-1][-1].plus(head)
    return tuple(tuple(_share(work, layer) for work in own) for own in works)


def _share(work: GpuWork, plain: GpuWork) -> LayerShare:
    """What a layer costs beside a plain one."""
    forward, split, weight = (work.seconds[kind] / plain.seconds[kind] for kind in SPLIT)
    return LayerShare(
        forward, split, weight, work.activation_bytes / plain.activation_bytes, work.num_parameters / plain.num_parameters
    )


def _refuse_misfit(model: ModelSpec, num_stages: int, options: EstimateOptions) -> None:
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise UserError(f"the number of stages is {num_stages!r}, but it must be a whole number of at least 1")
    if num_stages > model.num_layers:
        raise UserError(
            f"{num_stages} stages are more than the {model.num_layers} layers of {model.name}: every stage needs a layer"
        )
    options.refuse_misfit(model)


def _refuse_split(model: ModelSpec, num_stages: int, layers: Sequence[int]) -> None:
    if len(layers) != num_stages or min(layers) < 1 or sum(layers) != model.num_layers:
        raise UserError(
            f"the split {', '.join(map(str, layers))} does not give {model.num_layers} layers to {num_stages} stages, "
            "at least one to each"
        )


def _stage(work: GpuWork, gpu: GpuSpec, options: EstimateOptions, boundary_bytes: int) -> StageProfile:
    forward, split, weight = (max(1, round(work.seconds[kind] * 1e6)) for kind in SPLIT)
    # Adam reads gradient, master weight and moments, and writes the latter three and the bf16 weight.
    touched = options.gradient_bytes + 2 * _MASTER_AND_MOMENTS_BYTES + _WEIGHT_BYTES
    # Context-parallel GPUs hold the same parameters, and sum their gradients before the step.
    gradient_bytes = work.num_parameters * options.gradient_bytes
    sum_seconds = ring_reduce_seconds(gradient_bytes, options.context_parallel, options.ring_link(gpu))
    return StageProfile(
        forward,
        split,
        weight,
        fused_us=max(split, round((split + weight) / options.split_overhead)),
        optimizer_us=max(1, round((work.num_parameters * touched / gpu.hbm_bytes_per_s + sum_seconds) * 1e6)),
        activation_bytes=round(work.activation_bytes),
        weight_held_bytes=round(work.weight_held_bytes),
        static_bytes=round(work.num_parameters * (_WEIGHT_BYTES + options.gradient_bytes + _MASTER_AND_MOMENTS_BYTES)),
        gradient_bytes=round(gradient_bytes),
        output_bytes=boundary_bytes,
    )
