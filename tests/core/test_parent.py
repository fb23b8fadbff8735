"""Processes and interrupts: what is started is started whole, and a terminal's interrupt is for the parent alone."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from recycle.core.parent import interrupts_held


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
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            passed.append("in the block")
        passed.append("after it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert passed == ["in the block"]


def test_it_comes_after_the_block_also_if_there_is_no_other_thread():
    script = """
import os, signal, time
from recycle.core.parent import interrupts_held
try:
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        print("whole")
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout
        == "whole\ninterrupted\n"
    )


def test_without_an_interrupt_nothing_is_changed():
    handler, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_another_thread_may_hold_them_for_what_it_starts():
    masks = []

    def start():
        with interrupts_held():
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert signal.SIGINT in masks[0]


def test_a_process_that_is_started_in_the_block_is_not_interrupted():
    script = "import time; print('up', flush=True); time.sleep(0.5); print('done')"
    with interrupts_held():
        started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=60)[0] == "done\n"
    assert started.returncode == 0
