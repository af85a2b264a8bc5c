"""A selection followed through the whole model: steps between branches, bytes received, placements and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.spmd.autoplan.branch_walk import AxisTerms, NeedsCommunication, choose_flow, walk
from holdfast.spmd.autoplan.partition import Partition
from holdfast.spmd.autoplan.placement_options import PlacementOption
from holdfast.spmd.autoplan.placement_plan import Pins, Places
from holdfast.spmd.autoplan.recording import Recording, Step, is_under
from holdfast.spmd.autoplan.selection import Selection
from holdfast.spmd.autoplan.units import PARTIAL, WHOLE


@dataclass(frozen=True, slots=True)
class WholeModelPlacement:
    """The placements of parameters and the pins by role, and all the bytes that a rank receives."""

    parameters: dict[str, Places]
    activations: dict[str, Pins]
    moved: float


def parameter_role(key: str, roles: Mapping[str, str]) -> str:
    """Return the role of a parameter: that of its module, and its own name."""
    module, _, name = key.rpartition(".")
    role = roles[module]
    return f"{role}.{name}" if role else name


def place_whole_model(
    recording: Recording,
    partition: Partition,
    selection: Selection,
    terms: tuple[AxisTerms, ...],
    roles: Mapping[str, str],
) -> WholeModelPlacement | None:
    """Follow every tensor through the model; return None if a step between branches would communicate."""
    parameters = _parameters(recording, selection, roles)
    options = {
        name: option for part, option in zip(selection.parts, selection.options, strict=True) for name in part.names
    }
    walks = [_ModelWalk(recording, partition, options, one, axis, parameters, roles) for axis, one in enumerate(terms)]
    try:
        axes = [one.run() for one in walks]
    except NeedsCommunication:
        return None
    moved = _moved(recording, [one.moves for one in walks], axes, terms)
    return WholeModelPlacement(parameters, _activations(recording, partition, selection, axes, roles), moved)


def _moved(
    recording: Recording,
    moves: Sequence[Sequence[tuple[int, float]]],
    axes: Sequence[Mapping[int, int]],
    terms: Sequence[AxisTerms],
) -> float:
    """Return the bytes of every move along its axis, of the shard that the other axes leave to a rank."""
    total = 0.0
    for axis, own in enumerate(moves):
        for number, units in own:
            size = units * recording.values[number].bytes * (terms[axis].ranks - 1) / terms[axis].ranks
            for other, places in enumerate(axes):
                if other != axis and places.get(number, WHOLE) >= 0:
                    size /= terms[other].ranks
            total += size
    return total


def _parameters(recording: Recording, selection: Selection, roles: Mapping[str, str]) -> dict[str, Places]:
    placements: dict[str, Places] = {}
    for part, option in zip(selection.parts, selection.options, strict=True):
        for step in part.branch.steps:
            for number in step.inputs:
                key = recording.values[number].key
                if key is not None:
                    placements[parameter_role(key, roles)] = option.places(key)
    return placements


def _activations(
    recording: Recording,
    partition: Partition,
    selection: Selection,
    axes: list[dict[int, int]],
    roles: Mapping[str, str],
) -> dict[str, Pins]:
    pins: dict[str, Pins] = {}
    for part, option in zip(selection.parts, selection.options, strict=True):
        for name, call in recording.calls.items():
            if is_under(name, part.branch.name) and call.result in partition.leaves:
                pins[roles[name]] = Pins(None, tuple(places[call.result] for places in axes))
        takes = tuple(one.takes for one in option.walks)
        pins[part.role] = Pins(takes, tuple(one.gives for one in option.walks))
    return pins


class _ModelWalk:
    """Walks through all steps along one axis."""

    def __init__(
        self,
        recording: Recording,
        partition: Partition,
        options: Mapping[str, PlacementOption],
        terms: AxisTerms,
        axis: int,
        parameters: Mapping[str, Places],
        roles: Mapping[str, str],
    ) -> None:
        self._recording, self._partition, self._options, self._terms = recording, partition, options, terms
        self._axis, self._parameters, self._roles = axis, parameters, roles
        self._places: dict[int, int] = {}
        self.moves: list[tuple[int, float]] = []

    def run(self) -> dict[int, int]:
        """Return the placement of every value."""
        within: dict[str, str | None] = {}
        done = set()
        for step in self._recording.steps:
            if step.module not in within:
                within[step.module] = next((name for name in self._options if is_under(step.module, name)), None)
            branch = within[step.module]
            if branch is None:
                self._step_between_branches(step)
            elif branch not in done:
                done.add(branch)
                self._walk_branch(branch)
        for number in self._recording.outputs:
            if self._places.get(number) == PARTIAL:
                self.moves.append((number, 2.0))
        return self._places

    def _divides(self, number: int, place: int) -> bool:
        shape = self._recording.values[number].shape
        return place < 0 or (place < len(shape) and shape[place] % self._terms.ranks == 0)

    def _step_between_branches(self, step: Step) -> None:
        values = self._recording.values
        present = tuple(self._place(number) for number in step.inputs)
        flow = choose_flow(step, present, self._divides, lambda number: not values[number].has_gradient)
        if any(place >= 0 for place in flow.inputs) and PARTIAL not in flow.outputs:
            for number, place, wanted in zip(step.inputs, present, flow.inputs, strict=True):
                if place == wanted == WHOLE and values[number].has_gradient:
                    self._summed(number)
        self._places |= dict(zip(step.outputs, flow.outputs, strict=False))

    def _place(self, number: int) -> int:
        key = self._recording.values[number].key
        if key is None:
            return self._places.setdefault(number, WHOLE)
        places = self._parameters.get(parameter_role(key, self._roles))
        return WHOLE if places is None else places[self._axis]

    def _summed(self, number: int) -> None:
        """Count the all-reduce of a value's gradient; of a parameter once for all of its uses."""
        if self._recording.values[number].key is None or all(number != other for other, _ in self.moves):
            self.moves.append((number, 2.0))

    def _walk_branch(self, name: str) -> None:
        branch = self._partition.branch(name)
        assert branch is not None
        stream = self._terms.stream if self._divides(branch.first, self._terms.stream) else WHOLE
        value = self._recording.values[branch.first]
        if value.has_gradient and (present := self._places.get(branch.first, WHOLE)) != stream:
            if present != WHOLE:
                raise NeedsCommunication
            self.moves.append((branch.first, 1.0))  # slicing is free; the gradients are gathered
        takes = self._options[name].walks[self._axis].takes
        if not value.has_gradient and self._places.get(branch.first, WHOLE) not in (WHOLE, takes):
            self.moves.append((branch.first, 1.0 if takes == WHOLE else self._terms.swap))
        used = {number for step in branch.steps for number in step.inputs}
        keys = {self._recording.values[number].key for number in used}
        own = {key: self._parameters[parameter_role(key, self._roles)][self._axis] for key in keys if key is not None}
        self._places |= {n: own[k] for n in used if (k := self._recording.values[n].key) is not None}
        done = walk(self._recording, branch, self._terms, takes, own)
        if done is None:
            raise NeedsCommunication
        summed = {number for number, _ in self.moves if self._recording.values[number].key is not None}
        self.moves += [
            move for move in done.moves if move[0] not in summed
        ]  # a tied parameter's gradient is reduced once
        within = {number for step in branch.steps for number in step.outputs}
        self._places |= {number: place for number, place in done.places.items() if number in within}
