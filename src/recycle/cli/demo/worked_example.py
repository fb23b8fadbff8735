"""`recycle demo --plans`: the worked example of the ReCycle paper, one technique after another, planned and drawn."""

from rich.console import Console

from recycle.cli.terminal import Terminal, chart_width, print_lines
from recycle.core.plans.plan import Plan
from recycle.planner.problem_from_text import problem
from recycle.planner.solve import solve
from recycle.report.render.terminal_chart import draw_chart

_CASES = (
    ("fault-free 1F1B", "", "none", "4,3,2,1", "every worker alive: the time that a failure must not cost"),
    ("Adaptive Pipelining", "W1_2", "adaptive", "6", "W1_2 is dead; its peers W0_2 and W2_2 take over its micro-batches"),
    ("+ Decoupled BackProp", "W1_2", "adaptive,decoupled", "6", "weight gradients (W) wait for a bubble"),
    ("+ Staggered Optimizer", "W1_2", "adaptive,decoupled,staggered", "6", "each stage steps, and starts anew, on its own"),
)
_TIGHT = ("Adaptive Pipelining, memory 4,3,2,1", "W1_2", "adaptive", "4,3,2,1")


def draw_plans() -> None:
    """Print the schedule of every case, and what each takes beside the first."""
    console = Terminal()
    rows = []
    for name, fail, techniques, memory, why in _CASES:
        with Console(stderr=True).status("planning (the first plan on a machine compiles the scheduler, some seconds)"):
            plan = _plan(fail, techniques, memory)
        console.rule(f"[bold]{name}: {plan.period_us} slots of 1 µs")
        console.print(f"{why}\n", style="italic")
        print_lines(draw_chart(plan, chart_width(console)), console)
        console.print()
        rows.append((name, plan))
    name, fail, techniques, memory = _TIGHT
    rows.insert(1, (name, _plan(fail, techniques, memory)))
    _print_table(console, rows)


def _plan(fail: str, techniques: str, memory: str) -> Plan:
    return solve(problem(3, 4, 6, fail=fail, costs="1,1,1", memory=memory, techniques=techniques))


def _print_table(console: Console, rows: list[tuple[str, Plan]]) -> None:
    base = rows[0][1].period_us
    console.rule("[bold]slots for one iteration")
    for name, plan in rows:
        console.print(
            f"{name:<38}{plan.period_us:>4}  {plan.period_us / base - 1:>+6.0%}  {plan.quality.status}", highlight=False
        )
