"""RunConstants: the pauses of a recovery as a real run measured them, at the number of workers that is asked for.

A run of `recycle train` records the parts of each of its recoveries. The medians of those after failures replace the assumed
constants. Detection, abort and plan stay as they were measured: a death is pushed over a connection of its own, every worker
aborts by itself, and plans are made ahead. What grows is the work of the coordinator, which stops all workers, hears from all and
lets all go on. That was measured with 16 to 2,048 workers (docs/benchmarks/2026-11-17-control.md, `death to go`), and this growth
is added to the part `regroup`:

    regroup at N workers = regroup in a run of n workers + control(N) - control(n)

`control` goes through the measured points, straight between two of them where both axes are logarithmic, and on like that beyond
the last ones. Connections between workers add nothing: a worker has a handful, whatever the size of the cluster. Transfers and
repeated work are no constants: the simulator computes both from the job.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import Event, Recovered, Suspected
from recycle.core.events.record_file import RECORD, read_record
from recycle.sim.systems.constants import Constants

# Workers, and milliseconds from the death of one until the last other worker may go on.
DEATH_TO_GO_MS = ((16, 15), (64, 37), (256, 107), (1024, 483), (2048, 1431))
_PARTS = ("detect", "abort", "plan", "regroup")


def control_us(num_workers: int) -> float:
    """How long the coordinator takes from a death until all workers may go on, by the measured law."""
    last = len(DEATH_TO_GO_MS) - 2
    for number, ((few, fast), (many, slow)) in enumerate(pairwise(DEATH_TO_GO_MS)):
        if num_workers <= many or number == last:
            slope = math.log(slow / fast) / math.log(many / few)
            return float(1000 * fast * (max(1, num_workers) / few) ** slope)
    raise AssertionError("the last pair has returned")


@dataclass(frozen=True, slots=True)
class RunConstants:
    """The medians of the parts of a run's recoveries from failures, in a job of so many workers.

    `hang_us` is the median time until a worker was noticed that hung, None if none did.
    """

    num_recoveries: int
    num_workers: int
    detect_us: int
    abort_us: int
    plan_us: int
    regroup_us: int
    hang_us: int | None = None

    def regroup_at_us(self, num_workers: int) -> int:
        """The part `regroup` with so many workers."""
        return max(0, round(self.regroup_us + control_us(num_workers) - control_us(self.num_workers)))

    def applied(self, constants: Constants, num_workers: int) -> Constants:
        """The constants with these pauses at so many workers.

        They are those of ReCycle, and of the systems whose pauses are assumed to be as long as those of ReCycle.
        """
        notice = {"detect_us": self.detect_us} | ({} if self.hang_us is None else {"hang_us": self.hang_us})
        switch: dict[str, Any] = {**notice, "plan_us": self.plan_us, "regroup_us": self.regroup_at_us(num_workers)}
        return replace(
            constants,
            recycle=replace(constants.recycle, **switch, abort_us=self.abort_us),
            odyssey=replace(constants.odyssey, **switch),
            resihp=replace(constants.resihp, **switch),
            elaswave=replace(constants.elaswave, **notice),
        )

    def to_json(self, num_workers: int) -> dict[str, Any]:
        return {
            "recoveries": self.num_recoveries,
            "workers": self.num_workers,
            "detect_us": self.detect_us,
            "abort_us": self.abort_us,
            "plan_us": self.plan_us,
            "regroup_us": self.regroup_us,
            "hang_us": self.hang_us,
            "regroup_at_scale_us": self.regroup_at_us(num_workers),
        }


def read_run_constants(folder: Path) -> RunConstants:
    """The constants of the run in this folder, as `recycle train` wrote it."""
    record = folder / RECORD
    if not record.exists():
        raise FileProblem(f"{folder} is not the folder of a run: it has no {RECORD}; give one that 'recycle train --out' wrote")
    found = run_constants(read_record(record, num_bytes_without_ops=record.stat().st_size, is_packed=True))
    if found is None:
        raise FileProblem(f"the run in {folder} has no recovery from a failure, so that it measured no pauses: give one that has")
    return found


def run_constants(events: Iterable[Event]) -> RunConstants | None:
    """The constants by the events of a run; None if no worker failed in it, or no recovery has its parts."""
    failures: list[Recovered] = []
    suspected: list[Suspected] = []
    for event in events:
        if isinstance(event, Suspected):
            suspected.append(event)
        elif isinstance(event, Recovered) and event.workers and not event.joins and sum(event.parts_us.values()):
            failures.append(event)
    if not failures:
        return None
    hangs = [one for one in failures if _is_hang(one, suspected)]
    # A hang is noticed by its time-out: that is no detection of a death.
    deaths = [one for one in failures if one not in hangs] or failures
    parts = {f"{part}_us": _median(one.parts_us[part] for one in (deaths if part == "detect" else failures)) for part in _PARTS}
    num_workers = max(one.num_live + len(one.workers) for one in failures)
    return RunConstants(len(failures), num_workers, **parts, hang_us=_median(one.detect_us for one in hangs) if hangs else None)


def _is_hang(recovered: Recovered, suspected: list[Suspected]) -> bool:
    return any(one.node in recovered.workers and recovered.at_us <= one.at_us <= recovered.end_us for one in suspected)


def _median(times_us: Iterable[int]) -> int:
    return round(median(times_us))
