"""One row of training data: a query, its positive, its negatives, a label or a teacher's scores; checked when read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class RowFields:
    """The names of the fields of a JSONL file, or of the columns of a parquet file.

    Args:
        query: The text that is compared with the others.
        positive: The text that belongs to the query; for pairs with a label, the other text.
        negatives: A field with a list of texts, or one text; or several fields with one text each.
        label: A number of the pair, for CoSENT.
        scores: A list of a teacher's scores: of the positive and each negative, or the margins of the negatives.

    Every row needs a query and a positive. The other fields are used if the first row has them.
    """

    query: str = "query"
    positive: str = "positive"
    negatives: str | tuple[str, ...] = "negatives"
    label: str = "label"
    scores: str = "scores"

    @property
    def required(self) -> tuple[str, ...]:
        """The fields that every row has: several fields of negatives are named because they are there."""
        several = self.negatives if isinstance(self.negatives, tuple) else ()
        return (self.query, self.positive, *several)

    @property
    def names(self) -> tuple[str, ...]:
        one = () if isinstance(self.negatives, tuple) else (self.negatives,)
        return (*self.required, *one, self.label, self.scores)

    def __post_init__(self) -> None:
        for name in self.names:
            if not name or not isinstance(name, str) or self.names.count(name) > 1:
                raise InvalidArgument(f"RowFields has the field {name!r}: give each a name of its own")


@dataclass(frozen=True, slots=True)
class TextRow:
    """The texts of a row, the query first and the positive second, and what a loss is given beside them."""

    texts: tuple[str, ...]
    label: float | None = None
    scores: tuple[float, ...] | None = None

    @property
    def negatives(self) -> int:
        return len(self.texts) - 2

    def with_negatives(self, chosen: list[int]) -> TextRow:
        """Return the row with some of its negatives, and the scores of these."""
        texts = (*self.texts[:2], *(self.texts[2 + number] for number in chosen))
        if self.scores is None:
            return TextRow(texts, self.label)
        first = len(self.scores) - self.negatives  # 1 if the positive has a score too
        scores = (*self.scores[:first], *(self.scores[first + number] for number in chosen))
        return TextRow(texts, self.label, scores)


def parse_row(record: Mapping[str, Any], fields: RowFields) -> TextRow:
    """Return the row of a record. Raises ValueError, without file and line, which the caller knows."""
    texts = [_text(record, fields.query), _text(record, fields.positive), *_negatives(record, fields.negatives)]
    label = record.get(fields.label)
    scores = record.get(fields.scores)
    if scores is None:
        return TextRow(tuple(texts), None if label is None else checked_number(label, repr(fields.label)))
    if not isinstance(scores, list) or len(scores) not in (len(texts) - 1, len(texts) - 2) or not scores:
        found = f"{len(scores)}" if isinstance(scores, list) else f"{_kind(scores)}"
        raise ValueError(
            f"{fields.scores!r} needs a list of {len(texts) - 1} numbers (of the positive and of {len(texts) - 2} "
            f"negatives), or one of {len(texts) - 2} (margins): found {found}"
        )
    numbers = tuple(checked_number(score, repr(fields.scores)) for score in scores)
    return TextRow(tuple(texts), None if label is None else checked_number(label, repr(fields.label)), numbers)


def _negatives(record: Mapping[str, Any], names: str | tuple[str, ...]) -> list[str]:
    if isinstance(names, tuple):
        return [_text(record, name) for name in names]
    found = record.get(names)
    if found is None:
        return []
    values = found if isinstance(found, list) else [found]
    return [checked_text(value, f"{names!r}[{number}]") for number, value in enumerate(values)]


def _text(record: Mapping[str, Any], name: str) -> str:
    if record.get(name) is None:
        found = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"the row has no {name!r}; its fields are {found} (RowFields takes other names)")
    return checked_text(record[name], repr(name))


def checked_text(value: Any, name: str) -> str:
    """Return a text that has characters and can be encoded; else raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name} needs a text, found {_kind(value)}")
    if not value or value.isspace():
        raise ValueError(f"{name} is an empty text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a surrogate pair at character {error.start}, which is no text") from None
    return value


def checked_number(value: Any, name: str) -> float:
    """Return a finite number; else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} needs numbers, found {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} has {number}: it must be finite")
    return number


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
