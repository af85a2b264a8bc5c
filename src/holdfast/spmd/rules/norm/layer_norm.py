"""layer_norm over sharded dims: a mean and a variance per row are reduced, the rows are not moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.sharding.byte_costs import accumulation_dtype, is_sharded_along, reducing_is_cheaper
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_axes

NUMBERS = 2  # per row: the mean and the variance forward, two sums of the gradient backward


def _if_cheaper(run: Callable[[Call, int], Any]) -> Callable[[Call], Any]:
    """Return a rule for sharded normalised dims that are long enough; other calls are left to torch."""

    def sharded(call: Call) -> Any:
        source = call["input"]
        first = source.ndim - len(call["normalized_shape"])
        dims = range(first, source.ndim)
        if _fits(call, first) and is_sharded_along(source, dims) and reducing_is_cheaper(source, dims, NUMBERS):
            return run(call, first)
        return torch_2_11.layer_norm(call) if is_torch_2_11() else USE_TORCH

    return sharded


def _fits(call: Call, first: int) -> bool:
    """Return True if one device accepts the sizes; its own error message is the best one."""
    shape = tuple(call["normalized_shape"])
    weights = [call[name] for name in ("weight", "bias") if call[name] is not None]
    return (
        bool(shape)
        and first >= 0
        and all(tuple(sizes) == shape for sizes in (call["input"].shape[first:], *(weight.shape for weight in weights)))
    )


def forward(call: Call, first: int) -> Any:
    """Return the normalised tensor, sharded as before, and the mean and inverse deviation of each row."""
    source, places = call["input"], list(call["input"].placements)
    dims, axes = list(range(first, source.ndim)), sharded_axes(places, range(first, source.ndim))
    own = local_part(source, places, call.mesh)
    exact, count = own.to(accumulation_dtype(own.dtype)), math.prod(source.shape[first:])
    mean = all_reduce(exact.sum(dims, keepdim=True), call.mesh, axes) / count
    centred = exact - mean
    variance = all_reduce((centred * centred).sum(dims, keepdim=True), call.mesh, axes) / count
    scale = (variance + call["eps"]).rsqrt()
    out = centred * scale
    if call["weight"] is not None:
        out = out * local_part(call["weight"], _of_weight(places, first), call.mesh)
    if call["bias"] is not None:
        out = out + local_part(call["bias"], _of_weight(places, first), call.mesh)
    kind = _statistics_dtype(call, own)
    rows = [*source.shape[:first], *[1] * len(dims)]
    whole_rows = [Replicate() if axis in axes else place for axis, place in enumerate(places)]
    return (
        wrap(out.to(own.dtype), call.mesh, places, source.shape),
        wrap(mean.to(kind), call.mesh, whole_rows, rows),
        wrap(scale.to(kind), call.mesh, whole_rows, rows),
    )


def backward(call: Call, first: int) -> Any:
    """Return the gradients of input, weight and bias, sharded as these are; weight and bias are summed over rows."""
    source, places = call["input"], list(call["input"].placements)
    dims, axes = list(range(first, source.ndim)), sharded_axes(places, range(first, source.ndim))
    whole_rows = [Replicate() if axis in axes else place for axis, place in enumerate(places)]
    own = local_part(source, places, call.mesh)
    exact = accumulation_dtype(own.dtype)
    mean, scale = (local_part(call[name], whole_rows, call.mesh).to(exact) for name in ("mean", "rstd"))
    normal, incoming = (own.to(exact) - mean) * scale, local_part(call["grad_out"], places, call.mesh).to(exact)
    wanted = call["output_mask"]
    gradient = None
    if wanted[0]:
        weight = call["weight"]
        slope = (
            incoming
            if weight is None
            else incoming * local_part(weight, _of_weight(places, first), call.mesh).to(exact)
        )
        sums = torch.stack([slope.sum(dims, keepdim=True), (slope * normal).sum(dims, keepdim=True)])
        straight, along = all_reduce(sums, call.mesh, axes) / math.prod(source.shape[first:])
        gradient = wrap((scale * (slope - straight - normal * along)).to(own.dtype), call.mesh, places, source.shape)
    return gradient, *(
        _summed(call, first, places, part) if wanted[place] and call[name] is not None else None
        for place, name, part in ((1, "weight", incoming * normal), (2, "bias", incoming))
    )


def _summed(call: Call, first: int, places: list[Placement], part: torch.Tensor) -> Any:
    """Return the gradient of weight or bias, a partial sum over the shards of the rows."""
    rows = list(range(first))
    total = part.sum(rows) if rows else part
    summed = [
        Partial() if is_shard(place) and place.dim < first else new
        for place, new in zip(places, _of_weight(places, first), strict=True)
    ]
    return wrap(total.to(call["input"].dtype), call.mesh, summed, call["input"].shape[first:])


def _of_weight(places: list[Placement], first: int) -> list[Placement]:
    """Return the placements of a tensor of the normalised shape."""
    return [Shard(place.dim - first) if is_shard(place) and place.dim >= first else Replicate() for place in places]


def _statistics_dtype(call: Call, own: torch.Tensor) -> torch.dtype:
    """Return the dtype of one device: CPUs keep half precision means, unless the weight is wider."""
    weight = call["weight"]
    alike = weight is None or weight.dtype == own.dtype
    return own.dtype if own.device.type == "cpu" and alike else accumulation_dtype(own.dtype)


PLACES = "every dim; a Partial is reduced first"
WHY = "torch gathers the rows, forward and backward, where they are sharded"
RULES = [
    Rule("norm", ("native_layer_norm.default",), PLACES, WHY, _if_cheaper(forward)),
    Rule("norm", ("native_layer_norm_backward.default",), PLACES, WHY, _if_cheaper(backward)),
]
