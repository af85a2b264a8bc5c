"""flip and roll along the sharded dim: each rank asks for the rows that come to lie where its own were."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, is_shard, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.indexing.lookup import only_axis
from holdfast.spmd.sharding.mesh_collectives import has_empty_shard
from holdfast.spmd.sharding.row_permutation import Order


def turned(call: Call) -> Any:
    """Each rank keeps as many rows as it had."""
    tensor = call.values[0]
    dims = [dim % max(tensor.ndim, 1) for dim in call["dims"]]
    cut = {place.dim for place in tensor.placements if is_shard(place) and place.dim in dims}
    axis = only_axis(tensor, min(cut)) if len(cut) == 1 else None
    if axis is None or has_empty_shard(tensor.shape, call.mesh, tensor.placements):
        return LEAVE
    (dim,) = cut
    order = Order(call.mesh, axis, dim, tensor.shape[dim], _source(call, tensor.shape[dim], dim))
    if not pays(order, tensor):
        return LEAVE
    local = order.fetch(private.local_of(tensor))
    others = [place for place, other in enumerate(dims) if other != dim]
    changes = {name: [call[name][place] for place in others] for name in ("shifts", "dims") if name in call.names}
    result = call.run({(0,): local}, **changes) if others else local
    return wrap(result, call.mesh, tensor.placements, tensor.shape)


def _source(call: Call, size: int, dim: int) -> torch.Tensor:
    rows = torch.arange(size, device="cpu")
    if "shifts" not in call.names:
        return rows.flip(0)
    dims = [other % call.values[0].ndim for other in call["dims"]]
    return rows.roll(sum(shift for shift, other in zip(call["shifts"], dims, strict=True) if other == dim))


def pays(order: Order, tensor: DTensor) -> bool:
    """Whether the rows that are asked for, here and by the gradient on its way back, are fewer than all others'."""
    twice = torch.is_grad_enabled() and tensor.requires_grad and not private.in_gradient()
    return order.received * (2 if twice else 1) <= order.longest * (order.ranks - 1)


RULES = [
    Rule("along", ("flip.default", "roll.default"), "every dim", "torch gathers the tensor", turned),
]
