"""Kills on a measured cluster: a training run in which one worker after the other is killed, and rejoins."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import count
from math import gcd
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Event, Recovered
from recycle.core.files import write_text
from recycle.core.plans.plan_source import PlanFolder
from recycle.evaluate.hardware.setup import Setup
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import FailureOptions

RECOVERIES, DEATHS = "recoveries.json", "deaths"
PARTS = ("detect", "abort", "plan", "regroup", "transfer")
# From one victim to the next, at least.
_STRIDE = 7


@dataclass(frozen=True, slots=True)
class MeasuredRecovery:
    """A kill or a rejoin: its worker, its step, and the time from it to the first op after it, also by part."""

    worker: str
    joins: bool
    iteration: int
    took_us: int
    redone_ops: int
    parts_us: Mapping[str, int]


def script(setup: Setup, num_kills: int, gap: int) -> Script:
    """Every `gap` steps a worker is killed, every one before one is killed again, and one step later it is started again."""
    workers = list(setup.shape.workers())
    stride = next(number for number in count(_STRIDE) if gcd(number, len(workers)) == 1)
    injections = []
    for number in range(num_kills):
        victim, step = workers[stride * number % len(workers)], gap * (number + 1)
        injections.append(Injection.parse(Action("kill"), f"{victim}@{step}"))
        injections.append(Injection.parse(Action("rejoin"), f"{victim}@{step + 1}"))
    return Script(tuple(injections))


def measure_recoveries(folder: Path, setup: Setup, num_kills: int, gap: int, say: Callable[[str], None]) -> None:
    """Kill so many workers, unless that was done."""
    if (folder / RECOVERIES).exists():
        return
    source = PlanFolder(folder / DEATHS)  # plans from files, so that this runs where no planner is installed
    plan = source.answer(frozenset()).plan
    found: list[MeasuredRecovery] = []

    def watch(event: Event) -> None:
        if isinstance(event, Recovered):
            parts_us = {part: event.parts_us[part] for part in PARTS}
            about = event.joins, event.iteration, event.end_us - event.at_us, event.redone_ops, parts_us
            found.extend(MeasuredRecovery(worker, *about) for worker in event.workers)
            one = found[-1]
            say(f"{one.worker} {'is back' if one.joins else 'was killed'}: {one.took_us / 1e3:.0f} ms to the first op after it")

    steps = gap * (num_kills + 1)  # the last one has time to come back
    launch(setup.job(plan, steps, FailureOptions(source, script(setup, num_kills, gap))), watch)
    write_text(folder / RECOVERIES, json.dumps([asdict(one) for one in found], indent=1) + "\n")


def read_recoveries(folder: Path) -> list[MeasuredRecovery]:
    """What was measured; nothing if it was not yet."""
    path = folder / RECOVERIES
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [MeasuredRecovery(**{field.name: row[field.name] for field in fields(MeasuredRecovery)}) for row in rows]
    except (ValueError, KeyError, TypeError) as problem:
        raise FileProblem(f"{path} is not a list of recoveries: {problem}; remove it to measure them again") from None
