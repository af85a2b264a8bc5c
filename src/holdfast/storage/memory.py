"""In-memory storage: folders in a dict, for tests and for states that need no disk."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.names import MANIFEST, check_file, manifest_attempt


def _nbytes(buffer: memoryview) -> int:
    return buffer.nbytes


class MemoryFile:
    """A file that is both reader and writer of the same bytes."""

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
        """Do nothing: memory is never durable."""

    def close(self) -> None:
        """Do nothing: no descriptor is open."""


class MemoryPin:
    """A snapshot of a folder's files. Files of committed folders never change."""

    def __init__(self, name: str, files: dict[str, bytearray]) -> None:
        self._name = name
        self._contents = dict(files)

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in sorted(self._contents.items())}

    def read(self, name: str, limit_bytes: int) -> bytes:
        data = self._file(name)
        if len(data) > limit_bytes:
            raise Damaged(f"{self._name}/{name}: {len(data)} bytes, more than the limit of {limit_bytes}")
        return bytes(data)

    def open(self, name: str) -> MemoryFile:
        return MemoryFile(f"{self._name}/{name}", self._file(name))

    def _file(self, name: str) -> bytearray:
        check_file(name, self._name)
        if name not in self._contents:
            raise NotFound(f"{self._name} has no file {name}")
        return self._contents[name]

    def hold(self) -> MemoryHold:
        return MemoryHold()


class MemoryHold:
    """A hold without effect: a pin references the bytes themselves."""

    def release(self) -> None:
        """Do nothing: no lock is held."""


class MemoryStorage:
    """A root in this process's memory, invisible to other processes."""

    whole_files = False

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._folders: dict[str, dict[str, bytearray]] = {}

    def folders(self) -> list[str]:
        return sorted(folder for folder in self._folders if not folder.startswith("."))

    def hidden(self) -> list[str]:
        return sorted(folder for folder in self._folders if folder.startswith("."))

    def files(self, folder: str) -> dict[str, int]:
        return self.pin(folder).files()

    def pin(self, folder: str) -> MemoryPin:
        return MemoryPin(f"{self.name}/{folder}", self._folder(folder))

    def _folder(self, folder: str) -> dict[str, bytearray]:
        try:
            return self._folders[folder]
        except KeyError:
            raise NotFound(f"{self.name} has no folder {folder}") from None

    def entries(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, {}))

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        return self.pin(folder).read(name, limit_bytes)

    def begin(self, attempt: str) -> None:
        if attempt in self._folders:
            raise StorageError(f"creating {self.name}/{attempt}: it already exists")
        self._folders[attempt] = {}

    def create(self, attempt: str, name: str, size: int) -> None:
        check_file(name, self.name)
        files = self._folder(attempt)
        if name in files:
            raise StorageError(f"creating {self.name}/{attempt}/{name}: it already exists")
        files[name] = bytearray(size)

    def writer(self, attempt: str, name: str) -> MemoryFile:
        return self.pin(attempt).open(name)

    def put(self, attempt: str, name: str, data: bytes) -> None:
        self.create(attempt, name, 0)
        self.writer(attempt, name).write(0, [memoryview(data)])

    def take(self, attempt: str, name: str) -> MemoryFile:
        return self.pin(attempt).open(name)

    def drop(self, attempt: str, name: str) -> None:
        check_file(name, self.name)
        if self._folder(attempt).pop(name, None) is None:
            raise NotFound(f"{self.name}/{attempt} has no file {name}")

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        check_file(name, self.name)
        self._folder(folder)[name] = bytearray(data)

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        files = self._folder(attempt)
        if aside and folder in self._folders:
            self.rename(folder, aside)
        self._folders[folder] = files
        del self._folders[attempt]

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        files = self._folder_of(folder, attempt)
        if name in self._folders:
            raise StorageError(f"renaming {self.name}/{folder} to {name}: a folder of that name already exists")
        self._folders[name] = files
        del self._folders[folder]

    def _folder_of(self, folder: str, attempt: str) -> dict[str, bytearray]:
        files = self._folder(folder)
        if attempt and manifest_attempt(bytes(files.get(MANIFEST, b""))) != attempt:
            raise NotFound(f"{self.name}/{folder} was not published by {attempt}")
        return files

    def remove(self, folder: str, attempt: str = "") -> bool:
        self._folder_of(folder, attempt)
        del self._folders[folder]
        return True

    def sweep(self) -> None:
        """Do nothing: `remove` frees the memory."""

    def discard(self, attempt: str) -> None:
        self._folders.pop(attempt, None)
