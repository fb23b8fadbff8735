"""The folder of a run: what of a record leads to a checkpoint, what is begun, gone on with, or refused."""

import contextlib
import hashlib
import json
import math
import resource
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

import recycle
from recycle.control.decide.messages import DownloadFile, FileContent, UploadFile
from recycle.control.net.handshake import Endpoint
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, ForeignRun, NoCheckpoint
from recycle.core.events.record import Changed, Held, OpRan, Recovered, Resumed, Saved, Spell, Started, Stepped, Warned
from recycle.core.events.record_file import later_plans, read_record, write_record
from recycle.core.plans.plan import Plan
from recycle.host.folder_lock import locked
from recycle.report.record.hindsight import in_hindsight
from recycle.runtime.checkpoint.files import PARTIAL, attempt_file, stage_file, step_folder
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.ledger import run_folder
from recycle.runtime.coordinator.ledger.run_folder import RunFolder, events_before, is_of_a_checkpoint, without_unfinished
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.coordinator.process import serve_job
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import coordinator_config
from recycle.runtime.options import CheckpointOptions, RunFolderOptions, TrainOptions
from recycle.runtime.worker.worker_reports import IterationApplied
from tests.runtime.checkpoint.saved_stages import names_in, report_of, save_all, small_stage
from tests.runtime.jobs import Numbers, adamw, loss, make_stages

pytestmark = pytest.mark.timeout(60)
STARTED, WARNED = Started("train", "a GPT"), Warned(35, "it is slow")
PAUSE = Spell(0, 10, "pause", "start", num_live=4)


def iteration(number, start_us, end_us, samples=12):
    """What is written when an iteration is applied: ops, its spell, its step."""
    ops = [OpRan(number, worker, "0F0@0", start_us, end_us) for worker in ("W0_0", "W1_0")]
    return [
        *ops,
        Spell(start_us, end_us, "train", samples=samples, busy_us=end_us - start_us, num_live=4),
        Stepped(number, end_us, 5.0, 1.0, 1.0),
    ]


def kept(num_steps, *events):
    return list(events_before(num_steps, iter(events)))


# What led to a checkpoint.


def test_what_led_to_all_steps_is_all_but_what_workers_held():
    events = [STARTED, PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30), Saved(32, 2, "step-00000002", 500), WARNED]
    assert kept(2, *events, Held("W0_0", 3, 2, 1), Held("W1_0", 3, 2, 1)) == events


def test_steps_behind_the_checkpoint_go_and_their_time_stays_as_work_that_was_thrown_away():
    events = [STARTED, PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30), *iteration(2, 30, 45, samples=6)]
    assert kept(1, *events) == [
        STARTED,
        PAUSE,
        *iteration(0, 10, 20),
        Spell(20, 30, "redo", discarded=12, busy_us=10, num_live=4),
        Spell(30, 45, "redo", discarded=6, busy_us=15, num_live=4),
    ]


def test_before_the_first_step_everything_was_in_vain():
    assert kept(0, STARTED, PAUSE, *iteration(0, 10, 20)) == [
        STARTED,
        PAUSE,
        Spell(10, 20, "redo", discarded=12, busy_us=10, num_live=4),
    ]


def test_what_a_killed_run_wrote_of_an_iteration_that_never_ended_goes():
    whole = [STARTED, PAUSE, *iteration(0, 10, 20)]
    ops, spell = iteration(1, 20, 30)[:2], iteration(1, 20, 30)[2]
    assert kept(1, *whole, *ops) == whole
    assert kept(1, *whole, *ops, spell) == [*whole, Spell(20, 30, "redo", discarded=12, busy_us=10, num_live=4)]


def test_a_step_of_which_the_record_has_no_ops_is_in_vain_with_its_spell():
    whole = [STARTED, PAUSE, *iteration(0, 10, 20)]
    without_ops = [event for event in iteration(1, 20, 30) if not isinstance(event, OpRan)]
    assert kept(1, *whole, *without_ops) == [*whole, Spell(20, 30, "redo", discarded=12, busy_us=10, num_live=4)]
    assert kept(2, *whole, *without_ops) == [*whole, *without_ops]


def test_ops_that_ran_in_vain_stay_with_the_iteration_that_was_begun_again():
    in_vain = OpRan(1, "W0_0", "0F0@0", 20, 22, is_in_vain=True)
    events = [STARTED, PAUSE, *iteration(0, 10, 20), in_vain, *iteration(1, 20, 30)]
    assert kept(2, *events) == events
    assert in_vain not in kept(1, *events)


