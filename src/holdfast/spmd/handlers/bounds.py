"""Indices out of range where some rank's part is empty: that rank would see nothing wrong, and wait for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.call import LEAVE, Call, whole
from holdfast.spmd.empties import has_empty
from holdfast.spmd.fallback import gather_and_run
from holdfast.spmd.registry import Rule


def checked(call: Call) -> Any:
    """Every rank looks at the indices; where not every rank has them all, everything is gathered."""
    if not has_empty(call):
        return LEAVE
    tensor = call.values[0]
    if "indices" in call.names:
        indices = {dim: index for dim, index in enumerate(call["indices"]) if index is not None}
    else:
        indices = {call["dim"] % max(tensor.ndim, 1): call["index"]}
    if any(index.dtype in (torch.bool, torch.uint8) or not _is_everywhere(index) for index in indices.values()):
        return gather_and_run(call)
    for dim, index in indices.items():
        values, size = whole(index), tensor.shape[dim]
        wrong = values[(values < -size) | (values >= size)]
        if wrong.numel():
            raise IndexError(f"index {int(wrong[0])} is out of bounds for dimension {dim} with size {size}")
    return LEAVE


def _is_everywhere(index: Any) -> bool:
    return not isinstance(index, DTensor) or all(place.is_replicate() for place in index.placements)


RULES = [
    Rule(
        "indexing",
        ("index.Tensor", "index_select.default"),
        "as torch; whole where a shard is empty and the indices are sharded too",
        "torch raises on some ranks and hangs on those whose part is empty",
        checked,
    ),
]
