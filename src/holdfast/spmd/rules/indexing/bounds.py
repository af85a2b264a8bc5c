"""Indices out of range where some rank's part is empty: that rank would see nothing wrong, and wait for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, apply, replicated, whole
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.index_checks import asked_of


def checked(call: Call) -> Any:
    """Where some rank has nothing, every rank gets all indices, which are few; beside masks, everything."""
    if not has_empty(call):
        return LEAVE
    indices = [index for spot, index in call.spots() if spot[0]]
    if len(asked_of(call)) < len(indices):
        return gather_and_run(call)
    if all(is_everywhere(index) for index in indices):
        return LEAVE
    first, *rest = call.values
    return apply(call.op, [first, *(_everywhere(value, call.mesh) for value in rest)])


def _everywhere(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, (list, tuple)):
        return [_everywhere(item, mesh) for item in value]
    return replicated(whole(value), mesh) if isinstance(value, DTensor) else value


def is_everywhere(index: Any) -> bool:
    """Whether every rank has all of a tensor."""
    return not isinstance(index, DTensor) or all(place.is_replicate() for place in index.placements)


def is_in_range(index: torch.Tensor, first: int, last: int) -> bool:
    """Whether all of this rank's indices are; on a GPU the device itself insists, as its kernels do."""
    right = (index >= first) & (index <= last)
    if private.can_be_read(right):
        return bool(right.all())
    private.insist(right, "an index is out of range")
    return True


RULES: list[Rule] = []  # lookups.py asks here for what it leaves
