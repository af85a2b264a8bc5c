"""Writing into a Partial where it stands: it stays one, so that its views and aliases stay true."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from holdfast.spmd.base import torch_private as private

SHARES = {"sum": 0.0, "product": 1.0}  # what the others hold beside the one that has it all; elsewhere all have it


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a DTensor in parts along some axis."""
    return isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements)


def reduced_places(tensor: DTensor) -> list[Placement]:
    """Where a tensor lies once its parts are reduced."""
    return [Replicate() if isinstance(place, Partial) else place for place in tensor.placements]


def overwrite(tensor: DTensor, contents: torch.Tensor) -> None:
    """Make a tensor hold `contents`, this rank's part of them under `reduced_places`, without moving it."""
    private.local_of(tensor).copy_(share(tensor, contents))


def share(tensor: DTensor, contents: torch.Tensor) -> torch.Tensor:
    """What this rank holds of contents that every rank of a tensor's Partial axes has."""
    for axis, place in enumerate(tensor.placements):
        if not isinstance(place, Partial) or place.reduce_op not in SHARES:
            continue
        if private.simulates_ranks() and place.reduce_op == "sum" and contents.is_floating_point():
            contents = contents / tensor.device_mesh.size(axis)  # no rank is the first: all do the same
        elif not is_first(tensor, axis):
            return torch.full_like(contents, SHARES[place.reduce_op])
    return contents


def is_first(tensor: DTensor, axis: int) -> bool:
    """Whether this rank is the first along a mesh axis."""
    return private.own_coordinate(tensor.device_mesh)[axis] == 0
