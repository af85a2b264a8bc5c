"""Tensor files of a second checkpoint, under names that no file of the first has, so that one stream reads both."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.layout.box import Box
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.load_plan import StoredFile
from holdfast.plan.recipe import Recipe
from holdfast.storage.base import Reader


@dataclass(frozen=True, slots=True)
class BorrowedFile:
    """A tensor file of another checkpoint."""

    source: Checkpoint
    file: str
    lock: threading.Lock

    @property
    def size(self) -> int:
        return self.source.manifest.files[self.file].size

    def open(self) -> Reader:
        with self.lock:
            return self.source.open_file(self.file)

    def inputs(self, begin: int, end: int) -> Iterator[tuple[Recipe[Place], Box]] | None:
        return None


@dataclass(frozen=True, slots=True)
class BorrowedGroup:
    """The tensors of a group by key, and their files under the new names."""

    tensors: Mapping[str, Recipe[Place]]
    stored: tuple[StoredFile, ...]
    virtual: Mapping[str, BorrowedFile]


def borrow(source: Checkpoint, group: Group, prefix: str, lock: threading.Lock) -> BorrowedGroup:
    """Return a group whose files begin with a prefix. The lock guards the source, which is not thread-safe."""
    used = {place.file for recipe in group.tensors.values() for place in recipe.sources()}
    renamed = {file: f"{prefix}:{file}" for file in used}

    def moved(place: Place) -> Place:
        return replace(place, file=renamed[place.file])

    stored = tuple(
        replace(file, name=renamed[file.name], places=tuple(map(moved, file.places)))
        for file in source.contents.files
        if file.name in used
    )
    tensors = {
        key: Recipe(recipe.shape, recipe.dtype, tuple(replace(t, source=moved(t.source)) for t in recipe.terms))
        for key, recipe in group.tensors.items()
    }
    virtual = {name: BorrowedFile(source, file, lock) for file, name in renamed.items()}
    return BorrowedGroup(tensors, stored, virtual)
