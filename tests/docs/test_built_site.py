"""The check of a built site finds what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.built_site import find

OTHER = '<h1 id="here">Other</h1><a href="index.html">back</a>'


def _site(folder: Path, body: str) -> Path:
    folder.mkdir()
    (folder / "index.html").write_text(body)
    (folder / "other.html").write_text(OTHER)
    return folder


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="other.html#here">there</a> <a href="https://example.org">elsewhere</a>', ""),
        ('<a href="other.html#gone">there</a>', "no such anchor: other.html#gone"),
        ('<a href="gone.html">there</a>', "leads nowhere: gone.html"),
        ('<img src="gone.svg">', "leads nowhere: gone.svg"),
        ('<script src="https://example.org/a.js"></script>', "taken from the network: https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "taken from the network: //example.org/a.css"),
    ],
)
def test_links_and_what_a_browser_takes(body: str, problem: str, tmp_path: Path):
    findings = list(find([_site(tmp_path / "site", body)]))
    assert [finding.split(": ", 1)[1] for finding in findings] == ([problem] if problem else [])


def test_a_page_that_one_of_two_sites_lacks_is_found(tmp_path: Path):
    first, second = _site(tmp_path / "first", OTHER), _site(tmp_path / "second", OTHER)
    (first / "more.html").write_text("")
    assert list(find([first, second])) == [f"{second}/more.html: no such page"]
