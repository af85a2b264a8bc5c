"""GradScaler's unscale of gradients: an overflow in one rank's shard is seen by every rank."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import full_tensor, wrap


def unscale(call: Call) -> Any:
    """Unscale each rank's part of the gradients; reduce what it found over every axis that is not all replicas."""
    call.run({slot: local_of(tensor) for slot, tensor in call.tensor_args() if isinstance(tensor, DTensor)})
    placements = [tensor.placements for tensor in call["self"] if isinstance(tensor, DTensor)]
    differs = [not all(place.is_replicate() for place in places) for places in zip(*placements, strict=True)]
    if any(differs):
        found = call["found_inf"]
        found = local_of(found) if isinstance(found, DTensor) else found
        places = [Partial("max") if may_differ else Replicate() for may_differ in differs]
        found.copy_(full_tensor(wrap(found, call.mesh, places, found.shape)))
    return None


RULES = [
    Rule(
        "optimizer",
        ("_amp_foreach_non_finite_check_and_unscale_.default",),
        "every dim",
        "torch reduces what it found only as the first gradient is placed",
        unscale,
    )
]
