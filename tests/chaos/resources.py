"""Resources that run out: disk, file descriptors, memory; a read-only or slow disk; a wall clock that jumps.

    python -m tests.chaos.resources                    every fault once
    python -m tests.chaos.resources --only clock       those whose name contains a text

Each fault hits one `recycle train` of real processes. It passes if the weights are those of an undisturbed twin, or if the run
ends with a documented exit code and a sentence that names the reason, and goes on to the twin's weights with the resource back.
Mounts need root, faults of single files and of the clock a C compiler. The last lines are a table, also of what was not tried.
"""

import argparse
import contextlib
import errno
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recycle.core.events.record_file import RECORD
from tests.chaos import fault_library
from tests.chaos.fault_library import FaultLibrary
from tests.chaos.job_processes import JobProcess, end_session, hit, processes_of
from tests.warm_processes import WarmProcess

STEPS, LIMIT_S, NUM_STEPS_BEFORE, LEASE_S = 150, 150.0, 25, 1.0
JOB = (
    "train --pipelines 2 --stages 2 --microbatches 2 --layers 2 --width 16 --heads 2 --context 16 --samples 1 "
    f"--exact --lease {LEASE_S} --checkpoint.every 10 --json"
).split()
DOCUMENTED = {2, *range(10, 18), *range(20, 25)}
DISK_BYTES = 8 << 20
HOUR_S, TEN_YEARS_S = 3600.0, 10 * 365 * 86400.0
FULL, READ_ONLY, NO_DESCRIPTOR, NO_MEMORY = "No space left", "Read-only file system", "Too many open files", "[Mm]emory|thread"


class Training:
    """A `recycle train` in a session of its own, with a disk and a temporary folder that a fault can take away."""

    def __init__(self, folder: Path, num_steps: int, mounts: tuple[str, ...]) -> None:
        self.folder, self.run = folder, folder / "disk" / "run"
        self.words = [*JOB, "--steps", str(num_steps), "--out", str(self.run)]
        for name in ("disk", "tmp", *mounts):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.mounts = [folder / name for name in mounts]
        for path in self.mounts:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", path], check=True, capture_output=True)
        self._process: WarmProcess | None = None
        self._log = ""

    @property
    def process(self) -> WarmProcess:
        assert self._process is not None, "it was not started"
        return self._process

    def start(self, *words: str) -> None:
        if self._process is not None:
            self._log = self.log()
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        self._process = WarmProcess(words, environment=environment, prepare=_forget_temporary_folder)

    def fill(self, name: str) -> None:
        """Leave no byte of a mounted disk free."""
        with contextlib.suppress(OSError), (self.folder / name / "filler").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(1 << 12))

    def free(self, name: str) -> None:
        (self.folder / name / "filler").unlink()

    def remount(self, mode: str) -> None:
        """Remount the disk of the checkpoints. That is refused while a worker writes there."""
        deadline_s = time.monotonic() + 20
        while subprocess.run(["mount", "-o", f"remount,{mode}", self.mounts[-1]], capture_output=True).returncode:
            assert time.monotonic() < deadline_s, f"{self.mounts[-1]} cannot be remounted {mode}"
            time.sleep(0.01)

    def processes(self, kind: str) -> list[JobProcess]:
        return [each for each in processes_of(self.process.pid) if each.kind == kind]

    def kill(self, kind: str) -> None:
        """Kill the last process of a kind; faults of one worker hit the first."""
        hit(self.processes(kind)[-1].pid, 0.0)

    def num_steps(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run / RECORD).read_bytes().count(b'"event":"step"')
        return 0

    def has_checkpoint(self) -> bool:
        return any(self.run.glob("checkpoints/step-*[0-9]/manifest.json"))

    def log(self) -> str:
        return self._log + self.process.printed()[1]

    def result(self) -> dict[str, Any]:
        lines = self.process.printed()[0].splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_session(self._process)
        for path in reversed(self.mounts):
            subprocess.run(["umount", "--lazy", path], check=True, capture_output=True)


