"""`recycle train` that ends too early: killed, interrupted, on a full disk; and how it goes on, bit for bit, or says why not."""

import atexit
import contextlib
import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from recycle.core.errors import NotSaved
from recycle.core.events.record import Spell, Stepped, Warned
from recycle.core.events.record_file import read_record
from recycle.host.process_lifetime import process_state
from tests.cli.training.test_train import SMALL, Run, contents, refusal, run, trained
from tests.processes import until, wait_for
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(240)
on_linux = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="asks Linux's /proc who is there")
INTERRUPTED = "recycle train: interrupted; what was written is whole, and a library, cache or run goes on from there"
TEXT = Path(contextlib.__file__)  # a few pages


def start(command: str, prepare: Callable[[], None] | None = None) -> WarmProcess:
    """`recycle <command>` as a process that leads a session of its own, as it would under a terminal."""
    return WarmProcess(shlex.split(command), prepare=prepare)


def in_session(leader: int) -> list[int]:
    """Who of the session that `leader` began still runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(") ")[2].split()[:4]
            found += [int(path.parent.name)] if int(session) == leader and state != "Z" else []
    return sorted(found)


@contextlib.contextmanager
def ended_at_last(process: WarmProcess) -> Iterator[WarmProcess]:
    """Nobody is left behind, whatever a test finds."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)


def stopped_in(leader: int) -> list[int]:
    """Who of that session was stopped by a signal."""
    return [pid for pid in in_session(leader) if process_state(pid) == "T"]


def step_folder(folder: Path, num_steps: int) -> Path:
    return folder / "checkpoints" / f"step-{num_steps:08d}"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def last_saved(folder: Path) -> int:
    """The step of the last whole checkpoint, 0 if there is none; earlier ones go when there are enough of them."""
    whole = [path.name for path in (folder / "checkpoints").glob("step-*") if not path.name.endswith(".partial")]
    return max((int(name.removeprefix("step-")) for name in whole), default=0)


# Going on.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps with everything in them that has a state, and a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = "--exact --dropout 0.1 --tied --max-norm 0.5 --schedule cosine --warmup 1 --checkpoint.every 1 --keep 4"
    return Run(run(f"{SMALL} --steps 4 {options} --data.text {TEXT} --json --out {folder}").facts, folder)


def cut_off(finished: Run, place: Path) -> Path:
    """The same run as it was after its second step, but for the record, which knows of four."""
    shutil.copytree(finished.folder, place)
    (place / "summary.json").unlink()
    for num_steps in (3, 4):
        shutil.rmtree(step_folder(place, num_steps))
    return place


@pytest.fixture
def halved(finished: Run, tmp_path: Path) -> Path:
    return cut_off(finished, tmp_path / "run")


GOES_ON = {
    "as before": "",
    "with a dead worker": "--dead W1_0",
    "with others, synchronously": "--dead W0_0,W1_1 --techniques adaptive",
    "by another plan": "--memory 1",
}


