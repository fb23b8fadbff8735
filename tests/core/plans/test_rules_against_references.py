"""Random plans under two checks: `rules.check`, which tests whole columns, and `slow_check`, which shares no code with it."""

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from recycle.core.op import Kind
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.core.problem import Memory
from tests.builders import Timed, plan_of, timed_of, with_memory, with_techniques
from tests.random_plans import legal_plans
from tests.slow_check import broken_rules, peak_held


@settings(max_examples=150, deadline=None)
@given(legal_plans())
def test_both_judges_accept_random_legal_plans(plan):
    assert check(plan) == []
    assert broken_rules(plan) == set()


@settings(max_examples=80, deadline=None)
@given(legal_plans(), st.data())
def test_the_peak_of_a_plan_is_the_least_memory_that_it_fits_into(plan, data):
    unit = data.draw(st.sampled_from(["microbatches", "bytes"]))
    worker = data.draw(st.sampled_from([row.worker for row in plan.rows]))
    stage = plan.problem.profile.stages[worker.stage]
    peak = peak_held(plan, worker, unit)
    least = stage.static_bytes + stage.activation_bytes if unit == "bytes" else 1
    limits = [10**6] * plan.problem.shape.num_stages
    limits[worker.stage] = max(peak, least)
    mine = [
        violation for violation in check(with_memory(plan, Memory(unit, tuple(limits)))) if f"{worker} holds" in violation.message
    ]
    assert mine == []
    if peak > least:
        limits[worker.stage] = peak - 1
        messages = [violation.message for violation in check(with_memory(plan, Memory(unit, tuple(limits))))]
        assert any(message.startswith(f"{worker} holds") for message in messages)


def _shift(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    at = data.draw(st.integers(0, len(timed[worker]) - 1))
    start, op = timed[worker][at]
    timed[worker][at] = max(0, start + data.draw(st.integers(-4, 4))), op


def _swap(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    a, b = (data.draw(st.integers(0, len(timed[worker]) - 1)) for _ in range(2))
    (start_a, op_a), (start_b, op_b) = timed[worker][a], timed[worker][b]
    timed[worker][a], timed[worker][b] = (start_a, op_b), (start_b, op_a)


def _delete(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    timed[worker].pop(data.draw(st.integers(0, len(timed[worker]) - 1)))


def _duplicate(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    start, op = data.draw(st.sampled_from(timed[worker]))
    target = data.draw(st.sampled_from(sorted(other for other in timed if other.stage == worker.stage)))
    timed[target] = sorted([*timed[target], (start + data.draw(st.integers(0, 40)), op)], key=lambda pair: pair[0])


def _elsewhere(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    start, op = timed[worker].pop(data.draw(st.integers(0, len(timed[worker]) - 1)))
    target = data.draw(st.sampled_from(sorted(other for other in timed if other.stage == worker.stage)))
    timed[target] = sorted([*timed[target], (start, op)], key=lambda pair: pair[0])


def _other_kind(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    at = data.draw(st.integers(0, len(timed[worker]) - 1))
    start, op = timed[worker][at]
    timed[worker][at] = start, replace(op, kind=data.draw(st.sampled_from(Kind)))


def _extra(data: st.DataObject, timed: Timed) -> None:
    worker = data.draw(st.sampled_from(sorted(worker for worker in timed if timed[worker])))
    _, op = data.draw(st.sampled_from(timed[worker]))
    timed[worker].append((200, replace(op, kind=data.draw(st.sampled_from(Kind)))))


def _no_row(data: st.DataObject, timed: Timed) -> None:
    timed.pop(data.draw(st.sampled_from(sorted(timed))))


SLOT_CHANGES = (_shift, _shift, _swap, _delete, _duplicate, _elsewhere, _other_kind, _extra, _no_row)


def _claims_changed(data: st.DataObject, plan: Plan) -> Plan:
    """Another period, bound, technique or memory, or none of them."""
    match data.draw(st.sampled_from(["none", "none", "period", "bound", "techniques", "memory"])):
        case "period":
            return replace(plan, period_us=max(1, plan.period_us + data.draw(st.integers(-2, 2))))
        case "bound":
            return replace(plan, quality=replace(plan.quality, bound_us=plan.period_us + data.draw(st.integers(-1, 1))))
        case "techniques":
            adaptive = bool(plan.problem.cluster.failed)
            names = "adaptive" if adaptive else "none"
            return with_techniques(plan, names)
        case "memory":
            limits = [data.draw(st.integers(1, 3)) for _ in plan.problem.profile.stages]
            return with_memory(plan, Memory.microbatches(limits))
    return plan


# Where a plan is broken in one of these ways, what else is broken is a matter of definition: which of two equal ops
# counts, what is held in a row that is out of order.
CLOUDING = {"every op once", "one op at a time", "workers", "one worker"}


@settings(max_examples=200, deadline=None)
@given(legal_plans(), st.data())
def test_both_judges_agree_on_plans_that_were_tampered_with(plan, data):
    timed = timed_of(plan)
    for change in data.draw(st.lists(st.sampled_from(SLOT_CHANGES), max_size=2)):
        if any(timed.values()):
            change(data, timed)
    if not any(timed.values()):
        return
    same_period = data.draw(st.booleans())
    tampered = _claims_changed(data, plan_of(plan.problem, timed, plan.period_us if same_period else None))
    fast, slow = {violation.rule for violation in check(tampered)}, broken_rules(tampered)
    event(f"broken: {sorted(slow) or 'nothing'}")
    assert bool(fast) == bool(slow)
    if not (fast | slow) & CLOUDING:
        assert fast == slow
