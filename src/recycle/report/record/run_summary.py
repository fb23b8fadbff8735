"""The summary of a run: steps and losses, speed beside the plan's period, bubbles, recoveries, memory, checkpoints."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import structs

from recycle.core.events.record import PARTS, Held, Spell
from recycle.core.plans.plan import Plan
from recycle.core.time_shares import bubble_share
from recycle.report.record.executed_iterations import Executed, planned_shares
from recycle.report.record.run_columns import RunRecord

_MOST_GAPS = 4


@dataclass(frozen=True, slots=True)
class Times:
    """The distribution of iteration times: the median, the 10th and the 90th percentile."""

    num: int
    tenth_us: int
    median_us: int
    ninetieth_us: int

    @staticmethod
    def of(times_us: list[int]) -> "Times":
        tenth, median, ninetieth = (round(float(time)) for time in np.percentile(times_us, (10, 50, 90)))
        return Times(len(times_us), tenth, median, ninetieth)


class Summary:
    """A run beside its plan. Values that the record lacks are None or empty, and `missing` names them.

    `gaps` are clauses that say what was lost of the files of the run.
    """

    def __init__(self, run: RunRecord, plan: Plan, own: Collection[int] | None = None, gaps: Sequence[str] = ()) -> None:
        """`own` are the iterations that were executed by this plan; if None, they are recognised by their ops."""
        self.run, self.plan, self.gaps = run, plan, list(gaps)
        pauses = [(spell.start_us, spell.end_us) for spell in run.spells if spell.state != "train"]
        ops = run.ops.chosen(~run.discarded) if run.discarded.any() else run.ops
        self.executed = Executed(plan, ops, pauses, has_epochs=bool(run.recoveries), own=own)
        self.planned_bubble = bubble_share(planned_shares(plan))

    @cached_property
    def losses(self) -> list[tuple[int, float | None]]:
        """The loss of every step with its iteration; None if it was not finite."""
        losses = ((step.iteration, step.loss) for step in self.run.steps)
        return [(iteration, loss if loss is not None and math.isfinite(loss) else None) for iteration, loss in losses]

    @property
    def skipped(self) -> list[int]:
        """The iterations whose step changed nothing, because its gradient was not finite."""
        return [step.iteration for step in self.run.steps if step.scale is None]

    @property
    def clipped(self) -> list[int]:
        """The iterations whose gradient was scaled down."""
        return [step.iteration for step in self.run.steps if step.scale is not None and step.scale < 1]

    @property
    def lost_us(self) -> int:
        """The lost time of all recoveries together."""
        return sum(one.lost_us for one in self.run.recoveries)

    @cached_property
    def _spells(self) -> list[Spell]:
        """The training spells of this plan: each ends with the step of one of its iterations."""
        spells = self.run.train_spells
        if not self.executed.of_other_plans:
            return spells
        whole = set(self.executed.whole)
        ends_us = {step.at_us for step in self.run.steps if step.iteration in whole}
        return [spell for spell in spells if spell.end_us in ends_us]

    @cached_property
    def times(self) -> Times:
        """From the spells of the record, which exclude checkpoints; without spells from the ends of iterations."""
        lengths = [spell.length_us for spell in self._spells]
        return Times.of((lengths[1:] or lengths) or list(self.executed.times_us.values()))

    @cached_property
    def samples_per_s(self) -> float | None:
        """The median over iterations, without the first."""
        spells = self.run.train_spells
        rates = [spell.samples * 1e6 / spell.length_us for spell in spells[1:] or spells if spell.samples]
        return float(np.median(rates)) if rates else None

    @property
    def over_promise(self) -> float:
        """The median iteration time over the plan's period at the measured speed of the ops."""
        return self.times.median_us / self.executed.promised_us

    @cached_property
    def slowdowns(self) -> dict[str, float]:
        """The measured over the planned time, by kind of op."""
        known = {kind: self.executed.slowdown(kind) for kind in "FBIW"}
        return {kind: value for kind, value in known.items() if not math.isnan(value)}

    @cached_property
    def bubble(self) -> float:
        return bubble_share(self.executed.shares)

    @property
    def missing(self) -> list[str]:
        """The parts of a training record that this one lacks."""
        run = self.run
        parts = (("losses", run.steps), ("samples", run.train_spells), ("memory", run.held))
        return [name for name, events in parts if not events]

    @property
    def gaps_text(self) -> str:
        """One sentence on what was lost of the files of the run; empty if nothing was."""
        more = [f"{len(self.gaps) - _MOST_GAPS} more gaps"] if len(self.gaps) > _MOST_GAPS else []
        return f"the record of this run is not whole: {'; '.join([*self.gaps[:_MOST_GAPS], *more])}" if self.gaps else ""

    def to_json(self) -> dict[str, Any]:
        """Return the form that scripts rely on: times in µs, shares of 1, None for values that the record lacks."""
        run, executed, times = self.run, self.executed, self.times
        return {
            "source": run.source,
            "name": run.name,
            "steps": self._steps_json() if run.steps else None,
            "losses": [loss for _, loss in self.losses],
            "evaluations": [{"step": each.num_steps, "loss": each.loss} for each in run.evaluations],
            "samples_per_s": _rounded(self.samples_per_s),
            "iteration_us": {"median": times.median_us, "p10": times.tenth_us, "p90": times.ninetieth_us, "counted": times.num},
            "plan": {
                "period_us": self.plan.period_us,
                "slowdown": _rounded(executed.slowdown()),
                "slowdown_by_kind": {kind: _rounded(value) for kind, value in self.slowdowns.items()},
                "promised_us": _rounded(executed.promised_us, 3),
                "over_promise": _rounded(self.over_promise),
            },
            "bubble_share": {
                "executed": _rounded(self.bubble),
                "planned": _rounded(self.planned_bubble),
                "workers": {str(share.worker): _rounded(share.bubble) for share in executed.shares},
            },
            "in_vain": {"ops": executed.num_in_vain, "busy_us": executed.in_vain_us, "taken_back": list(executed.taken_back)},
            "run": run.metrics.to_json() if run.metrics else None,
            "recoveries": [one.to_json() for one in run.recoveries],
            "lost_us": {"total": self.lost_us, **{part: sum(one.parts_us[part] for one in run.recoveries) for part in PARTS}},
            "workers": [{"worker": one.node, "host": one.host, "pid": one.pid, "at_us": one.at_us} for one in run.placed],
            "memory": [{**structs.asdict(one), "ratio": _rounded(memory_ratio(one))} for one in run.held],
            "checkpoints": [
                {"at_us": one.at_us, "steps": one.num_steps, "folder": one.folder, "size_bytes": one.size_bytes}
                for one in run.saved
            ],
            "links": [
                {
                    "link": one.link,
                    "speed": one.speed,
                    "step": one.iteration + 1,
                    "time_us": one.time_us,
                    "usual_us": one.usual_us,
                    "at_us": one.at_us,
                }
                for one in run.links
            ],
            "speeds": [
                {"worker": one.node, "speed": one.speed, "step": one.iteration + 1, "at_us": one.at_us} for one in run.speeds
            ],
            "warnings": [structs.asdict(one) for one in run.warned],
            "iterations": {
                "first": executed.whole[0],
                "last": executed.whole[-1],
                "whole": len(executed.whole),
                "other_plans": len(executed.of_other_plans),
            },
            "missing": self.missing,
            "gaps": self.gaps,
        }

    def _steps_json(self) -> dict[str, Any]:
        return {
            "count": len(self.run.steps),
            "first_loss": self.losses[0][1],
            "last_loss": self.losses[-1][1],
            "skipped": self.skipped,
            "clipped": self.clipped,
            "taken_back": list(self.executed.taken_back),
        }


def memory_ratio(held: Held) -> float | None:
    """Measured over planned activation bytes; None if the plan has no bytes."""
    return held.activation_bytes / held.planned_bytes if held.planned_bytes else None


def fullest_by_stage(held: tuple[Held, ...]) -> list[Held]:
    """The worker with the most activations of each stage, for clusters too large to list all workers."""
    fullest: dict[str, Held] = {}
    for one in held:
        stage = one.worker.rpartition("_")[2]
        fullest[stage] = max(fullest.get(stage, one), one, key=lambda known: known.activation_bytes)
    return [fullest[stage] for stage in sorted(fullest, key=int)]


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)
