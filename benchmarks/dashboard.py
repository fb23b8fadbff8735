"""The benchmark of the page: how fast it shows a day of 2,048 workers, and what open pages cost a run.

make bench                                      the tables, printed
python benchmarks/dashboard.py --only scale     records of a day with 2,048 workers; needs Chromium (apt-get install chromium)
python benchmarks/dashboard.py --only pages     iterations of a run with 50 pages open and with none, in turns
python benchmarks/dashboard.py --save           also writes docs/benchmarks/<date>-dashboard.md
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import scipy.stats
from dashboard_pages import opened_browsers, opened_pages
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

import recycle
from recycle.core.events.op_columns import OpColumns
from recycle.core.events.record import Event, OpsRan, Placed, Spell, Started, Stepped
from recycle.core.events.record_file import read_record, write_record

MIB = 2**20
MOST_OPEN_S, MOST_FRAME_MS, MOST_MIB, MOST_COST = 3.0, 50.0, 1000, 0.02
DAY_S, NUM_PAGES, NUM_BROWSERS, LEAST_STEPS = 86_400, 50, 5, 10
# Many short turns: the speed of a shared machine changes within seconds, and neighbouring turns see the same of it.
NUM_ROUNDS, TURN_S = 30, 4.0
SIMULATE = (
    "simulate --model gpt-145.6b --gpu h100 --tensor-parallel 8 --pipelines 128 --stages 16 --microbatches 32 "
    "--failures llama3,times=3 --hours 24 --systems recycle"
)
TRAIN = "train --pipelines 2 --stages 2 --microbatches 4 --layers 4 --width 64 --context 64 --no-follow-speeds --steps 1000000"


def simulated_day(folder: Path, is_quick: bool) -> str:
    """The record of a simulated day of 2,048 workers; return its id on the page."""
    command = SIMULATE.replace("128", "8").replace("--hours 24", "--hours 2") if is_quick else SIMULATE
    subprocess.run([sys.executable, "-m", "recycle", *command.split(), "--records", str(folder)], check=True, capture_output=True)
    return "recycle.jsonl"


def day_of_steps(folder: Path, is_quick: bool) -> str:
    """A run of 2,048 workers with a step every second for a day, of which ten iterations have their ops, by a replay."""
    pipelines, stages, num_steps = (8, 8, 2000) if is_quick else (32, 64, DAY_S)
    plan = recycle.solve(recycle.problem(pipelines, stages, 32, fail="W1_2", costs=(1, 1, 1)), "greedy", 5.0)
    played = recycle.replay(plan, recycle.Conditions(num_iterations=3, jitter=0.1, eager=True))
    plan.save(folder / "run" / "plan.json")
    write_record(folder / "run" / "record.jsonl", _events(plan, played, num_steps))
    return "run"


def _events(plan: Any, played: Any, num_steps: int) -> Iterator[Event]:
    yield Started("train", "a day of steps")
    names, num = [str(row.worker) for row in plan.rows], len(plan.rows)
    for number, name in enumerate(names):
        yield Placed(0, name, f"host-{number // 8}", 1000 + number)
    packed = []
    for name, ops in groupby(played.events([1]), key=lambda op: op.worker):
        packed.append((name, OpColumns.of((op.op, op.start_us, op.end_us, False) for op in ops)))
    for step in range(num_steps):
        at_us = (step + 1) * 1_000_000
        if step % (num_steps // 10) == 0:
            for name, columns in packed:
                moved = columns.shifted(at_us - 1_000_000)
                yield OpsRan(step, name, moved.start_us, moved.end_us, moved.num_ops, moved.text)
        yield Spell(at_us - 1_000_000, at_us, "train", samples=2048, busy_us=800_000, num_live=num)
        yield Stepped(step, at_us, 5.0 / (1 + step / 5000) + 0.02 * ((step * 7919) % 13), 1.0, 1.0, 950_000, plan.num_ops)


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, int]]:
    """A server for a folder; yields its address and its process id."""
    command = [sys.executable, "-m", "recycle", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0], process.pid
        finally:
            process.terminate()


def scale_row(make: Any, label: str, is_quick: bool) -> Row:
    """Open the record as a user does, zoom and scroll, and measure."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        run_id, folder = make(Path(name), is_quick), Path(name)
        size = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with _served(folder) as (address, pid):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(f"{address}#/runs")
            page.wait_for_selector("h1")
            began_s = time.monotonic()
            page.goto(f"{address}#/run/{run_id}/overview")
            page.wait_for_selector(".chart:not([hidden]) canvas")
            page.wait_for_selector("button.worker")
            open_s = time.monotonic() - began_s
            _wait(page, "window.recycle.run().data.share_read === 1")
            whole_s = time.monotonic() - began_s
            frames_ms = _frames_ms(page, "document.querySelector('.grid-box').scrollTop = (t * 7) % 2000")
            iteration_s = 0.0
            if make is day_of_steps:
                began_s = time.monotonic()
                page.goto(f"{address}#/run/{run_id}/iteration/0")
                _wait(page, "window.recycle.view()?.timeline?.lanes.size >= 64")
                iteration_s = time.monotonic() - began_s
                frames_ms += _frames_ms(
                    page,
                    "const w = window.recycle.view().timeline; w.zoom(t % 2000 < 1000 ? 0.97 : 1.03); w.scroller.scrollTop = t",
                )
            server_mib, browser_mib = _pss_mib(pid), sum(map(_pss_mib, _children(os.getpid()))) - _pss_mib(pid)
        browser.close()
    frames_ms.sort()
    p95_ms = frames_ms[int(0.95 * (len(frames_ms) - 1))]
    met = whole_s < MOST_OPEN_S and iteration_s < MOST_OPEN_S and p95_ms < MOST_FRAME_MS and server_mib + browser_mib < MOST_MIB
    return (
        label,
        f"{size / MIB:.1f} MiB",
        f"{open_s:.2f} s",
        f"{whole_s:.2f} s",
        f"{iteration_s:.2f} s" if iteration_s else "–",
        f"{statistics.median(frames_ms):.0f} ms",
        f"{p95_ms:.0f} ms",
        f"{frames_ms[-1]:.0f} ms",
        f"{server_mib:.0f} MiB",
        f"{browser_mib:.0f} MiB",
        UNJUDGED if is_quick else YES if met else NO,
    )


