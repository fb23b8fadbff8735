"""The application: views of runs as JSON, changes as server-sent events, downloads, and the files of the page."""

import asyncio
import gzip
import hmac
import math
import mimetypes
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.live_injection import LIVE_ACTIONS
from recycle.core.release import RELEASE
from recycle.dashboard.views.campaigns import campaign
from recycle.dashboard.views.event_list import events_as_csv, events_as_lines, events_of_recovery, find_events, trace_for_perfetto
from recycle.dashboard.views.overview import overview, series
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.views.what_if import MakeSource, read_workers, what_if
from recycle.dashboard.views.worker_load import worker_load
from recycle.dashboard.web.guard import MOST_BODY_BYTES, Access, Guard
from recycle.dashboard.web.injection import Injector, read_request
from recycle.dashboard.web.json_body import json_body
from recycle.dashboard.web.open_runs import OpenRuns
from recycle.dashboard.web.page_stream import TooManyPages
from recycle.dashboard.web.planners import Planners

PAGE = Path(__file__).parent.parent / "page"
_COMPRESSED_FROM_BYTES = 4096
_PLANNING_S, _LONGEST_BODY_S = 60.0, 10.0


@dataclass(frozen=True)
class PageServer:
    """What the server answers from: the runs, who may ask, who plans, and who carries out failures on purpose."""

    runs: RunList
    access: Access
    make_source: MakeSource | None = None
    planners: Planners | None = None
    injector: Injector | None = None

    def application(self) -> Guard:
        """The whole application, with its guard."""
        answers = _Answers(self, OpenRuns(self.runs), _load_page())
        routes = [
            Route("/api/session", answers.session),
            Route("/api/runs", answers.run_list),
            Route("/api/run", answers.overview),
            Route("/api/run/stream", answers.stream),
            Route("/api/run/series", answers.series),
            Route("/api/run/iteration", answers.iteration),
            Route("/api/run/events", answers.events),
            Route("/api/run/load", answers.load),
            Route("/api/run/recovery", answers.recovery),
            Route("/api/run/download", answers.download),
            Route("/api/run/what-if", answers.what_if),
            Route("/api/run/inject", answers.inject, methods=["POST"]),
            Route("/api/campaign", answers.campaign),
            Route("/{name:path}", answers.page),
        ]
        handlers: Mapping[Any, Any] = {UserError: _explain, OSError: _explain, TooManyPages: _busy}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self.access)


def _load_page() -> dict[str, tuple[bytes, str]]:
    """The files of the page by their names, with their types: nothing else is ever read for a request."""
    found = {}
    for path in PAGE.rglob("*"):
        if path.is_file():
            kind = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0] or "text/plain"
            found[path.relative_to(PAGE).as_posix()] = (path.read_bytes(), f"{kind}; charset=utf-8")
    return found


async def _explain(request: Request, problem: Exception) -> Response:
    text = str(problem) if isinstance(problem, UserError) else "a file of this run cannot be read"
    return _json(request, {"problem": text}, 404 if "there is no" in text else 422)


async def _busy(request: Request, problem: Exception) -> Response:
    return PlainTextResponse("too many pages are open: close some", 503)


