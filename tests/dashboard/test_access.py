"""Who may ask: proxies with TLS, and addresses of this machine; tokens that are kept; and connections that say nothing."""

import os
import socket
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection

import pytest

from recycle.core.errors import UserError
from recycle.dashboard.web.guard import Access, read_proxy
from recycle.dashboard.web.kept_token import kept_token
from recycle.dashboard.web.patience import PatientProtocol
from recycle.dashboard.web.serve import ServerOptions
from tests.dashboard.browser import serving
from tests.dashboard.run_folders import PORT, make_client, write_run
from tests.processes import depends_on_load


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "runs" / "a").parent


def behind_proxy(folder, *names):
    return make_client(folder, access=ServerOptions(names=names).access(PORT, "secret"))


@pytest.mark.parametrize(
    ("name", "host", "origin"),
    [
        ("pages.example", "pages.example", "https://pages.example"),
        ("https://Pages.example", "pages.example", "https://pages.example"),
        ("pages.example:443", "pages.example", "https://pages.example"),
        ("pages.example:8443", "pages.example:8443", "https://pages.example:8443"),
        ("pages.example", f"pages.example:{PORT}", f"http://pages.example:{PORT}"),
        ("pages.example", f"127.0.0.1:{PORT}", "https://pages.example"),  # a proxy that does not pass the name on
        ("http://inside.example", "inside.example", "http://inside.example"),
    ],
)
def test_a_proxy_is_asked_by_its_name(folder, name, host, origin):
    headers = {"Host": host, "Origin": origin, "Authorization": "Bearer secret"}
    assert behind_proxy(folder, name).get("/api/runs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("pages.example", "http://pages.example", 403),
        ("pages.example", "https://pages.example:8443", 403),
        ("pages.example", "https://evil.example", 403),
        ("pages.example", "null", 403),
        ("evil.example", "https://pages.example", 421),
        ("pages.example.evil.example", "https://pages.example", 421),
        ("pages.example:8443", "https://pages.example", 421),
        (f"10.0.0.1:{PORT}", "https://pages.example", 421),
    ],
)
def test_no_other_name_is_answered_behind_a_proxy(folder, host, origin, status):
    headers = {"Host": host, "Origin": origin, "Authorization": "Bearer secret"}
    assert behind_proxy(folder, "pages.example").get("/api/runs", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "is_secure"),
    [
        ({"Host": "pages.example"}, True),
        ({"Host": f"127.0.0.1:{PORT}", "X-Forwarded-Proto": "https"}, True),
        ({"Host": f"127.0.0.1:{PORT}"}, False),
        ({"Host": f"pages.example:{PORT}"}, False),
    ],
)
def test_the_cookie_of_a_page_behind_tls_goes_only_over_tls(folder, headers, is_secure):
    answer = behind_proxy(folder, "pages.example").get("/?token=secret", headers=headers)
    cookie = answer.headers["set-cookie"]
    assert (answer.status_code, cookie.startswith(f"recycle-{PORT}=secret"), "; Secure" in cookie) == (303, True, is_secure)


@pytest.mark.parametrize("name", ["", "https://", "a/b", "a b", "ftp://a", "a:b", "https://a/", "a\n", "*"])
def test_what_is_no_name_of_a_proxy_is_refused(name):
    with pytest.raises(UserError, match="is not the name of a proxy"):
        read_proxy(name)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (f"192.0.2.7:{PORT}", 200),
        (f"[2001:db8::7]:{PORT}", 200),
        (f"{socket.gethostname().lower()}:{PORT}", 200),
        ("192.0.2.7:80", 421),
        ("192.0.2.7", 421),
        (f"2001:db8::7:{PORT}", 421),
        (f"192.0.2.7.evil.example:{PORT}", 421),
        (f"evil.example:{PORT}", 421),
        (f"0x7f000001:{PORT}", 421),
    ],
)
def test_a_server_on_every_address_is_asked_by_any_of_them(folder, host, status):
    client = make_client(folder, access=ServerOptions("0.0.0.0").access(PORT, "secret"))
    headers = {"Host": host, "Authorization": "Bearer secret", "Origin": f"http://{host}"}
    assert client.get("/api/runs", headers=headers).status_code == status


