"""The pictures of docs/page.md: taken here, so that they show the page as it is.

`HOLDFAST_WRITE_PICTURES=1 python -m pytest --full tests/web/browser/test_pictures.py` writes them into docs/img.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import REPOSITORY
from tests.web.browser.picture_run import make_picture_run, save_in_flight
from tests.web.browser.served import Served, served
from tests.web.browser.window import Window, compare_route, expect, run_route, step_route

DOCS = REPOSITORY / "docs" / "img"
DESK = {"width": 1200, "height": 1000}
TALL = {"width": 1200, "height": 1420}
PHONE = {"width": 390, "height": 844}
NAMES = ("run", "run_dark", "checkpoint", "compare", "layout", "phone")


@pytest.fixture(scope="module")
def pictured(browser: Any) -> Iterator[Served]:
    """A server of the run in the pictures, whose address on the page is that of no user."""
    with tempfile.TemporaryDirectory(prefix="runs-") as top:
        folder = Path(top) / "llama-small"
        make_picture_run(folder)
        with save_in_flight(folder), served(folder) as server:
            yield server


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_of_the_docs(opening: Callable[..., Any], pictured: Served, tmp_path: Path, name: str) -> None:
    viewport = {"phone": PHONE, "run": TALL, "run_dark": TALL, "checkpoint": TALL}.get(name, DESK)
    options: dict[str, Any] = {"viewport": viewport, "reduced_motion": "reduce"}
    options["color_scheme"] = "dark" if name in ("run_dark", "phone") else "light"
    with opening(pictured.address, **options) as window:
        SHOW[name](window, pictured.run_id("llama-small"))
        window.page.wait_for_timeout(300)
        folder = DOCS if os.environ.get("HOLDFAST_WRITE_PICTURES") == "1" else tmp_path
        path = folder / f"page_{name}.png"
        window.page.screenshot(path=path, scale="css")
        assert (DOCS / path.name).exists(), f"write it: HOLDFAST_WRITE_PICTURES=1; {path.name}"
        assert png_size(DOCS / path.name) == png_size(path), f"{path.name} in docs/img is of another size"


def show_run(window: Window, run: str) -> None:
    window.open(run_route(run))
    expect(window.fact("In flight")).to_contain_text("trouble on rank 5")
    expect(window.fact("Changed most")).to_contain_text("layer")
    expect(window.page.locator(".curve").first).to_be_visible()
    window.page.locator(".page-head").evaluate("node => node.scrollIntoView()")


def show_checkpoint(window: Window, run: str) -> None:
    window.open(step_route(run, 4000) + "?group=model&key=model.layers.3.mlp.up_proj.weight")
    window.row("0\u201315").click()
    window.page.get_by_role("treegrid").locator("tr[aria-level='4']").nth(3).click()
    window.page.get_by_role("treegrid").get_by_text("mlp", exact=True).click()
    expect(window.row("up_proj.weight")).to_be_visible()
    window.page.get_by_role("button", name="Compute statistics").click()
    expect(window.page.get_by_role("img", name="Histogram")).to_be_visible()
    window.page.locator(".actions").evaluate(
        "node => window.scrollTo(0, node.getBoundingClientRect().top + window.scrollY - 80)"
    )


def show_compare(window: Window, run: str) -> None:
    window.open(compare_route(run, 3000, 4000))
    expect(window.page.locator(".lede.big")).to_contain_text("Changed most")


def show_layout(window: Window, run: str) -> None:
    route = step_route(run, 4000)
    window.open(f"{route}/layout?mesh=fsdp:4,tp:2&group=model&key=model.layers.3.self_attn.o_proj.weight")
    expect(window.section("Restore")).to_be_visible()


def show_phone(window: Window, run: str) -> None:
    window.open(run_route(run))
    expect(window.page.locator(".curve").first).to_be_visible()


SHOW: dict[str, Callable[[Window, str], None]] = {
    "run": show_run,
    "run_dark": show_run,
    "checkpoint": show_checkpoint,
    "compare": show_compare,
    "layout": show_layout,
    "phone": show_phone,
}


def png_size(path: Path) -> tuple[int, int]:
    """Return width and height from the header of a PNG."""
    header = path.read_bytes()[16:24]
    return int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
