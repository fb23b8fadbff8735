"""The server: what it answers, what it pushes, and all that it refuses."""

import asyncio
import json
import threading
import time
from contextlib import closing
from http.client import HTTPConnection

import pytest

from recycle.core.errors import PortInUse, UserError
from recycle.core.events.live_injection import LiveInjection
from recycle.core.events.record import Changed, OpRan, SpeedChanged, Stepped
from recycle.dashboard.reading.run_reader import RunReader
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.web import page_stream
from recycle.dashboard.web.guard import Access
from recycle.dashboard.web.routes import PAGE, PageServer
from recycle.dashboard.web.serve import ServerOptions, http_server, listening, page_url
from tests.dashboard.run_folders import HOST, HTML, growing, hostile_events, make_client, write_run
from tests.recovery_records import recovery_record

OURS = {"Origin": f"http://{HOST}", "X-Recycle-Token": "secret", "Authorization": "Bearer secret"}


class RecordingInjector:
    """Notes what is asked of it."""

    def __init__(self):
        self.asked = []

    def inject(self, injection: LiveInjection) -> str:
        if injection.action == "start":
            raise UserError(f"{injection.worker} is alive")
        self.asked.append(injection)
        return f"{injection.action} {injection.worker}"


@pytest.fixture
def client(tmp_path):
    write_run(tmp_path / "a")
    return make_client(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "/api/session",
        "/api/runs",
        "/api/run?id=a",
        "/api/run/series?id=a&from_us=0&to_us=500000",
        "/api/run/iteration?id=a&number=6&first=0&last=4",
        "/api/run/events?id=a&text=W1_1&limit=5",
    ],
)
def test_every_view_is_answered_as_json(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "problem" not in answer.json() or not answer.json()["problem"]


@pytest.mark.parametrize(("form", "start"), [("json", b'{"format"'), ("csv", b"at_us"), ("perfetto", b'{"displayTimeUnit"')])
def test_a_record_is_downloaded_in_three_forms(client, form, start):
    answer = client.get(f"/api/run/download?id=a&form={form}")
    assert answer.status_code == 200
    assert answer.content.startswith(start)
    assert answer.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run?id=b", 404),
        ("/api/run?id=../a", 404),
        ("/api/run?id=%2fetc%2fpasswd", 404),
        ("/api/run/iteration?id=a&number=x", 422),
        ("/api/run/iteration?id=a&number=1&first=-5", 422),
        ("/api/run/iteration?id=a&number=1000", 422),
        ("/api/run/download?id=a&form=exe", 422),
        ("/api/campaign?id=a/plan.json", 404),
        ("/api/run/what-if?id=a&dead=W0_0", 422),
        ("/../../etc/passwd", 404),
        ("/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/page/../web/serve.py", 404),
        ("/uplot/../../__init__.py", 404),
        ("/.git/config", 404),
        ("/" + "x" * 5000, 414),
        ("/api/run?id=" + "x" * 5000, 414),
    ],
)
def test_a_bad_request_gets_a_sentence_and_no_file(client, path, status):
    answer = client.get(path)
    assert answer.status_code == status
    assert "root:" not in answer.text


def test_every_answer_has_the_headers_of_security(client):
    for path in ("/", "/api/runs", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example:8265", "evil.example", "127.0.0.1:80", "127.0.0.1", "localhost:8265.evil.example", ""]
)
def test_a_name_of_another_site_that_points_here_is_refused(client, host):
    answer = client.get("/api/runs", headers={"Host": host})
    assert answer.status_code == 421
    assert "runs" not in answer.text


