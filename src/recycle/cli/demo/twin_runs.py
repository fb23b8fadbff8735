"""The two runs of `recycle demo`: a small GPT trained in exact mode with failures and without, and the comparison of both."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recycle.cli.live.live_view import LiveView
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_plan
from recycle.cli.training.train_config import TrainConfig
from recycle.cli.training.train_sections import ClusterSection, DataSection, ModelSection, TrainingSection
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Event, Recovered, Spell, Stepped
from recycle.core.plans.plan_source import PlanSource
from recycle.planner.heuristic.greedy import compile_kernels
from recycle.planner.live_planner import Planner

if TYPE_CHECKING:
    from recycle.runtime.job import Job

FEWEST_STEPS = 12


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The model, the number of steps and the failures.

    `killed` comes back early enough for its process to load while there still are steps, also where steps are short.
    """

    shape: Shape
    killed: Worker
    hung: Worker
    num_layers: int
    width: int
    context: int
    num_steps: int
    lease_s: float = 2.0

    def __post_init__(self) -> None:
        if self.num_steps < FEWEST_STEPS:
            raise UserError(
                f"{self.num_steps} steps are too few for somebody to die, to hang and to come back: give at least {FEWEST_STEPS}"
            )

    @property
    def injections(self) -> tuple[Injection, Injection, Injection]:
        """The kill, the hang and the rejoin."""
        return (
            Injection(Action.KILL, self.killed, self.num_steps // 6 - 1),
            Injection(Action.HANG, self.hung, 7 * self.num_steps // 24 - 1),
            Injection(Action.REJOIN, self.killed, 5 * self.num_steps // 12 - 1),
        )

    @property
    def script(self) -> Script:
        """The failures, checked to be possible."""
        return Script.of(self.injections, self.shape, self.num_steps)


# Both runs of the first take some 130 s of processor time together: a bit more than a minute where two cores do nothing else.
FULL = DemoSettings(Shape(3, 4, 6), Worker(1, 2), Worker(0, 1), num_layers=8, width=64, context=64, num_steps=40)
QUICK = replace(FULL, num_layers=4, width=32, context=32, num_steps=36)


@dataclass(frozen=True, slots=True)
class Twins:
    """The losses and weights of two runs, one with failures and its twin without, which should be equal."""

    losses: tuple[float, ...]
    twin_losses: tuple[float, ...]
    weights_sha256: str
    twin_weights_sha256: str

    @property
    def first_unequal(self) -> int | None:
        """The first step, counted from 1, whose losses are not the same bit for bit; None if all are."""
        pairs = zip_longest(map(float.hex, self.losses), map(float.hex, self.twin_losses))
        return next((step for step, (one, other) in enumerate(pairs, start=1) if one != other), None)

    @property
    def has_equal_weights(self) -> bool:
        return self.weights_sha256 == self.twin_weights_sha256

    @property
    def are_equal(self) -> bool:
        return self.first_unequal is None and self.has_equal_weights


@dataclass(frozen=True, slots=True)
class DemoPhase:
    """A part of a run with the same workers: the dead, those that had just rejoined, and the median iteration.

    `expected_us` is the iteration time of the plan at the measured speed of ops, `period_us` that at the costs of the plan.
    """

    dead: tuple[str, ...]
    back: tuple[str, ...]
    num_live: int
    num_steps: int
    iteration_us: int
    expected_us: int
    period_us: int

    def to_json(self) -> dict[str, Any]:
        return {
            "dead": list(self.dead),
            "back": list(self.back),
            "workers": self.num_live,
            "steps": self.num_steps,
            "iteration_us": self.iteration_us,
            "planned_iteration_us": self.expected_us,
            "period_us": self.period_us,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the demo. The twin has recoveries only if it lost a worker by accident."""

    twins: Twins
    phases: tuple[DemoPhase, ...]
    recoveries: tuple[Recovered, ...]
    twin_recoveries: tuple[Recovered, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.twins.are_equal,
            "weights_sha256": self.twins.weights_sha256,
            "twin_weights_sha256": self.twins.twin_weights_sha256,
            "losses": _finite(self.twins.losses),
            "twin_losses": _finite(self.twins.twin_losses),
            "phases": [phase.to_json() for phase in self.phases],
            "recoveries": [recovered.to_json() for recovered in self.recoveries],
            "twin_recoveries": [recovered.to_json() for recovered in self.twin_recoveries],
            "seconds": round(self.seconds, 1),
        }


def _finite(losses: Iterable[float]) -> list[float | None]:
    """Losses as JSON, which has no NaN."""
    return [loss if math.isfinite(loss) else None for loss in losses]


def iteration_times_us(events: Sequence[Event]) -> dict[int, tuple[int, int]]:
    """The measured and the planned time of every iteration; the spell of an iteration ends with its step."""
    spells_us = {event.end_us: event.length_us for event in events if isinstance(event, Spell) and event.state == "train"}
    return {event.iteration: (spells_us[event.at_us], event.planned_us) for event in events if isinstance(event, Stepped)}


def phases(
    shape: Shape, recoveries: Sequence[Recovered], times_us: Mapping[int, tuple[int, int]], source: PlanSource
) -> tuple[DemoPhase, ...]:
    """Cut a run where a worker left or joined. A phase in which no step was done is left out."""
    made, dead, back, num_live = [], frozenset[str](), tuple[str, ...](), shape.num_workers
    starts = [0, *(recovered.iteration for recovered in recoveries)]
    ends = [*starts[1:], max(times_us, default=-1) + 1]
    for recovered, start, end in zip([None, *recoveries], starts, ends, strict=True):
        if recovered is not None:
            dead = (dead | recovered.emptied) - recovered.filled
            back = recovered.workers if recovered.joins else ()
            num_live = recovered.num_live
        if times := [times_us[iteration] for iteration in range(start, end) if iteration in times_us]:
            took_us, expected_us = (round(median(column)) for column in zip(*times, strict=True))
            period_us = source.answer(frozenset(map(Worker.parse, dead))).plan.period_us
            made.append(DemoPhase(tuple(sorted(dead)), back, num_live, len(times), took_us, expected_us, period_us))
    return tuple(made)


def make_demo_job(setting: DemoSettings) -> "Job":
    """Load torch, plan, and make the job of the run without failures. Its options have the source of plans for both runs."""
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise UserError(
            f"the demo trains a model, which needs torch ({missing}): install it with pip install -e '.[train]' in a clone of "
            "ReCycle, or let 'recycle demo --plans' draw plans without it"
        ) from None
    shape = setting.shape
    config = TrainConfig(
        # It shows failures alone: a busy machine, on which workers differ, must not change the plan in between.
        ClusterSection(shape.num_pipelines, shape.num_stages, shape.num_microbatches, lease=setting.lease_s, follow_speeds=False),
        ModelSection(setting.num_layers, setting.width, context=setting.context),
        DataSection(samples=1),
        TrainingSection(setting.num_steps, seed=0, exact=True),
    )
    compile_kernels()  # before training begins: the first time on a machine it takes a while
    plan = choose_plan(config.cluster)
    # No worker changes its stage, so that a worker that rejoins finds its old place: easier to follow on the screen.
    return TrainingJobFactory(config).job(plan, plan_source=Planner(plan.problem, may_move=False, given=plan))


def perform(
    setting: DemoSettings,
    job: "Job",
    say: Callable[[str], None],
    out: Path | None = None,
    injections: "Connection[Any, Any] | None" = None,
) -> Outcome:
    """Train with failures, then without, each with a live view; `say` gets the sentence in between.

    The run with failures is recorded in `out`, and more failures may be asked for over the pipe `injections`.
    """
    from recycle.runtime.launch.local_launcher import launch

    begun_s, events, failures = time.monotonic(), list[Event](), job.options.failures
    assert failures.plan_source is not None
    with LiveView(setting.num_steps, setting.shape) as view:

        def watch(event: Event) -> None:
            events.append(event)
            view.observe(event)

        options = replace(job.options, failures=replace(failures, script=setting.script))
        run = launch(replace(job, options=options, out=out), watch, injections=injections)
    say("Now the twin: the same seed, the same data, and nobody fails.")
    with LiveView(setting.num_steps) as view:
        twin = launch(job, view.observe)
    return Outcome(
        Twins(run.losses, twin.losses, run.weights_sha256, twin.weights_sha256),
        phases(setting.shape, run.recoveries, iteration_times_us(events), failures.plan_source),
        run.recoveries,
        twin.recoveries,
        time.monotonic() - begun_s,
    )
