"""With --allow-changes a step is tagged and old ones are deleted, each confirmed; without it neither is offered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.web import sample_runs
from tests.web.browser.served import Served, served
from tests.web.browser.window import Window, expect, run_route, step_route


def test_nothing_is_offered_without_the_option(window: Window, site: Served) -> None:
    run = site.run_id("branches")
    window.open(run_route(run))
    expect(window.section("Keeping")).to_contain_text("goes next")
    assert window.page.get_by_role("button", name="Delete").count() == 0
    window.open(step_route(run, 45))
    window.shows("Verify every byte")
    assert window.page.get_by_role("button", name="Tag this step").count() == 0
    window.allow("status of 403")
    status = """(path) => fetch(path, {method: "POST", headers: {"X-Holdfast": "1"}, body: '{"name": "x"}'})
      .then((answer) => answer.status)"""
    assert window.page.evaluate(status, f"/api/runs/{run}/steps/step-000000000045/tag") == 403


def test_tags_and_deletion_are_confirmed(opening: Callable[..., Any], tmp_path: Path) -> None:
    sample_runs.branches(tmp_path / "branches")
    with served(tmp_path, options=("--allow-changes",)) as server, opening(server.address) as window:
        run = server.run_id("branches")
        window.open(step_route(run, 45))
        window.page.get_by_label("New tag").fill("good")
        window.page.get_by_role("button", name="Tag this step").click()
        expect(window.page.locator(".page-head")).to_contain_text("good")
        window.page.get_by_role("button", name="Remove tag good").click()
        window.page.get_by_role("button", name="Cancel").click()
        window.page.get_by_role("button", name="Remove tag good").click()
        window.page.get_by_role("button", name="Remove", exact=True).click()
        expect(window.page.locator(".page-head")).not_to_contain_text("good")
        window.open(run_route(run))
        window.page.get_by_role("button", name="Delete what goes next").click()
        expect(window.section("Keeping").get_by_role("alert")).to_contain_text("Delete 1 step now: step 10.")
        assert (tmp_path / "branches" / "step-000000000010").exists()
        window.page.get_by_role("button", name="Delete", exact=True).click()
        expect(window.section("Steps").get_by_role("button", name="all")).to_contain_text("6")
        expect(window.section("Keeping")).to_contain_text("gone")
    assert not (tmp_path / "branches" / "step-000000000010").exists()
