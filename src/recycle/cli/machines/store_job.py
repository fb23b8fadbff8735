"""The job of a store: which job its prefix belongs to, and how one of several coordinators comes to lead it."""

import hashlib
import hmac
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recycle.cli.training.train_config import TrainConfig, with_file
from recycle.control.net.wire import new_name
from recycle.control.store.etcd_gateway import StoreAddress
from recycle.control.store.etcd_store import EtcdStore
from recycle.control.store.protocol import StoreAway, ask_until_answered
from recycle.core.errors import FileProblem, LeadershipLost, UserError
from recycle.core.events.record_file import RECORD

# A standby asks again who leads after so long, also if nothing has happened.
_WATCH_S = 5.0
# The end of the job is noted in the store for at most so long.
_NOTE_S, _RETRY_S = 30.0, 0.5


@dataclass(frozen=True, slots=True)
class StoredJob:
    """The job of a prefix, the same for all its coordinators: its name, and when it began, in seconds of the wall clock.

    `identity` is the digest of what is trained, `token_digest` that of the job's secret. `over` says how the job ended.
    """

    job: str
    begun_s: float
    is_resumed: bool
    identity: str
    token_digest: str
    over: str = ""


def identity_of(config: TrainConfig, code: Mapping[str, str]) -> str:
    """The digest of a configuration and its job file, wherever the file lies."""
    if config.job.file:
        config = with_file(config, Path(Path(config.job.file).name))
    return hashlib.sha256(json.dumps([config.to_toml(), dict(code)], sort_keys=True).encode()).hexdigest()


def token_digest(token: str) -> str:
    """A digest by which coordinators find that they have the same token; the token cannot be found from it."""
    return hmac.new(token.encode(), b"recycle store", hashlib.sha256).hexdigest()


def lead_job(
    store: EtcdStore, where: str, own: StoredJob, is_anew: bool, say: Callable[[str], None]
) -> tuple[StoredJob, bool] | None:
    """Wait until this coordinator leads; return the job, and whether another coordinator has begun it.

    `own` is written if the prefix has no job; in place of a job that is over, if `own` resumes a run; and in place of any job
    that nobody leads, if `is_anew`. A coordinator that was a standby replaces no job.
    None if the job ended while this coordinator was a standby. Raises FileProblem if the prefix belongs to another job.
    """
    told = None
    while True:
        found = _read(store, say)
        if found is not None and found.over and told is not None:
            say(f"the job is over: {found.over}")
            return None
        if not _is_replaced(found, own, is_anew and told is None):
            _refuse_other(found, own, where)
        if (leader := ask_until_answered(store.campaign, say)) is None:
            break
        if leader != told:
            say(f"standby: the coordinator at {leader.name} leads, in term {leader.term}; this one takes over if that is gone")
            told = leader
        store.watch(_WATCH_S)
    try:
        found = _read(store, say)  # another coordinator may have written it meanwhile
        if found is None or _is_replaced(found, own, is_anew and told is None):
            if found is not None:  # before the new job is there: nobody must go on with it from the journal of another
                ask_until_answered(store.discard, say)
            ask_until_answered(lambda: store.write_job(asdict(own)), say)
            return own, False
        _refuse_other(found, own, where)
    except BaseException:
        store.resign()
        raise
    say(f"this coordinator leads now, in term {store.term}")
    return found, True


def _is_replaced(found: StoredJob | None, own: StoredJob, is_anew: bool) -> bool:
    """Whether the job of a prefix gives way to a new one, if nobody leads it."""
    return found is not None and (is_anew or (bool(found.over) and own.is_resumed))


def _read(store: EtcdStore, say: Callable[[str], None]) -> StoredJob | None:
    found = ask_until_answered(store.read_job, say)
    try:
        return StoredJob(**found) if found else None
    except TypeError:
        raise FileProblem("the job of this prefix was written by another release of recycle: name another prefix") from None


