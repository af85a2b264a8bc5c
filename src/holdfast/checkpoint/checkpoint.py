"""An open checkpoint: what it holds, reading single tensors, verifying every byte. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.reading import PORTION_BYTES, Loading, Progress
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.core.ranks import Alone
from holdfast.format import names, statejson, strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import dtype_named, numpy_dtype
from holdfast.format.header import LENGTH_BYTES, decode_header, header_bytes
from holdfast.format.index import decode_index
from holdfast.format.manifest import FileRecord, Manifest, decode_manifest
from holdfast.layout.box import Box
from holdfast.layout.mesh import tp_degree_of
from holdfast.plan.arrays import ArrayDestination, ShardDestination
from holdfast.plan.contents import Contents, Group, StoredTensor
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.load import StoredBlock, StoredFile, Want, plan_load
from holdfast.plan.recipe import Recipe
from holdfast.plan.recipe_fill import destinations_of
from holdfast.storage.base import Readable, Reader

if TYPE_CHECKING:
    from holdfast.checkpoint.verify import VerifyReport

_CONFIG = "config.json"
_NEAR_KEYS = 20_000  # to look at more takes longer than a hint is worth


def no_progress(count: int) -> None:
    """The progress of work that nobody watches."""


class Checkpoint:
    """One committed checkpoint, open for reading."""

    def __init__(self, storage: Readable, folder: str) -> None:
        self.storage = storage
        self.folder = folder
        try:
            self._pin = storage.pin(folder)
        except NotFound:
            raise NotFound(f"{self.path}: there is no such checkpoint") from None
        self.manifest = self._read_manifest()

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.folder}" if self.folder else self.storage.name

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader left out, or is not certain about; nothing for a checkpoint of Holdfast's own."""
        return ()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, step={self.step}, groups={list(self.groups)})"

    def _read_manifest(self) -> Manifest:
        try:
            data = self._pin.read(names.MANIFEST, limits.JSON_BYTES)
        except NotFound:
            raise NotFound(
                f"{self.path}: there is no {names.MANIFEST} in it, and no weights of another tool that are read: "
                "not a checkpoint; if it is a run's root, name one of its steps"
            ) from None
        return decode_manifest(data, self.path)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.manifest.groups)

    @cached_property
    def stored_files(self) -> dict[str, tuple[StoredFile, ...]]:
        """Every group's tensor files with their blocks and tensors; reads and checks the headers."""
        return {
            group: tuple(self.stored_file(name) for name in record.files)
            for group, record in self.manifest.groups.items()
        }

    def stored_file(self, name: str) -> StoredFile:
        """One tensor file: its header is read, and checked against the manifest."""
        record = self.manifest.files[name]
        where = f"{self.path}/{name}"
        reader = self.open_file(name)
        try:
            prefix = bytearray(min(LENGTH_BYTES, reader.size))
            reader.read_into(0, [memoryview(prefix)])
            data = bytearray(header_bytes(bytes(prefix), reader.size, where))
            reader.read_into(0, [memoryview(data)])
        finally:
            reader.close()
        if record.header is not None and digest_hex(data) != record.header.digest:
            raise Damaged(f"{where}: the header's digest is {digest_hex(data)}, expected {record.header.digest}")
        places = tuple(
            Place(TensorSpec(entry.key, entry.dtype, entry.shape), name, len(data) + entry.begin)
            for entry in decode_header(bytes(data), reader.size, where)
        )
        return StoredFile(name, tuple(self._blocks(record)), places)

    def _blocks(self, record: FileRecord) -> Iterator[StoredBlock]:
        if record.blocks:
            yield from (StoredBlock(block.offset, block.size, block.digest) for block in record.blocks)
            return
        if record.size:
            yield StoredBlock(0, record.size, None)

    def open_file(self, name: str) -> Reader:
        """Open a recorded file; raises Damaged if it is missing or has another size."""
        expected = self.manifest.files[name].size
        try:
            reader = self._pin.open(name)
        except NotFound:
            raise self._missing(name) from None
        if reader.size != expected:
            reader.close()
            raise Damaged(f"{self.path}/{name} has {reader.size} bytes, the manifest says {expected}")
        return reader

    @cached_property
    def mappable(self) -> bool:
        """Whether this process may map the files: they lie on a file system of its host."""
        for record in self.manifest.groups.values():
            if not record.files:
                continue
            reader = self.open_file(record.files[0])
            reader.close()
            return reader.mappable
        return False

    @cached_property
    def places(self) -> dict[str, dict[str, Place]]:
        """Group to key to where the tensor lies; aliases of tied weights are not in it."""
        out: dict[str, dict[str, Place]] = {}
        for group, files in self.stored_files.items():
            members = out.setdefault(group, {})
            for place in (place for file in files for place in file.places):
                if place.spec.key in members:
                    raise Damaged(f"{self.path}: {group} has {place.spec.key!r} in two files")
                members[place.spec.key] = place
            for alias, key in self.manifest.groups[group].aliases.items():
                if key not in members:
                    raise Damaged(f"{self.path}: {group} ties {alias!r} to {key!r}, which it does not have")
        return out

    @cached_property
    def contents(self) -> Contents:
        """All of it as values: tensors by group and key, and what is not a tensor."""
        groups = {}
        for group, places in self.places.items():
            record = self.manifest.groups[group]
            groups[group] = Group(
                record.kind, {k: _recipe(p) for k, p in places.items()}, record.aliases, record.logical_dtypes
            )
        files = tuple(file for members in self.stored_files.values() for file in members)
        return Contents(groups, files, self.state, self.step, _tp_degree(self.manifest.writer))

    def keys(self, group: str | None = None) -> list[str]:
        """The keys of one group, or of all, in natural order; tied keys included."""
        if group is not None and group not in self.manifest.groups:
            raise NotFound(f"{self.path} has no group {group!r}; it has {', '.join(self.groups)}")
        chosen = [group] if group is not None else list(self.groups)
        found = {key for name in chosen for key in self._tensor_keys(name)}
        found |= {alias for name in chosen for alias in self.manifest.groups[name].aliases}
        return sorted(found, key=names.natural_key)

    def _tensor_keys(self, group: str) -> Iterable[str]:
        return self.places[group]

    def find(self, key: str, group: str | None = None) -> StoredTensor:
        """A tensor by its key; "model" is looked at first when no group is given."""
        candidates = [group] if group is not None else sorted(self.groups, key=lambda name: name != "model")
        for name in candidates:
            if name not in self.manifest.groups:
                raise NotFound(f"{self.path} has no group {name!r}; it has {', '.join(self.groups)}")
            found = self._tensor(name, self.manifest.groups[name].aliases.get(key, key))
            if found is not None:
                return found
        where = f" in the group {group!r}" if group else ""
        raise NotFound(f"{self.path} has no key {key!r}{where}{self._near(key, candidates)}")

    def _near(self, key: str, groups: Iterable[str]) -> str:
        """Keys that may be meant, as a hint."""
        try:
            known = [name for group in groups for name in self._tensor_keys(group)]
        except Damaged:
            return ""
        ending = [name for name in known if name.endswith(f".{key}") or key.endswith(f".{name}")]
        near = ending[:3] or difflib.get_close_matches(key, known[:_NEAR_KEYS], n=3, cutoff=0.75)
        return f"; did you mean {', '.join(near)}?" if near else ""

    def _tensor(self, group: str, key: str) -> StoredTensor | None:
        place = self._place(group, key)
        if place is None:
            return None
        logical = self.manifest.groups[group].logical_dtypes.get(key, place.spec.dtype.name)
        return StoredTensor(group, key, _recipe(place), logical)

    def _place(self, group: str, key: str) -> Place | None:
        """Where a tensor lies; damage to other files does not matter if the index names the tensor's own."""
        try:
            return self.places[group].get(key)
        except Damaged as damaged:
            file = self._weight_map(group, damaged).get(key)
            if file is None:
                return None
            return next((place for place in self.stored_file(file).places if place.spec.key == key), None)

    def _weight_map(self, group: str, damaged: Damaged) -> dict[str, str]:
        """Key to file by the group's index, once it is verified; raises `damaged` where there is no such index."""
        index = names.index_file(group)
        try:
            data = self.read_file(index)
        except (Damaged, NotFound):
            raise damaged from None
        return decode_index(data, f"{self.path}/{index}", names.group_folder(group))

    def leave_out_damage(self, takes: Callable[..., bool]) -> None:
        """Do without damaged files that hold no tensor which is taken; raises Damaged if one does.

        `takes` is asked with a group, a key and the key's aliases.
        """
        try:
            _ = self.places
        except Damaged as damaged:
            groups = {}
            for group, record in self.manifest.groups.items():
                bad = {file for file in record.files if self._is_damaged(file)}
                lost = {key for key, file in self._weight_map(group, damaged).items() if file in bad} if bad else set()
                aliases = {alias: key for alias, key in record.aliases.items() if key not in lost}
                if any(takes(group, key, *(a for a, of in record.aliases.items() if of == key)) for key in lost):
                    raise
                good = tuple(file for file in record.files if file not in bad)
                groups[group] = replace(record, files=good, aliases=aliases)
            self.__dict__.pop("stored_files", None)
            self.manifest = replace(self.manifest, groups=groups)

    def _is_damaged(self, file: str) -> bool:
        try:
            self.stored_file(file)
        except Damaged:
            return True
        return False

    def read(self, key: str, group: str | None = None, *, verify: bool = True) -> npt.NDArray[Any]:
        """One whole tensor as a numpy array; raises Damaged if a block of it has a wrong digest."""
        found = self.find(key, group)
        array = self.read_recipe(found.recipe, self._files_of(found.recipe), verify=verify)
        return as_complex(array, found.logical) if dtype_named(found.logical).pair else array

    def _files_of(self, recipe: Recipe[Place]) -> list[StoredFile]:
        """The blocks in which the places of a recipe lie, without looking at what else is there."""
        out = []
        for place in recipe.sources():
            blocks = self._blocks(self.manifest.files[place.file])
            touched = (b for b in blocks if b.offset < place.end and place.begin < b.offset + b.size)
            out.append(StoredFile(place.file, tuple(touched), (place,)))
        return out

    def read_recipe(
        self, recipe: Recipe[Place], files: Sequence[StoredFile], *, verify: bool = True
    ) -> npt.NDArray[Any]:
        """A tensor from the places that it is made of, in `files`."""
        return self.read_recipes([recipe], files, verify=verify)[0]

    def read_recipes(
        self, recipes: Sequence[Recipe[Place]], files: Sequence[StoredFile], *, verify: bool = True
    ) -> list[npt.NDArray[Any]]:
        """Tensors from the places that they are made of, in `files`, by one plan."""
        arrays = []
        destinations: dict[tuple[Place, Box], list[ShardDestination]] = {}
        for recipe in recipes:
            arrays.append(np.empty(recipe.shape, dtype=numpy_dtype(recipe.dtype.name)))
            inner = ArrayDestination(arrays[-1].view(f"u{recipe.dtype.bytes}"))
            for wanted, destination in destinations_of(recipe, Box.full(recipe.shape), inner):
                destinations.setdefault(wanted, []).append(destination)
        wants = [Want(place, box, 0) for place, box in destinations]
        reads = plan_load(files, wants, verify=verify, portion_bytes=PORTION_BYTES)
        failure = Loading(Alone(), self, destinations, no_progress).run_read(reads, [0], 0.0).failure
        if failure is not None:
            raise failure
        return arrays

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """What is not a tensor: the entries of state.json, still encoded."""
        if names.STATE not in self.manifest.files:
            return {}
        fields = strictjson.loads(self.read_file(names.STATE), f"{self.path}/{names.STATE}")
        if not isinstance(fields, dict) or not isinstance(fields.get("entries"), dict):
            raise Damaged(f"{self.path}/{names.STATE}: no entries")
        for name, entry in fields["entries"].items():
            if not _is_entry(entry):
                raise Damaged(f"{self.path}/{names.STATE}: the entry {name[:80]!r} is not one that Holdfast writes")
        return dict(fields["entries"])

    def value(self, name: str) -> Any:
        """A value of state.json that is the same for every rank, decoded; tensors stay references."""
        entry = self.state.get(name)
        if entry is None or "value" not in entry:
            raise NotFound(f"{self.path} has no single value named {name!r}")
        return statejson.decode(entry["value"], self.path, lambda tag, content: {tag: content})

    def config(self) -> dict[str, Any] | None:
        """What config.json says of the model, if there is one."""
        try:
            fields = strictjson.loads(self.read_file(_CONFIG), f"{self.path}/{_CONFIG}")
        except NotFound:
            return None
        return fields if isinstance(fields, dict) else None

    def read_file(self, name: str) -> bytes:
        """A whole small file, verified; raises NotFound only for one that the manifest does not record."""
        record = self.manifest.files.get(name)
        if record is None:
            raise NotFound(f"{self.path} has no file {name}")
        try:
            data = self._pin.read(name, limits.JSON_BYTES)
        except NotFound:
            raise self._missing(name) from None
        if len(data) != record.size:
            raise Damaged(f"{self.path}/{name} has {len(data)} bytes, the manifest says {record.size}")
        for block in record.blocks:
            if digest_hex(data[block.offset : block.offset + block.size]) != block.digest:
                raise Damaged(f"{self.path}/{name}: the block at {block.offset} has a wrong digest")
        return data

    def _missing(self, name: str) -> HoldfastError:
        """The error for a recorded file that is not there: damage, unless all of the checkpoint went."""
        try:
            self._pin.hold().release()
        except NotFound:
            return NotFound(
                f"{self.path} was removed or replaced since it was opened; open it anew, "
                "and read it inside of `with checkpoint.held():`"
            )
        return Damaged(f"{self.path}/{name} is missing; the manifest records {self.manifest.files[name].size} bytes")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep retention from removing it while it is read; raises NotFound if it is gone already."""
        hold = self._pin.hold()
        try:
            yield
        finally:
            hold.release()

    def verify(self, progress: Progress = no_progress) -> VerifyReport:
        """Read every byte and compare every digest; finds all damage, not only the first."""
        from holdfast.checkpoint.verify import verify

        with self.held():
            return verify(self, progress)


def _is_entry(entry: Any) -> bool:
    """Whether a state.json entry has the shape of one: a value for all, values by coordinate, or groups."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return False
    if entry["kind"] == "optimizer":
        groups = entry.get("groups")
        return isinstance(groups, list) and all(
            isinstance(g, dict) and {"params", "options"} <= g.keys() for g in groups
        )
    if "value" in entry:
        return True
    axes, sizes = entry.get("axes"), entry.get("sizes")
    if not isinstance(axes, list) or not isinstance(sizes, list) or len(axes) != len(sizes):
        return False
    return all(isinstance(axis, str) for axis in axes) and isinstance(entry.get("values"), dict)


def _recipe(place: Place) -> Recipe[Place]:
    return Recipe.whole(place, place.spec.shape, place.spec.dtype)


def _tp_degree(writer: Mapping[str, Any]) -> int | None:
    """The tensor-parallel degree that the manifest records; None for a checkpoint that records no mesh."""
    mesh = writer.get("mesh")
    return tp_degree_of(mesh) if mesh else None


def as_complex(array: npt.NDArray[Any], logical: str) -> npt.NDArray[Any]:
    """Pairs of reals as complex numbers; numpy has no 32-bit ones, so those widen to 64."""
    if logical == "complex32":
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).view(np.complex64 if logical == "complex32" else np.complex128)[..., 0]
