"""The benchmark beside torchft: three replicas of a small GPT, one of them killed, by ReCycle and by torchft in turns.

python benchmarks/torchft_peer.py                 the tables, printed, in less than two minutes
python benchmarks/torchft_peer.py --only recovery one of them
python benchmarks/torchft_peer.py --quick         a tiny model, one round: for machines on which replicas share cores
python benchmarks/torchft_peer.py --save          also writes docs/benchmarks/<date>-torchft_peer.md

It needs torchft 0.2.0, which has wheels for Linux on x86 only. Without network, unpack the wheel into a folder, and put that on
PYTHONPATH. OpenTelemetry, which torchft asks for, need not be installed.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, median

# Both compute on the processor. A GPU that torchft sees would have it wait for streams.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from runtime_cases import SAMPLES, Sizes, alone
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section
from torchft_cases import VICTIM, KilledRun, Trial, run_recycle, step_s, unseen_loss
from torchft_replicas import load_torchft, run_torchft

from recycle.core.errors import UserError

RECYCLE, TORCHFT, ALONE = "ReCycle", "torchft", "torch alone, nobody dies"
SYSTEMS: dict[str, Callable[[Trial], KilledRun]] = {RECYCLE: run_recycle, TORCHFT: run_torchft}
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: no round begins after `begin_within_s`."""

    trial: Trial
    num_rounds: int
    begin_within_s: float


# Lighthouses made in Python wait 100 ms for replicas that are late. Where replicas share cores, that leaves healthy ones out.
WHOLE = Effort(Trial(Sizes(3, 1, 4, 256, 4, context=64), kill_after=10, num_steps=20, join_ms=100, limit_s=20), 3, 34)
QUICK = Effort(Trial(Sizes(3, 1, 4, 32, 2, context=16), kill_after=10, num_steps=20, join_ms=2000, limit_s=120), 1, 0)


@cache
def measure(effort: Effort) -> dict[str, list[KilledRun]]:
    """The runs of both systems, round by round."""
    effort.trial.sizes.plan(f"W{VICTIM}_0")  # the first plan on a machine compiles the scheduler, which no run should wait for
    runs: dict[str, list[KilledRun]] = {name: [] for name in SYSTEMS}
    begin_s = time.monotonic()
    for round_ in range(effort.num_rounds):
        if round_ and time.monotonic() - begin_s > effort.begin_within_s:
            break
        for name, run in SYSTEMS.items():
            runs[name].append(run(effort.trial))
    return runs


@cache
def loss_alone(effort: Effort) -> float:
    """The loss on unseen samples after the same samples by torch in one process, in steps of the whole batch."""
    model = effort.trial.sizes.gpt()[0]
    alone(effort.trial.sizes, effort.trial.num_steps, model=model)
    return unseen_loss(effort.trial.sizes, model)


def throughput(effort: Effort) -> Section:
    about = (
        f"{_setting(effort)} Steps a second by the median time between the ends of two steps, before the kill without the first "
        "ones and after the first step that was made without the dead replica; the medians of the rounds. Kept is samples a "
        "second after the kill over those before it. The batch is the number of samples whose gradients a step applied, by its "
        "ops in the record (ReCycle) or by its participants (torchft). The target is ReCycle's: the batch stays as it is."
    )
    header = ("system", "rounds", "steps/s before", "after", "samples/s before", "after", "kept", "batch before", "after", "met")
    cases = tuple(Case(name, partial(_throughput, effort, name)) for name in SYSTEMS)
    return Section("throughput", "Throughput and batch before and after the kill", about, header, cases)


def _throughput(effort: Effort, name: str) -> Row:
    runs = measure(effort)[name]
    sides = [(run.before, run.after) for run in runs]
    steps_per_s = [[1 / step_s(steps) for steps in pair] for pair in sides]
    samples_per_s = [[fmean(step.num_samples for step in steps) / step_s(steps) for steps in pair] for pair in sides]
    batches = [{step.num_samples for pair in sides for step in pair[side]} for side in (0, 1)]
    is_same = batches == [{effort.trial.step_samples}] * 2
    return (
        name,
        str(len(runs)),
        *(f"{median(pair[side] for pair in steps_per_s):.2f}" for side in (0, 1)),
        *(f"{median(pair[side] for pair in samples_per_s):.1f}" for side in (0, 1)),
        f"{median(after / before for before, after in samples_per_s):.3f}",
        *(" or ".join(map(str, sorted(sizes))) for sizes in batches),
        (YES if is_same else NO) if name == RECYCLE else UNJUDGED,
    )


