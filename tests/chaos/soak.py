"""A soak: one job under random faults for as long as it is told, and what its processes hold in the meantime.

    python -m tests.chaos.soak --minutes 60 --save docs/benchmarks/soak.md

Every few seconds a random process of the job is killed, or stopped and continued; a killed launcher's job is resumed. At the end
the job is asked to stop by SIGTERM, and its weights must be those of an undisturbed twin after as many steps. The table has the
medians of memory, file descriptors and threads in each quarter of the time, of the oldest process of each kind.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.record import Recovered, Stepped
from recycle.core.events.record_file import read_record
from recycle.runtime.checkpoint.resume import load
from recycle.runtime.compute.state_digests import stage_digest, whole_digest
from tests.chaos.external_faults import draw
from tests.chaos.job_processes import JobProcess, JobSession, hit
from tests.runtime.jobs import Numbers, adamw, loss
from tests.runtime.recovery_runs import SEED, unhurried_stages
from tests.runtime.reference_executor import ReferenceExecutor

SHAPE, PAUSE_S, STEPS = (3, 2, 2), 0.02, 10**6
HELD = ("launcher", "coordinator", "worker")


@dataclass(frozen=True)
class Sample:
    """What a process held at a time: its resident memory, file descriptors, threads, and its age."""

    at_s: float
    kind: str
    pid: int
    memory_kb: int
    num_files: int
    num_threads: int


def sample(processes: list[JobProcess], at_s: float) -> list[Sample]:
    found = []
    for kind in HELD:
        # The oldest: a process that has just been started holds less.
        for process in [each for each in processes if each.kind == kind][:1]:
            with contextlib.suppress(OSError, KeyError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                memory_kb, threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
                files = len(os.listdir(f"/proc/{process.pid}/fd"))
                found.append(Sample(at_s, kind, process.pid, memory_kb, files, threads))
    return found


def disturb(job: JobSession, seconds: float, pause_s: float, random: Random) -> tuple[Counter[str], list[Sample], str]:
    """Hit processes of the job for so long; return the faults, the samples, and the problem if there is one."""
    begin_s = time.monotonic()
    faults, samples, next_fault_s, next_sample_s = Counter[str](), list[Sample](), begin_s + 10, begin_s + 5
    stepped, stepped_s = 0, begin_s
    while (now_s := time.monotonic()) < begin_s + seconds:
        if job.process.poll() is not None:
            job.start()
        if now_s >= next_sample_s:
            next_sample_s = now_s + 5
            samples += sample(job.processes(), now_s - begin_s)
            size = _record_bytes(job.folder)
            stepped, stepped_s = (size, now_s) if size != stepped else (stepped, stepped_s)
            if now_s > stepped_s + 240:
                return faults, samples, f"nothing was recorded for 240 s; the last lines: {job.log()[-600:]}"
            print(f"\r{now_s - begin_s:5.0f} s, {faults.total()} faults, {size >> 20} MiB", end="", file=sys.stderr, flush=True)
        if now_s >= next_fault_s:
            next_fault_s = now_s + random.expovariate(1 / pause_s)
            if victim := draw(job.processes(), random):
                length_s = 0.0 if random.random() < 0.5 else 0.1 * 300.0 ** random.random()
                faults[f"{'stop' if length_s else 'kill'} {victim.kind}"] += 1
                hit(victim.pid, length_s)
        time.sleep(0.1)
    return faults, samples, ""


def _record_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "run" / "record.jsonl").stat().st_size
    return 0


def end(job: JobSession) -> str:
    """Ask the job to stop; return the problem if it does not."""
    for _ in range(20):  # a launcher that was killed last is resumed first
        if job.process.poll() is not None:
            job.start()
        time.sleep(15)
        for process in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.process.pid, signal.SIGTERM)
        with contextlib.suppress(Exception):
            if job.process.wait(120) == 128 + signal.SIGTERM:
                return ""
    return f"it did not stop; the last lines: {job.log()[-600:]}"


def twin_differs(folder: Path) -> tuple[int, str]:
    """The number of steps of the run's last checkpoint, and the problem if its weights are not those of the twin."""
    stages = unhurried_stages(SHAPE[1], PAUSE_S)
    num_steps = load(stages, folder / "run")
    # One pipeline does everything, which changes no bit, and takes less time.
    dead = ",".join(f"W{pipeline}_{stage}" for pipeline in range(1, SHAPE[0]) for stage in range(SHAPE[1]))
    plan = recycle.solve(recycle.problem(*SHAPE, fail=dead, costs=(10, 13, 9)), "greedy")
    reference = ReferenceExecutor(plan, unhurried_stages(SHAPE[1], 0), Numbers(), loss, adamw, seed=SEED, is_exact=True)
    for step in range(num_steps):
        reference.iterate(step)
    found = whole_digest({Worker(0, number): stage_digest(stage, is_by_layer=True) for number, stage in enumerate(stages)})
    return num_steps, "" if found == reference.weights_sha256() else "other weights than the twin"


def table(samples: list[Sample], seconds: float) -> list[str]:
    lines = ["| process | what | 1st quarter | 2nd | 3rd | 4th |", "|---|---|---:|---:|---:|---:|"]
    for kind in HELD:
        for what, scale in (("memory_kb", 1024), ("num_files", 1), ("num_threads", 1)):
            cells = []
            for quarter in range(4):
                part = [s for s in samples if s.kind == kind and quarter <= 4 * s.at_s / seconds < quarter + 1]
                cells.append(f"{median(getattr(s, what) for s in part) / scale:.0f}" if part else "–")
            name = {"memory_kb": "memory, MiB", "num_files": "file descriptors", "num_threads": "threads"}[what]
            lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="One job under random faults for a long time.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--pause", type=float, default=8.0, help="the mean time between two faults in seconds (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the page there, too")
    args = parser.parse_args()
    seconds = args.minutes * 60
    with TemporaryDirectory() as name:
        folder = Path(name)
        shape = ",".join(map(str, SHAPE))
        with JobSession(folder, shape, "--steps", str(STEPS), "--pause", str(PAUSE_S), "--every", "50") as job:
            faults, samples, trouble = disturb(job, seconds, args.pause, Random(args.seed))
            trouble = trouble or end(job)
        num_steps, different = (0, "") if trouble else twin_differs(folder)
        events = list(read_record(folder / "run" / "record.jsonl"))
    recoveries = [event for event in events if isinstance(event, Recovered)]
    page = [
        "# Soak",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, `python -m tests.chaos.soak --minutes {args.minutes:g}`, {SHAPE[0]} x {SHAPE[1]} workers",
        "",
        f"{num_steps} steps, {faults.total()} faults, {job.num_starts} starts ({len(job.errors)} after an error),",
        f"{len(recoveries)} recoveries in the record.",
        *(f"\n    {error.splitlines()[-1]}" for error in job.errors),
        "",
        "Faults: " + ", ".join(f"{number} {kind}" for kind, number in faults.most_common()) + ".",
        "",
        f"Outcome: {trouble or different or 'the weights of the undisturbed twin, bit for bit'}.",
        "",
        *table(samples, seconds),
        "",
        f"Steps that were recorded: {sum(isinstance(event, Stepped) for event in events)}.",
    ]
    print("\n" + "\n".join(page))
    if args.save:
        args.save.write_text("\n".join(page) + "\n", encoding="utf-8")
    return 1 if trouble or different else 0


if __name__ == "__main__":
    sys.exit(main())