@pytest.fixture(scope="module")
def resumed_runs(finished: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    places = {name: cut_off(finished, tmp_path_factory.mktemp("resumed") / "run") for name in GOES_ON}
    return {name: Run(run(f"train --resume {place} {GOES_ON[name]} --json").facts, place) for name, place in places.items()}


@pytest.fixture(params=GOES_ON)
def resumed(request: pytest.FixtureRequest, resumed_runs: dict[str, Run]) -> Run:
    return resumed_runs[request.param]


def test_an_exact_run_resumes_bit_for_bit_with_any_worker_dead(resumed: Run, finished: Run) -> None:
    assert resumed.facts["weights_sha256"] == finished.facts["weights_sha256"]
    assert resumed.facts["losses"] == finished.facts["losses"]
    assert resumed.facts["steps"] == 4
    assert resumed.facts["warnings"] == []
    assert step_folder(resumed.folder, 4).is_dir()


def test_the_record_goes_on_with_every_step_once_and_what_was_lost_as_redone(resumed: Run, finished: Run) -> None:
    steps, spells = resumed.events(Stepped), resumed.events(Spell)
    assert [step.iteration for step in steps] == [0, 1, 2, 3]
    assert [step.loss for step in steps] == finished.facts["losses"]
    assert [spell.state for spell in spells] == ["pause", "train", "train", "redo", "redo", "pause", "train", "train"]
    assert sum(spell.samples for spell in spells) == 4 * 12
    assert sum(spell.discarded for spell in spells) == 2 * 12


def test_the_spells_of_a_run_that_went_on_have_no_gaps(resumed: Run) -> None:
    spells = resumed.events(Spell)
    assert [after.start_us - before.end_us for before, after in pairwise(spells)] == [0] * 7


def test_the_report_shows_a_run_that_went_on(resumed: Run) -> None:
    shown = run(f"report {resumed.folder}")
    assert shown.code == 0, shown.err
    assert resumed.facts["weights_sha256"] in shown.out


def test_a_run_goes_on_bit_for_bit_by_the_same_plan_without_exact_sums(tmp_path: Path) -> None:
    options = "--dead W1_0 --dropout 0.1 --optimizer sgd --momentum 0.9"
    assert run(f"{SMALL} {options} --steps 2 --out {tmp_path}").code == 0
    went_on, straight = run(f"train --resume {tmp_path} --steps 4 --json").facts, trained(f"{options} --steps 4")
    assert went_on["weights_sha256"] == straight["weights_sha256"]
    assert went_on["losses"] == straight["losses"]


def test_a_run_that_is_done_stays_as_it_is(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    facts = run(f"train --resume {tmp_path / 'run'} --json").facts
    assert all(facts[key] == finished.facts[key] for key in ("steps", "losses", "weights_sha256"))
    assert facts["start_us"] >= 0
    assert "first step after -" not in run(f"train --resume {tmp_path / 'run'}").out
    assert [step.iteration for step in Run(facts, tmp_path / "run").events(Stepped)] == [0, 1, 2, 3]


def test_a_run_never_says_fewer_steps_than_its_weights_have_had(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    ended = run(f"train --resume {tmp_path / 'run'} --steps 2 --json")
    assert ended.code in (2, 14) or ended.facts["steps"] == 4


# Checkpoints that are torn.


def damage(checkpoint: Path, how: str) -> None:
    """Do to a checkpoint what disks and people do."""
    file = checkpoint / "stage-1.safetensors"
    whole = file.read_bytes()
    match how:
        case "a byte is another":
            file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        case "a file is cut short":
            file.write_bytes(whole[: len(whole) // 2])
        case "a file is gone":
            file.unlink()
        case "the manifest is gone":
            (checkpoint / "manifest.json").unlink()


DAMAGES = ["a byte is another", "a file is cut short", "a file is gone", "the manifest is gone"]


# Resumed runs take long; `tests/runtime/checkpoint` looks at every kind of damage.
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how != "a byte is another")) for how in DAMAGES])
def test_a_torn_checkpoint_is_reported_and_the_one_before_is_used(how: str, finished: Run, halved: Path) -> None:
    damage(step_folder(halved, 2), how)
    ended = run(f"train --resume {halved} --json")
    (sentence,) = ended.facts["warnings"]
    assert re.fullmatch(r"checkpoint step-00000002 is torn: .*; step-00000001 before it is used", sentence)
    assert f"warning: {sentence}\n" in ended.err
    made = Run(ended.facts, halved)
    assert [warned.text for warned in made.events(Warned)] == [sentence]
    assert made.facts["weights_sha256"] == finished.facts["weights_sha256"]
    assert made.facts["losses"] == finished.facts["losses"]


def test_where_all_checkpoints_are_torn_there_is_nothing_to_go_on_from(halved: Path) -> None:
    for num_steps, how in ((1, DAMAGES[0]), (2, DAMAGES[1])):
        damage(step_folder(halved, num_steps), how)
    sentence = refusal(f"train --resume {halved}", 15)
    assert "there is no whole checkpoint" in sentence
    assert "step-00000001 is torn" in sentence
    assert "step-00000002 is torn" in sentence


def test_a_run_that_is_not_gone_on_with_is_left_as_it_was(halved: Path) -> None:
    for num_steps in (1, 2):
        damage(step_folder(halved, num_steps), DAMAGES[1])
    before = contents(halved)
    refusal(f"train --resume {halved} --steps 9 --dead W1_0", 15)
    assert contents(halved) == before


# Runs of something else, and what is no run.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.seed", "9"),
        ("model.width", "16"),
        ("model.layers", "3"),
        ("model.heads", "1"),
        ("model.dropout", "0.5"),
        ("model.tied", "false"),
        ("data.samples", "1"),
        ("training.optimizer", '"sgd"'),
        ("training.rate", "0.5"),
        ("training.schedule", '"linear"'),
        ("training.max_norm", "0.1"),
    ],
)
def test_a_folder_whose_configuration_says_something_else_is_refused(key: str, value: str, halved: Path) -> None:
    config = halved / "config.toml"
    changed = re.sub(rf"^{key.split('.')[1]} = .*$", f"{key.split('.')[1]} = {value}", config.read_text(), flags=re.MULTILINE)
    assert changed != config.read_text()
    config.write_text(changed)
    refusal(f"train --resume {halved}", 14)


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--seed 5", "training.seed"),
        ("--width 16", "model.width"),
        ("--rate 1", "training.rate"),
        ("--no-exact", "training.exact"),
        ("--no-tied", "model.tied"),
        ("--samples 1", "data.samples"),
    ],
)
def test_a_flag_that_changes_what_is_computed_is_refused_and_nothing_is_touched(flag: str, name: str, finished: Run) -> None:
    before = contents(finished.folder)
    assert f"has {name} = " in refusal(f"train --resume {finished.folder} {flag}", 14)
    assert contents(finished.folder) == before


