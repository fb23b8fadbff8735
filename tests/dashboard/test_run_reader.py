"""`RunReader`: the state of a run after every event of its record, also of one that is damaged, cut, or not there yet."""

import os

from msgspec.structs import replace

from recycle.core.events.record import Changed, Joining, Placed, Recovered, Spell, Started, Stepped, Suspected
from recycle.core.events.record_file import RecordWriter, read_record
from recycle.dashboard.reading.run_reader import RunReader
from recycle.dashboard.views.overview import has_ended, overview, overview_head, waits_for, workers
from recycle.report.record.run_columns import read_run_record
from tests.dashboard.run_folders import growing, write_plans, write_run
from tests.recovery_records import LEFT


def states(run):
    return {name: about["state"] for name, about in workers(run).items()}


def read(folder):
    run = RunReader(folder / "record.jsonl")
    run.read()
    return run


def test_workers_start_live_are_suspected_die_and_join_again(tmp_path):
    writer = growing(tmp_path)
    run = read(tmp_path)
    assert set(states(run).values()) == {"starting"}
    assert waits_for(run) == "4 workers are starting"
    steps = (
        ([Placed(1, "W0_0", "a", 17)], {"W0_0": "alive"}),
        ([Spell(0, 9, "train", samples=8, num_live=4), Stepped(0, 9, 4.0, 1.0, 1.0)], {"W1_1": "alive"}),
        ([Suspected(10, "W1_1", "silent for 2 s")], {"W1_1": "suspected"}),
        ([Changed(11, "W1_1", False, 3)], {"W1_1": "dead"}),
        ([Recovered(11, 12, 1, ("W1_1",), False, "silent", 1, num_live=3)], {"W1_1": "dead", "W0_1": "alive"}),
        ([Joining(13, "W1_1")], {"W1_1": "joining"}),
        ([Recovered(14, 15, 2, ("W1_1",), True, "joined", 1, num_live=4)], {"W1_1": "alive"}),
    )
    for events, expected in steps:
        writer.write(*events)
        assert run.read()
        assert expected.items() <= states(run).items()
    assert workers(run)["W0_0"]["process"] == "host a, pid 17"
    assert not run.read()


def test_the_page_says_what_the_job_waits_for(tmp_path):
    writer = growing(tmp_path)
    run = read(tmp_path)
    writer.write(Stepped(0, 9, 4.0, 1.0, 1.0))
    run.read()
    assert waits_for(run) == ""
    writer.write(Suspected(10, "W1_1", "silent for 2 s"))
    run.read()
    assert waits_for(run) == "W1_1 makes no progress and is being fenced: silent for 2 s"
    writer.write(Changed(11, "W1_1", False, 3))
    run.read()
    assert waits_for(run) == "W1_1 left: the others stop, plan and regroup"


def test_a_worker_that_changed_its_place_is_moved(tmp_path):
    writer = growing(tmp_path)
    writer.write(Stepped(0, 9, 4.0, 1.0, 1.0), Changed(10, "W0_0", False, 3))
    writer.write(Recovered(10, 12, 1, ("W0_0",), False, "closed", 1, moves=("W1_1>W0_0",), num_live=3))
    assert workers(read(tmp_path))["W0_0"] == {"state": "moved", "from": "W1_1"}
    assert states(read(tmp_path))["W1_1"] == "dead"


def test_an_ended_run_has_its_series_recoveries_and_shares(tmp_path):
    seen = overview(run := read(write_run(tmp_path)))
    assert has_ended(run)
    assert seen["shape"] == {"pipelines": 2, "stages": 2, "microbatches": 2}
    assert seen["steps_done"] == 14
    assert seen["series"]["loss"]["mean"][0] == 5.0
    assert seen["series"]["loss"]["num"] == 14
    assert [one["who"] for one in seen["recoveries"]] == ["W1_1 left", "W1_1 joined"]
    assert sum(part["time_us"] for part in seen["recoveries"][0]["parts"]) == seen["recoveries"][0]["lost_us"] == 156_000
    times = seen["shares"]["time_us"]
    assert times["total"] == sum(time for use, time in times.items() if use != "total") == seen["end_us"]
    assert seen["iterations"] == (0, 13)


