"""The tensors that damage affects, and those that headers and indexes name: in bounded memory, by many threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from holdfast.checkpoint.tensor_header import read_header
from holdfast.core import names
from holdfast.core.errors import Damaged
from holdfast.format.header_columns import HeaderColumns, scan_header
from holdfast.format.manifest import Manifest
from holdfast.format.safetensors import decode_index
from holdfast.plan.load_plan import StoredFile
from holdfast.storage.base import Reader


class HeadedCheckpoint(Protocol):
    """The part of an open checkpoint that names its tensors."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def path(self) -> str: ...

    def open_file(self, name: str) -> Reader: ...

    def read_file(self, name: str) -> bytes: ...

    def stored_file(self, name: str) -> StoredFile: ...


class AffectedKeys:
    """The keys of damaged blocks and files. A header is read once for neighboring blocks, every index once.

    A file whose header is damaged has the keys of the index: all its blocks share one tuple, however many there are.
    """

    def __init__(self, checkpoint: HeadedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._header: tuple[str, _Header | None] = ("", None)
        self._indexed: Mapping[str, tuple[str, ...]] | None = None

    def of_block(self, name: str, offset: int, size: int) -> tuple[str, ...]:
        """Return the tensors that a block overlaps, or all tensors of the file if its header is damaged."""
        if not names.is_tensor_file(name):
            return ()
        with self._lock:
            if self._header[0] != name:
                self._header = name, _read(self._checkpoint, name)
            header = self._header[1]
        return self.of_file(name) if header is None else tuple(header.within(offset, offset + size))

    def of_file(self, name: str) -> tuple[str, ...]:
        """Return the tensors that the indexes place in a file."""
        with self._lock:
            if self._indexed is None:
                self._indexed = _indexed(self._checkpoint)
            return self._indexed.get(name, ())


class _Header:
    """Keys with the bytes of the file that they span."""

    def __init__(self, columns: HeaderColumns, header_bytes: int) -> None:
        self._columns = columns
        self._data = header_bytes

    def within(self, begin: int, end: int) -> Iterator[str]:
        columns = self._columns
        for key, first, after in zip(columns.keys, columns.begins, columns.ends, strict=True):
            if first + self._data < end and begin < after + self._data:
                yield key


def _read(checkpoint: HeadedCheckpoint, name: str) -> _Header | None:
    """Return a file's header, None if it is damaged."""
    record = checkpoint.manifest.files[name]
    try:
        data = read_header(checkpoint.open_file(name), record, f"{checkpoint.path}/{name}")
        columns = scan_header(data, record.size)
        return _Header(columns or _decoded(checkpoint, name, len(data)), len(data))
    except (Damaged, OSError):
        return None


def header_keys(checkpoint: HeadedCheckpoint, name: str) -> list[str]:
    """Return the keys in a tensor file's header; raises Damaged."""
    record = checkpoint.manifest.files[name]
    data = read_header(checkpoint.open_file(name), record, f"{checkpoint.path}/{name}")
    return (scan_header(data, record.size) or _decoded(checkpoint, name, len(data))).keys


def _decoded(checkpoint: HeadedCheckpoint, name: str, header_bytes: int) -> HeaderColumns:
    """Return the columns of a header in an unusual form, read entry by entry; raises Damaged."""
    columns = HeaderColumns()
    for place in checkpoint.stored_file(name).places:
        columns.keys.append(place.spec.key)
        columns.begins.append(place.begin - header_bytes)
        columns.ends.append(place.end - header_bytes)
    return columns


def read_index(checkpoint: HeadedCheckpoint, group: str) -> dict[str, str] | None:
    """Return the file of each key from a group's index, None for a group without one; raises Damaged."""
    stem = names.file_stem(group, checkpoint.manifest.groups[group].kind)
    index = names.index_file(stem)
    if index not in checkpoint.manifest.files:
        return None
    return decode_index(checkpoint.read_file(index), f"{checkpoint.path}/{index}", names.group_folder(stem))


def _indexed(checkpoint: HeadedCheckpoint) -> dict[str, tuple[str, ...]]:
    """Return the keys of every file, from the indexes that can be read."""
    found: dict[str, list[str]] = {}
    for group, record in checkpoint.manifest.groups.items():
        try:
            weight_map = read_index(checkpoint, group) or {}
        except (Damaged, OSError):
            continue
        for key, file in weight_map.items():
            if file in record.files:
                found.setdefault(file, []).append(key)
    return {file: tuple(keys) for file, keys in found.items()}
