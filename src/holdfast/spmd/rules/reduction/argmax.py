"""argmin and argmax: each rank's extreme and its index are compared, and among equals the first one is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box
from holdfast.spmd.rules.reduction.minmax import worst_value
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_gather
from holdfast.spmd.sharding.shard_sizes import is_shard

NOWHERE = 2**62


def argmax_or_argmin(call: Call) -> Any:
    """Return the index of the extreme along `dim`, or in the flattened tensor."""
    tensor, dim = call.values[0], call["dim"]
    largest = "max" in call.op._schema.name
    if not isinstance(tensor, DTensor) or not tensor.ndim or not tensor.numel():
        return USE_TORCH
    over = set(range(tensor.ndim)) if dim is None else {dim % tensor.ndim}
    kept: list[Placement] = [place if is_shard(place) else Replicate() for place in tensor.placements]
    axes = [axis for axis, place in enumerate(kept) if is_shard(place) and place.dim in over]
    if not axes and not call.mesh.ndim:
        return USE_TORCH
    _, place = global_extreme(tensor, kept, axes, dim, largest)
    return _result(call, tensor, kept, over, place)


def global_extreme(
    tensor: DTensor, kept: list[Placement], axes: list[int], dim: int | None, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme of all ranks along `axes`, and its first index; NaN beats every number."""
    mesh = tensor.device_mesh
    value, place = _local_extreme(tensor, local_part(tensor, kept, mesh), kept, dim, largest)
    for axis in axes:
        values, places = all_gather(value, mesh, axis), all_gather(place, mesh, axis)
        best = (values.argmax if largest else values.argmin)(0, keepdim=True)
        value = values.gather(0, best)[0]
        equal = (values == value) | (values.isnan() & value.isnan())
        place = torch.where(equal, places, NOWHERE).amin(0)
    return value, place


def _local_extreme(
    tensor: DTensor, local: torch.Tensor, kept: list[Placement], dim: int | None, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's extreme, and its index in the full tensor; reduced dims keep size 1."""
    _, offsets = local_box(tensor.shape, tensor.device_mesh, kept)
    shape = [1] * local.ndim if dim is None else [1 if d == dim % local.ndim else n for d, n in enumerate(local.shape)]
    if local.numel() == 0:
        nothing = torch.full(shape, worst_value(local.dtype, largest), dtype=local.dtype, device=local.device)
        return nothing, torch.full(shape, NOWHERE, dtype=torch.int64, device=local.device)
    index = (torch.argmax if largest else torch.argmin)(local, dim, keepdim=dim is not None)
    if dim is not None:
        return local.gather(dim, index), index + offsets[dim % local.ndim]
    flat = torch.zeros_like(index)
    where = torch.unravel_index(index, local.shape)
    for here, offset, size in zip(where, offsets, tensor.shape, strict=True):
        flat = flat * size + here + offset
    return local.reshape(-1)[index].reshape(shape), flat.reshape(shape)


def _result(call: Call, tensor: DTensor, kept: list[Placement], over: set[int], place: torch.Tensor) -> DTensor:
    places: list[Placement] = [Replicate() if is_shard(p) and p.dim in over else p for p in kept]
    if call["keepdim"]:
        return wrap(place, call.mesh, places, [1 if d in over else size for d, size in enumerate(tensor.shape)])
    places = [Shard(p.dim - sum(d < p.dim for d in over)) if is_shard(p) else p for p in places]
    rest = [size for d, size in enumerate(place.shape) if d not in over]
    return wrap(place.reshape(rest), call.mesh, places, [n for d, n in enumerate(tensor.shape) if d not in over])


RULES = [
    Rule(
        "reduction",
        ("argmin.default", "argmax.default"),
        "every dim",
        "torch does not pick the first of equals, and hangs when a shard is empty",
        argmax_or_argmin,
        torch_handles_even=True,
    ),
]
