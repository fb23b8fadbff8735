"""Workers are killed, hang and come back while training runs: the weights come out the same, bit for bit, and nothing is left."""

import json
import multiprocessing
import os
import signal
import threading

import pytest

import recycle
from recycle.cli.main import main
from recycle.core.errors import PeersDiffer, WorkerFailed
from recycle.core.events.record import Changed, Spell, Stepped, Suspected, Warned
from recycle.core.events.record_file import read_record
from recycle.core.plans.row_programs import warm_ups
from recycle.report.record.run_columns import read_run_record
from tests.processes import depends_on_load
from tests.runtime.recovery_runs import ALL, STEPS, SYNCHRONOUS, Run, problem, undisturbed, unhurried_stages

pytestmark = pytest.mark.timeout(240)
# Between the norms of the first and the last steps: some are clipped, some are not.
CLIPPING = 0.5


@pytest.mark.parametrize(
    ("techniques", "max_norm", "lean_steps"),
    [(ALL, CLIPPING, False), (ALL, CLIPPING, True), pytest.param(SYNCHRONOUS, None, False, marks=pytest.mark.slow)],
)
def test_kills_at_any_op_in_the_reduction_and_between_steps_change_nothing(techniques, max_norm, lean_steps):
    shape = (5, 2, 2)
    lines = ("W0_0@2:first", "W1_1@3", "W2_0@4:last", "W3_1@5:reduce", "W4_0@6:step", "W0_1@7:step", "W1_0@8:reduce")
    options = {"techniques": techniques, "max_norm": max_norm, "lean_steps": lean_steps}
    run = Run(shape, *(f"kill {line}" for line in lines), **options)
    weights, losses = undisturbed(shape, max_norm=max_norm)
    assert run.trained.weights_sha256 == weights
    assert list(run.trained.losses) == losses
    assert sorted(run.lost) == sorted(line.partition("@")[0] for line in lines)
    plan = recycle.solve(problem(shape, techniques), "greedy")
    most_ops = plan.num_ops + sum(warm_ups(plan).values())
    for recovery in run.recoveries:
        assert recovery.cause == "its connection closed"
        assert recovery.redone_ops <= most_ops  # the iteration in flight, and what had begun of the next one
        assert recovery.lost_us == sum(recovery.parts_us.values())
        assert recovery.end_us - recovery.at_us == pytest.approx(recovery.lost_us - recovery.redo_us, abs=2000)
    steps = [event.iteration for event in run.of(Stepped)]
    assert steps == list(range(STEPS))  # none twice


@pytest.mark.slow
def test_one_in_every_stage_at_once_and_one_more_in_the_recovery_from_that():
    shape = (3, 3, 2)
    run = Run(shape, "kill W0_0@3", "kill W1_1@3", "kill W2_2@3", "kill W1_0@3:recovery")
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    assert sorted(run.lost) == ["W0_0", "W1_0", "W1_1", "W2_2"]


def test_a_worker_that_hangs_is_fenced_by_its_lease_and_does_nothing_when_it_continues():
    # It hangs for much longer than its lease, because a coordinator that is itself late grants the time that it was late.
    shape, lease_s, steps = (3, 2, 2), 1.0, 40
    run = Run(shape, "hang W0_1@3+4s", lease_s=lease_s, pause_s=0.05, steps=steps)
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    (recovery,), (suspected,) = run.recoveries, run.of(Suspected)
    assert suspected.node == "W0_1"
    assert recovery.cause.startswith("silent for ")
    assert run.of(Stepped)[-1].at_us > recovery.at_us + 4e6  # it continued while the others were training
    with depends_on_load():
        assert lease_s * 0.5e6 < recovery.detect_us < lease_s * 1e6 + 2e6


