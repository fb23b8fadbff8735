"""The runtime's benchmark: how fast it is, how exact, what it holds, and how soon it starts.

make bench                                          every table, printed
python benchmarks/runtime.py --only speed           one of them
python benchmarks/runtime.py --quick                few rounds, runs and steps, in a few minutes
python benchmarks/runtime.py --save                 also writes docs/benchmarks/<date>-runtime.md
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any

import torch
from runtime_cases import (
    ALL,
    EXACT,
    SAMPLES,
    Bursting,
    Entrant,
    Ours,
    Sizes,
    Theirs,
    alone,
    bursting_loss,
    command_s,
    ours_exact,
    outcome,
    race,
    start_s,
)
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section
from torch import nn

import recycle
from recycle.runtime.compute.state_digests import state_checksum
from recycle.runtime.launch.local_launcher import launch

ASKED_RATIO, ASKED_DIFFERENCE, ASKED_MEMORY, ASKED_START_S = 1.05, 1e-5, 0.10, 15
SYNCHRONOUS = "adaptive,decoupled"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. What a clock says is judged only if it is enough."""

    num_rounds: int
    num_iterations: int
    num_runs: int | None
    num_steps: int
    num_starts: int
    is_judged: bool

    def judged(self, met: bool) -> str:
        return _judged(met) if self.is_judged else UNJUDGED


WHOLE = Effort(num_rounds=7, num_iterations=4, num_runs=None, num_steps=200, num_starts=3, is_judged=True)
QUICK = Effort(num_rounds=2, num_iterations=1, num_runs=3, num_steps=20, num_starts=1, is_judged=False)

ONE_PIPELINE, THREE_PIPELINES = Sizes(1, 4, 8, 128, 8), Sizes(3, 4, 6, 64, 8)
RACES = (Sizes(1, 2, 8, 128, 4), ONE_PIPELINE, Sizes(2, 2, 4, 128, 4), THREE_PIPELINES, Sizes(3, 4, 6, 128, 8))


def speed(effort: Effort) -> Section:
    cases = [Case(_shown(sizes), partial(_speed, effort, sizes, "ReCycle's", sizes.plan)) for sizes in RACES]
    same_schedule = partial(_speed, effort, ONE_PIPELINE, "1F1B", ONE_PIPELINE.one_f_one_b)
    cases.append(Case(f"{_shown(ONE_PIPELINE)}, 1F1B", same_schedule))
    about = (
        "A fault-free step beside that of `torch.distributed.pipelining` 1F1B: D pipelines × S stages, M micro-batches each of "
        f"{SAMPLES} samples of 128 bytes, a GPT of some width and layers, one thread a worker, CPU, gloo. The same processes "
        f"train both, in turns: a round is {effort.num_iterations} iterations of ours, then as many of theirs, each between "
        f"two barriers; times are medians of {effort.num_rounds} rounds, the ratio is the median of the rounds' ratios. Ours "
        "plays ReCycle's plan for nobody dead, and keeps what it needs to take a step back; in the last row it plays 1F1B, "
        "so that the schedules are the same. Theirs adds up gradients over pipelines in one all-reduce, and gets the allocator "
        "that keeps its memory, which ReCycle gives its workers and others must find for themselves. With more workers "
        f"than cores, what is compared is all work, not how well it overlaps. The target is a ratio of at most {ASKED_RATIO}."
    )
    header = ("D × S, M", "width, layers", "our plan", "ours ms", "theirs ms", "ratio", "range", "met")
    return Section("speed", "Speed of a step against torch.distributed.pipelining", about, header, tuple(cases))


def _speed(effort: Effort, sizes: Sizes, plan_name: str, plan: Callable[[], recycle.Plan]) -> Row:
    cells, ratio = _raced(effort, sizes, plan(), (Ours, Theirs))
    return (*_named(sizes), plan_name, *cells, effort.judged(ratio <= ASKED_RATIO))


def _raced(effort: Effort, sizes: Sizes, plan: recycle.Plan, entrants: tuple[Entrant, Entrant]) -> tuple[Row, float]:
    """Both times, the ratio and its range as cells; the ratio."""
    times_s = race(sizes.job(plan), entrants, effort.num_rounds, effort.num_iterations)
    ratios = sorted(one / other for one, other in times_s)
    both_ms = (f"{median(times) * 1e3:.1f}" for times in zip(*times_s, strict=True))
    return (*both_ms, f"{median(ratios):.3f}", f"{ratios[0]:.2f} – {ratios[-1]:.2f}"), median(ratios)


