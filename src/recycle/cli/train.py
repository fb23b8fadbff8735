"""`recycle train`: a small GPT on real text, with a process for every live worker of a plan."""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from recycle.cli.render import progress_bar
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.plan import Plan
from recycle.core.problem import Techniques
from recycle.core.record import OpRan, Started, write_record
from recycle.core.units import format_us
from recycle.planner.describe import problem as describe
from recycle.planner.solve import solve

if TYPE_CHECKING:
    from recycle.runtime.launch import Trained
    from recycle.runtime.worker import Stepped

_PLAN_S = 10.0
_EXAMPLES = """\
examples:
  twelve workers, one of them dead from the start
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --dead W1_2 --out runs/a
  the same weights, bit for bit, with nobody dead: compare weights_sha256
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --exact --json
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --exact --dead W1_2 --json"""


def add_train_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on this machine, a process for every live worker",
        description="Train a small GPT on the text of Python's own library. Workers may be dead from the start, not die yet.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster = parser.add_argument_group("the cluster and its plan")
    cluster.add_argument("--pipelines", type=int, default=3, metavar="D", help="data-parallel pipelines (default: 3)")
    cluster.add_argument("--stages", type=int, default=4, metavar="S", help="stages of each pipeline (default: 4)")
    cluster.add_argument("--microbatches", type=int, default=6, metavar="M", help="micro-batches of each pipeline (default: 6)")
    cluster.add_argument("--dead", default="", metavar="W1_2,...", help="workers that are dead from the start")
    cluster.add_argument("--techniques", default=",".join(Techniques.NAMES), metavar="LIST", help="as in 'recycle plan'")
    cluster.add_argument("--costs", default="10,13,9", metavar="F,I,W", help="what the plan takes ops to cost (default: 10,13,9)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=20, metavar="N", help="default: 20")
    training.add_argument("--exact", action="store_true", help="sums that do not depend on who ran what: equal bit for bit")
    training.add_argument("--seed", type=int, default=1, help="of weights, data and dropout (default: 1)")
    training.add_argument("--layers", type=int, default=8, help="layers of the GPT (default: 8)")
    training.add_argument("--width", type=int, default=64, help="its width (default: 64)")
    training.add_argument("--context", type=int, default=64, help="bytes of text in a sample (default: 64)")
    training.add_argument("--samples", type=int, default=2, metavar="N", help="samples of a micro-batch (default: 2)")
    training.add_argument("--dropout", type=float, default=0.0, metavar="P", help="default: 0")
    training.add_argument("--rate", type=float, default=3e-3, metavar="R", help="learning rate of AdamW (default: 0.003)")
    training.add_argument("--max-norm", type=float, metavar="X", help="clip the global norm of the gradient (default: no)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.json, record.jsonl and summary.json there")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    _refuse_misuse(args)
    if args.out:
        refuse_unwritable(args.out / "summary.json")
    plan = _plan(args)
    view = _View(plan, args.steps)
    with view:
        trained = _launch(args, plan, view)
    facts = view.summary(trained, args.samples)
    if args.out:
        plan.save(args.out / "plan.json")
        write_record(args.out / "record.jsonl", [Started("train", f"{args.layers}-layer GPT"), *view.ops])
        write_text(args.out / "summary.json", json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts) if args.json else _text(facts, args.out))
    return 0


def _refuse_misuse(args: argparse.Namespace) -> None:
    if not 1 <= args.steps <= 10**9:
        raise UserError(f"--steps is {args.steps}, but it must be a whole number of at least 1")
    if args.seed < 0:
        raise UserError(f"--seed is {args.seed}, but it must be a whole number of at least 0")
    if not 0 < args.rate < 1e6:
        raise UserError(f"--rate is {args.rate}, but a learning rate is a finite number above 0")
    if args.max_norm is not None and not 0 < args.max_norm < 1e18:
        raise UserError(f"--max-norm is {args.max_norm}, but it must be a finite number above 0")


