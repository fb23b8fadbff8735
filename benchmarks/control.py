"""The benchmark of the control plane: what a coordinator costs, and how fast it acts, from 16 workers to 2,048.

make bench                                    the table, printed
python benchmarks/control.py --quick          16 and 64 workers, one iteration each
python benchmarks/control.py --save           also writes docs/benchmarks/<date>-control.md
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from control_load import NUM_MICROBATCHES, Coordinator, Load, loaded
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

from recycle.control.decide.new_epoch import default_ops_every
from recycle.core.cluster import Shape

MIB, MB = 2**20, 10**6
PERIOD_S = 20.0
MOST_CORES, MOST_MIB, MOST_MB_AN_HOUR, MOST_TAKEOVER_S = 0.5, 1024, 100, 5.0
# The longest time asked for from a death to the message that starts the next epoch at everybody.
MOST_GO_S = {256: 0.3, 2048: 2.0}


@dataclass(frozen=True, slots=True)
class Size:
    """A job of pipelines and stages. A large one has a longer lease: a death closes the connection, and needs no lease."""

    pipelines: int
    stages: int
    lease_s: float

    @property
    def shape(self) -> Shape:
        return Shape(self.pipelines, self.stages, NUM_MICROBATCHES)


SIZES = (Size(4, 4, 2.0), Size(8, 8, 2.0), Size(16, 16, 2.0), Size(32, 32, 10.0), Size(32, 64, 10.0))


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured. The bytes that an iteration adds to the record are `with_ops` if it has every op, else `without_ops`."""

    cores: float
    peak_bytes: int
    with_ops: int
    without_ops: int
    go_s: float
    takeover_s: float

    def mb_an_hour(self, every: int) -> float:
        return 3600 / PERIOD_S * (self.with_ops + (every - 1) * self.without_ops) / every / MB


def measure(size: Size, num_iterations: int) -> Costs:
    with tempfile.TemporaryDirectory() as name, loaded(size.shape, size.lease_s, Path(name) / "run") as (coordinator, load):
        sizes = [coordinator.record.stat().st_size]
        begin_s, cpu_s = time.monotonic(), coordinator.cpu_s()
        for number in range(num_iterations):
            load.step()
            load.run(lambda: load.all_acknowledged, PERIOD_S, "all reports are acknowledged")
            sizes.append(coordinator.record.stat().st_size)
            load.rest(max(0.0, begin_s + (number + 1) * PERIOD_S - time.monotonic()))
        cores = (coordinator.cpu_s() - cpu_s) / (time.monotonic() - begin_s)
        go_s = _kill(load)
        peak_bytes = coordinator.peak_bytes()
        takeover_s = _replace(coordinator, load)
        peak_bytes = max(peak_bytes, coordinator.peak_bytes())
        grown = [after - before for before, after in pairwise(sizes)]
        return Costs(cores, peak_bytes, grown[0], grown[-1], go_s, takeover_s)


def _kill(load: Load) -> float:
    """Kill a worker of the first stage, whose plan is among the first that are made ahead; return when the last one can go on."""
    victim = next(worker for worker in load.workers if worker.place.stage == 0 and worker.place.pipeline == 1)
    load.started, begin_s = 0, time.monotonic()
    load.kill(victim)
    load.run(lambda: load.started == len(load.workers), 120, "the next epoch starts everywhere")
    load.run(lambda: load.all_train, 60, "all train again")
    return max(worker.started_s for worker in load.workers) - begin_s


def _replace(coordinator: Coordinator, load: Load) -> float:
    """Kill the coordinator, and start another; return when all workers were welcome there, and had their reports acknowledged."""
    load.welcomed, begin_s = 0, time.monotonic()
    coordinator.kill()
    coordinator.start(is_takeover=True)
    load.run(lambda: load.welcomed == len(load.workers) and load.all_acknowledged, 120, "all are back")
    takeover_s = time.monotonic() - begin_s
    load.step()
    load.run(lambda: load.all_acknowledged, 60, "the new coordinator acknowledges an iteration")
    return takeover_s


def row(size: Size, num_iterations: int, is_judged: bool) -> Row:
    costs, num, num_ops = measure(size, num_iterations), size.shape.num_workers, 3 * size.shape.num_chains * size.shape.num_stages
    every = default_ops_every(num_ops)
    most_go_s = MOST_GO_S.get(num)
    met = (
        costs.cores < MOST_CORES
        and costs.peak_bytes < MOST_MIB * MIB
        and costs.mb_an_hour(every) < MOST_MB_AN_HOUR
        and costs.takeover_s < MOST_TAKEOVER_S
        and (most_go_s is None or costs.go_s < most_go_s)
    )
    return (
        f"{num:,}",
        f"{num_ops:,}",
        f"{size.lease_s:g} s",
        f"{costs.cores:.3f}",
        f"{costs.peak_bytes / MIB:.0f} MiB",
        f"1 in {every}" if every > 1 else "all",
        f"{costs.mb_an_hour(every):.1f} MB",
        f"{costs.go_s:.3f} s",
        f"< {most_go_s:g} s" if most_go_s is not None else "–",
        f"{costs.takeover_s:.2f} s",
        (YES if met else NO) if is_judged else UNJUDGED,
    )


def _sections(name: str, is_quick: bool) -> list[Section]:
    sizes, num_iterations = (SIZES[:2], 1) if is_quick else (SIZES, 3)
    cases = tuple(Case(f"{size.shape.num_workers:,} workers", partial(row, size, num_iterations, not is_quick)) for size in sizes)
    about = (
        f"Fake workers of one process, over loopback; each reports {3 * NUM_MICROBATCHES} ops every {PERIOD_S:g} s. Asked: "
        f"below {MOST_CORES} cores, {MOST_MIB} MiB, {MOST_MB_AN_HOUR} MB of record an hour, {MOST_TAKEOVER_S:g} s for another "
        "coordinator, until all workers are back and their reports acknowledged. A worker dies by the end of its connection; its "
        "plan was made ahead. Processor time and memory are those of the coordinator's process, not of its planning process."
    )
    header = (
        "workers",
        "ops an iteration",
        "lease",
        "cores",
        "peak memory",
        "iterations with ops",
        "record an hour",
        "death to go",
        "asked",
        "take-over",
        "met",
    )
    return [Section(name, "A coordinator under load", about, header, cases)]


SCRIPT = Script(
    "control",
    "Measure what a coordinator costs, and how fast it acts, with up to 2,048 fake workers.",
    ("load",),
    quick="16 and 64 workers, one iteration each",
    libraries=("torch",),
    width=170,
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
