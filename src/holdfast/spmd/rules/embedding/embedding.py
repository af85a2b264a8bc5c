"""Embedding tables whose rows are sharded, and gradients scaled by how often a row was used."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, Spot, is_shard, moved, replicated, whole, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.pointwise.pointwise import LETTERS
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded


def lookup(call: Call) -> Any:
    """Each rank looks up the rows and columns that it has; where rows are missing the results are summed."""
    table, indices = call["weight"], call["indices"]
    if table.ndim != 2:
        return gather_and_run(call)  # which raises on every rank, not only on those that have columns
    if not isinstance(indices, DTensor):  # one number, which torch takes to be the same everywhere
        indices = replicated(indices, call.mesh)
    boxed = all(type(place) in (Shard, Replicate, Partial) for place in (*table.placements, *indices.placements))
    is_whole = all(place.is_replicate() for place in table.placements)
    if not boxed or (is_whole and not any(p.is_partial() for p in indices.placements) and not has_empty(call)):
        return LEAVE  # a whole table: torch does it, and remembers how
    parts = {place.reduce_op for place in table.placements if isinstance(place, Partial)}
    if parts - {"sum"} and (len(parts) > 1 or Shard(0) in table.placements):
        return gather_and_run(call)  # parts that are reduced in two ways
    sizes, offsets = private.local_box(table.shape, call.mesh, table.placements)
    places: list[Placement] = [
        there if here.is_replicate() and is_shard(there) else Replicate()
        for here, there in zip(table.placements, indices.placements, strict=True)
    ]
    own, local = moved(indices, places, call.mesh), private.local_of(table)
    if private.can_be_read(own):
        if (wrong := own[(own < 0) | (own >= table.shape[0])]).numel():
            raise IndexError(f"index out of range in self: {int(wrong[0])} for a table of {table.shape[0]} rows")
    else:
        private.insist((own >= 0) & (own < table.shape[0]), "an index is out of range for the table")
    out = local.new_zeros(*own.shape, sizes[1])
    if sizes[0]:
        place = own - offsets[0]
        inside = (place >= 0) & (place < sizes[0])
        out = torch.where(inside.unsqueeze(-1), local[place.clamp(0, sizes[0] - 1)], out)
    results = [_result(here, there, indices.ndim) for here, there in zip(table.placements, places, strict=True)]
    return wrap(out, call.mesh, results, (*indices.shape, table.shape[1]))


def renorm(call: Call) -> Any:
    """A Partial stays one, in its own memory: F.embedding renormalises table.detach(), and then reads the table."""
    table = call["self"]
    if not isinstance(table, DTensor) or not any(isinstance(place, Partial) for place in table.placements):
        return LEAVE
    rows: dict[Spot, torch.Tensor] = {(0,): whole(table).clone(), (1,): whole(call["indices"])}
    private.local_of(table).copy_(moved(call.run(rows), table.placements, call.mesh))
    return table


def _result(table: Placement, indices: Placement, columns: int) -> Placement:
    """Sharded rows give a sum, parts the same parts, sharded columns columns; a whole table lies as the indices do."""
    if table.is_replicate():
        return indices
    if isinstance(table, Partial):
        return table
    return Shard(columns) if is_shard(table) and table.dim == 1 else Partial()


def table_gradient(call: Call) -> Any:
    """Summed over the shards of the indices; how often a row was used is known only to all of them together."""
    rest = LETTERS[: call["indices"].ndim]
    signature = Signature((rest + "z", rest), (FIXED + "z",), rest + "z")
    if not call["scale_grad_by_freq"]:
        return run_sharded(call, signature)
    uses = torch.bincount(whole(call["indices"]).flatten(), minlength=call["num_weights"])

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> torch.Tensor:
        gradient, indices = tensors[0,], tensors[1,]
        scaled = gradient / uses[indices].clamp(min=1).unsqueeze(-1)
        return call.run({(0,): scaled, (1,): indices}, scale_grad_by_freq=False)  # type: ignore[no-any-return]

    return run_sharded(call, signature, local)


WHY = "torch's result can be read only once, and the masks of several axes are mixed up"
RULES = [
    Rule("embedding", ("embedding.default",), "rows and columns by any axes, indices", WHY, lookup),
    Rule(
        "embedding",
        ("embedding_renorm_.default",),
        "none: gathered; a Partial stays one",
        "max_norm of a table that is a Partial was lost",
        renorm,
    ),
    Rule(
        "embedding",
        ("embedding_dense_backward.default",),
        "indices and columns; with scale_grad_by_freq every rank sees all indices",
        "torch counts the uses of a row on each shard by itself",
        table_gradient,
    ),
]
