"""The benchmark of what a worker holds for each parameter: weights, optimizer state, gradients, and copies to take a step back.

python benchmarks/state_memory.py                 real stages, on a GPU if there is one
python benchmarks/state_memory.py --quick         small stages
python benchmarks/state_memory.py --save          also writes docs/benchmarks/<date>-state_memory.md

What was held before is a constant, measured by this file with the code of commit 8ebd2c3. To measure it again:

git worktree add ../before 8ebd2c3
PYTHONPATH=../before/src python benchmarks/state_memory.py measure 3072 float32 before
PYTHONPATH=../before/src python benchmarks/state_memory.py measure 3072 exact before

Each case is a fresh process that makes a stage and trains it for three iterations: gradients are added, their norm is computed,
and the step is done as a worker does it. The peak is that of all tensors.
"""

import subprocess
import sys
import time
from functools import partial
from itertools import accumulate
from typing import Any

from sheet import UNJUDGED, Case, Row, Script, Section

NUM_LAYERS, WIDTH, QUICK_WIDTH, NUM_ITERATIONS = 12, 3072, 512, 3
LEAN, COPIED, SYNCHRONOUS, OLD = "staggered, lean", "staggered, states copied", "synchronous", "before"
# Of the code of commit 8ebd2c3, on a CPU, by the command above: all was copied before every step, and means were made at once.
BEFORE = {"float32": 33.0, "exact": 44.0}


def measured(width: int, sums: str, step: str) -> tuple[float, float]:
    """The peak bytes for each parameter, and the seconds of a step, in this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    is_on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    seconds, _ = _trained(width, sums, step, is_on_gpu)
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        num_parameters = _trained(width, sums, step, is_on_gpu)[1]
        return (torch.cuda.max_memory_allocated() - before) / num_parameters, seconds
    # The allocator of a CPU keeps memory that is free: what tensors take is what the profiler sees.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        num_parameters = _trained(width, sums, step, is_on_gpu)[1]
    events = (event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]")
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held) / num_parameters, seconds


def _trained(width: int, sums: str, step: str, is_on_gpu: bool) -> tuple[float, int]:
    """Make a stage and train it; return the seconds of its last step, and its parameters."""
    import torch
    from torch import nn

    from recycle.control.decide.messages import Ballot
    from recycle.core.cluster import Shape
    from recycle.runtime.compute.gradients import make_sums
    from recycle.runtime.compute.optimizer_step import Stepper
    from recycle.runtime.compute.stage import Stage
    from recycle.runtime.execute.stage_state import StageState

    device = "cuda" if is_on_gpu else "cpu"
    module = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(NUM_LAYERS)))
    stage = Stage(module, make_sums(module.parameters(), 1, sums == "exact"), 0, None)
    parameters = list(stage.parameters())
    lean: dict[str, Any] = {} if step == OLD else {"is_lean": step == LEAN}
    stepper = Stepper(parameters, partial(torch.optim.AdamW, lr=1e-4), **lean)
    state = StageState(stage, stepper, Shape(1, 1, 1), (), None)
    seconds = 0.0
    for iteration in range(NUM_ITERATIONS):
        for parameter in parameters:
            stage.sums.add([parameter], [torch.full_like(parameter, 1e-3)])
        if is_on_gpu:
            torch.cuda.synchronize()  # sums that are held are there
        state.hold(iteration, {}, [])
        ballot = Ballot(iteration, state.norm_squared())
        began = time.perf_counter()
        if step in (LEAN, COPIED):
            state.guess()
        given: Any = 1.0 if step == OLD else ballot  # the code before took the factor of the gradient
        state.apply(given)
        if is_on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        state.confirm(ballot, lambda *applied: None)
    return seconds, sum(parameter.numel() for parameter in parameters)


def _row(width: int, sums: str, step: str) -> Row:
    done = subprocess.run(
        [sys.executable, __file__, "measure", str(width), sums, step], capture_output=True, text=True, check=True
    )
    found, seconds = map(float, done.stdout.split())
    return sums, step, f"{NUM_LAYERS * width**2 / 1e6:.0f} M", f"{BEFORE[sums]:.1f}", f"{found:.1f}", f"{seconds:.3f}", UNJUDGED


def _sections(name: str, quick: bool) -> list[Section]:
    width = QUICK_WIDTH if quick else WIDTH
    cases = tuple(
        Case(f"{sums}, {step}", partial(_row, width, sums, step)) for sums in BEFORE for step in (LEAN, COPIED, SYNCHRONOUS)
    )
    about = (
        f"A stage of {NUM_LAYERS} square layers of width {width} in float32, with AdamW: 12 bytes a parameter for weights and "
        "moments, 4 for a sum in float32 and 8 for an exact one. A staggered step may be taken back until its verdict arrives. "
        "Lean (the default on a GPU), it copies the parameters alone and is computed twice. A synchronous step waits for the "
        "verdict, and copies nothing. Copies are where the parameters are. The column of the past was not measured in this run: "
        "it is a constant, of commit 8ebd2c3 on a CPU, which copied all before every step; the head of the script says how to "
        "measure it again. Seconds are those of the step, by one thread on a CPU."
    )
    header = ("sums", "step", "parameters", "bytes a parameter in 8ebd2c3", "at the peak", "seconds", "met")
    return [Section(name, "What a worker holds for each parameter", about, header, cases)]


SCRIPT = Script(
    "state_memory",
    "Measure what a worker holds for each parameter at the peak.",
    ("state",),
    quick="small stages",
    libraries=("torch",),
    quantity="sizes",
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(*measured(int(sys.argv[2]), *sys.argv[3:]))
        sys.exit()
    sys.exit(SCRIPT.run(_sections))
