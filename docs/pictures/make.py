"""Draw the pictures of the documents (`make pictures`): plans, a simulation, a training run and a failure.

The failure is drawn from the record `failure.jsonl`; without that file, a new run is recorded in which a worker is killed.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from failure_picture import draw_failure
from failure_timeline import events_around, read_failure

import recycle
from recycle.cli.main import main as main_command
from recycle.core.events.record import Recovered
from recycle.core.events.record_file import RECORD, read_record, write_record
from recycle.core.plans.plan import Plan
from recycle.report.render.svg import draw_svg
from recycle.report.timeline.plan_timeline import plan_timeline

HERE = Path(__file__).parent
ALL = "adaptive,decoupled,staggered"

# The worked example of the paper: file, dead workers, techniques, memory.
EXAMPLE = (
    ("example-1f1b", "", "none", "4,3,2,1"),
    ("example-adaptive", "W1_2", "adaptive", "6"),
    ("example-decoupled", "W1_2", "adaptive,decoupled", "6"),
    ("example-staggered", "W1_2", ALL, "6"),
)


def draw(name: str, plan: Plan) -> None:
    (HERE / f"{name}.svg").write_text(draw_svg(plan_timeline(plan)), encoding="utf-8")
    print(f"{name}.svg: period {plan.period_us} µs, bound {plan.quality.bound_us} µs")


def main() -> None:
    for name, dead, techniques, memory in EXAMPLE:
        draw(name, recycle.solve(recycle.problem(3, 4, 6, fail=dead, costs="1,1,1", memory=memory, techniques=techniques)))
    for name, memory in (("fault-free-memory-s", "4"), ("fault-free-memory-2s", "8")):
        draw(name, recycle.solve(recycle.problem(1, 4, 8, costs="1,1,1", memory=memory)))
    twelve = recycle.problem(3, 4, 6, fail="W1_2", costs="10,13,9", memory=8, layers=16)
    draw("cuts-rerouted", recycle.solve(twelve))
    draw("cuts", recycle.solve(replace(twelve, shared_layers=2)))
    normalized, _ = recycle.solve_normalized(recycle.problem(4, 4, 8, costs="2,3,2", comm=1, memory=8), num_failures=3)
    draw("normalized", normalized)
    draw_kill("failure")
    draw_simulation("simulate")
    draw_run("report")


def draw_simulation(name: str) -> None:
    """Draw the README's example: a worker dies every half hour and returns after two hours."""
    path = HERE / f"{name}.png"
    job = "--model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32"
    systems = "recycle,oobleck,varuna,replica-drop,checkpoint-restart-spare,fault-scaled"
    main_command(f"simulate {job} --systems {systems} --interval 30m --rejoin 2h --plot {path}".split())


def draw_run(name: str) -> None:
    """Draw the README's training run: a small GPT with a dead worker; op times depend on the machine."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        main_command(
            f"train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --exact --dead W1_2 --measure --out {run}".split()
        )
        main_command(f"report {run} --png {HERE / name}.png".split())


def draw_kill(name: str) -> None:
    """Draw the recorded failure: a worker is killed in the middle of an iteration."""
    kept = HERE / f"{name}.jsonl"
    if not kept.exists():
        record_kill(kept)
    (HERE / f"{name}.svg").write_text(draw_failure(read_failure(read_record(kept))), encoding="utf-8")
    print(f"{name}.svg: from {kept.name}")


def record_kill(path: Path) -> None:
    """Train, kill W1_2 in step 12, when the plan for that is ready, and keep the events around the failure."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        main_command(f"train --pipelines 3 --stages 4 --microbatches 6 --steps 14 --exact --kill W1_2@12 --out {run}".split())
        events = list(read_record(run / RECORD))
    recovered = next(event for event in events if isinstance(event, Recovered))
    write_record(path, events_around(events, recovered))


if __name__ == "__main__":
    main()
