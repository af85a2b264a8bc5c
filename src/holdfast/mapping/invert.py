"""The inverse of one statement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.mapping.values import STAR, Hole, Key, Options, Permutation, Statement, is_many


def no_inverse(statement: Statement) -> str | None:
    """Why a statement has no inverse, or None if it has one."""
    options = statement.options
    if options.dtype is not None:
        return (
            f"dtype='{options.dtype.name}' does not say what to cast back to; write "
            f"src_dtype='...', dst_dtype='{options.dtype.name}'"
        )
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
    as_it_is = options.permute is None and options.fused is None and not options.stack and not options.unstack
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
    joins = is_many(statement.lefts) and options.fused is None and not options.stack
    sizes = options.sizes
    if joins and sizes is None:
        sizes = "targets"  # never equal parts by default
    elif sizes == "targets" or (sizes == "equal" and not joins):
        sizes = None
    changed = replace(
        options,
        sizes=sizes,
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


def _inverse_order(order: Permutation) -> Permutation:
    return tuple(order.index(dim) for dim in range(len(order)))
