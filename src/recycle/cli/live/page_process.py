"""The page of a run that goes on: the flags that ask for it, and the process of its own that serves it."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any

from recycle.core.errors import UserError

DEFAULT_PORT = 8265
_END_S, _PORT_FREED_S = 3.0, 1.0
# Training waits for the page no longer than this, however busy the machine is.
START_S = 60.0


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A page that is asked for: its port and address, the file of its token, whether it may ask for failures, and its names."""

    port: int
    host: str = "127.0.0.1"
    token_file: Path | None = None
    allows_injection: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPage:
    """A page that is served: a sentence that says where, and the pipe over which it asks for failures, if it may."""

    sentence: str
    injections: "Connection[Any, Any] | None" = None


def add_page_arguments(parser: argparse.ArgumentParser, may_inject: bool) -> None:
    """Add the flags of the page; failures on purpose only where the workers run on this machine."""
    group = parser.add_argument_group("page in the browser (needs --out; see 'recycle dashboard --help')")
    about = f"serve a page about this run while it goes on ({DEFAULT_PORT}; 0 is any free port)"
    group.add_argument("--dashboard", nargs="?", type=int, const=DEFAULT_PORT, metavar="PORT", help=about)
    about = "the address on which the page is served; 0.0.0.0 is every one of this machine (127.0.0.1)"
    group.add_argument("--dashboard-host", default="127.0.0.1", metavar="ADDRESS", help=about)
    about = "a name by which browsers reach this page, as that of a proxy with TLS; may be given several times"
    group.add_argument("--dashboard-name", action="append", default=[], metavar="NAME", help=about)
    about = "what a browser must know to read the page; made if there is no such file (if needed: beside the folder of --out)"
    group.add_argument("--dashboard-token-file", type=Path, metavar="FILE", help=about)
    if may_inject:
        about = "let whoever opens the page with its token kill, hang, slow and start workers"
        group.add_argument("--allow-injection", action="store_true", help=about)


def refuse_page_without_folder(args: argparse.Namespace, out: Path | None) -> None:
    """Raise if a page is asked for that has nothing to show, or failures without a page."""
    if args.dashboard is None and getattr(args, "allow_injection", False):
        raise UserError("--allow-injection is for the page of a run: give --dashboard, too")
    if args.dashboard is not None and out is None:
        raise UserError("--dashboard shows what a run records: name a folder with --out")


@contextmanager
def served_page(args: argparse.Namespace, out: Path | None) -> Iterator[RunPage | None]:
    """The page that the arguments ask for, served by a process of its own until the block ends; None if they ask for none."""
    refuse_page_without_folder(args, out)
    if args.dashboard is None or out is None:
        yield None
        return
    token, allows = args.dashboard_token_file, getattr(args, "allow_injection", False)
    request = PageRequest(args.dashboard, args.dashboard_host, token, allows, tuple(args.dashboard_name))
    with page_of_run(request, out) as page:
        yield page


@contextmanager
def page_of_run(request: PageRequest, out: Path) -> Iterator[RunPage]:
    """The page of the run in `out`, served by a process of its own until the block ends."""
    ours, theirs = Pipe()
    with ours, theirs:
        process, address = _started(request, out, theirs.fileno())
        theirs.close()
        try:
            yield RunPage(f"the page of this run: {address}", ours if request.allows_injection else None)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
                process.wait()


def _started(request: PageRequest, out: Path, pipe: int) -> tuple["subprocess.Popen[str]", str]:
    """The server and its address. The page of a coordinator that was killed holds the port a moment longer than it."""
    for is_last in (False, True):
        process = _start(request, out, pipe)
        try:
            return process, _first_line(process)
        except UserError as problem:
            process.wait()
            if is_last or "is in use" not in str(problem):
                raise
            time.sleep(_PORT_FREED_S)
    raise AssertionError("the last try returns or raises")


def _start(request: PageRequest, out: Path, pipe: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "recycle", "dashboard", str(out), "--run-pipe", str(pipe)]
    command += ["--port", str(request.port), "--host", request.host]
    command += ["--token-file", str(request.token_file)] if request.token_file is not None else []
    command += [part for name in request.names for part in ("--name", name)]
    command += ["--allow-injection"] if request.allows_injection else []
    # In a group of its own: Ctrl-C is for the run, and the page shows its end.
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **streams, pass_fds=(pipe,), text=True, process_group=0)


def _first_line(process: "subprocess.Popen[str]") -> str:
    """The address that the server prints; raises UserError with its own sentence if it ends instead, or is too slow."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = Timer(START_S, process.kill)
    deadline.start()
    try:
        line = process.stdout.readline().strip()
    finally:
        deadline.cancel()
    if line:
        return line
    if process.wait() == -signal.SIGKILL:
        raise UserError(f"the page was not served within {START_S:g} s: train without --dashboard, and open it afterwards")
    problem = process.stderr.read().strip().splitlines()
    raise UserError(problem[-1].removeprefix("recycle dashboard: ") if problem else "the page could not be served")
