"""What the fork server of the tests loads beside torch: the command line, and the planner with its compiled kernels."""

from setproctitle import getproctitle

import recycle.cli.main
from recycle.planner.heuristic.greedy import compile_kernels

recycle.cli.main.make_parser()  # it loads the commands
compile_kernels()
getproctitle()  # it looks for the command line in memory, which it does not find once the environment has changed
