"""`recycle check`: say whether a plan is legal, and print the violations."""

import argparse
import json
from pathlib import Path

from recycle.cli.arguments import Subparsers, add_command
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import Violation, check
from recycle.core.units import format_us
from recycle.planner.proven_bound import ProvenBound, prove_bound

MOST_SHOWN = 20
_DESCRIPTION = """\
Check a plan against every rule: dependencies, one op at a time, memory, every op exactly once,
only live workers, only peers of the stage, and the period that it claims. The bound is proven again, and no bound is
believed: a small plan that claims more than follows from its problem is given to CP-SAT, which takes up to a minute.
Of a larger one the claim stays open: a line that begins with "bound not proven" says so, and everything else that is
printed follows from the bound that this check proves.

Exit code 0: the plan is legal. 1: it breaks a rule, or its bound is certainly false. 2: it cannot be read."""
_EXAMPLES = """\
examples:
  recycle check plan.json
  recycle check plan.json --json | jq .violations"""


def add_check_parser(subparsers: Subparsers) -> None:
    summary = "say whether a plan is legal, and which rules it breaks"
    parser = add_command(subparsers, "check", run_check, summary, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan file")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every violation")


def run_check(args: argparse.Namespace) -> int:
    """Print the result; return 0 for a legal plan and 1 for any other."""
    plan = Plan.load(args.plan)
    violations = check(plan)
    proven = None if violations else prove_bound(plan)
    if proven is not None:
        violations += proven.violations()
    if args.json:
        facts = {
            "legal": not violations,
            "period_us": plan.period_us,
            "bound_us": None if proven is None else proven.bound_us,
            "claimed_bound_us": plan.quality.bound_us,
            "claim_is_proven": None if proven is None else not proven.is_open and not proven.violations(),
            "status": None if proven is None else _status(plan, proven),
            "ratio_to_bound": None if proven is None else round(plan.period_us / proven.bound_us, 6),
            "num_ops": plan.num_ops,
            "num_workers": len(plan.rows),
            "violations": [{"rule": violation.rule, "message": violation.message} for violation in violations],
        }
        print(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        print("\n".join(_sentences(plan, proven, violations)))
    return 1 if violations else 0


def _status(plan: Plan, proven: ProvenBound) -> str:
    return "optimal" if proven.bound_us == plan.period_us else "feasible"


def _open_claim(plan: Plan, proven: ProvenBound) -> list[str]:
    """The line about a bound that is claimed and that nothing here proves or contradicts."""
    if not proven.is_open:
        return []
    claim = f"the plan claims a bound of {proven.claimed_us} µs that this check cannot prove; it proves {proven.bound_us} µs"
    over = f"by that the period is at most {plan.period_us / proven.bound_us - 1:.2%} above the shortest one possible"
    return [f"bound not proven: {claim}, and {over}"]


def _sentences(plan: Plan, proven: ProvenBound | None, violations: list[Violation]) -> list[str]:
    if proven is not None and not violations:
        quality = f"bound {format_us(proven.bound_us)} ({_status(plan, proven)})"
        legal = f"legal: period {format_us(plan.period_us)}, {quality}, {plan.num_ops} ops on {len(plan.rows)} workers"
        return [legal, *_open_claim(plan, proven)]
    lines = [str(violation) for violation in violations[:MOST_SHOWN]]
    if len(violations) > MOST_SHOWN:
        lines.append(f"and {len(violations) - MOST_SHOWN} more")
    return [f"not legal: {len(violations)} violation{'s' if len(violations) > 1 else ''}", *lines]
