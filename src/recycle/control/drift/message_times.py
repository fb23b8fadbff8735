"""`MessageTimer`: how long messages are on their way to a worker, whatever the clocks of their senders show.

A message carries a stamp: when its sender handed it over, by the sender's clock. The lag of a message is the time from then to
the end of its receive, by the receiver's clock. Two things besides the link can make a lag long, and both are kept out:

- The receiver was busy. So only messages count that it was waiting for when they were handed over: then the end of the receive is
  the arrival. A sender that is late hands its message over late, which lengthens the wait and not the lag.
- Clocks of two machines differ. A lag is then wrong by their difference, and the lag of messages that go the other way by the
  same difference with the other sign: the sum of both is the time of both ways. To know which messages the receiver was waiting
  for, half the difference of the least lags of both ways is taken for that of the clocks; a stamp says the least lag of the way
  back. That is wrong if one way takes longer. But no lag is less than the least one: so the receiver of a message that counts was
  waiting for at least half the time of both ways when it had the message, and the end of the receive is the arrival.
"""

from typing import NamedTuple

from recycle.core.cluster import Worker

UNKNOWN_LAG_US = 2**62


class MessageStamp(NamedTuple):
    """When a message was handed over, the number of the clock that says so, and the least lag of messages from its receiver.

    Workers of one machine have clocks of one number; 0 is a clock that is shared with nobody.
    """

    sent_us: int
    clock: int
    least_lag_us: int = UNKNOWN_LAG_US


class LinkLag(NamedTuple):
    """Messages from a sender in an iteration that their receiver was waiting for: how many, and the least lag among them.

    The least one tells most about a link: everything else that can happen to a message only makes it later.
    """

    num: int
    least_us: int
    is_one_clock: bool


class _Sender:
    """The messages from one sender: lags of this report and the last one, and those of messages that were waited for."""

    def __init__(self) -> None:
        self.before_us, self.least_us = UNKNOWN_LAG_US, UNKNOWN_LAG_US
        self.waited_us: list[int] = []
        self.is_one_clock = False


class MessageTimer:
    """The messages to one worker in one epoch, by sender. `clock` is the number of its own clock."""

    def __init__(self, clock: int = 0) -> None:
        self._clock = clock
        self._senders: dict[Worker, _Sender] = {}

    def reset(self) -> None:
        """Forget all messages: a new epoch begins, in which other processes may have the same places."""
        self._senders.clear()

    def stamp(self, receiver: Worker, now_us: int) -> MessageStamp:
        """The stamp of a message to a worker that is handed over now."""
        known = self._senders.get(receiver)
        return MessageStamp(now_us, self._clock, min(known.before_us, known.least_us) if known is not None else UNKNOWN_LAG_US)

    def received(self, sender: Worker, stamp: MessageStamp, asked_us: int, received_us: int) -> None:
        """Note a message that this worker began to wait for at `asked_us`, and had at `received_us`."""
        known = self._senders.setdefault(sender, _Sender())
        lag_us = received_us - stamp.sent_us
        known.least_us = min(known.least_us, lag_us)
        known.is_one_clock = stamp.clock == self._clock != 0
        twice_ahead_us = 0 if known.is_one_clock else min(known.before_us, known.least_us) - stamp.least_lag_us
        if 2 * (asked_us - stamp.sent_us) <= twice_ahead_us:
            known.waited_us.append(lag_us)

    def take(self) -> dict[str, LinkLag]:
        """The lags since the last call, by the name of the sender; senders whose messages nobody waited for are left out."""
        taken = {}
        for sender, known in self._senders.items():
            if known.waited_us:
                taken[str(sender)] = LinkLag(len(known.waited_us), min(known.waited_us), known.is_one_clock)
            known.before_us, known.least_us, known.waited_us = known.least_us, UNKNOWN_LAG_US, []
        return taken
