"""One browser and one server for the tests of a worker; where there is no browser they skip, and in CI they fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.web import sample_runs
from tests.web.browser.served import Served, served
from tests.web.browser.window import Window, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE_NAME = "<img src=x onerror=alert(1)>"


def missing() -> str | None:
    """Return what the tests of this folder need and do not find, None if they can run."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright: pip install -r requirements/dev.txt"
    if program() is None:
        return "no browser: apt-get install chromium"
    return None


def program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def is_required() -> bool:
    """.ci/run installs a browser: without one these tests fail there, instead of being skipped."""
    return os.environ.get("HOLDFAST_BROWSER") == "required" or os.environ.get("CI") == "true"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    lacking = missing()
    if lacking is not None:
        (pytest.fail if is_required() else pytest.skip)(lacking)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program(), args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="package")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: branches with tags and a policy, damage, hostile keys, a hostile name, one whose newest step is damaged."""
    top = tmp_path_factory.mktemp("page") / "runs"
    sample_runs.branches(top / "branches")
    sample_runs.damaged(top / "damaged")
    sample_runs.hostile(top / "hostile")
    sample_runs.damaged(top / "newest")
    for step in (30, 40):
        shutil.rmtree(top / "newest" / f"step-{step:012d}")
    sample_runs.light_steps(top / HOSTILE_NAME, range(10, 40, 10))
    return top


@pytest.fixture(scope="package")
def site(browser: Browser, roots: Path) -> Iterator[Served]:
    """A server of `roots`. It asks for the browser first, so that nothing is started where there is none."""
    with served(roots) as server:
        yield server


@pytest.fixture
def window(browser: Browser, site: Served) -> Iterator[Window]:
    """A window on `site`."""
    with opened(browser, site.address) as made:
        yield made


@pytest.fixture
def opening(browser: Browser) -> Callable[..., AbstractContextManager[Window]]:
    """Opens windows on any address, with any options of a browser context."""

    def open_window(address: str, **options: Any) -> AbstractContextManager[Window]:
        return opened(browser, address, **options)

    return open_window
