"""A walk through a branch along one mesh axis: placements of its tensors forward and backward, moves at its pins.

Nothing communicates inside of a branch: placements that would are not an option. Communication happens at pins: the
input of the branch, the result of a leaf that is a partial sum, the result of the branch; and for the gradients of
values that every rank has whole but used for shards of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.spmd.autoplan.op_flows import OpFlow
from holdfast.spmd.autoplan.recording import PASSING, Recording, Step
from holdfast.spmd.autoplan.units import PARTIAL, WHOLE


@dataclass(frozen=True, slots=True)
class Branch:
    """A module that is planned by itself: its steps, the results of its leaves, its input and its result."""

    name: str
    steps: tuple[Step, ...]
    leaves: frozenset[int]  # results of modules that have parameters
    first: int
    result: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class AxisTerms:
    """One axis: its ranks, the sharded dim of the stream between branches, and the cost of a shard-to-shard move."""

    ranks: int
    stream: int
    swap: float  # relative to the full tensor, received by each rank: an all-to-all, or a gather in its place


@dataclass(slots=True)
class Walk:
    """The result of a walk: placements by value, redistributions with their cost, and sharded steps."""

    takes: int
    parameters: dict[str, int]
    places: dict[int, int] = field(default_factory=dict)
    moves: list[tuple[int, float]] = field(default_factory=list)
    divided: list[bool] = field(default_factory=list)
    gives: int = WHOLE


class NeedsCommunication(Exception):
    """The branch cannot run with these placements without communication inside."""


class UnplacedParameter(Exception):
    """The walk reached a matrix without a placement."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def walk(
    recording: Recording, branch: Branch, terms: AxisTerms, takes: int, parameters: Mapping[str, int]
) -> Walk | None:
    """Walk through a branch along one axis; return None if the branch would communicate inside.

    Raises UnplacedParameter at the first matrix that `parameters` do not name.
    """
    done = Walk(takes, dict(parameters))
    try:
        _Walker(recording, branch, terms, done).run()
    except NeedsCommunication:
        return None
    return done


