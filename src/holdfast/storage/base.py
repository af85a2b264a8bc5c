"""What a storage must do: read committed folders, write an attempt, publish it at once.

A root holds folders; a committed folder is never written again. All writing happens in an
attempt, a folder that no reader takes for a checkpoint until `publish` names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from holdfast.storage.identity import Identity


class Reader(Protocol):
    """One open file of a committed folder."""

    @property
    def size(self) -> int: ...

    @property
    def mappable(self) -> bool:
        """Whether `map` works: the bytes are on this host and sharing them costs nothing."""

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        """The bytes themselves, without a copy; the map ends when the view is let go.

        `whole` says that all of them will be used, so that they are better brought in at once.
        """

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in turn from `offset` on; raises Damaged if the file is too short."""

    def close(self) -> None: ...


class Writer(Protocol):
    """One open file of an attempt, shared by the ranks that write disjoint parts of it."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers one after another from `offset` on."""

    def sync(self) -> None:
        """Make durable what this writer wrote; a failure is final for the attempt."""

    def close(self) -> None: ...


class Hold(Protocol):
    """A sign that a process works in a folder; it goes with the process."""

    def release(self) -> None: ...


class Pin(Protocol):
    """One committed folder as it is now: what is published or renamed later does not change it."""

    def files(self) -> dict[str, int]:
        """Names and sizes of the regular files, `sub/name` for one level of subfolders."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A whole small file."""

    def open(self, name: str) -> Reader: ...

    def hold(self) -> Hold:
        """Keep it from being removed until the hold is released; raises NotFound if it is gone."""


class Readable(Protocol):
    """Folders with files that can be read. Every failure is a StorageError, NotFound or Damaged."""

    @property
    def name(self) -> str:
        """What people call this root, for messages."""

    def pin(self, folder: str) -> Pin:
        """A committed folder for reading; raises NotFound if there is none."""


@runtime_checkable
class Storage(Readable, Protocol):
    """A root with folders in it, and attempts that become folders."""

    @property
    def whole_files(self) -> bool:
        """Whether a file must be written by one process, from its beginning to its end."""

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the regular files of a folder, `sub/name` for one level of subfolders."""

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        """A whole small file."""

    def folders(self) -> list[str]:
        """The names of the committed folders' candidates: every folder that is not hidden."""

    def hidden(self) -> list[str]:
        """The folders that are not checkpoints: attempts, mailboxes, tags."""

    def entries(self, folder: str) -> list[str]:
        """Everything under a folder, at any depth and of any type; empty if there is no such folder."""

    def begin(self, attempt: str) -> None:
        """Make the attempt's folder."""

    def create(self, attempt: str, name: str, size: int) -> None:
        """Make a file of an attempt at its full size, reserving the space where that is possible."""

    def writer(self, attempt: str, name: str) -> Writer: ...

    def put(self, attempt: str, name: str, data: bytes) -> None:
        """Write a whole small file of an attempt and make it durable."""

    def take(self, attempt: str, name: str) -> Reader:
        """Open a file of an attempt for reading, as ranks do to hand bytes over."""

    def drop(self, attempt: str, name: str) -> None:
        """Remove a file of an attempt."""

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        """Make the attempt durable and visible as `folder`, replacing an older one at once.

        The older one is removed, or goes by the name `aside` if one is given.
        """

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        """Give a committed folder another name, durably; raises StorageError if the name is taken.

        With `attempt`, only if its manifest names that one: another may have been published under
        the same name since the caller looked. Raises NotFound then.
        """

    def remove(self, folder: str, attempt: str = "") -> bool:
        """Take a committed folder away, at once and whole; its bytes go with `sweep`. False if somebody holds it.

        With `attempt`, only if its manifest names that one; raises NotFound otherwise.
        """

    def sweep(self) -> None:
        """Delete what was removed and nobody reads any more; may take long."""

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file that readers see whole or not at all, replacing an older one."""

    def discard(self, attempt: str) -> None:
        """Remove an attempt and all it holds, as far as that is possible."""


@runtime_checkable
class SharedStorage(Storage, Protocol):
    """A storage that other processes can open too, so that writers can work and talk through it."""

    @property
    def address(self) -> str:
        """What `storage_at` makes the same storage of, in another process."""

    def exists(self) -> bool:
        """Whether anything was ever written under this root, and the root was not deleted since."""

    @property
    def poll_s(self) -> float:
        """How long to wait between two looks at a folder that another process writes notes into."""

    def hold(self, folder: str) -> Hold:
        """Say that this process works in the folder, until it lets go or dies."""

    def is_held(self, folder: str) -> bool:
        """Whether a living process on this host works in the folder."""


@runtime_checkable
class IdentifiedStorage(SharedStorage, Protocol):
    """A shared storage whose roots are known by more than their names. Without it nothing is restored from memory."""

    def identity(self, *, make: bool) -> Identity | None:
        """Return the root's identity; with `make`, give it one, durably, if it has none that can be read.

        Of processes and hosts that race one makes it, and all return the same id. Raises
        StorageError if it can be neither read nor made, as on a root that is read-only or full.
        """


@dataclass(frozen=True, slots=True)
class Stamped:
    """A manifest as it was read, with the stamp of the file it was read from.

    An equal stamp later means the same bytes. Until it is `settled`, a change right after the
    read might leave the stamp as it is, since clocks of file systems tick slowly.
    """

    data: bytes
    stamp: str
    settled: bool


@runtime_checkable
class Tracked(Protocol):
    """A storage that tells which manifests have changed without reading them.

    Optional: of a storage that is not tracked every manifest is read at every look.
    """

    def stamps(self) -> dict[str, str]:
        """The stamp of every committed folder's manifest, "" for a folder that has none."""

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """What differs from the `known` stamps: new stamps by folder, None for a folder that is gone.

        The `important` folders are compared for certain; of the others as many as that takes no
        time. A difference that is not found now is found by a later call or by `stamps`.
        """

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        """A folder's manifest with its stamp; raises as `read` does."""

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Take over, from who has read it, that the manifest with this stamp is good and names an attempt."""

    def sweep_some(self, *, left: bool = False) -> None:
        """Delete some of what was removed, in bounded time, where `sweep` deletes all of it.

        With `left`, also some of what other processes left behind.
        """