def _refuse_other(found: StoredJob | None, own: StoredJob, where: str) -> None:
    """Raise if this coordinator cannot go on with the job that was found."""
    if found is None:
        return
    if found.over:
        raise FileProblem(
            f"the job of {where} is over ({found.over}): name another prefix, go on from its last checkpoint with --resume, "
            "or begin a new job there with --anew"
        )
    if found.identity != own.identity:
        raise FileProblem(f"{where} belongs to another job, which is not over: name another prefix")
    if found.token_digest != own.token_digest:
        raise FileProblem(
            f"the token is not that of the job of {where}: copy the token file from the machine of the first coordinator"
        )


def note_end(store: EtcdStore, job: StoredJob, sentence: str, say: Callable[[str], None]) -> None:
    """Write to the store that the job is over, so that standbys end, and nobody takes it over."""
    end_s = time.monotonic() + _NOTE_S
    while True:
        try:
            store.renew()
            store.write_job(asdict(replace(job, over=sentence)))
            break
        except LeadershipLost as problem:
            say(f"the end of the job is not noted in the store: {problem}")
            break
        except StoreAway as problem:
            if time.monotonic() > end_s:
                say(f"the end of the job is not noted in the store, which does not answer: {problem}")
                break
            time.sleep(_RETRY_S)
    store.resign()


def describe_end(facts: Mapping[str, Any], num_steps: int) -> str:
    return (
        f"all {num_steps} steps are done"
        if facts["steps"] >= num_steps
        else f"stopped after step {facts['steps']} of {num_steps}"
    )


def new_job(is_resumed: bool, config: TrainConfig, code: Mapping[str, str], token: str) -> StoredJob:
    """A job that begins now, if the prefix has none yet."""
    return StoredJob(new_name(), time.time(), is_resumed, identity_of(config, code), token_digest(token))


@dataclass(frozen=True, slots=True)
class LedJob:
    """The job of a store that this coordinator leads; `is_takeover` if another one has begun it."""

    store: EtcdStore
    job: StoredJob
    is_takeover: bool
    _renewal: "_Renewal"

    @staticmethod
    def lead(where: StoreAddress, is_anew: bool, address: str, lease_s: float, own: StoredJob) -> "LedJob | None":
        """Wait until this coordinator leads the job of a store; None if the job ended before."""
        store = EtcdStore(where, f"{address}, process {os.getpid()}", lease_s)
        found = lead_job(store, str(where), own, is_anew, _say)
        return LedJob(store, *found, _Renewal(store)) if found is not None else None

    def begin_us(self) -> int:
        """When the job began, by the clock of this machine; machines have no common one but the wall clock."""
        return time.monotonic_ns() // 1000 - max(0, round((time.time() - self.job.begun_s) * 1e6))

    def refuse_missing_checkpoint(self, out: Path) -> bool:
        """Return whether the folder has a resumed run; raise if the job has yet to begin from a checkpoint on another machine."""
        is_here = (out / RECORD).exists()
        if self.job.is_resumed and not is_here and ask_until_answered(self.store.last, _say) is None:
            self.conclude("")
            raise FileProblem(f"the job resumes from a checkpoint, and {out} has none: start a coordinator where the run is")
        return self.job.is_resumed and is_here

    def conclude(self, sentence: str) -> None:
        """Lead no longer. With a sentence, the job is over; else another coordinator goes on."""
        self._renewal.end()
        if sentence:
            note_end(self.store, self.job, sentence, _say)
        else:
            self.store.resign()


class _Renewal:
    """Renews the leadership while a coordinator gets ready, which may take longer than the lease, and until it ends."""

    def __init__(self, store: EtcdStore) -> None:
        self._store, self._ended = store, threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._store.lease_s / 4):
            try:
                self._store.renew()
            except StoreAway:
                continue
            except UserError:  # the service, which renews as well, says so
                return

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _say(sentence: str) -> None:
    print(f"coordinator: {sentence}", file=sys.stderr, flush=True)
