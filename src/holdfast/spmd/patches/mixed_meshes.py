"""Lists of parameters of which some are DTensors of one mesh, some of another, and some are plain tensors.

torch's optimizers and gradient clipping sort what they are given by device and dtype, and hand each group to one call
over the list; a list that mixes meshes, or DTensors with plain tensors, is refused. Here the groups are parted once
more. Plain tensors are replicas: the same on every rank, as data parallel training keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import replicated, whole
from holdfast.spmd.rules.pointwise.nonlinear import settle
from holdfast.spmd.sharding.mesh_collectives import extreme_of


class _Key(tuple[Any, ...]):
    """A device and a dtype, twice in one dict: equal to nothing but itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def parted(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """torch's grouping by device and dtype, parted by mesh."""

    def group(lists: Any, with_indices: bool = False) -> Any:
        groups = torch_way(lists, with_indices)
        if not any(_is_mixed(members[0]) for members, _ in groups.values()):
            return groups
        result = {}
        for key, (members, indices) in groups.items():
            for chosen in _positions(members[0]).values():
                kept = [[own[place] for place in chosen] if own else own for own in members]
                result[_Key(key)] = (kept, [indices[place] for place in chosen] if indices else indices)
        return result

    return group


def parted_lists(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a grouping that gives no indices: Adafactor's own."""

    def group(lists: Any) -> Any:
        if not _is_mixed(lists[0]):
            return torch_way(lists)
        result = {}
        for chosen in _positions(lists[0]).values():
            parts = torch_way([[own[place] for place in chosen] for own in lists])
            result.update({_Key(key): part for key, part in parts.items()})
        return result

    return group


def total_norm(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """torch's norm of all tensors together; a plain tensor where they are mixed."""

    def norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if float(norm_type) == float("inf") and (largest := largest_of(given)) is not None:
            given = [largest]
        if not _is_mixed(given):
            return torch_way(given, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        parts = [[given[place] for place in chosen] for chosen in _positions(given).values()]
        norms = [whole(torch_way(part, norm_type, False, foreach)) for part in parts]
        return torch_way(norms, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]

    return norm


def largest_of(tensors: Sequence[Any]) -> DTensor | None:
    """The largest magnitude among DTensors of one mesh and dtype, reduced once for all of them; None for others."""
    kinds = {tensor.dtype for tensor in tensors if isinstance(tensor, DTensor)}
    if len(kinds) != 1 or _is_mixed(tensors):
        return None
    mesh, axes, found = tensors[0].device_mesh, set(), []
    for tensor in map(settle, tensors):
        local = private.local_of(tensor)
        found.append(local.abs().amax() if local.numel() else local.new_zeros((), dtype=local.abs().dtype))
        axes |= {axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()}
    return replicated(extreme_of(torch.stack(found).amax(), mesh, sorted(axes), largest=True), mesh)  # type: ignore[no-any-return]


def clip_with_norm(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """torch's scaling of gradients by a norm that may live on another mesh than they do."""

    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = [parameter for parameter in given if parameter.grad is not None]
        if not _is_mixed([*(parameter.grad for parameter in given), total_norm]):
            return torch_way(given, max_norm, total_norm, foreach)  # type: ignore[no-any-return]
        number = whole(total_norm)
        for mesh, chosen in _positions([parameter.grad for parameter in given]).items():
            here = number if mesh is None else replicated(number, mesh)
            torch_way([given[place] for place in chosen], max_norm, here, foreach)
        return None

    return clip


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _is_mixed(tensors: Iterable[Any]) -> bool:
    meshes = [_mesh(tensor) for tensor in tensors]
    return any(mesh is not meshes[0] and mesh != meshes[0] for mesh in meshes)


def _positions(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    """For each mesh, and None for plain tensors, the places of its tensors."""
    found: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault(_mesh(tensor), []).append(place)
    return found
