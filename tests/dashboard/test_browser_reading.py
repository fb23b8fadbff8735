"""The page in a real browser: what is read and reached by keyboard, what numbers mean, and what stands out."""

from pathlib import Path

import pytest

from tests.dashboard.browser import PHONE, find_violations, needs_browser, open_page, serving, wait_until
from tests.recovery_records import EPOCHS

pytestmark = needs_browser
RESULTS = Path(__file__).parents[2] / "docs" / "reproduction"


def test_an_iteration_shows_re_routed_ops_and_is_zoomed_by_keyboard(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/iteration/{EPOCHS[1][0]}", problems)
    wait_until(page, "window.recycle?.view()?.timeline?.lanes.size === 4")
    lanes = "[...window.recycle.view().timeline.lanes.values()]"
    assert (
        page.evaluate(f"() => {lanes}.find(lane => lane.worker === 'W0_1').executed.ops.filter(op => op.isRerouted).length") > 0
    )
    assert page.evaluate(f"() => {lanes}.some(lane => lane.executed.vain.size > 0)")
    assert page.evaluate(f"() => {lanes}.some(lane => lane.executed.critical.size > 0)")
    view = "window.recycle.view().timeline.view"
    whole = page.evaluate(f"() => {view}[1] - {view}[0]")
    page.focus(".timeline canvas")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"() => {view}[1] - {view}[0]") == pytest.approx(whole / 2)
    page.keyboard.press("0")
    page.hover(".timeline canvas", position={"x": 300, "y": 12})
    assert page.evaluate(f"() => {view}[1] - {view}[0]") == pytest.approx(whole)
    assert f"iteration={EPOCHS[1][0]}" in page.get_attribute("a:text-is('Perfetto trace')", "href")
    page.click("[aria-label='the next iteration']")
    wait_until(page, f"window.recycle.view().shown === {EPOCHS[1][0] + 1}")


def test_results_have_units_negative_bars_and_say_what_is_cut(browser, problems):
    with serving(RESULTS) as address:
        page = open_page(browser, f"{address}#/campaign/thousand.json", problems)
        page.wait_for_selector("button:text-is('throughput (samples/s)')")
        assert "not in this table, but in the file: failures of each seed, throughputs" in page.inner_text("p[role=status]")
        page.select_option("#measure", label="what failures add (percentage points of fault-free 1F1B)")
        page.fill("#filter", "GPU-days")
        page.wait_for_selector("text=Negative values go to the left of zero.")
        boxes = "[...document.querySelectorAll('.fall-bar')].map((bar) => [bar.className, bar.getBoundingClientRect()])"
        bars = page.evaluate(f"() => {boxes}.map(([name, box]) => [name, box.left, box.right])")
        negative = [bar for bar in bars if "negative" in bar[0]]
        zero = max(right for _, _, right in negative)
        assert len(negative) > 5
        assert all(abs(right - zero) < 0.5 and left < zero for _, left, right in negative)
        assert all(left >= zero - 0.5 for name, left, _ in bars if "negative" not in name)
        page.goto(f"{address}#/campaign/scale.json")
        page.wait_for_selector("text=The first 60 of ")
        assert find_violations(page) == []


