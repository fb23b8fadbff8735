"""The texts of `recycle demo`: its introduction, the comparison of the twins, and the table of its phases."""

from collections.abc import Sequence

from recycle.cli.demo.twin_runs import DemoPhase, DemoSettings, Outcome, Twins
from recycle.core.cluster import Shape
from recycle.core.units import count_text, format_us
from recycle.report.record.recovery_text import format_ms
from recycle.report.record.tables import aligned

_NUMBERS = ("nobody", "one", "two", "three", "four")


def describe_setting(setting: DemoSettings) -> str:
    shape, (kill, hang, rejoin) = setting.shape, setting.injections
    return (
        f"A small GPT of {setting.num_layers} layers learns from real text on this machine, with {shape.num_workers} workers, "
        f"each a process of its own: {shape.num_pipelines} pipelines of {shape.num_stages} stages, {shape.num_microbatches} "
        f"micro-batches in each. In step {kill.step} of {setting.num_steps}, {kill.target} is killed with SIGKILL, in the middle "
        f"of its work. In step {hang.step}, {hang.target} hangs: it is stopped with SIGSTOP, and given up when it has been "
        f"silent for {setting.lease_s:g} s. Before step {rejoin.step}, a new process starts for {rejoin.target}, and joins when "
        "it has loaded. Training goes on through all of this. Then a twin is trained, the same without failures, to see whether "
        "losses and weights are equal, bit for bit."
    )


def describe_twins(twins: Twins) -> list[str]:
    """A line on whether the twins are equal, then both hashes."""
    return [
        f"{'EQUAL' if twins.are_equal else 'NOT EQUAL'}: {_judgement(twins)}",
        f"weights with failures     sha256 {twins.weights_sha256}",
        f"weights without failures  sha256 {twins.twin_weights_sha256}",
    ]


def _judgement(twins: Twins) -> str:
    step, num_steps = twins.first_unequal, len(twins.losses)
    if twins.are_equal:
        return f"all {num_steps} losses and all weights are, bit for bit, those of a run in which nobody failed."
    weights = "the weights are equal" if twins.has_equal_weights else "the weights are not those of a run in which nobody failed"
    if step is None:
        return f"all {num_steps} losses are equal bit for bit, but {weights}. This is a bug: please report it."
    both = f"{_loss(twins.losses, step)}, and without failures {_loss(twins.twin_losses, step)}"
    weights = f"{'but' if twins.has_equal_weights else 'and'} {weights}"
    return f"the losses differ from step {step} on ({both}), {weights}. This is a bug: please report it."


def _loss(losses: tuple[float, ...], step: int) -> str:
    """The loss with all digits, because the last one may differ."""
    return repr(losses[step - 1]) if step <= len(losses) else "none"


def describe_recoveries(outcome: Outcome, setting: DemoSettings) -> list[str]:
    """Sentences on what the failures cost, and on what did not follow the script."""
    lost_us = sum(recovered.lost_us for recovered in outcome.recoveries)
    num = len(outcome.recoveries)
    sentences = [f"{num} {'recovery' if num == 1 else 'recoveries'} cost {format_ms(lost_us)} in all."]
    if not any(recovered.joins for recovered in outcome.recoveries):
        sentences.append(
            f"{setting.killed} was still loading when the run ended, and did not join: let it run for more than "
            f"{setting.num_steps} --steps."
        )
    wanted = {str(setting.killed), str(setting.hung)}
    if unwanted := sorted({name for one in outcome.recoveries if not one.joins for name in one.workers} - wanted):
        sentences.append(f"{', '.join(unwanted)} also counted as dead: this machine was too busy for its heartbeats.")
    if outcome.twin_recoveries:
        sentences.append("The twin lost a worker too, without an injected failure: this machine was too busy.")
    return sentences


def phase_table(phases: Sequence[DemoPhase]) -> list[str]:
    """Lines with the workers, the steps and the median iteration of every phase, measured and planned relative to the first."""
    rows = [["iterations", "workers", "steps", "median", "beside before", "planned"]]
    for number, phase in enumerate(phases):
        took = _beside(phase.iteration_us, phases[0].iteration_us) if number else ""
        planned = _beside(phase.period_us, phases[0].period_us) if number else ""
        counts = (str(phase.num_live), str(phase.num_steps))
        rows.append([_phase_name(number, phase), *counts, format_us(phase.iteration_us), took, planned])
    return aligned(rows).splitlines()


def _beside(time_us: int, before_us: int) -> str:
    return f"{time_us / max(1, before_us) - 1:+.0%}"


def _phase_name(number: int, phase: DemoPhase) -> str:
    num, names = len(phase.dead), ", ".join(phase.dead)
    dead = f"{_NUMBERS[num] if num < len(_NUMBERS) else num} dead{': ' if names else ''}{names}"
    if phase.back:
        return f"{', '.join(phase.back)} back, {dead}"
    return f"before, {dead}" if number == 0 else f"with {dead}"


def describe_cores(shape: Shape, num_cores: int) -> list[str]:
    """A sentence on why times are not as planned where workers share cores."""
    if num_cores >= shape.num_workers:
        return []
    share = f"here all workers share {count_text(num_cores, 'core')}"
    return [f"Planned is for a machine each; {share}, and who is left has more of them, so that a dead worker costs less."]
