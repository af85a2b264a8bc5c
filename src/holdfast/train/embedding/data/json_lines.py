"""JSONL files: a scan that notes where each line begins, and reads of any lines afterwards."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound

_BUFFER = 1 << 20
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


class JsonLines:
    """A file with a JSON object on each line; empty lines, and a byte order mark, are passed over.

    `scan` reads the file once and keeps 8 bytes for each row. `read` then reads some rows.
    """

    groups: Sequence[int] | None = None  # rows are read one by one, in any order

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._begins = array("q")
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return max(len(self._begins) - 1, 0)

    def place(self, number: int) -> str:
        """Return how an error names a line."""
        return f"{self.path}:{number}"

    def scan(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each line and its object; from then on `read` knows where each row begins."""
        begins, begin = array("q"), 0
        try:
            with self.path.open("rb", buffering=_BUFFER) as file:
                for number, line in enumerate(file, 1):
                    if number == 1:
                        self._check_start(line)
                    if line.removeprefix(_BOM).strip():
                        begins.append(begin)
                        yield number, self._decoded(line, number)
                    begin += len(line)
        except OSError as error:
            raise NotFound(f"{self.path}: cannot read the rows: {error}") from None
        begins.append(begin)
        self._begins = begins

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the objects of these rows."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return [self._decoded(self._bytes(row), None, row) for row in rows]
        except OSError as error:
            raise NotFound(f"{self.path}: cannot read the rows: {error}") from None

    def row_place(self, row: int) -> str:
        """Return how an error names a row: its line is counted only now."""
        with self.path.open("rb") as file:
            before = file.read(self._begins[row])
        return self.place(before.count(b"\n") + 1)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _bytes(self, row: int) -> bytes:
        assert self._descriptor is not None
        begin, end = self._begins[row], self._begins[row + 1]
        return os.pread(self._descriptor, end - begin, begin)

    def _check_start(self, line: bytes) -> None:
        for start, command in _COMPRESSED.items():
            if line.startswith(start):
                raise InvalidArgument(
                    f"{self.path} is compressed, and rows are read from any place of a file: {command} it first"
                )

    def _decoded(self, line: bytes, number: int | None, row: int = 0) -> dict[str, Any]:
        try:
            record = json.loads(line.removeprefix(_BOM).decode())
        except (ValueError, RecursionError) as error:
            place = self.row_place(row) if number is None else self.place(number)
            raise InvalidArgument(f"{place}: not a line of JSON in UTF-8: {error}") from None
        if not isinstance(record, dict):
            place = self.row_place(row) if number is None else self.place(number)
            raise InvalidArgument(
                f'{place}: expected an object such as {{"query": ...}} on each line, found {str(record)[:40]!r}'
            )
        return record
