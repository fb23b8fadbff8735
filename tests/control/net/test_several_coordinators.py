"""A worker that knows several coordinators: it tries them in turn, and obeys none of a lower term than it has seen."""

import itertools
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from recycle.control.decide.messages import Hello, Refused, RenewLease, StartEpoch, StoreEntry, Welcome
from recycle.control.net.handshake import Endpoint
from recycle.control.net.leader_probe import PROBE_PURPOSE, answer_probe
from recycle.control.net.listener import reserve_address
from recycle.control.net.server import ConnectionTask
from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, FakeCoordinator, FakeMember, ServerHarness
from tests.processes import depends_on_load

pytestmark = pytest.mark.timeout(60)


class TermCoordinator(FakeCoordinator):
    """A coordinator that leads in a term, or that is not certain to lead; it may be frozen, and answers nothing then."""

    def __init__(self, term: int, is_certain: bool = True) -> None:
        super().__init__()
        self.term, self.is_certain, self.is_frozen, self.num_probes = term, is_certain, False, 0

    def admit(self, connection: int, hello: Hello) -> Welcome | Refused:
        answer = super().admit(connection, hello)
        if not self.is_certain:
            return Refused("it is not certain that it leads", tries_again=True)
        return replace(answer, term=self.term) if isinstance(answer, Welcome) else answer

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        assert hello.purpose == PROBE_PURPOSE
        with self.changed:
            self.num_probes += 1
            self.changed.notify_all()
        if not self.is_certain:
            return Refused("it is not certain that it leads", tries_again=True)
        return partial(answer_probe, term=self.term)

    def tick(self) -> None:
        while self.is_frozen:
            time.sleep(0.01)


def both(first: ServerHarness, second: ServerHarness) -> Endpoint:
    return replace(first.endpoint(), others=(("127.0.0.1", second.port),))


def test_a_worker_joins_the_one_that_listens_and_reconnects_to_the_next_one_when_that_is_gone() -> None:
    with reserve_address("127.0.0.1", 0) as standby:  # it has an address, and refuses who connects
        leader = ServerHarness(callbacks=TermCoordinator(1))
        endpoint = Endpoint("127.0.0.1", standby.getsockname()[1], "secret", "", others=(("127.0.0.1", leader.port),))
        fake = FakeMember(replace(endpoint, token=leader.endpoint().token, job=leader.endpoint().job))
        assert fake.client.join(PATIENCE_S).term == 1
        port = standby.getsockname()[1]
    other = ServerHarness(port, TermCoordinator(2))
    leader.close()
    while not other.callbacks.hellos:
        time.sleep(0.01)
    other.callbacks.wait_for(lambda: fake.client.term == 2)
    assert other.callbacks.hellos[0].member == 1
    fake.client.close()
    other.close()


def test_a_worker_that_has_seen_a_term_does_not_obey_a_coordinator_of_a_lower_one() -> None:
    old, new = ServerHarness(callbacks=TermCoordinator(1)), ServerHarness(callbacks=TermCoordinator(2))
    fake = FakeMember(both(new, old))
    assert fake.client.join(PATIENCE_S).term == 2
    new.close()
    old.callbacks.wait_for(lambda: len(old.callbacks.hellos) >= 2)  # it tries, is welcomed, and disconnects
    assert not fake.client.is_connected
    newest = ServerHarness(new.port, TermCoordinator(3))
    newest.callbacks.wait_for(lambda: bool(newest.callbacks.hellos))
    assert fake.client.term >= 2
    fake.client.close()
    newest.close()
    old.close()


def test_an_epoch_of_a_lower_term_is_not_started_and_the_worker_disconnects() -> None:
    server = ServerHarness(callbacks=TermCoordinator(5))
    fake = server.member()
    (connection,) = server.callbacks.numbers
    server.server.call_soon(lambda: server.server.send(connection, StoreEntry(1, "before", "")))
    server.server.call_soon(lambda: server.server.send(connection, StartEpoch(7, "W0_0", (), "", 0, term=4)))
    fake.next(StoreEntry)
    server.callbacks.wait_for(lambda: server.callbacks.num_disconnected == 1)
    fake.client.close()
    server.close()
    assert not any(isinstance(message, StartEpoch) for message in iter_queue(fake))


def iter_queue(fake: FakeMember) -> list[object]:
    found = []
    while not fake.received.empty():
        found.append(fake.received.get())
    return found


def test_a_worker_leaves_a_coordinator_that_is_frozen_for_one_that_leads_and_for_no_other() -> None:
    frozen, standby = TermCoordinator(1), TermCoordinator(1, is_certain=False)
    first, second = ServerHarness(callbacks=frozen), ServerHarness(callbacks=standby)
    fake = FakeMember(both(first, second))
    fake.client.join(PATIENCE_S)
    frozen.is_frozen = True
    standby.wait_for(lambda: standby.num_probes >= 2)  # it looks for another leader, and goes on with the one that it has
    assert fake.client.is_connected
    standby.term, standby.is_certain = 2, True
    standby.wait_for(lambda: fake.client.term == 2)
    frozen.is_frozen = False
    took_s = fake.echo_s()
    with depends_on_load():
        assert took_s < LEASE_S + 1
    fake.client.close()
    first.close()
    second.close()


def test_a_coordinator_under_two_addresses_is_not_joined_twice() -> None:
    silent = TermCoordinator(1)  # it answers no heartbeat
    server = ServerHarness(callbacks=silent)
    fake = FakeMember(replace(server.endpoint(), others=(("localhost", server.port),)))
    fake.client.join(PATIENCE_S)
    silent.wait_for(lambda: silent.num_probes >= 2)
    assert (len(silent.hellos), silent.num_disconnected) == (1, 0)
    assert fake.client.is_connected
    fake.client.close()
    server.close()


def test_heartbeats_go_on_while_addresses_that_do_not_answer_are_asked() -> None:
    silent = TermCoordinator(1)
    server = ServerHarness(callbacks=silent)
    with ExitStack() as stack:
        dead = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]  # they accept nobody
        others = tuple(("127.0.0.1", each.getsockname()[1]) for each in dead)
        fake = FakeMember(replace(server.endpoint(), others=others))
        fake.client.join(PATIENCE_S)
        begin_s, times_s = time.monotonic(), [0.0]
        while times_s[-1] < 3 * LEASE_S:
            num = num_heartbeats(silent)
            silent.wait_for(lambda num=num: num_heartbeats(silent) > num)  # type: ignore[misc]
            times_s.append(time.monotonic() - begin_s)
        fake.client.close()
    server.close()
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    with depends_on_load():
        assert max(pauses_s) < LEASE_S / 2  # one address alone would take a second to give up


def num_heartbeats(coordinator: FakeCoordinator) -> int:
    return sum(isinstance(message, RenewLease) for message in coordinator.received)
