"""The page in a real browser: runs that have ended, are damaged or hostile; by keyboard, on a phone, on a wall, in the dark."""

from itertools import pairwise

import pytest

from recycle.core.events.record import Changed, Started
from recycle.core.events.record_file import write_record
from tests.dashboard.browser import (
    FOUND_HTML,
    PHONE,
    find_violations,
    needs_browser,
    open_page,
    ready_plans,
    serving,
    wait_until,
)
from tests.dashboard.run_folders import write_run

pytestmark = needs_browser
VIEWS = ("overview", "iteration/6", "recoveries/0", "what-if/W1_1", "events")


def test_the_list_of_runs_leads_to_each_and_compares_them(browser, runs, problems):
    page = open_page(browser, runs, problems)
    page.wait_for_selector("text=✓ ended")
    assert page.locator("tbody tr").count() == 4
    page.check("input[aria-label='compare a']")
    page.check("input[aria-label='compare damaged']")
    page.wait_for_selector(".plot canvas")
    page.click("a:text-is('a')")
    page.wait_for_selector("dd:text-is('14')")
    assert page.locator("button.worker.state-alive").count() == 4
    assert page.locator(".chart canvas").count() == 3
    page.go_back()
    page.click("a:text-is('scale.json')")
    page.wait_for_selector("text=2 of 2 rows")
    page.fill("#filter", "oob")
    page.wait_for_selector("text=1 of 2 rows")


