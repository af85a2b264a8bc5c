"""In-place changes of shape: the tensor keeps its memory, its dims move, come or go."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, apply, is_shard, moved, whole
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.dim_checks import out_of_range


def turn(call: Call) -> Any:
    """t_ and transpose_: each rank turns its own part, and the shards change dims with it."""
    tensor = call.values[0]
    first, second = (0, 1) if tensor.ndim == 2 else (0, 0)
    if "dim0" in call.names:
        first, second = call["dim0"] % tensor.ndim, call["dim1"] % tensor.ndim
    _make_boxed(tensor)
    turned = {first: second, second: first}
    places = [Shard(turned.get(p.dim, p.dim)) if is_shard(p) else p for p in tensor.placements]
    private.turn(call.op, tensor, private.local_of(tensor).transpose(first, second), places, call.values[1:])
    return tensor


def widen(call: Call) -> Any:
    """unsqueeze_: the shards of later dims move on by one."""
    tensor, dim = call.values[0], call["dim"]
    if not -tensor.ndim - 1 <= dim <= tensor.ndim:
        raise out_of_range(dim, tensor.ndim + 1)
    dim %= tensor.ndim + 1
    _make_boxed(tensor)
    places = [Shard(p.dim + (p.dim >= dim)) if is_shard(p) else p for p in tensor.placements]
    private.turn(call.op, tensor, private.local_of(tensor).unsqueeze(dim), places, call.values[1:])
    return tensor


def narrow(call: Call) -> Any:
    """squeeze_: the dims that are 1 on one device, whatever their length on this rank."""
    tensor = call.values[0]
    named = call["dim"] if "dim" in call.names else list(range(tensor.ndim))
    named = [named] if isinstance(named, int) else list(named)
    gone = {dim % tensor.ndim for dim in named if tensor.ndim and tensor.shape[dim] == 1}
    _make_boxed(tensor)
    if any(is_shard(place) and place.dim in gone for place in tensor.placements):
        kept = [Replicate() if is_shard(place) and place.dim in gone else place for place in tensor.placements]
        private.replace_contents(tensor, moved(tensor, kept, call.mesh), kept)
    places = [Shard(p.dim - sum(dim < p.dim for dim in gone)) if is_shard(p) else p for p in tensor.placements]
    private.turn(call.op, tensor, private.local_of(tensor).squeeze(tuple(gone)), places, call.values[1:])
    return tensor


def copied(call: Call) -> Any:
    """squeeze_copy: as squeeze, then a copy."""
    view = private.operator(f"squeeze.{call.op._overloadname}")
    return apply(view, call.values).clone()


def _make_boxed(tensor: DTensor) -> None:
    """Gather a tensor one of whose placements has no box: how its shards would change is not known."""
    if not all(is_shard(place) or place.is_replicate() or place.is_partial() for place in tensor.placements):
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        private.replace_contents(tensor, whole(tensor), everywhere)


WRONG = "torch squeezes the rank's part and leaves the shape of the whole as it was"
RULES = [
    Rule("view", ("t_.default", "transpose_.default"), "every dim", "torch has no strategy", turn),
    Rule("view", ("unsqueeze_.default",), "every dim", "torch has no strategy", widen),
    Rule("view", ("squeeze_.default", "squeeze_.dim", "squeeze_.dims"), "dims that stay", WRONG, narrow),
    Rule("view", ("squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims"), "dims that stay", WRONG, copied),
]
