"""The modules that the fork server loads, so that a dozen workers do not each load them.

torch loads its compiler's front end when the first optimizer is made, which takes most of a worker's start, and more modules when
a tensor is read and when a step is made; Python loads tables when the first host is looked up. So all of that is done here once.
Nothing is computed, because a process that has threads must not be forked. What is loaded is never collected as garbage: a full
collection would look at all of it, and stop a worker, and so all that wait for it, for a tenth of a second.
"""

import gc
import pickle

import torch

import recycle.runtime.compute.learning_rate
import recycle.runtime.launch.local_launcher  # noqa: F401 with all modules of the coordinator and of workers

parameter = pickle.loads(pickle.dumps(torch.nn.Parameter(torch.empty(0))))
torch.optim.SGD([parameter], lr=0.0).step()  # without a gradient nothing changes
"localhost".encode("idna")
gc.freeze()
