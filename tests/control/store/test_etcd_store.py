"""The store in a real etcd: the contract of every store, leases, members that die, answers that are lost."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recycle.control.store.etcd_gateway import EtcdGateway, StoreAddress
from recycle.control.store.etcd_store import EtcdStore
from recycle.control.store.protocol import StoreAway
from recycle.core.errors import LeadershipLost, UserError
from tests.control.store.contract import FIRST, SECOND, MakeStore, StoreContract
from tests.control.store.etcd_cluster import EtcdCluster, etcd_cluster, missing

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(missing()), reason=missing())]
LEASE_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


_prefixes = itertools.count()


@pytest.fixture
def make(cluster: EtcdCluster) -> MakeStore:
    cluster.start_all()
    address, names = StoreAddress.parse(cluster.address(f"job/{next(_prefixes)}")), itertools.count()
    return lambda: EtcdStore(address, f"coordinator {next(names)}", LEASE_S)


class TestContract(StoreContract):
    pass


def _lead(store: Any, seconds: float = 10.0) -> float:
    """Campaign until the store is led; return how long that took."""
    begin_s = time.monotonic()
    while store.campaign() is not None:
        assert time.monotonic() < begin_s + seconds
        store.watch(1.0)
    return time.monotonic() - begin_s


def insist(act: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Do something as soon as the store answers."""
    end_s = time.monotonic() + seconds
    while True:
        try:
            return act()
        except StoreAway:
            assert time.monotonic() < end_s, "the store stays away"


def test_another_leads_within_two_leases_of_one_that_died_and_the_dead_one_is_refused_when_it_wakes_up(make: MakeStore) -> None:
    frozen, standby = make(), make()
    assert frozen.campaign() is None
    frozen.append(FIRST)
    frozen.renew()
    assert _lead(standby) < 2 * LEASE_S
    assert standby.term == frozen.term + 1
    standby.append(SECOND)
    with pytest.raises(LeadershipLost, match="another coordinator leads the job"):
        frozen.append(replace(FIRST, epoch=2))
    with pytest.raises(LeadershipLost, match="another coordinator leads the job, in term 2: coordinator 1"):
        frozen.renew()
    standby.resign()
    with pytest.raises(LeadershipLost, match="a coordinator that has ended since"):
        frozen.renew()
    assert standby.last() == SECOND


def test_one_whose_lease_has_expired_leads_again_if_nobody_else_did(make: MakeStore) -> None:
    store = make()
    assert store.campaign() is None
    store.append(FIRST)
    time.sleep(LEASE_S + 2)
    with pytest.raises(StoreAway, match="the lease of this coordinator has expired"):
        store.append(SECOND)
    store.renew()
    store.append(SECOND)
    assert (store.last(), store.term) == (SECOND, 1)
    other = make()
    store.resign()
    assert other.campaign() is None
    assert other.term == 3


def test_a_member_that_is_killed_or_frozen_is_not_noticed_and_without_a_majority_the_store_is_away(
    cluster: EtcdCluster, make: MakeStore
) -> None:
    store = make()
    assert store.campaign() is None
    cluster.kill(0)  # the others may have to elect a leader of etcd first
    insist(store.renew)
    insist(lambda: store.append(FIRST))
    cluster.start_all()
    cluster.freeze(1)
    insist(store.renew)
    insist(lambda: store.append(replace(FIRST, epoch=2)))
    cluster.kill(1)
    cluster.kill(2)
    with pytest.raises(StoreAway, match="refused"):
        store.append(SECOND)
    cluster.start_all()
    insist(store.renew)
    insist(lambda: store.append(replace(SECOND, epoch=3)))
    assert insist(store.last) == replace(SECOND, epoch=3)


