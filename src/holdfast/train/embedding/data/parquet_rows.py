"""Parquet files: rows by row group, of which a few are kept in memory. pyarrow is imported when one is opened."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import InvalidArgument, NotFound, Unsupported

_SCANNED_ROWS = 1024


class KeptGroups:
    """Row groups in memory: those used last, until they have more rows together than `most_rows`; at least one."""

    def __init__(self, most_rows: int = 200_000) -> None:
        self._most_rows = most_rows
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def get(self, key: tuple[Path, int], read: Callable[[], Any]) -> Any:
        """Return a group, and read it if it is not in memory."""
        if key not in self._tables:
            self._tables[key] = read()
        self._tables.move_to_end(key)
        while len(self._tables) > 1 and sum(table.num_rows for table in self._tables.values()) > self._most_rows:
            self._tables.popitem(last=False)
        return self._tables[key]

    def clear(self) -> None:
        self._tables.clear()


class ParquetRows:
    """The rows of a parquet file, as objects with the columns that are asked for.

    Args:
        path: The file.
        columns: The columns that are read, as far as the file has them.
        required: The columns that the file must have.
        kept: Where row groups stay in memory: files of one set share it.
    """

    def __init__(self, path: str | Path, *, columns: Sequence[str], required: Sequence[str], kept: KeptGroups) -> None:
        self.path = Path(path)
        self._arrow = _pyarrow(self.path)
        if not self.path.is_file():
            raise NotFound(f"{self.path}: cannot read the rows: no such file")
        with self._readable():
            self._file = self._arrow.parquet.ParquetFile(self.path)
        present = self._file.schema_arrow.names
        if missing := [name for name in required if name not in present]:
            raise InvalidArgument(
                f"{self.path}, row 1: there is no column {missing[0]!r}; the columns are {', '.join(present) or 'none'}"
            )
        self._columns = [name for name in columns if name in present]
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._used = [group for group, size in enumerate(sizes) if size]
        self.groups: Sequence[int] | None = [size for size in sizes if size]
        self._ends = np.cumsum(self.groups, dtype=np.int64)
        self._kept = kept

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def place(self, number: int) -> str:
        """Return how an error names a row; the first is 1."""
        return f"{self.path}, row {number}"

    def row_place(self, row: int) -> str:
        return self.place(row + 1)

    def scan(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each row and its object, a few in memory at a time."""
        number = 0
        for group in self._used:
            with self._readable():
                batches = self._file.iter_batches(_SCANNED_ROWS, row_groups=[group], columns=self._columns)
            for records in self._lists(batches):
                for record in records:
                    number += 1
                    yield number, record

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the objects of these rows."""
        asked = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(self._ends, asked, side="right")
        wanted: dict[int, list[int]] = defaultdict(list)
        for at, group in enumerate(groups.tolist()):
            wanted[group].append(at)
        found: list[dict[str, Any]] = [{} for _ in rows]
        for group, places in wanted.items():
            table = self._group(group)
            first = int(self._ends[group]) - table.num_rows
            with self._readable():
                records = table.take([int(asked[at]) - first for at in places]).to_pylist()
            for at, record in zip(places, records, strict=True):
                found[at] = record
        return found

    def close(self) -> None:
        """Forget the row groups that are kept."""
        self._kept.clear()

    def _group(self, group: int) -> Any:
        def read() -> Any:
            with self._readable():
                return self._takeable(self._file.read_row_group(self._used[group], columns=self._columns))

        return self._kept.get((self.path, group), read)

    def _takeable(self, table: Any) -> Any:
        """Return a table whose rows can be taken: pyarrow takes none of string views."""
        types = self._arrow.types
        views = [field.name for field in table.schema if types.is_string_view(field.type)]
        for name in views:
            number = table.schema.get_field_index(name)
            table = table.set_column(number, name, table.column(name).cast(self._arrow.large_string()))
        return table

    def _lists(self, batches: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
        while True:
            with self._readable():
                batch = next(batches, None)
                if batch is None:
                    return
                records = batch.to_pylist()
            yield records

    def _readable(self) -> _ArrowErrors:
        return _ArrowErrors(self.path, self._arrow)


class _ArrowErrors:
    """Raises InvalidArgument with the file's name for an error of pyarrow."""

    def __init__(self, path: Path, arrow: Any) -> None:
        self._path, self._arrow = path, arrow

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (OSError, self._arrow.ArrowException)):
            raise InvalidArgument(f"{self._path}: cannot be read as parquet: {error}") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Unsupported(
            f"{path}: parquet files need the package pyarrow; install it with pip install pyarrow, or give the rows "
            f"as JSONL ({error})"
        ) from None
    return pyarrow