def _forget_temporary_folder() -> None:
    """Have Python look for the temporary folder again: the process was forked from one with another environment."""
    tempfile.tempdir = None


Act = Callable[[Training], None]


@dataclass(frozen=True)
class Fault:
    """`begin` and `end` take a resource away and give it back. A run that ends with an error must name the `reason`."""

    name: str
    begin: Act
    end: Act
    reason: str = "no error is expected"
    seconds: float = 4.0
    mounts: tuple[str, ...] = ()
    uses_library: bool = False
    is_from_start: bool = False
    also_kills: str = ""

    def refusal(self) -> str:
        """Why this fault cannot be tried here; empty if it can be."""
        if self.mounts and os.geteuid():
            return "only root may mount"
        return "the fault library is not loaded" if self.uses_library and not FaultLibrary.is_loaded() else ""


def _clear(training: Training) -> None:
    FaultLibrary().clear()


def _full(name: str, disk: str, seconds: float = 4.0, is_from_start: bool = False, also_kills: str = "") -> Fault:
    return Fault(
        name,
        lambda training: training.fill(disk),
        lambda training: training.free(disk),
        FULL,
        seconds,
        (disk,),
        is_from_start=is_from_start,
        also_kills=also_kills,
    )


def _no_room_for(text: str, name: str, when: str) -> Fault:
    """A disk that has no room for one kind of file."""
    return Fault(
        f"no room for {name}, {when}",
        lambda training: FaultLibrary().fail(text),
        _clear,
        FULL,
        uses_library=True,
        is_from_start=when.startswith("from the start"),
        also_kills="worker" if "killed" in when else "",
    )


def _limit(kind: str, what: int, reason: str, name: str, also_kills: str = "") -> Fault:
    """Set a limit of the first process of a kind to what it has now."""
    before: list[tuple[int, tuple[int, int]]] = []

    def begin(training: Training) -> None:
        pid = training.processes(kind)[0].pid
        before.append((pid, resource.prlimit(pid, what)))
        most = _first_free_descriptor(pid) if what == resource.RLIMIT_NOFILE else _address_space_bytes(pid)
        resource.prlimit(pid, what, (most, before[-1][1][1]))

    def end(training: Training) -> None:
        pid, limits = before.pop()
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, limits)

    return Fault(f"{name}{', a worker killed' if also_kills else ''}", begin, end, reason, 6.0, also_kills=also_kills)


