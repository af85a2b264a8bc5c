"""The list of runs, and a run: the five questions, timeline, table, retention, and steps that come and go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.web import sample_runs
from tests.web.browser.conftest import HOSTILE_NAME
from tests.web.browser.served import Served, served
from tests.web.browser.window import Window, expect, run_route, step_route

if TYPE_CHECKING:
    from playwright.sync_api import Locator


def test_the_list_leads_to_a_run_and_back(window: Window, site: Served) -> None:
    window.open()
    expect(window.page.get_by_role("heading", level=1, name="Runs")).to_be_visible()
    expect(window.page.get_by_role("table", name="Runs").locator("tbody tr")).to_have_count(5)
    window.page.get_by_role("link", name="branches").click()
    expect(window.page.get_by_role("heading", level=1, name="branches")).to_be_visible()
    assert window.page.url.endswith(run_route(site.run_id("branches")))
    window.page.go_back()
    expect(window.page.get_by_role("heading", level=1, name="Runs")).to_be_visible()


def test_the_summary_answers_the_five_questions(window: Window, site: Served) -> None:
    window.open(run_route(site.run_id("branches")))
    expect(window.fact("Newest")).to_contain_text("step 45")
    expect(window.fact("In flight")).to_have_text("nothing is being saved now")
    expect(window.fact("Stall")).to_contain_text("published in 1.50 s")
    expect(window.fact("Goes next")).to_have_text("step 10: not kept by the rules (the last 2, every 20th)")
    expect(window.fact("Attention")).to_contain_text("1 step is damaged: damaged step 15; 2 steps set aside")
    expect(window.fact("Changed most")).to_contain_text("layer 3")
    expect(window.page.locator("#link-state")).to_have_text("live")


def test_the_newest_step_is_verified_from_the_run(window: Window, site: Served) -> None:
    """What was not read again is not called intact; damage moves the answer to the step before, after a reload too."""
    window.open(run_route(site.run_id("newest")))
    newest = window.fact("Newest")
    expect(newest).to_contain_text("step 20")
    expect(newest).to_contain_text("not verified: its manifest is good")
    newest.get_by_role("button", name="Verify every byte").click()
    expect(newest).to_contain_text("step 10")
    expect(window.fact("Attention")).to_contain_text("1 step is damaged: step 20")
    newest.get_by_role("button", name="Verify every byte").click()
    expect(newest).to_contain_text("every byte verified")
    expect(window.row("step 10")).to_contain_text("verified")
    window.page.reload()
    expect(newest).to_contain_text("step 10")
    expect(newest).to_contain_text("every byte verified")
    expect(window.row("step 20")).to_contain_text("found damaged by a verification")


def test_the_table_filters_and_chooses_two_steps(window: Window, site: Served) -> None:
    run = site.run_id("branches")
    window.open(run_route(run))
    steps = window.section("Steps")
    rows = steps.locator("tbody tr[data-index]")
    expect(rows).to_have_count(7)
    steps.get_by_role("button", name="set aside").click()
    expect(rows).to_have_count(2)
    assert "filter=set+aside" in window.page.url
    window.page.reload()
    expect(rows).to_have_count(2)
    steps.get_by_role("button", name="all").click()
    steps.get_by_role("searchbox").fill("best")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("step 20")
    steps.get_by_role("searchbox").fill("999")
    expect(steps.get_by_text("No step fits the filter.")).to_be_visible()
    steps.get_by_role("searchbox").fill("")
    for name in ("step 45", "step 35"):
        steps.get_by_role("checkbox", name=f"Choose {name}", exact=True).click()
    steps.get_by_role("link", name="Compare step 35 with step 45").click()
    expect(window.page.get_by_role("heading", level=1, name="What changed")).to_be_visible()


@pytest.mark.full
def test_the_reasons_of_retention_are_named(window: Window, site: Served) -> None:
    window.open(run_route(site.run_id("branches")))
    keeping = window.section("Keeping")
    expect(keeping).to_contain_text("Rules: the last 2, every 20th")
    expect(keeping.get_by_role("row").filter(has_text="step 10")).to_contain_text("goes next")
    expect(keeping.get_by_role("row").filter(has_text="step 35")).to_contain_text("tag released")


def test_the_timeline_speaks_and_opens_a_step(window: Window, site: Served) -> None:
    window.open(run_route(site.run_id("branches")))
    chart = window.page.locator(".chart-frame")
    readout = window.section("Timeline").locator(".readout")
    expect(window.page.locator(".blade")).to_have_count(7)
    expect(window.page.locator(".blade.damaged .cross")).to_have_count(1)
    chart.focus()
    window.page.keyboard.press("End")
    expect(readout).to_contain_text("step 45, committed")
    window.page.keyboard.press("Home")
    expect(readout).to_contain_text("step 10, committed · 28.6 kB")
    window.page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("damaged")
    window.page.keyboard.press("ArrowRight")
    window.page.keyboard.press("Enter")
    expect(window.page.get_by_role("heading", level=1, name="step 20")).to_be_visible()


def test_a_damaged_step_says_why(window: Window, site: Served) -> None:
    run = site.run_id("damaged")
    window.open(run_route(run))
    expect(window.row("step 30")).to_contain_text("damaged")
    window.allow("status of")
    window.open(step_route(run, 30))
    expect(window.page.get_by_role("alert")).to_contain_text("holdfast.json")


def test_steps_that_come_and_go_do_not_move_what_is_in_sight(opening, tmp_path: Path) -> None:
    root = tmp_path / "live"
    sample_runs.light_steps(root, range(10, 1010, 10))
    with served(root) as server, opening(server.address) as window:
        window.open(run_route(server.run_id("live")))
        table = window.section("Steps").locator(".windowed")
        expect(window.page.locator("#link-state")).to_have_text("live")
        expect(window.fact("Silent")).to_contain_text("they came every 7.00 s")
        table.evaluate("node => { node.scrollTop = 38 * 40; }")
        row = window.section("Steps").locator("tbody tr").filter(has_text="step 560")
        expect(row).to_be_visible()
        before = height_in(table, row)
        sample_runs.light_steps(root, [1010, 1020])
        shutil.rmtree(root / "step-000000000010")
        expect(window.fact("Newest")).to_contain_text("step 1,020")
        expect(window.section("Steps").get_by_role("button", name="all")).to_contain_text("101")
        assert abs(height_in(table, row) - before) <= 1
        table.evaluate("node => { node.scrollTop = 0; }")
        expect(window.section("Steps").locator("tbody tr[data-index='0']")).to_contain_text("step 1,020")


def height_in(table: Locator, row: Locator) -> float:
    """Return how far below the top of the table a row is in sight."""
    places = table.bounding_box(), row.bounding_box()
    assert places[0] is not None and places[1] is not None
    return places[1]["y"] - places[0]["y"]


@pytest.mark.full
def test_a_lost_server_is_shown_and_found_again(opening, tmp_path: Path) -> None:
    root = tmp_path / "lost"
    sample_runs.light_steps(root, [10])
    with served(root) as server:
        port = int(server.address.rstrip("/").rpartition(":")[2])
        with opening(server.address) as window:
            window.allow("ERR_")
            window.open(run_route(server.run_id("lost")))
            state = window.page.locator("#link-state")
            expect(state).to_have_text("live")
            server.stop()
            expect(state).to_have_text("connection lost, trying again")
            sample_runs.light_steps(root, [20])
            with served(root, port=port):
                expect(state).to_have_text("live", timeout=30_000)
                expect(window.fact("Newest")).to_contain_text("step 20")


@pytest.mark.full
def test_a_page_that_nobody_sees_has_no_connection(opening: Callable[..., Any], tmp_path: Path) -> None:
    """Browsers allow a server six connections: hidden tabs must not use them up. Seen again, it shows what is new."""
    root = tmp_path / "hidden"
    sample_runs.light_steps(root, [10])
    show = """(hidden) => {
      Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with served(root) as server, opening(server.address) as window:
        window.open(run_route(server.run_id("hidden")))
        expect(window.page.locator("#link-state")).to_have_text("live")
        window.page.evaluate(show, True)
        sample_runs.light_steps(root, [20])
        window.page.wait_for_timeout(3000)
        expect(window.fact("Newest")).to_contain_text("step 10")
        window.page.evaluate(show, False)
        expect(window.fact("Newest")).to_contain_text("step 20")


@pytest.mark.full
def test_the_first_step_of_an_empty_root_appears(opening, tmp_path: Path) -> None:
    root = tmp_path / "fresh"
    root.mkdir()
    with served(root) as server, opening(server.address) as window:
        window.open()
        expect(window.row("fresh")).to_contain_text("\u2013")
        window.page.get_by_role("link", name="fresh").click()
        expect(window.fact("Newest")).to_have_text("no step was saved yet")
        expect(window.page.locator("#link-state")).to_have_text("live")
        sample_runs.light_steps(root, [10])
        expect(window.fact("Newest")).to_contain_text("step 10")


@pytest.mark.full
def test_a_hostile_name_is_a_text(window: Window) -> None:
    window.open()
    window.page.get_by_role("link", name=HOSTILE_NAME).click()
    expect(window.page.get_by_role("heading", level=1)).to_have_text(HOSTILE_NAME)
    assert window.page.locator("img").count() == 0
