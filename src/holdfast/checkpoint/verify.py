"""Verification: every byte, digest and cross-reference of a checkpoint; a report of damage with affected tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.checkpoint.affected_keys import AffectedKeys, HeadedCheckpoint, header_keys, read_index
from holdfast.checkpoint.base_reference import references
from holdfast.checkpoint.block_reader import BlockReader, FlatDestinations
from holdfast.core import limits, names
from holdfast.core.errors import Damaged
from holdfast.core.terminal import Progress
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest
from holdfast.format.manifest import BlockRecord, FileRecord
from holdfast.format.safetensors import LENGTH_BYTES, header_bytes
from holdfast.plan.staging import HostStaging
from holdfast.storage.base import Reader
from holdfast.storage.open_files import OpenReaders

_BLOCKS_AT_ONCE = 4


class VerifiableCheckpoint(HeadedCheckpoint, Protocol):
    """The part of an open checkpoint that verification needs."""

    @property
    def state(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Damage:
    """One problem: its file, its position, and the affected tensors."""

    file: str
    problem: str
    offset: int | None = None
    size: int | None = None
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification: the amount of data, all damage, and what belongs to it but was not read."""

    files: int
    bytes: int
    damage: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()  # base models that adapters refer to

    @property
    def good(self) -> bool:
        return not self.damage


def verify(checkpoint: VerifiableCheckpoint, progress: Progress) -> VerifyReport:
    """Verify every file of a checkpoint, on threads; reports all damage, not only the first, in order."""
    lock = threading.Lock()

    def count(size: int) -> None:
        with lock:
            progress(size)

    staging = HostStaging.within(limits.LOAD_MEMORY_BYTES)
    files = OpenReaders(checkpoint.open_file)
    affected = AffectedKeys(checkpoint)
    found: dict[int, list[Damage]] = {}

    def run(tasks: Iterator[tuple[int, _BlockRange]]) -> None:
        with staging.lend() as buffers:
            reader = BlockReader(0, checkpoint.path, files, FlatDestinations({}), buffers, staging.buffer_bytes)
            for number, blocks in tasks:
                found[number] = list(_verify_blocks(affected, files, reader, blocks, count))

    try:
        threads = files.most_threads(checkpoint.manifest.files, staging.threads, staging.memory_bytes)
        run_on_threads(threads, "holdfast-verify", enumerate(_tasks(checkpoint.manifest.files)), run)
    finally:
        files.close()
    damage = [
        one if one.offset is not None else replace(one, keys=affected.of_file(one.file))
        for one in _once_per_file(one for number in sorted(found) for one in found[number])
    ]
    if not damage:
        try:
            damage += _verify_contents(checkpoint)
        except Damaged as error:
            damage.append(Damage(names.MANIFEST, str(error)))
    unchecked = tuple(references(checkpoint.manifest.bases))
    return VerifyReport(len(checkpoint.manifest.files), checkpoint.manifest.total_bytes, tuple(damage), unchecked)


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """Some neighboring blocks of a file."""

    file: str
    blocks: Sequence[BlockRecord]


def _once_per_file(damage: Iterable[Damage]) -> list[Damage]:
    """Return all damage, but only the first problem of each file as a whole."""
    out: list[Damage] = []
    whole: set[str] = set()
    for one in damage:
        if one.offset is not None or one.file not in whole:
            out.append(one)
        if one.offset is None:
            whole.add(one.file)
    return out


def _tasks(files: Mapping[str, FileRecord]) -> Iterator[_BlockRange]:
    for name, record in files.items():
        for at in range(0, max(1, len(record.blocks)), _BLOCKS_AT_ONCE):
            yield _BlockRange(name, record.blocks[at : at + _BLOCKS_AT_ONCE])


def _verify_blocks(
    affected: AffectedKeys,
    files: OpenReaders[str],
    blocks: BlockReader,
    task: _BlockRange,
    progress: Progress,
) -> Iterator[Damage]:
    name = task.file
    try:
        with files.using(name) as reader:
            for block in task.blocks:
                found = _digest(blocks, reader, name, block)
                progress(block.size)
                if found == block.digest:
                    continue
                keys = affected.of_block(name, block.offset, block.size)
                yield Damage(name, "the digest does not match", block.offset, block.size, keys)
    except (Damaged, OSError) as error:
        yield Damage(name, str(error))


def _digest(blocks: BlockReader, reader: Reader, name: str, block: BlockRecord) -> str:
    """Return the digest of a block. An impossible header length raises at once: such a file may claim petabytes."""
    digest = Digest()
    is_header = not block.offset and names.is_tensor_file(name)
    for part in blocks.parts(reader, block.offset, block.size):
        if is_header:
            header_bytes(part[:LENGTH_BYTES].tobytes(), reader.size, name)
            is_header = False
        digest.update(part.data)
    return digest.hexdigest()


def _verify_contents(checkpoint: VerifiableCheckpoint) -> Iterator[Damage]:
    """Check that intact files agree with each other and that state.json holds entries; one header at a time."""
    _ = checkpoint.state
    for group, record in checkpoint.manifest.groups.items():
        index = names.index_file(names.file_stem(group, record.kind))
        files = read_index(checkpoint, group)
        if files is None:  # another tool's files, which need not be safetensors: its reader has checked them
            continue
        agrees = True
        held: set[str] = set()
        for name in record.files:
            for key in header_keys(checkpoint, name):
                if key in held:
                    raise Damaged(f"{checkpoint.path}: {group} has {key!r} in two files")
                held.add(key)
                agrees = agrees and files.pop(key, None) == name
        for alias, key in record.aliases.items():
            if key not in held:
                raise Damaged(f"{checkpoint.path}: {group} ties {alias!r} to {key!r}, which is missing")
        if files or not agrees:
            yield Damage(index, "the index does not agree with the headers")
