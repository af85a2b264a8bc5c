"""Contents: what a checkpoint holds, as values, whatever format it is stored in.

Every tensor is a recipe over places in files, so that a tensor which is cut into pieces, turned
or kept under another name is read by the same plans as one that lies there as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
