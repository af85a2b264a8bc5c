"""tril and triu of matrices whose rows or columns are sharded: the diagonal counted from this rank's first element."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, is_shard, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.batched.batch_items import rule_of

of_stacks = rule_of("t** -> t")


def triangle(call: Call) -> Any:
    """Nothing is sent, whichever dims are sharded; a Partial is reduced, beside shards of a stack into shards."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return LEAVE
    if not all(is_shard(place) or place.is_replicate() for place in tensor.placements):
        return LEAVE if call.is_inplace else of_stacks(call)
    if all(place.is_replicate() for place in tensor.placements):
        return LEAVE
    _, offsets = private.local_box(tensor.shape, call.mesh, tensor.placements)
    diagonal = call["diagonal"] + offsets[-2] - offsets[-1]
    local = call.run({(0,): private.local_of(tensor)}, diagonal=diagonal)
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
