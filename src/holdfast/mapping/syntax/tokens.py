"""Tokens of the mapping language: words, quoted text and marks, each with its position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.mapping.syntax import guess
from holdfast.mapping.syntax.place import excerpt

WORD, ARROW, END = "word", "->", "end of line"
_SKIPPED = re.compile(r"[ \t\f\v\r]+|#[^\n]*")
_BARE = re.compile(r"(?:\$\{[^}\n]*\}|[A-Za-z0-9_.$*/]|-(?!>))+")
_QUOTED = re.compile(r""""(?:[^"\\\n]|\\["'\\])*"|'(?:[^'\\\n]|\\["'\\])*'""")
_MARKS = (ARROW, "^T", ",", "=", "[", "]", ":")
_CONTINUED = (ARROW, ",")


@dataclass(frozen=True, slots=True)
class WordPiece:
    """A part of a word. Quoted text is literal."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Token:
    """A mark, a word or the end of a statement. `begin` and `end` are positions in the whole text."""

    kind: str
    line: int
    column: int
    begin: int
    end: int
    pieces: tuple[WordPiece, ...] = ()

    @property
    def bare(self) -> str | None:
        """The text of an unquoted word, or None."""
        return self.pieces[0].text if len(self.pieces) == 1 and not self.pieces[0].quoted else None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces) if self.kind == WORD else self.kind

    @property
    def shown(self) -> str:
        return self.text[:80]


def tokens_of(text: str, origin: str = "", line: int = 1) -> Iterator[Token]:
    """Yield the tokens of a text. Every statement ends with an END."""
    if len(text) > limits.MAPPING_BYTES:
        raise InvalidArgument(
            f"mapping, {origin}line {line}: {len(text)} characters, more than the limit of {limits.MAPPING_BYTES}"
        )
    at = line_begin = 0
    last = END
    depth = 0
    opened = Token("[", line, 1, 0, 0)
    while at < len(text):
        skipped = _SKIPPED.match(text, at)
        if skipped:
            at = skipped.end()
            continue
        if text[at] == "\n":
            if last not in (END, *_CONTINUED) and not depth:
                yield Token(END, line, at - line_begin + 1, at, at)
                last = END
            at += 1
            line, line_begin = line + 1, at
            continue
        token = _token(text, at, line, at - line_begin + 1, origin)
        if token.kind == "[":
            opened = token
        if depth and token.kind == ARROW:
            raise _unclosed(opened, text, origin)
        depth = max(0, depth + (token.kind == "[") - (token.kind == "]"))
        yield token
        last, at = token.kind, token.end
    if depth:
        raise _unclosed(opened, text, origin)
    if last != END:
        yield Token(END, line, at - line_begin + 1, at, at)


def _unclosed(opened: Token, text: str, origin: str) -> InvalidArgument:
    return InvalidArgument(
        f"mapping, {origin}line {opened.line}, column {opened.column}: the [ is not closed; a list is written "
        f"[8, 4], and an array [0:3]{excerpt(text, opened.begin)}"
    )


def _token(text: str, at: int, line: int, column: int, origin: str) -> Token:
    wrong = guess.arrow(text, at)
    for mark in _MARKS:
        if wrong is None and text.startswith(mark, at):
            return Token(mark, line, column, at, at + len(mark))
    pieces: list[WordPiece] = []
    end = at
    while end < len(text) and wrong is None:
        bare, quoted = _BARE.match(text, end), _QUOTED.match(text, end)
        if bare:
            pieces.append(WordPiece(bare.group(), False))
            end = bare.end()
        elif quoted:
            pieces.append(WordPiece(re.sub(r"\\(.)", r"\1", quoted.group()[1:-1]), True))
            end = quoted.end()
        else:
            break
    if not pieces:
        place = excerpt(text, at, len(wrong or text[at]))
        hint = "an unclosed quote" if text[at] in "\"'" else f"unexpected {(wrong or text[at])!r}"
        raise InvalidArgument(
            f"mapping, {origin}line {line}, column {column}: {hint}; keys with characters other than letters, "
            f"digits and _ . - / must be quoted{guess.character(text, at)}{place}"
        )
    return Token(WORD, line, column, at, end, tuple(pieces))
