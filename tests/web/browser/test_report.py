"""`holdfast report`: one file that shows a run from file://, without a server and without the network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.web.browser.window import expect


@pytest.fixture
def report(browser: Any, roots: Path, tmp_path: Path) -> Callable[[str], str]:
    """Writes a report on one of the runs and returns its address."""

    def write(name: str) -> str:
        path = tmp_path / f"{name}.html"
        command = [sys.executable, "-m", "holdfast", "report", str(roots / name), "-o", str(path)]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        return path.as_uri()

    return write


def test_a_report_opens_from_a_file(opening: Callable[..., Any], report: Callable[[str], str]) -> None:
    with opening(report("branches")) as window:
        requests: list[str] = []
        window.page.on("request", lambda request: requests.append(request.url))
        window.open()
        window.page.get_by_role("link", name="branches").click()
        expect(window.fact("Newest")).to_contain_text("step 45")
        expect(window.fact("Goes next")).to_contain_text("step 10")
        expect(window.fact("Changed most")).to_contain_text("layer 3")
        expect(window.page.locator(".blade")).to_have_count(7)
        expect(window.page.locator("#link-state")).to_have_text("report")
        window.row("step 45").click()
        expect(window.page.get_by_role("treegrid").get_by_role("row", name="layers")).to_be_visible()
        assert window.page.get_by_role("button", name="Verify").count() == 0
        window.page.go_back()
        window.fact("Changed most").get_by_role("link").click()
        expect(window.page.locator(".lede.big")).to_contain_text("Changed most: layer 3")
        expect(window.page.locator(".heat-canvas")).to_be_visible()
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.full
def test_a_report_of_hostile_names_is_text(opening: Callable[..., Any], report: Callable[[str], str]) -> None:
    with opening(report("hostile")) as window:
        window.open()
        window.page.get_by_role("link", name="hostile").click()
        window.shows("<b>loss</b>")
        window.row("step 9").click()
        window.shows("<script>alert(1)</script>")
        assert window.page.locator("main img, main script, main b").count() == 0
