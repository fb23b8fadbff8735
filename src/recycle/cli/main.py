"""The `recycle` command: parses the arguments, runs the named subcommand, and prints errors as one sentence."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from recycle.core.errors import UserError
from recycle.core.release import RELEASE

_EPILOG = """\
examples:
  recycle demo                                    train with twelve workers, kill some, and compare the weights
  recycle plan --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --costs 1,1,1 --out plan.json
  recycle show plan.json                          the schedule as a chart
  recycle check plan.json                         whether the plan is legal, and if not, why
  recycle train --dead W1_2 --out runs/a          train a small GPT with a dead worker
  recycle report runs/a                           the results of that run

exit codes: 0 done; 1 'check' found an illegal plan; 2 input that cannot be used; 10 to 24 as 'recycle train --help' says;
25 a coordinator with --store has lost its leadership; 130 interrupted, 143 ended by SIGTERM."""
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, of the command that they are about."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown argument here: argparse would have the parser of all commands refuse it, and name its help.

        A command with `job_flags` gets there what stands after `--`: argparse would take some of it for arguments of the command.
        """
        flags = None
        if self.get_default("job_flags") is not None and "--" in (args or ()):
            at = args.index("--")
            args, flags = args[:at], args[at + 1 :]
        known, unknown = super().parse_known_args(args, namespace)
        if flags is not None:
            known.job_flags = flags
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(UserError.exit_code, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. They are imported here, so that an interrupt during the imports is handled too."""
    from recycle.cli.demo import demo
    from recycle.cli.machines import agent, coordinator, kubernetes, ray, slurm, worker
    from recycle.cli.measuring import bench, dashboard, profile, report
    from recycle.cli.planning import check, estimate, plan, show
    from recycle.cli.simulation import advise, replay, reproduce, simulate, trace
    from recycle.cli.training import export, train

    parser: argparse.ArgumentParser = _Parser(
        prog="recycle",
        description="Train on when workers die: plan, check and draw the schedules that make it possible.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"recycle {RELEASE}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add_parser in (
        plan.add_plan_parser,
        show.add_show_parser,
        check.add_check_parser,
        replay.add_replay_parser,
        estimate.add_estimate_parser,
        profile.add_profile_parser,
        trace.add_trace_parser,
        simulate.add_simulate_parser,
        advise.add_advise_parser,
        reproduce.add_reproduce_parser,
        train.add_train_parser,
        export.add_export_parser,
        coordinator.add_coordinator_parser,
        agent.add_agent_parser,
        worker.add_worker_parser,
        slurm.add_slurm_parser,
        kubernetes.add_kubernetes_parser,
        ray.add_ray_parser,
        report.add_report_parser,
        dashboard.add_dashboard_parser,
        demo.add_demo_parser,
        bench.add_bench_parser,
    ):
        add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    name = "recycle"
    try:
        args = make_parser().parse_args(argv)
        name = f"recycle {args.command}"
        code: int = args.run(args) or 0
        sys.stdout.flush()
        return code
    except UserError as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print(
            f"\n{name}: interrupted; what was written is whole, and a library, cache or run goes on from there", file=sys.stderr
        )
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (a pager, `head`) has closed the pipe; without this, Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        print(f"{name}: cannot go on: {problem.strerror or problem}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UserError.exit_code
