"""The inverse of one statement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from holdfast.mapping.syntax.statement import STAR, Hole, Key, Options, Permutation, Statement, is_many

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