def recovery(effort: Effort) -> Section:
    about = (
        "The same runs, in seconds from sending SIGKILL, which comes in the middle of a step: until the first op begins whose "
        "result is applied, and until the end of the first step that was made without the dead replica, by all survivors. "
        "ReCycle's step has all samples, 1.5 times as many for each survivor as before; torchft's has those of the survivors. "
        "Thrown away are forward passes that the survivors had done, and whose results were never applied."
    )
    header = (
        "system",
        "rounds",
        "first op, median s",
        "worst",
        "end of step, median s",
        "worst",
        "samples in it",
        "forward passes thrown away",
        "met",
    )
    cases = tuple(Case(name, partial(_recovery, effort, name)) for name in SYSTEMS)
    return Section("recovery", "From the kill to the next op and the next step", about, header, cases)


def _recovery(effort: Effort, name: str) -> Row:
    runs = measure(effort)[name]
    discarded = [run.num_discarded for run in runs]
    return (
        name,
        str(len(runs)),
        *_spread([run.first_op_s for run in runs]),
        *_spread([run.next_step_s for run in runs]),
        f"{median(run.after[0].num_samples for run in runs):.0f}",
        f"{median(discarded):.0f}, at most {max(discarded)}",
        UNJUDGED,
    )


def _spread(times_s: Sequence[float]) -> tuple[str, str]:
    """The median and the worst."""
    return f"{median(times_s):.3f}", f"{max(times_s):.3f}"


def loss(effort: Effort) -> Section:
    about = (
        f"The same runs, until {effort.trial.num_samples} samples have been applied: the mean loss of the last weights on text "
        "that no run has seen, the round whose loss differs most from that of torch in one process without a failure, with the "
        "same samples in steps of the whole batch. A smaller batch means more steps for as many samples, and other ones than "
        "those that the learning rate was chosen for: a lower loss is no merit here, but a different one is another training. "
        f"The target is ReCycle's: a relative difference of at most {LARGEST_DIFFERENCE:g}."
    )
    header = ("system", "steps", "samples", "loss on unseen text", "relative difference", "met")
    cases = (Case(ALONE, partial(_loss_alone, effort)), *(Case(name, partial(_loss, effort, name)) for name in SYSTEMS))
    return Section("loss", "Loss after as many samples", about, header, cases)


def _loss_alone(effort: Effort) -> Row:
    trial = effort.trial
    return (ALONE, str(trial.num_steps), str(trial.num_samples), f"{loss_alone(effort):.6f}", "–", UNJUDGED)


def _loss(effort: Effort, name: str) -> Row:
    expected = loss_alone(effort)
    run = max(measure(effort)[name], key=lambda run: abs(run.loss - expected))
    difference = abs(run.loss - expected) / expected
    met = (YES if difference <= LARGEST_DIFFERENCE else NO) if name == RECYCLE else UNJUDGED
    return (name, str(len(run.steps)), str(run.num_samples), f"{run.loss:.6f}", f"{difference:.1e}", met)


def _setting(effort: Effort) -> str:
    trial = effort.trial
    sizes = trial.sizes
    return (
        f"{sizes.pipelines} data-parallel replicas of a GPT of {sizes.layers} layers and width {sizes.width}, {sizes.context} "
        f"bytes, one process with one thread for each; {sizes.microbatches} micro-batches of {SAMPLES} samples for each in a "
        f"step, AdamW, the same samples in the same order, gloo. One replica is killed by SIGKILL in the middle of step "
        f"{trial.kill_after + 1}, and stays dead. ReCycle runs {sizes.pipelines} pipelines of one stage with its defaults, "
        "torchft a lighthouse and a manager for each replica with the defaults of its Python classes"
        f"{'' if trial.join_ms == 100 else f', but for a join time-out of {trial.join_ms} ms'}; its gradients are reduced by "
        "`Manager.allreduce`, because its DistributedDataParallel raises an assertion in the survivors over gloo. A step of "
        "torchft that is not committed is tried again with the same samples."
    )


SECTIONS: dict[str, Callable[[Effort], Section]] = {"throughput": throughput, "recovery": recovery, "loss": loss}


def _sections(name: str, is_quick: bool) -> list[Section]:
    return [SECTIONS[name](QUICK if is_quick else WHOLE)]


SCRIPT = Script(
    "torchft_peer",
    "Measure ReCycle beside torchft, in turns: three replicas, one of which is killed.",
    tuple(SECTIONS),
    quick="a tiny model and one round, for machines on which replicas share cores",
    libraries=("torch", "torchft"),
    width=170,
)


def main() -> int:
    SCRIPT.arguments()  # so that --help and wrong arguments are answered without torchft
    try:
        load_torchft()
    except ImportError as problem:
        sentence = (
            f"this benchmark needs torchft 0.2.0, but Python cannot import it ({problem}): unpack its wheel onto PYTHONPATH, on "
            "Linux on x86 (there are no other wheels)"
        )
        print(f"{SCRIPT.name}: {sentence}", file=sys.stderr)
        return UserError.exit_code
    return SCRIPT.run(_sections)


if __name__ == "__main__":
    sys.exit(main())
