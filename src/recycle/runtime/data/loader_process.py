"""What runs in a loader process: it makes the micro-batches that it is asked for, and ends with its worker."""

import gc
import os
import signal
import traceback
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from recycle.core.errors import UserError
from recycle.host.process_lifetime import close_inherited_sockets, die_with_parent
from recycle.host.process_title import set_title
from recycle.runtime.compute.microbatches import MicroBatchSource, read_part

Address = tuple[int, int, int]
"""Step, pipeline and index of a micro-batch."""
MADE, REFUSED, RAISED = "made", "refused", "raised"
"""What became of a micro-batch: it was made, its data are refused in a sentence, or making it raised an error."""


class AddressedMicroBatches(Dataset[Any]):
    """Micro-batches as torch's `DataLoader` asks for them: by an address in the place of a number.

    An answer is a tuple, which torch knows how to pass on: what became of it, and for MADE the inputs and the targets, of which
    only those that are asked for travel, and the positions of the streams that were read; else the kind of error and its text.
    """

    def __init__(self, source: MicroBatchSource, takes_inputs: bool, takes_targets: bool, progress: Any) -> None:
        self._source, self._progress, self._parent = source, progress, os.getpid()
        self._takes_inputs, self._takes_targets = takes_inputs, takes_targets

    def __getitem__(self, address: Address) -> tuple[Any, ...]:
        try:
            inputs, targets = read_part(self._source, address, (self._takes_inputs, self._takes_targets))
            positions = self._source.positions_after(*address) if hasattr(self._source, "positions_after") else None
        except UserError as problem:
            return REFUSED, type(problem).__name__, str(problem)
        except Exception:
            return RAISED, "", traceback.format_exc()
        self._progress.value += 1
        return MADE, inputs if self._takes_inputs else None, targets if self._takes_targets else None, positions

    def prepare_process(self, number: int) -> None:
        """Be a loader process: end with the worker, and hold none of its connections."""
        die_with_parent(self._parent)
        close_inherited_sockets()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # nothing that the worker has made is ever collected here: its connections have threads, which are not here
        set_title("recycle loader")
        info = get_worker_info()
        if info is not None and hasattr(self._source, "on_sample"):
            self._source.on_sample = self._count

    def _count(self) -> None:
        self._progress.value += 1
