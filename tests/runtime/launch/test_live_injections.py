"""Failures that a user asks for while a run goes on: on processes of the run alone, and each answered with a sentence."""

import json
import multiprocessing
import time

import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.live_injection import LIVE_ACTIONS, LiveInjection
from recycle.host.process_lifetime import process_state
from recycle.runtime.launch.live_injections import LiveInjections
from tests.processes import wait_for


def _sleep():
    time.sleep(60)


PLACE = Worker(0, 0)


class Setting:
    """Injections with two processes, and what was asked to be started."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.workers = [context.Process(target=_sleep, name=name, daemon=True) for name in ("W0_0", "W1_0")]
        for worker in self.workers:
            worker.start()
        self.pipe, theirs = multiprocessing.Pipe()  # after the processes, which would hold its ends open
        self.injections = LiveInjections(theirs)
        self.started = []

    def ask(self, action, place=PLACE, pid=None):
        """The answer to a request about the first process, unless another is named."""
        asked = LiveInjection(action, place, self.workers[0].pid if pid is None else pid)
        return self.answer(asked.dumps())

    def answer(self, request):
        self.pipe.send_bytes(request)
        self.injections.handle(self.workers, self.started.append)
        assert self.pipe.poll(5)
        return json.loads(self.pipe.recv_bytes())


@pytest.fixture
def setting():
    made = Setting()
    yield made
    made.injections.close()
    for worker in made.workers:
        worker.kill()
        worker.join()


def test_a_killed_worker_is_not_started_again_by_itself(setting):
    # Its process came from W0_0, and has the place W1_1 by now.
    assert setting.ask("kill", Worker(1, 1))["done"].startswith("W1_1 (pid ")
    setting.workers[0].join(20)
    assert setting.workers[0].exitcode == -9
    assert setting.injections.held == {"W0_0"}
    assert setting.workers[1].exitcode is None


def test_a_worker_hangs_and_goes_on(setting):
    pid = setting.workers[0].pid
    assert "hangs" in setting.ask("hang")["done"]
    wait_for(lambda: process_state(pid) == "T")
    assert "full speed" in setting.ask("resume")["done"]
    wait_for(lambda: process_state(pid) == "S")


def test_a_slow_worker_stops_again_and_again_until_it_is_released(setting):
    pid, seen = setting.workers[0].pid, set()
    assert "half its speed" in setting.ask("slow")["done"]
    assert "already" in setting.ask("slow")["problem"]
    wait_for(lambda: seen.add(process_state(pid)) or seen >= {"T", "S"})
    setting.ask("resume")
    wait_for(lambda: all(process_state(pid) == "S" for _ in range(50) if not time.sleep(0.002)))


def test_a_new_process_is_started_once_while_it_loads(setting):
    setting.injections.held.add("W1_1")
    assert "was started" in setting.ask("start", Worker(1, 1), 0)["done"]
    assert "loading already" in setting.ask("start", Worker(1, 1), 0)["problem"]
    assert setting.started == [Worker(1, 1)]
    assert setting.injections.held == set()


@pytest.mark.parametrize("pid", [0, 1, 2**31 - 1])
def test_a_process_that_is_not_of_the_run_is_left_alone(setting, pid):
    assert "no process that runs" in setting.ask("kill", pid=pid)["problem"]


@pytest.mark.parametrize("request_", [b"", b"{}", b"[]", b'{"format":"recycle-injection","version":2}', b"\xff", b"kill W0_0"])
def test_anything_else_is_refused_and_answered(setting, request_):
    assert "injection" in setting.answer(request_)["problem"]
    assert all(worker.exitcode is None for worker in setting.workers)


def test_a_pipe_that_is_closed_ends_injections_and_not_the_run(setting):
    setting.pipe.close()
    setting.injections.handle(setting.workers, setting.started.append)
    assert setting.injections.pipe is None


def test_an_injection_is_read_back_as_it_was_written():
    for action in LIVE_ACTIONS:
        made = LiveInjection(action, Worker(3, 2), 4711)
        assert LiveInjection.loads(made.dumps()) == made
    with pytest.raises(UserError, match="is no action"):
        LiveInjection.of("explode", Worker(0, 0))
