"""Links and anchors lead somewhere, code compiles, lists and tables are seen as such, and the site has every page."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from tests.docs.links import BESIDE, DOCS, REPOSITORY, anchors, blocks, links, name_of, pages, prose

EVERY = pytest.mark.parametrize("page", pages(), ids=name_of)


def test_the_readme_is_short():
    assert (REPOSITORY / "README.md").read_text().count("\n") <= 150


@EVERY
def test_every_link_and_anchor_leads_somewhere(page: Path):
    wrong = [problem for address in links(page) if (problem := _problem(page, address))]
    assert wrong == []


def _problem(page: Path, address: str) -> str:
    path, _, anchor = address.partition("#")
    if re.match(r"[a-z][a-z0-9+.-]*:", path):
        return ""
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{address}: no such file"
    if page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
        return f"{address}: the site has pages of docs/ only: name the file as code"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{address}: no heading of {name_of(target)} has this anchor, on the site and in the repository"
    return ""


@EVERY
def test_every_file_that_a_page_names_exists(page: Path):
    """As code: `tests/docs/links.py`, or `docs/*.md`. The test behind :: is for tests/house/proofs.py."""
    named = re.findall(r"`((?:tests|src|benchmarks|docs|examples|requirements)/[\w./*-]+)(?:::[^`]*)?`", prose(page))
    assert [name for name in named if not list(REPOSITORY.glob(name))] == []


@EVERY
def test_python_code_compiles(page: Path):
    for block in blocks(page):
        if block.language in ("python", "py"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)


@EVERY
def test_lists_and_tables_begin_after_a_blank_line(page: Path):
    """Without one the site shows them as running text; the host of a repository does not mind."""
    if name_of(page) in BESIDE:
        return
    before, fenced = "", page.read_text().splitlines()
    for number, line in enumerate(prose(page).splitlines()):
        starts_list = re.match(r"([-*+]|\d+\.) ", line) and not re.match(r"\s*([-*+]|\d+\.) |#|  ", before)
        starts_table = line.startswith("|") and not before.startswith(("|", "#"))
        assert not (before.strip() and (starts_list or starts_table)), f"{name_of(page)}:{number + 1}"
        assert not re.match(r" {1,3}([-*+]|\d+\.) ", line), f"{name_of(page)}:{number + 1}: nest lists by four spaces"
        before = line or fenced[number]


def test_the_site_has_every_page():
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
