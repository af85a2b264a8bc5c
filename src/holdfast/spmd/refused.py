"""What torch before 2.13 decides, and then refuses to carry out: some ranks or all would raise after the decision."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import writes_first


def cannot_be_done(sharding: Any, op: Any, info: Any) -> bool:
    """Whether a decision makes shards into parts, or moves a tensor that is written in place: a copy would be."""
    if private.AT_LEAST_2_13 or not private.is_decision(sharding):
        return False
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
    after = info.schema.args_schema if wanted is None else wanted.args_schema
    return _has_new_parts(info.schema.args_schema, after) or _moves_written(
        sharding, op, info.schema.args_schema, after
    )


def _has_new_parts(before: Any, after: Any) -> bool:
    return any(
        then.is_partial() and not (now.is_partial() or now.is_replicate())
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
