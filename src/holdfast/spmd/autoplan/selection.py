"""Select an option for each branch: the least cost within the memory of a rank, shared parameters alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.spmd.autoplan.partition import PlannedBranch
from holdfast.spmd.autoplan.placement_options import PlacementOption


@dataclass(frozen=True, slots=True)
class Selection:
    """An option for each planned branch."""

    parts: tuple[PlannedBranch, ...]
    options: tuple[PlacementOption, ...]

    @property
    def score(self) -> float:
        return sum(part.times * option.score for part, option in zip(self.parts, self.options, strict=True))

    @property
    def moved(self) -> float:
        return sum(part.times * option.moved for part, option in zip(self.parts, self.options, strict=True))

    @property
    def held(self) -> float:
        return sum(part.times * option.held for part, option in zip(self.parts, self.options, strict=True))

    @property
    def kept(self) -> float:
        return sum(part.times * option.kept for part, option in zip(self.parts, self.options, strict=True))


@dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that a rank may hold: of parameters and gradients, and of these with the results kept for backward."""

    held: float
    memory: float

    def excess(self, held: float, kept: float) -> float:
        return max(0.0, held - self.held, held + kept - self.memory)


def select(parts: Sequence[PlannedBranch], limit: Limit) -> Selection:
    """Return the best selection; the one nearest to the limit if none fits."""
    selections = [_within(parts, options, limit) for options in _tied(parts)]
    return min(selections, key=lambda selection: (limit.excess(selection.held, selection.kept), selection.score))


def _within(parts: Sequence[PlannedBranch], options: Sequence[Sequence[PlacementOption]], limit: Limit) -> Selection:
    """From the cheapest options, make the cheapest changes per byte freed, until the limit is met."""
    chosen = [min(some, key=lambda option: (option.score, option.memory)) for some in options]
    selection = Selection(tuple(parts), tuple(chosen))
    while limit.excess(selection.held, selection.kept):
        best: tuple[float, int, PlacementOption] | None = None
        for place, some in enumerate(options):
            present = chosen[place]
            for option in some:
                freed = min(present.held - option.held, present.memory - option.memory)
                if freed <= 0:
                    continue
                price = (option.score - present.score) / freed
                if best is None or price < best[0]:
                    best = (price, place, option)
        if best is None:
            return selection
        chosen[best[1]] = best[2]
        selection = Selection(tuple(parts), tuple(chosen))
    return selection


def _tied(parts: Sequence[PlannedBranch]) -> Iterator[list[list[PlacementOption]]]:
    """Yield the options of every branch for each placement of the parameters that several branches share."""
    users: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        for key in part.options[0].walks[0].parameters:
            users.setdefault(key, []).append(place)
    shared = [key for key, places in users.items() if len(places) > 1]
    placements = [{option.places(key) for option in parts[users[key][0]].options} for key in shared]
    for chosen in itertools.product(*(sorted(some) for some in placements)):
        wanted = dict(zip(shared, chosen, strict=True))
        options = [
            [o for o in part.options if all(o.places(key) == wanted[key] for key in wanted if place in users[key])]
            for place, part in enumerate(parts)
        ]
        if all(options):
            yield options