class _Walker:
    def __init__(self, recording: Recording, branch: Branch, terms: AxisTerms, done: Walk) -> None:
        self._recording, self._branch, self._terms, self._done = recording, branch, terms, done
        self._values = recording.values
        self._partial: set[int] = set()  # whole values with partial gradients
        self._within = {number for step in branch.steps for number in step.outputs}

    def run(self) -> None:
        for step in self._branch.steps:
            self._forward_step(step)
        self._forward_result()
        for step, divided in zip(reversed(self._branch.steps), reversed(self._done.divided), strict=True):
            self._backward_step(step, divided)
        self._backward_input()
        for number in sorted(self._partial - self._within - {self._branch.first}):
            self._done.moves.append((number, 2.0))  # parameters, and other values from outside

    def _place(self, number: int) -> int:
        value, places = self._values[number], self._done.places
        if value.key is not None:
            if len(value.shape) > 1 and value.key not in self._done.parameters:
                raise UnplacedParameter(value.key)
            return self._done.parameters.get(value.key, WHOLE)
        if number not in places:
            if number == self._branch.first:
                places[number] = self._done.takes
            else:  # other inputs with gradients are placed as the stream is
                places[number] = self._fitting(number) if value.has_gradient else WHOLE
        return places[number]

    def _fitting(self, number: int) -> int:
        """Return the stream's placement if this value has such a dim, else WHOLE."""
        return self._terms.stream if self._divides(number, self._terms.stream) else WHOLE

    def _divides(self, number: int, place: int) -> bool:
        shape = self._values[number].shape
        return place < 0 or (place < len(shape) and shape[place] % self._terms.ranks == 0 and shape[place] > 0)

    def _forward_step(self, step: Step) -> None:
        present = tuple(self._place(number) for number in step.inputs)
        if step.ways:
            self._forward_unit(step, present)
            return
        flow = choose_flow(step, present, self._divides, self._can_slice)
        divided = any(place >= 0 for place in flow.inputs)
        sums = divided and PARTIAL not in flow.outputs  # else the incoming gradient is whole on every rank
        for number, place, wanted in zip(step.inputs, present, flow.inputs, strict=True):
            if sums and place == wanted == WHOLE and self._values[number].has_gradient:
                self._partial.add(number)
        self._place_outputs(step, flow.outputs, divided)

    def _can_slice(self, number: int) -> bool:
        return not self._values[number].has_gradient

    def _forward_unit(self, step: Step, present: tuple[int, ...]) -> None:
        weights, inputs = present[: step.weights], present[step.weights :]
        for way in step.ways:
            fits = all(
                place == wanted or (place == WHOLE and self._can_slice(number))
                for number, place, wanted in zip(step.inputs[step.weights :], inputs, way.inputs, strict=True)
            )
            dims = zip(step.inputs, (*way.parameters.values(), *way.inputs), strict=True)
            if fits and weights == tuple(way.parameters.values()) and all(self._divides(*dim) for dim in dims):
                break
        else:
            raise NeedsCommunication
        divided = any(place >= 0 for place in (*weights, *way.inputs))
        for number, place in zip(step.inputs, present, strict=True):
            if divided and place == WHOLE and self._values[number].has_gradient:
                self._partial.add(number)
        if way.exchanged:
            self._done.moves.append((step.inputs[step.weights], way.exchanged / self._terms.ranks))
        self._place_outputs(step, (way.output,) * len(step.outputs), divided)

    def _place_outputs(self, step: Step, places: Sequence[int], divided: bool) -> None:
        self._done.divided.append(divided)
        for number, place in zip(step.outputs, places, strict=False):
            is_pinned = place == PARTIAL and number in self._branch.leaves
            if is_pinned:
                self._done.moves.append(
                    (number, 2.0)
                )  # an all-reduce; or a reduce-scatter, and an all-gather of the gradients
            self._done.places[number] = self._fitting(number) if is_pinned else place

    def _forward_result(self) -> None:
        number = self._branch.result
        place = self._done.gives = self._done.places.get(number, self._place(number))
        wanted = self._fitting(number)
        if self._branch.is_last and place != PARTIAL:
            return
        if place == PARTIAL:
            self._done.moves.append((number, 2.0))
        elif place != wanted:
            self._done.moves.append((number, 2 * self._terms.swap if min(place, wanted) >= 0 else 1.0))
        self._done.places[number] = self._done.gives = wanted

    def _backward_step(self, step: Step, divided: bool) -> None:
        """Walk backward: partial gradients pass through linear steps, and are summed elsewhere."""
        for number in step.outputs:
            if number not in self._partial:
                continue
            if step.name in PASSING and not divided and number not in self._branch.leaves:
                self._partial |= {n for n in step.inputs if self._values[n].has_gradient and self._place(n) == WHOLE}
            else:
                self._done.moves.append((number, 2.0))

    def _backward_input(self) -> None:
        number = self._branch.first
        if not self._values[number].has_gradient:
            return
        moves_both_ways = number in self._partial
        if moves_both_ways or self._fitting(number) != self._done.takes:
            self._done.moves.append((number, 2.0 if moves_both_ways else 1.0))


def choose_flow(
    step: Step,
    present: tuple[int, ...],
    divides: Callable[[int, int], bool],
    can_slice: Callable[[int], bool],
) -> OpFlow:
    """Return the flow of a step whose inputs have these placements; raises NeedsCommunication if no flow fits."""
    if PARTIAL in present:
        if step.name not in PASSING or any(place != PARTIAL for place in present):
            raise NeedsCommunication
        return OpFlow(present, (PARTIAL,) * len(step.outputs))
    if all(place == WHOLE for place in present):
        return OpFlow(present, (WHOLE,) * len(step.outputs))
    for flow in step.flows:
        fits = all(
            place == wanted or (place == WHOLE and can_slice(number))
            for number, place, wanted in zip(step.inputs, present, flow.inputs, strict=True)
        )
        values, places = (*step.inputs, *step.outputs), (*flow.inputs, *flow.outputs)
        if fits and all(divides(*dim) for dim in zip(values, places, strict=False)):
            return flow
    raise NeedsCommunication
