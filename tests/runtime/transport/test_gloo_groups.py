"""Gloo groups whose destructors do not end: nobody waits for them."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.runtime.transport import gloo_groups
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.specs import GroupView, TransportSpec

pytestmark = pytest.mark.timeout(60)


class Endless:
    """A group whose destructor waits for an event; `is_dropped` says that it has begun."""

    def __init__(self) -> None:
        self.goes_on, self.is_dropped = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.is_dropped.set()
        self.goes_on.wait(50)


def test_a_worker_leaves_an_epoch_whose_groups_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_groups, "_CLOSE_S", 0.1)
    view = GroupView(Worker(0, 0), [Worker(0, 0)])
    groups = GlooGroups(dist.HashStore(), view, TransportSpec({}, 1, (), timedelta(seconds=5)))
    endless = Endless()
    goes_on, is_dropped = endless.goes_on, endless.is_dropped
    groups._all = endless
    del endless
    groups.close()  # it would wait for 50 s
    assert is_dropped.is_set()
    assert not goes_on.is_set()
    (closing,) = [thread for thread in threading.enumerate() if thread.name == "transport close"]
    goes_on.set()
    closing.join(20)
    assert not closing.is_alive()
