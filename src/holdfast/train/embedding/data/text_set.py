"""A set of training rows, from one or several files: read once whole, checked, and then read by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.data.json_lines import JsonLines
from holdfast.train.embedding.data.parquet_rows import KeptGroups, ParquetRows
from holdfast.train.embedding.data.row_index import Numbers, RowIndex, text_number
from holdfast.train.embedding.data.row_order import Rows
from holdfast.train.embedding.data.text_row import RowFields, TextRow, parse_row

_JSON_GROUP = 10_000  # rows of a JSONL file that are shuffled as one group where the set has parquet files too
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
RowFile = JsonLines | ParquetRows


@dataclass(frozen=True, slots=True)
class TextSet:
    """A set of training rows for one task: a batch has rows of one set only.

    Args:
        paths: A file, or several: .jsonl or .parquet.
        name: The name in errors, metrics and batches; without it that of the first file.
        weight: The share of batches, in proportion to the other sets' weights; without it the number of rows.
        negatives: Use this many of each row's negatives, the next ones in each epoch. Without it every row needs as
            many, and all are used.
        duplicates: "put off": a row with a text that the batch has already, as query, positive or negative, waits for
            a later batch; "keep": rows are taken as they come.
        fields: The names of the fields, if they are others.
    """

    paths: str | Path | Sequence[str | Path]
    name: str = ""
    weight: float | None = None
    negatives: int | None = None
    duplicates: Literal["put off", "keep"] = "put off"
    fields: RowFields = field(default_factory=RowFields)

    def __post_init__(self) -> None:
        if not self.files:
            raise InvalidArgument("a TextSet needs a file")
        if self.duplicates not in ("put off", "keep"):
            raise InvalidArgument(f"duplicates={self.duplicates!r}: choose 'put off' or 'keep'")
        count = self.negatives
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise InvalidArgument(f"negatives={count!r} must be an integer of at least 0")

    @property
    def files(self) -> tuple[Path, ...]:
        paths = [self.paths] if isinstance(self.paths, str | Path) else self.paths
        return tuple(map(Path, paths))

    @property
    def title(self) -> str:
        return self.name or self.files[0].stem


@dataclass(frozen=True, slots=True)
class _RowShape:
    """The properties that all rows of a set share, taken from the first row."""

    negatives: int
    labeled: bool
    scores: int | None  # scores beyond one for each negative: 1 if the positive has one; None: no scores


class IndexedSet:
    """An open set: every row was read and checked; texts are read again when a batch needs them."""

    def __init__(self, settings: TextSet) -> None:
        self.name, self._settings = settings.title, settings
        self._kept = KeptGroups()
        self._files = [self._open(path) for path in settings.files]
        self._index = RowIndex()
        self._shape: tuple[_RowShape, str] | None = None
        for file in self._files:
            self._scan(file)
        if self._shape is None:
            raise InvalidArgument(f"{', '.join(map(str, settings.files))}: no rows to train on")
        shape = self._shape[0]
        self.first_place: str = self._shape[1]  # an error about all rows names the first
        self.negatives: int = shape.negatives if settings.negatives is None else settings.negatives
        self.has_labels: bool = shape.labeled
        self.has_scores: bool = shape.scores is not None
        self._ends: Rows = np.cumsum([len(file) for file in self._files], dtype=np.int64)
        self.keeps_duplicates: bool = settings.duplicates == "keep"
        self.identity: str = (
            f"{self.name}:{len(self)}x{2 + self.negatives}/{settings.duplicates}/{self._index.digest()}"
        )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def files(self) -> str:
        return ", ".join(str(file.path) for file in self._files)

    @property
    def groups(self) -> list[int] | None:
        """The rows that are read together, where not every row is as near as any other."""
        if all(file.groups is None for file in self._files):
            return None
        return [size for file in self._files for size in (file.groups or _divided(len(file)))]

    def numbers(self, rows: Rows, epochs: Rows) -> Numbers:
        """Return the numbers of the texts of these rows [rows, columns], as they are used in these epochs."""
        return self._index.numbers(rows, self._columns(rows, epochs))

    def read(self, rows: Rows, epochs: Rows) -> list[TextRow]:
        """Return these rows with the negatives of these epochs."""
        columns = self._columns(rows, epochs)
        numbers = self._index.numbers(rows, columns).tolist()
        file_of = np.searchsorted(self._ends, rows, side="right")
        found: list[TextRow | None] = [None] * len(rows)
        for number in np.unique(file_of).tolist():
            file, places = self._files[number], np.flatnonzero(file_of == number).tolist()
            inside = (rows[places] - (self._ends[number] - len(file))).tolist()
            for place, record, row in zip(places, file.read(inside), inside, strict=True):
                found[place] = self._checked(record, columns[place].tolist(), numbers[place], file, row)
        return [row for row in found if row is not None]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _checked(
        self, record: dict[str, object], columns: list[int], numbers: list[int], file: RowFile, row: int
    ) -> TextRow:
        """Return a row, which must have the texts that the scan found."""
        try:
            chosen = parse_row(record, self._settings.fields).with_negatives([column - 2 for column in columns[2:]])
        except (ValueError, IndexError):
            chosen = None
        if chosen is None or [text_number(text) for text in chosen.texts] != numbers:
            raise InvalidArgument(f"{file.row_place(row)}: the row has changed since the run began")
        return chosen

    def _columns(self, rows: Rows, epochs: Rows) -> NDArray[np.int64]:
        """Return which texts of each row are used: the query, the positive, and the epoch's negatives."""
        counts = self._index.counts(rows)[:, None] - 2
        wanted = np.arange(self.negatives)[None]
        if self._settings.negatives is not None and self.negatives:
            wanted = (epochs[:, None] * self.negatives + wanted) % counts
        both = np.broadcast_to(np.arange(2), (len(rows), 2))
        return np.concatenate((both, np.broadcast_to(2 + wanted, (len(rows), self.negatives))), axis=1)

    def _open(self, path: Path) -> RowFile:
        fields = self._settings.fields
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            return ParquetRows(path, columns=fields.names, required=fields.required, kept=self._kept)
        if suffix in (".jsonl", ".ndjson", ".json"):
            return JsonLines(path)
        first = ": decompress it first" if suffix in _COMPRESSED else ""
        raise InvalidArgument(f"{path}: rows are read from .jsonl and .parquet files{first}")

    def _scan(self, file: RowFile) -> None:
        for number, record in file.scan():
            try:
                row = parse_row(record, self._settings.fields)
                self._check_shape(row, file.place(number))
            except ValueError as error:
                raise InvalidArgument(f"{file.place(number)}: {error}") from None
            self._index.add(row.texts)
        if not len(file):
            raise InvalidArgument(f"{file.path}: the file has no rows")

    def _check_shape(self, row: TextRow, place: str) -> None:
        wanted = self._settings.negatives
        shape = _RowShape(
            row.negatives if wanted is None else 0,
            row.label is not None,
            None if row.scores is None else len(row.scores) - row.negatives,
        )
        if wanted is not None and row.negatives < wanted:
            raise ValueError(f"the row has {_count(row.negatives)}, and negatives={wanted} needs as many of each row")
        if self._shape is None:
            self._shape = (shape, place)
        elif shape != self._shape[0]:
            raise ValueError(_difference(row, shape, *self._shape, self._settings.fields))


def _difference(row: TextRow, shape: _RowShape, first: _RowShape, place: str, fields: RowFields) -> str:
    if shape.negatives != first.negatives:
        return (
            f"the row has {_count(row.negatives)}, and the first one ({place}) {first.negatives}: "
            "give each row as many, or negatives=N to use N of each row's"
        )
    if shape.labeled != first.labeled:
        return f"the row has {'a' if shape.labeled else 'no'} {fields.label!r}, unlike the first one ({place})"
    if shape.scores is None or first.scores is None:
        return f"the row has {'no ' if shape.scores is None else ''}{fields.scores!r}, unlike the first one ({place})"
    return f"the row has {len(row.scores or ())} {fields.scores!r}: the first one ({place}) has {_of(first.scores)}"


def _of(extra: int) -> str:
    return "a score for the positive and for each negative" if extra else "one for each negative only"


def _count(negatives: int) -> str:
    return f"{negatives} negative{'' if negatives == 1 else 's'}"


def _divided(rows: int) -> list[int]:
    return [min(_JSON_GROUP, rows - begin) for begin in range(0, rows, _JSON_GROUP)]
