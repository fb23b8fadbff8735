"""Settings of every test: where Hypothesis takes its examples from, how interrupts arrive, where processes come from."""

import os
import signal

import pytest
from hypothesis import settings

from tests.warm_processes import warm_context

# Hypothesis tries new examples on every run of ours, and the same ones on every run of CI, so that a red CI means a change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# nohup, a shell's background job and many job runners start processes with SIGINT ignored, and children inherit that. Tests of
# Ctrl-C need the default: Python raises KeyboardInterrupt, and a child begins with its own default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of the tests, before a training starts one without the planner; not where others run the tests."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        warm_context()
