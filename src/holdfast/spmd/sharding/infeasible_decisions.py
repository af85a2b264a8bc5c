"""What torch decides, and then refuses to carry out: some ranks or all would raise after the decision."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import writes_first


def cannot_be_done(sharding: Any, op: Any, info: Any) -> bool:
    """Whether a decision makes shards into parts, integers into parts of a sum, or parts of one kind into another.

    Before 2.13 also whether it moves a tensor that is written in place: a copy would be.
    """
    if not private.is_decision(sharding):
        return False
    before = info.schema.args_schema
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
    after = before if wanted is None else wanted.args_schema
    if wanted is not None and any(test(before, after) for test in (_has_new_parts, _divides_integers, _changes_parts)):
        return True
    return not private.AT_LEAST_2_13 and _moves_written(sharding, op, before, after)


def _divides_integers(before: Any, after: Any) -> bool:
    """A whole integer tensor as a Partial: each rank's share would be a fraction, of another dtype than the rest."""
    return any(
        now.is_replicate() and then.is_partial("sum")
        for here, there in zip(private.specs_in(before), private.specs_in(after), strict=True)
        if here.tensor_meta is not None and not _is_divisible(here.tensor_meta.dtype)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _can_be_shared(place: Any) -> bool:
    """Whether torch makes parts of what is whole: factors and bits it does not."""
    return place.reduce_op in ("sum", "avg", "min", "max")


def _changes_parts(before: Any, after: Any) -> bool:
    """A maximum into a sum, say."""
    return any(
        isinstance(now, Partial) and isinstance(then, Partial) and now.reduce_op != then.reduce_op
        for here, there in zip(private.specs_in(before), private.specs_in(after), strict=True)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _is_divisible(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _has_new_parts(before: Any, after: Any) -> bool:
    """Shards into parts, or anything into the factors of a product."""
    return any(
        then.is_partial() and not now.is_partial() and not (now.is_replicate() and _can_be_shared(then))
        for here, there in zip(private.specs_in(before), private.specs_in(after), strict=True)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _moves_written(sharding: Any, op: Any, before: Any, after: Any) -> bool:
    for argument, here, there in zip(op._schema.arguments, before, after, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if _placements(here) != _placements(there):
            return True
    results = op._schema.returns
    if op is torch.ops.aten.squeeze_.dim or len(results) != 1 or results[0].alias_info is None:
        return False
    return writes_first(op) and _placements(sharding.output_spec) != _placements(before[0])


def _placements(values: Any) -> list[Any]:
    return [spec.placements for spec in private.specs_in(values)]
