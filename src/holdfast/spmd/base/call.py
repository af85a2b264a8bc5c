"""One call of an operator on DTensors, as rules see it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private

Spot = tuple[int, ...]  # where a tensor stands among the arguments: (position,) or (position, place in the list)


class _Leave:
    """What a rule answers when torch's own way is right."""

    def __repr__(self) -> str:
        return "LEAVE"


LEAVE = _Leave()


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments in the order of its schema, defaults filled in."""

    op: Any
    values: tuple[Any, ...]
    mesh: DeviceMesh
    info: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.values[self.names.index(name)]

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.op)

    @property
    def is_inplace(self) -> bool:
        return any(argument.alias_info and argument.alias_info.is_write for argument in self.op._schema.arguments)

    def spots(self) -> Iterator[tuple[Spot, torch.Tensor]]:
        """Every tensor among the arguments, with where it stands."""
        for position, value in enumerate(self.values):
            if isinstance(value, torch.Tensor):
                yield (position,), value
            elif isinstance(value, (list, tuple)):
                for place, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield (position, place), item

    def run(self, tensors: dict[Spot, torch.Tensor], **changes: Any) -> Any:
        """The operator on plain tensors in the places of the DTensors, other arguments changed by name."""
        values = list(self.values)
        for spot, tensor in tensors.items():
            if len(spot) == 1:
                values[spot[0]] = tensor
            else:
                values[spot[0]] = list(values[spot[0]])
        for spot, tensor in tensors.items():
            if len(spot) == 2:
                values[spot[0]][spot[1]] = tensor
        names = self.names
        for name, value in changes.items():
            values[names.index(name)] = value
        return apply(self.op, values)


@functools.cache
def _names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def writes_first(op: Any) -> bool:
    """Whether an operator writes its first argument in place, and not only a buffer beside it."""
    first = op._schema.arguments[0].alias_info
    return first is not None and bool(first.is_write)


def apply(op: Any, values: Sequence[Any]) -> Any:
    """Call an operator with its arguments in the order of its schema."""
    positional, keywords = [], {}
    for argument, value in zip(op._schema.arguments, values, strict=True):
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return op(*positional, **keywords)


def bind(op: Any, args: Sequence[Any], kwargs: dict[str, Any], info: Any = None) -> Call:
    """The call that `op(*args, **kwargs)` makes."""
    values = []
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            values.append(args[position])
        else:
            values.append(kwargs.get(argument.name, argument.default_value))
    mesh = next(tensor.device_mesh for tensor in _tensors(values) if isinstance(tensor, DTensor))
    return Call(op, tuple(values), mesh, info)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def is_shard(place: object) -> TypeGuard[Shard]:
    """Whether a placement is a plain Shard: a strided one, which some versions derive from it, has no box."""
    return type(place) is Shard


def moved(tensor: Any, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a tensor under `placements`; a plain tensor counts as replicated."""
    if not isinstance(tensor, DTensor):
        return _part(tensor, placements, mesh)
    if tensor.device_mesh != mesh:
        return _part(whole(tensor), placements, mesh)
    if tuple(tensor.placements) == tuple(placements):
        return private.local_of(tensor)
    return private.redistribute_local(tensor, placements)


def cut_first(tensor: Any, placements: Sequence[Placement]) -> Any:
    """A tensor on its way to `placements`, with what every rank of an axis has cut already: then less is sent."""
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
    return wrap(moved(tensor, first, tensor.device_mesh), tensor.device_mesh, first, tensor.shape)


def _part(tensor: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    if not all(is_shard(place) or isinstance(place, Replicate) for place in placements):
        return private.redistribute_local(replicated(tensor, mesh), placements)
    sizes, offsets = private.local_box(tensor.shape, mesh, placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset if size else 0, size)
    return tensor


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor, on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    return moved(tensor, [Replicate()] * tensor.device_mesh.ndim, tensor.device_mesh)


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor of `shape` whose part on this rank is `local`."""
    return private.wrap(local.contiguous(), private.make_spec(mesh, placements, shape, _strides(shape), local.dtype))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def replicated(result: Any, mesh: DeviceMesh) -> Any:
    """Results that are the same on every rank, as DTensors."""
    if isinstance(result, torch.Tensor):
        return private.wrap(
            result, private.make_spec(mesh, [Replicate()] * mesh.ndim, result.shape, result.stride(), result.dtype)
        )
    if isinstance(result, (list, tuple)):
        return type(result)(replicated(item, mesh) for item in result)
    return result


Run = Callable[[Call], Any]
