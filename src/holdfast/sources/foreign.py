"""`Foreign`: another tool's checkpoint as a Holdfast one; its folder, side and code files, files in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.core.names import natural_key
from holdfast.format import strictjson
from holdfast.format.manifest import FileRecord, GroupRecord, Manifest
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents, StoredTensor
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.program.model_program import Program
from holdfast.sources.source_program import SourceProgram
from holdfast.storage.base import Pin, Readable, Reader
from holdfast.storage.local import LocalPin

_SIDE = re.compile(r"(?!\.)[A-Za-z0-9_.\-]+\.(?:json|model|txt|jinja|tiktoken)|tokenizer[A-Za-z0-9_.\-]*")
_CODE = re.compile(r"[A-Za-z0-9_]+\.py")
_NOT_SIDE = (".index.json", "holdfast.json", ".safetensors", ".bin", ".pt")


class Folder:
    """A folder for a reader to inspect: its files by name and size. With `only`, a single file of the folder."""

    def __init__(self, storage: Readable, name: str, only: str | None = None) -> None:
        self.storage = storage
        self.name = name
        self.only = only
        try:
            pin = storage.pin(name)
        except NotFound:
            raise NotFound(f"{self.path}: no such checkpoint") from None
        self.pin: Pin = pin.following_blobs() if isinstance(pin, LocalPin) else pin
        self.files: Mapping[str, int] = self.pin.files() if only is None else {only: self._size(only)}

    def _size(self, name: str) -> int:
        reader = self.pin.open(name)
        reader.close()
        return reader.size

    def include(self, name: str) -> bool:
        """Add a neighbor of a single file; returns False if there is none."""
        try:
            self.files = {**self.files, name: self._size(name)}
        except NotFound:
            return False
        return True

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.name}" if self.name else self.storage.name

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a whole small file."""
        return self.pin.read(name, limit_bytes)

    def open(self, name: str) -> Reader:
        return self.pin.open(name)

    def read_begin(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a file, or all of a shorter file."""
        reader = self.open(name)
        try:
            data = bytearray(min(size, reader.size))
            reader.read_into(0, [memoryview(data)])
            return bytes(data)
        finally:
            reader.close()


class VirtualFile(Protocol):
    """A file that is not in the folder: computed while it is read, or in another folder."""

    @property
    def size(self) -> int: ...

    def open(self) -> Reader: ...

    def inputs(self, begin: int, end: int) -> Iterator[tuple[Recipe[Place], Box]] | None:
        """Yield the boxes of tensors that the bytes are computed from; None if the file itself stores them."""


@dataclass(frozen=True, slots=True)
class ReaderResult:
    """The result of a reader: the format's name, the contents, and small files that exist only in memory.

    Computed values are stored in a file of `made`; no file of the folder has such a name. `notes` list what was
    left out or is uncertain. `step_at` locates the step if it is a tensor. `read` are files without tensors that
    were read. `partial` says why this is only a part of a model, or is None. `linear_weights` is "in-out" or
    "out-in" if the format defines how weights of linear layers are stored. `virtual` are further files by name.
    `program` is the program that was exported with the weights.
    """

    format: str
    contents: Contents
    made: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    step_at: Recipe[Place] | None = None
    read: frozenset[str] = frozenset()
    partial: str | None = None
    linear_weights: str | None = None
    virtual: Mapping[str, VirtualFile] = field(default_factory=dict)
    program: SourceProgram | None = None


class Foreign(Checkpoint):
    """A checkpoint of another format, open for reading. It has no digests, so reads are not verified."""

    def __init__(self, folder: Folder, result: ReaderResult) -> None:
        self._result = result
        self._source = folder
        super().__init__(folder.storage, folder.name)
        self._pin = folder.pin

    @property
    def path(self) -> str:
        return f"{self._source.path}/{self._source.only}" if self._source.only else self._source.path

    @property
    def format(self) -> str:
        """The name of the format."""
        return self._result.format

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about what was left out or is uncertain."""
        return self._result.notes

    def with_note(self, note: str) -> Foreign:
        """Return the same folder with another note in front."""
        return Foreign(self._source, replace(self._result, notes=(note, *self.notes)))

    @property
    def partial(self) -> str | None:
        """The reason why this is only a part of a model, or None; found from its name, neighbors or contents."""
        return self._result.partial

    @property
    def linear_weights(self) -> str | None:
        """The layout of linear weights, "in-out" or "out-in", if the format defines it."""
        return self._result.linear_weights

    def __repr__(self) -> str:
        return f"Foreign({self.path!r}, format={self.format!r}, groups={list(self.groups)})"

    def _read_manifest(self) -> Manifest:
        contents = self._result.contents
        groups = {}
        for name, group in contents.groups.items():
            places = {place for recipe in group.tensors.values() for place in recipe.sources()}
            total = sum(place.spec.bytes for place in places)
            files = tuple(sorted({place.file for place in places}, key=natural_key))
            groups[name] = GroupRecord(group.kind, files, total, group.aliases, group.logical)
        names = {name for record in groups.values() for name in record.files}
        if self._result.virtual:  # their inputs are in files of no group
            names |= {file.name for file in contents.files}
        records = {name: FileRecord(self._size(name), ()) for name in sorted(names)}
        return Manifest(contents.step, None, "", "", limits.BLOCK_BYTES, groups, records, {})

    def _size(self, name: str) -> int:
        made, virtual = self._result.made.get(name), self._result.virtual.get(name)
        if virtual is not None:
            return virtual.size
        return len(made) if made is not None else self._source.files[name]

    @cached_property
    def contents(self) -> Contents:
        return self._result.contents

    @property
    def state(self) -> Mapping[str, Any]:
        return self._result.contents.state

    @property
    def source_program(self) -> SourceProgram | None:
        """The program that another tool exported with the weights, as its own plain data; None if there is none."""
        return self._result.program

    @property
    def program(self) -> Program | None:
        """The exported program as one that runs; raises Unsupported, with the operators, if it has no counterpart."""
        return None if self._result.program is None else self._result.program.program

    @property
    def virtual_files(self) -> Mapping[str, VirtualFile]:
        """Files that are not in the folder, by name."""
        return self._result.virtual

    def open_file(self, name: str) -> Reader:
        made, virtual = self._result.made.get(name), self._result.virtual.get(name)
        if virtual is not None:
            return virtual.open()
        return InMemoryReader(made) if made is not None else super().open_file(name)

    def skip_damaged_files(self, takes: Callable[..., bool]) -> None:
        """Do nothing: the reader has checked every file and needs all of them."""

    def _tensor_keys(self, group: str) -> Iterable[str]:
        return self.contents.groups[group].tensors

    def _tensor(self, group: str, key: str) -> StoredTensor | None:
        return self.contents.find(group, key)

    def side_files(self) -> list[str]:
        """Return the small files that a copy of the model needs, such as its config and tokenizer."""
        code = names_code(self._source)
        return [name for name in self._source.files if is_side_file(name) or (code and is_code(name))]

    def read_side_file(self, name: str) -> bytes:
        """Read one of the small files next to the tensors."""
        if name not in self.side_files():
            raise NotFound(f"{self.path} has no small file {name[:80]!r}")
        return self._source.read(name, limits.JSON_BYTES)

    def config(self) -> dict[str, Any] | None:
        try:
            fields = strictjson.loads(self._source.read("config.json", limits.JSON_BYTES), f"{self.path}/config.json")
        except NotFound:
            return None
        return fields if isinstance(fields, dict) else None


def missing_digests(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint cannot be verified, and what to do: another tool's format has no digests."""
    kind = f" in the format {checkpoint.format}" if isinstance(checkpoint, Foreign) else ""
    return (
        f"{checkpoint.path}: a checkpoint{kind} has no digests to verify; compare it with another one by holdfast "
        "diff, or convert it with --to holdfast, which writes digests"
    )


def names_code(folder: Folder) -> bool:
    """Return True if a folder's config refers to classes in its own code, which is needed to open the model."""
    if folder.only is not None or "config.json" not in folder.files:
        return False
    try:
        fields = strictjson.loads(folder.read("config.json", limits.JSON_BYTES), f"{folder.path}/config.json")
    except HoldfastError:
        return False
    return isinstance(fields, dict) and isinstance(fields.get("auto_map"), dict)


def is_code(name: str) -> bool:
    """Return True if the name is that of a Python file at the top of a folder."""
    return _CODE.fullmatch(name) is not None


def is_side_file(name: str) -> bool:
    """Return True if the name is that of a file that belongs to a copy of the model."""
    return _SIDE.fullmatch(name) is not None and not name.endswith(_NOT_SIDE)


def with_contents(
    checkpoint: Checkpoint,
    contents: Contents,
    made: Mapping[str, bytes],
    virtual: Mapping[str, VirtualFile] | None = None,
) -> Foreign:
    """Return the same folder with other contents, additional files in memory and additional virtual files."""
    if isinstance(checkpoint, Foreign):
        result = checkpoint._result
        every = {**result.virtual, **(virtual or {})}
        return Foreign(
            checkpoint._source, replace(result, contents=contents, made={**result.made, **made}, virtual=every)
        )
    result = ReaderResult("holdfast", contents, made, virtual=virtual or {})
    return Foreign(Folder(checkpoint.storage, checkpoint.folder), result)


class InMemoryReader:
    """A file in memory."""

    mappable = False

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return self._data.nbytes

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        return self._data[offset : offset + size]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            data = self._data[offset : offset + buffer.nbytes]
            if data.nbytes != buffer.nbytes:
                raise Damaged(f"a value in memory ends at byte {self.size}, expected {offset + buffer.nbytes}")
            buffer.cast("B")[:] = data
            offset += buffer.nbytes

    def close(self) -> None:
        """Do nothing: no file is open."""
