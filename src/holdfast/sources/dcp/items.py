"""Items of `*.distcp` files: parse consecutive torch.save streams of tensors and values, those alike only once.

Many items of a checkpoint begin alike. The first of a kind is parsed in full; an item of the same
length that begins with the same bytes is of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged, Unsupported
from holdfast.sources.dcp.metadata import StreamLocation
from holdfast.sources.foreign import Folder
from holdfast.sources.torch_save.archive import Archive, read_archive
from holdfast.sources.torch_save.torch_names import PickledTensor
from holdfast.storage.base import Reader
from holdfast.storage.open_files import LazyReaders

_WINDOW_BYTES = 4096
_KINDS = 16  # per length


@dataclass(frozen=True, slots=True)
class _Kind:
    head: bytes
    value: Any
    storage: tuple[int, int] | None  # offset from the start of the item, and size


class DcpItems:
    """The items of a checkpoint's files, of which a limited number stays open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._readers = LazyReaders(folder.files, folder.open)
        self._kinds: dict[int, list[_Kind]] = {}

    def close(self) -> None:
        self._readers.close()

    def tensor(self, item: StreamLocation, where: str) -> tuple[PickledTensor, int, int]:
        """Return the tensor of an item, the start of its storage, and the storage's size in bytes."""
        kind = self._kind(item, where)
        if not isinstance(kind.value, PickledTensor) or kind.storage is None:
            raise Damaged(f"{where}: the item at byte {item.begin} is not a tensor")
        return kind.value, item.begin + kind.storage[0], kind.storage[1]

    def archive(self, item: StreamLocation, where: str) -> Archive:
        """Return the value of an item, with its storages if it has any."""
        kind = self._kind(item, where)
        if kind.storage is None:
            return Archive(kind.value, {}, 0)
        return read_archive(self.reader(item.file), where, item.begin, item.begin + item.size)

    def reader(self, file: str) -> Reader:
        if file not in self._readers:
            raise Damaged(f"{self._folder.path}: .metadata names {file[:80]!r}, which is missing")
        return self._readers[file]

    def _kind(self, item: StreamLocation, where: str) -> _Kind:
        reader = self.reader(item.file)
        if item.begin + item.size > reader.size:
            raise Damaged(f"{where}: the item at byte {item.begin} ends beyond the {reader.size} bytes of {item.file}")
        window = _Window(reader, item)
        for kind in self._kinds.get(item.size, ()):
            if window.head.startswith(kind.head):
                return kind
        archive = read_archive(window, where, item.begin, item.begin + item.size)
        return self._remember(item, archive, window)

    def _remember(self, item: StreamLocation, archive: Archive, window: _Window) -> _Kind:
        storages = [(begin - item.begin, size) for begin, size in archive.storages.values()]
        end = max([archive.pickle_end - item.begin, *(begin for begin, _ in storages)])
        kind = _Kind(window.head[:end], archive.value, storages[0] if storages else None)
        known = self._kinds.setdefault(item.size, [])
        if len(storages) <= 1 and end <= len(window.head) and len(known) < _KINDS:
            known.append(kind)
        if len(storages) > 1 and isinstance(archive.value, PickledTensor):
            raise Unsupported(f"{item.file}: the tensor at byte {item.begin} has several storages")
        return kind


class _Window:
    """A reader that caches the first and last bytes of an item, which is all that most items need."""

    mappable = False

    def __init__(self, reader: Reader, item: StreamLocation) -> None:
        self._reader = reader
        self._begin = item.begin
        self._end = item.begin + item.size
        self.size = reader.size
        self.head = self._read(item.begin, min(_WINDOW_BYTES, item.size))
        self._tail: bytes | None = None

    def _read(self, offset: int, size: int) -> bytes:
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
                self._tail = self._read(tail_begin, self._end - tail_begin)
            buffer[:] = self._tail[offset - tail_begin : offset - tail_begin + size]
            return
        self._reader.read_into(offset, [buffer])

    def close(self) -> None:
        """Do nothing: the reader is owned elsewhere."""