def test_an_entry_larger_than_a_request_of_etcd_is_stored_in_parts_which_the_next_entry_removes(cluster: EtcdCluster) -> None:
    cluster.start_all()
    # Nobody renews the lease meanwhile, and on a busy machine it takes seconds to write 4 MB to three members.
    store = EtcdStore(StoreAddress.parse(cluster.address(f"job/{next(_prefixes)}")), "coordinator", 30.0)
    large = replace(FIRST, plan=random.Random(3).randbytes(2_000_000).hex())
    store.campaign()
    store.append(large)
    assert store.last() == large
    store.append(SECOND)
    assert store.last() == SECOND


def test_renewals_make_no_revisions_and_an_entry_makes_one(make: MakeStore) -> None:
    """So the history of a job in an etcd that never compacts grows with its epochs, and not with time."""
    store: Any = make()
    store.campaign()
    store.append(FIRST)

    def renewed() -> tuple[int, int]:
        """The revision of all of etcd before and after ten renewals. Leases of other tests may end meanwhile, and make some."""
        store.renew()
        before = store._seen_revision
        for _ in range(10):
            store.renew()
        return before, store._seen_revision

    before, after = next((found for found in (renewed() for _ in range(20)) if found[0] == found[1]), (0, 1))
    assert before == after
    store.append(SECOND)
    assert store._journal_changed == before + 1


class LosingGateway(EtcdGateway):
    """A gateway that loses the answers to some requests, which etcd has carried out; or requests, which it has not."""

    lost_answers: tuple[str, ...] = ()
    random = random.Random(7)

    def call(self, path: str, body: Any) -> dict[str, Any]:
        if path in self.lost_answers and self.random.random() < 0.25:
            raise StoreAway("the request is lost")
        answer = super().call(path, body)
        if path in self.lost_answers and self.random.random() < 0.25:
            raise StoreAway("the answer is lost")
        return answer


def test_requests_and_answers_that_are_lost_change_nothing(make: MakeStore, cluster: EtcdCluster) -> None:
    store: Any = make()
    store._gateway = LosingGateway(store._gateway._members, 1.0)
    store._gateway.lost_answers = ("/v3/kv/txn", "/v3/kv/range", "/v3/lease/grant")

    assert insist(store.campaign) is None
    assert store.term == 1
    for epoch in range(1, 30):
        entry = replace(FIRST, epoch=epoch)
        insist(lambda entry=entry: store.append(entry))
        insist(store.renew)
        assert insist(store.last) == entry


def test_a_request_that_was_delayed_cannot_put_an_older_entry_over_a_newer_one(make: MakeStore) -> None:
    store: Any = make()
    store.campaign()
    store.append(FIRST)
    before = store._journal_changed
    store.append(SECOND)
    delayed = store._put("journal", b"{}\n")
    assert store._transact([store._created_at("leader", store._created), store._changed_at("journal", before)], [delayed]) == 0
    assert store.last() == SECOND


def test_the_facts_of_the_job_are_written_by_the_leader_alone(make: MakeStore) -> None:
    leader, other = make(), make()
    assert other.read_job() == {}  # type: ignore[attr-defined]
    leader.campaign()
    leader.write_job({"job": "a"})  # type: ignore[attr-defined]
    assert other.read_job() == {"job": "a"}  # type: ignore[attr-defined]
    with pytest.raises(LeadershipLost):
        other.write_job({"job": "b"})  # type: ignore[attr-defined]


def test_a_prefix_with_other_keys_is_refused(make: MakeStore) -> None:
    store: Any = make()
    store._transact([], [store._put("leader", b"something else")])
    with pytest.raises(UserError, match="was not written by recycle: choose another prefix"):
        store.campaign()


def test_members_of_two_clusters_are_not_one_store(cluster: EtcdCluster, tmp_path: Path) -> None:
    with etcd_cluster(tmp_path, 1) as other:
        gateway = EtcdGateway([("127.0.0.1", cluster.ports[0]), ("127.0.0.1", other.ports[0])], 2.0)
        gateway.call("/v3/kv/range", {"key": "YQ=="})
        gateway._members = gateway._members[1:]
        with pytest.raises(StoreAway, match="another etcd cluster"):
            gateway.call("/v3/kv/range", {"key": "YQ=="})
