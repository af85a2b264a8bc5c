"""cat along the sharded dim: each rank fetches the rows of its shard of the result."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.row_exchange import RowExchange, Span, shard_spans
from holdfast.spmd.sharding.shard_sizes import has_empty_shard, only_sharding_axis


def cat(call: Call) -> Any:
    """Concatenate tensors of equal placements along a dim that one mesh axis shards."""
    tensors = call["tensors"]
    if len(counted := _counted(tensors)) < len(tensors):
        return apply(call.op, (counted, call["dim"]))
    first = tensors[0]
    if not isinstance(first, DTensor) or first.ndim < 2:  # torch gathers vectors anyway, for the products that use them
        return USE_TORCH
    dim = call["dim"] % first.ndim
    axis = only_sharding_axis(first, dim)
    if axis is None or not all(_is_placed_as(tensor, first, dim) for tensor in tensors):
        return USE_TORCH
    exchanges = _exchanges(tensors, dim, axis)
    if not _is_cheaper(exchanges, tensors):
        return USE_TORCH
    pieces = [exchange.fetch(local_of(tensor)) for exchange, tensor in zip(exchanges, tensors, strict=True)]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return wrap(torch.cat(pieces, dim), call.mesh, first.placements, shape)


def _counted(tensors: list[Any]) -> list[Any]:
    """Return the tensors that have a part in the result: beside others, torch ignores vectors without elements."""
    counted = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    if not any(tensor.ndim > 1 for tensor in counted):
        return tensors
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in counted]


def _is_placed_as(tensor: Any, first: DTensor, dim: int) -> bool:
    """Return True if `tensor` has no empty shard and matches `first` in placements and in sizes except `dim`."""
    if not isinstance(tensor, DTensor) or tensor.ndim != first.ndim or tensor.dtype != first.dtype:
        return False
    sizes = zip(tensor.shape, first.shape, strict=True)
    return (
        tuple(tensor.placements) == tuple(first.placements)
        and all(own == other or place == dim for place, (own, other) in enumerate(sizes))
        and tensor.shape[dim] > 0
        and not has_empty_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    )


def _exchanges(tensors: list[DTensor], dim: int, axis: int) -> list[RowExchange]:
    """Return for each tensor the rows that fall into each rank's shard of the result."""
    mesh = tensors[0].device_mesh
    results = shard_spans(sum(tensor.shape[dim] for tensor in tensors), mesh.size(axis))
    exchanges, start = [], 0
    for tensor in tensors:
        size = tensor.shape[dim]
        overlaps = [span.within(Span(start, start + size)) for span in results]
        wants = tuple(Span(part.start - start, part.stop - start) if part.size else Span(0, 0) for part in overlaps)
        exchanges.append(RowExchange(mesh, axis, dim, tuple(shard_spans(size, mesh.size(axis))), wants))
        start += size
    return exchanges


def _is_cheaper(exchanges: list[RowExchange], tensors: list[DTensor]) -> bool:
    """Return True if a rank receives fewer rows, forward and backward, than gathering takes.

    A gradient is sharded again: it may take a shard of each tensor.
    """
    ranks = len(exchanges[0].has)
    received = max(
        sum(exchange.wants[rank].size - exchange.wants[rank].within(exchange.has[rank]).size for exchange in exchanges)
        for rank in range(ranks)
    )
    shards = sum(exchange.has[0].size for exchange in exchanges)
    twice = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not in_gradient()
    return received + (shards if twice else 0) <= shards * (ranks - 1)


RULES = [
    Rule(
        "along",
        ("cat.default",),
        "every dim, if all tensors have the same placements",
        "torch gathers the tensors",
        cat,
    )
]
