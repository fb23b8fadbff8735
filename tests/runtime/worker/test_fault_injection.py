"""Failures on purpose happen at the very moment that the script names, once, and say when they did."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.failure_script import Action, Injection
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.execute.spans import now_us
from recycle.runtime.worker.epoch_setup import worker_program
from recycle.runtime.worker.fault_injection import FaultInjector, death_us
from tests.processes import is_there, wait_for

pytestmark = pytest.mark.timeout(60)
on_linux = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="asks Linux's /proc who is there")
WORKER = Worker(0, 1)


def instructions(fail=""):
    plan = recycle.solve(recycle.problem(2, 2, 3, fail=fail, costs=(1, 1, 1)), "greedy")
    return worker_program(row_programs(plan)[WORKER], plan.problem.shape).instructions


def parse(action, place):
    return Injection.parse(action, f"W0_1@{place}")


def labels(fail=""):
    return [each.label for each in instructions(fail)]


def strikes(injector, row, num_iterations=3):
    """Where a worker that plays this row is struck, iteration by iteration."""
    found = []
    for iteration in range(num_iterations):
        for what in (*row, "reduce", "optimizer", "checkpoint"):
            try:
                injector.on_progress(iteration, what)
            except RuntimeError:  # as it was asked for
                found.append((iteration, what))
    return found


# When.


def moments():
    row = labels()
    return {
        "": row[len(row) // 2],
        ":first": row[0],
        ":last": row[-1],
        ":1F1@0": "1F1@0",
        ":reduce": "reduce",
        ":step": "optimizer",
        ":checkpoint": "checkpoint",
    }


@pytest.mark.parametrize("place", moments())
def test_a_failure_comes_at_its_moment_of_its_step_and_never_again(place):
    injector = FaultInjector([parse(Action.FAIL, f"2{place}")], None)
    injector.instructions = instructions()
    assert strikes(injector, labels()) == [(1, moments()[place])]


def test_an_op_that_somebody_else_runs_strikes_nobody():
    injector = FaultInjector([parse(Action.FAIL, "2:1F0@1")], None)
    injector.instructions = instructions()
    assert "1F0@1" not in labels()
    assert strikes(injector, labels()) == []


def test_the_middle_is_that_of_the_row_that_is_played_now():
    injector = FaultInjector([parse(Action.FAIL, "1"), parse(Action.FAIL, "2")], None)
    before, after = labels(), labels(fail="W1_1")
    assert before[len(before) // 2] != after[len(after) // 2]
    injector.instructions = instructions()
    assert strikes(injector, before, 1) == [(0, before[len(before) // 2])]
    injector.instructions = instructions(fail="W1_1")
    assert strikes(injector, after) == [(1, after[len(after) // 2])]


def test_an_iteration_that_is_done_again_is_not_struck_again():
    injector = FaultInjector([parse(Action.FAIL, "1:first")], None)
    injector.instructions = instructions()
    assert strikes(injector, labels(), 1) == [(0, labels()[0])]
    assert strikes(injector, labels(), 1) == []


def test_of_two_things_at_one_moment_both_happen():
    injector = FaultInjector([parse(Action.SLOW, "1:reduce+0.05s"), parse(Action.FAIL, "1:reduce")], None)
    injector.instructions = instructions()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="asked for"):
        injector.on_progress(0, "reduce")
    assert time.monotonic() - began_s >= 0.05


@pytest.mark.parametrize(("resumed_at", "is_struck"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_recovery_is_struck_whether_its_iteration_is_done_again_or_was_settled(resumed_at, is_struck):
    injector = FaultInjector([parse(Action.FAIL, "2:recovery")], None)
    injector.instructions = instructions()
    assert strikes(injector, labels()) == []
    if is_struck:
        with pytest.raises(RuntimeError, match="asked for"):
            injector.on_recovery(resumed_at)
    injector.on_recovery(resumed_at)  # once


@pytest.mark.parametrize(("resumed_at", "is_struck"), [(0, False), (1, True), (7, True)])
def test_a_copy_is_struck_in_its_iteration_or_later_because_a_worker_comes_back_when_it_has_loaded(resumed_at, is_struck):
    injector = FaultInjector([parse(Action.FAIL, "2:transfer")], None)
    injector.instructions = instructions()
    assert strikes(injector, labels()) == []
    injector.on_recovery(resumed_at)
    if is_struck:
        with pytest.raises(RuntimeError, match="asked for"):
            injector.on_transfer(resumed_at)
    injector.on_transfer(resumed_at)  # once


# What.


@contextmanager
def child(*injections, deaths=None):
    """The id of a process that comes to the first op of its first iteration, and ends with 0 if it gets beyond that."""
    injector = FaultInjector(injections, deaths)
    injector.instructions = instructions()
    first = labels()[0]
    pid = os.fork()
    if pid == 0:
        try:
            injector.on_progress(0, first)
            os._exit(0)
        finally:
            os._exit(9)
    try:
        yield pid
    finally:
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_kill_is_a_kill_and_its_moment_is_noted(tmp_path):
    before_us = now_us()
    with child(parse(Action.KILL, "1:first"), deaths=tmp_path / "deaths") as pid:
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert before_us <= death_us(tmp_path / "deaths", pid) <= now_us()


def test_who_hangs_stands_still_until_it_is_killed(tmp_path):
    with child(parse(Action.HANG, "1:first"), deaths=tmp_path / "deaths") as pid:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert death_us(tmp_path / "deaths", pid) > 0


def test_who_hangs_for_a_time_wakes_up_and_goes_on():
    began_s = time.monotonic()
    with child(parse(Action.HANG, "1:first+0.3s")) as pid:
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert time.monotonic() - began_s > 0.3


def wakers(pid):
    """Who is there to wake this process up."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        found += [int(path.parent.name)] if f"kill -CONT {pid}".encode() in words else []
    return found


@on_linux
def test_nobody_is_left_behind_to_wake_up_who_was_killed():
    with child(parse(Action.HANG, "1:first+1000s")) as pid:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        wait_for(lambda: bool(wakers(pid)), 10)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_for(lambda: not wakers(pid), 10)


# The notes.


def test_the_last_note_of_a_process_counts_and_a_torn_one_does_not(tmp_path):
    deaths = tmp_path / "deaths"
    assert death_us(deaths, 7) == 0
    deaths.write_text("7 100\n71 200\n7 300\n8 400\n9")
    assert [death_us(deaths, pid) for pid in (7, 8, 71, 9, 1)] == [300, 400, 200, 0, 0]


def test_without_a_place_for_notes_things_happen_all_the_same():
    with child(parse(Action.KILL, "1:first")) as pid:
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
