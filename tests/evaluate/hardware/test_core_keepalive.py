"""The core keepalive: one process a core, at the lowest priority, which ends with its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle.evaluate.hardware import core_keepalive
from recycle.evaluate.hardware.core_keepalive import EvenCores, Keepers, are_cores_migrated, even_cores, keepers
from recycle.profiling.machine import usable_cores

pytestmark = pytest.mark.timeout(60)


def children(pid):
    return [int(own) for own in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(is_so):
    for _ in range(400):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def is_spinning(pid):
    return os.sched_getscheduler(pid) == os.SCHED_IDLE


def busy_s(pid):
    """The processor time that a process has taken."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def grows(pid):
    before = busy_s(pid)
    return wait_until(lambda: busy_s(pid) > before + 0.02)


def test_every_core_has_a_process_of_the_lowest_priority_until_the_context_ends():
    before = set(children(os.getpid()))
    cores = sorted(os.sched_getaffinity(0))
    with keepers(cores) as kept:
        pids = set(children(os.getpid())) - before
        assert len(pids) == len(cores)
        assert wait_until(lambda: all(map(is_spinning, pids)))
        of_core = {core: pid for pid in pids for core in os.sched_getaffinity(pid)}
        assert sorted(of_core) == cores
        kept.keep_awake(cores[:1])
        assert grows(of_core[cores[0]])
        kept.keep_awake(cores[1:])
        speeds = kept.speeds(cores[:1])
        assert list(speeds) == cores[:1]
        assert speeds[cores[0]] > 0
    assert not set(children(os.getpid())) & pids


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_core_that_rests_takes_no_time():
    cores = sorted(os.sched_getaffinity(0))[:2]
    before = set(children(os.getpid()))
    with keepers(cores) as kept:
        pids = set(children(os.getpid())) - before
        assert wait_until(lambda: all(map(is_spinning, pids)))
        of_core = {core: pid for pid in pids for core in os.sched_getaffinity(pid)}
        kept.keep_awake(cores)
        assert all(map(grows, of_core.values()))
        kept.keep_awake(cores[:1])
        kept.speeds(cores[:1])  # told after the other one was told to rest
        time.sleep(0.1)
        slept = busy_s(of_core[cores[1]])
        assert grows(of_core[cores[0]])
        assert busy_s(of_core[cores[1]]) == slept


def test_the_processes_end_with_a_parent_that_is_killed():
    code = """import time
from recycle.evaluate.hardware.core_keepalive import keepers
with keepers([CORE]) as kept:
    kept.keep_awake([CORE])
    print('here', flush=True)
    time.sleep(60)""".replace("CORE", str(min(os.sched_getaffinity(0))))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "here\n"
        spinners = children(parent.pid)
        assert wait_until(lambda: all(map(is_spinning, spinners)))
        parent.kill()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in spinners))


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_measurement(monkeypatch):
    monkeypatch.setattr(core_keepalive, "_ANSWER_S", 0.05)
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as answers, open(writing, "wb", 0) as keeper, open(os.devnull, "wb", 0) as told:
        kept = Keepers({7: (told, answers)})
        with pytest.raises(TimeoutError, match="core 7 has not answered"):
            kept.speeds([7])
        keeper.write(b"0 50\n1 100\n")
        assert kept.speeds([7]) == {7: 100.0}


class Machine:
    """Cores of which those that share a physical core have half of its speed while both are busy."""

    def __init__(self, *pairs):
        self.pairs, self.num_measured = pairs, 0

    def speeds(self, cores):
        self.num_measured += 1
        halved = {core for pair in self.pairs if set(pair) <= set(cores) for core in pair}
        return {core: 50.0 if core in halved else 100.0 for core in cores}


