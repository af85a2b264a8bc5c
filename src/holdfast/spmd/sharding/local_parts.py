"""This rank's part of a tensor under given placements, full tensors, and DTensors wrapped from local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.base import torch_specs, torch_versions
from holdfast.spmd.base.torch_specs import local_box, local_of, make_spec, norms_in_float32, spec_of
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_dim
from holdfast.spmd.sharding.strided_shards import move_strided_apart


def local_part(tensor: Any, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part of a tensor under `placements`; a plain tensor counts as replicated."""
    if not isinstance(tensor, DTensor):
        return _sliced(tensor, placements, mesh)
    if tensor.device_mesh != mesh:
        return _sliced(full_tensor(tensor), placements, mesh)
    if tuple(tensor.placements) == tuple(placements):
        return local_of(tensor)
    return _redistributed(tensor, placements)


def _redistributed(tensor: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's local tensor under other placements; collective."""
    spec = spec_of(tensor)
    pairs = zip(spec.placements, placements, strict=True)
    first = tuple(Replicate() if then.is_partial() and sharded_dim(now) is not None else then for now, then in pairs)
    if first != tuple(placements):  # torch does not turn a Shard into a Partial in one step
        spec = torch_versions.DTensorSpec(spec.mesh, first, tensor_meta=spec.tensor_meta)
        tensor = torch_specs.wrap(_redistributed(tensor, first), spec)
    target = torch_versions.DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    local = _redistribute()(local_of(tensor), spec, target)
    local = local.wait() if hasattr(local, "wait") else local
    return local.contiguous() if tensor.is_contiguous() else local  # 2.11 gathers dims after the first transposed


@functools.cache
def _redistribute() -> Callable[..., torch.Tensor]:
    return norms_in_float32(move_strided_apart(torch_versions.redistribute_local_tensor))


def slice_replicas(tensor: Any, placements: Sequence[Placement]) -> Any:
    """Slice the replicated axes that `placements` shard first, so that the redistribution sends less."""
    if not isinstance(tensor, DTensor):
        return tensor
    first = list(tensor.placements)
    for axis, (now, then) in enumerate(zip(tensor.placements, placements, strict=True)):
        others = [
            *tensor.placements[:axis],
            *tensor.placements[axis + 1 :],
            *placements[:axis],
            *placements[axis + 1 :],
        ]
        if now.is_replicate() and is_shard(then) and then not in others:
            first[axis] = then
    if first == list(tensor.placements) or first == list(placements):
        return tensor
    return wrap(local_part(tensor, first, tensor.device_mesh), tensor.device_mesh, first, tensor.shape)


def _sliced(tensor: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    if not all(is_shard(place) or isinstance(place, Replicate) for place in placements):
        return _redistributed(replicated(tensor, mesh), placements)
    sizes, offsets = local_box(tensor.shape, mesh, placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset if size else 0, size)
    return tensor


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return the full tensor, on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    return local_part(tensor, [Replicate()] * tensor.device_mesh.ndim, tensor.device_mesh)


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of `shape` whose local tensor on this rank is `local`."""
    return torch_specs.wrap(local.contiguous(), make_spec(mesh, placements, shape, _strides(shape), local.dtype))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def replicated(result: Any, mesh: DeviceMesh) -> Any:
    """Wrap results that are equal on every rank as DTensors."""
    if isinstance(result, torch.Tensor):
        return torch_specs.wrap(
            result, make_spec(mesh, [Replicate()] * mesh.ndim, result.shape, result.stride(), result.dtype)
        )
    if isinstance(result, (list, tuple)):
        return type(result)(replicated(item, mesh) for item in result)
    return result
