"""Processes and interrupts: what is started is started whole, and a terminal's interrupt is for the parent alone."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from recycle.control.net.handshake import this_host
from recycle.host.process_lifetime import (
    children_uninterrupted,
    interrupts_held,
    process_start,
    process_state,
    refuse_without_descriptors,
)


def interrupts():
    """What happens to them: who handles them, and what this thread holds back."""
    return signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])


def interrupt():
    """As a terminal does, and time for it to come."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


@pytest.fixture
def another_thread():
    """A thread that takes signals, too: a process's interrupt goes to any thread that does not hold it back."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
def test_an_interrupt_comes_after_the_block():
    passed = []

    def interrupted():
        with interrupts_held():
            interrupt()
            passed.append("in the block")
        passed.append("after it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert passed == ["in the block"]


def test_it_comes_after_the_block_also_if_there_is_no_other_thread():
    script = """
import os, signal, time
from recycle.host.process_lifetime import interrupts_held
try:
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        print("whole")
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "whole\ninterrupted\n"


def test_the_second_interrupt_comes_through():
    passed = []

    def interrupted():
        with interrupts_held():
            interrupt()
            passed.append("once")
            interrupt()
            passed.append("twice")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert passed == ["once"]


def test_in_each_other_the_outer_block_is_whole():
    passed = []

    def interrupted():
        with interrupts_held():
            with interrupts_held():
                interrupt()
            passed.append("between")
        passed.append("after both")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert passed == ["between"]


@pytest.mark.parametrize("block", [interrupts_held, children_uninterrupted])
def test_all_is_as_before_when_a_block_is_left_by_an_error(block):
    before = interrupts()
    with pytest.raises(ZeroDivisionError), block():
        raise ZeroDivisionError
    assert interrupts() == before


@pytest.mark.parametrize("block", [interrupts_held, children_uninterrupted])
def test_who_ignores_interrupts_goes_on_ignoring_them(block):
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before = interrupts()
        with block():
            interrupt()
        assert interrupts() == before
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("block", [interrupts_held, children_uninterrupted])
def test_another_thread_may_use_them(block):
    found = []

    def start():
        before = interrupts()
        with block():
            found.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        found.append(interrupts() == before)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [block is children_uninterrupted, True]


def test_a_process_that_is_started_in_the_block_is_not_interrupted():
    script = "import time; print('up', flush=True); time.sleep(0.5); print('done')"
    with children_uninterrupted():
        started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=60)[0] == "done\n"
    assert started.returncode == 0


def test_neither_is_the_first_process_of_pythons_own(tmp_path):
    """Python starts its resource tracker with it, and thereby unblocks SIGINT."""
    script = """
import multiprocessing, signal
from recycle.host.process_lifetime import children_uninterrupted

def send_mask(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with children_uninterrupted():
        process = context.Process(target=send_mask, args=(theirs,))
        process.start()
    print(ours.recv())
    process.join()
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True\n"


def test_a_process_has_a_state_and_a_start_by_which_it_differs_from_later_ones():
    assert process_state(os.getpid()) in ("R", "S")
    first = subprocess.Popen(["sleep", "60"])
    time.sleep(0.05)
    second = subprocess.Popen(["sleep", "60"])
    starts = [process_start(process.pid) for process in (first, second)]
    assert int(starts[0]) < int(starts[1])
    for process in (first, second):
        process.kill()
        process.wait()
    assert (process_state(first.pid), process_start(first.pid)) == ("", "")


@pytest.fixture
def one_descriptor():
    """A process that may open one more file, and no other."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    this_host()
    free = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    os.close(free)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("one_descriptor")
def test_a_lack_of_descriptors_is_found_before_half_of_them_are_used():
    for _ in range(2):  # nothing stays open
        refuse_without_descriptors(1)
        with pytest.raises(OSError, match="Too many open files") as refused:
            refuse_without_descriptors(2)
        assert refused.value.errno == errno.EMFILE


@pytest.mark.usefixtures("one_descriptor")
def test_a_process_without_a_free_descriptor_knows_its_machine():
    taken = os.open(os.devnull, os.O_RDONLY)
    try:
        assert this_host()
    finally:
        os.close(taken)


CHILD = """
import signal, sys, time
from pathlib import Path
from recycle.host.process_lifetime import stop_with_parent

def stop(number, frame):
    Path(sys.argv[1]).write_text("asked")
    sys.exit()

signal.signal(signal.SIGTERM, stop)
stop_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(60)"


def test_a_child_is_asked_to_stop_when_its_parent_was_killed(tmp_path):
    asked = tmp_path / "asked"
    words = [sys.executable, "-c", PARENT, "-c", CHILD, str(asked)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert not asked.exists()
        parent.kill()
        assert parent.stdout.read() == b""  # when the child, which has the pipe, too, has ended
    assert asked.read_text() == "asked"
