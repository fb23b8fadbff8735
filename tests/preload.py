"""What the fork server of the tests loads beside torch: the command line, the planner with its compiled kernels, the models.

And what the processes of a test would load one by one: pytest, which starts them, and the jobs that most tests send to them.
"""

import pytest  # noqa: F401
from setproctitle import getproctitle

import recycle.cli.main
import recycle.models.gpt
import recycle.models.text  # most trainings of the tests send these two to their workers
import tests.runtime.recovery_runs  # noqa: F401
from recycle.planner.heuristic.greedy import compile_kernels

recycle.cli.main.make_parser()  # it loads the commands
compile_kernels()
getproctitle()  # it looks for the command line in memory, which it does not find once the environment has changed
