"""What the fork server of the tests loads beside torch: the command line, and the planner with its compiled kernels."""

import recycle.cli.main
from recycle.planner.heuristic.greedy import compile_kernels

recycle.cli.main.make_parser()  # it loads the commands
compile_kernels()
