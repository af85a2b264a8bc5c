"""Slices x[2:6], x[::2] and x[3] along the sharded dim: only the selected rows are sent; gradients of splits; stack.

The results write through, as all views of a sharded dim do: see gathered_views.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import USE_TORCH, Call, call_with_positive_dim
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.gathered_views import gathered_view
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.plain_tensors import PLAIN_IN_GRADIENT, with_plain_gradients
from holdfast.spmd.sharding.row_permutation import ZEROS, RowPermutation, Rows, permuting_is_cheaper
from holdfast.spmd.sharding.shard_sizes import has_empty_shard, is_shard, only_sharding_axis


def slice_rows(call: Call) -> Any:
    """Send few rows to every rank, more than a shard's rows into even shards; those of a gradient too."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    axis = only_sharding_axis(tensor, dim)
    if axis is None:
        return USE_TORCH
    rows = _rows(call, tensor.shape[dim])
    if len(rows) in (0, tensor.shape[dim]):
        return USE_TORCH
    shape = [*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :]]
    permutation = RowPermutation(call.mesh, axis, dim, tensor.shape[dim], rows)
    few = len(rows) <= permutation.longest
    even = permuting_is_cheaper(permutation, tensor) and not has_empty_shard(shape, call.mesh, tensor.placements)
    if even and (not few or in_gradient()):
        places = list(tensor.placements)
    elif few:
        permutation = RowPermutation(call.mesh, axis, dim, tensor.shape[dim], rows, everywhere=True)
        places = _without(tensor, axis)
    else:
        return USE_TORCH
    return gathered_view(wrap(permutation.fetch(local_of(tensor)), call.mesh, places, shape), call)


def _rows(call: Call, size: int) -> Rows:
    """Return the row numbers that a slice selects."""
    taken = range(size)[call["start"] : call["end"] : call["step"]]
    return np.arange(taken.start, max(taken.start, taken.stop), taken.step)


def _without(tensor: DTensor, axis: int) -> list[Placement]:
    return [Replicate() if number == axis else place for number, place in enumerate(tensor.placements)]


def select_row(call: Call) -> Any:
    """Send one row to every rank."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    axis, index = only_sharding_axis(tensor, dim), call["index"]
    if axis is None or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return USE_TORCH
    row = np.array([index % tensor.shape[dim]])
    permutation = RowPermutation(call.mesh, axis, dim, tensor.shape[dim], row, everywhere=True)
    places = [
        Shard(place.dim - 1) if is_shard(place) and place.dim > dim else place for place in _without(tensor, axis)
    ]
    shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    return gathered_view(wrap(permutation.fetch(local_of(tensor)).squeeze(dim), call.mesh, places, shape), call)


def slice_backward(call: Call) -> Any:
    """Return the gradient of a sharded slice: its rows go back to their positions, among zeros."""
    gradient, sizes = call.values[0], call["input_sizes"]
    dim = call["dim"] % max(gradient.ndim, 1)
    axis = only_sharding_axis(gradient, dim)
    if axis is None or has_empty_shard(gradient.shape, call.mesh, gradient.placements):
        return USE_TORCH
    rows = np.full(sizes[dim], ZEROS)
    rows[_rows(call, sizes[dim])] = np.arange(gradient.shape[dim])
    permutation = RowPermutation(call.mesh, axis, dim, gradient.shape[dim], rows)
    if not permuting_is_cheaper(permutation, gradient):
        return USE_TORCH
    return wrap(permutation.fetch(local_of(gradient)), call.mesh, gradient.placements, sizes)


def select_backward(call: Call) -> Any:
    """Return the gradient of a selected row, with the dim counted from the start."""
    return USE_TORCH if call["dim"] >= 0 else call_with_positive_dim(call, len(call["input_sizes"]))


def stack(call: Call) -> Any:
    """Stack along the dim counted from the start, which torch does by itself from 2.13 on."""
    if call["dim"] >= 0 or torch_versions.AT_LEAST_2_13:
        return USE_TORCH
    return call_with_positive_dim(call, call.values[0][0].ndim + 1)


WHY = "torch gathers the tensor"
RULES = [
    Rule("view", ("slice.Tensor",), "every dim", WHY, slice_rows),
    Rule("view", ("select.int",), "every dim", WHY, select_row),
    Rule("view", ("slice_backward.default",), "every dim", WHY, slice_backward),
    Rule(
        "view",
        ("select_backward.default",),
        "every dim but the selected one",
        "torch takes a negative dim for another dim than the selected one, and shards the gradient along it",
        select_backward,
    ),
    Rule(  # of whose results only some may be used: the gradients of the others are plain zeros
        "view",
        (
            "split.Tensor",
            "split_copy.Tensor",
            "split_with_sizes.default",
            "split_with_sizes_copy.default",
            "unbind.int",
            "unbind_copy.int",
        ),
        "as torch",
        PLAIN_IN_GRADIENT,
        with_plain_gradients("cat.default", "stack.default"),
    ),
    Rule(
        "view",
        ("stack.default",),
        "as torch",
        "torch before 2.13 takes a negative dim for another dim than the new one",
        stack,
    ),
]
