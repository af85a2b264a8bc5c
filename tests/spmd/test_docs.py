"""docs/spmd.md and the README of holdfast.spmd say what is: the families, what raises, the versions, an example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.spmd
from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.registry import all_rules
from tests.spmd.raises import RAISES

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "spmd.md").read_text()
README = (REPOSITORY / "src" / "holdfast" / "spmd" / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _table(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the first table after a heading."""
    rows = re.findall(r"^\|(.+)\|$", text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def test_every_family_has_its_line():
    assert sorted(row[0] for row in _table("The families")) == sorted({rule.family for rule in all_rules()})


def test_what_raises_is_told_with_its_reason():
    assert {row[0].strip("`"): row[1] for row in _table("What still raises")} == RAISES


def test_the_versions_are_those_that_are_known():
    known = re.search(r"^Known: torch (.+?)\. On", TEXT, re.MULTILINE)
    assert known is not None
    assert tuple(re.findall(r"\d+\.\d+", known[1])) == torch_versions.KNOWN


def test_the_readme_has_a_line_for_each_version():
    *versions, other = [row[0] for row in _table("Versions", README)]
    assert tuple(reversed(versions)) == torch_versions.KNOWN
    assert other == "any other"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_the_example_of_the_readme_prints_what_it_says(tmp_path: Path):
    """Started as the page says; it is the page's only program."""
    (program,) = [block for kind, block in BLOCKS if kind == "python"]
    (printed,) = [block for kind, block in BLOCKS if kind == "text"]
    file = tmp_path / "example.py"
    file.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed


def test_the_links_of_the_pages_lead_somewhere():
    pages = [REPOSITORY / "docs" / "spmd.md", REPOSITORY / "docs" / "upstream.md"]
    for page in [*pages, REPOSITORY / "src" / "holdfast" / "spmd" / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_errors_that_the_readme_names_are_public():
    names = re.findall(r"`((?:Spmd|Plan|Unsupported)[A-Z]\w+)`", README)
    assert len(names) >= 5
    assert all(hasattr(holdfast.spmd, name) for name in names)
