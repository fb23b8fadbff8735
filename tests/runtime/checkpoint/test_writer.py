"""The worker's half: what is saved is what there was, the disk never ends the training, and being killed costs one checkpoint."""

import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from recycle.runtime.checkpoint import writer as checkpoint_writer
from recycle.runtime.checkpoint.files import read_checkpoint
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointFolder
from recycle.runtime.checkpoint.resume import latest, load_stage
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved, StageWriter
from tests.processes import is_there, wait_for
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, decided_by, held, names_in, report_of, save_all, small_stage

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gate(monkeypatch):
    """Bytes reach the disk only when this is set."""
    opened = threading.Event()
    real = os.fsync

    def fsync(handle):
        assert opened.wait(60)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return opened


def step(module, optimizer):
    module(torch.full((2, 4), 0.5)).square().sum().backward()
    optimizer.step()


def test_a_report_says_what_lies_on_disk(tmp_path):
    report = report_of(tmp_path, 3, 20, *small_stage())
    (name,) = names_in(tmp_path / "step-00000020.partial")
    assert re.fullmatch(r"stage-3\.[0-9a-f]{8}\.safetensors", name)
    data = (tmp_path / "step-00000020.partial" / name).read_bytes()
    assert report == StageSaved(20, 3, name, len(data), hashlib.sha256(data).hexdigest())


def test_training_goes_on_while_the_state_of_then_is_written(tmp_path, gate):
    checkpoints = CheckpointFolder(tmp_path, 1, 1, FINGERPRINT)
    module, optimizer = small_stage(1)
    then = held(module, optimizer)
    reports = []
    writer = StageWriter(tmp_path, 0, reports.append)
    writer.save(20, module, optimizer)
    step(module, optimizer)
    assert held(module, optimizer) != then
    assert reports == []
    gate.set()
    writer.wait()
    assert isinstance(decided_by(checkpoints, reports[0]), CheckpointComplete)
    fresh = small_stage(2)
    load_stage(latest(tmp_path, FINGERPRINT)[0], 0, *fresh)
    assert held(*fresh) == then


def test_a_second_save_waits_for_the_first_so_that_there_is_one_copy_at_a_time(tmp_path, gate, monkeypatch):
    log = []
    writer = StageWriter(tmp_path, 0, lambda report: log.append(f"reported {report.num_steps}"))
    take, wait = checkpoint_writer.take_snapshot, writer.wait

    def logged_take(module, optimizer):
        log.append("taken")
        return take(module, optimizer)

    def logged_wait(timeout_s=None):
        log.append("waits")
        gate.set()
        return wait(timeout_s)

    monkeypatch.setattr(checkpoint_writer, "take_snapshot", logged_take)
    writer.save(20, *small_stage())
    monkeypatch.setattr(writer, "wait", logged_wait)
    writer.save(30, *small_stage())
    wait()  # by itself: the second one may be written before anybody waits for it
    assert log == ["taken", "waits", "reported 20", "taken", "reported 30"]


def test_a_disk_that_is_too_slow_costs_a_checkpoint_and_not_the_time_of_all_others(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "PATIENCE_S", 0.01)
    reports = []
    writer = StageWriter(tmp_path, 0, reports.append)
    writer.save(20, *small_stage())
    writer.save(30, *small_stage())
    assert [(type(report), report.num_steps) for report in reports] == [(StageNotSaved, 30)]
    gate.set()
    assert writer.wait()
    writer.save(40, *small_stage())
    writer.wait()
    assert [(type(report), report.num_steps) for report in reports[1:]] == [(StageSaved, 20), (StageSaved, 40)]


def test_reports_come_from_the_thread_that_writes_and_waiting_for_nothing_is_free(tmp_path):
    threads = []
    writer = StageWriter(tmp_path, 2, lambda report: threads.append(threading.current_thread().name))
    writer.wait()
    writer.save(20, *small_stage())
    writer.wait()
    writer.wait()
    assert threads == ["writer of stage 2_0"]


