"""Shapes of names during expansion: the dim of a stack, and results of renames, transposes and stacks."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.mapping.expand.expansion import ExpandedStep
from holdfast.mapping.syntax.statement import Spec, Statement

Shape = tuple[int, ...]


class Shapes:
    """Shapes of sources and of the names derived by rename, transpose and stack; other names have none."""

    def __init__(self, sources: Mapping[str, Spec | None]) -> None:
        self._sources = sources
        self._made: dict[str, Shape | None] = {}

    def of(self, name: str) -> Shape | None:
        if name in self._made:
            return self._made[name]
        spec = self._sources.get(name)
        return None if spec is None else tuple(spec.shape)

    def follow(self, statement: Statement, step: ExpandedStep) -> None:
        """Record the shapes of a step's results."""
        shape = self.whole(statement, step)
        if shape is not None and len(step.rights) > 1 and not statement.unstacks:
            shape = None
        if shape is not None and statement.unstacks:
            dim = stack_dim(statement, len(shape))
            shape = None if dim is None else (*shape[:dim], *shape[dim + 1 :])
        for name, transposed in zip(step.rights, step.right_transposed, strict=True):
            self._made[name] = shape[::-1] if shape is not None and transposed else shape

    def whole(self, statement: Statement, step: ExpandedStep) -> Shape | None:
        """Return the shape of a step's result before it is split."""
        shape = self.of(step.lefts[0])
        if shape is None or statement.options.fused is not None:
            return None
        if step.left_transposed[0]:
            shape = shape[::-1]
        if statement.stacks:
            dim = stack_dim(statement, len(shape) + 1)
            if dim is None:
                return None
            shape = (*shape[:dim], len(step.lefts), *shape[dim:])
        elif len(step.lefts) > 1:
            return None
        permuted = _permuted(shape, statement.options.permute)
        wanted = statement.options.reshape
        if wanted is None or permuted is None:
            return permuted
        # If the tensor already has that shape, the target decides the result.
        return wanted if isinstance(wanted, tuple) and permuted != wanted else None


def stack_dim(statement: Statement, rank: int) -> int | None:
    """Return the dim along which a tensor of this rank is stacked; None if `axis=` is out of range."""
    axis = statement.options.axis
    return None if axis is None or not -rank <= axis < rank else axis % rank


def _permuted(shape: Shape, order: tuple[int, ...] | None) -> Shape | None:
    if order is None:
        return shape
    if order and len(order) != len(shape):
        return None
    return tuple(shape[dim] for dim in order) if order else shape[::-1]
