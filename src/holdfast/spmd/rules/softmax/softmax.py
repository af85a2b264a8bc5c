"""softmax and log_softmax along a sharded dim: maxima and sums are reduced, the scores are not moved."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.shard_sizes import is_shard

SHORTEST = 8  # along a shorter dim the reductions would move as much as gathering


def _axes(call: Call, tensor: Any) -> list[int]:
    """Return the axes that shard the normalised dim; none if the dim is too short for reductions to be cheaper."""
    if not isinstance(tensor, DTensor) or not tensor.ndim or tensor.shape[call["dim"] % tensor.ndim] < SHORTEST:
        return []
    dim = call["dim"] % tensor.ndim
    return [axis for axis, place in enumerate(tensor.placements) if is_shard(place) and place.dim == dim]


def shard_placements(tensor: DTensor) -> list[Placement]:
    return [place if is_shard(place) else Replicate() for place in tensor.placements]


def forward(call: Call) -> Any:
    """Reduce two numbers per row."""
    tensor = call.values[0]
    axes = _axes(call, tensor)
    if not axes or call["half_to_float"] or any(isinstance(place, Partial) for place in tensor.placements):
        return USE_TORCH
    return normalised(call, axes)


def normalised(call: Call, axes: list[int]) -> DTensor:
    """Return the (log) softmax of scores whose normalised dim is sharded by `axes`."""
    tensor, dim = call.values[0], call["dim"]
    local = local_part(tensor, shard_placements(tensor), call.mesh)
    exact = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    shape = list(local.shape)
    shape[dim] = 1
    own = exact.amax(dim, keepdim=True) if local.shape[dim] else exact.new_full(shape, float("-inf"))
    shifted = exact - all_reduce(own, call.mesh, axes, "max")
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), call.mesh, axes)
    logarithmic = "log" in call.op._schema.name
    out = shifted - total.log() if logarithmic else shifted.exp() / total
    return wrap(out.to(local.dtype), call.mesh, shard_placements(tensor), tensor.shape)


def backward(call: Call) -> Any:
    """Reduce one number per row."""
    output = call["output"]
    sharded = output if _axes(call, output) else call["grad_output"]
    axes = _axes(call, sharded)
    if not axes or call["input_dtype"] != output.dtype:
        return USE_TORCH
    return gradient_of(call, axes, shard_placements(sharded))


def gradient_of(call: Call, axes: list[int], places: list[Placement], row_sums: torch.Tensor | None = None) -> DTensor:
    """Return the gradient of the scores; known `row_sums` spare log_softmax its reduction."""
    gradient, output, dim = call["grad_output"], call["output"], call["dim"]
    grad, out = local_part(gradient, places, call.mesh), local_part(output, places, call.mesh)
    exact = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    grad, values = grad.to(exact), out.to(exact)
    if "log" in call.op._schema.name:
        if row_sums is None:
            row_sums = all_reduce(grad.sum(dim, keepdim=True), call.mesh, axes)
        inner = grad - values.exp() * row_sums
    else:
        inner = values * (grad - all_reduce((grad * values).sum(dim, keepdim=True), call.mesh, axes))
    return wrap(inner.to(out.dtype), call.mesh, places, output.shape)


WHY = "torch gathers the scores: with the classes of a large vocabulary sharded, all of them"
BACKWARD = ("_softmax_backward_data.default", "_log_softmax_backward_data.default")
RULES = [
    Rule("softmax", ("_softmax.default", "_log_softmax.default"), "every dim", WHY, forward),
    Rule("softmax", BACKWARD, "every dim", WHY, backward),
]
