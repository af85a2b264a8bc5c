"""An attempt: hidden folder, block writer with its threads, publishing.

Blocking saves, background saves and conversions write their bytes here, from whatever process and
thread. A durable manifest and a rename publish the attempt.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.retention import unused_name
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, StorageError
from holdfast.core.names import MANIFEST, abandoned_folder, is_holdfast_name
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.storage.base import PageCacheWriter, Storage, Writer

Block = TypeVar("Block", bound="PlannedBlock")


class PlannedBlock(Protocol):
    """The location of a block: its file, and its offset and size there."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def size(self) -> int: ...


def new_attempt() -> str:
    """Return a unique hidden folder name."""
    return f".attempt-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A hidden folder of a storage, and the folder that it becomes."""

    storage: Storage
    name: str
    folder: str

    def create(self, files: Iterable[tuple[str, int]]) -> None:
        """Create the hidden folder with its tensor files at full size."""
        self.storage.begin(self.name)
        for name, size in files:
            self.storage.create(self.name, name, size)

    def write(
        self,
        blocks: Sequence[Block],
        gatherer: Callable[[], Callable[[Block], Iterable[memoryview]]],
        threads: int,
        done: Callable[[BlockReport], None] = lambda report: None,
        *,
        uncached: bool = False,
    ) -> list[BlockReport]:
        """Write blocks on threads and sync their files; return the reports in order.

        `gatherer` returns, for one thread, a function from a block to its bytes. `done` is called after each block.
        With `uncached`, blocks of one page-aligned part are written past the page cache where that is possible.
        In a storage of whole files, each file has one thread, and its blocks come in byte order.
        """
        writer = self.block_writer((block.file for block in blocks), uncached=uncached)
        files: dict[str, list[int]] = {}
        for number in sorted(range(len(blocks)), key=lambda number: blocks[number].offset):
            files.setdefault(blocks[number].file, []).append(number)
        work = list(files.values())
        if not self.storage.whole_files:
            work = [[number] for numbers in work for number in numbers]
        reports: dict[int, BlockReport] = {}

        def run(tasks: Iterator[list[int]]) -> None:
            gather = gatherer()
            for number in itertools.chain.from_iterable(tasks):
                block = blocks[number]
                reports[number] = writer.write(block.file, block.offset, block.size, gather(block))
                done(reports[number])

        try:
            run_on_threads(min(threads, len(work)), "holdfast-write", work, run)
        finally:
            writer.close()
        return [reports[number] for number in range(len(blocks))]

    def block_writer(self, files: Iterable[str], *, uncached: bool = False) -> BlockWriter:
        """Return a writer of blocks; `files` has the file of every block to come."""
        return BlockWriter(self, files, uncached=uncached)

    def put(self, small: Mapping[str, bytes]) -> None:
        """Write small files durably, in order."""
        for name, data in small.items():
            self.storage.put(self.name, name, data)

    def publish(self, set_aside: str = "") -> None:
        """Rename the hidden folder. A replaced folder gets the name `set_aside`, or is deleted without one."""
        self.storage.publish(self.name, self.folder, set_aside)

    def discard(self) -> None:
        self.storage.discard(self.name)


