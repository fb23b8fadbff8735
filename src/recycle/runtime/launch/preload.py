"""What the server loads from which worker processes are forked: all that a worker would else load by itself, a dozen times over.

torch loads its compiler's front end when the first optimizer is made, which takes longer than all else in a worker's start. So
one is made here, and thrown away; nothing is computed, because a process that has threads must not be forked.
"""

import torch

import recycle.runtime.worker.worker  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=0.0)
