"""The options --slow, --slow-links and --drift of `recycle trace make` and `recycle simulate`: nodes that are slow at times."""

import argparse
from collections.abc import Sequence

from recycle.core.errors import UserError
from recycle.core.events.trace import Slowdown
from recycle.core.units import parse_duration_us
from recycle.sim.failure_traces import PUBLISHED_SLOW, PUBLISHED_SLOW_LINKS, SlowRate, drift_spells, slow_spells

SLOW_OPTIONS = ("slow", "slow_links", "drift")


def add_slow_options(options: argparse._ActionsContainer) -> None:
    """Add the options that `read_slowdowns` reads."""
    rate = "MTBF,TIME,SPEED"
    about = "each node is slow now and then: 50h,10m,0.6 is every 50 hours for ten minutes at 60 %%; or 'published'"
    options.add_argument("--slow", metavar=rate, help=about)
    options.add_argument("--slow-links", metavar=rate, help="the same for the link of a node to the network")
    options.add_argument("--drift", metavar="TIME,SPEED", help="after each TIME every node has a new speed, from SPEED to 1")


def read_slowdowns(args: argparse.Namespace, nodes: Sequence[str], end_us: int) -> tuple[Slowdown, ...]:
    """The slowdowns of the arguments, from the seed of the trace."""
    found: list[Slowdown] = []
    if args.slow is not None:
        found += slow_spells(nodes, _rate("--slow", args.slow, PUBLISHED_SLOW), end_us, args.seed)
    if args.slow_links is not None:
        found += slow_spells(nodes, _rate("--slow-links", args.slow_links, PUBLISHED_SLOW_LINKS), end_us, args.seed, True)
    if args.drift is not None:
        every, _, speed = args.drift.partition(",")
        found += drift_spells(nodes, parse_duration_us(every), _speed("--drift", args.drift, speed), end_us, args.seed)
    return tuple(sorted(found, key=lambda slow: slow.start_us))


def _rate(option: str, text: str, published: SlowRate) -> SlowRate:
    if text.strip() == "published":
        return published
    parts = text.split(",")
    if len(parts) != 3:
        raise UserError(f"{option} is {text!r}, but it is MTBF,TIME,SPEED such as 50h,10m,0.6, or published")
    return SlowRate(parse_duration_us(parts[0]), parse_duration_us(parts[1]), _speed(option, text, parts[2]))


def _speed(option: str, text: str, part: str) -> float:
    try:
        speed = float(part)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1:
        raise UserError(f"{option} is {text!r}, but its speed is a number from 0.001 to 1, such as 0.6")
    return speed
