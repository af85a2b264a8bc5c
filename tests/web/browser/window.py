"""A browser window on the page: every error, dialog and violation of the policy in it fails the test that opened it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page

WAIT_MS = 20_000
_REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violated: ${event.violatedDirective} by ${event.blockedURI} ${event.sample}`));
"""


def expect(locator: Locator) -> Any:
    """Assert about what is on the page, with time to come true."""
    from playwright.sync_api import expect as playwright_expect  # the tests must be importable without it

    assert not locator.page.is_closed(), "the window is closed"
    playwright_expect.set_options(timeout=WAIT_MS)
    return playwright_expect(locator)


class Window:
    """A page of the browser with what went wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.problems: list[str] = []
        self._allowed: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(_REPORT_VIOLATIONS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._dialog)

    def open(self, route: str = "#/") -> None:
        """Show a view."""
        self.page.goto(self.address + route)

    def allow(self, text: str) -> None:
        """Expect messages of the console that contain a text; they are no problem from now on."""
        self._allowed.append(text)

    def row(self, text: str) -> Locator:
        """Return the first row of a table that contains a text."""
        return self.page.locator("tbody tr").filter(has_text=text).first

    def section(self, title: str) -> Locator:
        """Return the section of a title."""
        return self.page.get_by_role("region", name=title, exact=True)

    def fact(self, name: str) -> Locator:
        """Return the answer beside a name in the summary of a run."""
        return self.page.locator(".fact-line").filter(has=self.page.locator("dt", has_text=name)).locator("dd")

    def shows(self, text: str) -> None:
        """Wait until the page contains a text."""
        expect(self.page.get_by_text(text).first).to_be_visible()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(text in message.text for text in self._allowed):
            self.problems.append(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Window]:
    """Open a window; options are those of a browser context: viewport, color_scheme, reduced_motion."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    try:
        window = Window(context.new_page(), address)
        yield window
        assert not window.problems, "\n".join(window.problems)
    finally:
        context.close()


def run_route(run: str) -> str:
    return f"#/run/{quote(run, safe='')}"


def step_route(run: str, step: int | str) -> str:
    folder = step if isinstance(step, str) else f"step-{step:012d}"
    return f"{run_route(run)}/step/{quote(folder, safe='')}"


def compare_route(run: str, a: int, b: int) -> str:
    sides = [quote(f"{run}/step-{step:012d}", safe="") for step in (a, b)]
    return f"#/compare?a={sides[0]}&b={sides[1]}"