TINY = Sizes(3, 4, 4, 32, 4, context=16)
FOUR = Sizes(4, 3, 3, 32, 3, context=16)
EVERY_STAGE = "W0_0,W1_1,W2_2,W0_3"
SINGLES = tuple(f"W{pipeline}_{stage}" for pipeline, stage in product(range(TINY.pipelines), range(TINY.stages)))
SOME = ("", "W1_2", "W0_0", "W2_3", EVERY_STAGE)
EXACT_STEPS = 3
# Between the norms of the first and the last step: some are clipped, some are not, and a guess is wrong.
CLIPPING_NORM, IDLE_NORM = 2.0, 1e9

Run = tuple[str, str, Mapping[str, Any]]
"""The dead workers, the techniques, and options of its own."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and its data. All its runs must come to the same weights, whoever is dead and however steps are taken.

    `must` names what has to have happened in every run: without it, the row would say nothing.
    """

    name: str
    sizes: Sizes
    dead: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[Run, ...] = ()
    must: str = ""

    @property
    def runs(self) -> list[Run]:
        return [*((dead, techniques, {}) for dead, techniques in product(self.dead, (ALL, SYNCHRONOUS))), *self.more]


def settings() -> list[Setting]:
    never_clips = {"options": replace(EXACT, max_norm=IDLE_NORM)}
    clips = {"options": replace(EXACT, max_norm=CLIPPING_NORM)}
    idle = tuple((dead, techniques, never_clips) for dead, techniques in product(("", "W1_2"), (ALL, SYNCHRONOUS)))
    fused: tuple[Run, ...] = (("", "none", {}), ("W1_2", "adaptive", {}))
    burst = TINY.batches().numbers(step=1, pipeline=1, index=2)[0]
    bursting = {"dataset": Bursting(TINY.context, burst), "loss": bursting_loss}
    pairs = tuple(f"W{one}_{stage},W{other}_{stage}" for stage, (one, other) in enumerate(((0, 1), (1, 3), (2, 3))))
    return [
        Setting("plain; clipping never active", TINY, ("", *SINGLES, EVERY_STAGE), more=(*idle, *fused)),
        Setting("two dead in a stage", FOUR, ("", *pairs)),
        Setting(f"clipping to {CLIPPING_NORM:g}", TINY, SOME, clips, must="clipped"),
        Setting("infinite gradients in step 2", TINY, SOME, bursting, must="skipped"),
        Setting("tied embeddings", TINY, SOME, {"stages": TINY.gpt(is_tied=True)}),
        Setting("dropout 0.1", TINY, SOME, {"stages": TINY.gpt(dropout=0.1)}),
    ]


def exact(effort: Effort) -> Section:
    cases = tuple(Case(setting.name, partial(_exact, effort, setting)) for setting in settings())
    about = (
        f"Real processes with `is_exact=True`, {EXACT_STEPS} steps of a tiny GPT by AdamW; the number of different "
        "`weights_sha256` over all runs of a setting. The runs: nobody dead; each single one of the twelve workers dead (in the "
        "first row; in the others a choice of them); one dead in every stage; of four pipelines, two dead in the same stage. "
        "Each with the staggered and with the synchronous optimizer; in the first row also with a clipping norm that is never "
        "reached, and with whole backward passes. Clipped and skipped are steps of each run, begun again are iterations of all "
        "runs whose warm-up had guessed wrong. The target is 1."
    )
    header = ("setting", "D × S, M", "runs", "clipped", "skipped", "begun again", "different weights", "met")
    return Section("exact", "Exactness: the same weights bit for bit", about, header, cases)


def _exact(effort: Effort, setting: Setting) -> Row:
    sizes = setting.sizes
    made = [
        outcome(sizes, sizes.plan(dead, techniques), EXACT_STEPS, **setting.options, **more)
        for dead, techniques, more in setting.runs[: effort.num_runs]
    ]
    hashes = {one.weights_sha256 for one in made}
    counts = {"clipped": [one.num_clipped for one in made], "skipped": [one.num_skipped for one in made]}
    met = len(hashes) == 1 and (not setting.must or min(counts[setting.must]) > 0)
    steps = (_few(counts["clipped"]), _few(counts["skipped"]), str(sum(one.num_begun_again for one in made)))
    return (setting.name, _shape(sizes), str(len(made)), *steps, str(len(hashes)), _judged(met))


