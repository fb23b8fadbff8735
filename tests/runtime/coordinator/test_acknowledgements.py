"""Acknowledgements: only of what is on disk, one to a member, in the order in which members were first acknowledged."""

from collections.abc import Callable

from recycle.control.decide.messages import Ack
from recycle.runtime.coordinator.acknowledgements import Acknowledgements


def test_what_is_on_disk_is_acknowledged_once_with_the_last_number() -> None:
    on_disk, sent = list[Callable[[], None]](), list[tuple[int, int]]()
    acks = Acknowledgements(on_disk.append, lambda member, ack: sent.append((member, ack.number)))
    for member, number in [(1, 5), (2, 7), (1, 6), (1, 8)]:
        acks.add(member, Ack(number))
    acks.send_due()
    assert sent == []
    for recorded in on_disk[:3]:
        recorded()
    acks.send_due()
    assert sent == [(1, 6), (2, 7)]
    acks.send_due()
    on_disk[3]()
    acks.send_due()
    assert sent == [(1, 6), (2, 7), (1, 8)]
