"""`Guard`: who may ask the server, and with which headers it answers. It stands around the whole application.

A page of another site can make a browser send requests to this machine: so the `Host` must be ours (else a name of another site
could be pointed here), the request must come from our own page, and whoever is not on this machine needs the token.
"""

import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recycle.core.errors import UserError

MOST_BODY_BYTES = 4096
_LONGEST_QUERY, _LONGEST_HEAD = 4000, 16384
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,250}[a-z0-9_])?(:[0-9]{1,5})?")
_METHODS = ("GET", "HEAD", "POST")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: by which values of `Host` and `Origin`, and with which token if one is needed (else it is empty).

    `https_hosts` are reached through a proxy with TLS. With `takes_any_address` every IP address is a name of ours, at our port:
    a browser that sends one as its `Host` has connected to that address, and no name of another site stands behind it.
    """

    port: int
    hosts: frozenset[str]
    origins: frozenset[str]
    https_hosts: frozenset[str] = frozenset()
    token: str = ""
    allows_injection: bool = False
    takes_any_address: bool = False

    @staticmethod
    def at(
        port: int,
        names: Iterable[str],
        token: str = "",
        allows_injection: bool = False,
        proxies: Iterable[str] = (),
        takes_any_address: bool = False,
    ) -> "Access":
        """Access by these names of this machine at a port, and by the names of proxies before it; see `read_proxy`.

        A name without a scheme is a name of this machine as well. Raises UserError if a proxy's name is none.
        """
        known = [read_proxy(proxy) for proxy in proxies]
        also = [host for proxy, (_, host) in zip(proxies, known, strict=True) if "://" not in proxy and ":" not in host]
        shown = (f"[{name}]" if ":" in name else name.lower() for name in (*names, *also))
        direct = frozenset(f"{name}:{port}" for name in shown)
        origins = {f"http://{host}" for host in direct} | {f"{scheme}://{host}" for scheme, host in known}
        hosts = direct | {host for _, host in known}
        https_hosts = frozenset(host for scheme, host in known if scheme == "https")
        return Access(port, hosts, frozenset(origins), https_hosts, token, allows_injection, takes_any_address)

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token: a browser does not tell the ports of a machine apart."""
        return f"recycle-{self.port}"

    def is_our_host(self, host: str) -> bool:
        return host in self.hosts or (self.takes_any_address and _is_address(host, self.port))

    def is_our_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may ask; at an address, only the page of the very address that it asks."""
        at_address = self.takes_any_address and _is_address(host, self.port)
        return origin in self.origins or (at_address and origin == f"http://{host}")


def read_proxy(text: str) -> tuple[str, str]:
    """Read the name of a proxy, such as `pages.example`, `pages.example:8443` or `http://inside.example`: scheme and host.

    Without a scheme it is https. A port that a browser leaves out must not be given.
    """
    scheme, found, host = text.lower().rpartition("://")
    scheme = scheme if found else "https"
    if scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise UserError(
            f"{text[:100]!r} is not the name of a proxy: write a name such as pages.example or https://pages.example:8443; "
            "for addresses of this machine give --host 0.0.0.0"
        )
    return scheme, host.removesuffix(":443" if scheme == "https" else ":80")


def _is_address(host: str, port: int) -> bool:
    """Whether this is an IP address with our port, as a browser writes it."""
    name, _, number = host.rpartition(":")
    try:
        address = ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return number == str(port) and name.startswith("[") == (address.version == 6)


class Guard:
    """Refuses requests that may not be asked, and adds the headers of security to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._log_in(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """What is answered to a request that is refused; None if it is allowed, as far as the token does not matter."""
        headers, method = Headers(scope=scope), scope["method"]
        if not self._access.is_our_host(headers.get("host", "").lower()):
            return PlainTextResponse("this server has another name: open it by the address that it printed", 421)
        if method not in _METHODS:
            return PlainTextResponse("only GET and POST are answered", 405)
        if len(scope.get("query_string", b"")) > _LONGEST_QUERY or len(scope["path"]) > _LONGEST_QUERY:
            return PlainTextResponse("this address is too long", 414)
        if sum(len(name) + len(value) for name, value in headers.raw) > _LONGEST_HEAD:
            return PlainTextResponse("the head of this request is too long", 431)
        if _length(headers) > MOST_BODY_BYTES:
            return PlainTextResponse("this request is too long", 413)
        is_page = method == "GET" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not (is_page and scope["path"] == "/"):
            return PlainTextResponse("another site may not ask this", 403)
        origin = headers.get("origin")
        if origin is not None and not self._access.is_our_origin(origin, headers.get("host", "").lower()):
            return PlainTextResponse("another site may not ask this", 403)
        if method == "POST" and origin is None:
            return PlainTextResponse("a POST needs an Origin", 403)
        return None

    def _log_in(self, scope: Scope) -> Response | None:
        """Ask for the token, or put a right one into a cookie; None if the request has it, or none is needed."""
        token = self._access.token
        if not token or self._has_token(Headers(scope=scope)):
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given and _is_equal(given, token):
            answer = RedirectResponse("/", 303)
            is_secure = self._is_by_https(Headers(scope=scope))
            answer.set_cookie(self._access.cookie, token, httponly=True, samesite="lax", path="/", secure=is_secure)
            return answer
        return PlainTextResponse("this page needs its token: open it by the whole address that was printed when it started", 401)

    def _is_by_https(self, headers: Headers) -> bool:
        """Whether a proxy with TLS was asked. Whoever says so without one only loses the own cookie."""
        return headers.get("host", "").lower() in self._access.https_hosts or headers.get("x-forwarded-proto", "") == "https"

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return _is_equal(given.strip(), self._access.token)
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._access.cookie)
        except CookieError:
            return False
        return cookie is not None and _is_equal(cookie.value, self._access.token)


def _length(headers: Headers) -> int:
    """The length of the body; one that is not told, in chunks, counts as too long."""
    if "transfer-encoding" in headers:
        return MOST_BODY_BYTES + 1
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else MOST_BODY_BYTES + 1


def _is_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
