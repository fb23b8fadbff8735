"""What the benchmark beside torchft runs and finds: three replicas of a GPT, one of which is killed; and ReCycle's side of it.

In both systems this process sends the signal in the middle of a step. All times are those of the machine's clock, `now_us`.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from threading import Timer

import torch
from recovery_cases import RunLog, train
from runtime_cases import OPTIONS, SAMPLES, Sizes
from torch import nn

from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import Event, OpRan, Stepped
from recycle.core.op import Kind, MicroBatch, Op
from recycle.models.gpt import next_byte_loss
from recycle.runtime.checkpoint.resume import load
from recycle.runtime.execute.spans import now_us
from recycle.runtime.options import CheckpointOptions, FailureOptions

VICTIM, WARM_UP = 1, 2
"""The replica that is killed, and the steps that are not timed, in which caches fill."""
# Steps whose samples no run comes to.
_UNSEEN_STEPS = range(1000, 1004)


@dataclass(frozen=True, slots=True)
class Trial:
    """A run through a kill: its replicas, after which step one is killed, and how many samples it trains on."""

    sizes: Sizes
    kill_after: int
    num_steps: int
    join_ms: int
    limit_s: float

    @property
    def step_samples(self) -> int:
        """The samples of a step while all are alive."""
        return self.sizes.pipelines * self.sizes.microbatches * SAMPLES

    @property
    def num_samples(self) -> int:
        return self.num_steps * self.step_samples


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """When a step had been applied by all live replicas, and how many samples its gradient is from."""

    end_us: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class KilledRun:
    """What a run came to.

    `first_op_us` is the start of the first op after the kill whose result was applied; `num_with_victim` steps came before the
    step of that op; `num_discarded` counts the forward passes of the survivors whose results were never applied; `loss` is that
    of the last weights on samples that no run has seen.
    """

    killed_us: int
    first_op_us: int
    steps: tuple[AppliedStep, ...]
    num_with_victim: int
    num_discarded: int
    loss: float

    @property
    def before(self) -> tuple[AppliedStep, ...]:
        return tuple(step for step in self.steps if step.end_us <= self.killed_us)[WARM_UP:]

    @property
    def after(self) -> tuple[AppliedStep, ...]:
        return self.steps[self.num_with_victim :]

    @property
    def num_samples(self) -> int:
        return sum(step.num_samples for step in self.steps)

    @property
    def first_op_s(self) -> float:
        return (self.first_op_us - self.killed_us) / 1e6

    @property
    def next_step_s(self) -> float:
        """From the kill to the end of the first step that was made without the victim."""
        return (self.after[0].end_us - self.killed_us) / 1e6


def step_s(steps: Sequence[AppliedStep]) -> float:
    """The median time from the end of a step to the end of the next one."""
    return _median_gap_us([step.end_us for step in steps]) / 1e6


def middle_of_next_us(ends_us: Sequence[int]) -> float:
    """When the next step will be half done, by the ends of all steps so far."""
    return ends_us[-1] + _median_gap_us(ends_us[WARM_UP:]) / 2


def _median_gap_us(ends_us: Sequence[int]) -> float:
    return median(after - before for before, after in pairwise(ends_us))


def unseen_loss(sizes: Sizes, model: nn.Module) -> float:
    """The mean loss of a model over samples that no run comes to."""
    batches = sizes.batches()
    chains = [(pipeline, index) for pipeline in range(sizes.pipelines) for index in range(sizes.microbatches)]
    with torch.no_grad():
        pairs = (batches.get(step, *chain) for step in _UNSEEN_STEPS for chain in chains)
        return fmean(next_byte_loss(model(inputs), targets).item() for inputs, targets in pairs)


class _KillInStep:
    """The log of a ReCycle run, in which a worker is killed in the middle of the step after `kill_after` steps."""

    def __init__(self, victim: str, kill_after: int) -> None:
        self._victim, self._kill_after = victim, kill_after
        self.log, self.killed_us = RunLog(), 0
        self.step_ends_us: dict[int, int] = {}
        self.computed: dict[int, set[MicroBatch]] = {}
        self.num_discarded = 0

    def observe(self, event: Event) -> None:
        self.log.observe(event)
        match event:
            case OpRan(op=text) if text not in (REDUCE, OPTIMIZER):
                self._count(event)
            case Stepped():
                self.step_ends_us[event.iteration] = event.at_us
                if len(self.step_ends_us) == self._kill_after:
                    self._plan_kill()

    def _count(self, ran: OpRan) -> None:
        op = Op.parse(ran.op)
        if op.kind is Kind.F and ran.is_in_vain:
            self.num_discarded += 1
        elif op.kind is Kind.F:
            self.computed.setdefault(ran.iteration, set()).add(op.microbatch)

    def _plan_kill(self) -> None:
        due_us = self.log.zero_us + middle_of_next_us(sorted(self.step_ends_us.values()))
        timer = Timer(max(0.0, (due_us - now_us()) / 1e6), self._kill, [self.log.pids[self._victim]])
        timer.daemon = True
        timer.start()

    def _kill(self, pid: int) -> None:
        self.killed_us = now_us()
        os.kill(pid, signal.SIGKILL)


def run_recycle(trial: Trial) -> KilledRun:
    """Train by ReCycle with pipelines of one stage. The launcher does not start the victim again."""
    watched = _KillInStep(f"W{VICTIM}_0", trial.kill_after)
    options = replace(OPTIONS, checkpoint=CheckpointOptions(0), failures=FailureOptions(restarts=0))
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        train(trial.sizes, trial.num_steps, trial.limit_s, watch=watched.observe, out=folder, options=options)
        stages = trial.sizes.gpt()
        load(stages, folder)
    log = watched.log
    if not watched.killed_us or not log.recoveries:
        raise RuntimeError(f"ReCycle ended without a recovery; W{VICTIM}_0 was {'' if watched.killed_us else 'not '}killed")
    first_op_us, steps = log.zero_us + log.first_ops_us[0], list[AppliedStep]()
    for iteration, at_us in sorted(watched.step_ends_us.items()):
        end_us, num_samples = log.zero_us + at_us, len(watched.computed[iteration]) * SAMPLES
        # If the victim had finished its part of this step, the report of that died with it, and the step is like the last one.
        num_samples = steps[-1].num_samples if watched.killed_us < end_us < first_op_us else num_samples
        steps.append(AppliedStep(end_us, num_samples))
    loss = unseen_loss(trial.sizes, stages[0])
    num_with_victim = sum(step.end_us <= first_op_us for step in steps)
    return KilledRun(watched.killed_us, first_op_us, tuple(steps), num_with_victim, watched.num_discarded, loss)
