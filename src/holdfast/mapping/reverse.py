"""The reverse of a program: what makes the sources again of the targets.

Statements are undone from the last to the first. A value that several statements used comes back
through the first of them that can be undone; what the others made is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.expand.expand import Work
from holdfast.mapping.syntax.statement import STAR, Hole, Key, Options, Permutation, Statement, is_many


@dataclass(slots=True, eq=False)
class _Value:
    """What a key stands for between two statements that make it."""

    key: Key
    made_by: int | None
    uses: list[int] = field(default_factory=list)
    removed_by: int | None = None
    wanted: bool = False  # by `a -> a`: it is a target itself, whatever else uses it
    back_by: int | None = None
    is_back: bool = False


@dataclass(slots=True)
class _Flow:
    """The values that one statement uses and makes."""

    statement: Statement
    lefts: list[_Value]
    rights: list[_Value]


def reversed_program(statements: Sequence[Statement]) -> Iterator[Statement]:
    """The statements of the reverse; raises InvalidArgument for one that has no inverse."""
    flows, sources = _flows(statements)
    _find_ways_back(flows)
    for value in sources:
        if value.uses and not value.is_back:
            raise _refusal(value, flows)
    for number in range(len(flows) - 1, -1, -1):
        yield from _undone(number, flows[number])


def _flows(statements: Sequence[Statement]) -> tuple[list[_Flow], list[_Value]]:
    current: dict[str, _Value] = {}
    sources: list[_Value] = []
    flows: list[_Flow] = []
    work = Work()
    for number, statement in enumerate(statements):
        work.spend(sum(key.count for key in (*statement.lefts, *statement.rights)), statement)
        lefts: list[_Value] = []
        for key in _keys(statement.lefts):
            if key.pattern not in current:
                current[key.pattern] = _Value(key, None)
                sources.append(current[key.pattern])
            lefts.append(current[key.pattern])
        rights = [_Value(key, number) for key in _keys(statement.rights)]
        for value in lefts:
            if statement.rights:
                value.uses.append(number)
            else:
                value.removed_by = number
                current.pop(value.key.pattern, None)
        for value in rights:
            value.wanted = statement.lefts == statement.rights and statement.is_plain
            current[value.key.pattern] = value
        flows.append(_Flow(statement, lefts, rights))
    return flows, sources


def _keys(keys: Sequence[Key]) -> list[Key]:
    return [single for key in keys for single in key.with_array()]


def _find_ways_back(flows: Sequence[_Flow]) -> None:
    """From the last statement to the first: which values come back, and through which statement."""
    for number in range(len(flows) - 1, -1, -1):
        flow = flows[number]
        for value in flow.rights:
            value.is_back = value.wanted or value.back_by is not None or (not value.uses and value.removed_by is None)
        if flow.lefts and flow.rights and not no_inverse(flow.statement) and all(v.is_back for v in flow.rights):
            for value in flow.lefts:
                value.back_by = number
                value.is_back = True  # the first statement that uses it is the last to be looked at


def _undone(number: int, flow: _Flow) -> Iterator[Statement]:
    statement = flow.statement
    if not flow.lefts:
        # Optional: a target that kept its own value may never have been stored.
        removal = one_sided(statement, lefts=statement.rights)
        yield replace(removal, options=replace(removal.options, optional=True))
        return
    if not flow.rights:
        alone = [value.key for value in flow.lefts if not value.uses and value.made_by is None]
        if alone:
            yield one_sided(statement, rights=alone)
        return
    if not any(value.back_by == number and not value.wanted for value in flow.lefts):
        there = [value.key for value in flow.rights if value.is_back]
        if there:
            yield one_sided(statement, lefts=there)
        return
    already = [value.key for value in flow.lefts if value.wanted]
    if already:
        yield one_sided(statement, lefts=already)  # it is made again, from a copy of itself
    yield inverse(statement)
    twice = [value.key for value in flow.lefts if value.back_by != number and not value.wanted]
    if twice:
        yield one_sided(statement, lefts=twice)


def _refusal(value: _Value, flows: Sequence[_Flow]) -> Exception:
    """The first statement on the way of a value that cannot be undone."""
    for _ in range(len(flows)):
        flow = flows[value.uses[0]]
        problem = no_inverse(flow.statement)
        if problem:
            return flow.statement.refusal(f"it has no inverse: {problem}", InvalidArgument)
        value = next(made for made in flow.rights if not made.is_back)
        if not value.uses:
            break
    assert value.removed_by is not None  # a value that is neither used nor removed is there
    removing = flows[value.removed_by].statement
    return removing.refusal(
        f"it has no inverse: {value.key.pattern} is a part that {flow.statement.where} makes, and without it the whole "
        "cannot be made again",
        InvalidArgument,
    )


Sizes = tuple[int, ...] | Literal["equal", "targets", "any"] | None


def no_inverse(statement: Statement) -> str | None:
    """Why a statement has no inverse, or None if it has one."""
    options = statement.options
    if options.dtype is not None:
        return (
            f"dtype='{options.dtype.name}' does not say what to cast back to; write "
            f"src_dtype='...', dst_dtype='{options.dtype.name}', or give reverse() the sources' dtypes: "
            "{key: (shape, dtype)}"
        )
    if options.permute is not None and options.reshape is not None:
        return "permute= and reshape= are undone in the other order; write them as two statements"
    patterns = [key.pattern for left in statement.lefts for key in left.with_array()]
    if len(set(patterns)) < len(patterns):
        return "one source stands in it twice"
    rights = {hole.name for key in statement.rights for hole in key.holes}
    for key in statement.lefts:
        for hole in key.holes:
            if hole.name not in rights and hole.name != STAR:
                return f"${hole.name} stands on the left only, so that it cannot be found again"
    return None


def inverse(statement: Statement) -> Statement:
    """The statement that undoes one that has an inverse."""
    options = statement.options
    left_ids = {hole.name for key in statement.lefts for hole in key.holes}
    lefts = tuple(_starred(key, left_ids) for key in statement.rights)
    rights = statement.lefts
    as_it_is = replace(options, permute=None, fused=None, reshape=None, stack=False, unstack=False) == options
    one_to_one = len(lefts) == len(rights) == 1 and as_it_is
    if one_to_one and not is_many(lefts) and not is_many(rights):
        # Both turns come to one, which AOA writes on the left.
        turned = lefts[0].transposed != rights[0].transposed
        lefts = (replace(lefts[0], transposed=turned),)
        rights = (replace(rights[0], transposed=False),)
    origin = f"reverse of {statement.origin}"
    return replace(statement, lefts=lefts, rights=rights, options=_inverse_options(statement), text="", origin=origin)


def one_sided(statement: Statement, lefts: Iterable[Key] = (), rights: Iterable[Key] = ()) -> Statement:
    """A remove or an add in the place of a statement."""
    return replace(
        statement,
        lefts=tuple(replace(key, transposed=False) for key in lefts),
        rights=tuple(replace(key, transposed=False) for key in rights),
        options=Options(optional=statement.options.optional),
        text="",
        origin=f"reverse of {statement.origin}",
    )


def _starred(key: Key, bound: set[str]) -> Key:
    """An id that stood on the right only collected keys; on the left a star does."""
    pieces = (Hole(STAR) if isinstance(p, Hole) and p.name not in bound else p for p in key.pieces)
    return replace(key, pieces=tuple(pieces))


def _inverse_options(statement: Statement) -> Options:
    options = statement.options
    changed = replace(
        options,
        sizes=_inverse_sizes(statement),
        reshape=_inverse_reshape(options),
        src_shape=options.reshape if isinstance(options.reshape, tuple) else None,
        stack=options.unstack,
        unstack=options.stack,
        permute=None if options.permute is None else _inverse_order(options.permute),
        src_dtype=options.dst_dtype,
        dst_dtype=options.src_dtype,
        src_tp_degree=options.dst_tp_degree,
        dst_tp_degree=options.src_tp_degree,
    )
    if options.tp_degree is not None and len(statement.lefts) == len(statement.rights):
        return replace(changed, tp_degree=None, src_tp_degree=options.tp_degree)
    return changed


def _inverse_sizes(statement: Statement) -> Sizes:
    sizes = statement.options.sizes
    if statement.options.fused is not None:
        if sizes == "any" or (sizes is None and statement.aoa and len(statement.lefts) == 3):
            return "targets"
        return "any" if sizes == "targets" else sizes
    joins = is_many(statement.lefts) and not statement.options.stack
    if joins and sizes is None:
        return "targets"  # never equal parts by default
    return None if sizes == "targets" or (sizes == "equal" and not joins) else sizes


def _inverse_reshape(options: Options) -> tuple[int, ...] | Literal["targets"] | None:
    if options.reshape is None:
        return None
    return options.src_shape if options.src_shape is not None else "targets"


def _inverse_order(order: Permutation) -> Permutation:
    return tuple(order.index(dim) for dim in range(len(order)))
