"""A real browser for tests of the page: Debian's Chromium, driven by Playwright, and a server in a thread of the test."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from recycle.core.plans.plan_source import PlanFolder
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.views.what_if import MakeSource
from recycle.dashboard.web.guard import Access
from recycle.dashboard.web.planners import Planners
from recycle.dashboard.web.routes import PageServer
from recycle.dashboard.web.serve import http_server, listening

AXE = Path(__file__).parent / "axe" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 780}


@contextmanager
def serving(root: Path, make_source: MakeSource | None = None, port: int = 0, token: str = "") -> Iterator[str]:
    """Serve the runs under a folder; yields the address."""
    with listening("127.0.0.1", port) as listener, ThreadPoolExecutor(1) as threads:
        port = listener.getsockname()[1]
        server = http_server(
            PageServer(RunList(root), Access.at(port, ("127.0.0.1",), token), make_source, Planners(lambda: threads))
        )
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)


def ready_plans(folder, today):
    """The plans that lie in the folder of a run, as a source for what-if."""
    return PlanFolder(folder / "ready")


@contextmanager
def started_browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, address, problems, **options):
    """A new page at an address, in a profile of its own; errors of its scripts are added to `problems`."""
    page = browser.new_context(**{"viewport": WIDE, **options}).new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(address)
    return page


def wait_until(page, expression, seconds=60):
    """Wait until an expression is true in the page."""
    for _ in range(seconds * 20):
        if page.evaluate(f"() => Boolean({expression})"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"the page never came to {expression}")


# Elements that a hostile text became: no image is ours, no script outside of the head, and no bold 'bold'.
FOUND_HTML = (
    "[...document.querySelectorAll('img, body script, b')]"
    ".filter((node) => node.tagName !== 'B' || node.textContent === 'bold').map((node) => node.outerHTML)"
)


def find_violations(page):
    """What axe finds that is serious or critical."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes'][:3]]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
