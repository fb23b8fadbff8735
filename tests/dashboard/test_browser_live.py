"""The page in a real browser while a run goes on: deaths, clicks that kill, hang, slow and start, restarts of all processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from recycle.core.events.record import Changed, Recovered, Stepped
from recycle.core.events.record_file import RecordWriter
from tests.chaos.job_processes import hit, processes_of
from tests.dashboard.browser import WIDE, needs_browser, open_page, serving, wait_until
from tests.dashboard.run_folders import growing
from tests.processes import depends_on_load, wait_for
from tests.warm_processes import WarmProcess

pytestmark = [needs_browser, pytest.mark.timeout(300)]
# A worker's death is to be seen so soon after the click. On a busy machine the page, the browser and all workers wait for a
# processor, so the quickest of a few clicks must keep to it.
MOST_S = 1.0
# On a busy machine a healthy worker may be named slow.
LIVE = "{0}.state-alive, {0}.state-slow"
SHAPE = "--pipelines 2 --stages 2 --microbatches 2 --layers 2 --width 16 --context 16"


def test_a_death_is_on_the_page_within_a_second(browser, problems, tmp_path):
    writer = growing(tmp_path / "a")
    writer.write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0))
    with serving(tmp_path) as address:
        page = open_page(browser, address, problems)
        page.wait_for_selector("button[data-worker=W1_1].state-alive")
        took_s = []
        for number in range(3):
            at_us = (10 + 2 * number) * 1_000_000
            began_s = time.monotonic()
            writer.write(Changed(at_us, "W1_1", False, 3))
            page.wait_for_selector("button[data-worker=W1_1].state-dead")
            took_s.append(time.monotonic() - began_s)
            assert page.inner_text(".status") == "Waiting: W1_1 left: the others stop, plan and regroup"
            writer.write(Recovered(at_us, at_us + 500_000, number + 1, ("W1_1",), True, "it asked to join", 1, num_live=4))
            page.wait_for_selector("button[data-worker=W1_1].state-alive")
        with depends_on_load():
            assert min(took_s) < 1.0, took_s
        page.reload()
        wait_until(page, "window.recycle?.run()?.data?.recoveries.length === 3")
        again = open_page(browser, address, problems)  # as if the browser was closed and opened
        wait_until(again, "window.recycle?.run()?.data?.recoveries.length === 3")


def test_the_page_goes_on_when_coordinator_and_server_are_restarted(browser, problems, tmp_path):
    writer = growing(tmp_path / "a")
    writer.write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0))
    kept = (tmp_path / "a" / "record.jsonl").stat().st_size
    writer.write(Changed(10_000_000, "W1_1", False, 3))
    with serving(tmp_path) as address:
        page = open_page(browser, address, problems)
        page.wait_for_selector("button[data-worker=W1_1].state-dead")
        os.truncate(tmp_path / "a" / "record.jsonl", kept)  # a coordinator that takes over removes what was not finished
        later = RecordWriter(tmp_path / "a" / "record.jsonl", None)
        later.write(Stepped(1, 11_000_000, 4.0, 1.0, 1.0))
        page.wait_for_selector("button[data-worker=W1_1].state-alive")
        wait_until(page, "window.recycle.run().data.steps_done === 2")
    page.wait_for_selector("#notice:has-text('The server does not answer')")
    later.write(Stepped(2, 13_000_000, 3.5, 1.0, 1.0))
    with serving(tmp_path, port=int(address.rstrip("/").rpartition(":")[2])):
        wait_until(page, "window.recycle.run().data.steps_done === 3")
        page.wait_for_selector("#notice", state="hidden")
    problems.clear()  # the browser notes that the server was away


def test_a_page_whose_server_has_a_new_token_says_so_and_goes_on_with_it(browser, problems, tmp_path):
    growing(tmp_path / "a").write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0))
    with serving(tmp_path, token="first") as address:
        page = open_page(browser, f"{address}?token=first", problems)
        wait_until(page, "window.recycle?.run()?.connection === 'live'")
    page.wait_for_selector("#notice:has-text('The server does not answer')")
    with serving(tmp_path, port=int(address.rstrip("/").rpartition(":")[2]), token="second"):
        page.wait_for_selector("#notice:has-text('This page needs the new address')")
        page.context.new_page().goto(f"{address}?token=second")
        page.wait_for_selector("#notice", state="hidden")
    problems.clear()  # the browser notes that the server was away, and every answer of 401


def test_a_run_that_has_not_begun_is_waited_for(browser, problems, tmp_path):
    with serving(tmp_path) as address:
        page = open_page(browser, address, problems, viewport=WIDE)
        page.wait_for_selector("text=there is no such file yet")
        growing(tmp_path).write(Stepped(0, 9_000_000, 4.5, 1.0, 1.0))
        page.wait_for_selector("button.worker.state-alive")
    problems.clear()


def goes_on(page):
    """Wait until the page has shown steps that were done after this call."""
    page.wait_for_selector("text=Training.", timeout=120_000)
    steps = page.evaluate("() => window.recycle.run().data.steps_done")
    wait_until(page, f"window.recycle.run().data.steps_done > {steps} + 20")


def choose(page, worker):
    page.click(f"button[data-worker={worker}]")
    page.wait_for_selector(f"h3:has-text('{worker}')")


def kill_by_click(page, worker):
    """Kill a worker by a click; return the seconds from the click until the page shows it dead, by the clock of the page."""
    choose(page, worker)
    page.evaluate(
        """(worker) => {
        const cell = document.querySelector(`button[data-worker=${worker}]`);
        window.tookS = new Promise((done) => document.querySelector("[data-action=kill]").addEventListener("click", () => {
            const clicked = performance.now();
            const look = () => { if (cell.classList.contains("state-dead")) done((performance.now() - clicked) / 1000); };
            new MutationObserver(look).observe(cell, { attributes: true });
        }, { once: true }));
    }""",
        worker,
    )
    page.click("[data-action=kill]")
    return page.evaluate("() => window.tookS")


def process_of(page, worker):
    return int(page.get_attribute(f"button[data-worker={worker}]", "aria-label").rpartition("pid ")[2])


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def slow_down_by_click(page, worker):
    """Slow a worker down, which then is stopped for half of the time, and let it go on."""
    choose(page, worker)
    pid = process_of(page, worker)
    page.click("[data-action=slow]")
    page.wait_for_selector(".answer:has-text('runs at about half its speed')")
    wait_for(lambda: is_stopped(pid))
    wait_for(lambda: not is_stopped(pid))
    page.click("[data-action=resume]")
    page.wait_for_selector(".answer:has-text('goes on at full speed')")
    goes_on(page)


def hang_by_click(page, worker):
    """Let a worker hang, which is noticed when its lease is over."""
    pid = process_of(page, worker)
    page.click("[data-action=hang]")
    page.wait_for_selector(".answer:has-text('hangs')")
    assert is_stopped(pid)
    page.wait_for_selector(f"button[data-worker={worker}].state-dead", timeout=60_000)
    page.wait_for_selector("text=Training.", timeout=60_000)


def test_clicks_kill_start_slow_and_hang_workers_of_a_real_run_and_the_page_outlives_a_coordinator(browser, problems, tmp_path):
    flags = f"--steps 100000 --no-follow-speeds --lease 10 --json-lines --out {tmp_path}/a --dashboard 0 --allow-injection"
    command = [sys.executable, "-m", "recycle", "train", *SHAPE.split(), *flags.split()]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as run:
        try:
            found = next(line for line in run.stderr if "the page of this run" in line)
            address = f"http{found.split('http')[1].split(chr(34))[0]}"
            threading.Thread(target=run.stderr.read, daemon=True).start()  # so that the pipe is never full
            page = open_page(browser, address, problems)
            page.wait_for_selector("text=Training.", timeout=120_000)
            assert "token" not in page.url
            clicked_s = [kill_by_click(page, "W1_1")]
            page.wait_for_selector(".answer:has-text('was killed')")
            wait_until(page, "window.recycle.run().data.recoveries.length >= 1")
            page.click("text=W1_1 left")
            page.wait_for_selector(".waterfall")
            page.click("a:has-text('as executed')")
            rerouted = "lane.executed.ops.some(op => op.isRerouted)"
            lanes = "window.recycle.view().timeline?.lanes ?? new Map()"
            wait_until(page, f"[...({lanes}).values()].some(lane => lane.worker === 'W0_1' && {rerouted})")
            page.click("nav a:text-is('Overview')")
            page.click("button[data-worker=W1_1]")
            page.click("[data-action=start]")
            page.wait_for_selector(LIVE.format("button[data-worker=W1_1]"), timeout=120_000)
            wait_until(page, "window.recycle.run().data.recoveries.some(one => one.joins)")
            slow_down_by_click(page, "W0_0")
            hang_by_click(page, "W0_0")
            clicked_s.append(kill_by_click(page, "W1_1"))
            with depends_on_load():
                assert min(clicked_s) < MOST_S, clicked_s
            goes_on(page)
            (coordinator,) = (process.pid for process in processes_of(run.pid) if process.kind == "coordinator")
            hit(coordinator, 0.0)
            goes_on(page)
            page.reload()
            goes_on(page)
            page.context.close()
            page = open_page(browser, address, problems)
            goes_on(page)
        finally:
            run.terminate()
            assert run.wait(60) == 143
    page.wait_for_selector("#notice:has-text('The server does not answer')")
    problems.clear()  # the browser notes that the server went away


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]


def is_served(address):
    with suppress(OSError), urlopen(address, timeout=5) as answer:
        return answer.status == 200
    return False


def test_a_coordinator_of_several_machines_is_restarted_while_its_page_is_open(browser, problems, tmp_path):
    """On a busy machine a worker may come back late, and a healthy one may be named slow: none may be given up for that."""
    token, control, address = tmp_path / "token", f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}/"
    flags = f"--listen {control} --token-file {token} --out {tmp_path}/a --json --dashboard {address.split(':')[2].rstrip('/')}"
    coordinator = ("coordinator", *SHAPE.split(), *["--steps", "100000", "--no-follow-speeds", "--lease", "15"], *flags.split())
    processes = [WarmProcess(coordinator)]
    try:
        wait_for(token.exists)
        processes += [WarmProcess(("worker", control, "--token-file", token)) for _ in range(4)]
        wait_for(lambda: is_served(address))
        page = open_page(browser, address, problems)
        goes_on(page)
        os.kill(processes[0].pid, signal.SIGKILL)
        page.wait_for_selector("#notice:has-text('The server does not answer')")
        processes.append(WarmProcess(coordinator))
        page.wait_for_selector("#notice", state="hidden", timeout=120_000)
        goes_on(page)
        assert page.locator(LIVE.format("button.worker")).count() == 4
        page.context.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    problems.clear()  # the browser notes that the server was away