def test_a_core_that_shares_a_physical_one_is_exchanged():
    machine = Machine((0, 1), (2, 9))
    chosen = EvenCores(range(10), 6, machine.speeds)
    assert set(machine.speeds(chosen.choose()).values()) == {100.0}
    first = list(chosen.cores)
    machine.pairs = ((first[0], first[1]), (first[2], first[3]))
    again = chosen.choose()
    assert set(machine.speeds(again).values()) == {100.0}
    assert len(set(again)) == 6
    assert [core for core in again if core in first[4:]] == first[4:]  # workers that have good cores stay


def test_cores_that_become_uneven_after_they_were_chosen_are_noticed():
    machine = Machine()
    chosen = EvenCores(range(10), 6, machine.speeds)
    cores = chosen.choose()
    assert chosen.evenness() == 1
    machine.pairs = ((cores[0], cores[1]),)
    assert chosen.evenness() == 0.5
    machine.pairs = tuple(zip(cores[::2], cores[1::2], strict=True))  # all of them: only earlier speeds show that
    assert chosen.evenness() == 0.5


def test_even_cores_are_measured_once_and_stay():
    machine = Machine()
    chosen = EvenCores(range(16), 12, machine.speeds)
    assert list(chosen.choose()) == list(range(12))
    assert machine.num_measured == 2  # spare ones once, to know how fast a core can be


def test_cores_that_are_all_slow_are_not_taken_for_even():
    machine = Machine((0, 1), (2, 3))
    chosen = EvenCores(range(8), 4, machine.speeds)
    assert set(machine.speeds(chosen.choose()).values()) == {100.0}


def test_without_spare_cores_there_is_nothing_to_exchange(capsys):
    machine = Machine((0, 1))
    assert list(EvenCores(range(3), 3, machine.speeds).choose()) == [0, 1, 2]
    assert machine.num_measured == 1
    assert "has 50% of the highest speed" in capsys.readouterr().err


def test_cores_that_cannot_be_measured_are_taken_as_they_are(monkeypatch, capfd):
    monkeypatch.setattr(core_keepalive, "_KEEPER", "raise SystemExit")
    num = len(os.sched_getaffinity(0))
    with even_cores() as measured:
        assert list(measured.choose(num)) == list(usable_cores())
        assert measured.evenness() is None
        assert list(measured.choose(num + 1)) == []
    assert "the speeds of cores cannot be measured" in capfd.readouterr().err


def test_workers_get_cores_that_are_awake_and_all_are_awake_without_workers():
    cores, before = usable_cores(), set(children(os.getpid()))
    with even_cores() as measured:
        assert measured.evenness() is None
        pids = set(children(os.getpid())) - before
        assert wait_until(lambda: all(map(is_spinning, pids)))
        assert sorted(measured.choose(len(cores))) == sorted(cores)
        evenness = measured.evenness()
        assert evenness is not None
        assert 0 < evenness <= 1
        assert list(measured.choose(0)) == []
        assert measured.evenness() is None
        assert all(map(grows, pids))


def test_where_no_choice_is_even_the_best_is_taken_after_a_while_and_said(capsys):
    machine = Machine((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    chosen = EvenCores(range(4), 3, machine.speeds)
    cores = chosen.choose()
    assert len(set(cores)) == 3
    assert sorted([*cores, *chosen._spare]) == list(range(4))
    assert machine.num_measured < 20
    assert "cores are uneven: the slowest has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "quota", "are"),
    [
        ("flags\t: fpu hypervisor lahf_lm\n", None, True),
        ("flags\t: fpu hypervisor lahf_lm\n", "max 100000\n", True),
        ("flags\t: fpu hypervisor lahf_lm\n", "200000 100000\n", False),  # the keepalive would use up the CPU quota
        ("flags\t: fpu lahf_lm\n", None, False),
        (None, None, False),
    ],
)
def test_cores_are_migrated_if_they_belong_to_a_hypervisor_without_a_quota(cores, quota, are, tmp_path, monkeypatch):
    for name, text in (("_CPU_INFO", cores), ("_QUOTA", quota)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(core_keepalive, name, path)
    assert are_cores_migrated() == are
