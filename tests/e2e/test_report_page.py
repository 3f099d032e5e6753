"""The report in a real browser: appearance, mouse interaction, and no network requests."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.unit.report_runs import comparison, event, page_of, planned, trained
from training.diagnose import card_rows

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"),
]

Open = Callable[..., Any]
SIZE = {"width": 1200, "height": 900}
FLAGS = ["2", "--data=/data/text.txt", "--eval_every=0", "--compile=0", "--inspect_every=0"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        # The sandbox needs rights that a container does not have; the pages are trusted.
        started = play.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a finished run, a failed one, a comparison of both, and losses of both signs."""
    folder = tmp_path_factory.mktemp("a user's") / "experiments"
    good, bad = (
        trained(planned(folder / "good"), 120, pace=1.3),
        trained(planned(folder / "bad", command={"script": "launch_train.sh", "args": FLAGS}), 60),
    )
    good.summary()
    bad.step(61, float("nan"))
    event(bad, "warning", 7.0, text="<b>bold</b> words")
    bad.failure()
    signs = planned(folder / "signs")
    for step in range(1, 13):
        signs.step(step, -1.0 if step in (5, 6) else float(step))
    made = {"good": page_of(good), "bad": page_of(bad), "both": comparison(good, bad)}
    made["signs"] = page_of(signs)
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def show(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """show('good', dark=True) → the page; at the end asserts no error in it and no request except
    the file itself."""
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def opened(name: str, *, dark: bool = False, script: bool = True, width: int = 1200) -> Any:
        scheme = "dark" if dark else "light"
        size = SIZE | {"width": width}
        context = browser.new_context(
            viewport=size, color_scheme=scheme, java_script_enabled=script, locale="en-GB"
        )
        context.set_default_timeout(20_000)  # ms
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        if script:
            page.wait_for_selector("html.ready", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not said
    assert [url for url in asked if not url.startswith("file:")] == [] and len(asked) == len(
        contexts
    )


def colour(page: Any, selector: str, what: str) -> tuple[int, ...]:
    value = page.eval_on_selector(selector, f"e => getComputedStyle(e).{what}")
    return tuple(map(int, re.findall(r"\d+", value)[:3]))


def ticks(page: Any, chart: str, axis: int = 0) -> list[str]:
    """The labels of an axis, sorted, since the page has them in any order; axis 0 is the lower
    one."""
    words = (
        "(e, axis) => "
        "[...e.querySelectorAll('.role-axis-label')[axis].querySelectorAll('text')].map(t => "
        "t.textContent)"
    )
    found: list[str] = page.eval_on_selector(f"#chart-{chart} svg", words, axis)
    return sorted(found)


def middle(page: Any, chart: str) -> tuple[float, float]:
    plot = page.locator(f"#chart-{chart} .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize(
    ("dark", "script"),
    [
        (False, False),
        (True, True),
        *(pytest.param(dark, not dark, marks=pytest.mark.soak) for dark in (False, True)),
    ],
)
def test_light_and_dark(show: Open, dark: bool, script: bool) -> None:
    page = show("good", dark=dark, script=script)
    paper, words = (
        colour(page, "body", "backgroundColor"),
        colour(page, "#chart-loss .role-axis-label text", "fill"),
    )
    line = colour(page, "#chart-loss .mark-line path", "stroke")
    assert (sum(paper) < 150) == dark and (sum(words) > 380) == dark, (paper, words)
    assert line == ((86, 180, 233) if dark else (0, 114, 178))


def test_the_button_changes_light_to_dark(show: Open) -> None:
    page = show("good")
    assert page.get_by_role("img", name="Loss: chart").count() == 1, "accessible description"
    light = colour(page, "body", "backgroundColor")
    page.click("#theme")
    assert sum(colour(page, "body", "backgroundColor")) < 150 < sum(light)
    assert sum(colour(page, "#chart-loss .role-axis-label text", "fill")) > 380, "the charts too"
    page.click("#theme")
    assert colour(page, "body", "backgroundColor") == light


def test_without_javascript_the_charts_are_images(show: Open) -> None:
    page = show("good", script=False)
    assert page.locator("figure svg").count() == 10
    for chart in ("loss", "timeline", "phases"):
        box = page.locator(f"#chart-{chart} svg").bounding_box()
        assert box["width"] > 800 and box["height"] > 50
    assert (
        not page.locator(".controls").is_visible()
        and not page.locator("#chart-loss .log").is_visible()
    )


def test_the_page_fits_a_phone(show: Open) -> None:
    page = show("good", width=380)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert (
        page.locator("#configuration th.what").count()
        and not page.locator("#configuration .what").first.is_visible()
    )
    for svg in page.locator("figure svg").all():
        box = svg.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 381


def test_a_phone_shows_whole_flags_and_that_tables_scroll(show: Open) -> None:
    page = show("bad", width=390)
    flags = page.locator(".words span").all()
    assert len(flags) == 1 + len(FLAGS) and all(
        flag.bounding_box()["height"] < 30 for flag in flags
    )
    # a row of the card that is continued begins where its value does
    indents = "[...document.querySelectorAll('.card span')].map(s => getComputedStyle(s))"
    assert set(page.evaluate(f"{indents}.map(s => s.textIndent === '-' + s.paddingLeft)")) == {True}
    assert (
        page.evaluate(
            "(() => { const s = document.querySelector('.card span'), of = getComputedStyle(s);"
            " const cell = document.createElement('canvas').getContext('2d'); cell.font = of.font;"
            " return Math.round(parseFloat(of.paddingLeft) / cell.measureText('0').width) })()"
        )
        == card_rows.COLUMN + 2
    )
    shadow = "getComputedStyle(document.querySelector('.wide')).backgroundAttachment"
    assert page.evaluate(shadow) == "local, local, scroll, scroll"


def test_hovering_shows_exact_values(show: Open) -> None:
    page = show("good")
    page.mouse.move(*middle(page, "loss"))
    page.wait_for_selector(".tip:not([hidden])")
    said = page.inner_text(".tip")
    found = re.search(r"step (\d+)", said)
    assert found
    step = int(found[1])
    assert 40 < step < 80
    stored = page.evaluate("JSON.parse(document.getElementById('charts').textContent)[0].columns")
    exact = next(
        y
        for s, n, y in zip(stored["step"], stored["series"], stored["y"], strict=True)
        if s == step and n == 0
    )
    assert str(exact) in said and len(str(exact)) > 14, "at full precision"
    assert "loss, smoothed" in said and "validation" in said
    dots, points = (
        [
            box["x"] + box["width"] / 2
            for one in page.locator(where).all()
            if (box := one.bounding_box())
        ]
        for where in ("#chart-loss .dot", "#chart-loss .mark-symbol path")
    )
    assert min(abs(dots[-1] - x) for x in points) < 1, "the mark of the evaluation is on the curve"
    page.mouse.move(5, 5)
    page.wait_for_selector(".tip", state="hidden")


def test_bars_have_tooltips(show: Open) -> None:
    page = show("bad")
    plot = page.locator("#chart-timeline .mark-rect path").first
    plot.scroll_into_view_if_needed()
    plot.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "seconds" in page.inner_text("#vg-tooltip-element")


def test_the_wheel_zooms_with_ctrl_and_scrolls_without_it(show: Open) -> None:
    page = show("good")
    page.mouse.move(*middle(page, "loss"))
    before, place = ticks(page, "loss"), page.evaluate("scrollY")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    wait_until(lambda: ticks(page, "loss") != before, 20, "another part of the axis")
    assert page.evaluate("scrollY") == place
    page.mouse.dblclick(*middle(page, "loss"))
    wait_until(lambda: ticks(page, "loss") == before, 20, "the whole axis again")
    page.mouse.move(*middle(page, "loss"))
    page.mouse.wheel(0, 300)
    page.wait_for_function("old => scrollY > old", arg=place)
    assert ticks(page, "loss") == before


def test_dragging_pans(show: Open) -> None:
    page = show("good")
    before = ticks(page, "loss")
    x, y = middle(page, "loss")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 200, y, steps=5)
    page.mouse.up()
    wait_until(lambda: ticks(page, "loss") != before, 20, "another part of the axis")


def test_a_legend_entry_hides_its_curve(show: Open) -> None:
    page = show("good")
    lines = "#chart-loss .mark-line path[d]"
    full = page.locator(lines).count()
    button = page.locator("#chart-loss .legend button", has_text="validation")
    button.click()
    page.wait_for_function(
        "([lines, full]) => document.querySelectorAll(lines).length < full", arg=[lines, full]
    )
    assert button.get_attribute("aria-pressed") == "false"
    page.mouse.move(*middle(page, "loss"))
    page.wait_for_selector(".tip:not([hidden])")
    assert "validation" not in page.inner_text(".tip")
    button.click()
    page.wait_for_function(
        "([lines, full]) => document.querySelectorAll(lines).length === full", arg=[lines, full]
    )


def test_a_logarithmic_scale_has_gaps_at_values_below_zero(show: Open) -> None:
    page = show("signs")
    parts = (
        "document.querySelector('#chart-loss .mark-line path').getAttribute('d').split('M').length"
    )
    assert page.evaluate(parts) == 1 + 1
    page.click("#chart-loss .log")
    wait_until(lambda: page.evaluate(parts) == 1 + 2, 20, "a line of two parts")


def test_other_axes(show: Open) -> None:
    page = show("good")
    steps, values = ticks(page, "loss"), ticks(page, "loss", 1)
    page.click("#chart-loss .log")
    wait_until(lambda: ticks(page, "loss", 1) != values, 20, "a logarithmic scale")
    page.click("[data-axis=time]")
    page.wait_for_selector("#chart-phases svg")
    title = (
        "[...document.querySelectorAll('#chart-loss .role-axis-title')].map(t => "
        "t.textContent).join()"
    )
    page.wait_for_function(f"{title}.includes('seconds since the start')")
    assert not [word for word in ticks(page, "loss") if "e" in word], "2 is not 2e+0"
    assert ticks(page, "loss") != steps
    page.click("[data-axis=tokens]")
    page.wait_for_function(f"{title}.includes('tokens')")
    page.mouse.move(*middle(page, "loss"))
    page.wait_for_selector(".tip:not([hidden])")
    assert "tokens" in page.inner_text(".tip")


def test_overlapping_clicks_leave_one_cursor_per_chart(show: Open) -> None:
    page = show("good")
    page.evaluate(
        "for (const key of ['time', 'tokens', 'step', 'time', 'tokens']) "
        "document.querySelector(`[data-axis=${key}]`).click()"
    )
    titles = (
        "[...document.querySelectorAll('.charts .role-axis-title')].filter(t => "
        "t.textContent "
        "=== 'tokens').length"
    )
    page.wait_for_function(f"{titles} >= 8")  # of all curves
    page.wait_for_function(
        "[...document.querySelectorAll('.plot')].every(p => p.querySelectorAll('.line').length < 2)"
    )
    counts = page.evaluate(
        "[...document.querySelectorAll('.plot.live')].map(p => p.querySelectorAll('.line').length)"
    )
    assert sorted(set(counts)) == [0, 1], counts


def test_the_failure_card_comes_first(show: Open) -> None:
    page = show("bad")
    failed = page.locator("#failure")
    assert failed.is_visible() and "gpu_oom: CUDA out of memory" in failed.inner_text()
    assert failed.bounding_box()["y"] < 300
    assert "<b>bold</b> words" in page.inner_text("#events"), "text, not markup"
    assert page.locator("#chart-loss .mark-symbol path").count() >= 1, "the NaN loss"


def test_a_comparison_of_two_runs(show: Open) -> None:
    page = show("both")
    assert page.locator("#figures tbody tr").count() == 2
    colours = {colour(page, f"#chart-loss .mark-line path >> nth={i}", "stroke") for i in range(2)}
    assert len(colours) == 2
    page.mouse.move(*middle(page, "step_ms"))
    page.wait_for_selector(".tip:not([hidden])")
    assert "good" in page.inner_text(".tip") and "bad" in page.inner_text(".tip")
    full = page.locator("#chart-lr .mark-line path[d]").count()
    page.locator("button[data-name=bad]").click()
    page.wait_for_function(
        "full => document.querySelectorAll('#chart-lr .mark-line path[d]').length < full", arg=full
    )


def test_on_paper(show: Open) -> None:
    page = show("good", dark=True)
    page.emulate_media(media="print")
    assert (
        sum(colour(page, "body", "backgroundColor")) > 700
        and sum(colour(page, "h1", "color")) < 150
    )
    assert (
        not page.locator("nav").is_visible() and not page.locator("#chart-loss .log").is_visible()
    )
    swatch = page.locator("#chart-loss .legend i").first
    assert swatch.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact", (
        "otherwise a browser omits its colour"
    )


def test_the_page_cannot_reach_a_network(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(pages["good"].as_uri())
        refused = """ask => new Promise(done => {
            addEventListener('securitypolicyviolation', event => done(event.effectiveDirective), {once: true});
            ask();
        })"""
        for ask, rule in {
            "() => fetch('http://127.0.0.1:9/').catch(() => 0)": "connect-src",
            "() => { new Image().src = 'http://127.0.0.1:9/' }": "img-src",
            "() => document.body.append(Object.assign(document.createElement('script'), {text: "
            "'document.title = 1'}))": "script-src-elem",
        }.items():
            assert (
                page.evaluate(refused.replace("ask()", f"({ask})()").replace("ask =>", "() =>"))
                == rule
            )
        assert page.title() != "1"
    finally:
        context.close()