def test_an_address_is_no_leave_for_a_page_on_another_port_of_it(folder):
    client = make_client(folder, access=ServerOptions("0.0.0.0").access(PORT, "secret"))
    headers = {"Host": f"192.0.2.7:{PORT}", "Authorization": "Bearer secret", "Origin": "http://192.0.2.7:9000"}
    assert client.get("/api/runs", headers=headers).status_code == 403


def test_a_page_at_another_address_with_our_port_is_another_site(folder):
    client = make_client(folder, access=ServerOptions("0.0.0.0").access(PORT, "secret"))
    headers = {"Host": f"192.0.2.7:{PORT}", "Authorization": "Bearer secret", "Origin": f"http://198.51.100.9:{PORT}"}
    assert client.get("/api/runs", headers=headers).status_code == 403


def test_a_server_on_one_address_is_asked_by_that_alone(folder):
    client = make_client(folder, access=ServerOptions("192.0.2.7").access(PORT, ""))
    answers = [client.get("/api/runs", headers={"Host": f"{host}:{PORT}"}).status_code for host in ("192.0.2.7", "192.0.2.8")]
    assert answers == [200, 421]


def test_cookies_of_two_ports_have_two_names():
    names = {Access.at(port, ("localhost",), "secret", proxies=("pages.example",)).cookie for port in (8265, 8266)}
    assert names == {"recycle-8265", "recycle-8266"}


def test_a_token_is_the_same_after_a_restart_and_only_its_owner_can_read_it(folder):
    token = kept_token(folder)
    kept = folder.parent / ".runs.page-token"
    assert (kept_token(folder), kept.stat().st_mode & 0o777, len(token) >= 32) == (token, 0o600, True)
    assert token not in make_client(folder).get("/api/runs").text


def test_a_token_is_kept_before_there_is_a_folder_of_runs(tmp_path):
    run = tmp_path / "new" / "runs" / "a"
    assert kept_token(run) == kept_token(run)
    assert [file.name for file in run.parent.iterdir()] == [".a.page-token"]


def test_a_token_that_others_could_know_is_not_used(folder, tmp_path):
    first, kept = kept_token(folder), folder.parent / ".runs.page-token"
    kept.chmod(0o644)
    assert kept_token(folder) not in (first, kept_token(folder))
    kept.rename(tmp_path / "else")
    (tmp_path / "else").chmod(0o600)
    kept.symlink_to(tmp_path / "else")
    assert kept_token(folder) != first
    kept.unlink()
    kept.write_text("short")
    kept.chmod(0o600)
    assert len(kept_token(folder)) >= 32
    kept.unlink()
    os.mkfifo(kept, 0o600)
    assert len(kept_token(folder)) >= 32


def test_silent_and_slow_connections_keep_nobody_from_the_page_and_are_closed(folder, monkeypatch):
    monkeypatch.setattr(PatientProtocol, "LONGEST_HEAD_S", 1.0)
    with serving(folder) as address, ExitStack() as opened:
        port = _port(address)
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(200)]
        for connection in silent[::2]:
            with suppress(OSError):  # on a busy machine some are closed by now
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", "/api/runs")
            assert connection.getresponse().status == 200
        began_s = time.monotonic()
        assert all(_is_closed(connection) for connection in silent)
        with depends_on_load():
            assert time.monotonic() - began_s < 15


def _is_closed(connection):
    """Whether the other side closes the connection, within the time that the connection has, and sends nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_second_request_that_is_slow_is_given_up_and_a_quick_one_answered(folder, monkeypatch):
    monkeypatch.setattr(PatientProtocol, "LONGEST_HEAD_S", 1.0)
    with serving(folder) as address, closing(HTTPConnection("127.0.0.1", _port(address), timeout=20)) as connection:
        for _ in range(2):
            connection.request("GET", "/icon.svg")
            assert connection.getresponse().read().startswith(b"<svg")
        connection.sock.sendall(b"GET /icon.svg")
        assert _is_closed(connection.sock)


def _port(address):
    return int(address.rstrip("/").rpartition(":")[2])
