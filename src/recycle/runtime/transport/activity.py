"""Activity: what the main thread of a worker does now, for the heartbeats that another thread sends."""

import time
from collections.abc import Callable
from typing import NamedTuple


class Doing(NamedTuple):
    """Something that began at `since_s`: computing `label`, or waiting for the workers `waits_for` in the middle of it."""

    label: str = ""
    waits_for: str = ""
    since_s: float = 0.0


class Activity:
    """Set by the main thread, read by any thread. Between `begin` and `end` the worker computes unless it says that it waits.

    `on_gpu` says which op the GPU runs, if it runs one.
    """

    def __init__(self) -> None:
        self.now = Doing()
        self.on_gpu: Callable[[], Doing | None] = lambda: None

    def seen(self) -> Doing:
        """What the worker does, for others: it computes as long as its GPU does, also if the main thread waits already."""
        now = self.now
        return (self.on_gpu() or now) if now.waits_for else now

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
