"""`EtcdGateway`: requests to etcd over the JSON gateway of its version 3 interface, with the standard library alone.

Keys and values go as base64. Every request has a deadline. If a member of etcd does not answer, the next one is asked, first the
one that answered last. An answer of another cluster than before is refused: addresses of two clusters would be two stores.
A user of etcd gets a token for the password. Tokens expire, and a member that was started again knows none: then it is asked for
another one.
"""

import base64
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from recycle.control.store.etcd_access import StoreAccess
from recycle.control.store.protocol import StoreAway, StoreRefused
from recycle.core.errors import FileProblem, UserError

DEFAULT_PORT = 2379
_SCHEME, _TLS_SCHEME = "etcd://", "etcds://"
_MOST_BYTES = 1 << 24
# Codes of gRPC with which etcd refuses a user, beside those errors that name the user or the password.
_DENIED, _UNAUTHENTICATED = 7, 16
_REFUSALS = ("user name", "password", "authentication")
_OLD_TOKENS = ("invalid auth token", "revision of auth store is old")
_MOST_SHOWN = 200
_EOF = "UNEXPECTED_EOF_WHILE_READING"


NO_FLAGS = StoreAccess()


class _EtcdError(ValueError):
    """An error with which etcd answers, and its code of gRPC."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"it answered {text[:_MOST_SHOWN]!r}")
        self.is_old_token = code == _UNAUTHENTICATED or any(part in text for part in _OLD_TOKENS)
        self.is_refusal = code in (_DENIED, _UNAUTHENTICATED) or any(part in text for part in _REFUSALS)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Members of an etcd cluster, and the prefix of one job's keys; with `access`, connections use TLS."""

    members: tuple[tuple[str, int], ...]
    prefix: str
    access: StoreAccess | None = None

    @staticmethod
    def parse(text: str, access: StoreAccess = NO_FLAGS) -> "StoreAddress":
        """The address in `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`, or in `etcds://`, which uses TLS."""
        scheme = _TLS_SCHEME if text.startswith(_TLS_SCHEME) else _SCHEME
        places, slash, prefix = text.removeprefix(scheme).partition("/")
        if not text.startswith(scheme) or not slash or not prefix.strip("/") or not places:
            raise UserError(f"{text!r} is no store: write etcd://HOST:PORT/PREFIX, with more HOST:PORT after commas")
        if scheme == _SCHEME and access != NO_FLAGS:
            flags = " and ".join(access.flags()[::2])
            raise UserError(f"{text} is not encrypted, and {flags} would be of no use, or be read on the way: write etcds://")
        members = tuple(_read_place(place, text) for place in places.split(","))
        return StoreAddress(members, prefix.strip("/"), access if scheme == _TLS_SCHEME else None)

    def __str__(self) -> str:
        scheme = _SCHEME if self.access is None else _TLS_SCHEME
        return f"{scheme}{','.join(f'{host}:{port}' for host, port in self.members)}/{self.prefix}"


def _read_place(text: str, whole: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", str(DEFAULT_PORT))
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} in {whole!r} is no address: write HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}")
    return host.strip("[]"), int(port)


