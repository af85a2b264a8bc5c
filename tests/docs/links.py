"""The pages that the tests of this folder read, and what they hold: links, anchors, code."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "src/holdfast/spmd/README.md")
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^ *(?P=mark) *$", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: its language, the rest of its first line, its text and the line where the text begins."""

    language: str
    options: str
    text: str
    line: int


def pages() -> list[Path]:
    """Return every page of the site, and those beside it."""
    return [*(REPOSITORY / name for name in BESIDE), *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    """Return a page's path below the repository."""
    return page.relative_to(REPOSITORY).as_posix()


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the code blocks of a page."""
    text = page.read_text()
    return tuple(_block(text, match) for match in FENCE.finditer(text))


def _block(text: str, match: re.Match[str]) -> Block:
    language, _, options = match["info"].strip().partition(" ")
    return Block(language, options, textwrap.dedent(match["text"]), text.count("\n", 0, match.start()) + 2)


@cache
def prose(page: Path) -> str:
    """Return a page without its code blocks; lines keep their numbers."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def links(page: Path) -> Iterator[str]:
    """Yield the addresses that a page links to. Code in backticks has none."""
    yield from LINK.findall(re.sub(r"`[^`\n]*`", "``", prose(page)))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page that a repository's host and the site both make of its headings."""
    hosted, built = _Numbered("-"), _Numbered("_")
    both = set()
    for heading in HEADING.findall(prose(page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = hosted.next(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
        if slug == built.next(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip())):
            both.add(slug)
    return frozenset(both)


class _Numbered:
    """Tell headings of one name apart, as their hosts do: with -1, or with _1."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.used: dict[str, int] = {}

    def next(self, slug: str) -> str:
        count = self.used[slug] = self.used.get(slug, -1) + 1
        return f"{slug}{self.mark}{count}" if count else slug
