"""Weights stored as uint16: reinterpreted as bfloat16 by the model's config or the user, otherwise rejected.

Paddle's own files are known to store such bits. Otherwise the model's config or the user decides. Without
either, a conversion would produce a model of integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import limits
from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.format import strictjson
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import Folder, Foreign, ReaderResult, with_contents

_CONFIG = "config.json"
_UINT16, _BFLOAT16 = "uint16", "bfloat16"
_KINDS = ("module", "masters")


def raw_weights(contents: Contents) -> list[str]:
    """Return the keys of weights that are stored as uint16, as "group: key"."""
    return [
        f"{name}: {key}"
        for name, group in contents.groups.items()
        if group.kind in _KINDS
        for key, recipe in group.tensors.items()
        if recipe.dtype.name == _UINT16
    ]


def apply_config_dtype(folder: Folder, result: ReaderResult) -> ReaderResult:
    """Return a reader's result with uint16 weights as bfloat16 if the folder's config gives that dtype."""
    raw = raw_weights(result.contents)
    if not raw or folder.only is not None or _CONFIG not in folder.files:
        return result
    try:
        config = strictjson.loads(folder.read(_CONFIG, limits.JSON_BYTES), f"{folder.path}/{_CONFIG}")
    except HoldfastError:
        return result
    if not isinstance(config, dict) or not _says_bfloat16(config) or _has_bfloat16(result.contents):
        return result
    note = f"{folder.path}: {len(raw)} weights are stored as uint16 and read as bfloat16, as config.json says"
    return replace(result, contents=_reinterpreted(result.contents), notes=(*result.notes, note))


def as_bfloat16(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its uint16 weights read as the bits of bfloat16."""
    if not raw_weights(checkpoint.contents):
        return checkpoint
    return with_contents(checkpoint, _reinterpreted(checkpoint.contents), {})


def reject_unknown_uint16(checkpoint: Checkpoint) -> None:
    """Raise Unsupported for a foreign checkpoint with uint16 weights whose meaning is unknown."""
    raw = raw_weights(checkpoint.contents) if isinstance(checkpoint, Foreign) else []
    if raw:
        raise Unsupported(
            f"{checkpoint.path}: {len(raw)} weights are stored as uint16, such as {raw[0]}, and nothing says "
            "whether they are the bits of bfloat16 (as Paddle and numpy store it) or integers: pass "
            "--uint16 bfloat16 or --uint16 uint16"
        )


def _says_bfloat16(config: Mapping[str, Any]) -> bool:
    inner = [value for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)]
    return any(fields.get(name) == _BFLOAT16 for fields in (config, *inner) for name in ("dtype", "torch_dtype"))


def _has_bfloat16(contents: Contents) -> bool:
    groups = (group for group in contents.groups.values() if group.kind in _KINDS)
    return any(recipe.dtype.name == _BFLOAT16 for group in groups for recipe in group.tensors.values())


def _reinterpreted(contents: Contents) -> Contents:
    """Return contents whose uint16 weights are bfloat16; the bytes in the files do not change."""
    bfloat16 = dtype_named(_BFLOAT16)
    changed: dict[Place, Place] = {}

    def recipe_of(recipe: Recipe[Place]) -> Recipe[Place]:
        if recipe.dtype.name != _UINT16:
            return recipe
        for place in recipe.sources():
            changed.setdefault(place, replace(place, spec=replace(place.spec, dtype=bfloat16)))
        terms = tuple(replace(term, source=changed[term.source]) for term in recipe.terms)
        return Recipe(recipe.shape, bfloat16, terms)

    def group_of(group: Group) -> Group:
        if group.kind not in _KINDS:
            return group
        return replace(group, tensors={key: recipe_of(recipe) for key, recipe in group.tensors.items()})

    groups = {name: group_of(group) for name, group in contents.groups.items()}
    files = tuple(
        replace(file, places=tuple(changed.get(place, place) for place in file.places)) for file in contents.files
    )
    return replace(contents, groups=groups, files=files)
