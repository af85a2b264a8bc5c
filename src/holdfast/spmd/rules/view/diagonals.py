"""diagonal, diag_embed, view_as_real, gradients of diagonal and unfold: every other dim may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from holdfast.spmd.base import torch_specs
from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_dispatch import global_outputs
from holdfast.spmd.base.torch_specs import local_of, make_spec
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import FIXED, LETTERS, ChosenPlacements, Signature, run_sharded


def _pair(call: Call, dims: int) -> set[int]:
    """Return the two dims of a diagonal."""
    return {call["dim1"] % dims, call["dim2"] % dims}


def _without(fixed: set[int], dims: int) -> str:
    """Return letters for a tensor of `dims` dims; the dims in `fixed` stay whole."""
    return "".join(FIXED if dim in fixed else LETTERS[dim] for dim in range(dims))


def diag_embed(call: Call) -> Any:
    """Embed rows as the diagonals of matrices."""
    dims = call.values[0].ndim + 1
    result = _without(_pair(call, dims), dims)
    kept = result.replace(FIXED, "")
    return run_sharded(call, Signature((kept + FIXED,), (result,), kept))


def diagonal_backward(call: Call) -> Any:
    """Return the gradient of a diagonal, in a matrix of zeros."""
    dims = len(call["input_sizes"])
    result = _without(_pair(call, dims), dims)
    kept = result.replace(FIXED, "")
    return run_sharded(call, Signature((kept + FIXED,), (result,), kept), _with_own_sizes)


def unfold_backward(call: Call) -> Any:
    """Return the gradient of sliding windows, summed where they overlap."""
    dims = len(call["input_sizes"])
    if not dims:
        return USE_TORCH
    result = _without({call["dim"] % dims}, dims)
    return run_sharded(call, Signature((result + FIXED,), (result,), result.replace(FIXED, "")), _with_own_sizes)


def _with_own_sizes(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
    """Run with the sizes of this rank's shard instead of the global sizes."""
    call = chosen.call
    source, result = chosen.signature.inputs[0], chosen.signature.outputs[0]
    own = tensors[0,].shape
    sizes = [
        size if letter == FIXED else own[source.index(letter)]
        for letter, size in zip(result, call["input_sizes"], strict=True)
    ]
    return call.run(tensors, input_sizes=sizes)  # type: ignore[no-any-return]


def diagonal(call: Call) -> Any:
    """Return each rank's view of its own shard."""
    tensor = call.values[0]
    pair = _pair(call, tensor.ndim)
    if not isinstance(tensor, DTensor) or any(is_shard(place) and place.dim in pair for place in tensor.placements):
        return USE_TORCH
    return _view(call, lambda dim: dim - sum(gone < dim for gone in pair))


def view_as_real(call: Call) -> Any:
    """Run view_as_real: the two components of a number stay together."""
    return _view(call, lambda dim: dim) if isinstance(call.values[0], DTensor) else USE_TORCH


def _view(call: Call, new_dim: Any) -> Any:
    """Take the view of this rank's part, with the shards under their new dims."""
    tensor = call.values[0]
    if not all(is_shard(place) or place.is_replicate() or place.is_partial() for place in tensor.placements):
        return USE_TORCH
    places = [Shard(new_dim(place.dim)) if is_shard(place) else place for place in tensor.placements]
    meta = global_outputs(call.info)
    seen = call.run({(0,): local_of(tensor)})
    return torch_specs.wrap(seen, make_spec(call.mesh, places, meta.shape, meta.stride, meta.dtype))


WHY = "torch gathers the stack of matrices"
RULES = [
    Rule("view", ("diagonal.default",), "every dim but the two of the diagonal", WHY, diagonal),
    Rule("view", ("diag_embed.default",), "every dim but the two of the diagonal", WHY, diag_embed),
    Rule("view", ("diagonal_backward.default",), "every dim but the two of the diagonal", WHY, diagonal_backward),
    Rule("view", ("unfold_backward.default",), "every dim but `dim`", "torch has no strategy", unfold_backward),
    Rule("view", ("view_as_real.default",), "every dim", "torch gathers when rows are fewer than ranks", view_as_real),
]