class EtcdGateway:
    """Requests to the members of one etcd cluster; several threads may use it. With `access`, connections use TLS.

    Raises StoreAway if no member answers well, StoreRefused if all that answer let nobody in with this access.
    """

    def __init__(self, members: Sequence[tuple[str, int]], timeout_s: float, access: StoreAccess | None = None) -> None:
        self._members, self._timeout_s, self._good = tuple(members), timeout_s, 0
        self._cluster = self._token = ""
        self._access = access
        self._changed: tuple[int, ...] = ()
        self._context: ssl.SSLContext | None = None

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. A request may have been carried out although no answer came."""
        problems, refusals = [], 0
        for number in self._in_turn():
            try:
                answer = self._ask_as_user(number, path, body)
            except (OSError, http.client.HTTPException, ValueError, FileProblem) as problem:
                host, port = self._members[number]
                problems.append(f"{host}:{port}: {_describe(problem)}")
                refusals += _is_refusal(problem)
            else:
                self._good = number
                return answer
        raise (StoreRefused if refusals == len(problems) else StoreAway)("; ".join(problems))

    def _in_turn(self) -> list[int]:
        num = len(self._members)
        return [(self._good + number) % num for number in range(num)]

    def _ask_as_user(self, number: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask with a token, if there is a user; with another token, if etcd does not take this one."""
        if self._access is None or not self._access.user:
            return self._ask(number, path, body)
        if token := self._token:  # which another thread may replace
            try:
                return self._ask(number, path, body, token)
            except _EtcdError as problem:
                if not problem.is_old_token:
                    raise
        login = {"name": self._access.user, "password": self._access.read_password()}
        self._token = token = str(self._ask(number, "/v3/auth/authenticate", login).get("token", ""))
        return self._ask(number, path, body, token)

    def _ask(self, number: int, path: str, body: Mapping[str, Any], token: str = "") -> dict[str, Any]:
        with contextlib.closing(self._connection(number, self._timeout_s)) as connection:
            connection.request("POST", path, json.dumps(body), _headers(token))
            response = connection.getresponse()
            text = response.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("its answer is too long")
        return self._checked(text, response.status)

    def _connection(self, number: int, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is not open yet. Files of TLS that have changed are read again. Raises FileProblem."""
        if self._access is None:
            return http.client.HTTPConnection(*self._members[number], timeout=timeout_s)
        if self._context is None:
            self._context, self._changed = self._access.context(), self._access.change_times()
        elif (changed := self._access.change_times()) != self._changed:
            with contextlib.suppress(FileProblem):  # they are being written
                self._context, self._changed = self._access.context(), changed
        return http.client.HTTPSConnection(*self._members[number], timeout=timeout_s, context=self._context)

    def _checked(self, text: bytes, status: int) -> dict[str, Any]:
        """The answer in `text`. Raises ValueError if it is an error, no answer of etcd, or one of another cluster."""
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError(f"it answered {shortened(answer)}, as no etcd does")
        if status != http.client.OK or "error" in answer:
            code = answer.get("code")
            text_of_error = str(answer.get("message") or answer.get("error") or status)
            raise _EtcdError(text_of_error, code if isinstance(code, int) else 0)
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
        body = json.dumps({"create_request": {"key": encoded(key), "start_revision": str(revision + 1)}})
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, FileProblem):
            self._wait_for_event(self._connection(self._good, max(0.05, timeout_s)), body, end_s)
            return
        # A connection that broke at once must not make its caller ask again without a pause.
        time.sleep(max(0.0, min(0.2, end_s - time.monotonic())))

    def _wait_for_event(self, connection: http.client.HTTPConnection, body: str, end_s: float) -> None:
        """Return after an event of a watch, or at `end_s`; raises if the connection breaks."""
        with contextlib.closing(connection):
            connection.request("POST", "/v3/watch", body, _headers(self._token))
            response = connection.getresponse()
            while (left_s := end_s - time.monotonic()) > 0:
                if connection.sock is not None:
                    connection.sock.settimeout(left_s)
                if not (line := response.readline(_MOST_BYTES)):
                    raise ConnectionError("etcd has ended the watch")
                if json.loads(line).get("result", {}).get("events"):
                    return


def _headers(token: str) -> dict[str, str]:
    return {"Content-Type": "application/json", **({"Authorization": token} if token else {})}


def _describe(problem: Exception) -> str:
    if isinstance(problem, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {problem.verify_message}"
    if isinstance(problem, ssl.SSLEOFError) or getattr(problem, "reason", "") == _EOF:
        return "it closed the connection, as an etcd that refuses this coordinator's certificate, or that uses no TLS (etcd://)"
    if isinstance(problem, ssl.SSLError):
        return f"TLS fails: {(problem.reason or str(problem)).replace('_', ' ').lower()}"
    if isinstance(problem, http.client.RemoteDisconnected):
        return "it closed the connection without an answer, as an etcd that uses TLS (etcds://)"
    return str(getattr(problem, "strerror", None) or problem or type(problem).__name__)


def _is_refusal(problem: Exception) -> bool:
    """Whether another try would end like this one: by what etcd thinks of this coordinator, or the coordinator of etcd."""
    if isinstance(problem, ssl.SSLError):
        return isinstance(problem, ssl.SSLCertVerificationError) or "ALERT" in (problem.reason or "")
    return isinstance(problem, FileProblem) or (isinstance(problem, _EtcdError) and problem.is_refusal)


def encoded(text: str | bytes) -> str:
    """Base64, as the gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: Any) -> bytes:
    """The bytes of a value. Raises ValueError if it is no base64."""
    return base64.b64decode(str(text), validate=True)
