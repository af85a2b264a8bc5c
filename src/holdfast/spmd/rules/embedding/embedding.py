"""Embedding lookup with sharded rows or columns, the table's gradient, and max_norm of a Partial table."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import assert_async, can_be_read
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, replicated, wrap
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import FIXED, LETTERS, ChosenPlacements, Signature, run_sharded


def lookup(call: Call) -> Any:
    """Look up the rank's rows and columns; with sharded rows the results are partial sums."""
    table, indices = call["weight"], call["indices"]
    if table.ndim != 2:
        return gather_and_run(call)  # raises on every rank, not only on those that have columns
    if not isinstance(indices, DTensor):  # a scalar, which torch takes to be equal everywhere
        indices = replicated(indices, call.mesh)
    boxed = all(type(place) in (Shard, Replicate, Partial) for place in (*table.placements, *indices.placements))
    is_whole = all(place.is_replicate() for place in table.placements)
    if not boxed or (is_whole and not any(p.is_partial() for p in indices.placements) and not has_empty_input(call)):
        return USE_TORCH  # a replicated table: torch handles it, and caches the decision
    reductions = {place.reduce_op for place in table.placements if isinstance(place, Partial)}
    if reductions - {"sum"} and (len(reductions) > 1 or Shard(0) in table.placements):
        return gather_and_run(call)  # Partials of two reductions
    sizes, offsets = local_box(table.shape, call.mesh, table.placements)
    places: list[Placement] = [
        there if here.is_replicate() and is_shard(there) else Replicate()
        for here, there in zip(table.placements, indices.placements, strict=True)
    ]
    own, local = local_part(indices, places, call.mesh), local_of(table)
    if can_be_read(own):
        if (wrong := own[(own < 0) | (own >= table.shape[0])]).numel():
            raise IndexError(f"index out of range in self: {int(wrong[0])} for a table of {table.shape[0]} rows")
    else:
        assert_async((own >= 0) & (own < table.shape[0]), "an index is out of range for the table")
    out = local.new_zeros(*own.shape, sizes[1])
    if sizes[0]:
        place = own - offsets[0]
        inside = (place >= 0) & (place < sizes[0])
        out = torch.where(inside.unsqueeze(-1), local[place.clamp(0, sizes[0] - 1)], out)
    results = [_result(here, there, indices.ndim) for here, there in zip(table.placements, places, strict=True)]
    return wrap(out, call.mesh, results, (*indices.shape, table.shape[1]))


def renorm(call: Call) -> Any:
    """Renormalise a Partial in its own memory: F.embedding renormalises table.detach(), then reads the table."""
    table = call["self"]
    if not isinstance(table, DTensor) or not any(isinstance(place, Partial) for place in table.placements):
        return USE_TORCH
    rows: dict[ArgSlot, torch.Tensor] = {(0,): full_tensor(table).clone(), (1,): full_tensor(call["indices"])}
    local_of(table).copy_(local_part(call.run(rows), table.placements, call.mesh))
    return table


def _result(table: Placement, indices: Placement, columns: int) -> Placement:
    """Return the placement of the result: Partial for sharded rows, else as the columns or the indices."""
    if table.is_replicate():
        return indices
    if isinstance(table, Partial):
        return table
    return Shard(columns) if is_shard(table) and table.dim == 1 else Partial()


def table_gradient(call: Call) -> Any:
    """Sum the gradient over the shards of the indices; row frequencies need the indices of all ranks."""
    rest = LETTERS[: call["indices"].ndim]
    signature = Signature((rest + "z", rest), (FIXED + "z",), rest + "z")
    if not call["scale_grad_by_freq"]:
        return run_sharded(call, signature)
    uses = torch.bincount(full_tensor(call["indices"]).flatten(), minlength=call["num_weights"])

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
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
