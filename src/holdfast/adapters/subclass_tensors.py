"""Tensor subclasses as plain tensors: the inner tensors of `__tensor_flatten__` with their keys and layouts.

A tensor subclass under the key K with the inner tensors codes and scale is stored as K.codes and K.scale, and a
description of the rest. On a mesh the inner tensors of a sharded subclass are boxes of those of the whole tensor
where its class keeps blocks of elements (block_layout.py). Else every coordinate stores its own, under
K.codes@axis=coordinate, and only the same mesh can load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from holdfast.adapters.block_layout import block_layout
from holdfast.adapters.subclass_context import describe_context
from holdfast.adapters.tensors import Holder, dtensor_parts, holder_of, mesh_of
from holdfast.adapters.weight_wrappers import PLAIN, local_tensor
from holdfast.core.errors import Unsupported
from holdfast.layout.coordinates import key_at, label


@dataclass(frozen=True, slots=True, eq=False)
class InnerTensor:
    """A plain tensor inside a tensor subclass: its key, the live tensor, and how this rank holds it."""

    key: str
    tensor: torch.Tensor
    holder: Holder


@dataclass(frozen=True, slots=True, eq=False)
class SubclassView:
    """A tensor subclass as its description and the inner tensors that store its elements."""

    description: dict[str, Any]
    inner: list[InnerTensor] = field(default_factory=list)


def is_subclass(value: Any) -> bool:
    """Return True if a tensor, or the local tensor of a DTensor, wraps other tensors that it can name."""
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return False
    local = local_tensor(value)
    kind = type(local)
    if kind in PLAIN or isinstance(local, DTensor | AsyncCollectiveTensor) or local.is_nested:
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def plain_tensors(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the local tensors that hold a tensor's elements: its own, or those inside of a subclass."""
    if not is_subclass(value):
        yield local_tensor(value)
        return
    local: Any = local_tensor(value)
    for name in local.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(local, name))


def view_subclass(value: torch.Tensor, key: str, where: str, *, by_coordinate: bool = False) -> SubclassView:
    """View a tensor subclass under `key`; raises Unsupported if it cannot be described or stored.

    With `by_coordinate` each coordinate has its own, though the blocks might fit the shards.
    """
    local: Any = local_tensor(value)
    view = SubclassView({**_describe(local, where), "shape": list(value.shape)})
    blocks = block_layout(local, tuple(value.shape))
    if blocks is not None:
        view.description["context"] = blocks.context()
        del view.description["dtype"]  # an appearance only, which DTensor.from_local loses
    if not isinstance(value, DTensor):
        held = blocks.whole() if blocks is not None else None
    else:
        parts, how = dtensor_parts(value, where)
        fits = blocks is not None and blocks.is_aligned(how) and not by_coordinate
        held = blocks.boxes(parts) if blocks is not None and fits else None
    if blocks is not None and held is not None:
        view.inner.extend(InnerTensor(f"{key}.{name}", blocks.tensor(name), held[name]) for name in held)
        return view
    axes = _sharded_axes(value)
    if axes:
        view.description["axes"] = {axis: size for axis, size, _ in axes}
    view.inner.extend(_whole(local, key, where, _coordinate(axes)))
    return view


def own_shard(value: Any, key: str, where: str) -> InnerTensor:
    """View a plain shard as this coordinate's own, where other ranks hold a tensor subclass."""
    local = local_tensor(value)
    return InnerTensor(key_at(key, _coordinate(_sharded_axes(value))), local, holder_of(local, where))


def sharded_axes(value: Any) -> dict[str, int]:
    """Return the sizes of the mesh axes that shard a tensor, by name."""
    return {axis: size for axis, size, _ in _sharded_axes(value)}


def _coordinate(axes: Sequence[tuple[str, int, int]]) -> str:
    return label([axis for axis, _, _ in axes], [index for _, _, index in axes])


def _describe(local: Any, where: str) -> dict[str, Any]:
    names, context = local.__tensor_flatten__()
    held = {name: getattr(local, name) for name in names}
    return {
        "class": type(local).__name__,
        "shape": list(local.shape),
        "dtype": str(local.dtype).removeprefix("torch."),
        "context": describe_context(context, where),
        "inner": {
            name: _describe(inner, f"{where}.{name}") if is_subclass(inner) else str(inner.dtype).removeprefix("torch.")
            for name, inner in held.items()
        },
    }


def _whole(local: Any, key: str, where: str, suffix: str = "") -> Iterator[InnerTensor]:
    """Yield the inner tensors of a subclass that is stored as this rank holds it."""
    for name in local.__tensor_flatten__()[0]:
        inner, own = getattr(local, name), f"{key}.{name}"
        if is_subclass(inner):
            if isinstance(inner, DTensor):
                raise Unsupported(f"{where}.{name}: a sharded tensor subclass inside of {type(local).__name__}")
            yield from _whole(local_tensor(inner), own, f"{where}.{name}", suffix)
        else:
            yield InnerTensor(key_at(own, suffix), inner, holder_of(inner, f"{where}.{name}"))


def _sharded_axes(value: Any) -> list[tuple[str, int, int]]:
    """Return the mesh axes that shard a DTensor: name, size, and this rank's coordinate."""
    if not isinstance(value, DTensor):
        return []
    mesh, coordinate = mesh_of(value.device_mesh), value.device_mesh.get_coordinate()
    sharded = (axis for axis, placement in enumerate(value.placements) if not placement.is_replicate())
    return [(mesh.axes[axis], mesh.sizes[axis], coordinate[axis] if coordinate else 0) for axis in sharded]
