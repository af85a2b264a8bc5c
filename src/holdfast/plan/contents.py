"""The contents of a checkpoint in any format as values (groups, tensors, entries), and the selection of keys.

Every tensor is a recipe over places in files. The same plans therefore read tensors that are
stored as they are, sharded, transposed or under another name.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.names import masters_group
from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.files import Place
from holdfast.plan.load_plan import StoredFile
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class KeySelection:
    """The selected keys: all keys, or those that match patterns.

    A pattern matches a key, "group/key", or a whole group. `used` collects the patterns that matched
    anything: a pattern that never matches is a mistake.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def selects(self, group: str, key: str, *aliases: str) -> bool:
        labels = _labels(group, (key, *aliases))
        only, ignored = (self._matches(patterns, labels) for patterns in (self.only, self.ignore))
        return not ignored and (only or not self.only)

    def selects_master(self, module: str, key: str) -> bool:
        """Return True if a master weight is selected; `only` includes it with its module."""
        labels = _labels(masters_group(module), (key,))
        only = self._matches(self.only, (*labels, *_labels(module, (key,))))
        return not self._matches(self.ignore, labels) and (only or not self.only)

    def _matches(self, patterns: tuple[str, ...], labels: tuple[str, ...]) -> bool:
        matching = {pattern for pattern in patterns for label in labels if fnmatch.fnmatchcase(label, pattern)}
        self.used.update(matching)
        return bool(matching)

    def selects_entry(self, name: str) -> bool:
        """Return True if the non-tensor value `name` is selected; patterns match its name."""
        return self.selects(name, name)


def _labels(group: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return everything that a pattern may match for a tensor with these keys."""
    return (*keys, *(f"{group}/{key}" for key in keys), group)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one kind ("module", "optimizer", "masters", "tensors" ...) by key.

    `aliases` are other keys of the same tensors. `logical` has the dtypes that the files cannot express.
    """

    kind: str
    tensors: Mapping[str, Recipe[Place]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    logical: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its group and key, the recipe of its elements, and its logical dtype."""

    group: str
    key: str
    recipe: Recipe[Place]
    logical: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape: complex numbers stored as pairs have an extra last dim of 2."""
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
    """Groups of tensors, the files that store them, and the values that are not tensors.

    `state` has the entries of state.json, still encoded. `tp_degree` is the tensor-parallel degree
    of the run that wrote the checkpoint, if known: some layouts of fused weights depend on it.
    """

    groups: Mapping[str, Group]
    files: tuple[StoredFile, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    tp_degree: int | None = None

    def find(self, group: str, key: str) -> StoredTensor | None:
        """Return the tensor with this key or alias, or None."""
        members = self.groups.get(group)
        if members is None:
            return None
        kept = members.aliases.get(key, key)
        recipe = members.tensors.get(kept)
        if recipe is None:
            return None
        return StoredTensor(group, kept, recipe, members.logical.get(kept, recipe.dtype.name))
