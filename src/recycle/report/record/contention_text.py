"""A measured profile as text: a table of costs by stage, contention, differences between workers, the machine."""

from collections.abc import Sequence

from recycle.core.profile import Link, Profile, Taken
from recycle.core.units import count_text, format_bytes, format_us

_HEAD = ("stage", "F", "I", "W", "B", "after F", "after I", "static", "gradients", "send", "reduce", "step")
# A link without any measurement has a bandwidth of this many bytes/µs: its messages take the latency only.
_FREE_BYTES_PER_US = 1e9
# A smaller contention than this share counts as none.
_LEAST_SHARE = 0.001


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


def link_text(link: Link) -> str:
    if link.bytes_per_us >= _FREE_BYTES_PER_US:
        return format_us(link.latency_us)
    return f"{format_us(link.latency_us)} and {format_bytes(round(link.bytes_per_us * 1e6))}/s"


def contention_text(profile: Profile) -> str:
    """Describe how much slower ops are while other workers compute on the same machine."""
    levels = profile.contention
    if len(levels) < 2:
        return "none: no other worker computed"
    most = len(levels) - 1
    if levels[-1] / levels[0] - 1 < _LEAST_SHARE:
        return f"none found: ops are as fast with {most} others as alone"
    some = [num for num in (most // 3, 2 * most // 3) if 0 < num < most]
    between = [f"{levels[num]:.3f} with {num} other{'s' * (num > 1)}" for num in some]
    return ", ".join([f"alone, ops take {levels[0]:.3f} of their cost", *between, f"{levels[-1]:.3f} with all {most}"])


def unevenness_text(profile: Profile) -> str:
    """Describe how different the speeds of the workers are, and how much the op times of one worker vary."""
    varied = f"durations of one worker vary by {profile.jitter:.1%}"
    if not profile.factors:
        return varied
    fast, slow = min(profile.factors), max(profile.factors)
    return f"the slowest took {slow:.2f} times as long as the median, the fastest {fast:.2f}; {varied}"


def machine_text(taken: Taken) -> str:
    """Describe the machine, the cluster and the model that a profile was measured with."""
    return f"{taken.machine} ({taken.device}), torch {taken.torch}: {cluster_text(taken)}; {taken.model}"


def cluster_text(taken: Taken) -> str:
    return f"{count_text(taken.pipelines, 'pipeline')} of {count_text(taken.samples, 'sample')} a micro-batch"


def oversubscription_note(num_workers: int, num_cores: int) -> str | None:
    """Return a note for workers that share too few cores; None if there are enough."""
    if num_workers <= num_cores:
        return None
    return (
        f"note: {num_workers} workers share {count_text(num_cores, 'core')}: "
        "much of the measured time is time in which they wait for each other"
    )
