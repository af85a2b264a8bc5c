"""cat along the sharded dim: each rank asks for the rows that its part of the result is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.indexing.lookup import only_axis
from holdfast.spmd.sharding.mesh_collectives import has_empty_shard
from holdfast.spmd.sharding.row_exchange import Exchange, Span, spans_of


def join(call: Call) -> Any:
    """Tensors that all lie alike, along a dim that one mesh axis shards."""
    tensors = call["tensors"]
    first = tensors[0]
    if not isinstance(first, DTensor) or first.ndim < 2:  # vectors go on into products, for each of which torch gathers
        return LEAVE
    dim = call["dim"] % first.ndim
    axis = only_axis(first, dim)
    if axis is None or not all(_lies_as(tensor, first, dim) for tensor in tensors):
        return LEAVE
    exchanges = _exchanges(tensors, dim, axis)
    if not _pays(exchanges, tensors):
        return LEAVE
    pieces = [exchange.fetch(private.local_of(tensor)) for exchange, tensor in zip(exchanges, tensors, strict=True)]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return wrap(torch.cat(pieces, dim), call.mesh, first.placements, shape)


def _lies_as(tensor: Any, first: DTensor, dim: int) -> bool:
    """Whether a tensor has the shards of the first, none of them empty, and its sizes but along `dim`."""
    if not isinstance(tensor, DTensor) or tensor.ndim != first.ndim or tensor.dtype != first.dtype:
        return False
    sizes = zip(tensor.shape, first.shape, strict=True)
    return (
        tuple(tensor.placements) == tuple(first.placements)
        and all(own == other or place == dim for place, (own, other) in enumerate(sizes))
        and tensor.shape[dim] > 0
        and not has_empty_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    )


def _exchanges(tensors: list[DTensor], dim: int, axis: int) -> list[Exchange]:
    """For each tensor: which of its rows lie in each rank's part of the result."""
    mesh = tensors[0].device_mesh
    results = spans_of(sum(tensor.shape[dim] for tensor in tensors), mesh.size(axis))
    exchanges, start = [], 0
    for tensor in tensors:
        size = tensor.shape[dim]
        parts = [span.within(Span(start, start + size)) for span in results]
        wants = tuple(Span(part.start - start, part.stop - start) if part.size else Span(0, 0) for part in parts)
        exchanges.append(Exchange(mesh, axis, dim, tuple(spans_of(size, mesh.size(axis))), wants))
        start += size
    return exchanges


def _pays(exchanges: list[Exchange], tensors: list[DTensor]) -> bool:
    """Whether the rows that a rank receives, and those that the gradients on their way back take, are fewer than all.

    A gradient is cut into shards of its own again: it may take a shard of each tensor.
    """
    ranks = len(exchanges[0].has)
    received = max(
        sum(exchange.wants[rank].size - exchange.wants[rank].within(exchange.has[rank]).size for exchange in exchanges)
        for rank in range(ranks)
    )
    shards = sum(exchange.has[0].size for exchange in exchanges)
    twice = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not private.in_gradient()
    return received + (shards if twice else 0) <= shards * (ranks - 1)


RULES = [Rule("along", ("cat.default",), "every dim, where all tensors lie alike", "torch gathers the tensors", join)]