def _json(request: Request, data: Any, status: int = 200) -> Response:
    body, headers = json_body(data), {}
    if len(body) >= _COMPRESSED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = gzip.compress(body, 1), {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(body, status, headers, "application/json")


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > 18:
        raise UserError(f"{name} is {text[:40]!r}, but it must be a whole number")
    return int(text)


class _Answers:
    """The answers to requests. What may take long runs in a thread, and what plans in a process."""

    def __init__(self, server: PageServer, runs: OpenRuns, page: Mapping[str, tuple[bytes, str]]) -> None:
        self._server, self._runs, self._page = server, runs, page
        self._is_planning = asyncio.Lock()

    async def session(self, request: Request) -> Response:
        access = self._server.access
        allows = access.allows_injection and self._server.injector is not None
        return _json(
            request,
            {
                "release": RELEASE,
                "actions": list(LIVE_ACTIONS) if allows else [],
                "injection_token": access.token if allows else "",
                "can_plan": self._server.make_source is not None,
            },
        )

    async def run_list(self, request: Request) -> Response:
        return _json(request, await asyncio.to_thread(self._server.runs.to_json))

    async def overview(self, request: Request) -> Response:
        async with self._runs.opened(self._id(request)) as run:
            return _json(request, await asyncio.to_thread(overview, run))

    async def series(self, request: Request) -> Response:
        span = _number(request, "from_us", 0), _number(request, "to_us", 1 << 62)
        async with self._runs.opened(self._id(request)) as run:
            return _json(request, await asyncio.to_thread(series, run, span))

    async def iteration(self, request: Request) -> Response:
        number, first, last = (_number(request, name, default) for name, default in (("number", 0), ("first", 0), ("last", 64)))
        if first < 0 or last < first:
            raise UserError(f"lanes {first} to {last} are no lanes: begin with 0")
        async with self._runs.opened(self._id(request)) as run:
            ops = await asyncio.to_thread(self._runs.iteration, run, number)
            lanes = await asyncio.to_thread(ops.lanes, first, last)
            return _json(request, {**(await asyncio.to_thread(ops.about)), "first": first, "lanes": lanes})

    async def events(self, request: Request) -> Response:
        query = request.query_params
        before = _number(request, "before", -1)
        asked = (
            query.get("text", "")[:200],
            query.get("kind", "")[:40],
            None if before < 0 else before,
            _number(request, "limit", 100),
        )
        async with self._runs.opened(self._id(request)) as run:
            return _json(request, await asyncio.to_thread(find_events, run, *asked))

    async def recovery(self, request: Request) -> Response:
        number = _number(request, "number", 0)
        async with self._runs.opened(self._id(request)) as run:
            return _json(request, await asyncio.to_thread(events_of_recovery, run, number))

    async def load(self, request: Request) -> Response:
        worker = Worker.parse(request.query_params.get("worker", "")[:40])
        async with self._runs.opened(self._id(request)) as run:
            plan = await asyncio.to_thread(run.plan_of, run.state.facts.num_done or 0)
        return _json(request, await asyncio.to_thread(worker_load, plan, worker))

    async def download(self, request: Request) -> Response:
        form, run_id = request.query_params.get("form", "json"), self._id(request)
        name = "".join(letter if letter.isalnum() else "-" for letter in run_id).strip("-") or "run"
        async with self._runs.opened(run_id) as run:
            if form == "json":
                lines = events_as_lines(run)
                first = await asyncio.to_thread(next, lines)  # what is wrong with the file is said before the answer begins
                headers = {"Content-Disposition": f'attachment; filename="{name}.jsonl"'}
                return StreamingResponse(chain([first], lines), headers=headers, media_type="application/x-ndjson")
            if form == "csv":
                body = await asyncio.to_thread(lambda: b"".join(events_as_csv(run)))
                return _attachment(body, f"{name}.csv", "text/csv; charset=utf-8")
            if form == "perfetto":
                number = _number(request, "iteration", (run.op_ranges.bounds or (0, 0))[1])
                trace = await asyncio.to_thread(trace_for_perfetto, run, number)
                return _attachment(trace.encode(), f"{name}-iteration-{number}.json", "application/json")
        raise UserError(f"{form[:40]!r} is no form of download: it is json, csv or perfetto")

    async def what_if(self, request: Request) -> Response:
        server, dead = self._server, read_workers(request.query_params.get("dead", ""))
        if server.make_source is None or server.planners is None:
            raise UserError("this server cannot plan")
        async with self._runs.opened(self._id(request)) as run:
            bounds = run.op_ranges.bounds
            today, folder = run.plan_of(bounds[1] if bounds else 0), run.record.parent
            slow = run.state.facts.speeds if run.shape is not None else {}
            speeds = tuple(
                sorted((Worker.parse(name), speed) for name, speed in slow.items() if speed != 1 and 0 < speed < math.inf)
            )
        if self._is_planning.locked():
            return _json(request, {"problem": "another plan is being made: ask again in a moment"}, 429)
        async with self._is_planning:
            ask = partial(what_if, server.make_source, folder, today, dead, speeds)
            try:
                answer = await server.planners.ask(ask, _PLANNING_S)
            except TimeoutError:
                raise UserError(f"no plan was found in {_PLANNING_S:.0f} s") from None
            except BrokenProcessPool:
                raise UserError("the planner ended: look at the machine's memory") from None
        return _json(request, answer)

    async def inject(self, request: Request) -> Response:
        server = self._server
        if not server.access.allows_injection or server.injector is None:
            return _json(request, {"problem": "this server allows no injection: start it with --allow-injection"}, 403)
        if not hmac.compare_digest(request.headers.get("x-recycle-token", "").encode(), server.access.token.encode()):
            return _json(request, {"problem": "the token is missing or wrong: load the page again"}, 403)
        try:
            asked = read_request(await asyncio.wait_for(_body(request), _LONGEST_BODY_S))
        except TimeoutError:
            return _json(request, {"problem": "the request did not come to its end"}, 408)
        async with self._runs.opened(self._id(request)) as run:
            if run.shape is None or asked.worker not in run.shape:
                raise UserError(f"{asked.worker} is not a worker of this run")
            pid = process_id(run.state.processes.get(str(asked.worker), ""))
        done = await asyncio.to_thread(server.injector.inject, type(asked)(asked.action, asked.worker, pid))
        return _json(request, {"done": done})

    async def campaign(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._server.runs.campaign, self._id(request))
        return _json(request, await asyncio.to_thread(campaign, path, self._server.runs.folder))

    async def stream(self, request: Request) -> Response:
        stream = self._runs.stream(self._id(request))
        if stream.is_full:
            raise TooManyPages
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(stream.listen(), media_type="text/event-stream", headers=headers)

    async def page(self, request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        if name not in self._page:
            return PlainTextResponse("there is no such page", 404)
        body, kind = self._page[name]
        return Response(body, media_type=kind, headers={"Cache-Control": "no-cache"})

    def _id(self, request: Request) -> str:
        return request.query_params.get("id", ".")


async def _body(request: Request) -> bytes:
    """The body of a request; raises UserError if it is longer than its head says."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise UserError("this request is too long")
    return body


def _attachment(body: bytes, name: str, kind: str) -> Response:
    return Response(body, headers={"Content-Disposition": f'attachment; filename="{name}"'}, media_type=kind)


def process_id(text: str) -> int:
    """The process id in a text such as `host a, pid 4711`; 0 without one."""
    _, _, number = text.rpartition("pid ")
    return int(number) if number.isdigit() else 0
