"""Temporary folders: nothing is left of them, not even of a process that was killed."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recycle.host.scratch import scratch

pytestmark = pytest.mark.timeout(60)
KEEPS_A_FOLDER = """
import time
from recycle.host.scratch import scratch
with scratch() as folder:
    (folder / "something").write_text("large")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_is_there_until_its_context_ends(tmp_path: Path) -> None:
    with scratch() as folder:
        (folder / "file").write_text("something")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_goes_with_the_next_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KEEPS_A_FOLDER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            other = Path(process.stdout.readline().strip())
            with scratch() as folder:
                assert {path.name for path in tmp_path.iterdir()} == {folder.name, other.name}
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert (other / "something").exists()
            with scratch() as folder:
                assert list(tmp_path.iterdir()) == [folder]
        finally:
            process.kill()


def test_folders_of_others_that_are_called_alike_stay(tmp_path: Path) -> None:
    (tmp_path / "recycle-mine").mkdir()
    with scratch():
        pass
    assert (tmp_path / "recycle-mine").is_dir()