def test_a_page_of_another_site_cannot_ask(client):
    for site in ("cross-site", "same-site"):
        assert client.get("/api/runs", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}).status_code == 403
        assert client.get("/api/runs", headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}).status_code == 403
    for origin in ("http://evil.example", "http://127.0.0.1:9999", "null", f"https://{HOST}"):
        assert client.get("/api/runs", headers={"Origin": origin}).status_code == 403
    # A link in a mail opens the page.
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_without_its_token_nothing_is_answered(tmp_path):
    write_run(tmp_path / "a")
    client = make_client(tmp_path, token="secret")
    for path in ("/", "/api/runs", "/api/run/stream?id=a", "/?token=wrong", "/?token=", "/api/runs?token=secret"):
        assert client.get(path).status_code == 401, path
    for cookie in ("recycle-8265=wrong", "recycle-8266=secret", "recycle-8265=", "=;;", "recycle-8265=secre\u0301t"):
        assert client.get("/api/runs", headers={"Cookie": cookie.encode()}).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_printed_address_leaves_a_cookie_and_no_token_in_the_address(tmp_path):
    write_run(tmp_path / "a")
    client = make_client(tmp_path, token="secret")
    answer = client.get("/?token=secret")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert client.get("/api/runs").status_code == 200


def test_an_injection_reaches_the_launcher_with_the_process_of_the_record(tmp_path):
    write_run(tmp_path / "a", hostile_events())
    injector = RecordingInjector()
    client = make_client(tmp_path, "secret", injector)
    assert client.get("/api/session", headers=OURS).json()["injection_token"] == "secret"
    answer = client.post("/api/run/inject?id=a", headers=OURS, json={"action": "kill", "worker": "W0_0"})
    assert (answer.status_code, answer.json()) == (200, {"done": "kill W0_0"})
    assert [(one.action, str(one.worker), one.pid) for one in injector.asked] == [("kill", "W0_0", 4711)]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": None}, {"action": "kill", "worker": "W0_0"}, 403),
        ({"Origin": "http://evil.example"}, {"action": "kill", "worker": "W0_0"}, 403),
        ({"X-Recycle-Token": None}, {"action": "kill", "worker": "W0_0"}, 403),
        ({"X-Recycle-Token": "wrong"}, {"action": "kill", "worker": "W0_0"}, 403),
        ({"Authorization": None}, {"action": "kill", "worker": "W0_0"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, {"action": "kill", "worker": "W0_0"}, 403),
        ({}, {"action": "explode", "worker": "W0_0"}, 422),
        ({}, {"action": ["kill"], "worker": "W0_0"}, 422),
        ({}, {"action": "kill", "worker": "W9_9"}, 422),
        ({}, {"action": "kill", "worker": "W0_0; rm -rf /"}, 422),
        ({}, {"action": "kill", "worker": 7}, 422),
        ({}, ["kill"], 422),
        ({}, {"action": "start", "worker": "W0_0"}, 422),
        ({}, {"action": "kill", "worker": "x" * 5000}, 413),
    ],
)
def test_an_injection_that_is_not_ours_or_not_right_is_refused(tmp_path, headers, body, status):
    write_run(tmp_path / "a")
    injector = RecordingInjector()
    client = make_client(tmp_path, "secret", injector)
    sent = {name: value for name, value in {**OURS, **headers}.items() if value is not None}
    assert client.post("/api/run/inject?id=a", headers=sent, json=body).status_code == status
    assert injector.asked == []


def test_without_leave_there_is_no_injection_and_no_token(client):
    session = client.get("/api/session").json()
    assert (session["actions"], session["injection_token"]) == ([], "")
    answer = client.post("/api/run/inject?id=a", headers={"Origin": f"http://{HOST}"}, json={"action": "kill", "worker": "W0_0"})
    assert answer.status_code == 403


def test_a_body_of_unknown_length_is_refused(client):
    answer = client.post("/api/run/inject?id=a", headers={"Origin": f"http://{HOST}"}, content=iter([b"x"]))
    assert answer.status_code == 413


def test_html_of_a_record_stays_text(tmp_path):
    write_run(tmp_path / "a", hostile_events())
    client = make_client(tmp_path)
    for path in ("/api/run?id=a", "/api/run/events?id=a", "/api/runs"):
        answer = client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/run?id=a").json()["name"] == HTML


