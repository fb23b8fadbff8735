"""Recoveries as text: the workers that left or joined, the cause, and the time of each part; and slow workers and links."""

from collections.abc import Sequence

from recycle.core.events.record import PARTS, LinkChanged, Recovered, SpeedChanged
from recycle.core.units import format_us
from recycle.report.record.tables import aligned

# By part: its look of the palette, and its letter where there is no colour.
PART_LOOKS = {"detect": "I", "abort": "B", "plan": "reduce", "regroup": "F", "transfer": "W", "redo": "optimizer"}
PART_LETTERS = {"detect": "d", "abort": "a", "plan": "p", "regroup": "g", "transfer": "t", "redo": "r"}
_MOST_NAMED = 4


def who(recovered: Recovered) -> str:
    """Name the workers that joined or left; of many only their number. If nobody did, the plan is another one."""
    if not recovered.workers:
        return "another plan"
    names, verb = recovered.workers, "joined" if recovered.joins else "left"
    return f"{', '.join(names)} {verb}" if len(names) <= _MOST_NAMED else f"{len(names)} workers {verb}"


def format_ms(time_us: int) -> str:
    """Format a time in whole milliseconds, or from ten seconds on in seconds."""
    return f"{time_us / 1000:.0f} ms" if time_us < 10_000_000 else f"{time_us / 1e6:.1f} s"


def describe_parts(recovered: Recovered) -> str:
    """Describe the parts as a sum: `detect 3 ms, abort 41 ms, ... = 446 ms`."""
    parts = ", ".join(f"{part} {format_ms(time_us)}" for part, time_us in recovered.parts_us.items())
    return f"{parts} = {format_ms(recovered.lost_us)}"


def describe_rest(recovered: Recovered) -> str:
    """Describe the cause, repeated ops, workers that moved, the layers of stages if some moved, and those that stages compute."""
    clauses = [" ".join(recovered.cause.split())]
    clauses += [f"{recovered.redone_ops:,} ops run again"] if recovered.redone_ops else []
    clauses += [_moves(recovered.moves)] if recovered.moves else []
    clauses += [f"stages have {', '.join(map(str, recovered.layers))} layers"] if recovered.layers else []
    clauses += [f"stages compute {', '.join(f'{mean:g}' for mean in recovered.carried)} layers"] if recovered.carried else []
    return "; ".join(clauses)


def _moves(moves: Sequence[str]) -> str:
    if len(moves) > _MOST_NAMED:
        return f"{len(moves)} workers moved"
    return "moved " + ", ".join(move.replace(">", " to ") for move in moves)


def describe_speed(event: SpeedChanged) -> str:
    """Say how fast a worker is beside its peers, and since which step."""
    since = f"since step {event.iteration + 1}"
    if event.speed == 1:
        return f"{event.node} runs at its peers' speed again, {since}"
    return f"{event.node} {'is slow' if event.speed < 1 else 'is fast'}: {event.speed:g} of its peers' speed, {since}"


def describe_link(event: LinkChanged) -> str:
    """Say how long messages take on a link beside other links, and since which step."""
    since = f"since step {event.iteration + 1}"
    if event.speed == 1:
        return f"the link {event.link} is as fast as others again, {since}"
    times = f"a message takes {format_us(event.time_us)}, {event.time_us / event.usual_us:.3g} times as long as on others"
    return f"the link {event.link} is slow: {times}, {since}"


def recovery_lines(recoveries: Sequence[Recovered]) -> list[str]:
    """Return a table as lines for a terminal: workers, step, lost time and its parts, and the cause at the end of each line."""
    rows = [["who", "step", "lost", *PARTS]]
    for one in recoveries:
        times = (format_ms(time_us) if time_us else "-" for time_us in (one.lost_us, *one.parts_us.values()))
        rows.append([who(one), str(one.iteration + 1), *times])
    ends = ["cause", *map(describe_rest, recoveries)]
    return [f"{line}  {end}" for line, end in zip(aligned(rows).splitlines(), ends, strict=True)]
