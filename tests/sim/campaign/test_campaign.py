"""Campaigns: every system gets the same trace, and a record is computed once."""

from dataclasses import replace

import pytest

from recycle.core.events.record import Changed, Spell
from recycle.core.events.trace import Change, Trace
from recycle.report.record.metrics import measure
from recycle.sim import failure_traces as failures
from recycle.sim.campaign import campaign
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext
from tests.sim.jobs import small_job
from tests.sim.quick_plans import plan_quickly

SECOND = 1_000_000
JOB = small_job()
NODES = failures.worker_names(3, 2)
TRACE = failures.periodic_trace(NODES, 400 * SECOND, 2000 * SECOND, seed=5, rejoin_us=600 * SECOND)


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch):
    plan_quickly(monkeypatch)


def context(folder=None):
    return SystemContext(JOB, Constants.for_model(1e9), folder)


def cases(folder=None, trace=TRACE):
    return [Case(name, context(folder), trace) for name in SYSTEMS]


def forbid_work(monkeypatch):
    def fail(*_):
        raise AssertionError("this was answered before")

    monkeypatch.setattr(campaign, "simulate_trace", fail)
    monkeypatch.setattr("recycle.sim.iteration_times._plan", fail)


def test_all_systems_go_through_the_same_trace(monkeypatch):
    seen = []
    real = campaign.simulate_trace
    monkeypatch.setattr(campaign, "simulate_trace", lambda system, trace, *rest: seen.append(trace) or real(system, trace, *rest))
    records = run_cases(cases())
    assert seen == [TRACE] * len(SYSTEMS)
    wanted = [(change.at_us, change.node, change.joins) for change in TRACE.later]
    for record in records:
        assert [(event.at_us, event.node, event.joins) for event in record if isinstance(event, Changed)] == wanted


def test_records_come_in_the_order_of_the_cases():
    # Nobody but replica drop drops samples, and the ideal does not pause.
    found = {case.system: measure(record) for case, record in zip(cases(), run_cases(cases()), strict=True)}
    assert [name for name, metrics in found.items() if metrics.dropped_samples] == ["replica-drop", "replica-drop-zb"]
    assert found["ideal"].train_us == TRACE.end_us
    assert found["ideal"].samples == max(metrics.samples for metrics in found.values())


def test_a_second_time_the_answer_is_read_and_nothing_is_run(tmp_path, monkeypatch):
    first = run_cases(cases(tmp_path))
    forbid_work(monkeypatch)
    assert run_cases(cases(tmp_path)) == first


def test_what_is_kept_changes_no_answer(tmp_path):
    kept, again, alone = run_cases(cases(tmp_path)), run_cases(cases(tmp_path)), run_cases(cases())
    assert kept == again == alone


def test_only_what_is_missing_is_run(tmp_path, monkeypatch):
    known = [case for case in cases(tmp_path) if case.system in ("ideal", "varuna")]
    before = run_cases(known)
    ran, real = [], campaign.simulate_trace
    monkeypatch.setattr(campaign, "simulate_trace", lambda system, *rest: ran.append(system.name) or real(system, *rest))
    ticks = []
    after = run_cases(cases(tmp_path), ticks.append)
    assert ran == [name for name in SYSTEMS if name not in ("ideal", "varuna")]
    assert [after[list(SYSTEMS).index(case.system)] for case in known] == before
    assert ticks == list(range(2, len(SYSTEMS) + 1))


BREAKS = {
    "empty": lambda text: "",
    "cut within a line": lambda text: text[: len(text) * 2 // 3],
    "cut between two lines": lambda text: text[: text.rindex("\n", 0, -1) + 1],
    "the head alone": lambda text: text.splitlines()[0] + "\n",
    "another kind of file": lambda text: "milk, eggs\n",
    "another version": lambda text: text.replace('"version": 1', '"version": 99'),
    "a time that is a text": lambda text: text.replace('"end_us":', '"end_us":"soon","was":'),
    "a spell that is not whole": lambda text: text.replace('"state":', '"status":'),
}


@pytest.mark.parametrize("damage", BREAKS.values(), ids=BREAKS.keys())
def test_a_broken_file_is_made_again(damage, tmp_path):
    case = Case("replica-drop", context(tmp_path), TRACE)
    (first,) = run_cases([case])
    good = case.path.read_text()
    case.path.write_text(damage(good))
    assert case.path.read_text() != good
    assert run_cases([case]) == [first]
    assert case.path.read_text() == good


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda case: replace(case, system="fault-scaled"), id="system"),
        pytest.param(lambda case: replace(case, trace=replace(case.trace, end_us=2100 * SECOND)), id="end of the trace"),
        pytest.param(lambda case: replace(case, trace=Trace(case.trace.changes[:-1], case.trace.end_us)), id="trace"),
        pytest.param(
            lambda case: replace(case, context=replace(case.context, job=replace(JOB, scale=11.0))), id="speed of the job"
        ),
        pytest.param(lambda case: replace(case, context=replace(case.context, job=small_job(num_microbatches=8))), id="job"),
        pytest.param(
            lambda case: replace(
                case,
                context=replace(case.context, constants=case.context.constants.with_value("replica-drop.reconfigure", "60s")),
            ),
            id="constant",
        ),
        pytest.param(
            lambda case: replace(
                case, context=replace(case.context, constants=case.context.constants.with_value("ready", "300s"))
            ),
            id="time until a node is ready",
        ),
    ],
)
def test_another_question_gets_another_answer(change, tmp_path):
    case = Case("replica-drop", context(tmp_path), TRACE)
    other = change(case)
    first, second = run_cases([case]) + run_cases([other])
    assert first != second
    assert len(list(tmp_path.glob("simulation-*.jsonl"))) == 2
    assert run_cases([other, case]) == [second, first]


def test_traces_that_differ_by_less_than_a_millisecond_are_not_mistaken_for_each_other(tmp_path):
    start = tuple(Change(0, True, node) for node in NODES)
    ends_us = [5_000_100, 5_000_900]
    records = run_cases([Case("ideal", context(tmp_path), Trace(start, end_us)) for end_us in ends_us])
    assert [record[-1].end_us for record in records] == ends_us
    again = run_cases([Case("ideal", context(tmp_path), Trace(start, end_us)) for end_us in ends_us])
    assert [record[-1].end_us for record in again] == ends_us


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run_cases(cases())
    assert list(tmp_path.rglob("*")) == []


def test_the_checkpoint_interval_follows_the_failure_rate_of_the_trace():
    # Five failures in 10,000 s are one in 2,000 s; a checkpoint of 10 s is then due every 200 s, the root of 2 * 10 * 2,000.
    start = tuple(Change(0, True, node) for node in NODES)
    leaves = tuple(Change(9000 * SECOND + number, False, node) for number, node in enumerate(NODES[:5]))
    (record,) = run_cases([Case("checkpoint-restart", context(), Trace((*start, *leaves), 10_000 * SECOND))])
    first = next(event for event in record if isinstance(event, Spell) and event.state == "checkpoint")
    assert first.start_us == pytest.approx(200 * SECOND, abs=SECOND)
    assert first.length_us == 10 * SECOND


def test_many_cases_are_shared_by_processes_and_answered_alike(tmp_path):
    traces = [failures.periodic_trace(NODES, 300 * SECOND, 1000 * SECOND, seed) for seed in range(51)]
    together = run_cases([Case("ideal", context(tmp_path), trace) for trace in traces])
    assert together == [run_cases([Case("ideal", context(), trace)])[0] for trace in traces]