def test_numbers_that_json_does_not_have_are_damage_or_left_out(tmp_path):
    writer = growing(tmp_path / "a")
    writer.write(Stepped(0, 9_000_000, float("nan"), 1.0, 1.0), SpeedChanged(9_000_001, "W1_1", 0.5, 1))
    writer.close()
    record = tmp_path / "a" / "record.jsonl"
    record.write_bytes(record.read_bytes().replace(b'"speed":0.5', b'"speed":1e999'))
    results = '{"experiment": "x", "assumptions": [], "results": {"a": {"b": [NaN, 2, 1e999], "c": [1, 2, 3]}}}'
    (tmp_path / "result.json").write_text(results)
    client = make_client(tmp_path)
    assert client.get("/api/run?id=a").json()["loss"] is None
    events = client.get("/api/run/events?id=a").json()["events"]
    assert [(one["event"], one.get("loss", "")) for one in events] == [("damaged", ""), ("step", None), ("started", "")]
    rows = client.get("/api/campaign?id=result.json").json()["rows"]
    assert [None, 2, None] in [row[-3:] for row in rows]
    assert client.get("/api/run/download?id=a&form=csv").status_code == 200


def test_ops_of_an_unknown_kind_do_not_hide_an_iteration(tmp_path):
    events = [*recovery_record(), OpRan(12, "W0_0", "0X0@0", 1, 9), OpRan(12, "W0_0", "no op", 2, 5)]
    write_run(tmp_path / "a", events)
    answer = make_client(tmp_path).get("/api/run/iteration?id=a&number=12")
    assert answer.status_code == 200
    (lane,) = (one for one in answer.json()["lanes"] if one["worker"] == "W0_0")
    names = lane["executed"]["ops"].split(" ")
    assert len(names) == len(lane["executed"]["starts"])
    assert {"0X0@0", "no\u00a0op"} <= set(names)


def test_nothing_of_the_page_comes_from_another_host():
    texts = [path.read_text(encoding="utf-8") for path in PAGE.rglob("*") if path.suffix in (".html", ".js", ".css")]
    assert texts
    for text in texts:
        assert "//cdn" not in text
        assert 'src="http' not in text
        assert "@import" not in text


def test_our_scripts_make_no_element_of_a_text():
    makers = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "createContextualFragment",
        "DOMParser",
        "srcdoc",
        "eval(",
    )
    ours = {path.name: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}
    assert {"charts.js", "dom.js", "lists.js", "views.js"} <= ours.keys()
    assert [(name, maker) for name, text in ours.items() for maker in makers if maker in text] == []


def test_where_a_token_is_needed():
    assert not ServerOptions().needs_token
    assert ServerOptions(allows_injection=True).needs_token
    assert ServerOptions("0.0.0.0").needs_token
    assert ServerOptions("10.0.0.1").needs_token
    assert ServerOptions(names=("pages.example",)).needs_token
    assert page_url("::1", 80, "t") == "http://[::1]:80/?token=t"


def test_a_port_in_use_is_named():
    with listening("127.0.0.1", 0) as first, pytest.raises(PortInUse, match="choose another one for the page"):
        listening("127.0.0.1", first.getsockname()[1])


@pytest.fixture
def served(tmp_path):
    """A real server on loopback, for a run that grows: its port and the writer of its record."""
    writer = growing(tmp_path / "a")
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = http_server(PageServer(RunList(tmp_path), Access.at(port, ("127.0.0.1",))))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield port, writer
        server.should_exit = server.force_exit = True
        thread.join(10)


def next_message(answer, deadline_s):
    while time.monotonic() < deadline_s:
        line = answer.readline()
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("nothing was pushed")


