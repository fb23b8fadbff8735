"""A measured profile as text: a table by stage, and in words what else was found; and what to bear in mind when it is used."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.cli.training.train_config import TrainConfig
from recycle.core.cluster import Shape
from recycle.core.profile import Link, Profile, Taken
from recycle.core.units import format_bytes, format_us

if TYPE_CHECKING:
    from recycle.profiling.rehearsal import Patience, Rehearsed

_HEAD = ("stage", "F", "I", "W", "B", "after F", "after I", "static", "gradients", "send", "reduce", "step")
# A link that nothing was measured on is written with a bandwidth of this many bytes/µs: messages cost nothing over it.
_FREE_BYTES_PER_US = 1e9
# A contention of less than this share is none.
_LEAST_SHARE = 0.001


def describe_profile(found: "Rehearsed", patience: "Patience", shape: Shape, out: Path) -> str:
    """The profile of a rehearsal of this shape, for a person."""
    profile = found.profile
    stages = _link(profile.stage_link) if shape.num_stages > 1 else "none"
    peers = _link(profile.peer_link) if shape.num_pipelines > 1 else "none"
    shown = f"--pipelines {shape.num_pipelines} --stages {shape.num_stages} --microbatches {shape.num_microbatches}"
    return "\n".join(
        [
            *stage_table(profile, shape.num_pipelines),
            "",
            f"links       to other stages {stages}; to peers {peers}",
            f"contention  {contention_text(profile)}",
            f"workers     {unevenness(profile)}",
            *([f"taken on    {taken_text(profile.taken)}"] if profile.taken else []),
            f"rest        {at_rest(found, patience)}",
            f"written     {out}  (recycle plan --profile {out} {shown})",
        ]
    )


def stage_table(profile: Profile, num_pipelines: int) -> list[str]:
    """Costs by stage: medians ± half of what is between the quartiles, and sizes of a micro-batch and of the stage's state."""
    rows = [_HEAD, *(_stage_cells(profile, number, num_pipelines) for number in range(len(profile.stages)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _stage_cells(profile: Profile, number: int, num_pipelines: int) -> Sequence[str]:
    stage, spread = profile.stages[number], profile.stages[number].spread
    is_last = number == len(profile.stages) - 1
    times = (
        (stage.forward_us, spread.forward_us),
        (stage.input_us, spread.input_us),
        (stage.weight_us, spread.weight_us),
        (stage.fused_us, spread.fused_us),
    )
    sizes = (stage.activation_bytes, stage.weight_held_bytes, stage.static_bytes, stage.gradient_bytes)
    return (
        str(number),
        *(f"{format_us(took_us)} ± {format_us(apart_us)}" for took_us, apart_us in times),
        *map(format_bytes, sizes),
        "-" if is_last else format_us(profile.comm_us(number)),
        format_us(profile.reduce_us(number, num_pipelines)) if num_pipelines > 1 else "-",
        format_us(stage.optimizer_us),
    )


def _link(link: Link) -> str:
    if link.bytes_per_us >= _FREE_BYTES_PER_US:
        return format_us(link.latency_us)
    return f"{format_us(link.latency_us)} and {format_bytes(round(link.bytes_per_us * 1e6))}/s"


def contention_text(profile: Profile) -> str:
    """How workers hold each other up."""
    levels = profile.contention
    if len(levels) < 2:
        return "none: nobody else computed"
    most = len(levels) - 1
    if levels[-1] / levels[0] - 1 < _LEAST_SHARE:
        return f"none found: ops are as fast with {most} others as alone"
    some = [num for num in (most // 3, 2 * most // 3) if 0 < num < most]
    told = [f"{levels[num]:.3f} with {num} other{'s' * (num > 1)}" for num in some]
    return ", ".join([f"alone, ops take {levels[0]:.3f} of what they cost", *told, f"{levels[-1]:.3f} with all {most}"])


def unevenness(profile: Profile) -> str:
    """How far workers that do the same were apart, and how far the ops of one worker were."""
    varied = f"durations of one worker vary by {profile.jitter:.1%}"
    if not profile.factors:
        return varied
    fast, slow = min(profile.factors), max(profile.factors)
    return f"the slowest took {slow:.2f} times as long as the median, the fastest {fast:.2f}; {varied}"


def taken_text(taken: Taken) -> str:
    """What a profile was measured on."""
    return f"{taken.machine} ({taken.device}), torch {taken.torch}: {_crowd(taken)}; {taken.model}"


def _crowd(taken: Taken) -> str:
    return f"{_num(taken.pipelines, 'pipeline')} of {_num(taken.samples, 'sample')} a micro-batch"


def _num(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def at_rest(found: "Rehearsed", patience: "Patience") -> str:
    """Whether the medians had come to rest when the rehearsal ended."""
    if found.num_rounds == 1:
        return "not known after one round: take the numbers with care, or measure again with more --rounds"
    moved = f"moved by {found.median_change:.1%} in the last of {found.num_rounds} rounds"
    if found.is_stable:
        return f"medians {moved}"
    return f"this machine is not quiet: medians still {moved}, more than {patience.share:.1%}; take the numbers with care"


def crowding(num_workers: int, num_cores: int) -> str | None:
    """What to bear in mind when workers compute on too few cores; None if there are enough."""
    if num_workers <= num_cores:
        return None
    return (
        f"note: {num_workers} workers share {_num(num_cores, 'core')}: much of what is measured is how they wait for each other"
    )


def remark(taken: Taken | None, pipelines: int, config: TrainConfig | None = None) -> str | None:
    """What to bear in mind when a profile is used for so many pipelines, and to train as `config` says; None if it fits."""
    if taken is None:
        return None
    differences = [f"reductions and contention may differ for {pipelines}"] if taken.pipelines != pipelines else []
    if config is not None:
        differences += _differences(taken, config)
    if not differences:
        return None
    return f"note: this profile was measured with {_crowd(taken)} on {taken.machine}; {'; '.join(differences)}"


def _differences(taken: Taken, config: TrainConfig) -> list[str]:
    device, samples, model = config.training.device, config.data.samples, config.model_text
    found = [f"this run computes on {device}"] if taken.device != device else []
    found += [f"this run has {_num(samples, 'sample')} a micro-batch"] if taken.samples != samples else []
    return found + ([f"it was of a {taken.model}, and this run is of a {model}"] if taken.model != model else [])
