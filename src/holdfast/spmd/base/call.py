"""`Call`, an operator call as rules see it: arguments bound by schema, run on local tensors, called again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ArgSlot = tuple[int, ...]  # of a tensor among the arguments: (position,) or (position, index in the list)


class _UseTorch:
    """The type of USE_TORCH, which a rule returns if torch's own rule is right."""

    def __repr__(self) -> str:
        return "USE_TORCH"


USE_TORCH = _UseTorch()


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments in schema order, with defaults filled in."""

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

    def tensor_args(self) -> Iterator[tuple[ArgSlot, torch.Tensor]]:
        """Yield every tensor among the arguments, with its slot."""
        for position, value in enumerate(self.values):
            if isinstance(value, torch.Tensor):
                yield (position,), value
            elif isinstance(value, (list, tuple)):
                for place, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield (position, place), item

    def run(self, tensors: dict[ArgSlot, torch.Tensor], **changes: Any) -> Any:
        """Run the operator on plain tensors in the slots of the DTensors, with other arguments changed by name."""
        values = list(self.values)
        for slot, tensor in tensors.items():
            if len(slot) == 1:
                values[slot[0]] = tensor
            else:
                values[slot[0]] = list(values[slot[0]])
        for slot, tensor in tensors.items():
            if len(slot) == 2:
                values[slot[0]][slot[1]] = tensor
        names = self.names
        for name, value in changes.items():
            values[names.index(name)] = value
        return apply(self.op, values)

    def again(self, change: Callable[[Any], Any]) -> Any:
        """Call the operator again, with `change` applied to every argument and to the items of lists."""
        return apply(self.op, [[*map(change, v)] if isinstance(v, (list, tuple)) else change(v) for v in self.values])


@functools.cache
def _names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def writes_first(op: Any) -> bool:
    """Return True if an operator writes its first argument in place, and not only another buffer."""
    first = op._schema.arguments[0].alias_info
    return first is not None and bool(first.is_write)


def call_with_positive_dim(call: Call, ndim: int) -> Any:
    """Call again with the dim counted from the start, as torch's own rules understand it."""
    values = list(call.values)
    values[call.names.index("dim")] = call["dim"] % max(ndim, 1)
    return apply(call.op, values)


def apply(op: Any, values: Sequence[Any]) -> Any:
    """Call an operator with its arguments in schema order."""
    positional, keywords = [], {}
    for argument, value in zip(op._schema.arguments, values, strict=True):
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return op(*positional, **keywords)


def bind(op: Any, args: Sequence[Any], kwargs: dict[str, Any], info: Any = None) -> Call:
    """Return the call that `op(*args, **kwargs)` makes."""
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


Run = Callable[[Call], Any]