def cost(effort: Effort) -> Section:
    cases = tuple(Case(_shown(sizes), partial(_cost, effort, sizes)) for sizes in (ONE_PIPELINE, THREE_PIPELINES))
    about = (
        "A step with exact sums beside one with floating-point sums, both ours and by the same plan, in turns in the same "
        "processes, as in the table of speed. There is no target: it is what exactness costs whoever asks for it."
    )
    header = ("D × S, M", "width, layers", "exact ms", "default ms", "ratio", "range", "met")
    return Section("cost", "What exactness costs", about, header, cases)


def _cost(effort: Effort, sizes: Sizes) -> Row:
    cells, _ = _raced(effort, sizes, sizes.plan(), (ours_exact, Ours))
    return (*_named(sizes), *cells, UNJUDGED)


ROUNDED = Sizes(3, 4, 4, 64, 4, context=32)
WRONG_WEIGHT = 1.1


def plans_of(sizes: Sizes) -> dict[str, Callable[[], recycle.Plan]]:
    """Three that differ as much as plans can: fused, split, and with other workers' micro-batches."""
    return {
        "1F1B": sizes.one_f_one_b,
        "zero bubble": partial(sizes.plan, memory=2 * sizes.stages),
        "W1_2 dead": partial(sizes.plan, dead="W1_2"),
    }


def rounding(effort: Effort) -> Section:
    expected = cache(partial(alone, ROUNDED, effort.num_steps))
    yardsticks: dict[str, dict[str, Any]] = {
        "torch alone, last micro-batch first": {"is_reversed": True},
        f"torch alone, one micro-batch counts {WRONG_WEIGHT:g}": {"first_weight": WRONG_WEIGHT},
    }
    cases = []
    for name, changed in yardsticks.items():
        run = partial(alone, ROUNDED, effort.num_steps, **changed)
        cases.append(Case(name, partial(_rounding, name, run, expected, False)))
    for name, plan in plans_of(ROUNDED).items():
        cases.append(Case(name, partial(_rounding, name, partial(_losses, effort, plan), expected, True)))
    about = (
        f"{effort.num_steps} steps in the default mode, {_shown(ROUNDED)}, AdamW: the losses of real processes beside those of "
        "one model that torch trains in one process on the same micro-batches. Only the order of sums differs. The first two "
        "rows are yardsticks, torch against itself: what rounding does without us, with the micro-batches of each step in "
        "reverse; and what a small mistake does, the gradient of one micro-batch out of "
        f"{ROUNDED.pipelines * ROUNDED.microbatches} being {WRONG_WEIGHT:g} times itself. The target is that no loss differs "
        f"by more than {ASKED_DIFFERENCE:g} of itself, about one rounding of float32 (2^-24) for each of 200 steps."
    )
    header = ("run", "first loss", "last loss", "torch's last", "largest difference", "at step", "met")
    return Section("rounding", "Losses against torch alone", about, header, tuple(cases))


def _losses(effort: Effort, plan: Callable[[], recycle.Plan]) -> Sequence[float]:
    return launch(ROUNDED.job(plan(), effort.num_steps)).losses


