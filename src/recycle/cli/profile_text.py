"""The texts of `recycle profile`, and the note of `plan` and `train` about a profile that was measured for something else."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from recycle.core.cluster import Shape
from recycle.core.layer_sums import LayerSums
from recycle.core.op import Kind
from recycle.core.profile import FREE_LINK, Link, Profile, Taken
from recycle.core.units import count_text, format_bytes, format_us
from recycle.report.record.contention_text import contention_text

if TYPE_CHECKING:
    from recycle.profiling.rehearsal import Patience, Rehearsed

_SPLIT = (Kind.F, Kind.I, Kind.W)
_HEAD = ("stage", "F", "I", "W", "B", "after F", "after I", "static", "gradients", "send", "reduce", "step")


def start_text(shape: Shape, patience: "Patience") -> str:
    """Say what is about to be measured, and how long that takes."""
    return (
        f"measuring {count_text(shape.num_workers, 'worker')} in at most {count_text(patience.most_rounds, 'round')}, until "
        f"medians move by at most {patience.share:.0%}: this can take minutes; the time left is shown after the first round"
    )


def describe_profile(found: "Rehearsed", patience: "Patience", shape: Shape, out: Path) -> str:
    """Return the measured profile of a cluster of this shape as a table and sentences."""
    profile = found.profile
    stages = _link_text(profile.stage_link) if shape.num_stages > 1 else "none"
    peers = _link_text(profile.peer_link) if shape.num_pipelines > 1 else "none"
    flags = f"--pipelines {shape.num_pipelines} --stages {shape.num_stages} --microbatches {shape.num_microbatches}"
    return "\n".join(
        [
            *stage_table(profile, shape.num_pipelines),
            "",
            f"links       to other stages {stages}; to peers {peers}",
            f"contention  {contention_text(profile)}",
            f"workers     {unevenness_text(profile)}",
            f"layers      {layers_text(profile)}",
            *([f"machine     {_machine_text(profile.taken)}"] if profile.taken else []),
            f"stability   {stability_text(found, patience)}",
            f"written     {out}  (recycle plan --profile {out} {flags})",
        ]
    )


def stage_table(profile: Profile, num_pipelines: int) -> list[str]:
    """Return lines with the costs of each stage: medians ± half the interquartile range, and sizes in bytes."""
    rows = [_HEAD, *(_stage_cells(profile, number, num_pipelines) for number in range(len(profile.stages)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _stage_cells(profile: Profile, number: int, num_pipelines: int) -> Sequence[str]:
    stage, spread = profile.stages[number], profile.stages[number].spread
    is_last = number == len(profile.stages) - 1
    times = [(getattr(stage, cost), getattr(spread, cost)) for cost in ("forward_us", "input_us", "weight_us", "fused_us")]
    sizes = (stage.activation_bytes, stage.weight_held_bytes, stage.static_bytes, stage.gradient_bytes)
    return (
        str(number),
        *(f"{format_us(median_us)} ± {format_us(spread_us)}" for median_us, spread_us in times),
        *map(format_bytes, sizes),
        "-" if is_last else format_us(profile.comm_us(number)),
        format_us(profile.reduce_us(number, num_pipelines)) if num_pipelines > 1 else "-",
        format_us(stage.optimizer_us),
    )


def _link_text(link: Link) -> str:
    if link.bytes_per_us >= FREE_LINK.bytes_per_us:  # its messages take the latency only
        return format_us(link.latency_us)
    return f"{format_us(link.latency_us)} and {format_bytes(round(link.bytes_per_us * 1e6))}/s"


def unevenness_text(profile: Profile) -> str:
    """Describe how different the speeds of the workers are, and how much the op times of one worker vary."""
    varied = f"durations of one worker vary by {profile.jitter:.1%}"
    if not profile.factors:
        return varied
    fast, slow = min(profile.factors), max(profile.factors)
    return f"the slowest took {slow:.2f} times as long as the median, the fastest {fast:.2f}; {varied}"


def layers_text(profile: Profile) -> str:
    """Say how many layers stages have, and which of them takes longest beside a usual one."""
    if not profile.layers:
        return "not known: a stage that is an nn.Sequential, or has a method split_into_layers(), says what its layers are"
    sums = LayerSums(profile)
    took_us = [sum(sums.duration_us(kind, range(layer, layer + 1)) for kind in _SPLIT) for layer in range(sums.num_layers)]
    slowest = max(range(sums.num_layers), key=took_us.__getitem__)
    by_stage = ",".join(str(len(own)) for own in profile.layers)
    return f"{by_stage} by stage; the slowest is layer {slowest}, with {took_us[slowest] / median(took_us):.2f} times the median"


def _machine_text(taken: Taken) -> str:
    """Describe the machine, the cluster and the model that a profile was measured with."""
    return f"{taken.machine} ({taken.device}), torch {taken.torch}: {_cluster_text(taken)}; {taken.model}"


def _cluster_text(taken: Taken) -> str:
    return f"{count_text(taken.pipelines, 'pipeline')} of {count_text(taken.samples, 'sample')} a micro-batch"


def stability_text(found: "Rehearsed", patience: "Patience") -> str:
    """Say whether the medians were stable when the measurement ended."""
    if found.num_rounds == 1:
        return "not known after one round: take the numbers with care, or measure again with more --rounds"
    moved = f"moved by {found.median_change:.1%} in the last of {found.num_rounds} rounds"
    if found.is_stable:
        return f"medians {moved}"
    return f"this machine is not quiet: medians still {moved}, more than {patience.share:.1%}; take the numbers with care"


def mismatch_note(
    taken: Taken | None, pipelines: int, device: str | None = None, samples: int | None = None, model: str | None = None
) -> str | None:
    """Return a note if a profile was measured for another cluster than it is used for, or for another training run.

    A plan that is made for no particular run has only a number of pipelines; None leaves a condition out of the comparison.
    """
    if taken is None:
        return None
    differences = [f"reductions and contention may differ for {pipelines}"] if taken.pipelines != pipelines else []
    if device not in (None, taken.device):
        differences.append(f"this run computes on {device}")
    if samples is not None and samples != taken.samples:
        differences.append(f"this run has {count_text(samples, 'sample')} a micro-batch")
    if model not in (None, taken.model):
        differences.append(f"it was of a {taken.model}, and this run is of a {model}")
    if not differences:
        return None
    return f"note: this profile was measured with {_cluster_text(taken)} on {taken.machine}; {'; '.join(differences)}"
