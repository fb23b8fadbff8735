"""Digests of weights: whether two runs came to the same, bit for bit."""

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from recycle.core.cluster import Worker
from recycle.runtime.checkpoint.tensor_file import memory_of


def digest(module: nn.Module) -> str:
    """A digest of a module's parameters and buffers, bit for bit."""
    made = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if not isinstance(value, Tensor):
            continue  # what a module keeps beside its tensors is its own matter
        made.update(name.encode())
        whole = value.detach().cpu().contiguous()
        made.update(memory_of(whole))
    return made.hexdigest()


def whole_digest(digests: Mapping[Worker, str]) -> str:
    """One digest of all stages, in order; peers of a stage must agree."""
    stages = sorted({worker.stage for worker in digests})
    by_stage = [{digest for worker, digest in digests.items() if worker.stage == stage} for stage in stages]
    assert all(len(found) == 1 for found in by_stage), "peers of a stage hold different weights"
    return hashlib.sha256("".join(found.pop() for found in by_stage).encode()).hexdigest()
