"""Pin a program to given sources: add the sizes, shapes and dtypes that its reverse needs to its statements.

These are the sizes of joined tensors, the shapes before a reshape and the dtypes before a cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import DType
from holdfast.mapping.compile.compile import compile_program
from holdfast.mapping.compile.evaluate import Recipes, dim_of
from holdfast.mapping.expand.expansion import ExpandedStep
from holdfast.mapping.expand.name_index import NameIndex
from holdfast.mapping.expand.shapes import Shapes
from holdfast.mapping.syntax.statement import STAR, UNKNOWN, Key, Options, Sized, Spec, Statement, is_many

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SizePin:
    """Facts about the sources of one step."""

    sizes: Sizes | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None


def pin_statements(statements: Sequence[Statement], sources: Mapping[str, Spec | None]) -> list[Statement]:
    """Add `sizes=`, `src_shape=` and `src_dtype=` for these sources wherever the reverse needs them."""
    unknown = [key for key, spec in sources.items() if spec is None]
    if unknown:
        raise InvalidArgument(f"the shape of {unknown[0]!r} is missing")
    known = {key: spec for key, spec in sources.items() if spec is not None}
    steps: dict[int, list[tuple[ExpandedStep, _SizePin]]] = {}

    def note(number: int, step: ExpandedStep, sources: Recipes) -> None:
        pin = _pin(statements[number], step, sources)
        if pin != _SizePin():
            steps.setdefault(number, []).append((step, pin))

    # The TP degree of fused weights does not affect the sizes of other joined tensors.
    compile_program(statements, known, None, source_tp=1, trace=note)
    out: list[Statement] = []
    for number, statement in enumerate(statements):
        out.extend(_pin_statement(statement, steps[number]) if number in steps else (statement,))
    return out


def _pin(statement: Statement, step: ExpandedStep, sources: Recipes) -> _SizePin:
    options = statement.options
    sizes = _sizes(statement, step, sources) if is_many(statement.lefts) and _has_sizes(statement) else None
    dtype = sources[0].dtype if options.dtype is not None and sources[0].dtype is not UNKNOWN else None
    return _SizePin(sizes, dtype, None if options.reshape is None else _shape_before(statement, step, sources, sizes))


def _has_sizes(statement: Statement) -> bool:
    """Return True if joined tensors need explicit sizes. Fused heads need them only if heads may differ in size."""
    return (
        statement.options.fused is None
        or statement.options.sizes == "any"
        or (statement.aoa and statement.options.fused in ("fused_qkv", "fused_qkv_old"))
    )


def _sizes(statement: Statement, step: ExpandedStep, parts: Recipes) -> Sizes:
    if statement.options.stack:
        return (1,) * len(parts)
    dim = dim_of(statement, len(parts[0].shape), default=None if statement.options.fused is None else 1)
    shapes = (
        part.shape[::-1] if transposed else part.shape
        for part, transposed in zip(parts, step.left_transposed, strict=True)
    )
    return tuple(shape[dim] if dim < len(shape) else 0 for shape in shapes)


def _shape_before(
    statement: Statement, step: ExpandedStep, sources: Recipes, sizes: Sizes | None
) -> tuple[int, ...] | None:
    """Return the shape of a step's tensor before its reshape, after transpose, join and permute."""
    specs = {name: Sized(recipe.shape, recipe.dtype) for name, recipe in zip(step.lefts, sources, strict=True)}
    plain = replace(statement, options=replace(statement.options, reshape=None))
    if sizes is None or statement.stacks:
        return Shapes(specs).whole(plain, step)
    shape = list(sources[0].shape[::-1] if step.left_transposed[0] else sources[0].shape)
    shape[dim_of(statement, len(shape))] = sum(sizes)
    return Shapes({"": Sized(tuple(shape), UNKNOWN)}).whole(plain, ExpandedStep(("",), step.rights, (False,)))


def _pin_statement(statement: Statement, steps: Sequence[tuple[ExpandedStep, _SizePin]]) -> Iterator[Statement]:
    """Yield one statement if all its combinations of ids agree, otherwise one statement per combination."""
    first = steps[0][1]
    stars = any(key.has_star for key in statement.lefts)
    if all(pin == first for _, pin in steps) and (not stars or _counts_from_zero(statement, steps)):
        parts = len(first.sizes) if stars and first.sizes is not None else statement.options.parts
        yield replace(statement, options=replace(_pinned_options(statement, first), parts=parts))
        return
    for step, pin in steps:
        lefts = (
            Key((name,), None, transposed) for name, transposed in zip(step.lefts, step.left_transposed, strict=True)
        )
        rights = (
            Key((name,), None, transposed) for name, transposed in zip(step.rights, step.right_transposed, strict=True)
        )
        single = pin.sizes is not None and len(pin.sizes) == 1
        options = _pinned_options(statement, replace(pin, sizes=None) if single else pin, exact=True)
        options = replace(options, parts=None, optional=False)
        yield replace(statement, lefts=tuple(lefts), rights=tuple(rights), options=options, text="")


def _pinned_options(statement: Statement, pin: _SizePin, *, exact: bool = False) -> Options:
    """Return the options with the pinned facts. Equal sizes become "equal" unless `exact`."""
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


def _counts_from_zero(statement: Statement, steps: Sequence[tuple[ExpandedStep, _SizePin]]) -> bool:
    """Return True if the only left key has a star that matches 0, 1, 2 and so on."""
    if len(statement.lefts) != 1:
        return False
    for step, _ in steps:
        for number, name in enumerate(step.lefts):
            values = next(iter(NameIndex([name]).match(statement.lefts[0])), None)
            if values is None or values[1][STAR] != str(number):
                return False
    return True
