"""Verifying: every byte read, every digest compared, all damage named with the tensors it touches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.reading import PORTION_BYTES, Progress
from holdfast.core.errors import Damaged
from holdfast.format import names
from holdfast.format.digest import Digest
from holdfast.format.header import LENGTH_BYTES, header_bytes
from holdfast.format.index import decode_index
from holdfast.format.manifest import FileRecord


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: in which file, where, and which tensors it touches."""

    file: str
    problem: str
    offset: int | None = None
    size: int | None = None
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found: how much there is, and all damage."""

    files: int
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def good(self) -> bool:
        return not self.damage


def verify(checkpoint: Checkpoint, progress: Progress) -> VerifyReport:
    """Look at every file of a checkpoint; finds all damage, not only the first."""
    damage: list[Damage] = []
    for name, record in checkpoint.manifest.files.items():
        damage += _verify_file(checkpoint, name, record, progress)
    if not damage:
        try:
            damage += _verify_contents(checkpoint)
        except Damaged as error:
            damage.append(Damage(names.MANIFEST, str(error)))
    return VerifyReport(len(checkpoint.manifest.files), checkpoint.manifest.total_bytes, tuple(damage))


def _verify_file(checkpoint: Checkpoint, name: str, record: FileRecord, progress: Progress) -> Iterator[Damage]:
    try:
        reader = checkpoint.open_file(name)
    except (Damaged, OSError) as error:
        yield Damage(name, str(error), keys=tuple(_keys_of_index(checkpoint, name)))
        return
    try:
        buffer = memoryview(bytearray(PORTION_BYTES))
        for block in record.blocks:
            digest = Digest()
            for at in range(0, block.size, PORTION_BYTES):
                view = buffer[: min(PORTION_BYTES, block.size - at)]
                reader.read_into(block.offset + at, [view])
                if not block.offset + at and names.is_tensor_file(name):
                    # A header of an impossible length: such a file may claim petabytes to be read.
                    header_bytes(bytes(view[:LENGTH_BYTES]), reader.size, name)
                digest.update(view)
                progress(view.nbytes)
            if digest.hex() != block.digest:
                keys = tuple(_keys_in(checkpoint, name, block.offset, block.size))
                yield Damage(name, "the digest does not match", block.offset, block.size, keys)
    except (Damaged, OSError) as error:
        yield Damage(name, str(error), keys=tuple(_keys_of_index(checkpoint, name)))
    finally:
        reader.close()


def _keys_in(checkpoint: Checkpoint, name: str, offset: int, size: int) -> Iterator[str]:
    """The tensors a block touches; all of the file's when its header cannot be trusted."""
    if not names.is_tensor_file(name):
        return
    try:
        places = checkpoint.stored_file(name).places
    except Damaged:
        yield from _keys_of_index(checkpoint, name)
        return
    for place in places:
        if place.begin < offset + size and offset < place.end:
            yield place.spec.key


def _keys_of_index(checkpoint: Checkpoint, name: str) -> Iterator[str]:
    for group, record in checkpoint.manifest.groups.items():
        index = names.index_file(group)
        if name in record.files and index in checkpoint.manifest.files:
            try:
                weight_map = decode_index(
                    checkpoint.read_file(index), f"{checkpoint.path}/{index}", names.group_folder(group)
                )
            except (Damaged, OSError):
                return
            yield from (key for key, file in weight_map.items() if file == name)


def _verify_contents(checkpoint: Checkpoint) -> Iterator[Damage]:
    """Files that are whole must also agree with each other, and state.json must hold entries."""
    _ = checkpoint.state
    for group in checkpoint.groups:
        index = names.index_file(group)
        if index not in checkpoint.manifest.files:
            continue
        weight_map = decode_index(checkpoint.read_file(index), f"{checkpoint.path}/{index}", names.group_folder(group))
        if weight_map != {key: place.file for key, place in checkpoint.places[group].items()}:
            yield Damage(index, "the index does not agree with the headers")
