"""Rules for torch 2.11 only: squeeze, take, constant_pad_nd, rms_norm; helpers for index, layer_norm, min and max."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call, call_with_positive_dim
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.sharding import index_checks
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.shard_sizes import chunk_sizes, is_evenly_sharded, is_shard, sharded_axes


def gather_if_sharded(call: Call) -> Any:
    """Gather unless every tensor is replicated."""
    tensors = [tensor for _, tensor in call.tensor_args() if isinstance(tensor, DTensor)]
    return (
        USE_TORCH
        if all(place.is_replicate() for item in tensors for place in item.placements)
        else gather_and_run(call)
    )


def layer_norm(call: Call) -> Any:
    """Leave to torch if every rank has full rows and the full weight, and nothing is Partial."""
    source = call["input"]
    first = source.ndim - len(call["normalized_shape"])
    places = [place for _, item in call.tensor_args() if isinstance(item, DTensor) for place in item.placements]
    affine = [call[name] for name in ("weight", "bias") if name in call.names]
    weights = [weight.placements for weight in affine if isinstance(weight, DTensor)]
    sharded = any(is_shard(place) and place.dim >= first for place in source.placements)
    sharded = sharded or any(is_shard(place) for placements in weights for place in placements)
    return gather_and_run(call) if sharded or any(place.is_partial() for place in places) else USE_TORCH


def index(call: Call) -> Any:
    """Gather a Partial with sharded indices: torch 2.11 takes its parts for shards."""
    answer = index_checks.with_replicated_indices(call)
    if answer is not USE_TORCH:
        return answer
    tensor, *indices = [item for _, item in call.tensor_args() if isinstance(item, DTensor)]
    partial_axes = [axis for axis, place in enumerate(tensor.placements) if place.is_partial()]
    differ = any(not item.placements[axis].is_replicate() for item in indices for axis in partial_axes)
    return gather_and_run(call) if differ else USE_TORCH


def select(call: Call) -> Any:
    """Run index_select as `index`; also gather if torch would gather shards, since 2.11 forgets a Partial then."""
    answer = index(call)
    if answer is not USE_TORCH:
        return answer
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    gathers = any(is_shard(place) and place.dim == dim for place in tensor.placements) or has_empty_input(call)
    return gather_and_run(call) if gathers else USE_TORCH


def extreme_along(call: Call) -> Any:
    """Run min and max with indices: torch 2.11 joins each rank's extreme if shards are even and `dim` is positive."""
    tensor = call.values[0]
    dim = call["dim"] % max(tensor.ndim, 1)
    if not any(is_shard(place) and place.dim == dim for place in tensor.placements):
        return USE_TORCH
    if not all(is_evenly_sharded(tensor, dim) for dim in range(tensor.ndim)):
        return gather_and_run(call)
    return USE_TORCH if call["dim"] >= 0 else call_with_positive_dim(call, tensor.ndim)


def squeeze(call: Call) -> Any:
    """Squeeze the dims of global size 1, by name: torch 2.11 also drops dims of which a rank has one row."""
    tensor = call.values[0]
    named = call["dim"] if "dim" in call.names else range(tensor.ndim)
    dims = {dim % max(tensor.ndim, 1) for dim in ([named] if isinstance(named, int) else named)}
    if not any(_may_have_one_row(tensor, dim) for dim in dims if dim < tensor.ndim):
        return USE_TORCH
    dropped = sorted(dim for dim in dims if tensor.shape[dim] == 1)
    if not dropped:
        return torch.ops.aten.alias.default(tensor)
    for dim in reversed(dropped):
        tensor = torch.ops.aten.squeeze.dim(tensor, dim)
    return tensor


def _may_have_one_row(tensor: DTensor, dim: int) -> bool:
    """Return True if some rank has one row of a dim that has more."""
    sizes = {tensor.shape[dim]}
    for axis in sharded_axes(tensor.placements, (dim,)):
        sizes = {part for size in sizes for part in chunk_sizes(size, tensor.device_mesh.size(axis))}
    return tensor.shape[dim] > 1 and 1 in sizes


RULES = (
    [
        Rule(
            "view",
            ("squeeze.default", "squeeze.dim", "squeeze.dims"),
            "every dim",
            "torch 2.11 squeezes each rank's part: a rank with one row loses a dim",
            squeeze,
        ),
        Rule(
            "indexing",
            ("take.default",),
            "none: gathered on torch 2.11",
            "torch 2.11 also sums values that a shard lacks, once for each rank of a Partial",
            gather_if_sharded,
        ),
        Rule(
            "batched",
            ("constant_pad_nd.default",),
            "none: gathered on torch 2.11",
            "torch 2.11 knows one mesh axis only, and takes one padding for another",
            gather_and_run,
        ),
        Rule(
            "norm",
            ("_fused_rms_norm.default", "_fused_rms_norm_backward.default"),  # rms_norm on GPUs
            "all but the normalised dims on torch 2.11; a Partial is gathered",
            "torch 2.11 normalises each shard of a row, or each part of a Partial, in some of these",
            layer_norm,
        ),
    ]
    if is_torch_2_11()
    else []
)
