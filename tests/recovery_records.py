"""Recovery events for tests: two by themselves, and the record of a run in which a worker dies in the middle of an iteration
and joins again, with three epochs and two plans."""

from msgspec.structs import replace

from recycle.core.events.record import Changed, Event, Joining, OpRan, Recovered, Spell, Started, Stepped
from recycle.core.plans.plan import Plan
from recycle.core.problem import Techniques
from recycle.sim.replay.replay import Conditions, replay
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan

# Of 12 workers one dies, and comes back.
LEFT = Recovered(
    9_000_000,
    9_136_000,
    epoch=1,
    workers=("W1_2",),
    joins=False,
    cause="its connection closed",
    iteration=5,
    detect_us=3000,
    abort_us=41_000,
    regroup_us=92_000,
    redo_us=310_000,
    redone_ops=14,
    num_live=11,
)
JOINED = Recovered(20_000_000, 20_050_000, 2, ("W1_2",), True, "it asked to join", 11, transfer_us=50_000, num_live=12)

START_US, REDO_US, SAMPLES = 50_000, 20_000, 8
# The iterations of each epoch: 0 to 4 with all workers, 5 to 8 without W1_1, 9 to 13 with all workers again.
EPOCHS = ((0, 5), (5, 9), (9, 14))


def whole_plan() -> Plan:
    """2 pipelines of 2 stages, all workers alive."""
    return make_1f1b_plan(2, 2, 2, costly_profile(2), Techniques())


def degraded_plan() -> Plan:
    """The same without W1_1."""
    return make_rerouted_plan(profile=costly_profile(2))


def played(plan: Plan, first: int, last: int, at_us: int) -> tuple[list[OpRan], list[Event], int]:
    """Iterations from `first` up to `last` by a plan, from `at_us` on: ops, their spells and steps, and when they ended."""
    ran = [
        replace(op, iteration=op.iteration + first, start_us=op.start_us + at_us, end_us=op.end_us + at_us)
        for op in replay(plan, Conditions(num_iterations=last - first)).events()
    ]
    others: list[Event] = []
    before = at_us
    for iteration in range(first, last):
        end = max(op.end_us for op in ran if op.iteration == iteration)
        others.append(Spell(before, end, "train", samples=SAMPLES, busy_us=(end - before) // 2, num_live=len(plan.rows)))
        others.append(Stepped(iteration, end, 5.0 - iteration / 10, 1.0, 1.0, plan.period_us))
        before = end
    return ran, others, before


def recovery_record() -> list[Event]:
    """All of it, as a real run writes it. What the fifth iteration had begun when W1_1 died is in the record twice."""
    (_, one), (_, two), (_, three) = EPOCHS
    first, first_told, died_us = played(whole_plan(), 0, one, START_US)
    begun, _, _ = played(whole_plan(), one, one + 1, died_us)
    discarded = [op for op in begun if op.end_us <= died_us + REDO_US]
    death = died_us + REDO_US
    left = Recovered(death, death + 136_000, 1, ("W1_1",), False, "its connection closed", one, 3000, 41000, 0, 92000, 0, REDO_US)
    left = replace(left, redone_ops=len(discarded), num_live=3)
    second, second_told, joined_us = played(degraded_plan(), one, two, left.end_us)
    joined = Recovered(joined_us, joined_us + 45_000, 2, ("W1_1",), True, "it asked to join", two, regroup_us=30_000)
    joined = replace(joined, transfer_us=15_000, num_live=4)
    third, third_told, _ = played(whole_plan(), two, three, joined.end_us)
    return [
        Started("train", "8-layer GPT"),
        Spell(0, START_US, "pause", "start", num_live=4),
        *first,
        *first_told,
        *discarded,
        Changed(death, "W1_1", False, 3),
        Spell(died_us, death, "redo", "failure", discarded=SAMPLES, num_live=4),
        Spell(death, death + 3000, "pause", "detect", num_live=3),
        Spell(death + 3000, death + 44_000, "pause", "abort", num_live=3),
        Spell(death + 44_000, left.end_us, "pause", "regroup", num_live=3),
        left,
        *second,
        *second_told,
        Joining(joined_us - 5000, "W1_1"),
        Changed(joined_us, "W1_1", True, 4),
        Spell(joined_us, joined_us + 30_000, "pause", "regroup", num_live=4),
        Spell(joined_us + 30_000, joined.end_us, "pause", "transfer", num_live=4),
        joined,
        *third,
        *third_told,
    ]
