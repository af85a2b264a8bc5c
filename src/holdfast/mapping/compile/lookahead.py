"""Foresight: the shape that a name will need to have and the targets it goes into, from later statements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from holdfast.mapping.expand.expansion import Expansion, Step
from holdfast.mapping.expand.shapes import stack_dim
from holdfast.mapping.syntax.statement import Spec, Statement

Shape = tuple[int, ...]
_FURTHEST = 50  # statements in a row


class Foresight:
    """Answers for splits whose sizes are those of the targets, and for fused temporaries. Built when first asked."""

    def __init__(self, expansions: Sequence[Expansion], targets: Mapping[str, Spec | None]) -> None:
        self._expansions = expansions
        self._targets = targets
        self._uses: dict[str, list[tuple[int, Step]]] | None = None
        self._makes: dict[str, list[int]] = {}

    def shape(self, number: int, name: str, far: int = _FURTHEST) -> Shape | None:
        """The shape of the name that statement `number` makes; None if it cannot be known."""
        uses, replaced = self._uses_of(number, name)
        spec = self._targets.get(name)
        if not replaced and spec is not None:
            return tuple(spec.shape)
        for at, step in uses if far > 0 else ():
            found = self._through(at, step, far - 1)
            if found is not None:
                return found
        return None

    def goals(self, number: int, name: str, far: int = _FURTHEST) -> set[str]:
        """The last names that what statement `number` makes goes into: itself, if nothing uses it."""
        uses, replaced = self._uses_of(number, name)
        found = {name} if not uses or (name in self._targets and not replaced) else set()
        for at, step in uses if far > 0 else ():
            for right in step.rights:
                found |= self.goals(at, right, far - 1)
        return found

    def _uses_of(self, number: int, name: str) -> tuple[list[tuple[int, Step]], bool]:
        """The steps that use what statement `number` made, and whether the name is made again after them."""
        uses = self._index().get(name, [])
        first = bisect_right(uses, number, key=_number)
        makes = self._makes.get(name, [])
        next_make = bisect_right(makes, number)
        if next_make == len(makes):
            return uses[first:], False
        return uses[first : bisect_right(uses, makes[next_make], key=_number)], True

    def _index(self) -> dict[str, list[tuple[int, Step]]]:
        if self._uses is None:
            self._uses = {}
            for number, expansion in enumerate(self._expansions):
                for step in expansion.steps:
                    for name in step.lefts:
                        self._uses.setdefault(name, []).append((number, step))
                    for name in step.rights:
                        self._makes.setdefault(name, []).append(number)
        return self._uses

    def _through(self, number: int, step: Step, far: int) -> Shape | None:
        """The shape of a step's only source, from the shapes of its results."""
        statement = self._expansions[number].statement
        unknown = (
            statement.options.fused == "fused_qkv_old" or statement.stacks or statement.options.reshape is not None
        )
        if len(step.lefts) != 1 or not step.rights or unknown:
            return None
        whole = self.whole(number, step, far)
        return None if whole is None else _unturned(statement, step, whole)

    def whole(self, number: int, step: Step, far: int = _FURTHEST) -> Shape | None:
        """The shape of what a step of statement `number` cuts its results from; None if it cannot be known."""
        shapes = []
        for name, turned in zip(step.rights, step.right_turned, strict=True):
            shape = self.shape(number, name, far)
            if shape is None:
                return None
            shapes.append(shape[::-1] if turned else shape)
        return _whole(self._expansions[number].statement, shapes)


def _number(use: tuple[int, Step]) -> int:
    return use[0]


def _whole(statement: Statement, shapes: Sequence[Shape]) -> Shape | None:
    if statement.unstacks:
        dim = stack_dim(statement, len(shapes[0]) + 1)
        return None if dim is None else (*shapes[0][:dim], len(shapes), *shapes[0][dim:])
    if len(shapes) == 1:
        return shapes[0]
    axis = statement.options.axis if statement.options.axis is not None else 1
    rank = len(shapes[0])
    if not -rank <= axis < rank or any(len(shape) != rank for shape in shapes):
        return None
    dim = axis % rank
    return tuple(sum(shape[d] for shape in shapes) if d == dim else shapes[0][d] for d in range(rank))


def _unturned(statement: Statement, step: Step, shape: Shape) -> Shape | None:
    order = statement.options.permute
    if order is not None:
        if order and len(order) != len(shape):
            return None
        order = order or tuple(range(len(shape) - 1, -1, -1))
        before = [0] * len(shape)
        for dim, source in enumerate(order):
            before[source] = shape[dim]
        shape = tuple(before)
    return shape[::-1] if step.left_turned[0] else shape
