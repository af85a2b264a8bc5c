"""Without a browser this is the test that says so: skipped on a machine of one's own, failed in CI."""

from __future__ import annotations

import pytest

from tests.web.browser import conftest


def test_there_is_a_browser() -> None:
    lacking = conftest.missing()
    if lacking is not None and not conftest.is_required():
        pytest.skip(f"the page is not tried in a browser: {lacking}")
    assert lacking is None


def test_ci_must_have_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "HOLDFAST_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not conftest.is_required()
    monkeypatch.setenv("CI", "true")
    assert conftest.is_required()
    monkeypatch.delenv("CI")
    monkeypatch.setenv("HOLDFAST_BROWSER", "required")
    assert conftest.is_required()
