"""Find decisions of torch that it cannot execute: shards or integers made Partial, a changed reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import writes_first
from holdfast.spmd.base.torch_decisions import decision_for_plain_shards, is_decision
from holdfast.spmd.base.torch_specs import specs_in

ATEN = torch.ops.aten
RESHAPES = (ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default)  # their rule knows strided shards


def is_infeasible(sharding: Any, op: Any, info: Any) -> bool:
    """Return True if a decision turns shards or integers into Partials, or a Partial into another reduction.

    Also if it keeps a strided shard of a dim that must not be sharded; on 2.11, if a strided shard loses the shards
    that it strides over. Before 2.13, also if it redistributes a tensor written in place: the write would go to a copy.
    """
    if not is_decision(sharding):
        return False
    before = info.schema.args_schema
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
    after = before if wanted is None else wanted.args_schema
    if wanted is not None and any(
        test(before, after) for test in (_creates_partials, _divides_integers, _changes_reduction)
    ):
        return True
    if torch_versions.is_torch_2_11():
        if _leaves_lone_stride(sharding, before, after):
            return True
    elif op not in RESHAPES and _keeps_strided(info, before, after):
        return True
    return not torch_versions.AT_LEAST_2_13 and _moves_written(sharding, op, before, after)


def _keeps_strided(info: Any, before: Any, after: Any) -> bool:
    """Return True if a decision keeps a strided shard where it would redistribute a plain one.

    Some of torch's strategies gather the dim that they work along only if a plain Shard divides it.
    """
    kept = [
        (index, axis)
        for index, (here, there) in enumerate(zip(specs_in(before), specs_in(after), strict=True))
        for axis, (now, then) in enumerate(zip(here.placements, there.placements, strict=True))
        if isinstance(now, _StridedShard) and now == then
    ]
    if not kept:
        return False
    plain = decision_for_plain_shards(info)
    if plain is None:
        return True
    if not plain.needs_redistribute:
        return False
    wanted = specs_in(plain.redistribute_schema.args_schema)
    return any(
        wanted[index].placements[axis] != Shard(specs_in(before)[index].placements[axis].dim) for index, axis in kept
    )


def _divides_integers(before: Any, after: Any) -> bool:
    """Return True if a replicated integer tensor becomes a Partial sum: shares would be fractions of another dtype."""
    return any(
        now.is_replicate() and then.is_partial("sum")
        for here, there in zip(specs_in(before), specs_in(after), strict=True)
        if here.tensor_meta is not None and not _is_divisible(here.tensor_meta.dtype)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _can_become_partial(place: Any) -> bool:
    """Return True if torch turns a replica into such a Partial; not for products and bits."""
    return place.reduce_op in ("sum", "avg", "min", "max")


def _changes_reduction(before: Any, after: Any) -> bool:
    """Return True if a Partial becomes one of another reduction, such as a maximum a sum."""
    return any(
        isinstance(now, Partial) and isinstance(then, Partial) and now.reduce_op != then.reduce_op
        for here, there in zip(specs_in(before), specs_in(after), strict=True)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _is_divisible(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _creates_partials(before: Any, after: Any) -> bool:
    """Return True if a Shard becomes a Partial, or a replica a Partial that torch cannot make."""
    return any(
        then.is_partial() and not now.is_partial() and not (now.is_replicate() and _can_become_partial(then))
        for here, there in zip(specs_in(before), specs_in(after), strict=True)
        for now, then in zip(here.placements, there.placements, strict=True)
    )


def _leaves_lone_stride(sharding: Any, before: Any, after: Any) -> bool:
    """Return True if an input or result would have a strided shard without the shards it strides over.

    torch 2.11 cannot redistribute such a tensor.
    """
    specs = [*specs_in(after), *specs_in(sharding.output_spec)]
    return any(map(_has_lone_stride, specs)) and not any(map(_has_lone_stride, specs_in(before)))


def _has_lone_stride(spec: Any) -> bool:
    places = list(spec.placements)
    return any(
        isinstance(place, _StridedShard) and not any(other.is_shard(place.dim) for other in places[axis + 1 :])
        for axis, place in enumerate(places)
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
    return [spec.placements for spec in specs_in(values)]