def test_what_is_no_run_is_refused(tmp_path: Path, halved: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, halved / "record.jsonl"):
        assert "is no run that can be resumed" in refusal(f"train --resume {path}", 2)
    assert "leave FILE and --out out" in refusal(f"train --resume {halved} --out {tmp_path / 'new'}", 2)


# Ends that come from outside.


@on_linux
def test_a_run_whose_launcher_was_killed_resumes_bit_for_bit_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ended_at_last(start(f"{SMALL} --exact --dropout 0.1 --steps 1000000 --checkpoint.every 1 --out {folder}")) as process:
        wait_for(lambda: last_saved(folder) >= 2, 120)
        process.kill()
        process.wait(20)
        wait_for(lambda: not in_session(process.pid), 20)
    assert run(f"report {folder}").code == 0
    first = last_saved(folder)
    made = Run(run(f"train --resume {folder} --steps {first + 2} --dead W0_1 --json").facts, folder)
    straight = trained(f"--exact --dropout 0.1 --steps {first + 2}")
    assert made.facts["weights_sha256"] == straight["weights_sha256"]
    assert [step.loss for step in made.events(Stepped)] == straight["losses"]
    assert not [name for name in names_in(folder / "checkpoints") if name.endswith(".partial")]


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_stop_finishes_its_step_saves_it_and_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with ended_at_last(start(f"{SMALL} --exact --steps 1000000 --out {folder}")) as process:
        wait_for(lambda: num_steps_in(folder) >= 3, 120)
        # A terminal or a batch system tells everybody at once; whoever hears of it before the launcher does must bear it.
        os.kill(process.pid, signal.SIGSTOP)
        everybody = in_session(process.pid)
        os.killpg(process.pid, number)
        until(lambda: in_session(process.pid) != everybody, 1)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (128 + number, "")
        wait_for(lambda: not in_session(process.pid), 20)
    last = last_saved(folder)
    sentence = f"stopped by {number.name} after step {last} of 1000000; its newest checkpoint is of step {last}"
    assert err.splitlines()[-1] == f"recycle train: {sentence}; go on with: recycle train --resume {folder}"
    assert "Traceback" not in err
    assert err.count("warning: asked to stop: the run ends after this step, with a checkpoint") == 1
    made = run(f"train --resume {folder} --steps {last + 2} --json").facts
    assert made["weights_sha256"] == trained(f"--exact --steps {last + 2}")["weights_sha256"]
    assert made["warnings"] == []


