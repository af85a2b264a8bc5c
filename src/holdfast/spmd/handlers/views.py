"""Reshapes of uneven shards, which no placement can describe unless the sharded dim stays as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, is_shard
from holdfast.spmd.fallback import gather_and_run
from holdfast.spmd.registry import Rule
from holdfast.spmd.windows import window


def reshape(call: Call) -> Any:
    """Leave what torch can do; gather where a reshaped dim is sharded unevenly, or by several axes that must part."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor):
        return LEAVE
    dims = [place.dim for place in tensor.placements if is_shard(place)]
    if len(set(dims)) == len(dims) and all(is_even(tensor, dim) for dim in dims):
        return LEAVE
    if _fits(call):
        return LEAVE
    return window(gather_and_run(call), call) if private.is_view(call.op) else gather_and_run(call)


def is_even(tensor: DTensor, dim: int) -> bool:
    """Whether every rank has as many rows of a dim as the others."""
    ranks = math.prod(
        tensor.device_mesh.size(axis)
        for axis, place in enumerate(tensor.placements)
        if is_shard(place) and place.dim == dim
    )
    return bool(tensor.shape[dim] % ranks == 0)


def _fits(call: Call) -> bool:
    """Whether, as torch decides a reshape, every rank's part has as many elements after as before."""
    if (decided := private.decided_reshape(call.info)) is None:
        return False
    before, after = decided
    if not all(type(place) in (Shard, Replicate, Partial) for spec in decided for place in spec.placements):
        return True  # strided shards are torch's own affair
    coordinates = itertools.product(*(range(size) for size in before.mesh.shape))
    return all(_elements(before, at) == _elements(after, at) for at in coordinates)


def _elements(spec: Any, coordinate: Sequence[int]) -> int:
    """How many elements the rank at a coordinate has of a tensor."""
    sizes = list(spec.shape)
    for axis, place in enumerate(spec.placements):
        if is_shard(place):
            step = -(-sizes[place.dim] // spec.mesh.size(axis))
            sizes[place.dim] = max(0, min(step, sizes[place.dim] - step * coordinate[axis]))
    return math.prod(sizes)


RULES = [
    Rule(
        "view",
        ("view.default", "_unsafe_view.default", "reshape.default"),
        "as torch, where every rank's part fits",
        "torch raises where an uneven dim is split or merged",
        reshape,
    ),
]
