"""`EtcdGateway`: requests to etcd over the JSON gateway of its version 3 interface, with the standard library alone.

Keys and values go as base64. Every request has a deadline. If a member of etcd does not answer, the next one is asked, first the
one that answered last. An answer of another cluster than before is refused: addresses of two clusters would be two stores.
"""

import base64
import contextlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from recycle.control.store.protocol import StoreAway
from recycle.core.errors import UserError

DEFAULT_PORT = 2379
_SCHEME = "etcd://"
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Members of an etcd cluster, and the prefix of one job's keys."""

    members: tuple[tuple[str, int], ...]
    prefix: str

    @staticmethod
    def parse(text: str) -> "StoreAddress":
        """The address in `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`."""
        places, slash, prefix = text.removeprefix(_SCHEME).partition("/")
        if not text.startswith(_SCHEME) or not slash or not prefix.strip("/") or not places:
            raise UserError(f"{text!r} is no store: write etcd://HOST:PORT/PREFIX, with more HOST:PORT after commas")
        return StoreAddress(tuple(_read_place(place, text) for place in places.split(",")), prefix.strip("/"))

    def __str__(self) -> str:
        return f"{_SCHEME}{','.join(f'{host}:{port}' for host, port in self.members)}/{self.prefix}"


def _read_place(text: str, whole: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", str(DEFAULT_PORT))
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} in {whole!r} is no address: write HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}")
    return host.strip("[]"), int(port)


class EtcdGateway:
    """Requests to the members of one etcd cluster; several threads may use it. Raises StoreAway if no member answers well."""

    def __init__(self, members: Sequence[tuple[str, int]], timeout_s: float) -> None:
        self._members, self._timeout_s, self._good = tuple(members), timeout_s, 0
        self._cluster = ""

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. A request may have been carried out although no answer came."""
        problems = []
        for number in self._in_turn():
            try:
                answer = self._ask(number, path, body)
            except (OSError, http.client.HTTPException, ValueError) as problem:
                host, port = self._members[number]
                problems.append(f"{host}:{port}: {getattr(problem, 'strerror', None) or problem or type(problem).__name__}")
            else:
                self._good = number
                return answer
        raise StoreAway("; ".join(problems))

    def _in_turn(self) -> list[int]:
        num = len(self._members)
        return [(self._good + number) % num for number in range(num)]

    def _ask(self, number: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.closing(http.client.HTTPConnection(*self._members[number], timeout=self._timeout_s)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("its answer is too long")
        return self._checked(text, response.status)

    def _checked(self, text: bytes, status: int) -> dict[str, Any]:
        """The answer in `text`. Raises ValueError if it is an error, no answer of etcd, or one of another cluster."""
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError(f"it answered {shortened(answer)}, as no etcd does")
        if status != http.client.OK or "error" in answer:
            raise ValueError(f"it answered {shortened(answer.get('message') or answer.get('error') or status)}")
        if "result" in answer:  # one message of a stream
            answer = answer["result"]
        cluster = answer.get("header", {}).get("cluster_id") if isinstance(answer, dict) else None
        if not isinstance(cluster, str):
            raise ValueError("its answer has no header, as no etcd's has")
        if self._cluster and cluster != self._cluster:
            raise ValueError("it belongs to another etcd cluster than the member before")
        self._cluster = cluster
        return dict(answer)

    def watch(self, key: str, revision: int, timeout_s: float) -> None:
        """Return when a key changes after `revision`, when the connection breaks, or after this time."""
        end_s = time.monotonic() + timeout_s
        host, port = self._members[self._good]
        body = json.dumps({"create_request": {"key": encoded(key), "start_revision": str(revision + 1)}})
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            self._wait_for_event(http.client.HTTPConnection(host, port, timeout=max(0.05, timeout_s)), body, end_s)
            return
        # A connection that broke at once must not make its caller ask again without a pause.
        time.sleep(max(0.0, min(0.2, end_s - time.monotonic())))

    def _wait_for_event(self, connection: http.client.HTTPConnection, body: str, end_s: float) -> None:
        """Return after an event of a watch, or at `end_s`; raises if the connection breaks."""
        with contextlib.closing(connection):
            connection.request("POST", "/v3/watch", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while (left_s := end_s - time.monotonic()) > 0:
                if connection.sock is not None:
                    connection.sock.settimeout(left_s)
                if not (line := response.readline(_MOST_BYTES)):
                    raise ConnectionError("etcd has ended the watch")
                if json.loads(line).get("result", {}).get("events"):
                    return


def encoded(text: str | bytes) -> str:
    """Base64, as the gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: Any) -> bytes:
    """The bytes of a value. Raises ValueError if it is no base64."""
    return base64.b64decode(str(text), validate=True)
