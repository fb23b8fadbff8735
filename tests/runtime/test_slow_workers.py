"""Slow workers in real processes: they are named, the plan follows them, and no weight changes by a bit."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Changed, Event, OpRan, Placed, Recovered, SpeedChanged, Stepped
from recycle.core.plans.plan import Plan
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import FailureOptions, TrainOptions
from tests.processes import depends_on_load
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, adamw, loss
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(300)
SHAPE, LAYERS, STEPS, SEED = (3, 2, 4), 6, 24, 5
SLOW = "W1_1"
SECONDS = 0.005
# Speeds are measured, here beside other tests. A worker at 0.3 is told from a healthy one; exact figures are `make bench`'s.
AT_30_PERCENT = pytest.approx(0.3, abs=0.2)
HEALTHY = 0.6


class _Takes(torch.autograd.Function):
    """Passes a tensor on, and takes a time that does not depend on how busy the machine is."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Layer(nn.Module):
    """A layer that takes so long in each direction."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Takes.apply(self.inner(x), self.seconds)  # type: ignore[no-untyped-call]
        return y


def stages(seconds: float = SECONDS) -> list[nn.Module]:
    torch.manual_seed(11)
    return recycle.cut(nn.Sequential(*(Layer(seconds) for _ in range(LAYERS))), [LAYERS // 2])


def problem(shared: int = 0) -> recycle.Problem:
    layers = {"layers": LAYERS, "shared_layers": shared} if shared else {}
    return recycle.problem(*SHAPE, costs=(9000, 9000, 100), **layers)


@cache
def undisturbed(steps: int = STEPS) -> str:
    """The weights of stages that nobody disturbs, in one process."""
    plan = recycle.solve(problem(), "greedy", effort=1000)
    job = ReferenceExecutor(plan, stages(0), Numbers(), loss, adamw, seed=SEED, is_exact=True)
    for step in range(steps):
        job.iterate(step)
    return job.weights_sha256()


@dataclass
class Watched:
    """What was seen of a run; `act` is called with each event, and with the process of each place."""

    act: Callable[[Event, dict[str, int]], None] = lambda event, pids: None
    events: list[Event] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    trained: Trained | None = None

    def observe(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Placed):
            self.pids[event.node] = event.pid
        self.act(event, self.pids)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def replans(self) -> list[Recovered]:
        return [event for event in self.of(Recovered) if not event.workers]

    def num_ops(self, worker: str, iteration: int) -> int:
        return sum(
            1 for event in self.of(OpRan) if event.worker == worker and event.iteration == iteration and event.op[1] == "F"
        )


def run(
    *lines: str,
    shared: int = 0,
    steps: int = STEPS,
    out: Path | None = None,
    act: Callable[[Event, dict[str, int]], None] = lambda event, pids: None,
    follows: bool = True,
    restarts: int = 0,
) -> Watched:
    """A run by a script, whose weights must be those of the undisturbed one."""
    wanted = problem(shared)
    source = recycle.Planner(wanted, may_move=False)
    injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
    script = Script.of(injections, wanted.shape, steps)
    failures = FailureOptions(source, script, lease_s=LEASE_S, restarts=restarts, follow_speeds=follows)
    options = TrainOptions(SEED, True, failures=failures)
    watched = Watched(act)
    job = Job(source.answer(frozenset()).plan, stages(), Numbers(), loss, adamw, steps, out=out, options=options)
    watched.trained = launch(job, watched.observe)
    assert not multiprocessing.active_children()
    assert watched.trained.weights_sha256 == undisturbed(steps)
    return watched


def last_plan(folder: Path) -> Plan:
    """The plan of the last epoch of a run."""
    plans = sorted((folder / "plans").glob("*.json"), key=lambda path: int("".join(filter(str.isdigit, path.stem))))
    return Plan.load(plans[-1])


def speeds_of(plan: Plan) -> dict[str, float]:
    return {str(worker): speed for worker, speed in plan.problem.speeds}


def named(events: Sequence[SpeedChanged], worker: str) -> list[SpeedChanged]:
    return [event for event in events if event.node == worker]


@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_slow_worker_is_named_and_gets_less_to_do(tmp_path: Path, shared: int) -> None:
    seen = run(f"slow {SLOW}@3:x0.3", shared=shared, out=tmp_path)
    first, last = named(seen.of(SpeedChanged), SLOW)[0], max(event.iteration for event in seen.of(Stepped))
    with depends_on_load():
        assert first.speed == AT_30_PERCENT
        assert first.iteration in (2, 3)
        assert seen.replans
        assert SLOW in seen.replans[0].cause
        assert seen.replans[0].iteration < STEPS - 2  # how soon, `bench cluster` measures
        assert speeds_of(last_plan(tmp_path))[SLOW] == AT_30_PERCENT
        assert seen.num_ops(SLOW, last) < min(seen.num_ops(peer, last) for peer in ("W0_1", "W2_1"))
    assert bool(last_plan(tmp_path).cuts) == bool(shared)


@pytest.mark.slow
def test_a_worker_that_is_itself_again_gets_its_work_back(tmp_path: Path) -> None:
    seen = run(f"slow {SLOW}@3-9:x0.3", steps=40, out=tmp_path)
    fewest = min(seen.num_ops(SLOW, event.iteration) for event in seen.of(Stepped))
    with depends_on_load():
        assert [event.speed for event in named(seen.of(SpeedChanged), SLOW)][-1] > HEALTHY
        assert len(seen.replans) >= 2
        assert speeds_of(last_plan(tmp_path)).get(SLOW, 1.0) > HEALTHY
        assert seen.num_ops(SLOW, 39) > fewest


@pytest.mark.slow
def test_failures_of_a_slow_worker_and_of_others_are_answered_with_plans_for_the_speeds(tmp_path: Path) -> None:
    seen = run(f"slow {SLOW}@3:x0.3", "kill W0_0@14", "kill W0_1@17", out=tmp_path)
    assert [event.workers for event in seen.of(Recovered) if event.workers] == [("W0_0",), ("W0_1",)]
    its_own = run(f"slow {SLOW}@3:x0.3", f"kill {SLOW}@15")
    with depends_on_load():
        assert speeds_of(last_plan(tmp_path))[SLOW] == AT_30_PERCENT
        assert its_own.replans


def test_a_kill_while_the_plan_changes_changes_no_weight() -> None:
    killed: list[str] = []

    def kill_at_change(event: Event, pids: dict[str, int]) -> None:
        if isinstance(event, SpeedChanged) and event.node == SLOW and not killed:
            killed.append("W2_0")
            os.kill(pids["W2_0"], signal.SIGKILL)

    seen = run(f"slow {SLOW}@3:x0.3", act=kill_at_change)
    with depends_on_load():
        assert killed
    assert [event.workers for event in seen.of(Recovered) if event.workers] == [("W2_0",)]


def test_another_coordinator_knows_the_speeds_of_the_plan_in_its_journal(tmp_path: Path) -> None:
    seen = run(f"slow {SLOW}@3:x0.3", "kill coordinator@14", "kill W0_0@16", out=tmp_path)
    assert [event.workers for event in seen.of(Recovered) if event.workers] == [("W0_0",)]
    with depends_on_load():
        assert seen.replans
        assert speeds_of(last_plan(tmp_path))[SLOW] == AT_30_PERCENT


def test_a_worker_that_is_far_too_slow_is_left_out_and_not_started_again() -> None:
    seen = run(f"slow {SLOW}@3:x0.05", restarts=3)
    (left,) = [event for event in seen.of(Recovered) if "left out" in event.cause]
    assert left.workers == (SLOW,)
    assert left.redone_ops == 0
    assert [event.joins for event in seen.of(Changed) if event.node == SLOW][-1] is False
    assert seen.trained is not None
    assert any(SLOW in warning and "left out" in warning for warning in seen.trained.warnings)


def test_a_job_that_does_not_follow_speeds_names_slow_workers_and_keeps_its_plan() -> None:
    seen = run(f"slow {SLOW}@3:x0.3", steps=12, follows=False)
    assert not seen.of(Recovered)
    with depends_on_load():
        assert named(seen.of(SpeedChanged), SLOW)
