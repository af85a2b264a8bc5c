"""Phrases that read like a translation: phrases.toml lists them, with the uses that are right."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.house import sources
from tests.house.sources import files, place

LIST = Path(__file__).with_name("phrases.toml")


def find() -> Iterator[str]:
    """Yield a line for each place that has a listed phrase."""
    listed = tomllib.loads(LIST.read_text())
    patterns = [(_pattern(phrase), better) for phrase, better in listed["phrases"].items()]
    allowed = listed.get("allowed", {})
    for path, shown in [*((path, place(path)) for path in files()), *_pages()]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, better in patterns:
                found = pattern.search(line)
                if found and not any(use in line for use in allowed.get(shown, ())):
                    yield f"{shown}:{number}: {found[0]!r}: write {better}"


def _pages() -> Iterator[tuple[Path, str]]:
    """Yield the pages that users read, with their paths below the repository."""
    top = sources.REPOSITORY
    for path in sorted([*top.glob("*.md"), *(top / "docs").rglob("*.md")]):
        yield path, path.relative_to(top).as_posix()


def _pattern(phrase: str) -> re.Pattern[str]:
    """Return the pattern of a phrase, which may begin a sentence. `is None` is code, and no phrase."""
    begun = phrase[0].upper() + phrase[1:]
    return re.compile(rf"(?<!\w)(?:{phrase}|{begun})(?!\w)")
