"""Much data: thousands of steps and a hundred thousand keys cost as much as what is in sight."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.web import sample_runs
from tests.web.browser.served import served
from tests.web.browser.window import expect, run_route, step_route

ROWS_MOST = 80


@pytest.mark.full
@pytest.mark.parametrize("count", [300, 5000])
def test_thousands_of_steps_stay_quick(opening, tmp_path: Path, count: int) -> None:
    sample_runs.many(tmp_path / "many", count)
    with served(tmp_path) as server, opening(server.address) as window:
        server.get("/api/runs")
        window.open(run_route(server.run_id("many")))
        table = window.section("Steps").get_by_role("table")
        expect(table).to_have_attribute("aria-rowcount", str(count + 1))
        assert table.locator("tr").count() < ROWS_MOST
        assert window.page.locator(".blade").count() < 200
        table.locator("tbody tr[data-index='0']").focus()
        window.page.keyboard.press("End")
        expect(table.locator(f"tr[data-index='{count - 1}']")).to_be_focused()
        expect(table.locator(f"tr[data-index='{count - 1}']")).to_contain_text("step 10")
        assert table.locator("tr").count() < ROWS_MOST
        window.section("Steps").get_by_role("searchbox").fill("step-0000000004")
        expect(table.locator("tbody tr[data-index='0']")).to_contain_text("step 4")
        assert longest_task_ms(window) < 1000 * slowdown()


@pytest.mark.full
@pytest.mark.parametrize("layers", [3, 61])
def test_a_hundred_thousand_keys_stay_quick(opening, tmp_path: Path, layers: int) -> None:
    keys = sample_runs.mixture_keys(layers)
    rows = sample_runs.np.zeros((8, 8), sample_runs.np.float32)
    sample_runs.write_step(tmp_path / "keys", 1000, {"model": dict.fromkeys(keys, rows)})
    with served(tmp_path) as server, opening(server.address) as window:
        window.open(step_route(server.run_id("keys"), 1000))
        tree = window.page.get_by_role("treegrid")
        expect(tree.get_by_role("row", name=f"0\u2013{layers - 1}")).to_be_visible()
        window.page.get_by_role("button", name="fold layers").click()
        expect(tree.locator("tr[aria-level='3']").first).to_be_visible()
        window.page.get_by_role("searchbox", name="Search keys").fill("weight")
        expect(tree).to_have_attribute("aria-rowcount", str(len(keys) + 1))
        tree.locator("tbody tr[data-index='0']").focus()
        window.page.keyboard.press("End")
        last = tree.locator(f"tr[data-index='{len(keys) - 1}']")
        expect(last).to_be_focused()
        expect(last).to_contain_text("model.norm.weight")
        assert tree.locator("tr").count() < ROWS_MOST
        assert longest_task_ms(window) < 1000 * slowdown()


def longest_task_ms(window) -> float:
    """How long the page was busy without a break, at most; measured by drawing everything in sight once more."""
    return window.page.evaluate(
        """() => new Promise((done) => {
          const started = performance.now();
          document.querySelector(".windowed").scrollTop = 0;
          requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - started)));
        })"""
    )


def slowdown() -> float:
    """How many times slower than a quiet machine this one is now."""
    started = time.process_time()
    sum(number * number for number in range(300_000))
    return max(1.0, (time.process_time() - started) / 0.03)
