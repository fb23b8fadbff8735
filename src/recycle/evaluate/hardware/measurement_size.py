"""How much `recycle bench cluster` measures: rounds, iterations and kills, as arguments of a command line."""

import argparse
from dataclasses import dataclass, fields

from recycle.core.errors import UserError


@dataclass(frozen=True, slots=True)
class MeasurementSize:
    """The number of rounds, of counted iterations in a trial, and of kills.

    Many short trials rather than a few long ones: what disturbs a machine lasts for a trial, and is different in the next.
    """

    rounds: int = 8
    iterations: int = 3
    kills: int = 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise UserError(f"--{field.name} is {value}, but it must be at least 1")

    @staticmethod
    def from_arguments(args: argparse.Namespace) -> "MeasurementSize":
        return MeasurementSize(args.rounds, args.iterations, args.kills)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --rounds, --iterations and --kills."""
    meanings = {"rounds": "trials of each variant", "iterations": "counted iterations of a trial", "kills": "workers to kill"}
    for name, meaning in meanings.items():
        default = getattr(MeasurementSize(), name)
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
