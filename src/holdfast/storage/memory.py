"""Memory storage: folders in a dict, for tests and for states that need no disk."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.filenames import check_file


def _nbytes(buffer: memoryview) -> int:
    return buffer.nbytes


class MemoryFile:
    """One file: a reader and a writer of the same bytes."""

    def __init__(self, name: str, data: bytearray) -> None:
        self._name = name
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def mappable(self) -> bool:
        return True

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        data = bytes(self._data[offset : offset + size])
        if len(data) < size:
            raise Damaged(f"{self._name} ends {size - len(data)} bytes too early")
        return memoryview(data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in filter(_nbytes, buffers):
            data = memoryview(self._data)[offset : offset + buffer.nbytes]
            if data.nbytes < buffer.nbytes:
                raise Damaged(f"{self._name} ends {buffer.nbytes - data.nbytes} bytes too early")
            buffer.cast("B")[:] = data
            offset += buffer.nbytes

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in filter(_nbytes, buffers):
            self._data.extend(bytes(max(0, offset - len(self._data))))
            self._data[offset : offset + buffer.nbytes] = buffer.cast("B")
            offset += buffer.nbytes

    def sync(self) -> None:
        """Memory has nothing more durable than itself."""

    def close(self) -> None:
        """Nothing is held open."""


class MemoryStorage:
    """A root in this process's memory; ranks in other processes do not see it."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._folders: dict[str, dict[str, bytearray]] = {}

    def folders(self) -> list[str]:
        return sorted(folder for folder in self._folders if not folder.startswith("."))

    def files(self, folder: str) -> dict[str, int]:
        return {name: len(data) for name, data in sorted(self._folder(folder).items())}

    def _folder(self, folder: str) -> dict[str, bytearray]:
        try:
            return self._folders[folder]
        except KeyError:
            raise NotFound(f"{self.name} has no folder {folder}") from None

    def entries(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, {}))

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        data = self._file(folder, name)
        if len(data) > limit_bytes:
            raise Damaged(f"{folder}/{name}: {len(data)} bytes, more than the limit of {limit_bytes}")
        return bytes(data)

    def _file(self, folder: str, name: str) -> bytearray:
        check_file(name, self.name)
        files = self._folder(folder)
        if name not in files:
            raise NotFound(f"{self.name} has no file {folder}/{name}")
        return files[name]

    def open(self, folder: str, name: str) -> MemoryFile:
        return MemoryFile(f"{folder}/{name}", self._file(folder, name))

    def begin(self, attempt: str) -> None:
        if attempt in self._folders:
            raise StorageError(f"making {self.name}/{attempt}: it is there already")
        self._folders[attempt] = {}

    def create(self, attempt: str, name: str, size: int) -> None:
        check_file(name, self.name)
        files = self._folder(attempt)
        if name in files:
            raise StorageError(f"making {self.name}/{attempt}/{name}: it is there already")
        files[name] = bytearray(size)

    def writer(self, attempt: str, name: str) -> MemoryFile:
        return self.open(attempt, name)

    def put(self, attempt: str, name: str, data: bytes) -> None:
        self.create(attempt, name, 0)
        self.writer(attempt, name).write(0, [memoryview(data)])

    def take(self, attempt: str, name: str) -> MemoryFile:
        return self.open(attempt, name)

    def drop(self, attempt: str, name: str) -> None:
        self._file(attempt, name)
        del self._folders[attempt][name]

    def publish(self, attempt: str, folder: str) -> None:
        self._folders[folder] = self._folder(attempt)
        del self._folders[attempt]

    def discard(self, attempt: str) -> None:
        self._folders.pop(attempt, None)