@on_linux
def test_the_second_control_c_ends_it_at_once(tmp_path: Path) -> None:
    with ended_at_last(start(f"{SMALL} --steps 1000000 --out {tmp_path / 'run'}")) as process:
        wait_for(lambda: num_steps_in(tmp_path / "run") >= 2, 120)
        (coordinator,) = [pid for pid in in_session(process.pid) if pid == writer_of(tmp_path / "run" / "record.jsonl")]
        os.kill(coordinator, signal.SIGSTOP)  # so that it cannot stop by itself
        os.killpg(process.pid, signal.SIGINT)
        assert not until(lambda: process.poll() is not None, 0.5)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert err.splitlines()[-1] == INTERRUPTED
        wait_for(lambda: not in_session(process.pid), 20)


def num_steps_in(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "record.jsonl").read_text(encoding="utf-8").count('"event":"step"')
    return 0


# A disk that is full.

# Room for the record, and for what is sent to workers, but not for a stage with its optimizer.
LIMIT = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_checkpoint_that_does_not_fit_is_reported_and_training_goes_on_to_the_end(finished: Run, halved: Path) -> None:
    with ended_at_last(start(f"train --resume {halved} --json", LIMIT)) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == NotSaved.exit_code, err
    unsaved = "all steps are done, but the last checkpoint could not be written; the newest is of step 2: make room"
    assert err.splitlines()[-1] == f"recycle train: {unsaved}, and go on with: recycle train --resume {halved}"
    made = Run(json.loads(out), halved)
    assert [made.facts["steps"], made.facts["weights_sha256"]] == [4, finished.facts["weights_sha256"]]
    assert len(made.facts["warnings"]) == 2
    for num_steps, sentence in zip((3, 4), made.facts["warnings"], strict=True):
        begins = rf"there is no checkpoint of {num_steps} steps, but training goes on: W[01]_[01]: cannot write "
        assert re.match(begins, sentence)
        assert sentence.endswith(": File too large")
        assert f"warning: {sentence}\n" in err
    assert names_in(halved / "checkpoints") == ["step-00000001", "step-00000002"]
    again = run(f"train --resume {halved} --json").facts
    assert again["weights_sha256"] == finished.facts["weights_sha256"]


def mount_small_disk(folder: Path, run: Path) -> None:
    """Mount a file system of its own in a name space of its own, which both end with the process, and copy a run there.

    The names of the run's checkpoints at the end are left in a file beside it.
    """
    new_names = 0x00020000 | (0x10000000 if os.geteuid() else 0)  # CLONE_NEWNS, and CLONE_NEWUSER for a user who may not mount
    ids = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(new_names):
        raise OSError(ctypes.get_errno(), "unshare")
    if ids[0]:
        for name, text in ("setgroups", "deny"), ("uid_map", f"0 {ids[0]} 1"), ("gid_map", f"0 {ids[1]} 1"):
            Path("/proc/self", name).write_text(text)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "none", str(folder)], check=True)
    shutil.copytree(run, folder / "run")
    atexit.register(lambda: Path(f"{folder}.left").write_text(" ".join(names_in(folder / "run" / "checkpoints"))))


