"""Read Paddle's unified checkpoint: model, masters and optimizer in safetensors, states transposed to match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.core.names import MANIFEST
from holdfast.format import strictjson
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, RawArray
from holdfast.plan.recipe import Recipe, cast_raw
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.paddle.optimizer_names import is_moment, is_paddle_state
from holdfast.sources.paddle.transposed_states import Order, transposed_orders
from holdfast.sources.paddle.unified_files import (
    ADAPTER,
    MASTERS,
    MODEL,
    OPTIMIZER,
    GroupFiles,
    group_files,
    places_by_key,
    saved_for_torch,
    stem_of,
    true_places,
)
from holdfast.sources.trees.stored_blocks import stored_files

FORMAT = "paddle unified checkpoint"
_CONFIG, _TRAINER = "config.json", "trainer_state.json"
_CORNER = 16
_KINDS = {MODEL: "module", ADAPTER: "module", MASTERS: "masters", OPTIMIZER: "optimizer"}


def read_unified(folder: Folder) -> ReaderResult | None:
    """Return the contents of a unified checkpoint; None for a folder that Paddle did not write."""
    if folder.only is not None or MANIFEST in folder.files or not _may_be_unified(folder):
        return None
    found = {stem: files for stem in _KINDS if (files := group_files(folder, stem)) is not None}
    places = {
        stem: places_by_key(
            (place for name in files.names for place in true_places(folder, name)),
            files.index,
            f"{folder.path}: {stem}",
        )
        for stem, files in found.items()
    }
    if OPTIMIZER in places and not any(map(is_paddle_state, places[OPTIMIZER])):
        return None  # another tool's folder with the same file names
    groups = _groups(folder, found, places)
    contents = Contents(groups, stored_files(groups.values(), folder.path), step=_step(folder))
    return ReaderResult(FORMAT, contents, linear_weights=_linear_weights(folder, found))


def _linear_weights(folder: Folder, found: Mapping[str, GroupFiles]) -> str | None:
    """Return the layout of the model's linear weights, if its files give it."""
    names = next((found[stem].names for stem in (MODEL, ADAPTER) if stem in found), ())
    return "out-in" if names and all(saved_for_torch(folder, name) for name in names) else None


def _may_be_unified(folder: Folder) -> bool:
    stems = {stem_of(name) for name in folder.files}
    if OPTIMIZER in stems or ADAPTER in stems:
        return True
    if not stems & {MODEL, MASTERS} or _CONFIG not in folder.files:
        return False
    config = _fields(folder, _CONFIG)
    return any(f"{package}_version" in config for package in ("paddleformers", "paddlenlp"))


def _fields(folder: Folder, name: str) -> Mapping[str, Any]:
    fields = strictjson.loads(folder.read(name, limits.JSON_BYTES), f"{folder.path}/{name}")
    return fields if isinstance(fields, dict) else {}


def _step(folder: Folder) -> int | None:
    """Return the step recorded by the trainer, if any."""
    step = _fields(folder, _TRAINER).get("global_step") if _TRAINER in folder.files else None
    return step if type(step) is int and 0 <= step < 2**63 else None


def _groups(
    folder: Folder, found: Mapping[str, GroupFiles], places: Mapping[str, Mapping[str, Place]]
) -> dict[str, Group]:
    recipes = {stem: {key: _whole(place) for key, place in of_group.items()} for stem, of_group in places.items()}
    if MODEL not in recipes and ADAPTER in recipes:
        recipes = {MODEL if stem == ADAPTER else stem: of_group for stem, of_group in recipes.items()}
    elif MODEL not in recipes and MASTERS in recipes:  # the run was configured not to save the model
        recipes[MODEL] = recipes[MASTERS]
    if MASTERS not in recipes and MODEL in recipes and _are_masters(folder, found, recipes[MODEL]):
        recipes[MASTERS] = recipes[MODEL]  # the masters were written under the model's names
    parameters = recipes.get(MODEL, {})
    orders = _orders(folder, parameters, recipes.get(MASTERS, {}), recipes.get(OPTIMIZER, {}))
    if recipes.get(MASTERS) is not parameters:
        recipes[MASTERS] = {key: _permuted(recipe, orders.get(key)) for key, recipe in recipes.get(MASTERS, {}).items()}
    recipes[OPTIMIZER] = {
        key: _permuted(recipe, orders.get(key.rpartition("/")[0])) for key, recipe in recipes.get(OPTIMIZER, {}).items()
    }
    _check_shapes(parameters, recipes[OPTIMIZER])
    return {stem: Group(_KINDS[stem], recipes[stem]) for stem in _KINDS if recipes.get(stem)}


