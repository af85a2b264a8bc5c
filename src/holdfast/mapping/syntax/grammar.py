"""The parser: tokens to statements with keys, holes, arrays and options, and errors with line and column.

statement := keys "->" keys ("," option)*     keys := "_" | key ("," key)*
key       := word ("[" number ":" number "]")? "^T"?
option    := flag | name "=" value            value := word | "[" (number ("," number)*)? "]"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.mapping.syntax import guess
from holdfast.mapping.syntax.checks import form_problem, with_unstack
from holdfast.mapping.syntax.place import excerpt
from holdfast.mapping.syntax.statement import FLAGS, OPTION_NAMES, STAR, Hole, Key, Statement
from holdfast.mapping.syntax.statement_options import options_of
from holdfast.mapping.syntax.tokens import ARROW, END, WORD, Token, tokens_of

_HOLE = re.compile(
    r"\*|\$(?:(?P<offset>LAYER_ID_OFFSET)|(?P<name>LAYER_ID|EXPERT_ID|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)"
    r"|\{(?P<braced>[A-Z][A-Z0-9_]*)(?P<by>[+-][0-9]{1,9})?\})"
)
_NUMBER = re.compile(r"[0-9]{1,9}")


def statements_of(text: str, origin: str = "", line: int = 1) -> Iterator[Statement]:
    """Yield the statements of a text. Raises InvalidArgument with line and column."""
    tokens: list[Token] = []
    for token in tokens_of(text, origin, line):
        tokens.append(token)
        if token.kind == END:
            yield _Parser(text, origin, tokens).statement()
            tokens = []


class _Parser:
    """Parser for the tokens of one statement."""

    def __init__(self, text: str, origin: str, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._origin = origin
        self._whole = text
        self._text = text[tokens[0].begin : tokens[-2].end]

    def statement(self) -> Statement:
        first = self._next
        lefts = self._keys(right=False)
        self._arrow()
        rights = self._keys(right=True)
        options = options_of(self._options(), self._error)
        if not lefts and not rights:
            raise self._error(first, "`_ -> _` has no effect")
        statement = Statement(lefts, rights, options, first.line, first.column, self._text, self._origin)
        problem = form_problem(statement)
        if problem:
            raise statement.error(problem + guess.misread_flag(rights), InvalidArgument, (rights or lefts)[-1])
        return with_unstack(statement)

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._next
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _expect(self, kind: str, hint: str) -> Token:
        if self._next.kind != kind:
            raise self._error(self._next, f"expected {kind}, found {self._next.shown!r}; {hint}")
        return self._take()

    def _error(self, token: Token, what: str) -> InvalidArgument:
        shown = " ".join(self._text.split())[:200]
        place = excerpt(self._whole, token.begin, token.end - token.begin)
        return InvalidArgument(
            f"mapping, {self._origin}line {token.line}, column {token.column}: `{shown}`: {what}{place}"
        )

    def _arrow(self) -> None:
        """Consume the arrow between the two sides; the error guesses what was meant instead."""
        if self._next.kind == ARROW:
            self._take()
            return
        what = f"expected {ARROW}, found {self._next.shown!r}; a mapping statement is `sources -> targets`"
        if self._next.kind in ("=", ":") or set(self._next.text) == {"-"}:
            what += "; did you mean the arrow `->`?"
        elif self._next.kind == WORD:
            what += "; is a comma missing before it?"
        raise self._error(self._next, what)

    def _keys(self, right: bool) -> tuple[Key, ...]:
        if self._next.bare == "_":
            self._take()
            return ()
        keys = [self._key(right)]
        while self._next.kind == "," and not (right and self._is_option(self._at + 1)):
            self._take()
            if right and self._next.bare in OPTION_NAMES:
                name = str(self._next.bare)
                raise self._error(
                    self._next,
                    f"{name}= needs a value: write {guess.example(name)}; quote a key of that name",
                )
            keys.append(self._key(right))
        return tuple(keys)

    def _is_option(self, at: int) -> bool:
        token, after = self._tokens[min(at, len(self._tokens) - 1)], self._tokens[min(at + 1, len(self._tokens) - 1)]
        return token.kind == WORD and (token.bare in FLAGS or after.kind == "=")

    def _key(self, right: bool) -> Key:
        token = self._expect(WORD, "a key consists of letters, digits, _ . - / and holes, or quoted text")
        if token.bare == "_":
            raise self._error(token, "`_` must be alone on its side; quote a key of that name")
        pieces = self._pieces(token, right)
        array = self._array() if self._next.kind == "[" else None
        transposed = self._next.kind == "^T"
        if transposed:
            self._take()
        return Key(pieces, array, transposed, token.column, token.begin - self._tokens[0].begin)

    def _array(self) -> tuple[int, int]:
        opening = self._take()
        begin = self._array_number()
        self._expect(":", "an array is written [0:3]")
        end = self._array_number()
        self._expect("]", "an array is written [0:3]")
        if end <= begin:
            raise self._error(opening, f"the array [{begin}:{end}] has no members")
        if end - begin > limits.MAPPING_WORK:
            raise self._error(opening, f"the array has more than the limit of {limits.MAPPING_WORK} members")
        return begin, end

    def _array_number(self) -> int:
        token = self._expect(WORD, "an array is written [0:3]")
        if token.bare is None or not _NUMBER.fullmatch(token.bare):
            raise self._error(token, f"{token.shown!r} is not a number; an array is written [0:3]")
        return int(token.bare)

    def _pieces(self, token: Token, right: bool) -> tuple[str | Hole, ...]:
        pieces: list[str | Hole] = []
        for piece in token.pieces:
            if piece.quoted:
                pieces.append(piece.text)
            else:
                pieces.extend(self._bare_pieces(token, piece.text, right))
        joined = _joined(pieces)
        self._check_holes(token, joined)
        return joined

    def _bare_pieces(self, token: Token, text: str, right: bool) -> Iterator[str | Hole]:
        at = 0
        while at < len(text):
            found = _HOLE.match(text, at)
            if found:
                yield _hole(found, right)
                at = found.end()
                continue
            if text[at] == "$":
                raise self._error(
                    token,
                    f"{text[at : at + 40]!r} is not an id: ids are $UPPER_CASE, ${{UPPER_CASE}} or "
                    "${UPPER_CASE-1}; quote a $ that is part of a key"
                    f"{guess.upper_case(text[at:])}",
                )
            end = at + 1
            while end < len(text) and text[end] not in "$*":
                end += 1
            yield text[at:end]
            at = end

    def _check_holes(self, token: Token, pieces: Sequence[str | Hole]) -> None:
        holes = [piece for piece in pieces if isinstance(piece, Hole)]
        if not pieces or any(isinstance(piece, str) and "\0" in piece for piece in pieces):
            raise self._error(token, "a key needs at least one character and no zero byte")
        if sum(hole.name == STAR for hole in holes) > 1:
            raise self._error(token, "a key can have at most one *; use ids such as $LAYER_ID for the others")
        text = "".join("\0" if isinstance(piece, Hole) else piece for piece in pieces)
        if re.search("\0[0-9]*\0", text):
            raise self._error(token, "two holes must be separated by something other than digits")

    def _options(self) -> Iterator[tuple[Token, str, Token | list[int] | None]]:
        """Yield each option as its token, name and value."""
        while self._next.kind == ",":
            self._take()
            token = self._expect(WORD, "a key or an option must follow a comma")
            name = token.bare
            if name in FLAGS:
                yield token, str(name), None
                continue
            if name not in OPTION_NAMES or self._next.kind != "=":
                known = ", ".join([*FLAGS, *(f"{known}=" for known in OPTION_NAMES)])
                hint = guess.option(token.text)
                raise self._error(token, f"{token.shown!r} is not an option; the options are {known}{hint}")
            self._take()
            yield (
                token,
                str(name),
                self._numbers() if self._next.kind == "[" else self._value(str(name)),
            )
        self._expect(END, f"keys and options are separated by commas{self._after_end()}")

    def _value(self, name: str) -> Token:
        return self._expect(WORD, f"{name}= needs a value, such as {guess.example(name)}")

    def _after_end(self) -> str:
        """Return a hint for a token found where the statement should end."""
        before = self._tokens[max(self._at - 1, 0)]
        if self._next.kind == "=" and before.bare in FLAGS:
            return f"; {before.bare} takes no value"
        if self._next.kind == ARROW:
            return "; is a new line missing between two statements?"
        return "; is a comma missing before it?" if self._next.kind == WORD else ""

    def _numbers(self) -> list[int]:
        self._take()
        numbers: list[int] = []
        while self._next.kind != "]":
            if numbers:
                self._expect(",", "numbers in a list are separated by commas")
            numbers.append(self._array_number())
        self._take()
        return numbers


def _hole(found: re.Match[str], right: bool) -> Hole:
    if found.group() == STAR:
        return Hole(STAR)
    if found["offset"]:
        return Hole("LAYER_ID", -1 if right else 0)
    return Hole(found["name"] or found["braced"], int(found["by"] or 0))


def _joined(pieces: Sequence[str | Hole]) -> tuple[str | Hole, ...]:
    """Merge adjacent texts, so that equal keys compare equal."""
    out: list[str | Hole] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        elif piece != "":
            out.append(piece)
    return tuple(out)