class FileWriters:
    """Writers of files whose block counts are known in advance.

    A file is opened for its first block, and synced and closed after its last one. Only files
    being written are open. Thread-safe.
    """

    def __init__(self, open_writer: Callable[[str], Writer], files: Iterable[str]) -> None:
        self._open_writer = open_writer
        self._blocks_left = Counter(files)
        self._lock = threading.Lock()
        self._open: dict[str, Writer] = {}

    @contextmanager
    def block(self, file: str) -> Iterator[Writer]:
        """Yield the writer for one block of a file."""
        with self._lock:
            writer = self._open.get(file)
            if writer is None:
                writer = self._open[file] = self._open_writer(file)
        yield writer
        with self._lock:
            self._blocks_left[file] -= 1
            is_last = not self._blocks_left[file]
        if is_last:
            writer.sync()
            with self._lock:
                del self._open[file]
            writer.close()

    def close(self) -> None:
        """Close unfinished files. Without a failure there are none."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class BlockWriter:
    """Writes blocks with their digests to the files of an attempt. Thread-safe.

    A file is synced and closed after its last block.
    """

    def __init__(self, attempt: Attempt, files: Iterable[str], *, uncached: bool = False) -> None:
        self._uncached = uncached
        self._writers = FileWriters(lambda file: attempt.storage.writer(attempt.name, file), files)

    def write(self, file: str, offset: int, size: int, parts: Iterable[memoryview]) -> BlockReport:
        """Write one block from its parts in order, and return its record for the manifest.

        Each part is digested as it comes, while its bytes are in the cache. Raises HoldfastError unless the parts
        have `size` bytes.
        """
        digest, buffers, found = Digest(), [], 0
        for part in parts:
            digest.update(part)
            buffers.append(part)
            found += part.nbytes
        if found != size:
            raise HoldfastError(f"{file} at {offset}: gathered {found} of {size} bytes")
        with self._writers.block(file) as writer:
            if not (self._uncached and len(buffers) == 1 and _write_uncached(writer, offset, buffers[0])):
                writer.write(offset, buffers)
        return BlockReport(file, offset, size, digest.hexdigest())

    def close(self) -> None:
        """Close the files that a failure left unfinished."""
        self._writers.close()


def _write_uncached(writer: Writer, offset: int, buffer: memoryview) -> bool:
    return isinstance(writer, PageCacheWriter) and writer.write_uncached(offset, buffer)


def check_replaceable(storage: Storage, folder: str) -> None:
    """Refuse to replace a folder that holds other files than a checkpoint: they are not ours to delete.

    With a damaged manifest, files with names that Holdfast writes count as its own. Raises the
    error of a checkpoint that has a newer format or cannot be read now.
    """
    found = storage.entries(folder)
    if MANIFEST in found:
        try:
            manifest = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
        except Damaged:
            known = {name for name in found if is_holdfast_name(name)}
        else:
            known = {MANIFEST, *manifest.files, *(name.split("/")[0] for name in manifest.files)}
    else:
        known = set()
    foreign = [name for name in found if name not in known]
    if foreign:
        raise StorageError(
            f"{storage.name}/{folder} holds files that Holdfast did not write ({', '.join(foreign[:5])}); "
            "choose another folder, or move them away"
        )


def publish(attempt: Attempt, manifest: Manifest, small: Mapping[str, bytes]) -> bool:
    """Make the attempt a checkpoint; return False if its folder already has the same content."""
    storage, folder = attempt.storage, attempt.folder
    try:
        replaced = storage.read(folder, MANIFEST, limits.JSON_BYTES)
    except HoldfastError:
        replaced = b""
    if replaced and _same_as_committed(storage, folder, manifest):
        attempt.discard()
        return False
    attempt.put({**small, MANIFEST: encode_manifest(manifest)})
    attempt.publish(_set_aside_name(storage, folder, manifest) if replaced else "")
    return True


def _same_as_committed(storage: Storage, folder: str, manifest: Manifest) -> bool:
    """Return True if the folder holds the same intact content and leaves behind at least the same steps."""
    try:
        committed = Checkpoint(storage, folder)
        known = committed.manifest
        leaves_more = {*manifest.abandons} - {*known.abandons} or {*manifest.skips} - {*known.skips}
        measured = manifest.metrics and manifest.metrics != known.metrics
        if known.content() != manifest.content() or leaves_more or measured:
            return False
        is_left = (known.step, known.identity) in left_steps(committed_steps(storage))
        return not is_left and committed.verify().good
    except HoldfastError:
        return False


def _set_aside_name(storage: Storage, folder: str, manifest: Manifest) -> str:
    """Return a new name for a replaced step that a rewind abandoned; "" for one to delete."""
    try:
        replaced = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        return ""
    if replaced.step is None or (replaced.step, replaced.identity) not in manifest.abandons:
        return ""
    return unused_name(storage, abandoned_folder(replaced.step))
