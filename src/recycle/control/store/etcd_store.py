"""`EtcdStore`: the journal and the leader of a job in etcd, for two or three coordinators on machines of their own.

Keys below the prefix: `leader` has a lease, and is created by who leads; `term` counts the campaigns that were won; `journal` has
the last entry, or where its parts are; `job` says which job this is. Every write is a transaction that compares the revision at
which this coordinator created `leader`: so etcd itself refuses a coordinator that no longer leads. An append compares the
revision of `journal`, too: a request that was delayed on its way cannot put an older entry over a newer one.
"""

import contextlib
import json
import math
import secrets
import threading
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from recycle.control.decide.journal import JournalEntry, entry_from_json, entry_to_json
from recycle.control.store.etcd_gateway import EtcdGateway, StoreAddress, decoded, encoded
from recycle.control.store.protocol import Leader, StoreAway
from recycle.core.errors import FileProblem, LeadershipLost

# etcd refuses requests of more than 1.5 MiB.
_PART_BYTES = 1 << 20
_RENEWALS, _SHORTEST_TIMEOUT_S = 4, 0.5


@dataclass(frozen=True, slots=True)
class _Value:
    """What a key holds: the bytes, the revisions at which it was created and last changed, and its lease."""

    data: bytes
    created: int
    changed: int
    lease: str


