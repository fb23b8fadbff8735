"""Activity: what the main thread of a worker does now, for the heartbeats that another thread sends."""

import time
from typing import NamedTuple


class Doing(NamedTuple):
    """Something that began at `since_s`: computing `label`, or waiting for the workers `waits_for` in the middle of it."""

    label: str = ""
    waits_for: str = ""
    since_s: float = 0.0


class Activity:
    """Set by the main thread, read by any thread. Between `begin` and `end` the worker computes unless it says that it waits."""

    def __init__(self) -> None:
        self.now = Doing()

    def begin(self, label: str) -> None:
        self.now = Doing(label, "", time.monotonic())

    def wait_for(self, workers: str) -> None:
        if self.now.label:
            self.now = Doing(self.now.label, workers, time.monotonic())

    def go_on(self) -> None:
        """Compute again, after a wait."""
        self.wait_for("")

    def renew(self) -> None:
        """Begin the same again: what takes long makes progress."""
        if not self.now.waits_for:
            self.go_on()

    def end(self) -> None:
        """Do nothing until the coordinator says what to do next."""
        self.now = Doing()
