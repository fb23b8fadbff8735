"""The texts of `recycle profile`, and the note of `plan` and `train` about a profile that was measured for something else."""

from pathlib import Path
from typing import TYPE_CHECKING

from recycle.core.cluster import Shape
from recycle.core.profile import Taken
from recycle.core.units import count_text
from recycle.report.record.profile_table import (
    cluster_text,
    contention_text,
    link_text,
    machine_text,
    stage_table,
    unevenness_text,
)

if TYPE_CHECKING:
    from recycle.profiling.rehearsal import Patience, Rehearsed


def start_text(shape: Shape, patience: "Patience") -> str:
    """Say what is about to be measured, and how long that takes."""
    return (
        f"measuring {count_text(shape.num_workers, 'worker')} in at most {count_text(patience.most_rounds, 'round')}, until "
        f"medians move by at most {patience.share:.0%}: this can take minutes; the time left is shown after the first round"
    )


def describe_profile(found: "Rehearsed", patience: "Patience", shape: Shape, out: Path) -> str:
    """Return the measured profile of a cluster of this shape as a table and sentences."""
    profile = found.profile
    stages = link_text(profile.stage_link) if shape.num_stages > 1 else "none"
    peers = link_text(profile.peer_link) if shape.num_pipelines > 1 else "none"
    flags = f"--pipelines {shape.num_pipelines} --stages {shape.num_stages} --microbatches {shape.num_microbatches}"
    return "\n".join(
        [
            *stage_table(profile, shape.num_pipelines),
            "",
            f"links       to other stages {stages}; to peers {peers}",
            f"contention  {contention_text(profile)}",
            f"workers     {unevenness_text(profile)}",
            *([f"machine     {machine_text(profile.taken)}"] if profile.taken else []),
            f"stability   {stability_text(found, patience)}",
            f"written     {out}  (recycle plan --profile {out} {flags})",
        ]
    )


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
    return f"note: this profile was measured with {cluster_text(taken)} on {taken.machine}; {'; '.join(differences)}"
