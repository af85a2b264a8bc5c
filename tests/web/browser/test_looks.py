"""Dark and light, phone width, the keyboard alone, what a screen reader is told: of every view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.web.browser.served import Served
from tests.web.browser.window import Window, compare_route, expect, run_route, step_route

PHONE = {"width": 360, "height": 740}

# Every text against what is behind it: WCAG AA asks for 4.5 to 1.
PALE_TEXTS = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0.9) return found;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const node of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg") || getComputedStyle(node).opacity !== "1") continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`;
    if (ratio < 4.5) pale.push(`${name} ${ratio.toFixed(2)}`);
  }
  return [...new Set(pale)];
}"""

# What a screen reader needs: names of controls, one heading of level 1, no level left out, headers of tables.
UNNAMED = """() => {
  const problems = [];
  const seen = (selector) => [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility());
  const named = (node) => node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
    || (!["SECTION", "TABLE", "NAV", "ASIDE"].includes(node.tagName) && (node.textContent.trim() || node.title))
    || (node.id && document.querySelector(`label[for="${node.id}"]`)) || node.querySelector("caption");
  const controls = "a, button, input, select, [role=progressbar], [role=group], [role=img], nav, aside, table, section";
  for (const node of seen(controls)) if (!named(node)) problems.push(`no name: ${node.outerHTML.slice(0, 120)}`);
  const levels = seen("main h1, main h2, main h3").map((node) => Number(node.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) problems.push(`headings of level 1: ${levels}`);
  if (levels.some((level, index) => index && level > levels[index - 1] + 1)) problems.push(`a gap: ${levels}`);
  for (const table of seen("table")) if (!table.querySelector("th[scope=col]")) problems.push("a table has no headers");
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  ids.forEach((id, index) => { if (ids.indexOf(id) !== index) problems.push(`the id ${id} twice`); });
  for (const name of ["header", "nav", "main", "footer"]) if (!seen(name).length) problems.push(`no ${name}`);
  if (!document.documentElement.lang) problems.push("no language");
  return problems;
}"""


def views(site: Served) -> dict[str, tuple[str, str]]:
    """The route of each view, and a text that it shows when it is complete."""
    run = site.run_id("branches")
    return {
        "runs": ("#/", "branches"),
        "run": (run_route(run), "every 20th, tag best"),
        "step": (step_route(run, 45) + "?group=model&key=model.embed_tokens.weight", "Compute statistics"),
        "layout": (step_route(run, 45) + "/layout", "rank 0"),
        "compare": (compare_route(run, 35, 45), "Changed most"),
    }


@pytest.mark.sliced(7)
@pytest.mark.parametrize("view", ["run", "runs", "step", "layout", "compare"])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_view_is_legible_and_named(opening: Callable[..., Any], site: Served, view: str, scheme: str) -> None:
    route, text = views(site)[view]
    with opening(site.address, color_scheme=scheme, reduced_motion="reduce") as window:
        window.open(route)
        window.shows(text)
        assert window.page.evaluate(PALE_TEXTS) == []
        assert window.page.evaluate(UNNAMED) == []
        window.page.set_viewport_size(PHONE)
        window.page.wait_for_timeout(200)
        widths = window.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] <= widths[1], f"the page is wider than the phone: {widths}"
        assert window.page.evaluate(PALE_TEXTS) == []


def test_damage_fits_a_phone(opening: Callable[..., Any], site: Served) -> None:
    """Long names of files and keys scroll in their table; the rows of the steps are as high as they are said to be."""
    with opening(site.address, viewport=PHONE) as window:
        window.open(step_route(site.run_id("damaged"), 20))
        window.page.get_by_role("button", name="Verify").click()
        expect(window.page.locator(".verdict.bad")).to_be_visible()
        assert window.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        window.open(run_route(site.run_id("branches")))
        window.shows("goes next")
        table = window.section("Steps").get_by_role("table")
        scroller = window.section("Steps").locator(".windowed")
        table.get_by_role("columnheader", name="Step").scroll_into_view_if_needed()
        for name in ("Saved", "Publish", "Stall", "Branch", "Notes"):
            header = table.get_by_role("columnheader", name=name)
            place = header.evaluate("node => node.offsetLeft")
            scroller.evaluate("(node, left) => { node.scrollLeft = left; }", place - 130)
            expect(header).to_be_in_viewport(ratio=0.5)
            expect(table.get_by_role("columnheader", name="Step")).to_be_in_viewport(ratio=1)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        window.page.set_viewport_size({"width": 1280, "height": 900})
        expect(table.locator("tbody tr[data-index='1']")).to_be_visible()
        heights = table.evaluate("table => [...table.tBodies[0].rows].map((row) => Math.round(row.offsetHeight))")
        assert set(heights) == {38}


