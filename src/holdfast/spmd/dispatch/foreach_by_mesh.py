"""Operators over lists of tensors (`torch._foreach_*`) whose tensors are on several meshes: one call for each mesh."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call, apply, replicated, whole


def is_over_lists(op: Any) -> bool:
    return bool(op._schema.name.startswith("aten::_foreach_"))


def run_by_mesh(call: Call) -> Any:
    """Split every list alike, by the meshes of what stands at each place; put the results back in order.

    A tensor beside the lists, such as the factor of `_foreach_mul_`, is moved to the mesh of each call.
    """
    several = len(call.op._schema.returns)
    lists: list[list[Any]] = [[None] * _length(call) for _ in range(several)]
    for chosen in places_by_mesh(call).values():
        found = apply(call.op, [_part(call, value, chosen) for value in call.values])
        for target, part in zip(lists, (found,) if several == 1 else found or (), strict=False):
            for place, item in zip(chosen, part, strict=True):
                target[place] = item
    if not several:
        return None
    return lists[0] if several == 1 else tuple(lists)


def places_by_mesh(call: Call) -> dict[Hashable, list[int]]:
    """The places of the lists, grouped by the meshes of what stands there."""
    places: dict[Hashable, list[int]] = {}
    for place in range(_length(call)):
        places.setdefault(_meshes_at(call, place), []).append(place)
    return places


def _length(call: Call) -> int:
    return max(len(value) for value in call.values if _is_list(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _meshes_at(call: Call, place: int) -> Hashable:
    """The meshes of the tensors at one place of the lists; None stands for a plain tensor."""
    items = [value[place] for value in call.values if _is_list(value) and len(value) > place]
    return frozenset(_mesh(item) for item in items if isinstance(item, torch.Tensor))


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _part(call: Call, value: Any, chosen: list[int]) -> Any:
    if _is_list(value) and len(value) == _length(call):
        return [value[place] for place in chosen]
    if not isinstance(value, DTensor):
        return value
    meshes = [mesh for mesh in _meshes_at(call, chosen[0]) if mesh is not None]  # type: ignore[attr-defined]
    if not meshes:
        return whole(value)
    return value if value.device_mesh == meshes[0] else replicated(whole(value), meshes[0])
