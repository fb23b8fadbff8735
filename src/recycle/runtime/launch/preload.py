"""The modules that the fork server loads, so that a dozen workers do not each load them.

torch loads its compiler's front end when the first optimizer is made, which takes most of a worker's start. So one optimizer is
made here; nothing is computed, because a process that has threads must not be forked.
"""

import torch

import recycle.runtime.launch.local_launcher  # noqa: F401 with all modules of the coordinator and of workers

torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=0.0)