def test_changes_are_pushed_to_every_page(served):
    port, writer = served
    connections = [HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(5)]
    answers = []
    for connection in connections:
        connection.request("GET", "/api/run/stream?id=a")
        answers.append(connection.getresponse())
    deadline_s = time.monotonic() + 20
    first = next_message(answers[0], deadline_s)
    assert first["workers"]["W1_1"] == {"state": "starting"}
    writer.write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0), Changed(10_000_000, "W1_1", False, 3))
    for answer in answers:
        message = next_message(answer, deadline_s)
        while message["version"] < 3:
            message = next_message(answer, deadline_s)
        assert message["workers"]["W1_1"] == {"state": "dead"}
        assert message["points"]["loss"] == [[9.0, 4.5]]
        assert message["waiting"] == "W1_1 left: the others stop, plan and regroup"
    for connection in connections:
        connection.close()


def test_steps_wait_for_each_other_where_many_pages_are_open_and_a_death_waits_for_nothing(served, monkeypatch):
    monkeypatch.setattr(page_stream, "_STEPS_S_A_PAGE", 1000.0)
    monkeypatch.setattr(page_stream, "_LONGEST_STEPS_S", 1000.0)
    monkeypatch.setattr(page_stream, "_BEAT_S", 0.3)
    port, writer = served
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/api/run/stream?id=a")
        answer, deadline_s = connection.getresponse(), time.monotonic() + 20
        next_message(answer, deadline_s)
        writer.write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0))
        next_message(answer, deadline_s)  # the first step is news: the job waits for nothing any more
        writer.write(Stepped(1, 9_100_000, 4.4, 1.0, 1.0))
        while (line := answer.readline()) != b": still here\n":
            assert not line.startswith(b"data: ")
            assert time.monotonic() < deadline_s
        writer.write(Stepped(2, 9_200_000, 4.3, 1.0, 1.0), Changed(10_000_000, "W1_1", False, 3))
        message = next_message(answer, deadline_s)
    assert message["workers"]["W1_1"] == {"state": "dead"}
    assert message["points"]["loss"] == [[9.1, 4.4], [9.2, 4.3]]


def test_a_page_that_does_not_read_misses_changes_and_costs_no_more_with_each(tmp_path, monkeypatch):
    writer, run = growing(tmp_path), RunReader(tmp_path / "record.jsonl")
    monkeypatch.setattr(page_stream, "_LOOK_S", 0.01)
    stream = page_stream.PageStream(run, asyncio.Lock(), 5)

    async def follow():
        stuck, reading = stream.listen(), stream.listen()
        await anext(stuck)  # it never asks for more
        assert await anext(reading) == b"retry: 1000\n\n"
        for number in range(30):
            writer.write(Changed(10_000_000 + number, "W1_1", bool(number % 2), 3))
            message = json.loads((await asyncio.wait_for(anext(reading), 20)).removeprefix(b"data: "))
            while message["version"] < number + 2:
                message = json.loads((await asyncio.wait_for(anext(reading), 20)).removeprefix(b"data: "))
            assert max(queue.qsize() for queue in stream._pages) <= 1
        waiting = await anext(stuck)
        assert json.loads(waiting.removeprefix(b"data: "))["version"] >= 30  # the newest one only
        await stuck.aclose()
        await reading.aclose()
        assert not stream.has_pages

    asyncio.run(follow())


def test_a_long_file_that_is_no_record_is_not_read_without_end(tmp_path, monkeypatch):
    (tmp_path / "record.jsonl").write_bytes(b"x" * (2 << 20))
    run, looks = RunReader(tmp_path / "record.jsonl"), []
    read = run.read
    monkeypatch.setattr(run, "read", lambda most_bytes: (looks.append(most_bytes), read(most_bytes)))
    monkeypatch.setattr(page_stream, "_LOOK_S", 0.1)
    stream = page_stream.PageStream(run, asyncio.Lock(), 5)

    async def follow():
        page = stream.listen()
        await anext(page)
        await asyncio.sleep(1)
        await page.aclose()

    asyncio.run(follow())
    assert run.share_read < 1
    assert 1 <= len(looks) <= 15


def test_a_head_that_is_too_long_is_refused(served):
    port, _ = served
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.putrequest("GET", "/api/runs")
        connection.putheader("X-Long", "x" * 100_000)
        connection.endheaders()
        assert connection.getresponse().status in (400, 431)
