"""Pinning a program to given sources: the sizes of what is joined are written into its statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.compile import compile_program
from holdfast.mapping.evaluate import Recipes, dim_of
from holdfast.mapping.expansion import Step
from holdfast.mapping.names import Names
from holdfast.mapping.values import STAR, Key, Spec, Statement, is_many

Sizes = tuple[int, ...]


def pinned(statements: Sequence[Statement], sources: Mapping[str, Spec | None]) -> list[Statement]:
    """The same program for these sources, with `sizes=` wherever parts are joined."""
    unknown = [key for key, spec in sources.items() if spec is None]
    if unknown:
        raise InvalidArgument(f"the shape of {unknown[0]!r} is not given")
    known = {key: spec for key, spec in sources.items() if spec is not None}
    steps: dict[int, list[tuple[Step, Sizes]]] = {}

    def note(number: int, step: Step, found: Recipes) -> None:
        statement = statements[number]
        if is_many(statement.lefts) and statement.options.fused is None:
            steps.setdefault(number, []).append((step, _sizes(statement, step, found)))

    # The degrees of fused weights do not matter for the sizes of what is joined elsewhere.
    compile_program(statements, known, None, source_tp=1, trace=note)
    out: list[Statement] = []
    for number, statement in enumerate(statements):
        out.extend(_pinned(statement, steps[number]) if number in steps else (statement,))
    return out


def _sizes(statement: Statement, step: Step, parts: Recipes) -> Sizes:
    if statement.options.stack:
        return (1,) * len(parts)
    dim = dim_of(statement, len(parts[0].shape))
    shapes = (part.shape[::-1] if turned else part.shape for part, turned in zip(parts, step.left_turned, strict=True))
    return tuple(shape[dim] if dim < len(shape) else 0 for shape in shapes)


def _pinned(statement: Statement, steps: Sequence[tuple[Step, Sizes]]) -> Iterator[Statement]:
    """One statement where all its combinations of ids are alike, else one for each."""
    first = steps[0][1]
    stacks = statement.options.stack
    stars = any(key.has_star for key in statement.lefts)
    if all(sizes == first for _, sizes in steps) and (not stars or _counts_from_zero(statement, steps)):
        parts = len(first) if stars else statement.options.parts
        alike: Sizes | Literal["equal"] = "equal" if len(set(first)) == 1 else first
        yield replace(statement, options=replace(statement.options, sizes=None if stacks else alike, parts=parts))
        return
    for step, found in steps:
        lefts = (Key((name,), None, turned) for name, turned in zip(step.lefts, step.left_turned, strict=True))
        rights = (Key((name,), None, turned) for name, turned in zip(step.rights, step.right_turned, strict=True))
        options = replace(
            statement.options, sizes=None if stacks or len(found) == 1 else found, parts=None, optional=False
        )
        yield replace(statement, lefts=tuple(lefts), rights=tuple(rights), options=options, text="")


def _counts_from_zero(statement: Statement, steps: Sequence[tuple[Step, Sizes]]) -> bool:
    """Whether the only left key has a star that stands for 0, 1, 2 and so on."""
    if len(statement.lefts) != 1:
        return False
    for step, _ in steps:
        for number, name in enumerate(step.lefts):
            values = next(iter(Names([name]).match(statement.lefts[0])), None)
            if values is None or values[1][STAR] != str(number):
                return False
    return True
