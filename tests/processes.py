"""Looking after processes that a test has started."""

import contextlib
import os
import signal
import time
from pathlib import Path


def is_there(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def deadline(seconds):
    """Raise TimeoutError in the main thread if the block takes longer; not beside pytest-timeout, which uses the same signal."""

    def give_up(*_):
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(condition, seconds):
    """Wait until `condition` holds, at most so long; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


class MeasuredOtherwise(Exception):
    """A time or a speed is not as asserted; other programs on the machine may be why."""


@contextlib.contextmanager
def depends_on_load():
    """For assertions of times and speeds alone: where one fails, CI may run the test again. All other assertions are final."""
    try:
        yield
    except AssertionError as problem:
        raise MeasuredOtherwise(problem) from problem


def wait_for(condition, seconds=90.0, problem="it did not come"):
    """Fail unless `condition` holds within so long."""
    assert until(condition, seconds), f"{problem() if callable(problem) else problem} (waited {seconds:g} s)"


def ends_with(parent, told, num_children, end):
    """Send `end` to `parent` when it has told its children's ids in the file `told`; return whether they end with it."""
    children = []
    try:
        wait_for(lambda: len(told.read_text().split()) == num_children, 90)
        children = [int(pid) for pid in told.read_text().split()]
        parent.send_signal(end)
        parent.wait(20)
        return until(lambda: not any(map(is_there, children)), 10)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.wait(10)
