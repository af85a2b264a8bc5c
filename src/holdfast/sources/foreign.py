"""A checkpoint that another tool wrote, seen as one of Holdfast's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.format import strictjson
from holdfast.format.manifest import FileRecord, GroupRecord, Manifest
from holdfast.format.names import natural_key
from holdfast.plan.contents import Contents, StoredTensor
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.storage.base import Pin, Readable, Reader
from holdfast.storage.local import LocalPin

_SIDE = re.compile(r"(?!\.)[A-Za-z0-9_.\-]+\.(?:json|model|txt|jinja|tiktoken)|tokenizer[A-Za-z0-9_.\-]*")
_CODE = re.compile(r"[A-Za-z0-9_]+\.py")
_NOT_SIDE = (".index.json", "holdfast.json", ".safetensors", ".bin", ".pt")


class Folder:
    """A folder that a reader looks at: its files, by name and size. With `only`, one file of it."""

    def __init__(self, storage: Readable, name: str, only: str | None = None) -> None:
        self.storage = storage
        self.name = name
        self.only = only
        try:
            pin = storage.pin(name)
        except NotFound:
            raise NotFound(f"{self.path}: there is no such checkpoint") from None
        self.pin: Pin = pin.following_blobs() if isinstance(pin, LocalPin) else pin
        self.files: Mapping[str, int] = self.pin.files() if only is None else {only: self._size(only)}

    def _size(self, name: str) -> int:
        reader = self.pin.open(name)
        reader.close()
        return reader.size

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.name}" if self.name else self.storage.name

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A whole small file."""
        return self.pin.read(name, limit_bytes)

    def open(self, name: str) -> Reader:
        return self.pin.open(name)

    def read_begin(self, name: str, size: int) -> bytes:
        """The first bytes of a file: `size`, or all if it is shorter."""
        reader = self.open(name)
        try:
            data = bytearray(min(size, reader.size))
            reader.read_into(0, [memoryview(data)])
            return bytes(data)
        finally:
            reader.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader found: the format's name, the contents, and small files that are in memory alone.

    A value that had to be computed lies in a file of `made`; no file of the folder has such a name.
    `notes` say what was left out, or is not certain. `step_at` is where the step lies, if it is a tensor.
    `read` are files that were read and hold no tensor. `partial` says why it is a part of a model, if it is one.
    `linear_weights` is "in-out" or "out-in" where the format says how weights of linear layers are stored.
    """

    format: str
    contents: Contents
    made: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    step_at: Recipe[Place] | None = None
    read: frozenset[str] = frozenset()
    partial: str | None = None
    linear_weights: str | None = None


class Foreign(Checkpoint):
    """A checkpoint of another format, open for reading. It has no digests: what is read is not verified."""

    def __init__(self, folder: Folder, found: Found) -> None:
        self._found = found
        self._source = folder
        super().__init__(folder.storage, folder.name)
        self._pin = folder.pin

    @property
    def path(self) -> str:
        return f"{self._source.path}/{self._source.only}" if self._source.only else self._source.path

    @property
    def format(self) -> str:
        """The name of the format."""
        return self._found.format

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of it, or is not certain."""
        return self._found.notes

    @property
    def partial(self) -> str | None:
        """Why it is a part of a model, where its name, its neighbours or its contents say so."""
        return self._found.partial

    @property
    def linear_weights(self) -> str | None:
        """How weights of linear layers are stored, "in-out" or "out-in", where the format says it."""
        return self._found.linear_weights

    def __repr__(self) -> str:
        return f"Foreign({self.path!r}, format={self.format!r}, groups={list(self.groups)})"

    def _read_manifest(self) -> Manifest:
        contents = self._found.contents
        groups = {}
        for name, group in contents.groups.items():
            places = {place for recipe in group.tensors.values() for place in recipe.sources()}
            total = sum(place.spec.bytes for place in places)
            files = tuple(sorted({place.file for place in places}, key=natural_key))
            groups[name] = GroupRecord(group.kind, files, total, group.aliases, group.logical)
        names = {name for record in groups.values() for name in record.files}
        records = {name: FileRecord(self._size(name), ()) for name in sorted(names)}
        return Manifest(contents.step, None, "", "", limits.BLOCK_BYTES, groups, records, {})

    def _size(self, name: str) -> int:
        made = self._found.made.get(name)
        return len(made) if made is not None else self._source.files[name]

    @cached_property
    def contents(self) -> Contents:
        return self._found.contents

    @property
    def state(self) -> Mapping[str, Any]:
        return self._found.contents.state

    def open_file(self, name: str) -> Reader:
        made = self._found.made.get(name)
        return MadeReader(made) if made is not None else super().open_file(name)

    def skip_damaged_files(self, takes: Callable[..., bool]) -> None:
        """Nothing to do: its reader has seen every file, and found none that it could do without."""

    def _tensor_keys(self, group: str) -> Iterable[str]:
        return self.contents.groups[group].tensors

    def _tensor(self, group: str, key: str) -> StoredTensor | None:
        return self.contents.find(group, key)

    def side_files(self) -> list[str]:
        """Small files beside the tensors that a copy of the model wants too: its config, its tokenizer."""
        code = names_code(self._source)
        return [name for name in self._source.files if is_side_file(name) or (code and is_code(name))]

    def read_side_file(self, name: str) -> bytes:
        """One of the small files beside the tensors."""
        if name not in self.side_files():
            raise NotFound(f"{self.path} has no small file {name[:80]!r}")
        return self._source.read(name, limits.JSON_BYTES)

    def config(self) -> dict[str, Any] | None:
        try:
            fields = strictjson.loads(self._source.read("config.json", limits.JSON_BYTES), f"{self.path}/config.json")
        except NotFound:
            return None
        return fields if isinstance(fields, dict) else None


def names_code(folder: Folder) -> bool:
    """Return whether a folder's config names classes of its own code, without which the model does not open."""
    if folder.only is not None or "config.json" not in folder.files:
        return False
    try:
        fields = strictjson.loads(folder.read("config.json", limits.JSON_BYTES), f"{folder.path}/config.json")
    except HoldfastError:
        return False
    return isinstance(fields, dict) and isinstance(fields.get("auto_map"), dict)


def is_code(name: str) -> bool:
    """Return whether a file is Python code at the top of a folder, by its name."""
    return _CODE.fullmatch(name) is not None


def is_side_file(name: str) -> bool:
    """Return whether a file is one that a copy of the model wants too, by its name."""
    return _SIDE.fullmatch(name) is not None and not name.endswith(_NOT_SIDE)


def seen_as(checkpoint: Checkpoint, contents: Contents, made: Mapping[str, bytes]) -> Foreign:
    """The same folder seen otherwise, with more values that are in memory alone."""
    if isinstance(checkpoint, Foreign):
        found = checkpoint._found
        return Foreign(checkpoint._source, replace(found, contents=contents, made={**found.made, **made}))
    return Foreign(Folder(checkpoint.storage, checkpoint.folder), Found("holdfast", contents, made))


class MadeReader:
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
                raise Damaged(f"a value made in memory ends at {self.size}, wanted {offset + buffer.nbytes}")
            buffer.cast("B")[:] = data
            offset += buffer.nbytes

    def close(self) -> None:
        """Nothing is open."""