def test_a_later_save_starts_no_thread_for_which_memory_may_be_short(tmp_path, monkeypatch):
    reports = []
    writer = StageWriter(tmp_path, 0, reports.append)
    writer.save(20, *small_stage())
    writer.wait()

    def no_memory(thread):
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "start", no_memory)
    writer.save(30, *small_stage())
    writer.wait()
    assert [(type(report), report.num_steps) for report in reports] == [(StageSaved, 20), (StageSaved, 30)]


# Stages that cannot be saved.


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise AssertionError("nothing was saved")


def with_state(value, key="what"):
    module, optimizer = small_stage()
    optimizer.state[module[0].weight][key] = value
    return module, optimizer


def with_module(module):
    return module, torch.optim.SGD(module.parameters())


def with_foreign_parameter():
    module, optimizer = small_stage()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return module, optimizer


def with_foreign_state():
    module, optimizer = small_stage()
    optimizer.state["all of them"]["count"] = 3
    return module, optimizer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: with_state(len), "the optimizer holds a builtin_function_or_method at 0.weight/what, which cannot be saved"),
        (lambda: with_state([1, {2}]), "the optimizer holds a set at 0.weight/what/1, which cannot be saved"),
        (lambda: with_state({0.5: 1}), "the optimizer holds 0.5 as a key at 0.weight/what, which cannot be saved"),
        (lambda: with_state(torch.ones(1, dtype=torch.complex128)), "tensor optimizer/0.weight/what is torch.complex128"),
        (with_foreign_parameter, "the optimizer holds a parameter that is none of its stage's"),
        (with_foreign_state, "the optimizer holds state for 'all of them', which is no parameter"),
        (lambda: with_module(Extra(2, 2)), "_extra_state of the module is a dict, which cannot be saved"),
        (
            lambda: with_module(torch.nn.ModuleDict({"optimizer/x": torch.nn.Linear(2, 2)})),
            "optimizer/x.weight of the module cannot be saved under names that begin with optimizer/",
        ),
    ],
)
def test_what_cannot_be_saved_is_reported_in_a_sentence_and_training_goes_on(tmp_path, make, sentence):
    report = report_of(tmp_path, 0, 20, *make())
    assert isinstance(report, StageNotSaved)
    assert sentence in report.reason
    assert "\n" not in report.reason


@pytest.mark.parametrize("problem", [RuntimeError("can't allocate\nmemory"), MemoryError()])
def test_a_copy_for_which_memory_is_short_is_reported(tmp_path, monkeypatch, problem):
    def too_much(module, optimizer):
        raise problem

    monkeypatch.setattr(checkpoint_writer, "take_snapshot", too_much)
    report = report_of(tmp_path, 0, 20, *small_stage())
    assert report.reason.startswith(f"its copy could not be made: {type(problem).__name__}")
    assert "\n" not in report.reason


def test_a_bug_is_reported_rather_than_waited_for(tmp_path, monkeypatch):
    def mistake(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr(checkpoint_writer, "save_tensors", mistake)
    assert report_of(tmp_path, 0, 20, *small_stage()).reason.endswith("AttributeError: no such thing")


# A disk that is full.


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(tmp_path, monkeypatch, failing):
    checkpoints = CheckpointFolder(tmp_path, 2, 1, FINGERPRINT)
    save_all(checkpoints, tmp_path, 10)

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, no_space)
        reports = [report_of(tmp_path, stage, 20, *small_stage()) for stage in (0, 1)]
    assert all(report.reason.endswith(".safetensors: No space left on device") for report in reports)
    assert [decided is None for decided in (decided_by(checkpoints, report) for report in reports)] == [False, True]
    assert names_in(tmp_path) == ["step-00000010"]