def _first_free_descriptor(pid: int) -> int:
    """What the next file would get: the limit that forbids it."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _address_space_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def _clock(offset_s: float, name: str, kind: str = "", also_kills: str = "") -> Fault:
    def begin(training: Training) -> None:
        FaultLibrary().move_clock(offset_s, training.processes(kind)[0].pid if kind else 0)

    where = f" of one {kind}" if kind else ""
    killed = ", a worker killed" if also_kills else ""
    return Fault(f"the clock{where} jumps {name}{killed}", begin, _clear, uses_library=True, also_kills=also_kills)


def _slow(delay_s: float, also_kills: str = "") -> Fault:
    killed = ", a worker killed" if also_kills else ""
    return Fault(
        f"slow disk: {delay_s:g} s a write{killed}",
        lambda training: FaultLibrary().slow_down("/disk/run", delay_s),
        _clear,
        seconds=12.0,
        uses_library=True,
        also_kills=also_kills,
    )


def _read_only(name: str, also_kills: str = "") -> Fault:
    def begin(training: Training) -> None:
        FaultLibrary().fail("/disk/run", errno.EROFS)

    return Fault(f"read-only: {name}", begin, _clear, READ_ONLY, uses_library=True, also_kills=also_kills)


def _then_kill(fault: Fault) -> Fault:
    """The same fault; when it is over, the coordinator is killed: what it could not write is missing when another takes over."""

    def end(training: Training) -> None:
        fault.end(training)
        if training.process.poll() is None:
            training.kill("coordinator")

    return replace(fault, name=f"{fault.name}, then the coordinator", end=end, seconds=1.0)


FILES = {
    "the record": RECORD,
    "the journal": "journal.jsonl",
    "plans": "plan",
    "stages": "safetensors",
    "manifests": "manifest.json",
    "the summary": "summary.json",
}
WHENS = ("from the start", "in the middle", "in the middle, a worker killed")
FAULTS = [
    _full("disk full from the start", "disk", is_from_start=True),
    _full("disk full in the middle", "disk", LIMIT_S),
    _full("disk full in the middle, freed", "disk"),
    _full("disk full, freed, a worker killed", "disk", also_kills="worker"),
    _full("disk full, freed, the coordinator killed", "disk", also_kills="coordinator"),
    _full("temporary folder full from the start", "tmp", is_from_start=True),
    _full("temporary folder full in the middle", "tmp", LIMIT_S),
    _full("temporary folder full, freed, a worker killed", "tmp", also_kills="worker"),
    _full("temporary folder full, the coordinator killed", "tmp", also_kills="coordinator"),
    *(_no_room_for(text, name, when) for name, text in FILES.items() for when in WHENS),
    _then_kill(_full("disk full in the middle, freed", "disk")),
    _then_kill(_no_room_for(RECORD, "the record", "in the middle")),
    _then_kill(_no_room_for("journal.jsonl", "the journal", "in the middle, a worker killed")),
    _read_only("the run folder"),
    _read_only("the run folder, a worker killed", "worker"),
    _read_only("the run folder, the coordinator killed", "coordinator"),
    Fault(
        "read-only: the checkpoints' mount",
        lambda training: training.remount("ro"),
        lambda training: training.remount("rw"),
        READ_ONLY,
        mounts=("disk/run/checkpoints",),
    ),
    _slow(0.5),
    _slow(2.0),
    _slow(5.0),
    _slow(2.0, "worker"),
    *(
        _limit(kind, resource.RLIMIT_NOFILE, NO_DESCRIPTOR, f"no more descriptors: {kind}", also_kills)
        for kind in ("launcher", "coordinator", "worker", "fork server")
        for also_kills in ("", "worker")
    ),
    *(
        _limit(kind, resource.RLIMIT_AS, NO_MEMORY, f"no more memory: {kind}", also_kills)
        for kind in ("launcher", "coordinator", "worker")
        for also_kills in ("", "worker")
    ),
    _clock(HOUR_S, "an hour forward"),
    _clock(-HOUR_S, "an hour back"),
    _clock(TEN_YEARS_S, "ten years forward"),
    _clock(-TEN_YEARS_S, "ten years back"),
    _clock(HOUR_S, "an hour forward", also_kills="worker"),
    _clock(-HOUR_S, "an hour back", also_kills="worker"),
    _clock(-HOUR_S, "an hour back", "coordinator"),
    _clock(TEN_YEARS_S, "ten years forward", "worker"),
]


@dataclass(frozen=True)
class Outcome:
    """What became of a run: `said` is the table's word, `detail` the errors and the end of the log if it failed."""

    said: str
    took_s: float
    num_recoveries: int = 0
    detail: str = ""

    @property
    def has_failed(self) -> bool:
        return self.said.startswith("FAILED")


def run_fault(fault: Fault, weights: str, num_steps: int = STEPS) -> Outcome:
    """Run the training with a fault, and after an error once more without it."""
    begin_s = time.monotonic()
    with TemporaryDirectory() as name, Training(Path(name), num_steps, fault.mounts) as training:
        problem = _disturb(training, fault, begin_s + LIMIT_S)
        said, num_recoveries = "same weights", len(training.result().get("recoveries", ()))
        error = _last_line(training)
        if not problem and (code := training.process.returncode):
            said = f"error {code}, resumed"
            problem = _unclear(training, code, fault) or _go_on(training)
        if not problem and training.result().get("weights_sha256") != weights:
            problem = "other weights"
        warnings = "; ".join(training.result().get("warnings", ()))
        detail = (
            f"{warnings}{error if 'error' in said else ''}{' (a traceback in its log)' if 'Traceback' in training.log() else ''}"
        )
        took_s = time.monotonic() - begin_s
        if problem:
            return Outcome(f"FAILED: {problem}", took_s, num_recoveries, f"{detail}\n{training.log()[-3000:]}")
        return Outcome(said, took_s, num_recoveries, detail)


