"""Embedding tables whose rows are sharded, and gradients scaled by how often a row was used."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, is_shard, moved, wrap
from holdfast.spmd.fallback import gather_and_run
from holdfast.spmd.registry import Rule


def lookup(call: Call) -> Any:
    """Each rank looks up the rows that it has; the results are summed."""
    table, indices = call["weight"], call["indices"]
    rows = [axis for axis, place in enumerate(table.placements) if is_shard(place) and place.dim == 0]
    if not rows:
        return LEAVE
    sizes, offsets = private.local_box(table.shape, call.mesh, table.placements)
    kept: list[Placement] = [place if place == Shard(0) else Replicate() for place in table.placements]
    places: list[Placement] = []
    for axis, place in enumerate(indices.placements):
        places.append(place if axis not in rows and is_shard(place) else Replicate())
    own, local = moved(indices, places, call.mesh), moved(table, kept, call.mesh)
    if own.device.type == "cpu" and (wrong := own[(own < 0) | (own >= table.shape[0])]).numel():
        raise IndexError(f"index {int(wrong[0])} is out of range for a table of {table.shape[0]} rows")
    out = local.new_zeros(*own.shape, table.shape[1])
    if sizes[0]:
        place = own - offsets[0]
        inside = (place >= 0) & (place < sizes[0])
        out = torch.where(inside.unsqueeze(-1), local[place.clamp(0, sizes[0] - 1)], out)
    results = [Partial() if axis in rows else there for axis, there in enumerate(places)]
    return wrap(out, call.mesh, results, (*indices.shape, table.shape[1]))


def table_gradient(call: Call) -> Any:
    """How often a row was used is known only to all shards together."""
    return gather_and_run(call) if call["scale_grad_by_freq"] else LEAVE


WHY = "torch's result can be read only once, and the masks of several axes are mixed up"
RULES = [
    Rule("embedding", ("embedding.default",), "rows, by any axes", WHY, lookup),
    Rule(
        "embedding",
        ("embedding_dense_backward.default",),
        "as torch; whole with scale_grad_by_freq",
        "torch counts the uses of a row on each shard by itself",
        table_gradient,
    ),
]
