"""Transport: the protocol by which the workers of an epoch exchange tensors. Gloo, NCCL and CUDA IPC implement it.

A transport has three parts: `messages` carries activations and gradients between stages, `host` carries host memory (ballots,
bulk bytes), and `reducer` sums gradients where they lie. A transport lives for one epoch and breaks as a whole: when a
worker dies, the workers that wait for it fail, and `abort` from another thread makes every other wait fail, too. A broken
transport is never repaired; the next epoch has its own.
"""

from typing import Protocol

from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.message_queue import MessageQueue
from recycle.runtime.transport.reducer import Reducer


class Transport(Protocol):
    """The connections of one worker in one epoch."""

    @property
    def messages(self) -> MessageQueue: ...

    @property
    def host(self) -> GlooGroups: ...

    @property
    def reducer(self) -> Reducer: ...

    def abort(self) -> None:
        """Make every wait on this transport fail at once, in this process and in the others; any thread may call it."""
        ...

    def close(self) -> None:
        """Drop the process groups of an aborted transport: their connections close with the last reference."""
        ...