def _disturb(training: Training, fault: Fault, deadline_s: float) -> str:
    """Begin the fault before the start or after some steps, and end it; return the problem, if there is one."""
    begun_s = time.monotonic() if fault.is_from_start else 0.0
    if fault.is_from_start:
        fault.begin(training)
    training.start(*training.words)
    has_ended = False
    while training.process.poll() is None:
        now_s = time.monotonic()
        if now_s > deadline_s:
            return f"not done after {LIMIT_S:.0f} s, {training.num_steps()} steps"
        if not begun_s and training.num_steps() >= NUM_STEPS_BEFORE:
            begun_s = now_s
            fault.begin(training)
            if fault.also_kills:
                training.kill(fault.also_kills)
        if begun_s and not has_ended and not fault.is_from_start and now_s > begun_s + fault.seconds:
            has_ended = True
            fault.end(training)
        time.sleep(0.05)
    if begun_s and not has_ended:
        fault.end(training)
    return "" if begun_s else "the run was over before the fault"


def _last_line(training: Training) -> str:
    return (training.log().strip().splitlines() or [""])[-1]


def _unclear(training: Training, code: int, fault: Fault) -> str:
    """What is wrong with the error of a run; empty if it is one that a user can act on."""
    if code not in DOCUMENTED:
        return f"exit code {code}"
    error = _last_line(training)
    if not error.startswith("recycle train: "):
        return f"no sentence, but: {error}"
    return "" if re.search(fault.reason, training.log()) else f"the reason is not named: {error}"


def _go_on(training: Training) -> str:
    """Do what a user does after the error: resume, or begin again if nothing was saved; return the problem, if there is one."""
    training.start(*(["train", "--resume", str(training.run), "--json"] if training.has_checkpoint() else training.words))
    try:
        code = training.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return "the resumed run hangs"
    return f"the resumed run ended with {code}: {_last_line(training)}" if code else ""


def twin(num_steps: int = STEPS) -> str:
    """The weights of the undisturbed run."""
    process = WarmProcess([*JOB, "--steps", str(num_steps)])
    printed, error = process.communicate(LIMIT_S)
    assert process.returncode == 0, error
    return str(json.loads(printed)["weights_sha256"])


def run_all(only: str) -> int:
    """Run the faults whose name contains a text, and print the table; return how many failed."""
    weights, rows, num_failed = twin(), [], 0
    for fault in [fault for fault in FAULTS if only in fault.name]:
        if refusal := fault.refusal():
            rows.append(f"{fault.name:78} not tried: {refusal}")
            continue
        outcome = run_fault(fault, weights)
        num_failed += outcome.has_failed
        print(f"{fault.name}: {outcome.said}, {outcome.took_s:.0f} s; {outcome.detail}", file=sys.stderr, flush=True)
        rows.append(f"{fault.name:78} {outcome.said:18} {outcome.took_s:4.0f} s  {outcome.num_recoveries} recoveries")
    print("\n".join(rows))
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Resources that run out.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name contains this")
    args = parser.parse_args()
    if FaultLibrary.is_loaded() or fault_library.refusal():
        return 1 if run_all(args.only) else 0
    with TemporaryDirectory() as folder:  # again, with the library, which everything that it starts has, too
        environment = os.environ | fault_library.compile_library(Path(folder))
        return subprocess.run([sys.executable, "-m", "tests.chaos.resources", *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
