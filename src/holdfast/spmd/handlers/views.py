"""Reshapes of uneven shards, which no placement can describe unless the sharded dim stays as it is."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor

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
    if len(set(dims)) == len(dims) and all(_is_even(tensor, dim) for dim in dims):
        return LEAVE
    if private.decision_fits(call.info):
        return LEAVE
    return window(gather_and_run(call), call) if private.is_view(call.op) else gather_and_run(call)


def _is_even(tensor: DTensor, dim: int) -> bool:
    ranks = math.prod(
        tensor.device_mesh.size(axis)
        for axis, place in enumerate(tensor.placements)
        if is_shard(place) and place.dim == dim
    )
    return bool(tensor.shape[dim] % ranks == 0)


RULES = [
    Rule(
        "view",
        ("view.default", "_unsafe_view.default", "reshape.default"),
        "as torch, where every rank's part fits",
        "torch raises where an uneven dim is split or merged",
        reshape,
    ),
]
