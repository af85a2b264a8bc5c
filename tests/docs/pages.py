"""The code blocks of a Markdown page, with the marks that the page gives them.

A mark is an HTML comment, invisible on the page, directly above a Python block:

- `<!-- setup: NAME -->` begins a new namespace, with the names that the setup of tests/docs/setups.py defines.
- `<!-- not run: REASON -->` leaves the block out.
- `<!-- raises: ERROR -->` expects the block to raise this error.
- `<!-- full: REASON -->` leaves the block to `make full`.
- `<!-- torchrun: 2 1 -->` runs the block as a program under torchrun, with these numbers of ranks one after another.

Blocks without a mark go on where the block before them ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(r"( *)(```+)(\w*)[^`]*")
MARK = re.compile(r" *<!-- (setup|not run|raises|full|torchrun): (.+) -->")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block: its language, its text, and the line of its first line, from 1."""

    language: str
    text: str
    line: int
    mark: str = ""
    value: str = ""


def pages() -> list[Path]:
    """Return README.md and every page under docs/."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a page in order. A fence that is not closed, and a mark of no block, raise."""
    lines = page.read_text().splitlines()
    mark: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        fence = FENCE.fullmatch(lines[number])
        if not fence:
            mark = _mark_at(page, number, lines[number], mark)
            number += 1
            continue
        indent, ticks, language = fence.groups()
        try:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == ticks)
        except StopIteration:
            raise ValueError(f"{page.name}:{number + 1}: the fence is not closed") from None
        text = "".join(line.removeprefix(indent) + "\n" for line in lines[number + 1 : end])
        yield CodeBlock(language, text, number + 2, *(mark.groups() if mark else ()))
        mark, number = None, end + 1


def _mark_at(page: Path, number: int, line: str, before: re.Match[str] | None) -> re.Match[str] | None:
    """Return the mark that holds after a line: blank lines keep it."""
    if before and not line.strip():
        return before
    if before:
        raise ValueError(f"{page.name}:{number}: a mark stands directly above its block")
    return MARK.fullmatch(line)
