"""Operators that are not linear: a Partial is reduced before them, and always in the same way.

In the same way, because what compares a tensor with its own maximum must see the same rounding twice.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, apply, is_shard, moved, wrap
from holdfast.spmd.registry import Rule


def settled_places(tensor: DTensor) -> list[Placement]:
    """Where a tensor goes to be no Partial: reduced straight into shards of its longest free dim, for half the bytes.

    Its own shards stay, but for strided ones (FSDP2 beside TP), which have no box and are gathered. Where no free dim
    has a row for every rank, it is reduced on all of them.
    """
    places: list[Placement] = []
    taken = {place.dim for place in tensor.placements if is_shard(place)}
    for axis, place in enumerate(tensor.placements):
        if not isinstance(place, Partial):
            places.append(place if is_shard(place) else Replicate())
            continue
        sizes = {dim: size for dim, size in enumerate(tensor.shape) if dim not in taken}
        dim = max(sizes, key=lambda dim: sizes[dim], default=None)
        if dim is None or sizes[dim] < tensor.device_mesh.size(axis) or place.reduce_op != "sum":
            places.append(Replicate())
            continue
        taken.add(dim)
        places.append(Shard(dim))
    return places


def settle(tensor: Any) -> Any:
    """The tensor with every Partial reduced."""
    if not isinstance(tensor, DTensor) or not any(isinstance(place, Partial) for place in tensor.placements):
        return tensor
    places = settled_places(tensor)
    return wrap(moved(tensor, places, tensor.device_mesh), tensor.device_mesh, places, tensor.shape)


def settled(call: Call) -> Any:
    """Reduce what is Partial, and call again."""
    if call.is_inplace or not any(
        isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements)
        for _, tensor in call.spots()
    ):
        return LEAVE
    return apply(
        call.op,
        [[settle(item) for item in value] if isinstance(value, list) else settle(value) for value in call.values],
    )


def divided(call: Call) -> Any:
    """Reduce what is divided by; what is divided may stay in parts."""
    above, below = call.values[:2]
    if not isinstance(below, DTensor) or not any(isinstance(place, Partial) for place in below.placements):
        return LEAVE
    return apply(call.op, [above, settle(below), *call.values[2:]])


COMPARISONS = tuple(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar"))
OTHERS = (
    *("reciprocal.default", "lerp.Tensor", "addcdiv.default", "sign.default", "sgn.default", "isnan.default"),
    *("isinf.default", "signbit.default", "logical_not.default", "bitwise_not.default", "pow.Tensor_Scalar"),
    "threshold.default",
)

RULES = [
    Rule(
        "pointwise",
        COMPARISONS + OTHERS,
        "every dim; a Partial is reduced first",
        "torch compares or inverts each rank's part of a Partial in some of these",
        settled,
    ),
]
if not private.AT_LEAST_2_13:
    RULES.append(
        Rule(
            "pointwise",
            ("div.Tensor", "div.Tensor_mode"),
            "every dim; a Partial that is divided by is reduced first",
            "torch divides by each rank's part",
            divided,
        )
    )