def test_an_undone_op_of_a_later_step_does_not_discard_an_earlier_step_that_is_reported_after_it():
    undone = OpRan(1, "W0_0", "0F0@0", 20, 22, is_in_vain=True)
    whole = [STARTED, PAUSE, *iteration(0, 10, 20)]
    assert kept(1, STARTED, PAUSE, undone, *iteration(0, 10, 20)) == whole
    assert kept(1, STARTED, PAUSE, undone, *iteration(0, 10, 20), *iteration(1, 20, 30)) == [
        *whole,
        Spell(20, 30, "redo", discarded=12, busy_us=10, num_live=4),
    ]


def test_a_run_that_goes_on_twice_counts_what_was_lost_once():
    first = kept(1, STARTED, PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30))
    second = [*first, Spell(30, 40, "pause", "start"), *iteration(1, 40, 50), *iteration(2, 50, 60)]
    again = kept(2, *second)
    assert again[:-1] == second[:-4]
    assert again[-1] == Spell(50, 60, "redo", discarded=12, busy_us=10, num_live=4)
    spells = [event for event in again if isinstance(event, Spell)]
    assert (sum(spell.samples for spell in spells), sum(spell.discarded for spell in spells)) == (24, 24)


def test_membership_changes_and_warnings_stay_at_their_position():
    changed = Changed(25, "W1_0", False, 3)
    events = [STARTED, PAUSE, *iteration(0, 10, 20), changed, *iteration(1, 20, 30), WARNED]
    assert [event for event in kept(1, *events) if isinstance(event, Changed | Warned)] == [changed, WARNED]


def test_a_step_that_was_done_twice_before_the_checkpoint_counts_as_it_was_done_last():
    """All went back from step 3 to step 1, and did the second and third again; the checkpoint was made after the second."""
    back = Recovered(40, 45, 2, ("W1_0",), False, "killed", 1)
    first = [STARTED, PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30), *iteration(2, 30, 40)]
    events = kept(2, *first, back, *iteration(1, 45, 55), *iteration(2, 55, 65))
    assert [event.iteration for event in events if isinstance(event, Stepped)] == [0, 1, 1]
    spells = in_hindsight(
        [event for event in events if isinstance(event, Spell)],
        [event for event in events if isinstance(event, Stepped | Recovered)],
    )
    assert [(spell.end_us, spell.samples, spell.discarded) for spell in spells[1:]] == [
        (20, 12, 0),
        (30, 0, 12),
        (40, 0, 12),
        (55, 12, 0),
        (65, 0, 12),
    ]


# The folder.


# Once, because it says how long it took to find.
PLAN = recycle.solve(recycle.problem(2, 2, 2, costs=(1, 1, 1)), "greedy")


def make_job(seed=0):
    return Job(PLAN, make_stages(2), Numbers(), loss, adamw, 3, options=TrainOptions(seed))


def begin(folder, resume=False, seed=0, job=None, is_takeover=False):
    job, checkpoint = job or make_job(seed), CheckpointOptions(every=1, resume=resume)
    return RunFolder(folder, RunFolderOptions("a GPT"), checkpoint, job.plan, job.fingerprint(), job.steps, is_takeover)


@pytest.fixture
def one_step(tmp_path):
    """The folder of a run that was killed after it had saved its first step and applied its second."""
    with begin(tmp_path / "run") as run:
        for event in [PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30)]:
            run.write(event)
        save_all(run.checkpoints, run.checkpoint_folder, 1)
    return tmp_path / "run"


def test_a_new_run_has_its_plan_and_a_record_that_grows_while_it_goes_on(tmp_path):
    with begin(tmp_path / "runs" / "a") as run:
        assert Plan.load(tmp_path / "runs" / "a" / "plan.json").rows == make_job().plan.rows
        run.write(PAUSE)
        assert list(read_record(tmp_path / "runs" / "a" / "record.jsonl")) == [STARTED, PAUSE]
        assert (run.resumed, run.gone_us, run.warnings) == (None, 0, [])
    assert names_in(tmp_path / "runs" / "a") == ["checkpoints", "plan.json", "record.jsonl"]


def plans_in(folder):
    """What the plans of later epochs hold, by the iteration from which they were gone by."""
    return {number: path.read_text() for number, path in later_plans(folder).items()}


