"""The options of a branch: every placement of its parameters over the axes of a mesh, with cost and memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.spmd.autoplan.branch_walk import AxisTerms, Branch, UnplacedParameter, Walk, walk
from holdfast.spmd.autoplan.recording import VIEWS, Recording
from holdfast.spmd.autoplan.units import WHOLE

MOST_MATRICES = 6  # of one branch, whose placements are tried in combination
MOST_PER_AXIS = 48  # walks of one axis that are combined with those of the others


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement of a branch: a walk for each axis, and what a rank moves, computes, holds and keeps."""

    walks: tuple[Walk, ...]
    moved: float  # bytes received
    flops: float
    held: float  # bytes of parameters and their gradients
    kept: float  # bytes of results that backward may need
    score: float

    @property
    def memory(self) -> float:
        return self.held + self.kept

    def places(self, key: str) -> tuple[int, ...]:
        return tuple(one.parameters.get(key, WHOLE) for one in self.walks)


class Explorer:
    """Finds the options of branches under given terms, and caches them."""

    def __init__(self, recording: Recording, biases: Mapping[str, str], flops_per_byte: float) -> None:
        self.recording = recording
        self._biases = biases  # by the weight with the same rows
        self._flops_per_byte = flops_per_byte
        uses = {(number, step.module) for step in recording.steps for number in step.inputs}
        self._users = Counter(number for number, _ in uses)  # a tied parameter counts once for all modules that use it
        self._known: dict[tuple[str, tuple[AxisTerms, ...]], list[PlacementOption]] = {}
        self._walks: dict[tuple[str, AxisTerms], list[Walk]] = {}

    def matrices(self, branch: Branch) -> list[int]:
        """Return the parameters, by value number, that may be sharded."""
        values = self.recording.values
        used = dict.fromkeys(number for step in branch.steps for number in step.inputs)
        return [number for number in used if values[number].key is not None and len(values[number].shape) > 1]

    def options(self, branch: Branch, terms: tuple[AxisTerms, ...]) -> list[PlacementOption]:
        """Return the best option for each placement of the parameters, cheapest first."""
        known = self._known.get((branch.name, terms))
        if known is None:
            known = self._known[branch.name, terms] = self._explore(branch, terms)
        return known

    def _explore(self, branch: Branch, terms: tuple[AxisTerms, ...]) -> list[PlacementOption]:
        if len(self.matrices(branch)) > MOST_MATRICES:
            return []
        axes = [self._along(branch, one) for one in terms]
        if len(axes) > 1:
            axes = [sorted(walks, key=self._bytes)[:MOST_PER_AXIS] for walks in axes]
        options = [self._option(branch, terms, walks) for walks in itertools.product(*axes) if not self._doubled(walks)]
        return _best_per_placement(options)

    def _bytes(self, one: Walk) -> float:
        return sum(units * self.recording.values[number].bytes for number, units in one.moves)

    def _doubled(self, walks: Sequence[Walk]) -> bool:
        """Return True if two axes shard the same dim of a parameter."""
        for key in walks[0].parameters:
            dims = [one.parameters[key] for one in walks if one.parameters[key] >= 0]
            if len(dims) != len(set(dims)):
                return True
        return False

    def _along(self, branch: Branch, terms: AxisTerms) -> list[Walk]:
        if (branch.name, terms) not in self._walks:
            shape = self.recording.values[branch.first].shape
            fits = 0 <= terms.stream < len(shape) and shape[terms.stream] % terms.ranks == 0
            inputs = (terms.stream, WHOLE) if fits else (WHOLE,)
            walks = [one for takes in inputs for one in self._from(branch, terms, takes, {})]
            self._walks[branch.name, terms] = walks
        return self._walks[branch.name, terms]

    def _from(self, branch: Branch, terms: AxisTerms, takes: int, parameters: dict[str, int]) -> Iterator[Walk]:
        """Yield every walk that starts with these placements; a walk that fails early is not continued."""
        try:
            one = walk(self.recording, branch, terms, takes, parameters)
        except UnplacedParameter as at:
            shape = next(value.shape for value in self.recording.values if value.key == at.key)
            for place in (WHOLE, *_dims(shape, terms.ranks)):
                places = {**parameters, at.key: place}
                if at.key in self._biases:
                    places[self._biases[at.key]] = 0 if place == 0 else WHOLE
                yield from self._from(branch, terms, takes, places)
        else:
            if one is not None:
                yield one

    def _option(self, branch: Branch, terms: tuple[AxisTerms, ...], walks: tuple[Walk, ...]) -> PlacementOption:
        values = self.recording.values
        ranks = [one.ranks for one in terms]
        places = [dict(one.places) | self._of_parameters(branch, one) for one in walks]

        def part(number: int, but: int = -1) -> float:
            size = float(values[number].bytes)
            for axis, own in enumerate(places):
                if axis != but and own.get(number, WHOLE) >= 0:
                    size /= ranks[axis]
            return size

        moved = sum(
            units * part(number, axis) * (ranks[axis] - 1) / ranks[axis]
            for axis, one in enumerate(walks)
            for number, units in one.moves
        )
        flops = 0.0
        for place, step in enumerate(branch.steps):
            shared = [ranks[axis] for axis, one in enumerate(walks) if one.divided[place]]
            flops += step.flops / _product(shared)
        uses = {(n, step.module) for step in branch.steps for n in step.inputs if values[n].key is not None}
        held = 2 * sum(part(number) / self._users[number] for number, _ in uses)
        kept = sum(part(number) for step in branch.steps if step.name not in VIEWS for number in step.outputs)
        return PlacementOption(walks, moved, flops, held, kept, moved + flops / self._flops_per_byte)

    def _of_parameters(self, branch: Branch, one: Walk) -> dict[int, int]:
        values = self.recording.values
        used = {number for step in branch.steps for number in step.inputs}
        return {n: one.parameters.get(str(values[n].key), WHOLE) for n in used if values[n].key is not None}


def _product(numbers: Sequence[int]) -> int:
    out = 1
    for number in numbers:
        out *= number
    return out


def _dims(shape: tuple[int, ...], ranks: int) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size >= ranks and size % ranks == 0]


def _best_per_placement(options: Sequence[PlacementOption]) -> list[PlacementOption]:
    """Return the best option for each placement of the parameters, cheapest first."""
    best: dict[tuple[tuple[tuple[str, int], ...], ...], PlacementOption] = {}
    for option in options:
        name = tuple(tuple(sorted(one.parameters.items())) for one in option.walks)
        other = best.get(name)
        if other is None or (option.score, option.memory) < (other.score, other.memory):
            best[name] = option
    return sorted(best.values(), key=lambda option: (option.score, option.memory))
