"""Items of `*.distcp` files: torch.save streams one after another, each of a tensor or a value.

A checkpoint has many items that begin alike: the first of a kind is read with care, and one that
has the same length and begins with the same bytes is the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged, Unsupported
from holdfast.sources.dcp.metadata import Item
from holdfast.sources.foreign import Folder
from holdfast.sources.torch_save.archive import Archive, read_archive
from holdfast.sources.torch_save.names import Tensor
from holdfast.storage.base import Reader
from holdfast.storage.open_files import LazyReaders

_WINDOW_BYTES = 4096
_KINDS = 16  # of one length


@dataclass(frozen=True, slots=True)
class _Kind:
    head: bytes
    value: Any
    storage: tuple[int, int] | None  # counted from the item's begin


class Items:
    """The items of one checkpoint's files, of which a limited number stays open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._readers = LazyReaders(folder.files, folder.open)
        self._kinds: dict[int, list[_Kind]] = {}

    def close(self) -> None:
        self._readers.close()

    def tensor(self, item: Item, where: str) -> tuple[Tensor, int, int]:
        """The tensor of an item, and where its storage begins and how many bytes it has."""
        kind = self._kind(item, where)
        if not isinstance(kind.value, Tensor) or kind.storage is None:
            raise Damaged(f"{where}: the item at byte {item.begin} is not a tensor")
        return kind.value, item.begin + kind.storage[0], kind.storage[1]

    def archive(self, item: Item, where: str) -> Archive:
        """The value of an item, with its storages if it has any."""
        kind = self._kind(item, where)
        if kind.storage is None:
            return Archive(kind.value, {}, 0)
        return read_archive(self.reader(item.file), where, item.begin, item.begin + item.size)

    def reader(self, file: str) -> Reader:
        if file not in self._readers:
            raise Damaged(f"{self._folder.path}: .metadata names {file[:80]!r}, which is not there")
        return self._readers[file]

    def _kind(self, item: Item, where: str) -> _Kind:
        reader = self.reader(item.file)
        if item.begin + item.size > reader.size:
            raise Damaged(f"{where}: the item at byte {item.begin} ends behind the end of {item.file}, {reader.size}")
        window = _Window(reader, item)
        for kind in self._kinds.get(item.size, ()):
            if window.head.startswith(kind.head):
                return kind
        archive = read_archive(window, where, item.begin, item.begin + item.size)
        return self._remember(item, archive, window)

    def _remember(self, item: Item, archive: Archive, window: _Window) -> _Kind:
        storages = [(begin - item.begin, size) for begin, size in archive.storages.values()]
        end = max([archive.pickle_end - item.begin, *(begin for begin, _ in storages)])
        kind = _Kind(window.head[:end], archive.value, storages[0] if storages else None)
        known = self._kinds.setdefault(item.size, [])
        if len(storages) <= 1 and end <= len(window.head) and len(known) < _KINDS:
            known.append(kind)
        if len(storages) > 1 and isinstance(archive.value, Tensor):
            raise Unsupported(f"{item.file}: the tensor at byte {item.begin} has several storages")
        return kind


class _Window:
    """A reader that has the first and the last bytes of an item in memory: all that is needed of most."""

    mappable = False

    def __init__(self, reader: Reader, item: Item) -> None:
        self._reader = reader
        self._begin = item.begin
        self._end = item.begin + item.size
        self.size = reader.size
        self.head = self._take(item.begin, min(_WINDOW_BYTES, item.size))
        self._tail: bytes | None = None

    def _take(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._reader.read_into(offset, [memoryview(data)])
        return bytes(data)

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        return self._reader.map(offset, size, whole=whole)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self._fill(offset, buffer)
            offset += buffer.nbytes

    def _fill(self, offset: int, buffer: memoryview) -> None:
        size = buffer.nbytes
        if self._begin <= offset and offset + size <= self._begin + len(self.head):
            buffer[:] = self.head[offset - self._begin : offset - self._begin + size]
            return
        tail_begin = max(self._begin, self._end - _WINDOW_BYTES)
        if tail_begin <= offset and offset + size <= self._end:
            if self._tail is None:
                self._tail = self._take(tail_begin, self._end - tail_begin)
            buffer[:] = self._tail[offset - tail_begin : offset - tail_begin + size]
            return
        self._reader.read_into(offset, [buffer])

    def close(self) -> None:
        """The reader belongs to somebody else."""
