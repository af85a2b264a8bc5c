"""Pinning a program to given sources: what its reverse needs to know of them is written into its statements.

That is the sizes of what is joined, the shape of what is reshaped, and the dtype of what is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import DType
from holdfast.mapping.compile.compile import compile_program
from holdfast.mapping.compile.evaluate import Recipes, dim_of
from holdfast.mapping.expand.expansion import Step
from holdfast.mapping.expand.name_index import Names
from holdfast.mapping.expand.shapes import Shapes
from holdfast.mapping.syntax.statement import STAR, UNKNOWN, Key, Options, Sized, Spec, Statement, is_many

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pin:
    """What one step is told of its sources."""

    sizes: Sizes | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None


def pinned(statements: Sequence[Statement], sources: Mapping[str, Spec | None]) -> list[Statement]:
    """The same program for these sources, with `sizes=`, `src_shape=` and `src_dtype=` where a reverse needs them."""
    unknown = [key for key, spec in sources.items() if spec is None]
    if unknown:
        raise InvalidArgument(f"the shape of {unknown[0]!r} is not given")
    known = {key: spec for key, spec in sources.items() if spec is not None}
    steps: dict[int, list[tuple[Step, _Pin]]] = {}

    def note(number: int, step: Step, found: Recipes) -> None:
        pin = _pin(statements[number], step, found)
        if pin != _Pin():
            steps.setdefault(number, []).append((step, pin))

    # The degrees of fused weights do not matter for the sizes of what is joined elsewhere.
    compile_program(statements, known, None, source_tp=1, trace=note)
    out: list[Statement] = []
    for number, statement in enumerate(statements):
        out.extend(_pinned(statement, steps[number]) if number in steps else (statement,))
    return out


def _pin(statement: Statement, step: Step, found: Recipes) -> _Pin:
    options = statement.options
    sizes = _sizes(statement, step, found) if is_many(statement.lefts) and _has_sizes(statement) else None
    dtype = found[0].dtype if options.dtype is not None and found[0].dtype is not UNKNOWN else None
    return _Pin(sizes, dtype, None if options.reshape is None else _shape_before(statement, step, found, sizes))


def _has_sizes(statement: Statement) -> bool:
    """Whether what is joined has sizes of its own: fused heads only where they may differ."""
    return (
        statement.options.fused is None
        or statement.options.sizes == "any"
        or (statement.aoa and statement.options.fused in ("fused_qkv", "fused_qkv_old"))
    )


def _sizes(statement: Statement, step: Step, parts: Recipes) -> Sizes:
    if statement.options.stack:
        return (1,) * len(parts)
    dim = dim_of(statement, len(parts[0].shape), default=None if statement.options.fused is None else 1)
    shapes = (part.shape[::-1] if turned else part.shape for part, turned in zip(parts, step.left_turned, strict=True))
    return tuple(shape[dim] if dim < len(shape) else 0 for shape in shapes)


def _shape_before(statement: Statement, step: Step, found: Recipes, sizes: Sizes | None) -> tuple[int, ...] | None:
    """The shape of what a step reshapes: of its sources turned, joined and permuted."""
    specs = {name: Sized(recipe.shape, recipe.dtype) for name, recipe in zip(step.lefts, found, strict=True)}
    plain = replace(statement, options=replace(statement.options, reshape=None))
    if sizes is None or statement.stacks:
        return Shapes(specs).whole(plain, step)
    shape = list(found[0].shape[::-1] if step.left_turned[0] else found[0].shape)
    shape[dim_of(statement, len(shape))] = sum(sizes)
    return Shapes({"": Sized(tuple(shape), UNKNOWN)}).whole(plain, Step(("",), step.rights, (False,)))


def _pinned(statement: Statement, steps: Sequence[tuple[Step, _Pin]]) -> Iterator[Statement]:
    """One statement where all its combinations of ids are alike, else one for each."""
    first = steps[0][1]
    stars = any(key.has_star for key in statement.lefts)
    if all(pin == first for _, pin in steps) and (not stars or _counts_from_zero(statement, steps)):
        parts = len(first.sizes) if stars and first.sizes is not None else statement.options.parts
        yield replace(statement, options=replace(_told(statement, first), parts=parts))
        return
    for step, pin in steps:
        lefts = (Key((name,), None, turned) for name, turned in zip(step.lefts, step.left_turned, strict=True))
        rights = (Key((name,), None, turned) for name, turned in zip(step.rights, step.right_turned, strict=True))
        alone = pin.sizes is not None and len(pin.sizes) == 1
        options = _told(statement, replace(pin, sizes=None) if alone else pin, exact=True)
        options = replace(options, parts=None, optional=False)
        yield replace(statement, lefts=tuple(lefts), rights=tuple(rights), options=options, text="")


def _told(statement: Statement, pin: _Pin, *, exact: bool = False) -> Options:
    """The options with what is known of the sources; equal sizes are said to be equal, unless `exact`."""
    options = statement.options
    sizes: Sizes | Literal["equal", "targets", "any"] | None = options.sizes
    if pin.sizes is not None or exact:
        sizes = pin.sizes
    if sizes is not None and sizes == pin.sizes and not exact and options.fused is None and len(set(sizes)) == 1:
        sizes = "equal"
    if pin.dtype is not None:
        options = replace(options, dtype=None, src_dtype=pin.dtype, dst_dtype=options.dtype)
    if pin.shape is not None:
        options = replace(options, src_shape=pin.shape)
    return replace(options, sizes=None if options.stack else sizes)


def _counts_from_zero(statement: Statement, steps: Sequence[tuple[Step, _Pin]]) -> bool:
    """Whether the only left key has a star that stands for 0, 1, 2 and so on."""
    if len(statement.lefts) != 1:
        return False
    for step, _ in steps:
        for number, name in enumerate(step.lefts):
            values = next(iter(Names([name]).match(statement.lefts[0])), None)
            if values is None or values[1][STAR] != str(number):
                return False
    return True
