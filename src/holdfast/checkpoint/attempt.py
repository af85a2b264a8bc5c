"""An attempt: hidden folder, block writer, the blocks of a blocking save (pieces in travel files), publishing.

Blocking saves, background saves and conversions write their bytes here, from whatever process and
thread. Bytes held by another rank are passed in a file: in shared memory between ranks of a host,
in the attempt's folder between hosts. A durable manifest and a rename publish the attempt.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.retention import unused_name
from holdfast.checkpoint.shared_memory import create_file, open_reader, open_writer, unlink_file
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, StorageError
from holdfast.core.names import MANIFEST, abandoned_folder, is_holdfast_name
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.digest import Digest
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.plan.files import (
    RawArray,
    ShardPiece,
    Sources,
    TensorRun,
    aligned_buffer,
    bytes_of,
    part_of,
    piece_in_run,
    raw_dtype,
)
from holdfast.plan.save_plan import BlockPlan, Export, SavePlan
from holdfast.plan.writer_job import travel_file
from holdfast.storage.base import Reader, Storage, Writer
from holdfast.storage.open_files import LazyReaders


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

    def block_writer(self, files: Iterable[str]) -> BlockWriter:
        """Return a writer of blocks; `files` has the file of every block to come."""
        return BlockWriter(self, files)

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

    def __init__(self, attempt: Attempt, files: Iterable[str]) -> None:
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
            writer.write(offset, buffers)
        return BlockReport(file, offset, size, digest.hexdigest())

    def close(self) -> None:
        """Close the files that a failure left unfinished."""
        self._writers.close()


def write_blocks(plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources) -> list[BlockReport]:
    """Write every block of the plan; return the reports of all ranks, on all ranks."""
    with ExitStack() as stack:
        readers = _exchange(plan, ranks, attempt, sources, stack)
        reports = run_on_all_ranks(ranks, lambda: _write_own(plan, ranks.rank, attempt, sources, readers))
    return [BlockReport.from_fields(report) for rank_reports in reports for report in rank_reports]


def _exchange(
    plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources, stack: ExitStack
) -> Mapping[int, Reader]:
    """Write the pieces that other ranks need to files; return readers of the pieces for this rank, by rank."""
    if all(piece.rank == block.owner for block in plan.blocks for piece in block.pieces):
        return {}
    rank, host, storage = ranks.rank, plan.hosts[ranks.rank], attempt.storage

    def export() -> str | None:
        name = None
        for receiver, exports in plan.exports(rank).items():
            if receiver == host:
                name = create_file(exports[-1].end)
                stack.callback(unlink_file, name)
                _copy_out(exports, sources, open_writer(name), whole=False)
            else:
                file = travel_file(rank, receiver)
                storage.create(attempt.name, file, exports[-1].end)
                _copy_out(exports, sources, storage.writer(attempt.name, file), whole=storage.whole_files)
        return name

    names = run_on_all_ranks(ranks, export)

    def open_export(source_rank: int) -> Reader:
        if plan.hosts[source_rank] == host:
            return open_reader(str(names[source_rank]))
        return storage.take(attempt.name, travel_file(source_rank, host))

    wanted = {piece.rank for block in plan.blocks if block.owner == rank for piece in block.pieces} - {rank}
    readers = LazyReaders(sorted(wanted), open_export)
    stack.callback(readers.close)
    return readers


def _copy_out(exports: Sequence[Export], sources: Sources, writer: Writer, *, whole: bool) -> None:
    """Write the exports to a file; with `whole`, the file is written without holes and completed."""
    position = 0
    try:
        for export in exports:
            if whole and export.offset > position:
                writer.write(position, [memoryview(bytes(export.offset - position))])
            position = export.end
            shard = sources.array(export.piece.run.place, export.piece.held)
            data = np.ascontiguousarray(part_of(shard, export.piece.part, export.piece.held))
            writer.write(export.offset, [bytes_of(data)])
        if whole:
            writer.sync()
    finally:
        writer.close()


def drop_travel_files(plan: SavePlan, attempt: Attempt) -> None:
    """Delete the travel files between hosts: they are not part of the checkpoint."""
    pairs = {(piece.rank, plan.hosts[block.owner]) for block in plan.blocks for piece in block.pieces}
    for source_rank, host in sorted(pairs):
        if plan.hosts[source_rank] != host:
            attempt.storage.drop(attempt.name, travel_file(source_rank, host))


class _LiveGatherer:
    """Assembles blocks from live memory and from the exports of other ranks."""

    def __init__(self, plan: SavePlan, rank: int, sources: Sources, readers: Mapping[int, Reader], size: int) -> None:
        self._rank = rank
        self._sources = sources
        self._readers = readers
        self._buffer = aligned_buffer(size)
        self._offsets: dict[int, int] = {}
        for source_rank in readers:
            for export in plan.exports(source_rank)[plan.hosts[rank]]:
                self._offsets[id(export.piece)] = export.offset

    def block(self, block: BlockPlan) -> Iterator[memoryview]:
        """Yield the bytes of a block in order: live memory where contiguous, else gathered."""
        if block.header:
            yield memoryview(block.header)
        for run, pieces in _by_run(block.pieces):
            whole = len(pieces) == 1 and pieces[0].part == run.box
            if whole and pieces[0].rank == self._rank:
                own = self._own(pieces[0])
                if own.flags.c_contiguous:
                    yield bytes_of(own)
                    continue
            target = self._buffer[run.at : run.at + run.bytes]
            if whole and pieces[0].rank != self._rank:
                self._fetch(pieces[0], target)
            else:
                for piece in pieces:
                    piece_in_run(self._buffer, piece)[...] = self._data(piece)
            yield target.data

    def _own(self, piece: ShardPiece) -> RawArray:
        return part_of(self._sources.array(piece.run.place, piece.held), piece.part, piece.held)

    def _fetch(self, piece: ShardPiece, target: RawArray) -> None:
        self._readers[piece.rank].read_into(self._offsets[id(piece)], [target.data])

    def _data(self, piece: ShardPiece) -> RawArray:
        if piece.rank == self._rank:
            return self._own(piece)
        span = aligned_buffer(piece.bytes)
        self._fetch(piece, span)
        return span.view(raw_dtype(piece.run.place)).reshape(piece.part.sizes)


def _by_run(pieces: Sequence[ShardPiece]) -> Iterator[tuple[TensorRun, list[ShardPiece]]]:
    """Group pieces by run, in byte order."""
    runs: dict[int, tuple[TensorRun, list[ShardPiece]]] = {}
    for piece in pieces:
        runs.setdefault(piece.run.at, (piece.run, []))[1].append(piece)
    for at in sorted(runs):
        yield runs[at]


def _write_own(
    plan: SavePlan, rank: int, attempt: Attempt, sources: Sources, readers: Mapping[int, Reader]
) -> list[list[Any]]:
    own = [block for block in plan.blocks if block.owner == rank]
    gatherer = _LiveGatherer(plan, rank, sources, readers, max((block.size for block in own), default=0))
    writer = attempt.block_writer(block.file for block in own)
    try:
        reports = [writer.write(block.file, block.offset, block.size, gatherer.block(block)) for block in own]
    finally:
        writer.close()
    return [report.fields() for report in reports]


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
        is_left = (known.step, known.attempt) in left_steps(committed_steps(storage))
        return not is_left and committed.verify().good
    except HoldfastError:
        return False


def _set_aside_name(storage: Storage, folder: str, manifest: Manifest) -> str:
    """Return a new name for a replaced step that a rewind abandoned; "" for one to delete."""
    try:
        replaced = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        return ""
    if replaced.step is None or (replaced.step, replaced.attempt) not in manifest.abandons:
        return ""
    return unused_name(storage, abandoned_folder(replaced.step))