def test_ops_are_read_by_keyboard(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/iteration/{EPOCHS[1][0]}", problems)
    wait_until(page, "window.recycle?.view()?.timeline?.lanes.size === 4")
    lane = "[...window.recycle.view().timeline.lanes.values()][0]"
    executed = page.evaluate(f"() => {lane}.executed.ops.map(op => op.full)")
    assert page.get_attribute(".timeline .tip", "aria-live") == "polite"
    page.focus(".timeline canvas")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_selector(".tip:has-text('W0_0 ')")
    at = page.evaluate("() => window.recycle.view().timeline.chosen.at")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_selector(f".tip:has-text('W0_0 {executed[at + 1]} ·')")
    assert " ms from " in page.inner_text(".tip")
    page.keyboard.press("Shift+ArrowDown")
    page.wait_for_selector(".tip:has-text('· planned ')")
    page.keyboard.press("Shift+ArrowDown")
    page.wait_for_selector(".tip:has-text('W0_1 ')")
    for _ in range(8):  # zoomed in, the chosen op is brought into view
        page.keyboard.press("+")
    for _ in range(len(executed) + 4):
        page.keyboard.press("Shift+ArrowRight")
    timeline = "window.recycle.view().timeline"
    start, (first, last) = page.evaluate(f"() => [{timeline}.spanOf({timeline}.chosen)[0], {timeline}.view]")
    assert first <= start <= last
    page.keyboard.press("Escape")
    assert page.inner_text(".tip") == ""


def test_the_time_axis_is_seen_without_scrolling(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/iteration/6", problems, viewport={"width": 1280, "height": 720})
    wait_until(page, "window.recycle?.view()?.timeline?.frames.length")
    top_pixels = (
        "() => { const canvas = document.querySelector('.timeline canvas'), ratio = window.devicePixelRatio;"
        " const { data } = canvas.getContext('2d').getImageData(74 * ratio, 0, canvas.width - 74 * ratio, 20 * ratio);"
        " const pixels = Array.from({ length: data.length / 4 }, (_, at) => [...data.slice(4 * at, 4 * at + 3)]);"
        " return [pixels.filter((pixel) => Math.max(...pixel) < 180).length,"
        " pixels.filter((pixel) => Math.max(...pixel) - Math.min(...pixel) > 60).length]; }"
    )
    inked, coloured = page.evaluate(top_pixels)
    assert inked > 50  # the times are at the top of the canvas
    assert coloured == 0  # and no op is there
    assert page.evaluate("() => document.querySelector('.timeline canvas').getBoundingClientRect().top") < 720 - 24


def test_the_period_of_the_plan_is_told_in_words(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/iteration/6", problems)
    page.wait_for_selector("text=The plan's period at the measured speed of ops: ")
    ratio = page.evaluate("() => window.recycle.view().answer.slowdown")
    period_us = page.evaluate("() => window.recycle.view().answer.period_us")
    text = page.inner_text("main p[role=status]")
    assert f"ops: {page.evaluate('(us) => window.recycle.formatTime(us)', period_us * ratio)}; " in text
    assert f"it is {page.evaluate('(us) => window.recycle.formatTime(us)', period_us)}, and ops took {ratio:.3g} ×" in text


def test_curves_are_zoomed_and_read_by_keyboard(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/overview", problems)
    page.wait_for_selector(".chart canvas")
    chart = "window.recycle.view().charts.loss"
    page.focus(".chart .plot")
    page.keyboard.press("+")
    wait_until(page, f"{chart}.zoom")
    first, last = page.evaluate(f"() => {chart}.zoom")
    end = page.evaluate(f"() => {chart}.end")
    assert last - first == pytest.approx(end / 2)
    page.keyboard.press("ArrowRight")
    wait_until(page, f"{chart}.zoom[0] > {first}")
    assert page.evaluate(f"() => {chart}.zoom[1] - {chart}.zoom[0]") == pytest.approx(last - first)
    wait_until(page, f"{chart}.plot.scales.x.min === {chart}.zoom[0]")
    page.keyboard.press("-")
    wait_until(page, f"{chart}.zoom === null")
    page.keyboard.press("+")
    page.keyboard.press("0")
    wait_until(page, f"{chart}.zoom === null && {chart}.plot.scales.x.min === 0")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    wait_until(page, f"{chart}.legend.textContent.includes(' at ')")
    assert page.evaluate(f"() => {chart}.plot.cursor.idx") == 1
    page.goto(f"{runs}#/runs")
    page.check("input[aria-label='compare a']")
    page.wait_for_selector(".plot canvas")
    scale = "(() => { const { min, max } = window.recycle.view().plot.scales.x; return max - min; })()"
    whole = page.evaluate(f"() => {scale}")
    page.focus(".plot")
    page.keyboard.press("+")
    wait_until(page, f"{scale} < 0.6 * {whole}")
    page.keyboard.press("0")
    wait_until(page, f"Math.abs({scale} - {whole}) < 0.2 * {whole}")


def test_on_a_phone_all_tabs_and_results_are_inside_the_screen(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/events", problems, viewport=PHONE)
    page.wait_for_selector("nav a")
    tabs = page.evaluate("() => [...document.querySelectorAll('nav a')].map((tab) => tab.getBoundingClientRect().right)")
    assert len(tabs) == 5
    assert max(tabs) <= PHONE["width"]
    with serving(RESULTS) as address:
        for name in ("scale", "thousand"):
            page.goto(f"{address}#/campaign/{name}.json")
            page.wait_for_selector(".fall-bar")
            assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], name


def light(code):
    """The relative luminance of a colour, as WCAG defines it."""
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ops_stand_out_from_bubbles_in_the_dark(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/iteration/6", problems, color_scheme="dark")
    wait_until(page, "window.recycle?.view()?.timeline?.frames.length")
    names = ("bubble", "faint-ink")
    bubble, edge = (
        page.evaluate("(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", f"--{name}")
        for name in names
    )
    paints = page.evaluate("() => window.recycle.view().timeline.paints")
    edged = page.evaluate("() => [...window.recycle.view().timeline.edged]")
    for look, paint in paints.items():
        seen = edge if look in edged else paint["fill"]
        assert (light(seen.strip()) + 0.05) / (light(bubble.strip()) + 0.05) >= 3, look
    assert "F" not in edged


def test_workers_are_reached_by_arrow_keys(browser, runs, problems):
    page = open_page(browser, f"{runs}#/run/a/overview", problems)
    page.focus("button[data-worker=W0_0]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("h3:has-text('W1_1 live')")
    assert page.locator("[data-action]").count() == 0  # nothing can be killed here