def _plan(args: argparse.Namespace) -> Plan:
    shape = (args.pipelines, args.stages, args.microbatches)
    # The greedy method is near the bound in a moment; a few per cent of a plan are not worth a wait before training begins.
    return solve(describe(*shape, fail=args.dead, costs=args.costs, techniques=args.techniques), "greedy", _PLAN_S)


def _launch(args: argparse.Namespace, plan: Plan, view: "_View") -> "Trained":
    try:
        import torch  # here, because planning and simulating work without it

        from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
        from recycle.models.text import Text
        from recycle.runtime.batches import Batches
        from recycle.runtime.launch import launch
        from recycle.runtime.worker import Settings
    except ImportError as problem:
        raise UserError(f"training needs torch ({problem}): install it with pip install 'recycle-train[train]'") from None
    config = GptConfig(context=args.context, width=args.width, num_layers=args.layers, dropout=args.dropout)
    stages = gpt_stages(config, args.stages, args.seed)
    samples = Batches(Text(args.context), plan.problem.shape, args.samples, args.seed)
    settings = Settings(args.steps, args.seed, args.exact, args.max_norm)
    optimizer = partial(torch.optim.AdamW, lr=args.rate)
    return launch(plan, stages, samples, next_byte_loss, optimizer, settings, view.hear)


class _View:
    """What is shown while it runs, and what is kept of it: the step, its loss, and when every op ran."""

    def __init__(self, plan: Plan, num_steps: int) -> None:
        self._plan = plan
        self._missing = [len(plan.rows)] * num_steps
        self._losses: list[dict[int, float]] = [{} for _ in range(num_steps)]
        self._ends_us: list[int] = [0] * num_steps
        self.ops: list[OpRan] = []
        self._progress = progress_bar()
        self._task = self._progress.add_task("starting workers", total=num_steps)

    def __enter__(self) -> "_View":
        self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._progress.stop()

    def hear(self, event: "Stepped") -> None:
        """Take in what one worker did in one step."""
        step = event.iteration
        self.ops += [OpRan(step, str(event.worker), op, begin, end) for op, begin, end in event.spans]
        self._losses[step] |= event.losses
        self._ends_us[step] = max([self._ends_us[step], *(end for _, _, end in event.spans)])
        self._missing[step] -= 1
        if self._missing[step] == 0:
            mean = sum(self._losses[step].values()) / len(self._losses[step])
            self._progress.update(self._task, completed=step + 1, description=f"step {step + 1}  loss {mean:.4f}")

    def summary(self, trained: "Trained", num_samples: int) -> dict[str, Any]:
        """What the run came to. An iteration's time is that between the ends of two, without the first, in which all warm up."""
        first_us = min(op.start_us for op in self.ops)
        self.ops = [OpRan(o.iteration, o.worker, o.op, o.start_us - first_us, o.end_us - first_us) for o in self.ops]
        times = [after - before for before, after in zip(self._ends_us, self._ends_us[1:], strict=False)]
        iteration_us = median(times) if times else max(op.end_us for op in self.ops)
        return {
            "steps": len(self._missing),
            "losses": trained.losses,
            "weights_sha256": trained.weights_sha256,
            "samples_per_s": round(self._plan.problem.shape.num_chains * num_samples * 1e6 / iteration_us, 3),
            "iteration_us": round(iteration_us),
            "workers": len(self._plan.rows),
            "dead": [str(worker) for worker in sorted(self._plan.problem.cluster.failed)],
            "recoveries": [],
        }


def _text(facts: dict[str, Any], out: Path | None) -> str:
    losses = facts["losses"]
    dead = f", dead from the start: {', '.join(facts['dead'])}" if facts["dead"] else ""
    lines = [
        f"workers    {facts['workers']}{dead}",
        f"loss       {losses[0]:.4f} at the first step, {losses[-1]:.4f} at step {facts['steps']}",
        f"iteration  {format_us(facts['iteration_us'])}, {facts['samples_per_s']:g} samples/s",
        f"weights    sha256 {facts['weights_sha256']}",
    ]
    return "\n".join([*lines, f"written    {out}"] if out else lines)
