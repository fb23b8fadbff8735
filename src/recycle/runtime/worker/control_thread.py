"""ControlThread: a worker's reactions to the coordinator while its main thread trains, and the state that both threads share.

The thread is that of the control connection. It renews the lease, aborts the transport when an epoch is over, and queues the
other messages for the main thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    JobEnded,
    Leaving,
    PauseAtBoundary,
    Ready,
    RenewLease,
    StartEpoch,
    StopEpoch,
    StoreEntry,
    StoreRequest,
    Welcome,
)
from recycle.control.net.client import Client
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.host.interfaces import address_of
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.transport.activity import Activity, Doing
from recycle.runtime.transport.links.link_check import LinkCheck, unreachable
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.rendezvous import Rendezvous, make_unless_over
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.worker.worker_reports import WorkerFinished, WorkerReport, report_to_json


class ControlThread:
    """The control connection of one worker. `get_num_steps` returns how many steps its weights have, for its leases.

    `inbox` holds the messages for the main thread, and a JoinRefused if the coordinator does not want this worker back.
    `say` gets a sentence when the coordinator does not answer. `interface` is the network interface by which other workers reach
    this one, if it is not the one by which the coordinator is reached. `is_leaving` says that this worker has asked to leave.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        place: str,
        get_num_steps: Callable[[], int],
        say: Callable[[str], None],
        interface: str = "",
    ) -> None:
        self.inbox: SimpleQueue[ControlMessage | JoinRefused] = SimpleQueue()
        self.client = Client(
            endpoint,
            place,
            self._react,
            self._refused,
            self._renew_lease,
            lambda silent_s: say(f"the coordinator has not answered for {silent_s:.0f} s; training goes on"),
            say,
        )
        self._get_num_steps, self._interface = get_num_steps, interface
        self.activity = Activity()
        self._renewed_s = self._stopped_s = 0.0
        self._stopped_in = Doing()
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._link_check: LinkCheck | None = None
        self._transport: Transport | None = None
        self._trainer: Trainer | None = None
        self._epoch = self._stopped_epoch = self._paused_epoch = -1
        self.is_leaving = self._is_ready = False
        self._stopped: EpochStopped | None = None
        self._finished: WorkerFinished | None = None

    @property
    def is_over(self) -> bool:
        """Whether the present epoch is over, so that nothing of it is worth waiting for."""
        return self._stopped_epoch >= self._epoch

    # Called in the control thread.

    def _refused(self, problem: JoinRefused) -> None:
        self._abort(self._epoch)
        self.inbox.put(problem)

    def _react(self, message: ControlMessage) -> None:
        match message:
            case StartEpoch(epoch=epoch):
                with self._lock:
                    self._epoch = self.client.epoch = epoch
                    self.client.origin = message.origin
                    self.client.greeting = self._stopped = self._finished = None
                    self._rendezvous = Rendezvous(
                        lambda key, value: self.client.send(StoreEntry(epoch, key, value)),
                        lambda keys: self.client.send(StoreRequest(epoch, keys)),
                    )
                self.inbox.put(message)
            case StoreEntry(epoch=epoch) if epoch == self._epoch:
                assert self._rendezvous is not None
                self._rendezvous.add_entry(message.key, message.value)
            case PauseAtBoundary(epoch=epoch):
                with self._lock:
                    self._paused_epoch = max(self._paused_epoch, epoch)
                    if self._trainer is not None:
                        self._trainer.wants_pause = True
            case Welcome():
                self._report_again()
            case StopEpoch(epoch=epoch):
                self._abort(epoch)
                self.inbox.put(message)
            case JobEnded():
                self.inbox.put(message)
            case _:
                pass

    def _abort(self, epoch: int) -> None:
        with self._lock:
            self._stopped_epoch = max(self._stopped_epoch, epoch)
            rendezvous, transport = self._rendezvous, self._transport
        if rendezvous is not None:
            rendezvous.abort()
        if transport is not None:
            transport.abort()

    def _report_again(self) -> None:
        """Repeat what a new coordinator, which may be another process, does not know."""
        if self._rendezvous is not None:
            self._rendezvous.publish_again()
        if self._is_ready:
            self.client.send(Ready())
        if self.is_leaving:
            self.client.send(Leaving())
        if self._stopped is not None:
            self.client.send(self._stopped)
        elif self._finished is not None:
            self.report(self._finished)

    def _renew_lease(self) -> RenewLease:
        """Say what the main thread does. The time in which the whole process was stopped does not count."""
        doing, now_s = self.activity.seen(), time.monotonic()
        between_s, self._renewed_s = now_s - self._renewed_s, now_s
        if doing != self._stopped_in:
            self._stopped_in, self._stopped_s = doing, 0.0
        if between_s > self.client.lease_s / 2:
            self._stopped_s += min(between_s, now_s - doing.since_s)
        took_us = max(0, round((now_s - doing.since_s - self._stopped_s) * 1e6)) if doing.label else 0
        busy_us, waited_us = (0, took_us) if doing.waits_for else (took_us, 0)
        return RenewLease(self._get_num_steps(), busy_us, doing.label, doing.waits_for, waited_us)

    # Called in the main thread, or in one that it started.

    def report_ready(self) -> None:
        """Tell the coordinator, and any later one, that this worker can take a place."""
        self._is_ready = True
        self.client.send(Ready())

    def leave(self) -> None:
        """Ask the coordinator, and any later one, to let this worker go at the next iteration boundary."""
        self.is_leaving = True
        self.client.send(Leaving())

    def connect(self, view: GroupView, ties: Sequence[Tie], make: Callable[[Rendezvous], Transport]) -> Transport:
        """Make the transport of an epoch; raises TransportBroken if the epoch ends before, or a link is cut."""
        with self._lock:
            self._refuse_stopped(view.epoch)
            rendezvous = self._rendezvous
        assert rendezvous is not None
        self.activity.wait_for("all")
        needed, others = view.connected(ties), view.others
        transport = make_unless_over(lambda: make(rendezvous), rendezvous, lambda: unreachable(rendezvous, needed, others))
        self.activity.go_on()
        with self._lock:
            self._transport = transport
            self._refuse_stopped(view.epoch)
        return transport

    @property
    def own_address(self) -> str:
        """The address at which other workers reach this one."""
        return address_of(self._interface) if self._interface else self.client.own_address

    def link_address(self) -> str:
        """Where the other workers can try whether they reach this one."""
        host = self.own_address
        if self._link_check is not None and self._link_check.host != host:  # it reconnected by another network
            self._link_check.close()
            self._link_check = None
        self._link_check = self._link_check or LinkCheck(host)
        return self._link_check.address

    def _refuse_stopped(self, epoch: int) -> None:
        if self._stopped_epoch >= epoch:
            raise TransportBroken("the epoch was over before it began")

    def start(self, epoch: int, trainer: Trainer) -> None:
        """Make the trainer pause when the coordinator asks for it, or at once if it has asked already."""
        with self._lock:
            self._trainer = trainer
            trainer.wants_pause = self._paused_epoch >= epoch

    def leave_epoch(self) -> tuple[Transport | None, Trainer | None]:
        """Forget transport and trainer of the epoch, and return them."""
        with self._lock:
            left = self._transport, self._trainer
            self._transport = self._trainer = None
        return left

    def report(self, report: WorkerReport) -> None:
        self.client.report(report_to_json(report))

    def report_begun(self, begun: EpochBegun) -> None:
        self.client.greeting = begun  # a coordinator hears of the epoch before it hears of the epoch's iterations
        self.client.send(begun)

    def report_stopped(self, stopped: EpochStopped) -> None:
        self._stopped = stopped
        self.client.send(stopped)

    def report_finished(self, finished: WorkerFinished) -> None:
        self._finished = finished
        self.report(finished)
