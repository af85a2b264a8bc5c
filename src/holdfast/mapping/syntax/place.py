"""The line of a program's text with a caret below a position, for error messages."""

from __future__ import annotations

_WIDTH = 100
_INDENT = "    "
_CUT = "..."


def excerpt(text: str, at: int, length: int = 1) -> str:
    """Return the line of `text` that contains `at`, with carets under `length` characters, to end an error message.

    A long line is shortened around the position.
    """
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[begin : len(text) if end < 0 else end].replace("\t", " ").rstrip()
    column = min(at - begin, len(line))
    first = max(0, column - _WIDTH // 2) if len(line) > _WIDTH else 0
    window = line[first : first + _WIDTH]
    before = _CUT if first else ""
    after = _CUT if first + _WIDTH < len(line) else ""
    carets = "^" * max(1, min(length, first + _WIDTH - column, len(line) - column))
    spaces = " " * (len(before) + column - first)
    return f"\n{_INDENT}{before}{window}{after}\n{_INDENT}{spaces}{carets}"
