"""x[2:6], x[::2] and x[3] along the sharded dim: only the rows that are asked for are sent.

They write through, as all views of a sharded dim do: see windows.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, is_shard, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.flip_roll import pays
from holdfast.spmd.rules.indexing.lookup import only_axis
from holdfast.spmd.sharding.gathered_views import window
from holdfast.spmd.sharding.mesh_collectives import has_empty_shard
from holdfast.spmd.sharding.row_permutation import NOTHING, Order


def some(call: Call) -> Any:
    """Rows that fill no shard go to every rank, more of them into even shards; those of a gradient too."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    axis = only_axis(tensor, dim)
    if axis is None:
        return LEAVE
    rows = _rows(call, tensor.shape[dim])
    if len(rows) in (0, tensor.shape[dim]):
        return LEAVE
    shape = [*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :]]
    order = Order(call.mesh, axis, dim, tensor.shape[dim], rows)
    few = len(rows) <= order.longest
    even = pays(order, tensor) and not has_empty_shard(shape, call.mesh, tensor.placements)
    if even and (not few or private.in_gradient()):
        places = list(tensor.placements)
    elif few:
        order = Order(call.mesh, axis, dim, tensor.shape[dim], rows, everywhere=True)
        places = _without(tensor, axis)
    else:
        return LEAVE
    return window(wrap(order.fetch(private.local_of(tensor)), call.mesh, places, shape), call)


def _rows(call: Call, size: int) -> torch.Tensor:
    """The numbers of the rows that a slice takes."""
    taken = range(size)[call["start"] : call["end"] : call["step"]]
    return torch.arange(taken.start, max(taken.start, taken.stop), taken.step, device="cpu")


def _without(tensor: DTensor, axis: int) -> list[Placement]:
    return [Replicate() if number == axis else place for number, place in enumerate(tensor.placements)]


def one(call: Call) -> Any:
    """One row, to every rank."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    axis, index = only_axis(tensor, dim), call["index"]
    if axis is None or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return LEAVE
    row = torch.tensor([index % tensor.shape[dim]], device="cpu")
    order = Order(call.mesh, axis, dim, tensor.shape[dim], row, everywhere=True)
    places = [
        Shard(place.dim - 1) if is_shard(place) and place.dim > dim else place for place in _without(tensor, axis)
    ]
    shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    return window(wrap(order.fetch(private.local_of(tensor)).squeeze(dim), call.mesh, places, shape), call)


def put_back(call: Call) -> Any:
    """The gradient of a slice that is sharded: its rows go where they came from, among zeros."""
    gradient, sizes = call.values[0], call["input_sizes"]
    dim = call["dim"] % max(gradient.ndim, 1)
    axis = only_axis(gradient, dim)
    if axis is None or has_empty_shard(gradient.shape, call.mesh, gradient.placements):
        return LEAVE
    rows = torch.full((sizes[dim],), NOTHING, device="cpu")
    rows[_rows(call, sizes[dim])] = torch.arange(gradient.shape[dim], device="cpu")
    order = Order(call.mesh, axis, dim, gradient.shape[dim], rows)
    if not pays(order, gradient):
        return LEAVE
    return wrap(order.fetch(private.local_of(gradient)), call.mesh, gradient.placements, sizes)


WHY = "torch gathers the tensor"
RULES = [
    Rule("view", ("slice.Tensor",), "every dim", WHY, some),
    Rule("view", ("select.int",), "every dim", WHY, one),
    Rule("view", ("slice_backward.default",), "every dim", WHY, put_back),
]
