"""docs/spmd.md says what is: the families, what raises, the versions."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.spmd import torch_private
from holdfast.spmd.registry import all_rules
from tests.spmd.raises import RAISES

TEXT = (Path(__file__).parents[2] / "docs" / "spmd.md").read_text()


def _table(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    rows = re.findall(r"^\|(.+)\|$", TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def test_every_family_has_its_line():
    assert sorted(row[0] for row in _table("The families")) == sorted({rule.family for rule in all_rules()})


def test_what_raises_is_told_with_its_reason():
    assert {row[0].strip("`"): row[1] for row in _table("What still raises")} == RAISES


def test_the_versions_are_those_that_are_known():
    known = re.search(r"^Known: torch (.+?)\. On", TEXT, re.MULTILINE)
    assert known is not None
    assert tuple(re.findall(r"\d+\.\d+", known[1])) == torch_private.KNOWN
