"""Reverse a program: invert its statements from last to first, and say why a statement has no inverse.

A value used by several statements is recovered through the first invertible one; the results of the
others are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.expand.expand import WorkBudget
from holdfast.mapping.syntax.statement import STAR, Hole, Key, Options, Permutation, Statement, is_many


@dataclass(slots=True, eq=False)
class _KeyVersion:
    """The value of a key between two statements that define it."""

    key: Key
    made_by: int | None
    uses: list[int] = field(default_factory=list)
    removed_by: int | None = None
    wanted: bool = False  # by `a -> a`: a target even if other statements use it
    recovered_by: int | None = None
    is_recovered: bool = False


@dataclass(slots=True)
class _Flow:
    """The values that one statement reads and defines."""

    statement: Statement
    lefts: list[_KeyVersion]
    rights: list[_KeyVersion]


def reversed_program(statements: Sequence[Statement]) -> Iterator[Statement]:
    """Yield the statements of the reverse. Raises InvalidArgument for a statement without an inverse."""
    flows, sources = _flows(statements)
    _find_recoverable(flows)
    for value in sources:
        if value.uses and not value.is_recovered:
            raise _error(value, flows)
    for number in range(len(flows) - 1, -1, -1):
        yield from _inverse_statements(number, flows[number])


def _flows(statements: Sequence[Statement]) -> tuple[list[_Flow], list[_KeyVersion]]:
    current: dict[str, _KeyVersion] = {}
    sources: list[_KeyVersion] = []
    flows: list[_Flow] = []
    work = WorkBudget()
    for number, statement in enumerate(statements):
        work.spend(sum(key.count for key in (*statement.lefts, *statement.rights)), statement)
        lefts: list[_KeyVersion] = []
        for key in _keys(statement.lefts):
            if key.pattern not in current:
                current[key.pattern] = _KeyVersion(key, None)
                sources.append(current[key.pattern])
            lefts.append(current[key.pattern])
        rights = [_KeyVersion(key, number) for key in _keys(statement.rights)]
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
    return [single for key in keys for single in key.members()]


def _find_recoverable(flows: Sequence[_Flow]) -> None:
    """Walk from the last statement to the first and find which values are recovered, and by which statement."""
    for number in range(len(flows) - 1, -1, -1):
        flow = flows[number]
        for value in flow.rights:
            value.is_recovered = (
                value.wanted or value.recovered_by is not None or (not value.uses and value.removed_by is None)
            )
        if flow.lefts and flow.rights and not no_inverse(flow.statement) and all(v.is_recovered for v in flow.rights):
            for value in flow.lefts:
                value.recovered_by = number
                value.is_recovered = True  # an earlier statement overwrites this


def _inverse_statements(number: int, flow: _Flow) -> Iterator[Statement]:
    statement = flow.statement
    if not flow.lefts:
        # Optional: a target that kept its initial value may never have been stored.
        removal = one_sided(statement, lefts=statement.rights)
        yield replace(removal, options=replace(removal.options, optional=True))
        return
    if not flow.rights:
        unused_sources = [value.key for value in flow.lefts if not value.uses and value.made_by is None]
        if unused_sources:
            yield one_sided(statement, rights=unused_sources)
        return
    if not any(value.recovered_by == number and not value.wanted for value in flow.lefts):
        recovered = [value.key for value in flow.rights if value.is_recovered]
        if recovered:
            yield one_sided(statement, lefts=recovered)
        return
    wanted = [value.key for value in flow.lefts if value.wanted]
    if wanted:
        yield one_sided(statement, lefts=wanted)  # rebuilt from its copy
    yield inverse(statement)
    recovered_elsewhere = [value.key for value in flow.lefts if value.recovered_by != number and not value.wanted]
    if recovered_elsewhere:
        yield one_sided(statement, lefts=recovered_elsewhere)


def _error(value: _KeyVersion, flows: Sequence[_Flow]) -> Exception:
    """Return the error for the first statement that prevents recovering a value."""
    for _ in range(len(flows)):
        flow = flows[value.uses[0]]
        problem = no_inverse(flow.statement)
        if problem:
            return flow.statement.error(f"no inverse: {problem}", InvalidArgument)
        value = next(made for made in flow.rights if not made.is_recovered)
        if not value.uses:
            break
    assert value.removed_by is not None  # an unused value that is not removed is recovered
    removing = flows[value.removed_by].statement
    return removing.error(
        f"no inverse: {value.key.pattern} is a part made by {flow.statement.where}, and the whole cannot be rebuilt "
        "without it",
        InvalidArgument,
    )


Sizes = tuple[int, ...] | Literal["equal", "targets", "any"] | None


def no_inverse(statement: Statement) -> str | None:
    """Return why a statement has no inverse, or None if it has one."""
    options = statement.options
    if options.dtype is not None:
        return (
            f"dtype='{options.dtype.name}' does not give the dtype to cast back to; write "
            f"src_dtype='...', dst_dtype='{options.dtype.name}', or pass the sources' dtypes to reverse() as "
            "{key: (shape, dtype)}"
        )
    if options.permute is not None and options.reshape is not None:
        return "permute= and reshape= are inverted in the opposite order; write them as two statements"
    patterns = [key.pattern for left in statement.lefts for key in left.members()]
    if len(set(patterns)) < len(patterns):
        return "a source appears twice"
    rights = {hole.name for key in statement.rights for hole in key.holes}
    for key in statement.lefts:
        for hole in key.holes:
            if hole.name not in rights and hole.name != STAR:
                return f"${hole.name} appears only on the left, so it cannot be recovered"
    return None


def inverse(statement: Statement) -> Statement:
    """Return the statement that undoes an invertible statement."""
    options = statement.options
    left_ids = {hole.name for key in statement.lefts for hole in key.holes}
    lefts = tuple(_starred(key, left_ids) for key in statement.rights)
    rights = statement.lefts
    as_it_is = replace(options, permute=None, fused=None, reshape=None, stack=False, unstack=False) == options
    one_to_one = len(lefts) == len(rights) == 1 and as_it_is
    if one_to_one and not is_many(lefts) and not is_many(rights):
        # Two transposes combine into one, which AOA writes on the left.
        transposed = lefts[0].transposed != rights[0].transposed
        lefts = (replace(lefts[0], transposed=transposed),)
        rights = (replace(rights[0], transposed=False),)
    origin = f"reverse of {statement.origin}"
    return replace(statement, lefts=lefts, rights=rights, options=_inverse_options(statement), text="", origin=origin)


def one_sided(statement: Statement, lefts: Iterable[Key] = (), rights: Iterable[Key] = ()) -> Statement:
    """Return a statement that only removes or only adds keys, in place of `statement`."""
    return replace(
        statement,
        lefts=tuple(replace(key, transposed=False) for key in lefts),
        rights=tuple(replace(key, transposed=False) for key in rights),
        options=Options(optional=statement.options.optional),
        text="",
        origin=f"reverse of {statement.origin}",
    )


def _starred(key: Key, bound: set[str]) -> Key:
    """Replace ids that appeared only on the right, and so collected keys, by a star."""
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
        return "targets"  # never default to equal parts
    return None if sizes == "targets" or (sizes == "equal" and not joins) else sizes


def _inverse_reshape(options: Options) -> tuple[int, ...] | Literal["targets"] | None:
    if options.reshape is None:
        return None
    return options.src_shape if options.src_shape is not None else "targets"


def _inverse_order(order: Permutation) -> Permutation:
    return tuple(order.index(dim) for dim in range(len(order)))
