"""`recycle demo --plans`: the worked example of the ReCycle paper, one technique after another, planned and drawn."""

from rich.console import Console

from recycle.cli.terminal import Terminal, chart_width, print_lines
from recycle.core.plans.plan import Plan
from recycle.planner.problem_from_text import problem
from recycle.planner.solve import solve
from recycle.report.render.terminal_chart import draw_chart
from recycle.report.timeline.plan_timeline import plan_timeline

# Name, dead workers, techniques, memory limit, and a sentence on the chart; a case without a sentence is only in the table.
_CASES = (
    ("fault-free 1F1B", "", "none", "4,3,2,1", "every worker alive: the time that a failure must not cost"),
    ("Adaptive Pipelining, memory 4,3,2,1", "W1_2", "adaptive", "4,3,2,1", ""),
    ("Adaptive Pipelining", "W1_2", "adaptive", "6", "W1_2 is dead; its peers W0_2 and W2_2 take over its micro-batches"),
    ("+ Decoupled BackProp", "W1_2", "adaptive,decoupled", "6", "weight gradients (W) wait for a bubble"),
    ("+ Staggered Optimizer", "W1_2", "adaptive,decoupled,staggered", "6", "each stage steps, and starts anew, on its own"),
)


def draw_plans() -> None:
    """Print the schedules, and what each takes beside the first."""
    console = Terminal()
    plans: dict[str, Plan] = {}
    for name, fail, techniques, memory, sentence in _CASES:
        with Console(stderr=True).status("planning (the first plan on a machine compiles the scheduler, some seconds)"):
            plan = solve(problem(3, 4, 6, fail=fail, costs="1,1,1", memory=memory, techniques=techniques))
        plans[name] = plan
        if sentence:
            console.rule(f"[bold]{name}: {plan.period_us} slots of 1 µs")
            console.print(f"{sentence}\n", style="italic")
            print_lines(draw_chart(plan_timeline(plan), chart_width(console)), console)
            console.print()
    console.rule("[bold]slots for one iteration")
    first_us = plans["fault-free 1F1B"].period_us
    for name, plan in plans.items():
        more = plan.period_us / first_us - 1
        console.print(f"{name:<38}{plan.period_us:>4}  {more:>+6.0%}  {plan.quality.status}", highlight=False)
