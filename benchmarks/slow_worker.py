"""The benchmark of slow workers: how soon the plan follows a worker that becomes slow while a job runs, and what is kept.

python benchmarks/slow_worker.py            twelve workers, one of which falls to 60 % of its speed
python benchmarks/slow_worker.py --quick    fewer workers and shorter ops
python benchmarks/slow_worker.py --save     also writes docs/benchmarks/<date>-slow_worker.md

Three pipelines of four stages, with 24 equal layers of which two on either side of a boundary are shared, are trained by real
processes. Layers sleep for their time in the place of computing, so that two cores are enough for all processes, and no worker
holds up another. The slow worker sleeps longer. The coordinator measures speeds and changes the plan as in every run of
`recycle train`: nobody tells it which worker is slow.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from sheet import NO, YES, Case, Row, Script, Section
from timed_layers import TimedLinear
from torch import Tensor, nn

import recycle
from recycle.core.events.failure_script import Action, Injection
from recycle.core.events.failure_script import Script as FailureScript
from recycle.core.events.record import Event, Recovered, SpeedChanged, Stepped
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import FailureOptions, TrainOptions

WIDTH, SHARED, SPEED = 8, 2, 0.6
LEAST_KEPT, MOST_ITERATIONS = 0.92, 10
_SETTLED = 3
"""Iterations after the start or after a change of the plan that do not count."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A job: its cluster, the time of a layer's forward pass, the step from which the worker is slow, and the number of steps."""

    pipelines: int
    stages: int
    microbatches: int
    layers: int
    layer_ms: float
    slow_from: int
    steps: int

    @property
    def slow(self) -> str:
        """The worker that becomes slow, in the middle of the second pipeline."""
        return f"W1_{self.stages // 2}"

    @property
    def problem(self) -> recycle.Problem:
        op_us = round(1000 * self.layer_ms * self.layers / self.stages)
        shape = self.pipelines, self.stages, self.microbatches
        # Both parts of a backward pass are in I; W computes a product of two small matrices.
        return recycle.problem(*shape, costs=(op_us, 2 * op_us, 100), layers=self.layers, shared_layers=SHARED)


USUAL = tuple(Setting(3, 4, microbatches, 24, 5.0, 14, 44) for microbatches in (6, 24))
QUICK = (Setting(3, 2, 4, 6, 3.0, 6, 30),)


class Numbers:
    """A dataset whose samples cost nothing."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), number / 4096), torch.ones(WIDTH)


@dataclass
class Seen:
    """What was seen of a run: when its steps ended, when the worker was named, and when the plan changed, by iteration."""

    ends_us: list[int] = field(default_factory=list)
    named: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    replans: list[Recovered] = field(default_factory=list)

    def observe(self, event: Event) -> None:
        match event:
            case Stepped():
                self.ends_us.append(event.at_us)
            case SpeedChanged() if event.speed < 1:
                self.named.setdefault(event.node, (event.iteration, len(self.ends_us), event.speed))
            case Recovered() if not event.workers:
                self.replans.append(event)


def run(setting: Setting) -> Seen:
    """Train while the worker becomes slow."""
    torch.manual_seed(1)
    layers = [TimedLinear(WIDTH, setting.layer_ms) for _ in range(setting.layers)]
    each = setting.layers // setting.stages
    stages = recycle.cut(nn.Sequential(*layers), [each * stage for stage in range(1, setting.stages)])
    source = recycle.Planner(setting.problem, may_move=False)
    injection = Injection.parse(Action.SLOW, f"{setting.slow}@{setting.slow_from}:x{SPEED}")
    script = FailureScript.of([injection], setting.problem.shape, setting.steps)
    options = TrainOptions(failures=FailureOptions(source, script))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    plan, seen = source.answer(frozenset()).plan, Seen()
    launch(Job(plan, stages, Numbers(), nn.functional.mse_loss, optimizer, setting.steps, 1, options=options), seen.observe)
    return seen


def row(setting: Setting) -> Row:
    """The iterations before, and by the old and by the new plan after the worker became slow."""
    seen = run(setting)
    took_us = [after - before for before, after in pairwise(seen.ends_us)]
    slow = setting.slow_from - 1  # iterations count from 0; the time of iteration i is took_us[i - 1]
    before_us = median(took_us[_SETTLED : slow - 1])
    shape = f"{setting.pipelines} × {setting.stages}, {setting.microbatches}"
    replans = [event.iteration for event in seen.replans if event.iteration > slow]
    if setting.slow not in seen.named or not replans or not took_us[replans[-1] + 1 :]:
        return shape, f"{before_us / 1e3:.0f} ms", "–", "–", "never", "never, or too late", "–", f"{LEAST_KEPT:.0%}", NO
    begun = replans[0]
    by_old_us = median(took_us[slow : begun - 1] or took_us[slow:begun])
    by_new_us = median(took_us[replans[-1] + 1 :])
    kept = before_us / by_new_us
    is_met = kept >= LEAST_KEPT and begun - slow <= MOST_ITERATIONS and set(seen.named) == {setting.slow}
    return (
        shape,
        f"{before_us / 1e3:.0f} ms",
        f"{by_old_us / 1e3:.0f} ms ({before_us / by_old_us:.1%})",
        f"{by_new_us / 1e3:.0f} ms",
        f"{seen.named[setting.slow][1] - slow} iterations",
        f"{begun - slow} iterations",
        f"{kept:.1%}",
        f"{LEAST_KEPT:.0%}",
        YES if is_met else NO,
    )


def sections(name: str, is_quick: bool) -> list[Section]:
    settings = QUICK if is_quick else USUAL
    first = settings[0]
    about = (
        f"{first.pipelines * first.stages} workers, {first.layers} equal layers of {first.layer_ms:g} ms forward and "
        f"{2 * first.layer_ms:g} ms backward, which sleep in the place of computing; {SHARED} layers shared. {first.slow} falls "
        f"to {SPEED:.0%} of its speed in step {first.slow_from} and stays slow. Medians of iterations before that, after it by "
        "the old plan, and by the last plan. Named and planned: after how many slow iterations the worker was named, and the "
        f"first plan for its speed began. The target: at least {LEAST_KEPT:.0%} of the speed before, by a plan that begins "
        f"within {MOST_ITERATIONS} iterations, and no other worker named."
    )
    header = ("D × S, M", "before", "slow, old plan", "new plan", "named after", "planned after", "kept", "asked", "met")
    cases = [Case(f"{one.microbatches} micro-batches", partial(row, one)) for one in settings]
    return [Section("slow", "A worker becomes slow while the job runs", about, header, tuple(cases))]


if __name__ == "__main__":
    script = Script("slow_worker", __doc__ or "", ("slow",), "fewer workers and shorter ops", libraries=("torch",))
    raise SystemExit(script.run(sections))
