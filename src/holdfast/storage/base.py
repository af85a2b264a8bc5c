"""The storage interface: read committed folders, pin and hold them, write an attempt, publish it atomically.

A root holds folders. A committed folder is never written again. All writes go to an attempt,
a folder that readers ignore until `publish` gives it its committed name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from holdfast.storage.identity import Identity


class Reader(Protocol):
    """An open file of a committed folder."""

    @property
    def size(self) -> int: ...

    @property
    def mappable(self) -> bool:
        """True if `map` works without a copy, because the bytes are on this host."""

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        """Map a range of bytes without a copy. The range is unmapped when the view is released.

        `whole` announces that all bytes will be used, so that the pages are read in one go.
        """

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after another, starting at `offset`. Raises Damaged if the file is too short."""

    def close(self) -> None: ...


@runtime_checkable
class PageCacheReader(Reader, Protocol):
    """A reader of a file that the kernel opened for this process. Several threads may use it at once."""

    def is_cached(self, offset: int, size: int) -> bool:
        """Return True if most of a range is in the page cache, or if nothing can be read past it."""

    def read_uncached(self, offset: int, buffer: memoryview) -> bool:
        """Fill whole pages past the page cache; returns False, and reads nothing, if the file system cannot.

        Offset, size and address are multiples of a page; bytes past the end of the file stay as they are.
        """


@runtime_checkable
class MemoryReader(Reader, Protocol):
    """A reader of bytes in the memory of this host. Every rank of the host, and several threads, may use it at once."""

    @property
    def thread_bytes(self) -> int:
        """The memory that each thread takes that reads the file."""


class Writer(Protocol):
    """An open file of an attempt. Several ranks may write disjoint ranges of it."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after another, starting at `offset`."""

    def sync(self) -> None:
        """Make this writer's data durable. A failure is final for the attempt."""

    def close(self) -> None: ...


@runtime_checkable
class PageCacheWriter(Writer, Protocol):
    """A writer to a disk of this host. Several threads may use it at once."""

    def write_uncached(self, offset: int, buffer: memoryview) -> bool:
        """Write whole pages past the page cache, and the rest of the buffer through it.

        Returns False if the file system cannot, or unless the offset and the address are multiples of a page.
        """


class Hold(Protocol):
    """A mark that a process is using a folder. The mark ends with the process."""

    def release(self) -> None: ...


class Pin(Protocol):
    """A snapshot of one committed folder, unaffected by later renames and publications."""

    def files(self) -> dict[str, int]:
        """Return the names and sizes of the regular files, `sub/name` for one level of subfolders."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the contents of a small file."""

    def open(self, name: str) -> Reader: ...

    def hold(self) -> Hold:
        """Prevent the folder's deletion until the hold is released. Raises NotFound if the folder is gone."""


class Readable(Protocol):
    """A root whose folders can be read. Every failure is a StorageError, NotFound or Damaged."""

    @property
    def name(self) -> str:
        """The root's name in messages."""

    def pin(self, folder: str) -> Pin:
        """Open a committed folder for reading. Raises NotFound if it does not exist."""


@runtime_checkable
class Storage(Readable, Protocol):
    """A root with committed folders, and with attempts that become folders."""

    @property
    def whole_files(self) -> bool:
        """True if one process must write a file sequentially from start to end."""

    def files(self, folder: str) -> dict[str, int]:
        """Return names and sizes of a folder's regular files, `sub/name` for one level of subfolders."""

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        """Return the contents of a small file."""

    def folders(self) -> list[str]:
        """Return the names of all folders that are not hidden. Each may be a checkpoint."""

    def hidden(self) -> list[str]:
        """Return the names of the hidden folders: attempts, mailboxes, tags."""

    def entries(self, folder: str) -> list[str]:
        """Return every path under a folder, of any depth and type; empty if the folder does not exist."""

    def begin(self, attempt: str) -> None:
        """Create the attempt's folder."""

    def create(self, attempt: str, name: str, size: int) -> None:
        """Create a file of an attempt at its full size, and reserve the space where possible."""

    def writer(self, attempt: str, name: str) -> Writer: ...

    def put(self, attempt: str, name: str, data: bytes) -> None:
        """Write a whole small file of an attempt and make it durable."""

    def take(self, attempt: str, name: str) -> Reader:
        """Open a file of an attempt for reading, as ranks do to exchange data."""

    def drop(self, attempt: str, name: str) -> None:
        """Delete a file of an attempt."""

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        """Make the attempt durable and visible as `folder`, replacing an existing folder atomically.

        The replaced folder is deleted, or renamed to `aside` if given.
        """

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        """Rename a committed folder durably. Raises StorageError if the name is taken.

        With `attempt`, raises NotFound unless the folder's manifest names that attempt. Another
        attempt may have been published under the same name in the meantime.
        """

    def remove(self, folder: str, attempt: str = "") -> bool:
        """Remove a committed folder atomically; `sweep` deletes its data. Returns False if the folder is held.

        With `attempt`, raises NotFound unless the folder's manifest names that attempt.
        """

    def sweep(self) -> None:
        """Delete the data of removed folders that have no readers left. May take long."""

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file atomically, replacing an existing one."""

    def discard(self, attempt: str) -> None:
        """Delete an attempt and its files, as far as possible."""


@runtime_checkable
class SharedStorage(Storage, Protocol):
    """A storage that other processes can open, so that writers can exchange data through it."""

    @property
    def address(self) -> str:
        """The text from which `storage_at` opens the same storage in another process."""

    def exists(self) -> bool:
        """Return True if the root exists, that is, something was written and the root was not deleted."""

    @property
    def poll_s(self) -> float:
        """The polling interval for a folder that another process writes notes into."""

    def hold(self, folder: str) -> Hold:
        """Mark the folder as in use until the hold is released or this process ends."""

    def is_held(self, folder: str) -> bool:
        """Return True if a live process on this host is using the folder."""


@runtime_checkable
class IdentifiedStorage(SharedStorage, Protocol):
    """A shared storage whose roots have an identity beyond their names. Restoring from memory requires one."""

    def identity(self, *, make: bool) -> Identity | None:
        """Return the root's identity. With `make`, create it durably if it is missing or unreadable.

        If processes or hosts race, one creates the identity and all return the same id. Raises
        StorageError if it can be neither read nor created, as on a read-only or full root.
        """


@dataclass(frozen=True, slots=True)
class Stamped:
    """A manifest's contents and the stamp of its file.

    An equal stamp later means equal bytes. Until `settled`, a change right after the read may
    keep the same stamp, because file system clocks have a coarse resolution.
    """

    data: bytes
    stamp: str
    settled: bool


@runtime_checkable
class Tracked(Protocol):
    """A storage that detects changed manifests without reading them.

    Optional: without it, every manifest is read again each time.
    """

    def stamps(self) -> dict[str, str]:
        """Return the stamp of every committed folder's manifest, "" for a folder without a manifest."""

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """Return the stamps by folder that differ from `known`, None for a deleted folder.

        The `important` folders are always compared, the others as far as that is cheap. A later
        call or `stamps` finds the remaining differences.
        """

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        """Return a folder's manifest with its stamp. Raises like `read`."""

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Record that the manifest with this stamp was read, is valid, and names `attempt`."""

    def sweep_some(self, *, left: bool = False) -> None:
        """Delete the data of some removed folders in bounded time, where `sweep` deletes all of it.

        With `left`, also delete some of the data that other processes left behind.
        """