def fill(disk: Path) -> None:
    """Write a file there until there is no page left, and empty lines to the end of the journal's last page."""
    with (disk / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    with (disk / "run" / "journal.jsonl").open("ab") as stream:
        stream.write(b"\n" * (-stream.tell() % 4096))


def test_a_worker_is_killed_while_the_disk_is_really_full_and_training_goes_on_to_the_end(
    finished: Run, halved: Path, tmp_path: Path
) -> None:
    shutil.rmtree(step_folder(halved, 1))
    disk = tmp_path / "disk"
    disk.mkdir()
    # A worker stops in the first step, so that the disk is full before any step ends and before that worker is killed.
    command = f"train --resume {disk / 'run'} --json --lease 100 --hang W1_0@3"
    with ended_at_last(start(command, partial(mount_small_disk, disk, halved))) as process:
        seen = Path(f"/proc/{process.pid}/root{disk}")
        wait_for(lambda: stopped_in(process.pid) or process.poll() is not None, 120)
        if process.poll() is None:
            fill(seen)
            os.kill(*stopped_in(process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    if "Operation not permitted" in err:
        pytest.skip("this user may not mount a file system here")
    assert process.returncode == NotSaved.exit_code, err
    facts = json.loads(out)
    assert [facts["steps"], facts["weights_sha256"]] == [4, finished.facts["weights_sha256"]]
    assert [recovery["worker"] for recovery in facts["recoveries"]] == ["W1_0"]
    full = [sentence for sentence in facts["warnings"] if "No space left on device" in sentence]
    # The journal is removed when it cannot be written, which leaves a page for one of the two small files.
    for lost in ("journal.jsonl", "no checkpoint of 4 steps", ("the plan from iteration 2 on is not kept", "summary.json")):
        assert any(words in sentence for sentence in full for words in ([lost] if isinstance(lost, str) else lost)), (lost, full)
    assert (tmp_path / "disk.left").read_text() == "step-00000002"


def writer_of(path: Path) -> int:
    """The process that has this file open; 0 if none has."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end while it is looked at
            if any(name.readlink() == path for name in (process / "fd").iterdir()):
                return int(process.name)
    return 0


@on_linux
def test_a_record_for_which_there_is_no_room_is_reported_and_training_goes_on_to_the_end(tmp_path: Path) -> None:
    options, record = f"--width 16 --heads 1 --steps 12 --data.text {TEXT}", tmp_path / "run" / "record.jsonl"
    straight = trained(options)
    with ended_at_last(start(f"{SMALL} {options} --json --out {tmp_path / 'run'}")) as process:
        # A limit for who keeps the record, before its workers have come: the record of about nine steps has room.
        wait_for(lambda: writer_of(record) > 0, 120)
        resource.prlimit(writer_of(record), resource.RLIMIT_FSIZE, (12_000, 12_000))
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    facts = json.loads(out)
    assert facts["weights_sha256"] == straight["weights_sha256"]
    assert [sentence.rpartition(": ")[0] for sentence in facts["warnings"]] == [f"cannot write {record}, but training goes on"]
    assert 9_000 < record.stat().st_size <= 12_000
    written = [event for event in read_record(record) if isinstance(event, Stepped)]
    assert [event.loss for event in written] == straight["losses"][: len(written)]
    assert len(written) > 5


# Two runs in one folder.


@on_linux
def test_a_folder_in_use_is_refused_to_another_run_and_to_a_resumed_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ended_at_last(start(f"{SMALL} --steps 1000000 --checkpoint.every 1 --out {folder}")) as process:
        wait_for(lambda: last_saved(folder) >= 2 or process.poll() is not None, 60)
        in_use = "is in use by another run: wait until that is over, or name another folder"
        assert in_use in refusal(f"train --resume {folder} --steps 1000001")
        assert in_use in refusal(f"{SMALL} --steps 2 --out {folder}")
        assert process.poll() is None
