"""A plan that takes too long ends with its process, and the next question is answered."""

import asyncio
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context

import pytest

from recycle.dashboard.web.planners import Planners
from tests.processes import wait_for


def own_pid():
    return {"pid": os.getpid()}


def plan_for_ever():
    time.sleep(600)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_was_killed_while_it_waited_is_replaced():
    async def ask_after_the_kill():
        planners = Planners(partial(ProcessPoolExecutor, 1, get_context("fork")))
        first = await planners.ask(own_pid, 60)
        os.kill(first["pid"], signal.SIGKILL)
        answers = []
        for _ in range(2):
            with suppress(BrokenProcessPool):
                answers.append(await planners.ask(own_pid, 60))
        planners.close()
        return first, answers[-1]

    first, last = asyncio.run(ask_after_the_kill())
    assert first != last


def test_a_question_that_takes_too_long_does_not_keep_the_next_one_waiting():
    async def ask_three():
        planners = Planners(partial(ProcessPoolExecutor, 1, get_context("fork")))
        first = await planners.ask(own_pid, 60)
        with pytest.raises(TimeoutError):
            await planners.ask(plan_for_ever, 0.2)
        second = await planners.ask(own_pid, 60)
        planners.close()
        return first["pid"], second["pid"]

    first, second = asyncio.run(ask_three())
    assert first != second
    wait_for(lambda: not is_running(first), 20)
