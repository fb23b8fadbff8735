"""Records of made-up training runs: a replay with steps, spells, memory, checkpoints and warnings added."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from recycle.core.events.record import Event, Held, OpRan, Saved, Spell, Started, Stepped, Warned
from recycle.core.plans.plan import Plan
from recycle.sim.replay.replay import Conditions, replay

START_US = 50_000  # how long the workers took to start
DELAY_US = 12_000  # how much later all goes on after a step that was taken back


@dataclass(frozen=True)
class Training:
    """The events of a made-up run, by iteration."""

    num_steps: int = 20
    jitter: float = 0.05
    seed: int = 1
    clipped: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    taken_back: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    warned: tuple[int, ...] = ()
    num_samples: int = 36


def training_record(plan: Plan, training: Training | None = None) -> list[Event]:
    """The record of a run by `plan`, in the order of a real one: worker by worker within an iteration, memory at the end."""
    run = training or Training()
    played = replay(plan, Conditions(num_iterations=run.num_steps, jitter=run.jitter, eager=True, seed=run.seed))
    events: list[Event] = [Started("train", "8-layer GPT"), Spell(0, START_US, "pause", "start", num_live=len(plan.rows))]
    before, late_us = START_US, START_US
    for iteration in range(run.num_steps):
        if iteration - 1 in run.taken_back:
            events += _in_vain(played.events([iteration]), late_us)
            late_us += DELAY_US
        ran = [_shifted(op, late_us) for op in played.events([iteration])]
        end = max(op.end_us for op in ran)
        busy = sum(op.end_us - op.start_us for op in ran) // len(plan.rows)
        events += ran
        events.append(_step(run, iteration, end))
        events.append(
            Spell(before, end, "train", samples=run.num_samples, busy_us=min(busy, end - before), num_live=len(plan.rows))
        )
        if iteration in run.saved:
            events.append(Saved(end, iteration + 1, f"checkpoints/{iteration + 1}", 3_400_000))
        if iteration in run.warned:
            events.append(Warned(end, f"step {iteration + 1} took twice as long as the one before"))
        before = end
    return events + [
        Held(str(row.worker), 400_000_000 + number, 5_500_000 >> row.worker.stage, 5_000_000 >> row.worker.stage)
        for number, row in enumerate(plan.rows)
    ]


def _step(run: Training, iteration: int, end_us: int) -> Stepped:
    loss = 2.0 + 3.5 * math.exp(-iteration / 12) + 0.1 * math.sin(iteration * 2.3)
    if iteration in run.skipped:
        return Stepped(iteration, end_us, None, None, None)
    return Stepped(iteration, end_us, loss, 1.5, 0.5 if iteration in run.clipped else 1.0)


def _shifted(op: OpRan, by_us: int) -> OpRan:
    return replace(op, start_us=op.start_us + by_us, end_us=op.end_us + by_us)


def _in_vain(ops: Iterable[OpRan], late_us: int) -> list[Event]:
    """The first op of every worker of stage 0: what had begun when the step before was taken back."""
    firsts: dict[str, OpRan] = {}
    for op in ops:
        if op.worker.endswith("_0"):
            firsts.setdefault(op.worker, op)
    shortened = (replace(op, end_us=min(op.end_us, op.start_us + DELAY_US), is_in_vain=True) for op in firsts.values())
    return [_shifted(op, late_us) for op in shortened]
