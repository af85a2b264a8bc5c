"""Look ahead in a program: the shape that a later use gives a name, and the final targets built from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from holdfast.mapping.expand.expansion import ExpandedStep, Expansion
from holdfast.mapping.expand.shapes import stack_dim
from holdfast.mapping.syntax.statement import Spec, Statement

Shape = tuple[int, ...]
_MAX_DEPTH = 50  # statements in a row


class Lookahead:
    """Answers for splits sized by the targets and for fused temporaries. The index is built on first use."""

    def __init__(self, expansions: Sequence[Expansion], targets: Mapping[str, Spec | None]) -> None:
        self._expansions = expansions
        self._targets = targets
        self._uses: dict[str, list[tuple[int, ExpandedStep]]] | None = None
        self._makes: dict[str, list[int]] = {}

    def shape(self, number: int, name: str, depth: int = _MAX_DEPTH) -> Shape | None:
        """Return the shape of the name that statement `number` makes; None if it is unknown."""
        uses, replaced = self._uses_of(number, name)
        spec = self._targets.get(name)
        if not replaced and spec is not None:
            return tuple(spec.shape)
        for at, step in uses if depth > 0 else ():
            found = self._source_shape(at, step, depth - 1)
            if found is not None:
                return found
        return None

    def final_targets(self, number: int, name: str, depth: int = _MAX_DEPTH) -> set[str]:
        """Return the final names built from the result of statement `number`: the name itself if it is unused."""
        uses, replaced = self._uses_of(number, name)
        found = {name} if not uses or (name in self._targets and not replaced) else set()
        for at, step in uses if depth > 0 else ():
            for right in step.rights:
                found |= self.final_targets(at, right, depth - 1)
        return found

    def _uses_of(self, number: int, name: str) -> tuple[list[tuple[int, ExpandedStep]], bool]:
        """Return the steps that use the result of statement `number`, and whether a later statement replaces it."""
        uses = self._index().get(name, [])
        first = bisect_right(uses, number, key=_number)
        makes = self._makes.get(name, [])
        next_make = bisect_right(makes, number)
        if next_make == len(makes):
            return uses[first:], False
        return uses[first : bisect_right(uses, makes[next_make], key=_number)], True

    def _index(self) -> dict[str, list[tuple[int, ExpandedStep]]]:
        if self._uses is None:
            self._uses = {}
            for number, expansion in enumerate(self._expansions):
                for step in expansion.steps:
                    for name in step.lefts:
                        self._uses.setdefault(name, []).append((number, step))
                    for name in step.rights:
                        self._makes.setdefault(name, []).append(number)
        return self._uses

    def _source_shape(self, number: int, step: ExpandedStep, depth: int) -> Shape | None:
        """Return the shape of a step's only source, derived from the shapes of its results."""
        statement = self._expansions[number].statement
        unknown = (
            statement.options.fused == "fused_qkv_old" or statement.stacks or statement.options.reshape is not None
        )
        if len(step.lefts) != 1 or not step.rights or unknown:
            return None
        whole = self.whole(number, step, depth)
        return None if whole is None else _undo_permute(statement, step, whole)

    def whole(self, number: int, step: ExpandedStep, depth: int = _MAX_DEPTH) -> Shape | None:
        """Return the shape that a step of statement `number` splits into its results; None if it is unknown."""
        shapes = []
        for name, transposed in zip(step.rights, step.right_transposed, strict=True):
            shape = self.shape(number, name, depth)
            if shape is None:
                return None
            shapes.append(shape[::-1] if transposed else shape)
        return _whole(self._expansions[number].statement, shapes)


def _number(use: tuple[int, ExpandedStep]) -> int:
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


def _undo_permute(statement: Statement, step: ExpandedStep, shape: Shape) -> Shape | None:
    order = statement.options.permute
    if order is not None:
        if order and len(order) != len(shape):
            return None
        order = order or tuple(range(len(shape) - 1, -1, -1))
        before = [0] * len(shape)
        for dim, source in enumerate(order):
            before[source] = shape[dim]
        shape = tuple(before)
    return shape[::-1] if step.left_transposed[0] else shape
