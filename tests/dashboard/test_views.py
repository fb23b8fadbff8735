"""The views of a run: an iteration beside its plan, what decided its length, events, downloads, lists, campaigns, what-if."""

import csv
import io
import json

import numpy as np
import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import OpRan, Started, Stepped, Warned
from recycle.core.events.record_file import write_record
from recycle.core.plans.plan_source import PlanFolder
from recycle.core.plans.steady_period import steady_period_us, with_speeds
from recycle.dashboard.reading.run_reader import RunReader
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.dashboard.views.campaigns import campaign, campaign_kind
from recycle.dashboard.views.critical_ops import critical_ops
from recycle.dashboard.views.event_list import events_as_csv, events_of_recovery, find_events, trace_for_perfetto
from recycle.dashboard.views.iteration_view import IterationOps
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.views.series import thin
from recycle.dashboard.views.what_if import read_workers, what_if
from recycle.planner.live_planner import Planner
from tests.dashboard.run_folders import write_run
from tests.recovery_records import EPOCHS, degraded_plan, whole_plan


@pytest.fixture
def run(tmp_path):
    made = RunReader(write_run(tmp_path / "a") / "record.jsonl")
    made.read()
    return made


def test_an_iteration_is_executed_beside_its_own_plan(run):
    before, after = (IterationOps.of(run, number) for number in (2, EPOCHS[1][0] + 1))
    assert before.about()["dead"] == []
    assert after.about()["dead"] == ["W1_1"]
    assert after.about()["period_us"] == degraded_plan().period_us
    lanes = {lane["worker"]: lane for lane in after.lanes(0, 64)}
    assert lanes["W1_1"]["executed"]["ops"] == lanes["W1_1"]["planned"]["ops"] == ""
    assert "1F0@1" in lanes["W0_1"]["executed"]["ops"].split()  # a micro-batch of pipeline 1, which W0_1 computes for W1_1
    assert lanes["W0_1"]["executed"]["ops"].split()[:4] == lanes["W0_1"]["planned"]["ops"].split()[:4]
    assert after.slowdown == pytest.approx(1.0)


def test_ops_that_a_recovery_discarded_are_in_vain(run):
    ops = IterationOps.of(run, EPOCHS[1][0])
    vain = {lane["worker"]: len(lane["executed"]["vain"]) for lane in ops.lanes(0, 64)}
    assert sum(vain.values()) == ops.about()["num_in_vain"] == run.recoveries[0].redone_ops
    assert ops.span[0] >= run.recoveries[0].end_us


def test_lanes_are_given_in_parts(run):
    ops = IterationOps.of(run, 1)
    assert [lane["worker"] for lane in ops.lanes(1, 3)] == ["W0_1", "W1_0"]


def test_an_iteration_that_is_not_there_is_named(run):
    with pytest.raises(UserError, match="no op of iteration 99: there are 0 to 13"):
        IterationOps.of(run, 99)


def test_the_critical_ops_are_the_longest_chain_back_from_the_last_op():
    # Stage 1 waits for stage 0, whose second micro-batch comes late; then the gradient goes back.
    ops = {
        "W0_0": [OpRan(0, "W0_0", "0F0@0", 0, 10), OpRan(0, "W0_0", "0F1@0", 10, 40), OpRan(0, "W0_0", "0B1@0", 70, 90)],
        "W0_1": [OpRan(0, "W0_1", "1F0@0", 10, 20), OpRan(0, "W0_1", "1F1@0", 40, 50), OpRan(0, "W0_1", "1B1@0", 50, 70)],
    }
    chain = [("W0_0", "0F0@0"), ("W0_0", "0F1@0"), ("W0_1", "1F1@0"), ("W0_1", "1B1@0"), ("W0_0", "0B1@0")]
    assert critical_ops(ops, 2) == chain


def test_events_are_found_by_text_and_kind_newest_first(run):
    every = find_events(run, "", "", None, 500)
    assert every["total"] == len(every["events"])
    assert [one["iteration"] for one in find_events(run, "", "step", None, 3)["events"]] == [13, 12, 11]
    assert {one["event"] for one in find_events(run, "w1_1", "", None, 99)["events"]} == {"changed", "joining", "recovery"}


def test_events_of_a_recovery_are_in_order_of_time(run):
    times_us = [event.get("at_us", event.get("start_us")) for event in events_of_recovery(run, 0)["events"]]
    assert times_us
    assert times_us == sorted(times_us)


def test_a_long_list_of_events_is_given_in_pages(run):
    seen, before = [], None
    while True:
        page = find_events(run, "", "", before, 7)
        seen += [one["number"] for one in page["events"]]
        if (before := page["next"]) is None:
            break
    assert seen == list(range(page["total"]))[::-1]


def test_a_table_of_events_runs_no_formula(tmp_path):
    folder = write_run(tmp_path, [Started("train", "x"), Warned(5, "a, b"), Warned(6, "=HYPERLINK(1)")])
    run = RunReader(folder / "record.jsonl")
    run.read()
    rows = list(csv.DictReader(io.StringIO(b"".join(events_as_csv(run)).decode())))
    assert [row["event"] for row in rows] == ["started", "warning", "warning"]
    assert all(not value.startswith(("=", "+", "@")) for row in rows for value in row.values())


