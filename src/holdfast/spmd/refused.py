"""What torch before 2.13 decides, and then refuses to carry out: some ranks or all would raise after the decision."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd import torch_private as private


def cannot_be_done(sharding: Any, op: Any, info: Any) -> bool:
    """Whether a decision makes shards into parts, or places a tensor anew that is written in place."""
    if private.AT_LEAST_2_13 or not private.is_decision(sharding):
        return False
    before, after = private.specs_in(info.schema.args_schema), private.decided_specs(sharding)
    if any(
        then.is_partial() and not (now.is_partial() or now.is_replicate())
        for here, there in zip(before, after, strict=False)
        for now, then in zip(here.placements, there.placements, strict=True)
    ):
        return True
    written = op._schema.arguments[0].alias_info if op._schema.arguments else None
    if written is None or not written.is_write or op is torch.ops.aten.squeeze_.dim:
        return False
    results = private.specs_in(sharding.output_spec)
    return len(results) == 1 and bool(results[0].placements != before[0].placements)
