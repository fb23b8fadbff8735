"""How a run begins is found for callbacks alone, and never refuses a run: the run itself says why it cannot begin."""

from pathlib import Path

import pytest

from recycle.runtime.callbacks.protocol import Callback, RunStart
from recycle.runtime.callbacks.watched_run import run_start, watched


class Seen(Callback):
    """Keeps how the run begins."""

    start: RunStart | None = None

    def on_start(self, run: RunStart) -> None:
        self.start = run


def test_a_run_without_callbacks_does_not_look_for_its_last_checkpoint() -> None:
    with watched({}, (), lambda: pytest.fail("it was looked for"), print):
        pass


def test_callbacks_are_told_how_the_run_begins() -> None:
    seen, start = Seen(), RunStart(None, True, 3)
    with watched({}, [seen], lambda: start, print):
        pass
    assert seen.start == start


def test_a_folder_without_a_checkpoint_is_refused_by_the_run_which_first_says_whether_it_is_in_use(tmp_path: Path) -> None:
    assert run_start(tmp_path, is_resumed=True) == RunStart(tmp_path, True, 0)