def test_a_trace_holds_an_iteration_and_its_neighbours(run):
    events = json.loads(trace_for_perfetto(run, 2))["traceEvents"]
    assert {event["args"]["iteration"] for event in events if event["ph"] == "X" and "iteration" in event["args"]} == {1, 2, 3}


def test_thinned_values_keep_their_extremes():
    times, values = range(0, 1_000_000, 10), np.sin(np.arange(100_000) / 500)
    values[777] = 9.0
    made = thin(list(times), list(values), 300)
    assert len(made["at_s"]) == 300
    assert max(made["high"]) == 9.0
    assert min(made["low"]) == pytest.approx(-1.0, abs=1e-3)
    assert all(low <= mean <= high for low, mean, high in zip(made["low"], made["mean"], made["high"], strict=True))
    part = thin(list(times), list(values), 300, (7_000, 8_000))
    assert part["num"] == 101
    assert part["at_s"][0] == pytest.approx(0.007)


def test_all_runs_below_a_folder_are_listed(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "deep" / "b", is_ended=False)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "record.jsonl").write_text("nonsense\n")
    write_record(tmp_path / "sim.jsonl", [Started("simulate", "recycle"), Stepped(0, 1, 2.5, 1.0, 1.0)])
    (tmp_path / "result.json").write_text('{"experiment": "x", "assumptions": [], "results": {"a": {"b": [1, 2]}}}')
    (tmp_path / "outside.jsonl").symlink_to("/etc/hostname")
    listed = RunList(tmp_path).to_json()
    states = {run["id"]: run["state"] for run in listed["runs"]}
    assert states == {"a": "ended", "deep/b": "live", "c": "damaged", "sim.jsonl": "simulated"}
    assert [one["id"] for one in listed["campaigns"]] == ["result.json"]
    assert next(run for run in listed["runs"] if run["id"] == "a")["lost_us"] == 5


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "a\0b", "", "C:\\x", "a/"])
def test_a_run_is_an_id_and_never_a_path(tmp_path, name):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "secret")
    with pytest.raises(UserError, match="there is no run"):
        RunList(tmp_path / "runs").record(name)


def test_results_of_each_command_become_a_table(tmp_path):
    simulated = {"fault_free": 2.0, "model": "gpt", "systems": {"recycle": {"throughput": 1.5, "time_us": {"busy": 3}}}}
    reproduced = {
        "experiment": "scale",
        "assumptions": ["one"],
        "results": {"4 x 8": {"recycle": [0.9, 0.8], "oobleck": [0.7, 0.6]}},
    }
    advised = {"question": {}, "first": {"system": "recycle", "samples_per_s": 2}, "alternatives": [{"system": "oobleck"}]}
    tables = {}
    for number, data in enumerate((simulated, reproduced, advised)):
        (path := tmp_path / f"{number}.json").write_text(json.dumps(data))
        tables[campaign_kind(data)] = campaign(path, ServedFolder(tmp_path))
    assert tables["simulate"]["columns"] == ["system", "throughput", "time: busy"]
    assert tables["reproduce"]["rows"] == [["4 x 8", "recycle", 0.9, 0.8], ["4 x 8", "oobleck", 0.7, 0.6]]
    assert [row[0] for row in tables["advise"]["rows"]] == ["recycle", "oobleck"]
    assert campaign_kind([1]) == campaign_kind({"a": 1}) == ""


def _from_folder(folder, today):
    return PlanFolder(folder / "ready")


def test_what_if_shows_the_plan_of_a_failure_beside_that_of_today(tmp_path):
    degraded_plan().save(tmp_path / "ready" / "plan-W1_1.json")
    seen = what_if(_from_folder, tmp_path, whole_plan(), frozenset({Worker(1, 1)}))
    assert (seen["period_us"], seen["today_us"]) == (degraded_plan().period_us, whole_plan().period_us)
    assert seen["dead"] == seen["asked"] == ["W1_1"]
    assert "1F1@1" in next(lane for lane in seen["lanes"] if lane["worker"] == "W0_1")["planned"]["ops"].split()


def test_what_if_plans_for_the_speeds_of_the_run_s_workers(tmp_path):
    def make_source(folder, today):
        return Planner(today.problem)

    speeds, dead = ((Worker(0, 0), 0.5),), frozenset({Worker(1, 1)})
    usual, slow = (what_if(make_source, tmp_path, whole_plan(), dead, each) for each in ((), speeds))
    assert (usual["speeds"], slow["speeds"]) == ({}, {"W0_0": 0.5})
    assert slow["period_us"] > usual["period_us"]
    assert slow["today_us"] == steady_period_us(with_speeds(whole_plan(), speeds)) > whole_plan().period_us


def test_chosen_workers_are_read_and_too_many_refused():
    assert read_workers("W0_1,W1_2") == {Worker(0, 1), Worker(1, 2)}
    with pytest.raises(UserError, match="at most 64"):
        read_workers(",".join(f"W{number}_0" for number in range(65)))
    with pytest.raises(UserError, match="is not a worker"):
        read_workers("<script>")
