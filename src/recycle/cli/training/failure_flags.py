"""The flags of `recycle train` that inject failures: scripted ones (`--kill`, `--hang`, ...), or a trace (`--trace`).

They are no part of the configuration: they change how a run goes, never what it computes.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from recycle.cli.arguments import add_file_options
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import NOTHING, Action, Injection, Script
from recycle.core.events.trace import Trace

_DESCRIPTION = """\
A PLACE is W1_2@5 (worker, step; before the middle op of its row), W1_2@5:first or W1_2@5:last, W1_2@5:2F0@1 (before that op),
W1_2@5:reduce, W1_2@5:step, W1_2@5:checkpoint, W1_2@5:recovery (in the recovery from another failure of that step), or
W1_2@5:transfer (when it next sends or receives the state of a stage, because a worker has come back). A slow worker may also
have a speed: W1_2@5:x0.6 lets all its ops take 1/0.6 of their time from step 5 on, W1_2@5-20:x0.6 up to and with step 20. A
slow link is that of two workers: W1_1-W1_2@5+20ms lets every message between them take 20 ms longer. Several are separated by
commas, and every flag may be repeated."""
_FLAGS = {
    Action.KILL: ("PLACE,...", "kill these with SIGKILL; coordinator@6 kills the coordinator"),
    Action.HANG: ("PLACE,...", "stop these with SIGSTOP, for ever or for a time, such as W0_1@8+3s"),
    Action.SLOW: (
        "PLACE,...",
        "let these take longer by a time, such as W0_1@8:first+500ms, or run at a speed, such as W1_2@5:x0.6 or W1_2@5-20:x0.6",
    ),
    Action.SLOW_LINK: (
        "WORKER-WORKER@STEP+TIME,...",
        "let messages between these take longer, such as W1_1-W1_2@5+20ms, or to step 20 W1_1-W1_2@5-20+20ms",
    ),
    Action.FAIL: ("PLACE,...", "let these exit with an error"),
    Action.CORRUPT: ("WORKER@STEP,...", "flip a bit of these workers' weights after that step"),
    Action.REJOIN: ("WORKER@STEP,...", "let these workers come back before that step"),
}


def add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("failures while it runs", _DESCRIPTION)
    for action, (metavar, about) in _FLAGS.items():
        group.add_argument(f"--{action}", action="append", default=[], metavar=metavar, help=about)
    add_file_options(group, trace="let workers leave and join by the clock: lines milliseconds,add|remove,W1_2")


def read_failures(args: argparse.Namespace, shape: Shape, num_steps: int, dead: Iterable[Worker]) -> tuple[Script, Trace | None]:
    """The script and the trace of the arguments, checked against a run of `num_steps` steps that begins without `dead`."""
    given = [
        (action, place.strip())
        for action in Action
        for text in getattr(args, action.replace("-", "_"))
        for place in text.split(",")
    ]
    injections = [Injection.parse(action, place) for action, place in given if place]
    if args.trace is None:
        return Script.of(injections, shape, num_steps, dead), None
    if injections:
        raise UserError(f"--trace and --{injections[0].action} both say who fails when: give one of them")
    return NOTHING, _read_trace(args.trace, shape, frozenset(dead))


def _read_trace(path: Path, shape: Shape, dead: frozenset[Worker]) -> Trace:
    """Load a trace; its nodes must be workers of this shape, and those live at its start the live workers of the run."""
    trace = Trace.load(path)
    if trace.slowdowns:
        raise UserError(
            f"the trace {path} has slow nodes, which a real run does not play by the clock: leave them out, and give them by "
            "step with --slow, such as W1_2@5-20:x0.6"
        )
    if trace.num_hangs:
        raise UserError(
            f"the trace {path} has nodes that hang, which a real run does not play by the clock: let them be removed, or give "
            "them by step with --hang, such as W0_1@8"
        )
    workers = {str(worker): worker for worker in shape.workers()}
    for change in trace.changes:
        if change.node not in workers:
            raise UserError(
                f"the trace {path} has a node {change.node!r}, which is not a worker of this cluster: name its nodes "
                f"W0_0 to W{shape.num_pipelines - 1}_{shape.num_stages - 1}"
            )
    present = set(trace.initial)
    for name, worker in workers.items():
        if (name in present) == (worker in dead):
            begins = f"without {name}, but the run with it" if worker not in dead else f"with {name}, but the run without it"
            raise UserError(f"the trace {path} begins {begins}: let both begin alike, by --dead or by lines '0,add,WORKER'")
    return trace