def test_a_damaged_line_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path)
    lines = (folder / "record.jsonl").read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if b'"event":"step"' in line)
    lines[number] = b'{"event":"step","iteration":"<b>x</b>","at_us":1}\n'
    del lines[number + 20]
    (folder / "record.jsonl").write_bytes(b"".join(lines))
    run = read(folder)
    assert run.problems[0].startswith(f"line {number + 1}: ")
    assert "missing" in run.problems[1]
    assert overview_head(run)["steps_done"] == 14


def test_a_file_that_is_no_record_is_a_problem_and_not_an_error(tmp_path):
    folder = write_run(tmp_path)
    (folder / "record.jsonl").write_bytes(os.urandom(2000))
    run = read(folder)
    assert "is not a recycle-record file" in overview_head(run)["problem"]
    write_run(tmp_path)
    assert run.read()
    assert overview_head(run)["problem"] == ""
    assert overview_head(run)["steps_done"] == 14


def test_a_damaged_plan_leaves_the_run_without_a_grid(tmp_path):
    folder = write_run(tmp_path)
    (folder / "plan.json").write_text("{")
    seen = overview(read(folder))
    assert seen["shape"] is None
    assert seen["workers"]["W1_1"] == {"state": "alive"}
    assert seen["steps_done"] == 14


def test_a_plan_that_is_written_after_the_record_began_is_found(tmp_path):
    RecordWriter(tmp_path / "record.jsonl", [Started("train", "gpt"), Stepped(0, 5, 1.0, 1.0, 1.0)])
    run = read(tmp_path)
    assert run.shape is None
    write_plans(tmp_path)
    assert run.read()
    assert set(states(run).values()) == {"alive"}


def test_a_coordinator_that_took_over_cuts_the_record_and_the_reader_begins_again(tmp_path):
    writer = growing(tmp_path)
    writer.write(Stepped(0, 9, 4.0, 1.0, 1.0))
    kept = (tmp_path / "record.jsonl").stat().st_size
    writer.write(Changed(11, "W1_1", False, 3))
    run = read(tmp_path)
    assert states(run)["W1_1"] == "dead"
    os.truncate(tmp_path / "record.jsonl", kept)
    RecordWriter(tmp_path / "record.jsonl", None).write(Stepped(1, 12, 3.0, 1.0, 1.0), Stepped(2, 15, 2.0, 1.0, 1.0))
    assert run.read()
    assert run.generation == 2
    assert states(run)["W1_1"] == "alive"
    assert list(run.columns.at_us) == [9, 12, 15]


def test_a_simulated_record_has_its_shape_without_a_plan(tmp_path):
    writer = RecordWriter(tmp_path / "recycle.jsonl", [Started("simulate", "recycle", (3, 2, 4))])
    writer.write(Changed(5, "W2_1", False, 5), LEFT)
    run = RunReader(tmp_path / "recycle.jsonl")
    run.read()
    assert len(states(run)) == 6
    assert states(run)["W2_1"] == "dead"
    assert has_ended(run)


def test_a_recovery_in_which_layers_moved_is_no_damage(tmp_path):
    writer = growing(tmp_path)
    writer.write(replace(LEFT, workers=("W1_1",), layers=(5, 3)))
    run = read(tmp_path)
    assert run.problems == []
    assert run.recoveries[0].layers == (5, 3)
    assert read_run_record(read_record(tmp_path / "record.jsonl")).recoveries[0].layers == (5, 3)


def test_a_long_record_is_read_in_parts_and_comes_to_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("recycle.dashboard.reading.run_reader._LONGEST_LINE_BYTES", 0)
    whole, parts = read(write_run(tmp_path)), RunReader(tmp_path / "record.jsonl")
    shares = []
    while parts.read(2000):
        shares.append(parts.share_read)
    assert shares == sorted(shares)
    assert len(shares) > 5
    assert shares[-1] == 1.0
    assert {**overview_head(parts), "idle_s": 0} == {**overview_head(whole), "idle_s": 0}
    assert parts.columns == whole.columns