def _rounding(name: str, run: Callable[[], Sequence[float]], expect: Callable[[], list[float]], is_judged: bool) -> Row:
    losses, expected = run(), expect()
    differences = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
    worst = max(differences)
    found = (f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{expected[-1]:.6f}", f"{worst:.1e}", str(differences.index(worst) + 1))
    return (name, *found, _judged(worst <= ASKED_DIFFERENCE) if is_judged else UNJUDGED)


def memory(_: Effort) -> Section:
    sizes = THREE_PIPELINES
    cases = tuple(Case(name, partial(_memory, sizes, name, plan)) for name, plan in plans_of(sizes).items())
    about = (
        f"The most bytes of activations that a worker held, {_shown(sizes)}, as the runtime's meter counts them, over what its "
        "row says by the plan's memory model and one micro-batch that the same meter measured: it is whether ops take and give "
        "back what the model says. The worst worker is the one whose ratio is farthest from 1. The target is all workers "
        f"within {ASKED_MEMORY:.0%}."
    )
    header = ("plan", "worst worker", "measured MiB", "planned MiB", "ratio", "range of all", "met")
    return Section("memory", "Activation memory against the plan", about, header, cases)


def _memory(sizes: Sizes, name: str, plan: Callable[[], recycle.Plan]) -> Row:
    trained = launch(sizes.job(plan(), 2))
    held, planned = trained.activation_bytes, trained.planned_activation_bytes
    ratios = {worker: held[worker] / planned[worker] for worker in planned}
    worst = max(ratios, key=lambda worker: abs(ratios[worker] - 1))
    found = (f"{held[worst] / 2**20:.2f}", f"{planned[worst] / 2**20:.2f}", f"{ratios[worst]:.3f}")
    spread = f"{min(ratios.values()):.3f} – {max(ratios.values()):.3f}"
    return (name, worst, *found, spread, _judged(abs(ratios[worst] - 1) <= ASKED_MEMORY))


def start(effort: Effort) -> Section:
    cases = (
        Case("recycle.train", partial(_start, effort, "calling `recycle.train` to the first op", start_s, ASKED_START_S)),
        Case("recycle train", partial(_start, effort, "the command `recycle train` to its first step", command_s, None)),
    )
    about = (
        "Twelve workers, each time from a fresh process, so that nothing is loaded yet but what a script that calls "
        "`recycle.train` has imported. The command also imports torch, reads its data and plans. Medians of "
        f"{effort.num_starts}. The target is less than {ASKED_START_S} s to the first op."
    )
    header = ("from … to …", "target", "seconds", "range", "met")
    return Section("start", "Start of twelve workers", about, header, cases)


def _start(effort: Effort, name: str, run: Callable[[], float], target_s: float | None) -> Row:
    times_s = sorted(run() for _ in range(effort.num_starts))
    met = UNJUDGED if target_s is None else effort.judged(median(times_s) < target_s)
    asked = "none" if target_s is None else f"< {target_s:g} s"
    return name, asked, f"{median(times_s):.1f}", f"{times_s[0]:.1f} – {times_s[-1]:.1f}", met


COMPARE_EVERY, ASKED_SHARE = 10, 0.01


def compare(effort: Effort) -> Section:
    every = (ONE_PIPELINE, THREE_PIPELINES, Sizes(3, 4, 6, 128, 8))
    cases = tuple(Case(_shown(sizes), partial(_compare, effort, sizes)) for sizes in every)
    about = (
        "The checksum of weights and optimizer state by which peers find a flipped bit, of the largest stage, beside an "
        f"iteration of the same job. Peers compare after every {COMPARE_EVERY} steps. Medians. The target is at most "
        f"{ASKED_SHARE:.0%} of the time."
    )
    header = ("D × S, M", "width, layers", "checksum ms", "iteration ms", "share", "met")
    return Section("compare", "What the comparison of peers costs", about, header, cases)


def _compare(effort: Effort, sizes: Sizes) -> Row:
    job = sizes.job(sizes.plan(), 2 + effort.num_iterations)
    iteration_us = launch(job).iteration_us
    torch.set_num_threads(1)  # as workers have
    checksum_us = max(_checksum_us(stage, job.optimizer) for stage in job.stages)
    share = checksum_us / COMPARE_EVERY / iteration_us
    times = f"{checksum_us / 1e3:.2f}", f"{iteration_us / 1e3:.1f}"
    return (*_named(sizes), *times, f"{share:.2%}", effort.judged(share <= ASKED_SHARE))


def _checksum_us(stage: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    optimizer = make_optimizer(list(stage.parameters()))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes its state
    times_us = []
    for _ in range(21):
        begin = time.perf_counter()
        state_checksum(optimizer)
        times_us.append((time.perf_counter() - begin) * 1e6)
    return median(times_us)


SECTIONS = {
    "speed": speed,
    "exact": exact,
    "cost": cost,
    "rounding": rounding,
    "memory": memory,
    "start": start,
    "compare": compare,
}


def _named(sizes: Sizes) -> tuple[str, str]:
    return _shape(sizes), f"{sizes.width}, {sizes.layers}"


def _shown(sizes: Sizes) -> str:
    return f"{_shape(sizes)}, width {sizes.width}, {sizes.layers} layers"


def _shape(sizes: Sizes) -> str:
    return f"{sizes.pipelines} × {sizes.stages}, {sizes.microbatches}"


def _few(counts: Sequence[int]) -> str:
    """One number if all are the same."""
    return " or ".join(map(str, sorted(set(counts))))


def _judged(met: bool) -> str:
    return YES if met else NO


def _sections(name: str, is_quick: bool) -> list[Section]:
    return [SECTIONS[name](QUICK if is_quick else WHOLE)]


SCRIPT = Script(
    "runtime",
    "Measure how fast, exact and frugal training is.",
    tuple(SECTIONS),
    quick="few rounds, runs and steps, in a few minutes",
    libraries=("torch", "numpy"),
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