class EtcdStore:
    """The store of one job, as the coordinator `name` uses it. Another coordinator leads at most `lease_s` after it is silent."""

    def __init__(self, address: StoreAddress, name: str, lease_s: float) -> None:
        self._prefix, self._name = address.prefix, name
        self.lease_s = float(max(2, math.ceil(lease_s)))  # whole seconds, and no fewer than etcd grants
        self._gateway = EtcdGateway(address.members, max(_SHORTEST_TIMEOUT_S, self.lease_s / _RENEWALS), address.access)
        self.term = 0
        self._id = secrets.token_hex(8)
        self._campaigning = threading.RLock()
        self._lease = ""
        self._own_term = 0  # of the last campaign; `term` is that of the first, since nobody else led in between
        self._created = self._journal_changed = self._seen_revision = 0

    # Leadership.

    def campaign(self) -> Leader | None:
        with self._campaigning:
            leader = self._campaign(None)
            if leader is None:
                self.term = self._own_term
                found = self._get("journal")
                self._journal_changed = found.changed if found is not None else 0
        return leader

    def _campaign(self, expected_term: int | None) -> Leader | None:
        """Lead if nobody does, and if the last campaign had the expected term; None if this coordinator leads."""
        leads = self._find_leader()
        if leads is None:
            found = self._get("term")
            last_term = _number(found.data) if found is not None else 0
            if expected_term is not None and last_term != expected_term:
                return Leader(last_term, "a coordinator that has ended since")
            lease = str(self._gateway.call("/v3/lease/grant", {"TTL": str(round(self.lease_s)), "ID": "0"}).get("ID", ""))
            mine = json.dumps({"id": self._id, "term": last_term + 1, "name": self._name})
            self._transact(
                [self._created_at("leader", 0), self._changed_at("term", found.changed if found is not None else 0)],
                [self._put("leader", mine.encode(), lease), self._put("term", str(last_term + 1).encode())],
            )
            leads = self._find_leader()  # the key decides, because the answer to a transaction may be lost
        if leads is None:
            raise StoreAway("the leader has changed in the middle of a campaign")
        return leads if isinstance(leads, Leader) else None

    def _find_leader(self) -> Leader | Literal["self"] | None:
        """The coordinator that leads, which may be this one; None if nobody leads."""
        if (found := self._get("leader")) is None:
            return None
        facts = _json_of(found.data)
        term = _number(facts.get("term"))
        if facts.get("id") != self._id:
            return Leader(term, str(facts.get("name", "another coordinator")))
        self._created, self._own_term, self._lease = found.created, term, found.lease
        return "self"

    def renew(self) -> None:
        with self._campaigning:  # two threads that campaign at once would each take the other for another coordinator
            answer = self._gateway.call("/v3/lease/keepalive", {"ID": self._lease})
            found = self._get("leader")
            if _number(answer.get("TTL", 0)) > 0 and found is not None and found.created == self._created:
                return
            # The lease has expired: etcd was away, or this process stood still. It leads again if nobody else has led since.
            if (leader := self._campaign(self._own_term)) is not None:
                raise LeadershipLost(f"another coordinator leads the job, in term {leader.term}: {leader.name}")

    def resign(self) -> None:
        created, self._created = self._created, 0
        if created:
            with contextlib.suppress(StoreAway):
                self._transact([self._created_at("leader", created)], [{"request_delete_range": {"key": self._key("leader")}}])

    def watch(self, timeout_s: float) -> None:
        self._gateway.watch(f"{self._prefix}/leader", self._seen_revision, timeout_s)

    # The journal.

    def append(self, entry: JournalEntry) -> None:
        tag = f"{self.term:010d}-{entry.epoch:010d}"  # the same if this entry is appended again, since no answer came
        body = zlib.compress(json.dumps(entry_to_json(entry)).encode())
        parts = [body[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES)]
        for number, part in enumerate(parts[1:], 1):
            self._write([], [self._put(f"part/{tag}/{number:06d}", part)])
        head = json.dumps({"tag": tag, "num_parts": len(parts)}).encode() + b"\n" + parts[0]
        older = {"key": self._key("part/"), "range_end": self._key(f"part/{tag}")}
        writes = [self._put("journal", head), {"request_delete_range": older}]
        revision = self._write([self._changed_at("journal", self._journal_changed)], writes)
        if not revision:
            found = self._get("journal")
            last_tag = str(_json_of(found.data.partition(b"\n")[0]).get("tag")) if found is not None else ""
            if found is None or not last_tag.startswith(f"{self.term:010d}-"):
                raise LeadershipLost("the journal has an entry of another coordinator")
            self._journal_changed = found.changed  # a request was carried out whose answer was lost
            if last_tag != tag:
                raise StoreAway("an earlier entry has come late")
            return
        self._journal_changed = revision

    def last(self) -> JournalEntry | None:
        found = self._get("journal")
        if found is None or not found.data:
            return None
        line, _, body = found.data.partition(b"\n")
        head = _json_of(line)
        for number in range(1, _number(head.get("num_parts"))):
            part = self._get(f"part/{head.get('tag')}/{number:06d}")
            body += part.data if part is not None else b""
        try:
            return entry_from_json(json.loads(zlib.decompress(body)))
        except (ValueError, TypeError, AttributeError, zlib.error) as problem:
            raise FileProblem(f"the journal at {self._prefix} in etcd cannot be read: {problem}") from None

    def discard(self) -> None:
        journal, parts = {"key": self._key("journal")}, {"key": self._key("part/"), "range_end": self._key("part0")}
        self._write([], [{"request_delete_range": journal}, {"request_delete_range": parts}])
        self._journal_changed = 0

    # The job of the prefix.

    def read_job(self) -> dict[str, Any]:
        """The facts about the job of this prefix, empty if there is none."""
        found = self._get("job")
        return _json_of(found.data) if found is not None else {}

    def write_job(self, facts: dict[str, Any]) -> None:
        """Write the facts about the job. Raises LeadershipLost."""
        self._write([], [self._put("job", json.dumps(facts).encode())])

    # Requests.

    def _write(self, compares: list[dict[str, Any]], writes: list[dict[str, Any]]) -> int:
        """Write as the leader; return the revision, 0 if a comparison did not hold. Raises LeadershipLost."""
        if not (created := self._created):
            raise LeadershipLost("this coordinator does not lead the job any more")
        if revision := self._transact([self._created_at("leader", created), *compares], writes):
            return revision
        found = self._get("leader")
        if created != self._created:  # it leads again, since `renew` has campaigned meanwhile
            raise StoreAway("this coordinator has just campaigned again")
        if found is not None and found.created == created:
            return 0
        if found is None:  # the lease has expired, perhaps while etcd was away: `renew` decides whether it leads again
            raise StoreAway("the lease of this coordinator has expired")
        raise LeadershipLost(f"another coordinator leads the job: {_json_of(found.data).get('name')}")

    def _transact(self, compares: list[dict[str, Any]], writes: list[dict[str, Any]]) -> int:
        """Write if all comparisons hold; return the revision of that, 0 if one does not."""
        answer = self._gateway.call("/v3/kv/txn", {"compare": compares, "success": writes, "failure": []})
        return _revision(answer) if answer.get("succeeded") is True else 0

    def _get(self, name: str) -> _Value | None:
        """The value of a key, None if it has none; by agreement of etcd's members, so that it is never an old one."""
        answer = self._gateway.call("/v3/kv/range", {"key": self._key(name)})
        self._seen_revision = _revision(answer)
        try:
            for found in answer.get("kvs", []):
                revisions = int(found["create_revision"]), int(found["mod_revision"])
                return _Value(decoded(found.get("value", "")), *revisions, str(found.get("lease", "0")))
        except (KeyError, ValueError, TypeError, AttributeError) as problem:
            raise StoreAway(f"an answer of etcd cannot be read: {type(problem).__name__} {problem}") from None
        return None

    def _key(self, name: str) -> str:
        return encoded(f"{self._prefix}/{name}")

    def _put(self, name: str, value: bytes, lease: str = "0") -> dict[str, Any]:
        return {"request_put": {"key": self._key(name), "value": encoded(value), "lease": lease}}

    def _created_at(self, name: str, revision: int) -> dict[str, Any]:
        return {"key": self._key(name), "result": "EQUAL", "target": "CREATE", "create_revision": str(revision)}

    def _changed_at(self, name: str, revision: int) -> dict[str, Any]:
        return {"key": self._key(name), "result": "EQUAL", "target": "MOD", "mod_revision": str(revision)}


def _json_of(data: bytes) -> dict[str, Any]:
    """The JSON object in a value. Raises FileProblem if there is something else: the prefix is not ours."""
    try:
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise FileProblem("a key of this prefix in etcd was not written by recycle: choose another prefix")


def _number(value: Any) -> int:
    """The number in a value or a field: etcd writes long numbers as text."""
    try:
        return int(value)
    except (ValueError, TypeError):
        raise FileProblem("a key of this prefix in etcd was not written by recycle: choose another prefix") from None


def _revision(answer: dict[str, Any]) -> int:
    return _number(answer["header"].get("revision", 0))
