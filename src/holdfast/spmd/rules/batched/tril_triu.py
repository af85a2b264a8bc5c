"""tril and triu of matrices with sharded rows or columns: the diagonal is offset by the shard's position."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import signature_rule

of_stacks = signature_rule("t** -> t")


def triangle(call: Call) -> Any:
    """Run without communication for any shards; reduce a Partial, into shards of the stack if there are any."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return USE_TORCH
    if not all(is_shard(place) or place.is_replicate() for place in tensor.placements):
        return USE_TORCH if call.is_inplace else of_stacks(call)
    if all(place.is_replicate() for place in tensor.placements):
        return USE_TORCH
    _, offsets = local_box(tensor.shape, call.mesh, tensor.placements)
    diagonal = call["diagonal"] + offsets[-2] - offsets[-1]
    local = call.run({(0,): local_of(tensor)}, diagonal=diagonal)
    return tensor if call.is_inplace else wrap(local, call.mesh, tensor.placements, tensor.shape)


RULES = [
    Rule(
        "batched",
        ("tril.default", "triu.default", "tril_.default", "triu_.default"),
        "every dim",
        "torch gathers the matrices",
        triangle,
    )
]
