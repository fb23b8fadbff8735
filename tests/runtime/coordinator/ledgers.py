"""Ledgers of a run of four workers, the reports that they get, and what they wrote."""

from recycle.core.cluster import Worker
from recycle.core.events.record import OpRan, OpsRan, Spell, Stepped
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import IterationApplied, StepUndone
from tests.runtime.jobs import greedy_plan

NAMES = ["W0_0", "W0_1", "W1_0", "W1_1"]
MEMBERS = {number: Worker.parse(name) for number, name in enumerate(NAMES)}
WITHOUT_LAST = {number: MEMBERS[number] for number in (0, 1, 2)}
SURVIVORS = [name for name in NAMES if name != "W1_1"]
SAMPLES = 8


def plan(fail=""):
    return greedy_plan((2, 2, 2), fail, costs=(1, 1, 1))


def open_ledger(**options):
    """The ledger of a run of four workers that began at 0, and the events that it writes."""
    written = []
    ledger = RunLedger(plan(), SAMPLES, plan().problem.profile, options.pop("publish", written.extend), begin_us=0, **options)
    ledger.start_epoch(plan(), ledger.num_steps, MEMBERS, MEMBERS.keys())
    return ledger, written


def unpacked(events):
    """The events as a reader of the record gets them: one for each op."""
    return [one for event in events for one in (event.each() if isinstance(event, OpsRan) else [event])]


def add(ledger, *reports):
    """Add the reports of the members that have their places from the beginning."""
    for report in reports:
        ledger.add(NAMES.index(str(report.worker)), report)


def applied(name, iteration, loss=1.0, later_us=0):
    """A worker's report of an iteration; workers of the last stage know the losses."""
    worker = Worker.parse(name)
    losses = dict.fromkeys(range(4), loss) if worker.stage == 1 else {}
    start_us = 100 * (iteration + 1) + later_us
    return IterationApplied(
        worker, iteration, losses, columns_of([Span(f"{worker.stage}F0@0", start_us, start_us + 50)]), StepVerdict(1.0, 1.0)
    )


def report(ledger, names, iteration, loss=1.0):
    add(ledger, *[applied(name, iteration, loss) for name in names])


def start_epoch(ledger, made, iteration, survivors):
    """Start an epoch with the members of the plan at their first places; only the survivors keep their state."""
    members = {NAMES.index(str(row.worker)): row.worker for row in made.rows}
    ledger.start_epoch(made, iteration, members, {NAMES.index(name) for name in survivors})


def undo(ledger, name, iteration, *times_us):
    """A worker reports the ops that it had run of an iteration when it was stopped."""
    worker = Worker.parse(name)
    add(
        ledger,
        StepUndone(worker, iteration, columns_of(Span(f"{worker.stage}F{n}@0", *times) for n, times in enumerate(times_us))),
    )


def of(written, kind):
    return [event for event in unpacked(written) if isinstance(event, kind)]


def spells(written):
    return [(spell.start_us, spell.end_us, spell.state, spell.cause) for spell in of(written, Spell)]


def steps(written):
    return [(event.iteration, event.loss) for event in written if isinstance(event, Stepped)]


def ops(written, iteration):
    return [event.worker for event in of(written, OpRan) if event.iteration == iteration]
