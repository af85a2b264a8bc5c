"""`Checkpoint`, open for reading: keys, tensors as numpy arrays, state.json values, config, indexes. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.complex_pairs import as_complex
from holdfast.checkpoint.reading import PORTION_BYTES, Loading
from holdfast.checkpoint.tensor_header import read_header
from holdfast.checkpoint.verify import VerifyReport, verify
from holdfast.core import limits, names
from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.core.ranks import SingleProcess
from holdfast.core.terminal import Progress, no_progress
from holdfast.format import statejson, strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import dtype_named, numpy_dtype
from holdfast.format.manifest import CURRENT, FileRecord, Manifest, decode_manifest, unknown
from holdfast.format.safetensors import decode_header, decode_index
from holdfast.layout.box import Box
from holdfast.layout.placement import tp_degree_of
from holdfast.plan.contents import Contents, Group, StoredTensor
from holdfast.plan.files import ArrayDestination, Place, ShardDestination, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile, Want, plan_load
from holdfast.plan.recipe import Recipe, destinations_of
from holdfast.plan.staging import HostStaging
from holdfast.program.model_program import Program
from holdfast.storage.base import MemoryReader, Readable, Reader

_CONFIG = "config.json"
_SUGGESTION_KEYS = 20_000  # searching more keys takes longer than a suggestion is worth


class Checkpoint:
    """One committed checkpoint, open for reading."""

    def __init__(self, storage: Readable, folder: str) -> None:
        self.storage = storage
        self.folder = folder
        try:
            self._pin = storage.pin(folder)
        except NotFound:
            raise NotFound(f"{self.path}: no such checkpoint") from None
        self.manifest = self._read_manifest()

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.folder}" if self.folder else self.storage.name

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on content that a reader omitted or is not certain about; empty for Holdfast's own checkpoints."""
        return ()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, step={self.step}, groups={list(self.groups)})"

    def _read_manifest(self) -> Manifest:
        try:
            data = self._pin.read(names.MANIFEST, limits.JSON_BYTES)
        except NotFound:
            raise NotFound(
                f"{self.path}: not a checkpoint: it has no {names.MANIFEST}, and no weights in the format of another "
                "tool that Holdfast reads; if it is the root of a run, name one of its steps"
            ) from None
        return decode_manifest(data, self.path)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.manifest.groups)

    @cached_property
    def stored_files(self) -> dict[str, tuple[StoredFile, ...]]:
        """Tensor files of every group, with blocks and tensors; reads and checks the headers."""
        return {
            group: tuple(self.stored_file(name) for name in record.files)
            for group, record in self.manifest.groups.items()
        }

    def stored_file(self, name: str) -> StoredFile:
        """Return a tensor file with its blocks and tensors; reads and checks its header."""
        record = self.manifest.files[name]
        where = f"{self.path}/{name}"
        data = read_header(self.open_file(name), record, where)
        try:
            entries = decode_header(data, record.size, where)
        except Damaged as problem:
            if record.header is None or self.manifest.version <= CURRENT:
                raise
            reason = str(problem).removeprefix(f"{where}: ")  # the digest is good: a newer version wrote it so
            raise unknown(reason, self.manifest.version, where) from None
        places = tuple(
            Place(TensorSpec(entry.key, entry.dtype, entry.shape), name, len(data) + entry.begin) for entry in entries
        )
        return StoredFile(name, tuple(self._blocks(record)), places)

    def _blocks(self, record: FileRecord) -> Iterator[StoredBlock]:
        if record.blocks:
            yield from (StoredBlock(block.offset, block.size, block.digest) for block in record.blocks)
            return
        if record.size:
            yield StoredBlock(0, record.size, None)

    def open_file(self, name: str) -> Reader:
        """Open a recorded file; raises Damaged if it is missing or has a different size."""
        expected = self.manifest.files[name].size
        try:
            reader = self._pin.open(name)
        except NotFound:
            raise self._missing(name) from None
        if reader.size != expected:
            reader.close()
            raise Damaged(f"{self.path}/{name} has {reader.size} bytes, but the manifest records {expected}")
        return reader

    @cached_property
    def mappable(self) -> bool:
        """True if this process may map the files: they are on a file system of its host."""
        return self._first_reader is not None and self._first_reader.mappable

    @property
    def in_memory(self) -> bool:
        """True if the tensors are in the memory of this host, where a crashed run captured them."""
        return isinstance(self._first_reader, MemoryReader)

    @cached_property
    def _first_reader(self) -> Reader | None:
        """A reader of the first tensor file, closed."""
        for record in self.manifest.groups.values():
            if record.files:
                reader = self.open_file(record.files[0])
                reader.close()
                return reader
        return None

    @cached_property
    def places(self) -> dict[str, dict[str, Place]]:
        """Places of all tensors by group and key, without the aliases of tied weights."""
        out: dict[str, dict[str, Place]] = {}
        for group, files in self.stored_files.items():
            members = out.setdefault(group, {})
            for place in (place for file in files for place in file.places):
                if place.spec.key in members:
                    raise Damaged(f"{self.path}: {group} has {place.spec.key!r} in two files")
                members[place.spec.key] = place
            for alias, key in self.manifest.groups[group].aliases.items():
                if key not in members:
                    raise Damaged(f"{self.path}: {group} ties {alias!r} to {key!r}, which is missing")
        return out

    @cached_property
    def contents(self) -> Contents:
        """The whole checkpoint as values: tensors by group and key, and everything else."""
        groups = {}
        for group, places in self.places.items():
            record = self.manifest.groups[group]
            groups[group] = Group(
                record.kind, {k: _recipe(p) for k, p in places.items()}, record.aliases, record.logical_dtypes
            )
        files = tuple(file for members in self.stored_files.values() for file in members)
        return Contents(groups, files, self.state, self.step, _tp_degree(self.manifest.writer))

    def keys(self, group: str | None = None) -> list[str]:
        """Return the keys of one group, or of all groups, in natural order; includes tied keys."""
        if group is not None and group not in self.manifest.groups:
            raise NotFound(f"{self.path} has no group {group!r}; it has {', '.join(self.groups)}")
        chosen = [group] if group is not None else list(self.groups)
        found = {key for name in chosen for key in self._tensor_keys(name)}
        found |= {alias for name in chosen for alias in self.manifest.groups[name].aliases}
        return sorted(found, key=names.natural_key)

    def _tensor_keys(self, group: str) -> Iterable[str]:
        return self.places[group]

    def find(self, key: str, group: str | None = None) -> StoredTensor:
        """Return the tensor with this key; without a group, "model" is searched first."""
        candidates = [group] if group is not None else sorted(self.groups, key=lambda name: name != "model")
        for name in candidates:
            if name not in self.manifest.groups:
                raise NotFound(f"{self.path} has no group {name!r}; it has {', '.join(self.groups)}")
            found = self._tensor(name, self.manifest.groups[name].aliases.get(key, key))
            if found is not None:
                return found
        where = f" in the group {group!r}" if group else ""
        raise NotFound(f"{self.path} has no key {key!r}{where}{self._suggestion(key, candidates)}")

    def _suggestion(self, key: str, groups: Iterable[str]) -> str:
        """Return similar keys as a hint for an error message."""
        try:
            known = [name for group in groups for name in self._tensor_keys(group)]
        except Damaged:
            return ""
        ending = [name for name in known if name.endswith(f".{key}") or key.endswith(f".{name}")]
        near = ending[:3] or difflib.get_close_matches(key, known[:_SUGGESTION_KEYS], n=3, cutoff=0.75)
        return f"; did you mean {', '.join(near)}?" if near else ""

    def _tensor(self, group: str, key: str) -> StoredTensor | None:
        place = self._place(group, key)
        if place is None:
            return None
        logical = self.manifest.groups[group].logical_dtypes.get(key, place.spec.dtype.name)
        return StoredTensor(group, key, _recipe(place), logical)

    def _place(self, group: str, key: str) -> Place | None:
        """Return the place of a tensor; if other files are damaged, the index still finds it."""
        try:
            return self.places[group].get(key)
        except Damaged as damaged:
            file = self._weight_map(group, damaged).get(key)
            if file is None:
                return None
            return next((place for place in self.stored_file(file).places if place.spec.key == key), None)

    def _weight_map(self, group: str, damaged: Damaged) -> dict[str, str]:
        """Return key to file from the group's verified index; raises `damaged` without a good index."""
        stem = names.file_stem(group, self.manifest.groups[group].kind)
        index = names.index_file(stem)
        try:
            data = self.read_file(index)
        except (Damaged, NotFound):
            raise damaged from None
        return decode_index(data, f"{self.path}/{index}", names.group_folder(stem))

    def skip_damaged_files(self, selects: Callable[..., bool]) -> None:
        """Ignore damaged files that hold no selected tensor; raises Damaged for a selected one.

        `selects` is called with a group, a key and the key's aliases.
        """
        try:
            _ = self.places
        except Damaged as damaged:
            groups = {}
            for group, record in self.manifest.groups.items():
                bad = {file for file in record.files if self._is_damaged(file)}
                lost = {key for key, file in self._weight_map(group, damaged).items() if file in bad} if bad else set()
                aliases = {alias: key for alias, key in record.aliases.items() if key not in lost}
                if any(selects(group, key, *(a for a, of in record.aliases.items() if of == key)) for key in lost):
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
        """Return a whole tensor as a numpy array; raises Damaged if one of its blocks has a wrong digest."""
        found = self.find(key, group)
        array = self.read_recipe(found.recipe, self._files_of(found.recipe), verify=verify)
        return as_complex(array, found.logical) if dtype_named(found.logical).pair else array

    def _files_of(self, recipe: Recipe[Place]) -> list[StoredFile]:
        """Return only the blocks that contain the places of a recipe."""
        out = []
        for place in recipe.sources():
            blocks = self._blocks(self.manifest.files[place.file])
            touched = (b for b in blocks if b.offset < place.end and place.begin < b.offset + b.size)
            out.append(StoredFile(place.file, tuple(touched), (place,)))
        return out

    def read_recipe(
        self, recipe: Recipe[Place], files: Sequence[StoredFile], *, verify: bool = True
    ) -> npt.NDArray[Any]:
        """Read a tensor from the places of its recipe in `files`."""
        return self.read_recipes([recipe], files, verify=verify)[0]

    def read_recipes(
        self, recipes: Sequence[Recipe[Place]], files: Sequence[StoredFile], *, verify: bool = True
    ) -> list[npt.NDArray[Any]]:
        """Read several tensors from the places of their recipes in `files`, with one plan."""
        arrays = []
        destinations: dict[tuple[Place, Box], list[ShardDestination]] = {}
        for recipe in recipes:
            arrays.append(np.empty(recipe.shape, dtype=numpy_dtype(recipe.dtype.name)))
            inner = ArrayDestination(arrays[-1].view(f"u{recipe.dtype.bytes}"))
            for wanted, destination in destinations_of(recipe, Box.full(recipe.shape), inner):
                destinations.setdefault(wanted, []).append(destination)
        wants = [Want(place, box, 0) for place, box in destinations]
        reads = plan_load(files, wants, verify=verify, portion_bytes=PORTION_BYTES)
        staging = partial(HostStaging.within, limits.LOAD_MEMORY_BYTES)
        failure = Loading(SingleProcess(), self, destinations, no_progress, staging).run_read(reads, [0], 0.0).failure
        if failure is not None:
            raise failure
        return arrays

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """Values that are not tensors: the entries of state.json, still encoded."""
        if names.STATE not in self.manifest.files:
            return {}
        fields = strictjson.loads(self.read_file(names.STATE), f"{self.path}/{names.STATE}")
        if not isinstance(fields, dict) or not isinstance(fields.get("entries"), dict):
            raise Damaged(f"{self.path}/{names.STATE}: has no entries")
        version, where = self.manifest.version, f"{self.path}/{names.STATE}"
        for name, entry in fields["entries"].items():
            if not statejson.is_entry(entry):
                raise unknown(f"the entry {name[:80]!r} is not in Holdfast's format", version, where)
            if version > CURRENT and entry["kind"] not in statejson.ENTRY_KINDS:
                raise unknown(f"the entry {name[:80]!r} is of the unknown kind {entry['kind'][:40]!r}", version, where)
            if version > CURRENT and (tag := statejson.unknown_tag(entry)) is not None:
                raise unknown(f"the entry {name[:80]!r} has a value of the unknown kind {tag[:40]!r}", version, where)
        return dict(fields["entries"])

    def value(self, name: str) -> Any:
        """Return a decoded value of state.json that is the same on every rank; tensors stay references."""
        entry = self.state.get(name)
        if entry is None or "value" not in entry:
            raise NotFound(f"{self.path} has no value {name!r} that is the same on every rank")
        return statejson.decode(entry["value"], self.path, lambda tag, content: {tag: content})

    def config(self) -> dict[str, Any] | None:
        """Return the contents of config.json, or None if there is no such file."""
        try:
            fields = strictjson.loads(self.read_file(_CONFIG), f"{self.path}/{_CONFIG}")
        except NotFound:
            return None
        return fields if isinstance(fields, dict) else None

    @cached_property
    def program(self) -> Program | None:
        """The model as a program: plain data, read without torch; None for a checkpoint without one."""
        if getattr(self.manifest.files.get(names.PROGRAM), "kind", "extra"):  # before 1.3, a file of a user
            return None
        return Program.from_json(self.read_file(names.PROGRAM), f"{self.path}/{names.PROGRAM}")

    def read_file(self, name: str) -> bytes:
        """Read and verify a whole small file; raises NotFound only if the manifest does not record it."""
        record = self.manifest.files.get(name)
        if record is None:
            raise NotFound(f"{self.path} has no file {name}")
        try:
            data = self._pin.read(name, limits.JSON_BYTES)
        except NotFound:
            raise self._missing(name) from None
        if len(data) != record.size:
            raise Damaged(f"{self.path}/{name} has {len(data)} bytes, but the manifest records {record.size}")
        for block in record.blocks:
            if digest_hex(data[block.offset : block.offset + block.size]) != block.digest:
                raise Damaged(f"{self.path}/{name}: the block at {block.offset} has a wrong digest")
        return data

    def _missing(self, name: str) -> HoldfastError:
        """Return the error for a missing recorded file: Damaged, unless the whole checkpoint is gone."""
        try:
            self._pin.hold().release()
        except NotFound:
            return NotFound(
                f"{self.path} was removed or replaced since it was opened; open it again, "
                "and read it inside `with checkpoint.held():`"
            )
        return Damaged(f"{self.path}/{name} is missing; the manifest records {self.manifest.files[name].size} bytes")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep retention from removing the checkpoint while it is read; raises NotFound if it is gone already."""
        hold = self._pin.hold()
        try:
            yield
        finally:
            hold.release()

    def verify(self, progress: Progress = no_progress) -> VerifyReport:
        """Read every byte and compare every digest; reports all damage, not only the first."""
        with self.held():
            return verify(self, progress)


def _recipe(place: Place) -> Recipe[Place]:
    return Recipe.whole(place, place.spec.shape, place.spec.dtype)


def _tp_degree(writer: Mapping[str, Any]) -> int | None:
    """Return the recorded tensor-parallel degree, or None if the manifest records no mesh."""
    mesh = writer.get("mesh")
    return tp_degree_of(mesh) if mesh else None
