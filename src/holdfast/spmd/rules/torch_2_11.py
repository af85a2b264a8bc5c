"""Operators that torch 2.11 gets wrong and later versions do not: there, whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, is_shard
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.indexing import bounds
from holdfast.spmd.rules.view.uneven_reshape import is_even
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run


def whole_if_placed(call: Call) -> Any:
    """Gather whatever is not whole."""
    tensors = [tensor for _, tensor in call.spots() if isinstance(tensor, DTensor)]
    return LEAVE if all(place.is_replicate() for item in tensors for place in item.placements) else gather_and_run(call)


def layer_norm(call: Call) -> Any:
    """Left to torch where every rank has whole rows and a whole weight, of which nothing is Partial."""
    source = call["input"]
    first = source.ndim - len(call["normalized_shape"])
    places = [place for _, item in call.spots() if isinstance(item, DTensor) for place in item.placements]
    given = [call[name] for name in ("weight", "bias") if name in call.names]
    weights = [weight.placements for weight in given if isinstance(weight, DTensor)]
    cut = any(is_shard(place) and place.dim >= first for place in source.placements)
    cut = cut or any(is_shard(place) for placements in weights for place in placements)
    return gather_and_run(call) if cut or any(place.is_partial() for place in places) else LEAVE


def index(call: Call) -> Any:
    """A Partial beside sharded indices: torch 2.11 takes the parts for shards."""
    answer = bounds.checked(call)
    if answer is not LEAVE:
        return answer
    tensor, *indices = [item for _, item in call.spots() if isinstance(item, DTensor)]
    parts = [axis for axis, place in enumerate(tensor.placements) if place.is_partial()]
    cut = any(not item.placements[axis].is_replicate() for item in indices for axis in parts)
    return gather_and_run(call) if cut else LEAVE


def select(call: Call) -> Any:
    """index_select: as `index`, and where it gathers the shards: a Partial beside them is what 2.11 forgets."""
    answer = index(call)
    if answer is not LEAVE:
        return answer
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    gathers = any(is_shard(place) and place.dim == dim for place in tensor.placements) or has_empty(call)
    return gather_and_run(call) if gathers else LEAVE


def extreme_along(call: Call) -> Any:
    """min and max with their positions: torch 2.11 joins each rank's best, if all have one, and of one shape."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    if not any(is_shard(place) and place.dim == dim for place in tensor.placements):
        return LEAVE
    return LEAVE if all(is_even(tensor, dim) for dim in range(tensor.ndim)) else gather_and_run(call)


def squeeze(call: Call) -> Any:
    """Dims that are 1 long on one device, by name: torch 2.11 also drops those of which a rank has one row."""
    tensor = call.values[0]
    dims = [dim for dim, size in enumerate(tensor.shape) if size == 1]
    if not dims:
        return torch.ops.aten.alias.default(tensor)
    for dim in reversed(dims):
        tensor = torch.ops.aten.squeeze.dim(tensor, dim)
    return tensor


RULES = (
    [
        Rule(
            "view",
            ("squeeze.default",),
            "every dim",
            "torch 2.11 squeezes each rank's part: a rank with one row loses a dim",
            squeeze,
        ),
        Rule(
            "indexing",
            ("take.default",),
            "none: gathered on torch 2.11",
            "torch 2.11 adds up what a shard has not, once for each rank of a Partial",
            whole_if_placed,
        ),
        Rule(
            "batched",
            ("constant_pad_nd.default",),
            "none: gathered on torch 2.11",
            "torch 2.11 knows one mesh axis only, and takes one padding for another",
            gather_and_run,
        ),
        Rule(
            "norm",
            ("_fused_rms_norm.default", "_fused_rms_norm_backward.default"),  # rms_norm on GPUs
            "all but the normalised dims on torch 2.11; a Partial is gathered",
            "torch 2.11 normalises each shard of a row, or each part of a Partial, in some of these",
            layer_norm,
        ),
    ]
    if private.is_oldest()
    else []
)
