"""Verification: every byte, digest and cross-reference of a checkpoint; a report of damage with affected tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.checkpoint.reading import PORTION_BYTES, Progress
from holdfast.core import names
from holdfast.core.errors import Damaged
from holdfast.format.digest import Digest
from holdfast.format.manifest import FileRecord, Manifest
from holdfast.format.safetensors import LENGTH_BYTES, decode_index, header_bytes
from holdfast.plan.files import Place
from holdfast.plan.load_plan import StoredFile
from holdfast.storage.base import Reader


class VerifiableCheckpoint(Protocol):
    """The part of an open checkpoint that verification needs."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def path(self) -> str: ...

    @property
    def groups(self) -> tuple[str, ...]: ...

    @property
    def places(self) -> Mapping[str, Mapping[str, Place]]: ...

    @property
    def state(self) -> Mapping[str, Any]: ...

    def open_file(self, name: str) -> Reader: ...

    def read_file(self, name: str) -> bytes: ...

    def stored_file(self, name: str) -> StoredFile: ...


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
    """The result of a verification: the amount of data, and all damage."""

    files: int
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def good(self) -> bool:
        return not self.damage


def verify(checkpoint: VerifiableCheckpoint, progress: Progress) -> VerifyReport:
    """Verify every file of a checkpoint; reports all damage, not only the first."""
    damage: list[Damage] = []
    for name, record in checkpoint.manifest.files.items():
        damage += _verify_file(checkpoint, name, record, progress)
    if not damage:
        try:
            damage += _verify_contents(checkpoint)
        except Damaged as error:
            damage.append(Damage(names.MANIFEST, str(error)))
    return VerifyReport(len(checkpoint.manifest.files), checkpoint.manifest.total_bytes, tuple(damage))


def _verify_file(
    checkpoint: VerifiableCheckpoint, name: str, record: FileRecord, progress: Progress
) -> Iterator[Damage]:
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
                    # Refuse an impossible header length: such a file may claim petabytes.
                    header_bytes(bytes(view[:LENGTH_BYTES]), reader.size, name)
                digest.update(view)
                progress(view.nbytes)
            if digest.hexdigest() != block.digest:
                keys = tuple(_keys_in(checkpoint, name, block.offset, block.size))
                yield Damage(name, "the digest does not match", block.offset, block.size, keys)
    except (Damaged, OSError) as error:
        yield Damage(name, str(error), keys=tuple(_keys_of_index(checkpoint, name)))
    finally:
        reader.close()


def _keys_in(checkpoint: VerifiableCheckpoint, name: str, offset: int, size: int) -> Iterator[str]:
    """Yield the tensors that a block overlaps, or all tensors of the file if its header is damaged."""
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


def _keys_of_index(checkpoint: VerifiableCheckpoint, name: str) -> Iterator[str]:
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


def _verify_contents(checkpoint: VerifiableCheckpoint) -> Iterator[Damage]:
    """Check that intact files agree with each other and that state.json holds entries."""
    _ = checkpoint.state
    for group in checkpoint.groups:
        index = names.index_file(group)
        if index not in checkpoint.manifest.files:
            continue
        weight_map = decode_index(checkpoint.read_file(index), f"{checkpoint.path}/{index}", names.group_folder(group))
        if weight_map != {key: place.file for key, place in checkpoint.places[group].items()}:
            yield Damage(index, "the index does not agree with the headers")
