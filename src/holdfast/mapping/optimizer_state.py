"""State that follows its parameter: moments, masters and averages take the boxes that the weights take."""

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
    """One number for a whole parameter, such as a step count: all of these sources must have the same."""

    sources: tuple[str, ...]


def follow(
    compiled: Compiled,
    states: Mapping[str, Spec],
    parameters: Mapping[str, Spec] | None = None,
    *,
    scalar: bool = False,
) -> dict[str, Recipe[str] | Scalar]:
    """How one state of the sources, by parameter key, makes up that of the targets.

    A state with the parameter's shape takes the parameter's boxes, without its casts; one number
    follows unchanged; any other shape follows where the parameter is only renamed. Targets none of
    whose sources have the state are left out. `scalar` says that the state is one number also where
    the parameter has one element. Raises Mismatch if some have it and others not.
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
                f"{', '.join(map(repr, lacking[:4]))}; optimize all of them, or none"
            )
        out[target] = _followed(target, recipe, states, known, scalar=scalar)
    return out


def _followed(
    target: str, recipe: Recipe[str], states: Mapping[str, Spec], parameters: Mapping[str, Spec], *, scalar: bool
) -> Recipe[str] | Scalar:
    sources = recipe.sources()
    shapes = {source: tuple(states[source].shape) for source in sources}
    if scalar and all(math.prod(shape) == 1 for shape in shapes.values()):
        return Scalar(tuple(sources))
    if all(shapes[source] == tuple(parameters[source].shape) for source in sources):
        dtypes = {states[source].dtype.name: states[source].dtype for source in sources}
        if len(dtypes) > 1:
            raise Mismatch(
                f"the state of the target {target!r} would be of several dtypes: {', '.join(sorted(dtypes))}"
            )
        return recipe.uncast(next(iter(dtypes.values())))
    if all(math.prod(shape) == 1 for shape in shapes.values()):
        return Scalar(tuple(sources))
    if len(sources) == 1 and recipe.uncast(recipe.dtype).is_whole(tuple(parameters[sources[0]].shape)):
        return Recipe.whole(sources[0], shapes[sources[0]], states[sources[0]].dtype)
    shown = ", ".join(
        f"{source!r} {list(parameters[source].shape)} has {list(shapes[source])}" for source in sources[:4]
    )
    raise Mismatch(
        f"the state of the target {target!r} cannot be made: {shown}. A state of another shape than its "
        "parameter's (a factored one) follows only where the parameter is renamed, not joined, cut or turned"
    )
