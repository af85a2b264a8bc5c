"""`torch._foreach_*` operators on lists with several meshes: dispatched as one call for each mesh."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call, apply
from holdfast.spmd.sharding.local_parts import full_tensor, replicated


def is_foreach(op: Any) -> bool:
    return bool(op._schema.name.startswith(("aten::_foreach_", "aten::_amp_foreach_")))


def run_by_mesh(call: Call) -> Any:
    """Split every list by the meshes of its entries, run each group, and restore the order of the results.

    A tensor next to the lists, such as the factor of `_foreach_mul_`, is moved to the mesh of each call.
    """
    several = len(call.op._schema.returns)
    lists: list[list[Any]] = [[None] * _length(call) for _ in range(several)]
    for chosen in indices_by_mesh(call).values():
        results = apply(call.op, [_entries(call, value, chosen) for value in call.values])
        for target, part in zip(lists, (results,) if several == 1 else results or (), strict=False):
            for place, item in zip(chosen, part, strict=True):
                target[place] = item
    if not several:
        return None
    return lists[0] if several == 1 else tuple(lists)


def indices_by_mesh(call: Call) -> dict[Hashable, list[int]]:
    """Return the indices of the lists, grouped by the meshes of the entries."""
    places: dict[Hashable, list[int]] = {}
    for place in range(_length(call)):
        places.setdefault(_meshes_at(call, place), []).append(place)
    return places


def _length(call: Call) -> int:
    return max(len(value) for value in call.values if _is_list(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _meshes_at(call: Call, place: int) -> Hashable:
    """Return the meshes of the tensors at one index of the lists; None stands for a plain tensor."""
    items = [value[place] for value in call.values if _is_list(value) and len(value) > place]
    return frozenset(_mesh(item) for item in items if isinstance(item, torch.Tensor))


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _entries(call: Call, value: Any, chosen: list[int]) -> Any:
    if _is_list(value) and len(value) == _length(call):
        return [value[place] for place in chosen]
    if not isinstance(value, DTensor):
        return value
    meshes = [mesh for mesh in _meshes_at(call, chosen[0]) if mesh is not None]  # type: ignore[attr-defined]
    if not meshes:
        return full_tensor(value)
    return value if value.device_mesh == meshes[0] else replicated(full_tensor(value), meshes[0])