def test_a_recovery_shows_its_waterfall_and_messages(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/recoveries/0", problems)
    page.wait_for_selector(".waterfall")
    assert page.locator(".waterfall tr").all_inner_texts()[0].split() == ["redo", "20.0", "ms"]
    assert "regroup" in page.inner_text(".waterfall")
    assert page.locator(".fall-bar").count() == 4
    inside = "(bar) => bar.getBoundingClientRect().right <= bar.parentElement.getBoundingClientRect().right + 0.5"
    assert page.evaluate(f"() => [...document.querySelectorAll('.fall-bar')].every({inside})")
    page.wait_for_selector("td:text-is('changed')")


def test_what_if_shows_the_plan_of_a_failure(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/what-if/W1_1", problems)
    page.wait_for_selector("button[data-worker=W1_1][aria-pressed=true]")
    page.click("text=Show the plan")
    page.wait_for_selector("dt:text-is('Period then')")
    wait_until(page, "window.recycle.view().timeline.lanes.size === 4")
    page.click("button[data-worker=W0_0]")
    page.click("text=Show the plan")
    page.wait_for_selector("text=has no plan for W0_0, W1_1 dead")
    problems.clear()  # a browser notes every answer of 422


def test_a_first_answer_that_fails_is_asked_for_again(browser, runs):
    page = browser.new_context().new_page()
    failed = []

    def fail_once(route):
        path = route.request.url.partition("?")[0]
        if path in failed:
            route.continue_()
            return
        failed.append(path)
        if path.endswith("/api/run"):
            route.fulfill(status=503, body="busy")
        else:
            route.abort()

    for path in ("session*", "run?*", "run/iteration?*"):
        page.route(f"**/api/{path}", fail_once)
    page.goto(f"{runs}#/run/a/iteration/6")
    page.wait_for_selector("text=the page tries again")
    wait_until(page, "window.recycle?.view()?.timeline?.lanes.size === 4")
    assert len(failed) == 3
    page.context.close()


def test_events_are_searched_and_downloaded(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/events", problems)
    page.select_option("#event-kind", "recovery")
    page.wait_for_selector("text=2 shown of")
    page.fill("#event-text", "it asked to join")
    page.wait_for_selector("text=1 shown of")
    with page.expect_download() as download:
        page.click("text=CSV")
    assert download.value.suggested_filename == "a.csv"


# Views of hostile files, and what of each must be shown as text.
HOSTILE = {
    "run/hostile/overview": "#run-name",
    "run/hostile/iteration/6": "#run-name",
    "run/hostile/recoveries/0": "main td.wide",
    "run/hostile/recoveries/2": "h2",
    "run/hostile/events": "td.wide",
    "run/trace.jsonl/overview": "[data-worker] .name",
    "run/trace.jsonl/events": "td.wide",
    "campaign/hostile.json": "h1",
    "runs": "td.wide",
}


@pytest.mark.parametrize("view", HOSTILE)
def test_html_in_a_record_is_shown_as_text(browser, runs, problems, view):
    page = open_page(browser, f"{runs}#/{view}", problems)
    page.wait_for_selector(f"{HOSTILE[view]}:has-text('<img src=')", state="attached")
    if "iteration" in view:
        wait_until(page, "window.recycle.view()?.timeline?.frames.length")  # an op of an unknown kind is drawn, too
        ops = "[...window.recycle.view().timeline.lanes.values()].flatMap(lane => lane.executed.ops)"
        assert page.evaluate(f"() => {ops}.some(op => op.full.startsWith('<img'))")
    for cell in page.locator("button[data-worker]").all()[:4]:
        cell.click()  # its details name hosts and reasons
    assert page.evaluate(f"() => {FOUND_HTML}") == []
    assert page.title() != "owned"
    page.context.close()


def test_html_would_be_found_if_the_page_made_elements_of_texts(browser, runs):
    def insert_html(route):
        text = route.fetch().text()
        assert "node.append(...children" in text
        parts = "const made = document.createElement('template'); made.innerHTML = text; return made.content;"
        unsafe = "(...parts) => { const inner = (text) => { if (typeof text !== 'string') return text; " + parts + " };"
        text = text.replace("node.append(...children", "append(node, ...children").replace(
            "node.replaceChildren(", "replace(node, "
        )
        text += f"const append = (node, ...rest) => node.append(...({unsafe} return parts.map(inner); }})(...rest));"
        text += f"const replace = (node, ...rest) => node.replaceChildren(...({unsafe} return parts.map(inner); }})(...rest));"
        route.fulfill(body=text, content_type="text/javascript")

    page = browser.new_context().new_page()
    page.route("**/dom.js", insert_html)
    for view in ("run/hostile/recoveries/2", "run/hostile/events", "run/trace.jsonl/overview", "campaign/hostile.json", "runs"):
        page.goto(runs)
        page.goto(f"{runs}#/{view}")
        wait_until(page, f"({FOUND_HTML}).length")
    page.context.close()


def test_a_damaged_plan_is_named_and_the_rest_is_shown(browser, problems, tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "plan.json").write_text('{"format": "recycle-plan", "version": 1, "problem"')
    with serving(tmp_path, ready_plans) as address:
        page = open_page(browser, f"{address}#/run/a/iteration/2", problems)
        page.wait_for_selector("text=No plan:")
        assert "is not JSON" in page.inner_text("main")
        wait_until(page, "window.recycle.view().timeline.frames.length")
        page.goto(f"{address}#/run/a/overview")
        page.wait_for_selector("dd:text-is('14')")
        assert page.locator(".chart canvas").count() == 3
        page.goto(f"{address}#/run/a/recoveries/0")
        page.wait_for_selector(".waterfall")
        page.goto(f"{address}#/run/a/what-if")
        page.wait_for_selector("text=so there is nothing to plan for")


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/damaged/overview", problems)
    page.wait_for_selector("#notice:has-text('The record of this run is damaged')")
    assert "are missing" in page.inner_text("#notice")
    assert page.locator("button.worker").count() == 4
    page.goto(f"{runs}#/run/nothing/overview")
    page.wait_for_selector("text=there is no run 'nothing'")
    problems.clear()  # a browser notes every answer of 404


def test_axe_finds_nothing_serious_on_a_phone_and_in_hostile_runs(browser, runs, problems):
    page = open_page(browser, runs, problems, viewport=PHONE)
    for view in ("run/a/overview", "run/a/iteration/6", "run/hostile/overview", "run/hostile/events"):
        page.goto(f"{runs}#/{view}")
        page.wait_for_selector("h1", state="attached")
        page.wait_for_timeout(250)
        assert find_violations(page) == [], view


def test_on_a_wall_nothing_is_wider_than_the_screen(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/overview", problems, viewport={"width": 3840, "height": 2160})
    page.wait_for_selector(".chart canvas")
    boxes = "[...document.querySelectorAll('.panel')].map((node) => node.getBoundingClientRect())"
    assert page.evaluate(f"() => {boxes}.every((box) => box.left >= 0 && box.right <= 3840)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, runs, problems, theme):
    page = open_page(browser, runs, problems, color_scheme=theme)
    for view in ("runs", "campaign/scale.json", *(f"run/a/{view}" for view in VIEWS)):
        page.goto(f"{runs}#/{view}")
        page.wait_for_selector("h1")
        page.wait_for_timeout(250)
        assert page.evaluate("() => document.documentElement.dataset.theme") == theme
        assert find_violations(page) == [], view


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, runs, problems):
    page = open_page(browser, runs, problems, viewport=PHONE)
    for view in ("runs", "campaign/scale.json", *(f"run/a/{view}" for view in VIEWS)):
        page.goto(f"{runs}#/{view}")
        page.wait_for_selector("h1")
        page.wait_for_timeout(250)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], view


def test_on_a_phone_no_worker_hides_another(browser, tmp_path, problems):
    write_record(tmp_path / "wide.jsonl", [Started("simulate", "wide", (3, 8, 8)), Changed(1_000_000, "W1_2", False, 23)])
    with serving(tmp_path) as address:
        page = open_page(browser, f"{address}#/run/wide.jsonl/overview", problems, viewport=PHONE)
        page.wait_for_selector("button[data-worker=W1_2].state-dead")
        places = page.evaluate(
            "() => [...document.querySelectorAll('button[data-worker]')].map(e => [e, e.getBoundingClientRect()])"
            ".map(([e, box]) => [e.dataset.row, box.left, box.right])"
        )
    assert len(places) == 24
    assert all(row != other or right <= left for (row, _, right), (other, left, _) in pairwise(places))


def test_the_theme_is_kept(browser, runs, problems):
    page = open_page(browser, runs, problems)
    page.click("#theme")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("h1")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
