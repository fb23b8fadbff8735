"""Runs seeded schedules of the whole control plane."""

import sys

from tests.chaos.control_plane.schedules import run_schedule
from tests.chaos.seeds import main

if __name__ == "__main__":
    sys.exit(main(run_schedule, "Run seeded schedules of failures of the whole control plane."))