def test_a_worker_that_is_far_behind_its_plan_or_fails_by_itself_is_replaced():
    shape = (3, 2, 2)
    run = Run(shape, "fail W1_0@2", "slow W0_1@4+20s", lease_s=1.0)
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    failed, slow = run.recoveries
    assert "this failure was asked for" in failed.cause
    assert slow.cause.startswith("far behind its plan")


@pytest.mark.slow
def test_kill_rejoin_kill_again_and_rejoin():
    shape, steps = (2, 2, 2), 80
    lines = ("kill W1_1@3", "rejoin W1_1@4", "kill W1_1@40", "rejoin W1_1@41", "kill coordinator@6")
    run = Run(shape, *lines, steps=steps, pause_s=0.02, max_norm=CLIPPING)
    weights, losses = undisturbed(shape, steps, CLIPPING)
    assert run.trained.weights_sha256 == weights
    assert list(run.trained.losses) == losses
    changes = [(event.node, event.joins) for event in run.of(Changed)]
    assert [joins for _, joins in changes] == [False, True, False, True], changes
    assert run.recoveries[-1].num_live == 4, [(event.cause, event.workers) for event in run.recoveries]
    assert {(event.redone_ops, event.redo_us) for event in run.recoveries if event.joins} == {(0, 0)}


def test_a_stage_without_a_survivor_gets_another_worker_and_all_resume_from_the_last_checkpoint(tmp_path):
    shape = (2, 2, 3)
    run = Run(shape, "kill W0_1@7", "kill W1_1@7", out=tmp_path, every=2)
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    assert list(run.trained.losses) == undisturbed(shape)[1]
    assert any(move.endswith("_1") for recovery in run.recoveries for move in recovery.moves)
    assert min(recovery.iteration for recovery in run.recoveries) <= 6
    assert recycle.load(unhurried_stages(2, 0), tmp_path) == STEPS
    known = read_run_record(read_record(tmp_path / "record.jsonl"))
    again = len(run.of(Stepped)) - STEPS
    samples = known.metrics.samples // STEPS
    assert known.metrics.samples == samples * STEPS == sum(event.samples for event in run.of(Spell)) - samples * again
    assert len(known.train_spells) == STEPS


