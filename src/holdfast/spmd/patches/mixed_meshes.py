"""Replaced functions of torch.optim and clip_grad_norm_: parameters grouped by mesh, norms over several meshes.

torch groups parameters by device and dtype, and calls one operator per group; it refuses a group with several meshes,
or with DTensors and plain tensors. Here the groups are also split by mesh. Plain tensors are replicas: equal on every
rank, as data parallel training keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import full_tensor, replicated
from holdfast.spmd.sharding.mesh_collectives import all_reduce_extreme
from holdfast.spmd.sharding.partials import reduce_partials


class _UniqueKey(tuple[Any, ...]):
    """A device and a dtype that may occur several times in one dict: equal only to itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def grouped_by_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """Split torch's groups by device and dtype also by mesh."""

    def group(lists: Any, with_indices: bool = False) -> Any:
        groups = original(lists, with_indices)
        if not any(_is_mixed(members[0]) for members, _ in groups.values()):
            return groups
        result = {}
        for key, (members, indices) in groups.items():
            for chosen in _positions(members[0]).values():
                kept = [[own[place] for place in chosen] if own else own for own in members]
                result[_UniqueKey(key)] = (kept, [indices[place] for place in chosen] if indices else indices)
        return result

    return group


def lists_grouped_by_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do the same for Adafactor's own grouping, which returns no indices."""

    def group(lists: Any) -> Any:
        if not _is_mixed(lists[0]):
            return original(lists)
        result = {}
        for chosen in _positions(lists[0]).values():
            parts = original([[own[place] for place in chosen] for own in lists])
            result.update({_UniqueKey(key): part for key, part in parts.items()})
        return result

    return group


def total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's norm of all tensors; a plain tensor if their meshes differ."""

    def norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        all_tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if float(norm_type) == float("inf") and (largest := largest_magnitude(all_tensors)) is not None:
            all_tensors = [largest]
        if not _is_mixed(all_tensors):
            return original(all_tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        parts = [[all_tensors[place] for place in chosen] for chosen in _positions(all_tensors).values()]
        norms = [full_tensor(original(part, norm_type, False, foreach)) for part in parts]
        if float(norm_type) == 0.0:  # the number of tensors that are not zero: counts of groups add up
            return torch.stack(norms).sum()
        return original(norms, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]

    return norm


def largest_magnitude(tensors: Sequence[Any]) -> DTensor | None:
    """Return the largest magnitude of DTensors of one mesh and dtype, reduced once; None for other tensors."""
    kinds = {tensor.dtype for tensor in tensors if isinstance(tensor, DTensor)}
    if len(kinds) != 1 or _is_mixed(tensors):
        return None
    mesh, axes, magnitudes = tensors[0].device_mesh, set(), []
    for tensor in map(reduce_partials, tensors):
        local = local_of(tensor)
        magnitudes.append(local.abs().amax() if local.numel() else local.new_zeros((), dtype=local.abs().dtype))
        axes |= {axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()}
    return replicated(all_reduce_extreme(torch.stack(magnitudes).amax(), mesh, sorted(axes), largest=True), mesh)  # type: ignore[no-any-return]


def clip_with_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scale gradients by a norm that may be on another mesh."""

    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        with_gradients = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with_gradients = [parameter for parameter in with_gradients if parameter.grad is not None]
        if not _is_mixed([*(parameter.grad for parameter in with_gradients), total_norm]):
            return original(with_gradients, max_norm, total_norm, foreach)  # type: ignore[no-any-return]
        number = full_tensor(total_norm)
        for mesh, chosen in _positions([parameter.grad for parameter in with_gradients]).items():
            here = number if mesh is None else replicated(number, mesh)
            original([with_gradients[place] for place in chosen], max_norm, here, foreach)
        return None

    return clip


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _is_mixed(tensors: Iterable[Any]) -> bool:
    meshes = [_mesh(tensor) for tensor in tensors]
    return any(mesh is not meshes[0] and mesh != meshes[0] for mesh in meshes)


def _positions(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the positions of the tensors of each mesh; None stands for plain tensors."""
    positions: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        positions.setdefault(_mesh(tensor), []).append(place)
    return positions
