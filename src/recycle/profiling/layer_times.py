"""measure_layers: the share of every layer in the costs of its stage, measured layer by layer in one process.

Every layer runs as a stage of its own, forwards and backwards. Shares are ratios of shortest times: whoever else uses the machine
makes times longer, and never shorter. Layers that are built alike and took about the same time get their median: the differences
between them are noise, and a planner that saw them would cut micro-batches to level noise.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from statistics import median

from torch import nn

from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare, StageShares
from recycle.core.op import Kind
from recycle.profiling.stopwatch import Clock, Stopwatch, device_clock_us
from recycle.runtime.compute.elastic_stage import layers_of
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import StageCopies, layer_activations, random_state_kept, state_bytes
from recycle.runtime.job import Job
from recycle.runtime.options import refuse_count

# The time of a layer that is farther than this from the median of those that are built alike is its own.
_FAR = 0.2
_DIGITS = 4
_COSTS = tuple(field.name for field in fields(LayerShare))
_TIMES = {"forward": Kind.F, "input": Kind.I, "weight": Kind.W}


@dataclass(frozen=True, slots=True)
class _Measured:
    """The costs of one layer by their names in `LayerShare`, in µs and bytes, and what layers that are built alike share."""

    costs: dict[str, float]
    built: Hashable


def measure_layers(job: Job, num_repeats: int = 10, clock_us: Clock = device_clock_us) -> tuple[StageShares, ...]:
    """Return the layers of every stage, each with its costs beside those of a usual layer of the model.

    Times are the shortest of `num_repeats` passes after a first one, bytes are exact. Nothing is known of stages that do not say
    what their layers are, or whose layers do not run by themselves. The caller sets how many threads torch computes with.
    """
    refuse_count("num_repeats", num_repeats, 1)
    try:
        of_stages = [list(layers_of(stage)) for stage in job.stages]
        if not all(of_stages):
            return ()
        with random_state_kept():
            measured = _measured([layer for own in of_stages for layer in own], job, num_repeats, clock_us)
    except (UserError, RuntimeError):  # the stages run, so only their layers do not
        return ()
    costs = {name: _beside_usual(_without_noise(measured, name)) for name in _COSTS}
    bounds = [0, *accumulate(map(len, of_stages))]
    return tuple(_shares(costs, range(*ends)) for ends in pairwise(bounds))


def _measured(layers: Sequence[nn.Module], job: Job, num_repeats: int, clock_us: Clock) -> list[_Measured]:
    options = job.options
    copies = StageCopies(
        layers,
        job.microbatches,
        job.loss_function,
        num_repeats + 1,
        options.is_exact,
        options.sum_dtype,
        options.ops,
        options.device,
    )
    activations = layer_activations(copies.measure_bytes())
    _run_pass(copies, Stopwatch(clock_us))
    watch = Stopwatch(clock_us)
    for _ in range(num_repeats):
        _run_pass(copies, watch)
    found = []
    for stage, activation in zip(copies.stages, activations, strict=True):
        sizes: dict[str, float] = {
            "activation": activation,
            "parameters": state_bytes(stage, job.optimizer, options.has_lean_steps),
        }
        times = {name: watch.least_us(stage, kind) for name, kind in _TIMES.items()}
        found.append(_Measured(times | sizes, _built(stage, sizes)))
    return found


def _run_pass(copies: StageCopies, watch: Stopwatch) -> None:
    copies.forward(watch.time)
    copies.backward((Kind.I, Kind.W), watch.time)
    for stage in copies.stages:
        stage.sums.clear()


def _built(stage: Stage, sizes: dict[str, float]) -> Hashable:
    """Equal for layers that are built alike: of the same modules, with tensors of the same shapes and as many bytes."""
    tensors = tuple((name, tuple(value.shape), value.dtype) for name, value in stage.module.named_parameters())
    return repr(stage.module), tensors, *sizes.values()


def _without_noise(measured: Sequence[_Measured], name: str) -> list[float]:
    """The cost of each layer; for one near the median of those that are built alike, that median."""
    alike: defaultdict[Hashable, list[float]] = defaultdict(list)
    for layer in measured:
        alike[layer.built].append(layer.costs[name])
    usual = {built: median(costs) for built, costs in alike.items()}
    return [
        usual[layer.built] if abs(layer.costs[name] - usual[layer.built]) <= _FAR * usual[layer.built] else layer.costs[name]
        for layer in measured
    ]


def _beside_usual(costs: Sequence[float]) -> list[float]:
    """Costs over the median of those that are not nothing."""
    usual = median([cost for cost in costs if cost] or [1.0])
    return [cost / usual for cost in costs]


def _shares(costs: dict[str, list[float]], layers: range) -> StageShares:
    """The shares of the layers of one stage; of a cost that none of them has, equal ones."""
    own = {name: [costs[name][layer] for layer in layers] for name in _COSTS}
    own = {name: values if any(values) else [1.0] * len(layers) for name, values in own.items()}
    for name in _TIMES:
        own[name] = [round(value, _DIGITS) for value in own[name]]
    return tuple(LayerShare(**{name: values[index] for name, values in own.items()}) for index in range(len(layers)))