def _frames_ms(page: Any, act: str) -> list[float]:
    """The times between frames while a script acts in each of them for three seconds; `t` counts milliseconds."""
    script = f"""() => new Promise((done) => {{
        const began = performance.now(), frames = [];
        let last = began;
        const step = (now) => {{
            frames.push(now - last); last = now;
            const t = now - began;
            if (t > 3000) {{ done(frames.slice(1)); return; }}
            {act};
            requestAnimationFrame(step);
        }};
        requestAnimationFrame(step);
    }})"""
    return [float(frame) for frame in page.evaluate(script)]


def _wait(page: Any, expression: str) -> None:
    for _ in range(1200):
        if page.evaluate(f"() => Boolean({expression})"):
            return
        page.wait_for_timeout(25)
    raise RuntimeError(f"the page never came to {expression}")


def _children(pid: int) -> list[int]:
    """All processes that descend from one."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(status.read_text().rpartition(")")[2].split()[1]), []).append(int(status.parent.name))
        except (OSError, ValueError):
            continue
    found, open_ = list[int](), [pid]
    while open_:
        found += (below := parents.get(open_.pop(), []))
        open_ += below
    return found


def _pss_mib(pid: int) -> float:
    """The memory of a process, of shared pages its part."""
    try:
        match = re.search(r"Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0.0
    return int(match[1]) / 1024 if match else 0.0


def pages_row(num_pages: int, num_browsers: int, is_quick: bool) -> Row:
    """Train with the page served, and open and close `num_pages` of it in turns, `num_browsers` of them in Chromium; compare."""
    num_rounds, turn_s = (4, 3.0) if is_quick else (NUM_ROUNDS, TURN_S)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        command = [sys.executable, "-m", "recycle", *TRAIN.split(), "--out", str(out), "--dashboard", "0", "--json-lines"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
            try:
                assert run.stderr is not None
                address = next(found[0] for line in run.stderr if (found := re.search(r"http://[\w.:]+/", line)))
                _drain(run)
                _wait_for_steps(out / "record.jsonl", 20)
                with_pages, without = _turns(address, out / "record.jsonl", (num_pages, num_browsers), num_rounds, turn_s)
            finally:
                run.terminate()
    cost, low, high = _typical([pages / none - 1 for pages, none in zip(with_pages, without, strict=True)])
    # What the same comparison finds where there is nothing to find: neighbouring turns without pages, every second reversed.
    noise = [after / before - 1 if number % 2 else before / after - 1 for number, (before, after) in enumerate(pairwise(without))]
    _, noise_low, noise_high = _typical(noise)
    return (
        f"{num_pages}, {num_browsers} in Chromium" if num_browsers else f"{num_pages}",
        f"{num_rounds} × {turn_s:.0f} s",
        f"{statistics.median(without) / 1000:.1f} ms",
        f"{statistics.median(with_pages) / 1000:.1f} ms",
        f"{100 * cost:+.1f} %",
        f"{100 * low:+.1f} to {100 * high:+.1f} %",
        f"{100 * noise_low:+.1f} to {100 * noise_high:+.1f} %",
        UNJUDGED if is_quick else YES if cost < MOST_COST else NO,
    )


def _typical(shares: list[float]) -> tuple[float, float, float]:
    """The median of rounds, and its 90 % bootstrap interval."""
    found = scipy.stats.bootstrap(
        (shares,), statistics.median, confidence_level=0.9, vectorized=False, method="percentile", n_resamples=2000, rng=1
    )
    return statistics.median(shares), float(found.confidence_interval.low), float(found.confidence_interval.high)


def _drain(run: "subprocess.Popen[str]") -> None:
    assert run.stderr is not None
    threading.Thread(target=run.stderr.read, daemon=True).start()


def _steps(record: Path) -> list[Stepped]:
    return [event for event in read_record(record, is_packed=True) if isinstance(event, Stepped)] if record.exists() else []


def _wait_for_steps(record: Path, num: int) -> None:
    deadline_s = time.monotonic() + 180
    while len(_steps(record)) < num:
        if time.monotonic() > deadline_s:
            raise RuntimeError("the run does not go on")
        time.sleep(0.5)


def _turns(address: str, record: Path, pages: tuple[int, int], num_rounds: int, turn_s: float) -> tuple[list[float], list[float]]:
    """The median iteration time, in µs, with pages and without in each round."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_rounds):
        for is_open in (True, False) if number % 2 else (False, True):
            num, num_browsers = pages if is_open else (0, 0)
            with opened_pages(address, num - num_browsers), opened_browsers(address, num_browsers):
                first = len(_steps(record))
                time.sleep(turn_s)
                _wait_for_steps(record, first + LEAST_STEPS)
                at_us = [step.at_us for step in _steps(record)[first:]]
            found[is_open].append(statistics.median(after - before for before, after in pairwise(at_us)))
    return found[True], found[False]