def _are_masters(folder: Folder, found: Mapping[str, GroupFiles], model: Mapping[str, Recipe[Place]]) -> bool:
    """Return True if the tensors stored as the model are the master weights of a lower-precision model."""
    if OPTIMIZER not in found or found[OPTIMIZER].index.get("master_weights") is not True:
        return False
    config = _fields(folder, _CONFIG) if _CONFIG in folder.files else {}
    narrow = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
    return narrow and all(recipe.dtype.name == "float32" for recipe in model.values())


def _check_shapes(parameters: Mapping[str, Recipe[Place]], states: Mapping[str, Recipe[Place]]) -> None:
    """Check every state's shape: the layout was derived from one state per parameter, and the others must fit."""
    for key, recipe in states.items():
        owner = parameters.get(key.rpartition("/")[0])
        if owner is not None and is_moment(key) and recipe.shape != owner.shape:
            raise Damaged(f"{key} has the shape {list(recipe.shape)}, its parameter has {list(owner.shape)}")


def _whole(place: Place) -> Recipe[Place]:
    return Recipe.whole(place, place.spec.shape, place.spec.dtype)


def _permuted(recipe: Recipe[Place], order: Order | None) -> Recipe[Place]:
    return recipe.permuted(order) if order is not None and len(order) == len(recipe.shape) else recipe


def _orders(
    folder: Folder,
    parameters: Mapping[str, Recipe[Place]],
    masters: Mapping[str, Recipe[Place]],
    states: Mapping[str, Recipe[Place]],
) -> dict[str, Order]:
    """Return the order of dims that aligns states with their parameters in the model's files."""
    shapes = {} if masters is parameters else {key: recipe.shape for key, recipe in masters.items()}
    for key, recipe in states.items():
        owner, _, _ = key.rpartition("/")
        if owner in parameters and is_moment(key):
            shapes.setdefault(owner, recipe.shape)

    def by_value(key: str) -> bool | None:
        separate = key in masters and masters is not parameters
        return _transposed_by_value(folder, parameters[key], masters[key]) if separate else None

    def by_default() -> bool:
        return any(saved_for_torch(folder, name) for name in {p.file for r in parameters.values() for p in r.sources()})

    return transposed_orders({key: recipe.shape for key, recipe in parameters.items()}, shapes, by_value, by_default)


def _transposed_by_value(folder: Folder, parameter: Recipe[Place], master: Recipe[Place]) -> bool | None:
    """Return True if a square master weight, rounded, is its parameter transposed; None if a corner cannot tell."""
    (of_parameter,), (of_master,) = parameter.sources(), master.sources()
    stored = _corner(folder, of_parameter)
    rounded = cast_raw(_corner(folder, of_master), master.dtype, (parameter.dtype,))
    straight, transposed = np.array_equal(stored, rounded), np.array_equal(stored, rounded.T)
    return None if straight == transposed else transposed


def _corner(folder: Folder, place: Place) -> RawArray:
    """Return the first rows and columns of a matrix as raw elements."""
    rows, columns = (min(size, _CORNER) for size in place.spec.shape)
    item = place.spec.dtype.bytes
    corner = np.empty((rows, columns), dtype=f"u{item}")
    reader = folder.open(place.file)
    try:
        for row in range(rows):
            at = place.begin + row * place.spec.shape[1] * item
            reader.read_into(at, [memoryview(corner[row].view(np.uint8))])
    finally:
        reader.close()
    return corner