def test_the_plan_of_every_epoch_is_kept_by_the_iteration_that_it_began_with(tmp_path):
    first = make_job().plan.dumps()
    with begin(tmp_path) as run:
        assert run.keep_plan(0, first) is None
        assert not (tmp_path / "plans").exists()  # it is plan.json
        for number, text in ((5, "one"), (5, "two"), (7, "two"), (9, first)):
            assert run.keep_plan(number, text) is None
        assert plans_in(tmp_path) == {5: "two", 9: first}
        run.keep_plan(6, "three")  # all went back to a checkpoint
        assert plans_in(tmp_path) == {5: "two", 6: "three"}
        run.keep_plan(0, "four")
        assert plans_in(tmp_path) == {0: "four"}
    assert Plan.load(tmp_path / "plan.json").rows == make_job().plan.rows
    with begin(tmp_path) as run:
        run.keep_plan(0, first)
        assert plans_in(tmp_path) == {}


def test_a_plan_that_cannot_be_kept_ends_no_run(tmp_path):
    (tmp_path / "plans").touch()
    with begin(tmp_path) as run:
        problem = run.keep_plan(3, "a plan")
    assert problem.startswith("the plan from iteration 3 on is not kept, but training goes on: cannot write ")


def test_a_run_goes_on_from_its_checkpoint_with_what_led_there(one_step):
    with begin(one_step, resume=True) as run:
        assert run.resumed.num_steps == 1
        assert run.gone_us == 30
        run.write(WARNED)
    assert list(read_record(one_step / "record.jsonl")) == [
        *kept(1, STARTED, PAUSE, *iteration(0, 10, 20), *iteration(1, 20, 30)),
        Resumed(30, 1),
        WARNED,
    ]


def test_a_record_whose_last_line_was_cut_short_is_gone_on_with(one_step):
    with (one_step / "record.jsonl").open("a") as stream:
        stream.write('{"event":"op","iteration":2,"wor')
    with begin(one_step, resume=True) as run:
        assert (run.gone_us, run.warnings) == (30, [])


