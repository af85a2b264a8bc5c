"""Hints that end an error message: guesses at the intended form of a malformed statement."""

from __future__ import annotations

import difflib
import re

from holdfast.mapping.syntax.statement import FLAGS, OPTION_NAMES, Key

_ARROWS = ("=>", "->>", ">>", "→", "⇒", "⟶", "<-", "←", ">")
_QUOTES = "\u201c\u201d\u201e\u2018\u2019\u201a`\xb4\xab\xbb"  # typographic quotes
_EXAMPLES = {
    "axis": "axis=0", "sizes": "sizes=[8, 4]", "permute": "permute='[1, 0]'", "reshape": "reshape=[2, 3, 4]",
    "src_shape": "src_shape=[6, 4]", "dtype": "dtype='bfloat16'", "src_dtype": "src_dtype='bfloat16'",
    "dst_dtype": "dst_dtype='float32'", "num_heads": "num_heads=32", "num_key_value_groups": "num_key_value_groups=8",
}  # fmt: skip


def arrow(text: str, at: int) -> str | None:
    """Return the mistaken arrow at this position, or None."""
    return next((mark for mark in _ARROWS if text.startswith(mark, at)), None)


def has_arrow(text: str) -> bool:
    """Return True if a text contains a mistaken arrow, so that it cannot be a name."""
    return any(mark in text for mark in ("=>", *_ARROWS[3:8]))


def character(text: str, at: int) -> str:
    """Return a hint for a character that starts no token."""
    if arrow(text, at) is not None:
        return "; did you mean the arrow `->`?"
    if text[at] in _QUOTES:
        return "; did you mean a plain quote, ' or \"?"
    if text[at] == "^":
        return "; did you mean `^T`, with a capital T?"
    if text[at] in "()":
        return "; did you mean a list in square brackets, such as sizes=[8, 4]?"
    if text[at] in "{}":
        return "; did you mean an id, such as ${LAYER_ID}?"
    if text[at] in ";|+&":
        return "; did you mean a comma?"
    return ""


def example(name: str) -> str:
    """Return an example of an option with its value."""
    return _EXAMPLES.get(name, f"{name}=4")


def option(word: str) -> str:
    """Return a hint with the options whose names resemble a word."""
    lowered = word.lower().replace("-", "_")
    near = difflib.get_close_matches(lowered, (*FLAGS, *OPTION_NAMES), 2, 0.6)
    written = [name if name in FLAGS else f"{name}=" for name in near]
    return f"; did you mean {' or '.join(written)}?" if written else ""


def misread_flag(rights: tuple[Key, ...]) -> str:
    """Return a hint if one of several right keys looks like a misspelt option."""
    for key in rights[1:]:
        near = difflib.get_close_matches(key.pattern.lower(), (*FLAGS, *OPTION_NAMES), 1, 0.75)
        if near:
            return f"; {key.pattern!r} is parsed as a key here: did you mean the option {example_of(near[0])}?"
    return ""


def example_of(name: str) -> str:
    return name if name in FLAGS else example(name)


def missing_separator(text: str) -> str:
    """Return a hint for a number followed by letters: two statements or options without a separator."""
    found = re.match(r"-?[0-9]+(?=[A-Za-z_])", text)
    return f"; is a comma or a new line missing after {found.group()}?" if found else ""


def upper_case(text: str) -> str:
    """Return a hint for an id in lower case."""
    found = re.match(r"\$\{?([A-Za-z][A-Za-z_0-9]*?)(?=[^A-Za-z_0-9]|$)", text)
    return f"; did you mean ${found[1].upper()}?" if found and found[1] != found[1].upper() else ""