FULL = """
import json, os, resource, sys
from pathlib import Path
import torch
from recycle.runtime.checkpoint.folder import CheckpointFolder
from recycle.runtime.checkpoint.resume import latest
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, decided_by, names_in, report_of, save_all, small_stage

folder, how = Path(sys.argv[1]), sys.argv[2]
checkpoints = CheckpointFolder(folder, 2, 3, FINGERPRINT)
save_all(checkpoints, folder, 10)
if how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
big = small_stage(0, width=230)  # 640,000 bytes with its state
decided = [decided_by(checkpoints, report_of(folder, stage, 20, *big)) for stage in (0, 1)]
found = {"decided": [event and event.reason for event in decided], "after": names_in(folder)}
if how == "tmpfs":  # the stages fit, but not the manifest
    reports = [report_of(folder, stage, 30, *small_stage()) for stage in (0, 1)]
    filler = open(folder / "filler", "wb", buffering=0)
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as full:
        found["filler"] = full.strerror
    found["manifest"] = [event and event.reason for event in (decided_by(checkpoints, report) for report in reports)]
    filler.close()
    os.unlink(folder / "filler")
save_all(checkpoints, folder, 40)
found["end"] = names_in(folder)
found["latest"] = latest(folder, FINGERPRINT)[0].num_steps
print(json.dumps(found))
"""


def run_on_a_full_disk(folder, how, *before):
    words = [*before, sys.executable, "-c", FULL, str(folder), how]
    made = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.slow
def test_a_file_beyond_the_limit_is_reported_and_the_run_goes_on(tmp_path):
    found = run_on_a_full_disk(tmp_path, "limit")
    first, second = found["decided"]
    assert re.search(r"stage-0\.\w+\.safetensors: File too large$", first)
    assert second is None
    assert found["after"] == ["step-00000010"]
    assert found["end"] == ["step-00000010", "step-00000040"]
    assert found["latest"] == 40


# A file system of one megabyte in a name space of its own, which ends with the process.
SMALL_DISK = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"']


@pytest.fixture
def small_disk(tmp_path):
    try:
        made = subprocess.run([*SMALL_DISK, str(tmp_path), "true"], capture_output=True, timeout=20)
    except OSError:
        pytest.skip("there is no unshare here")
    if made.returncode:
        pytest.skip("this user may not mount a file system here")
    return [*SMALL_DISK, str(tmp_path)]


def test_a_disk_that_is_really_full_is_reported_and_the_run_goes_on(tmp_path, small_disk):
    found = run_on_a_full_disk(tmp_path, "tmpfs", *small_disk)
    first, second = found["decided"]
    assert first is None
    assert re.search(r"stage-1\.\w+\.safetensors: No space left on device$", second)
    assert found["after"] == ["step-00000010"]
    assert found["filler"] == "No space left on device"
    assert found["manifest"][0] is None
    assert found["manifest"][1].endswith("manifest.json: No space left on device; make room there")
    assert found["end"] == ["step-00000010", "step-00000040"]
    assert found["latest"] == 40


# Killed.

# For each line of a folder and a point, a process that saves step 10, then stops for good at that point of step 20, and says its
# id. They are forked, because torch takes seconds to load.
KILLED = """
import contextlib, os, shutil, signal, sys, threading
from pathlib import Path
import torch
from recycle.runtime.checkpoint import folder as checkpoint_folder
from recycle.runtime.checkpoint.folder import CheckpointFolder
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, decided_by, save_all

def stop(*_, **__):
    print(os.getpid(), flush=True)
    threading.Event().wait()

def is_begun(path):
    # The library writes a file whose name begins so, and renames it. Who looks too late for that finds a file that is not empty.
    with contextlib.suppress(FileNotFoundError):
        return path.name.startswith(".tmp") or path.stat().st_size > 0
    return True

def kill_while_a_file_is_written(folder):
    while not any(map(is_begun, folder.glob("*.partial/*"))):
        pass
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def save(folder, point):
    checkpoints = CheckpointFolder(folder, 2, 1, FINGERPRINT)
    save_all(checkpoints, folder, 10)
    match point:
        case "in the middle of a file":
            os.fsync = lambda handle: threading.Event().wait()
            threading.Thread(target=kill_while_a_file_is_written, args=(folder,)).start()
        case "before its bytes are on the disk":
            os.fsync = stop
        case "before the file has its name":
            os.replace = stop
        case "before the manifest is written":
            checkpoint_folder.write_manifest = stop
        case "before the folder has its name":
            os.rename = stop
        case "before the old one goes":
            os.rename = lambda old, new, rename=os.rename: stop() if new.name == "step-00000010.old.partial" else rename(old, new)
        case "while the old one goes":
            shutil.rmtree = lambda path, ignore_errors: (path / "manifest.json").unlink() or stop() if path.exists() else None
    save_all(checkpoints, folder, 20, width=2000 if point == "in the middle of a file" else 4)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
torch.optim.AdamW([torch.zeros(1)])  # the first one loads half of torch
for line in sys.stdin:
    folder, point = line.rstrip().split("|")
    if os.fork() == 0:
        try:
            save(Path(folder), point)
        finally:
            print("it never stopped", flush=True)
            os._exit(1)
"""
POINTS = {
    "in the middle of a file": 10,
    "before its bytes are on the disk": 10,
    "before the file has its name": 10,
    "before the manifest is written": 10,
    "before the folder has its name": 10,
    "before the old one goes": 20,
    "while the old one goes": 20,
}


