"""The job of a store: which coordinators lead it, which are refused, and when a new one replaces it."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from recycle.cli.machines.store_job import StoredJob, lead_job, note_end, token_digest
from recycle.control.store.etcd_gateway import StoreAddress
from recycle.control.store.protocol import Leader, StoreAway
from recycle.core.errors import FileProblem, UserError

OWN = StoredJob("new", 17.0, False, "identity", token_digest("secret"))
OTHER = replace(OWN, job="old", begun_s=5.0)


class FakeStore:
    """A store in memory: `leaders` is what each campaign meets, None if it is won."""

    def __init__(self, job: StoredJob | None = None, leaders: tuple[Leader | None, ...] = (None,)) -> None:
        self.job = asdict(job) if job is not None else {}
        self._leaders, self.term, self.num_resigned, self.num_away = list(leaders), 3, 0, 0
        self.ends_when_watched, self.num_discarded = "", 0

    def read_job(self) -> dict[str, Any]:
        return self.job

    def discard(self) -> None:
        assert self.job, "only the journal of another job is removed"
        self.num_discarded += 1

    def write_job(self, facts: dict[str, Any]) -> None:
        self.job = facts

    def campaign(self) -> Leader | None:
        return self._leaders.pop(0)

    def renew(self) -> None:
        if self.num_away:
            self.num_away -= 1
            raise StoreAway("it is away")

    def watch(self, timeout_s: float) -> None:
        if self.ends_when_watched:
            self.job = {**self.job, "over": self.ends_when_watched}

    def resign(self) -> None:
        self.num_resigned += 1


def lead(store: Any, own: StoredJob = OWN, is_anew: bool = False) -> tuple[Any, list[str]]:
    said: list[str] = []
    return lead_job(store, "etcd://here:1/jobs/a", own, is_anew, said.append), said


def test_the_first_leader_writes_the_job_and_later_ones_take_it_over() -> None:
    store = FakeStore()
    assert lead(store)[0] == (OWN, False)
    assert store.job == asdict(OWN)
    found, said = lead(FakeStore(OTHER))
    assert found == (OTHER, True)
    assert said == ["this coordinator leads now, in term 3"]


def test_a_standby_says_once_who_leads_and_takes_over_also_if_it_was_started_to_begin_anew() -> None:
    leader = Leader(2, "10.0.0.1:29400, process 7")
    found, said = lead(FakeStore(OTHER, (leader, leader, None)), is_anew=True)
    assert found == (OTHER, True)
    assert said[0] == (
        "standby: the coordinator at 10.0.0.1:29400, process 7 leads, in term 2; this one takes over if that is gone"
    )
    assert len(said) == 2


def test_a_standby_ends_when_the_job_is_over() -> None:
    store = FakeStore(OTHER, (Leader(2, "x"), None))
    store.ends_when_watched = "all 9 steps are done"
    found, said = lead(store)
    assert found is None
    assert said[-1] == "the job is over: all 9 steps are done"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (
            replace(OTHER, over="all 9 steps are done"),
            r"is over \(all 9 steps are done\): name another prefix, go on from its last",
        ),
        (replace(OTHER, identity="something else"), "belongs to another job, which is not over: name another prefix"),
        (replace(OTHER, token_digest="x"), "the token is not that of the job of etcd://here:1/jobs/a: copy the token file"),
    ],
)
def test_a_prefix_of_another_job_is_refused_in_one_sentence(job: StoredJob, says: str) -> None:
    with pytest.raises(FileProblem, match=says):
        lead(FakeStore(job))


def test_a_job_that_is_over_is_replaced_by_one_that_resumes_and_any_job_without_a_leader_by_a_new_one() -> None:
    over, resumes = replace(OTHER, over="stopped after step 3 of 9"), replace(OWN, is_resumed=True)
    assert lead(FakeStore(over), resumes)[0] == (resumes, False)
    assert lead(FakeStore(OTHER), resumes)[0] == (OTHER, True)
    for before in (over, OTHER, replace(OTHER, identity="something else")):
        assert lead(FakeStore(before), is_anew=True)[0] == (OWN, False)


def test_the_end_of_the_job_is_noted_as_soon_as_the_store_answers_and_then_nobody_leads() -> None:
    store: Any = FakeStore(OTHER)
    store.num_away = 1
    note_end(store, OTHER, "all 9 steps are done", print)
    assert (store.job["over"], store.num_resigned) == ("all 9 steps are done", 1)


@pytest.mark.parametrize(
    "text", ["here:2379/a", "etcd://here:2379", "etcd://here:2379/", "etcd:///a", "etcd://here:x/a", "http://h:1/a"]
)
def test_a_store_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no"):
        StoreAddress.parse(text)


def test_a_store_has_members_and_a_prefix() -> None:
    found = StoreAddress.parse("etcd://a:1,[::1]:2,b/jobs/x/")
    assert (found.members, found.prefix) == ((("a", 1), ("::1", 2), ("b", 2379)), "jobs/x")
