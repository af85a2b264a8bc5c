"""Operators that are not linear: a Partial is reduced before them, and always in the same way.

In the same way, because what compares a tensor with its own maximum must see the same rounding twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, apply, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.mesh_collectives import has_empty_shard
from holdfast.spmd.sharding.mixed_placements import torch_joins


def settled_places(tensor: DTensor) -> list[Placement]:
    """Where a tensor goes to be no Partial: reduced straight into the shards that need the least padding.

    That is half the bytes of reducing it on all ranks. Its own shards stay, and may be cut again. Where it has none,
    and no dim can be cut evenly, it is reduced on all: padded shards cost more than that once they come together.
    """
    places = boxed(tensor.placements)
    lone = not any(is_shard(place) for place in places)
    for axis, place in enumerate(tensor.placements):
        if isinstance(place, Partial):
            found = paddings(tensor.shape, tensor.device_mesh, places, axis) if place.reduce_op == "sum" else {}
            dim = min(found, key=lambda dim: found[dim], default=None)
            places[axis] = Replicate() if dim is None or (lone and found[dim][0] > 1) else Shard(dim)
    return places


def boxed(placements: Sequence[Placement]) -> list[Placement]:
    """The same, but strided shards (FSDP2 beside TP), which are no box of the tensor, are gathered."""
    return [place if is_shard(place) or isinstance(place, Partial) else Replicate() for place in placements]


def paddings(
    shape: Sequence[int], mesh: DeviceMesh, places: Sequence[Placement], axis: int
) -> dict[int, tuple[float, bool, int]]:
    """The dims that the ranks of `axis` can share, none of them in vain.

    With each: how much longer it gets by padding, whether another axis cuts it already, and its length, negative.
    """
    found: dict[int, tuple[float, bool, int]] = {}
    ranks = mesh.size(axis)
    for dim, length in enumerate(shape):
        axes = [number for number, place in enumerate(places) if is_shard(place) and place.dim == dim]
        cut = [place if number != axis else Shard(dim) for number, place in enumerate(places)]
        if any(number > axis for number in axes) or not length or has_empty_shard(shape, mesh, cut):
            continue
        own = length
        for number in axes:
            own = -(-own // mesh.size(number))
        found[dim] = (-(-own // ranks) * ranks / own, bool(axes), -own)
    return found


def settle(tensor: Any) -> Any:
    """The tensor with every Partial reduced."""
    if not isinstance(tensor, DTensor) or not any(isinstance(place, Partial) for place in tensor.placements):
        return tensor
    places = settled_places(tensor)
    return wrap(moved(tensor, places, tensor.device_mesh), tensor.device_mesh, places, tensor.shape)


def settled(call: Call) -> Any:
    """Reduce what is Partial, and call again; beside other shards torch reduces it straight into those."""
    if call.is_inplace or not any(
        isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements)
        for _, tensor in call.spots()
    ):
        return LEAVE
    if torch_joins(call):
        return LEAVE
    return apply(
        call.op,
        [[settle(item) for item in value] if isinstance(value, list) else settle(value) for value in call.values],
    )


def settled_unless_sum(call: Call) -> Any:
    """As `settled`, but sums are left to newer torch, which cuts them as what they are multiplied with later."""
    parts = {place for _, t in call.spots() if isinstance(t, DTensor) for place in t.placements if place.is_partial()}
    return LEAVE if private.AT_LEAST_2_13 and parts == {Partial()} else settled(call)


def divided(call: Call) -> Any:
    """Reduce what is divided by; what is divided may stay in parts."""
    above, below = call.values[:2]
    if not isinstance(below, DTensor) or not any(isinstance(place, Partial) for place in below.placements):
        return LEAVE
    return apply(call.op, [above, settle(below), *call.values[2:]])


COMPARISONS = tuple(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar"))
OTHERS = (
    *("reciprocal.default", "lerp.Tensor", "addcdiv.default", "sign.default", "isnan.default"),
    *("isinf.default", "signbit.default", "logical_not.default", "bitwise_not.default", "threshold.default"),
)
OF_A_SUM = ("sgn.default", "pow.Tensor_Scalar")

RULES = [
    Rule(
        "pointwise",
        COMPARISONS + OTHERS,
        "every dim; a Partial is reduced first",
        "torch compares or inverts each rank's part of a Partial in some of these",
        settled,
    ),
    Rule(
        "pointwise",
        OF_A_SUM,
        "every dim; a Partial is reduced first",
        "torch takes each rank's part of a Partial that is no sum",
        settled_unless_sum,
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
