"""Recipes of one kind of optimizer state, masters or averages that follow the boxes of their weights; scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.errors import Mismatch
from holdfast.mapping.compile.compile import Compiled
from holdfast.mapping.syntax.statement import Spec
from holdfast.plan.recipe import Recipe

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number for a whole parameter, such as a step count. All these sources must have the same value."""

    sources: tuple[str, ...]


def map_state(
    compiled: Compiled,
    states: Mapping[str, Spec],
    parameters: Mapping[str, Spec] | None = None,
    *,
    scalar: bool = False,
) -> dict[str, Recipe[str] | Scalar]:
    """Map one kind of state, given by parameter key, from the sources to the targets.

    A state with the parameter's shape uses the parameter's boxes without its casts. A scalar is copied.
    A state of any other shape follows only a parameter that is merely renamed. Targets whose sources all
    lack the state are left out. `scalar` marks the state as a scalar even if the parameter has a single
    element. Raises Mismatch if only some sources of a target have the state.
    """
    known = compiled.sources if parameters is None else parameters
    out: dict[str, Recipe[str] | Scalar] = {}
    for target, recipe in compiled.recipes.items():
        sources = recipe.sources()
        lacking = [source for source in sources if source not in states]
        if not sources or len(lacking) == len(sources):
            continue
        if lacking:
            having = next(source for source in sources if source in states)
            raise Mismatch(
                f"the state of the target {target!r} comes from {len(sources)} sources: {having!r} has it, but not "
                f"{', '.join(map(repr, lacking[:4]))}; optimize all of them or none"
            )
        out[target] = _map_one_state(target, recipe, states, known, scalar=scalar)
    return out


def _map_one_state(
    target: str, recipe: Recipe[str], states: Mapping[str, Spec], parameters: Mapping[str, Spec], *, scalar: bool
) -> Recipe[str] | Scalar:
    sources = recipe.sources()
    shapes = {source: tuple(states[source].shape) for source in sources}
    if scalar and all(math.prod(shape) == 1 for shape in shapes.values()):
        return Scalar(tuple(sources))
    if all(shapes[source] == tuple(parameters[source].shape) for source in sources):
        dtypes = {states[source].dtype.name: states[source].dtype for source in sources}
        if len(dtypes) > 1:
            raise Mismatch(f"the state of the target {target!r} would mix dtypes: {', '.join(sorted(dtypes))}")
        return recipe.uncast(next(iter(dtypes.values())))
    if all(math.prod(shape) == 1 for shape in shapes.values()):
        return Scalar(tuple(sources))
    if len(sources) == 1 and recipe.uncast(recipe.dtype).is_whole(tuple(parameters[sources[0]].shape)):
        return Recipe.whole(sources[0], shapes[sources[0]], states[sources[0]].dtype)
    shown = ", ".join(
        f"{source!r} {list(parameters[source].shape)} has {list(shapes[source])}" for source in sources[:4]
    )
    raise Mismatch(
        f"the state of the target {target!r} cannot be built: {shown}. A state whose shape differs from its "
        "parameter's (a factored state) can only follow a renamed parameter, not one joined, split or transposed"
    )
