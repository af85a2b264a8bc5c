"""No file is longer than a stranger reads at one sitting."""

from __future__ import annotations

from collections.abc import Iterator

from tests.house.sources import files, place

MOST_LINES = 400
# Files that are still to be split.
LONGER: dict[str, int] = {}


def find() -> Iterator[str]:
    """Yield a line for each file that is too long."""
    for path in files():
        lines = path.read_text().count("\n")
        if lines > LONGER.get(place(path), MOST_LINES):
            yield f"{place(path)}: {lines} lines, at most {MOST_LINES}: split it by idea"
