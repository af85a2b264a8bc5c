"""A run that trains while the page is open, a rank that is killed in a save, and a run in an object store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from tests.objects.conftest import root, server
from tests.objects.server import Server
from tests.web import sample_runs
from tests.web.browser.killed_rank import killed_rank
from tests.web.browser.served import served
from tests.web.browser.window import expect, run_route

__all__ = ["root", "server"]  # fixtures


@pytest.mark.full
def test_a_run_that_trains_while_the_page_is_open(opening: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "runs" / "training"
    root.parent.mkdir()
    with served(root.parent) as server, opening(server.address) as window:
        window.open()
        process = sample_runs.train(root, steps=200, every=10)
        try:
            window.page.get_by_role("link", name="training").click(timeout=120_000)
            expect(window.page.locator("#link-state")).to_have_text("live")
            expect(window.fact("Newest")).to_contain_text(re.compile(r"step (\d|1\d)0\b"), timeout=120_000)
            expect(window.page.locator(".curve").first).to_be_visible()
            expect(window.fact("Newest")).to_contain_text("step 200", timeout=120_000)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
            process.wait()
        expect(window.fact("Stall")).to_contain_text("in the median")
        expect(window.fact("Removed last")).to_contain_text("the last 4")
        expect(window.section("Log")).to_contain_text("200")
        expect(window.fact("In flight")).to_have_text("nothing is being saved now")


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_save_stands_out(opening: Callable[..., Any], tmp_path: Path) -> None:
    """Its writer goes on when it can: what was captured is published, and the page shows that, too."""
    root = tmp_path / "killed"
    with killed_rank(root) as killed, served(root) as server, opening(server.address) as window:
        window.open(run_route(server.run_id("killed")))
        flight = window.section("In flight")
        expect(flight.locator(".rank")).to_have_count(2)
        expect(flight.locator(".rank.trouble")).to_have_count(1)
        expect(flight.locator(".rank.trouble")).to_contain_text("rank 1")
        expect(window.fact("In flight")).to_contain_text("step 2")
        expect(window.fact("In flight")).to_contain_text("trouble on rank 1")
        link = window.fact("Newest").get_by_role("link")
        link.focus()
        window.page.wait_for_timeout(2500)  # events of the save redraw the lines above it meanwhile
        expect(link).to_be_focused()
        killed.go_on()
        expect(window.fact("Newest")).to_contain_text("step 2")
        expect(window.fact("In flight")).to_have_text("nothing is being saved now")
        expect(flight).to_be_hidden()


@pytest.mark.full
def test_a_run_in_an_object_store(opening: Callable[..., Any], root: str, server: Server) -> None:
    state = {"w": np.arange(24, dtype=np.float32).reshape(4, 6)}
    holdfast.save(f"{root.partition('?')[0]}/step-000000000010?{root.partition('?')[2]}", {"model": state}, step=10)
    with served(root, env=server.environment()) as page, opening(page.address) as window:
        run = page.get("/api/runs")["runs"][0]
        window.open(run_route(run["id"]))
        expect(window.fact("Newest")).to_contain_text("step 10")
        window.row("step 10").click()
        window.page.get_by_role("button", name="Verify every byte").click()
        expect(window.page.locator(".verdict.good")).to_contain_text("every digest fits")