def _sections(name: str, is_quick: bool) -> list[Section]:
    return [_pages_section(is_quick) if name == "pages" else _scale_section(is_quick)]


def _pages_section(is_quick: bool) -> Section:
    about = (
        f"A run of four workers, with its page served; {NUM_PAGES} pages read what is pushed, from another process as from other "
        f"machines, in turns with none. In the second row {NUM_BROWSERS} of them are in Chromium, which also draws. They get "
        "time of this machine that nobody else wants; still, they may cost more than elsewhere. Medians of the turns; the "
        "cost is the median ratio of two turns of a round, with its 90 % bootstrap interval. The column *noise* is that interval "
        f"for turns without pages, each beside the next one without. Asked: below {MOST_COST:.0%}."
    )
    header = ("pages", "rounds", "iteration without", "iteration with", "cost", "90 %", "noise", "met")
    cases = tuple(
        Case(f"{NUM_PAGES} pages, {num} in Chromium", partial(pages_row, NUM_PAGES, num, is_quick)) for num in (0, NUM_BROWSERS)
    )
    return Section("pages", "What open pages cost a run", about, header, cases)


def _scale_section(is_quick: bool) -> Section:
    made = ((simulated_day, "a simulated day, 2,048 workers"), (day_of_steps, "86,400 steps of 2,048 workers, with ops"))
    about = (
        "Chromium, from the click on a run to its grid and first curves, and until the whole record is read and shown; an "
        f"iteration from the click to its lanes; frames while scrolling and zooming. Asked: {MOST_OPEN_S:g} s for each, 95 % of "
        f"frames below {MOST_FRAME_MS:g} ms, {MOST_MIB} MiB for server and browser together."
    )
    header = ("record", "size", "first picture", "all read", "iteration", "frame", "95 %", "longest", "server", "browser", "met")
    cases = tuple(Case(label, partial(scale_row, make, label, is_quick)) for make, label in made)
    return Section("scale", "A day of 2,048 workers on the page", about, header, cases)


SCRIPT = Script(
    "dashboard",
    "Measure how fast the page shows long records of many workers, and what open pages cost a run.",
    ("scale", "pages"),
    quick="64 workers, two hours, short turns",
    libraries=("starlette", "uvicorn", "playwright"),
    width=170,
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