@pytest.mark.full
def test_the_theme_follows_the_system_and_the_switch(opening: Callable[..., Any], site: Served) -> None:
    with opening(site.address, color_scheme="dark") as window:
        window.open()
        window.shows("branches")
        background = "getComputedStyle(document.body).backgroundColor"
        dark = window.page.evaluate(background)
        switch = window.page.locator("#theme")
        switch.click()
        expect(switch).to_have_attribute("aria-label", "Theme: light")
        light = window.page.evaluate(background)
        assert light != dark
        window.page.reload()
        assert window.page.evaluate(background) == light
        switch.click()
        expect(switch).to_have_attribute("aria-label", "Theme: dark")
        assert window.page.evaluate(background) == dark


@pytest.mark.full
def test_motion_is_reduced_when_asked(opening: Callable[..., Any], site: Served) -> None:
    with opening(site.address, reduced_motion="reduce") as window:
        window.open(run_route(site.run_id("branches")))
        window.shows("Newest committed")
        moving = "[...document.querySelectorAll('*')].some((node) => getComputedStyle(node).animationName !== 'none')"
        assert not window.page.evaluate(moving)


def test_the_keyboard_alone_reaches_everything(window: Window, site: Served) -> None:
    """From the list of runs to the statistics of a tensor and back, without a pointer."""
    keys = window.page.keyboard
    window.open()
    window.shows("branches")
    keys.press("Tab")
    expect(window.page.locator("#skip")).to_be_focused()
    keys.press("Enter")
    keys.press("Tab")
    expect(window.row("<img")).to_be_focused()
    assert window.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.press("ArrowDown")
    expect(window.row("branches")).to_be_focused()
    keys.press("Enter")
    expect(window.page.get_by_role("heading", level=1, name="branches")).to_be_visible()
    press_until(window, "Tab", "tr[data-index='0']")
    keys.press("ArrowDown")
    keys.press(" ")
    keys.press("Home")
    keys.press(" ")
    expect(window.page.locator(".choice")).to_contain_text("Compare abandoned step 40 with step 45")
    keys.press("Enter")
    expect(window.page.get_by_role("heading", level=1, name="step 45")).to_be_visible()
    keys.press("/")
    expect(window.page.get_by_role("searchbox", name="Search keys")).to_be_focused()
    keys.press("Escape")
    press_until(window, "Tab", "tr[data-index='0']")
    keys.press("End")
    keys.press("Home")
    row = window.page.get_by_role("treegrid").locator("tr[data-index='0']")
    expect(row).to_have_attribute("aria-expanded", "true")
    keys.press("ArrowLeft")
    expect(row).to_have_attribute("aria-expanded", "false")
    keys.press("ArrowRight")
    expect(row).to_have_attribute("aria-expanded", "true")
    keys.press("ArrowRight")
    expect(window.page.get_by_role("treegrid").locator("tr[data-index='1']")).to_be_focused()
    keys.press("u")
    expect(window.page.get_by_role("heading", level=1, name="branches")).to_be_visible()
    keys.press("g")
    keys.press("r")
    expect(window.page.get_by_role("heading", level=1, name="Runs")).to_be_visible()
    keys.press("?")
    expect(window.page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    keys.press("Escape")
    expect(window.page.get_by_role("dialog", name="Keyboard")).to_be_hidden()


def press_until(window: Window, key: str, selector: str) -> None:
    """Press a key until an element has the focus; thirty presses are too many."""
    for _ in range(30):
        if window.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        window.page.keyboard.press(key)
    raise AssertionError(f"{selector} cannot be reached with {key}")
