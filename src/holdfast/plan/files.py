"""The canonical split of a group into files.

Names, order, headers and offsets depend on keys, dtypes and global shapes alone, so that
equal states give equal bytes whatever the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core import limits
from holdfast.format.dtypes import DType
from holdfast.format.header import TensorEntry, encode_header
from holdfast.format.names import natural_key, tensor_file

_HEADER_FRAME = 1000  # more than a header without tensors takes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor as it is stored: its key, dtype and global shape."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", math.prod(self.shape) * self.dtype.bits // 8)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: its spec and the byte of the file at which it begins."""

    spec: TensorSpec
    file: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.bytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One tensor file: its name and number, its first bytes, its size, its tensors in the order of their bytes."""

    name: str
    number: int
    header: bytes
    size: int
    places: tuple[Place, ...]


def split_group(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int) -> tuple[FilePlan, ...]:
    """The files of a group."""
    return tuple(dealt.plan() for dealt in deal_group(group, specs, max_shard_bytes))


@dataclass(frozen=True, slots=True)
class DealtFile:
    """The tensors that were dealt to a file; planning it takes longer than dealing."""

    name: str
    number: int
    members: Sequence[TensorSpec]

    @property
    def header_limit(self) -> int:
        """The header is not longer than this."""
        return _HEADER_FRAME + sum(map(_entry_bytes, self.members))

    def plan(self) -> FilePlan:
        # Wide elements first: every tensor then begins at a multiple of its element size.
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


def deal_group(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[DealtFile]:
    """Deal tensors to files greedily in natural order; a group without tensors has one empty file."""
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
        DealtFile(tensor_file(group, number + 1, len(files)), number, members) for number, members in enumerate(files)
    ]


def _entry_bytes(spec: TensorSpec) -> int:
    """At most what a tensor takes in a header, so that no reader's limit is passed."""
    return 2 * len(spec.key.encode()) + 20 * len(spec.shape) + 120