def test_a_run_that_goes_on_with_a_record_that_lacks_lines_says_so(one_step):
    path = one_step / "record.jsonl"
    head, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([head, *lines[:2], *lines[3:]]), encoding="utf-8")
    with begin(one_step, resume=True) as run:
        assert run.warnings == [f"{path} is not whole: line 4 is missing"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_goes_on_without_the_steps_that_its_record_lacks(one_step, is_there):
    """As after a full disk, or if somebody removed the file: the checkpoint is whole."""
    path = one_step / "record.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if is_there:
        path.write_text("".join(lines[: next(n for n, line in enumerate(lines) if '"step"' in line)]), encoding="utf-8")
    else:
        path.unlink()
    with begin(one_step, resume=True) as run:
        assert [math.isnan(loss) for loss in run.losses] == [True]
        assert run.warnings == [f"{path} is not whole: it has not the losses of 1 of 1 step"]
    assert next(read_record(path)) == STARTED


def test_a_coordinator_that_takes_over_a_run_loses_nothing_of_its_record(one_step):
    written = list(read_record(one_step / "record.jsonl"))
    with begin(one_step, is_takeover=True) as run:
        assert list(run.before) == [event for event in written if not isinstance(event, OpRan)]
        assert (run.resumed, run.newest()) == (None, (1, []))
        run.write(WARNED)
    gaps = []
    assert list(read_record(one_step / "record.jsonl", gaps=gaps)) == [*written, WARNED]
    assert gaps == []


def test_a_coordinator_that_takes_over_a_resumed_run_keeps_its_clock(one_step):
    with begin(one_step, resume=True) as run:
        run.write(Spell(run.gone_us, 40, "pause", "start", num_live=4))
    with begin(one_step, is_takeover=True) as again:
        assert again.gone_us == run.gone_us == 30


def test_a_new_run_can_go_back_to_its_beginning_alone(tmp_path):
    with begin(tmp_path) as run:
        assert (run.newest(), run.before) == ((0, []), None)
        save_all(run.checkpoints, run.checkpoint_folder, 1)
        assert run.newest() == (1, [])


def test_a_folder_with_checkpoints_is_not_begun_anew(one_step):
    before = (one_step / "record.jsonl").read_bytes()
    with pytest.raises(FileProblem, match="holds the checkpoints of another run: resume it, or name another folder"):
        begin(one_step)
    assert (one_step / "record.jsonl").read_bytes() == before
    assert names_in(one_step / "checkpoints") == ["step-00000001"]


def test_a_run_that_never_finished_a_checkpoint_is_begun_anew_as_its_refusal_says(tmp_path):
    with begin(tmp_path) as run:
        report_of(run.checkpoint_folder, 0, 1, *small_stage())  # and then it is killed
    with pytest.raises(NoCheckpoint, match="start the run anew, without resuming"):
        begin(tmp_path, resume=True)
    with begin(tmp_path):
        assert names_in(tmp_path / "checkpoints") == []


def test_a_run_of_another_job_is_not_gone_on_with(one_step):
    before = (one_step / "record.jsonl").read_bytes()
    with pytest.raises(ForeignRun, match="its seed is 0, but this job's is 1"):
        begin(one_step, resume=True, seed=1)
    assert (one_step / "record.jsonl").read_bytes() == before


def test_a_record_of_something_else_is_refused(one_step):
    (one_step / "record.jsonl").write_text(json.dumps({"format": "another"}))
    with pytest.raises(FileProblem, match="not a recycle-record file"):
        begin(one_step, resume=True)


# What is on disk together.


def test_a_checkpoint_is_never_ahead_of_the_record(tmp_path):
    # W1_0 reports its step late; its peer has reported and saved already. If all is killed now, the step is missing for ever.
    plan = recycle.solve(recycle.problem(2, 1, 1, costs=(1, 1, 1)), "greedy")
    with begin(tmp_path, job=Job(plan, make_stages(1), Numbers(), loss, adamw, 1)) as run:

        def save(report):
            ledger.checkpoints.decide(run.checkpoints.add_report(report))

        ledger = RunLedger(plan, 2, plan.problem.profile, lambda events: run.write(*events), save, begin_us=0)
        ledger.start_epoch(plan, 0, {1: Worker(0, 0), 2: Worker(1, 0)}, {1, 2})

        def applied(worker, chain):
            return IterationApplied(
                Worker.parse(worker), 0, {chain: 5.0}, columns_of([Span(f"0F0@{chain}", 10, 20)]), StepVerdict(1.0, 1.0)
            )

        def is_ahead():
            recorded = any(isinstance(event, Stepped) for event in read_record(tmp_path / "record.jsonl"))
            return (tmp_path / "checkpoints" / "step-00000001").is_dir() and not recorded

        ledger.add(1, applied("W0_0", 0))
        ledger.add(1, report_of(run.checkpoint_folder, 0, 1, *small_stage()))
        assert not is_ahead()
        ledger.add(2, applied("W1_0", 1))
        assert not is_ahead()
        assert (tmp_path / "checkpoints" / "step-00000001").is_dir()


def test_a_stages_file_that_is_sent_to_a_worker_must_have_the_digest_of_the_manifest(tmp_path):
    with begin(tmp_path) as run:
        save_all(run.checkpoints, run.checkpoint_folder, 1)
        refuse, name = run.transfer_task().keywords["refuse"], "step-00000001/stage-0.safetensors"
        refuse(name, hashlib.sha256((run.checkpoint_folder / name).read_bytes()).hexdigest())
        with pytest.raises(FileProblem, match="does not have the bytes that were written"):
            refuse(name, hashlib.sha256(b"something else").hexdigest())
        refuse("step-00000001/manifest.json", "a digest of which the manifest has none")
        manifest = run.checkpoint_folder / "step-00000001" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
        with pytest.raises(FileProblem, match="does not have the text that was written"):
            refuse("step-00000001/manifest.json", "a digest of which the manifest has none")


# What a coordinator that takes over keeps.


def test_a_coordinator_that_takes_over_removes_what_is_unfinished_from_the_end_of_the_record(tmp_path):
    undone = OpRan(1, "W0_0", "0F0@0", 20, 22, is_in_vain=True)
    write_record(tmp_path / "record.jsonl", [*WHOLE, undone, *iteration(1, 20, 30)[:3]])
    with (tmp_path / "record.jsonl").open("a") as stream:
        stream.write('{"event":"step","iteration":1,"at')
    with begin(tmp_path, is_takeover=True) as run:
        assert list(run.before)[-2:] == [WHOLE[-1], undone]
        run.write(WARNED)
    assert list(read_record(tmp_path / "record.jsonl")) == [*WHOLE, undone, WARNED]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_coordinator_cannot_take_over_a_run_without_its_record(is_there, tmp_path):
    if is_there:
        (tmp_path / "record.jsonl").touch()
    with pytest.raises(FileProblem, match=r"cannot read .*record\.jsonl"):
        begin(tmp_path, is_takeover=True)


def refusal(folder):
    """Why a coordinator cannot take over the run in a folder, as a sentence."""
    notices, endpoint = [], Endpoint("127.0.0.1", 1, "token", "job")
    config = coordinator_config(replace(make_job(), out=folder), endpoint, 0, folder)
    with socket.socket() as listener:
        serve_job(config, listener, SimpleNamespace(send=notices.append), before=())
    (refused,) = notices
    assert isinstance(refused.problem, FileProblem)
    return str(refused.problem)


def test_a_coordinator_that_cannot_take_over_says_why_and_how_the_run_goes_on(one_step):
    (one_step / "record.jsonl").unlink()
    said = refusal(one_step)
    assert said.startswith(f"no other coordinator can take over: cannot read {one_step / 'record.jsonl'}: ")
    assert said.endswith(f"; go on from the last checkpoint with: recycle train --resume {one_step}")


def test_a_coordinator_waits_until_that_of_a_run_which_was_killed_has_left_the_folder(one_step, monkeypatch):
    (one_step / "record.jsonl").unlink()
    with contextlib.ExitStack() as earlier:
        earlier.enter_context(locked(one_step))
        monkeypatch.setattr("recycle.host.folder_lock.time.sleep", lambda seconds: earlier.close())
        assert "cannot read" in refusal(one_step)  # and not: it is in use


# A disk without room.


@contextlib.contextmanager
def no_room_after(path, num_bytes):
    """Let no file grow beyond this one and some bytes more. Python ignores the signal, and gets an error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_coordinator_takes_over_although_the_disk_is_full(one_step):
    written, plan = list(read_record(one_step / "record.jsonl")), (one_step / "plan.json").stat()
    with no_room_after(one_step / "record.jsonl", 0), begin(one_step, is_takeover=True) as run:
        assert list(run.before) == [event for event in written if not isinstance(event, OpRan)]
        assert run.write(WARNED) is not None
    assert list(read_record(one_step / "record.jsonl")) == written
    assert (one_step / "plan.json").stat().st_ino == plan.st_ino  # another file would need room


def test_what_had_no_room_in_the_record_is_written_when_there_is_room_again(tmp_path):
    with begin(tmp_path) as run:
        with no_room_after(tmp_path / "record.jsonl", 10):
            said = [run.write(*iteration(0, 10, 20)), run.write(WARNED)]
            assert not run.is_written
            assert list(read_record(tmp_path / "record.jsonl")) == [STARTED]  # the line that was cut short is left out
        assert [said[0].partition(":")[0], said[1]] == [f"cannot write {tmp_path / 'record.jsonl'}, but training goes on", None]
        assert run.write(*iteration(1, 20, 30)) is None
        assert run.is_written
    assert list(read_record(tmp_path / "record.jsonl")) == [STARTED, *iteration(0, 10, 20), WARNED, *iteration(1, 20, 30)]


def test_a_record_for_which_there_is_room_only_at_the_end_is_whole(tmp_path):
    with begin(tmp_path) as run:
        with no_room_after(tmp_path / "record.jsonl", 10):
            run.write(*iteration(0, 10, 20))
        assert not run.is_written
    assert list(read_record(tmp_path / "record.jsonl")) == [STARTED, *iteration(0, 10, 20)]


def test_a_record_that_waits_for_room_too_long_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_MOST_UNWRITTEN_BYTES", 500)
    with begin(tmp_path) as run, no_room_after(tmp_path / "record.jsonl", 0):
        said = [run.write(*iteration(number, 10 * number, 10 * number + 10)) for number in range(4)]
    assert [sentence[:20] for sentence in said if sentence] == ["cannot write " + str(tmp_path)[:7], "the record ends here"]
    assert run.is_written
    assert list(read_record(tmp_path / "record.jsonl")) == [STARTED]


def test_a_run_goes_on_from_a_checkpoint_whose_last_steps_had_no_room_in_the_record(tmp_path):
    with begin(tmp_path) as run:
        run.write(PAUSE, *iteration(0, 10, 20))
        save_all(run.checkpoints, run.checkpoint_folder, 3)
    with begin(tmp_path, resume=True) as again:
        assert [again.losses[0], len(again.losses)] == [5.0, 3]
        assert all(map(math.isnan, again.losses[1:]))
    ledger = RunLedger(PLAN, 12, PLAN.problem.profile, lambda events: None, None, begin_us=0)
    ledger.restore(read_record(tmp_path / "record.jsonl"))  # as another coordinator does
    assert ledger.num_steps == 3
    ledger.restore([*read_record(tmp_path / "record.jsonl"), *iteration(3, 40, 50)])
    assert ledger.num_steps == 4


WHOLE = [STARTED, PAUSE, *iteration(0, 10, 20)]
BACK = Recovered(22, 25, 2, ("W1_0",), False, "killed", 1)


@pytest.mark.parametrize("num_written", range(4))
def test_a_step_that_was_not_written_to_its_end_is_written_again(num_written):
    assert without_unfinished([*WHOLE, *iteration(1, 20, 30)[:num_written]]) == WHOLE
    assert without_unfinished(iteration(0, 10, 20)[:num_written]) == []


def test_a_recovery_that_was_not_written_to_its_end_is_written_again_and_what_stands_alone_stays():
    undone = OpRan(1, "W0_0", "0F0@0", 20, 22, is_in_vain=True)
    alone = [Changed(22, "W1_0", False, 3), WARNED, undone, Saved(30, 1, "step-00000001", 5)]
    spell = Spell(20, 22, "redo", "failure")
    assert without_unfinished([*WHOLE, *alone, spell]) == [*WHOLE, *alone]
    assert without_unfinished([*WHOLE, *alone, spell, BACK, WARNED]) == [*WHOLE, *alone, spell, BACK, WARNED]


def test_the_time_before_a_resume_is_known_to_a_coordinator_that_takes_over_before_the_first_step(tmp_path):
    run = [STARTED, PAUSE, *iteration(0, 10, 20), Resumed(20, 1), WARNED]
    write_record(tmp_path / "record.jsonl", run)
    with begin(tmp_path, resume=True, is_takeover=True) as found:
        assert (found.gone_us, list(found.before)) == (20, [event for event in run if not isinstance(event, OpRan)])


# What workers without the folder may send and ask for.


@pytest.mark.parametrize(("num_steps", "stage"), [(1, 0), (123_456_789, 31)])
def test_a_worker_may_store_an_attempt_at_an_unfinished_checkpoint_and_read_a_stage_of_a_whole_one(num_steps, stage):
    attempt = f"{step_folder(num_steps)}{PARTIAL}/{attempt_file(stage)}"
    whole = f"{step_folder(num_steps)}/{stage_file(stage)}"
    assert [is_of_a_checkpoint(UploadFile(name, 10)) for name in (attempt, whole)] == [True, False]
    assert [is_of_a_checkpoint(DownloadFile(name)) for name in (attempt, whole)] == [False, True]
    assert is_of_a_checkpoint(DownloadFile(f"{step_folder(num_steps)}/manifest.json"))
    assert not is_of_a_checkpoint(UploadFile(f"{step_folder(num_steps)}/manifest.json", 10))
    assert not is_of_a_checkpoint(FileContent(10))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "config.toml",
        "step-00000001",
        "step-00000001/manifest.json.partial",
        "step-00000001.partial/manifest.json",
        "step-00000001.partial/stage-0.safetensors",
        "step-00000001/stage-0.0123abcd.safetensors",
        "step-00000001.partial/stage-0.0123ABCD.safetensors",
        "step-00000001.partial/stage-0.0123abcd.safetensors.partial",
        "step-00000001.partial/stage-0.0123abcd.safetensors\n",
        "../step-00000001/stage-0.safetensors",
        "../step-00000001.partial/stage-0.0123abcd.safetensors",
        "/step-00000001/stage-0.safetensors",
        "/tmp/step-00000001.partial/stage-0.0123abcd.safetensors",
        "step-00000001/../step-00000001/stage-0.safetensors",
        "step-00000001.partial/../../stage-0.0123abcd.safetensors",
        "step-00000001/stage-0.safetensors/../../../config.toml",
        "step-00000001\\stage-0.safetensors",
    ],
)
def test_a_worker_may_neither_store_nor_read_anything_else(name):
    assert not is_of_a_checkpoint(UploadFile(name, 10))
    assert not is_of_a_checkpoint(DownloadFile(name))