@pytest.fixture(scope="module")
def kill_at():
    """A function that lets a process save into a folder, and kills it at a point."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:

        def kill(folder, point):
            print(folder, point, sep="|", file=parent.stdin, flush=True)
            said = parent.stdout.readline().strip()
            assert said.isdigit(), said
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(said), signal.SIGKILL)
            wait_for(lambda: not is_there(int(said)), 30)

        yield kill
        parent.stdin.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_is_killed_while_it_saves_resumes_from_a_whole_checkpoint(tmp_path, kill_at, point):
    kill_at(tmp_path, point)
    found, sentences = latest(tmp_path, FINGERPRINT)
    assert found.num_steps == POINTS[point]
    unfinished = "checkpoint step-00000020.partial was not finished; step-00000010 before it is used"
    assert sentences == ([unfinished] if found.num_steps == 10 else [])
    fresh = small_stage(5)
    load_stage(found, 1, *fresh)
    assert held(*fresh) == held(*small_stage(100 * found.num_steps + 1))
    # The next run cleans up, and saves what this one could not.
    checkpoints = CheckpointFolder(tmp_path, 2, 1, FINGERPRINT)
    assert found.folder.name in names_in(tmp_path)
    assert not any(name.endswith(".partial") for name in names_in(tmp_path))
    assert isinstance(save_all(checkpoints, tmp_path, 20), CheckpointComplete)
    assert names_in(tmp_path) == ["step-00000020"]
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 20


def test_half_a_file_lies_there_under_no_name_that_counts(tmp_path, kill_at):
    kill_at(tmp_path, "in the middle of a file")
    names = names_in(tmp_path / "step-00000020.partial")
    assert names
    assert all(name.startswith(".") for name in names)


# Steps that are done again.


def test_after_going_back_reports_of_earlier_epochs_do_not_count(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, 2, 3, FINGERPRINT)
    save_all(checkpoints, tmp_path, 10)
    early = [report_of(tmp_path, stage, 20, *small_stage(stage)) for stage in (0, 1)]
    assert checkpoints.add_report(early[0]) == []
    checkpoints.go_back(10, epoch=2)
    again = [replace(report_of(tmp_path, stage, 20, *small_stage(7 + stage)), epoch=2) for stage in (0, 1)]
    assert checkpoints.add_report(again[1]) == []  # the first stage's report was of the step that was taken back
    assert checkpoints.add_report(early[0]) == []
    (complete,) = checkpoints.add_report(again[0])
    assert complete.num_steps == 20
    found = latest(tmp_path, FINGERPRINT)[0]
    assert [file.sha256 for file in found.files] == [report.sha256 for report in again]


def test_a_checkpoint_whose_bytes_were_lost_is_written_again_after_going_back(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, 2, 3, FINGERPRINT)
    save_all(checkpoints, tmp_path, 10)
    save_all(checkpoints, tmp_path, 20)
    torn = tmp_path / "step-00000020" / "stage-0.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4] + b"torn")
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 10
    checkpoints.go_back(10, epoch=2)
    for stage in (0, 1):
        checkpoints.add_report(replace(report_of(tmp_path, stage, 20, *small_stage(stage)), epoch=2))
    assert latest(tmp_path, FINGERPRINT) == (read_checkpoint(tmp_path / "step-00000020"), [])