def test_a_kill_in_the_first_step_leaves_a_run_that_can_be_read(tmp_path, capsys):
    shape = (2, 2, 2)
    run = Run(shape, "kill W1_1@1", out=tmp_path)
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    (left,) = run.recoveries
    assert left.iteration == 0
    assert main(["report", str(tmp_path), "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["plan_file"] == str(tmp_path / "plans" / "from-iteration-0.json")
    assert known["iterations"]["whole"] == STEPS
    assert main(["report", str(tmp_path), "--iteration", "0"]) == 0
    assert capsys.readouterr().out.count("dead") >= 2  # as executed, and as planned
    spells = run.of(Spell)
    assert sum(spell.length_us for spell in spells) == pytest.approx(max(spell.end_us for spell in spells), abs=2000)


def test_without_anybody_to_spare_it_says_what_it_waits_for_and_goes_on_when_that_comes():
    shape = (2, 2, 2)
    run = Run(shape, "kill W0_1@3", "kill W1_1@3", "kill W0_0@3", "rejoin W1_1@8")
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    assert any("training waits: no worker is left for stage" in event.text for event in run.of(Warned))


def test_if_nobody_can_ever_join_the_run_ends_and_says_how_to_resume_it(tmp_path):
    lines = ("kill W0_1@5", "kill W1_1@5", "kill W0_0@5")
    words = "no worker is left for stage .*, and nobody else can join this run; resume it from its last checkpoint: recycle train"
    with pytest.raises(WorkerFailed, match=words):
        Run((2, 2, 2), *lines, out=tmp_path, every=2)
    assert not multiprocessing.active_children()


def test_a_kill_while_a_checkpoint_is_written_and_one_in_the_last_step(tmp_path):
    shape = (2, 2, 2)
    run = Run(shape, "kill W0_0@4:checkpoint", "kill W1_1@10:step", out=tmp_path, every=2)
    assert run.trained.weights_sha256 == undisturbed(shape)[0]
    assert sorted(run.lost) == ["W0_0", "W1_1"]
    assert recycle.load(unhurried_stages(2, 0), tmp_path) == STEPS


@pytest.mark.slow
def test_a_kill_from_outside_at_any_time_is_safe():
    shape, steps = (3, 2, 2), 60
    killed = []

    def kill_now_and_then(event):
        if isinstance(event, Stepped) and event.iteration in (5, 25, 45):
            victims = [child for child in multiprocessing.active_children() if child.name.startswith("W") and child.is_alive()]
            victim = sorted(victims, key=lambda child: child.name)[event.iteration % len(victims)]
            killed.append(victim.name)
            threading.Timer(0.013, os.kill, (victim.pid, signal.SIGKILL)).start()

    run = Run(shape, steps=steps, pause_s=0.002, watch=kill_now_and_then)
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    assert len(killed) == 3
    assert len([event for event in run.of(Changed) if not event.joins]) == 3


@pytest.mark.parametrize("victims", [pytest.param(("W1_1",), marks=pytest.mark.slow), ("W0_1", "W1_1")])
def test_workers_that_die_are_started_again_also_all_of_a_stage(victims, tmp_path):
    shape, steps = (2, 2, 2), 50
    killed = []

    def kill(event):
        if isinstance(event, Stepped) and event.iteration == 5 and not killed:
            killed.extend(child.pid for child in multiprocessing.active_children() if child.name in victims)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    run = Run(shape, steps=steps, pause_s=0.02, watch=kill, restarts=1, out=tmp_path, every=4)
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    changes = run.of(Changed)
    assert sorted(event.node for event in changes if not event.joins) == sorted(victims)
    assert sum(event.joins for event in changes) == len(victims)  # not always where they were: others may have moved there
    assert run.recoveries[-1].num_live == 4


def test_nothing_is_left_open_in_the_process_that_launched_it():
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    shape = (2, 2, 2)
    Run(shape, "kill W0_1@3")
    before = held()
    Run(shape, "kill W0_1@3")
    assert held() == before


# Silent corruption.


def test_a_flipped_bit_is_found_named_and_healed_where_three_peers_hold_the_stage(tmp_path):
    shape, steps = (3, 2, 2), 24
    run = Run(shape, "corrupt W1_1@9", steps=steps, out=tmp_path, every=4, compare_every=2, pause_s=0.02)
    assert run.trained.weights_sha256 == undisturbed(shape, steps)[0]
    assert list(run.trained.losses) == undisturbed(shape, steps)[1]
    text = "W0_1, W1_1, W2_1 hold different weights after step 10; all peers agreed after step 8"
    assert text in [event.text for event in run.of(Warned)]
    (suspected,) = run.of(Suspected)
    assert (suspected.node, suspected.reason) == ("W1_1", "its weights after step 10 are not those of its peers")
    assert run.recoveries[-1].num_live == 6  # another process has copied the weights from a peer
    assert recycle.load(unhurried_stages(2, 0), tmp_path) == steps


@pytest.mark.slow
def test_without_a_checkpoint_the_majority_goes_on():
    shape = (3, 2, 2)
    run = Run(shape, "corrupt W2_0@3", steps=20, compare_every=2, pause_s=0.02)
    assert len(run.trained.losses) == 20
    assert [event.node for event in run.of(Suspected)] == ["W2_0"]
    assert run.recoveries[0].iteration >= 4


@pytest.mark.parametrize("compare_every", [2, 0])
def test_two_peers_that_differ_end_the_run_with_both_names(compare_every):
    with pytest.raises(
        PeersDiffer, match=r"W0_1, W1_1 hold different weights after step (6|10); all peers agreed after step (4|0)"
    ):
        Run((2, 2, 2), "corrupt W1_1@5", compare_every=compare_every)
    assert not multiprocessing.active_children()
