"""The canonical split of a group into files.

Names, order, headers and offsets depend only on keys, dtypes and global shapes. Equal states
therefore produce equal bytes on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core import limits
from holdfast.format.dtypes import DType
from holdfast.format.header import TensorEntry, encode_header
from holdfast.format.names import natural_key, tensor_file

_HEADER_FRAME = 1000  # exceeds the size of a header without tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole stored tensor: its key, dtype and global shape."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", math.prod(self.shape) * self.dtype.bits // 8)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a stored tensor: its spec, its file and the byte offset of its first element."""

    spec: TensorSpec
    file: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.bytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A tensor file: its name, number, header, size, and its tensors in byte order."""

    name: str
    number: int
    header: bytes
    size: int
    places: tuple[Place, ...]


def split_group(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int) -> tuple[FilePlan, ...]:
    """Split the tensors of a group into planned files."""
    return tuple(file.plan() for file in assign_to_files(group, specs, max_shard_bytes))


@dataclass(frozen=True, slots=True)
class FileMembers:
    """The tensors assigned to a file. Assigning is cheap; `plan` encodes the header."""

    name: str
    number: int
    members: Sequence[TensorSpec]

    @property
    def header_limit(self) -> int:
        """An upper bound on the header's size in bytes."""
        return _HEADER_FRAME + sum(map(_entry_bytes, self.members))

    def plan(self) -> FilePlan:
        # Wide elements first: every tensor then starts at a multiple of its element size.
        ordered = sorted(self.members, key=lambda spec: -spec.dtype.bits)
        entries = []
        position = 0
        for spec in ordered:
            entries.append(TensorEntry(spec.key, spec.dtype, spec.shape, position, position + spec.bytes))
            position += spec.bytes
        header = encode_header(entries)
        places = tuple(
            Place(spec, self.name, len(header) + entry.begin) for spec, entry in zip(ordered, entries, strict=True)
        )
        return FilePlan(self.name, self.number, header, len(header) + position, places)


def assign_to_files(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[FileMembers]:
    """Assign tensors to files greedily in natural order; a group without tensors gets one empty file."""
    ordered = sorted(specs, key=lambda spec: natural_key(spec.key))
    files: list[list[TensorSpec]] = [[]]
    size = header = 0
    for spec in ordered:
        entry_bytes = _entry_bytes(spec)
        full = size + spec.bytes > max_shard_bytes or header + entry_bytes > limits.HEADER_BYTES // 2
        if files[-1] and (full or len(files[-1]) >= limits.HEADER_TENSORS // 2):
            files.append([])
            size = header = 0
        files[-1].append(spec)
        size += spec.bytes
        header += entry_bytes
    return [
        FileMembers(tensor_file(group, number + 1, len(files)), number, members) for number, members in enumerate(files)
    ]


def _entry_bytes(spec: TensorSpec) -> int:
    """Return an upper bound on a tensor's bytes in a header, so that no reader's limit is exceeded."""
    return 2 * len(spec.key.encode()) + 20 * len(spec.shape) + 120
