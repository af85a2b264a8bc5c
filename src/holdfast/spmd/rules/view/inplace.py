"""t_, transpose_, unsqueeze_, squeeze_ and squeeze_copy: dims are permuted, added or removed in place."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base.call import Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_dispatch import operator
from holdfast.spmd.base.torch_specs import local_of, replace_contents, reshape_in_place
from holdfast.spmd.sharding.dim_checks import dim_out_of_range
from holdfast.spmd.sharding.local_parts import full_tensor, local_part
from holdfast.spmd.sharding.shard_sizes import is_shard


def transpose(call: Call) -> Any:
    """Run t_ and transpose_: each rank transposes its own shard, and placements change dims."""
    tensor = call.values[0]
    first, second = (0, 1) if tensor.ndim == 2 else (0, 0)
    if "dim0" in call.names:
        first, second = call["dim0"] % tensor.ndim, call["dim1"] % tensor.ndim
    _gather_strided(tensor)
    swapped = {first: second, second: first}
    places = [Shard(swapped.get(p.dim, p.dim)) if is_shard(p) else p for p in tensor.placements]
    reshape_in_place(call.op, tensor, local_of(tensor).transpose(first, second), places, call.values[1:])
    return tensor


def unsqueeze(call: Call) -> Any:
    """Run unsqueeze_: shards of later dims move by one."""
    tensor, dim = call.values[0], call["dim"]
    if not -tensor.ndim - 1 <= dim <= tensor.ndim:
        raise dim_out_of_range(dim, tensor.ndim + 1)
    dim %= tensor.ndim + 1
    _gather_strided(tensor)
    places = [Shard(p.dim + (p.dim >= dim)) if is_shard(p) else p for p in tensor.placements]
    reshape_in_place(call.op, tensor, local_of(tensor).unsqueeze(dim), places, call.values[1:])
    return tensor


def squeeze(call: Call) -> Any:
    """Run squeeze_: remove the dims of global size 1, whatever their size on this rank."""
    tensor = call.values[0]
    named = call["dim"] if "dim" in call.names else list(range(tensor.ndim))
    named = [named] if isinstance(named, int) else list(named)
    gone = {dim % tensor.ndim for dim in named if tensor.ndim and tensor.shape[dim] == 1}
    _gather_strided(tensor)
    if any(is_shard(place) and place.dim in gone for place in tensor.placements):
        kept = [Replicate() if is_shard(place) and place.dim in gone else place for place in tensor.placements]
        replace_contents(tensor, local_part(tensor, kept, call.mesh), kept)
    places = [Shard(p.dim - sum(dim < p.dim for dim in gone)) if is_shard(p) else p for p in tensor.placements]
    reshape_in_place(call.op, tensor, local_of(tensor).squeeze(tuple(gone)), places, call.values[1:])
    return tensor


def squeeze_copy(call: Call) -> Any:
    """Run squeeze_copy: squeeze, then copy."""
    view = operator(f"squeeze.{call.op._overloadname}")
    return apply(view, call.values).clone()


def _gather_strided(tensor: DTensor) -> None:
    """Gather a tensor with a strided shard: how such shards would change is unknown."""
    if not all(is_shard(place) or place.is_replicate() or place.is_partial() for place in tensor.placements):
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        replace_contents(tensor, full_tensor(tensor), everywhere)


WRONG = "torch squeezes the rank's part and leaves the global shape unchanged"
RULES = [
    Rule("view", ("t_.default", "transpose_.default"), "every dim", "torch has no strategy", transpose),
    Rule("view", ("unsqueeze_.default",), "every dim", "torch has no strategy", unsqueeze),
    Rule("view", ("squeeze_.default", "squeeze_.dim", "squeeze_.dims"), "dims that stay", WRONG, squeeze),
    Rule(
        "view", ("squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims"), "dims that stay", WRONG, squeeze_copy
    ),
]
