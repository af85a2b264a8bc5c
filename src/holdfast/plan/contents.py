"""Contents: what a checkpoint holds, as values, whatever format it is stored in.

Every tensor is a recipe over places in files, so that a tensor which is cut into pieces, turned
or kept under another name is read by the same plans as one that lies there as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.files import Place
from holdfast.plan.load import StoredFile
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one kind ("module", "optimizer", "masters", "tensors" ...) by key.

    `aliases` are other keys of the same tensors; `logical` names dtypes that the files cannot say.
    """

    kind: str
    tensors: Mapping[str, Recipe[Place]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    logical: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: the group and key it is kept under, what it is made of, its logical dtype."""

    group: str
    key: str
    recipe: Recipe[Place]
    logical: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as it is stored: with a last dim of 2 for complex numbers that are kept as pairs."""
        return self.recipe.shape

    @property
    def logical_shape(self) -> tuple[int, ...]:
        return self.shape[:-1] if dtype_named(self.logical).pair else self.shape

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bytes

    @property
    def dtype(self) -> DType:
        """The dtype of the stored elements."""
        return self.recipe.dtype


@dataclass(frozen=True, slots=True)
class Contents:
    """Groups of tensors, the files their bytes lie in, and what is not a tensor.

    `state` has the entries of state.json, still encoded. `tp_degree` is the tensor-parallel degree
    of the run that wrote it, where that is known: some layouts of fused weights depend on it.
    """

    groups: Mapping[str, Group]
    files: tuple[StoredFile, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    tp_degree: int | None = None

    def find(self, group: str, key: str) -> StoredTensor | None:
        """A tensor by its key, or by another key of it."""
        members = self.groups.get(group)
        if members is None:
            return None
        kept = members.aliases.get(key, key)
        recipe = members.tensors.get(kept)
        if recipe is None:
            return None
        return StoredTensor(group, kept, recipe, members.logical.get(kept, recipe.dtype.name))
