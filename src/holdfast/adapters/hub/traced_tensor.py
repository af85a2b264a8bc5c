"""A tensor without data that records the operations applied to it: splits, joins, permutations and reshapes.

transformers' conversion rules are code. They run here on such tensors, so that the record says what the rules
do for these shapes, and nothing about the rules has to be known. An operation that only moves elements is recorded;
any other raises `UntracedOperation`, and its name says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]


class UntracedOperation(Exception):
    """An operation that a mapping cannot express; the message is its name."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation: "source", "split", "unstack", "cat", "stack", "permute" or "reshape", and its inputs.

    `numbers` are the sizes of a split, the order of a permutation, or the shape of a reshape.
    """

    kind: str
    inputs: tuple[TracedValue, ...] = ()
    key: str = ""
    axis: int = 0
    numbers: Shape = ()
    unstacked: Operation | None = None  # the same split whose parts lost the dim they were cut along
    serial: int = field(default=0)


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A result of an operation."""

    operation: Operation
    index: int
    shape: Shape


class TracedTensor(torch.Tensor):
    """A tensor of a shape that stands for a traced value."""

    value: TracedValue

    @staticmethod
    def __new__(cls, value: TracedValue) -> TracedTensor:
        device = torch.device("meta")
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=torch.float32, device=device)
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = _RECORDED.get(func.overloadpacket)
        if record is None:
            raise UntracedOperation(str(func.overloadpacket).removeprefix("aten."))
        return record(*args, **(kwargs or {}))

    @staticmethod
    def source(key: str, shape: Sequence[int]) -> TracedTensor:
        """Return the tensor that stands for a stored one."""
        return TracedTensor(TracedValue(Operation("source", key=key), 0, tuple(shape)))


def _make(kind: str, inputs: Sequence[TracedTensor], shape: Shape, axis: int = 0, numbers: Shape = ()) -> TracedTensor:
    values = tuple(tensor.value for tensor in inputs)
    return TracedTensor(TracedValue(Operation(kind, values, axis=axis, numbers=numbers), 0, shape))


def _dim(tensor: TracedTensor, dim: int) -> int:
    return dim % len(tensor.shape)


def _split_sizes(tensor: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    dim = _dim(tensor, dim)
    if len(sizes) == 1:
        return [tensor]
    operation = Operation("split", (tensor.value,), axis=dim, numbers=tuple(sizes))
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    return [TracedTensor(TracedValue(operation, number, shape)) for number, shape in enumerate(shapes)]


def _split(tensor: TracedTensor, size: Any, dim: int = 0) -> list[TracedTensor]:
    if not isinstance(size, int):
        return _split_sizes(tensor, size, dim)
    whole = tensor.shape[_dim(tensor, dim)]
    sizes = [min(size, whole - at) for at in range(0, whole, size)]
    return _split_sizes(tensor, sizes, dim)


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    dim = _dim(tensor, dim)
    operation = Operation("unstack", (tensor.value,), axis=dim, numbers=(tensor.shape[dim],))
    shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return [TracedTensor(TracedValue(operation, number, shape)) for number in range(tensor.shape[dim])]


def _squeeze(tensor: TracedTensor, dim: Any = None) -> TracedTensor:
    """Drop dims of size 1. Of a part of size 1, `squeeze()` drops the dim of the cut and no other.

    transformers means that dim only: it stacks the parts again when it loads them.
    """
    operation = tensor.value.operation
    is_slice = operation.kind == "split" and set(operation.numbers) == {1}
    dims = [dim] if isinstance(dim, int) else list(range(len(tensor.shape))) if dim is None else list(dim)
    dims = [_dim(tensor, d) for d in dims]
    if is_slice and operation.axis in dims:
        whole = operation.inputs[0]
        if operation.unstacked is None:
            operation.unstacked = Operation(
                "unstack", (whole,), axis=operation.axis, numbers=(whole.shape[operation.axis],)
            )
        shape = tuple(size for d, size in enumerate(tensor.shape) if d != operation.axis)
        return TracedTensor(TracedValue(operation.unstacked, tensor.value.index, shape))
    shape = tuple(size for d, size in enumerate(tensor.shape) if d not in dims or size != 1)
    return _reshape(tensor, shape)


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim = dim % (len(tensor.shape) + 1)
    return _reshape(tensor, (*tensor.shape[:dim], 1, *tensor.shape[dim:]))


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    if len(tensors) == 1:
        return tensors[0]
    dim = _dim(tensors[0], dim)
    sizes = tuple(tensor.shape[dim] for tensor in tensors)
    first = tensors[0].shape
    if any((*t.shape[:dim], *t.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for t in tensors):
        raise UntracedOperation("cat of tensors that do not fit")
    return _make("cat", tensors, (*first[:dim], sum(sizes), *first[dim + 1 :]), dim, sizes)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    first = tuple(tensors[0].shape)
    if any(tuple(tensor.shape) != first for tensor in tensors):
        raise UntracedOperation("stack of tensors that do not fit")
    dim = dim % (len(first) + 1)
    return _make("stack", tensors, (*first[:dim], len(tensors), *first[dim:]), dim, (len(tensors),))


def _permute(tensor: TracedTensor, order: Sequence[int]) -> TracedTensor:
    order = [_dim(tensor, dim) for dim in order]
    if order == sorted(order):
        return tensor
    return _make("permute", [tensor], tuple(tensor.shape[dim] for dim in order), numbers=tuple(order))


def _transpose(tensor: TracedTensor, first: int, second: int) -> TracedTensor:
    order = list(range(len(tensor.shape)))
    first, second = _dim(tensor, first), _dim(tensor, second)
    order[first], order[second] = order[second], order[first]
    return _permute(tensor, order)


def _reshape(tensor: TracedTensor, shape: Sequence[int]) -> TracedTensor:
    known = math.prod(size for size in shape if size != -1)
    filled = tuple(tensor.numel() // known if size == -1 else size for size in shape)
    if filled == tuple(tensor.shape):
        return tensor
    return _make("reshape", [tensor], filled, numbers=filled)


def _same(tensor: TracedTensor, **kwargs: Any) -> TracedTensor:
    return tensor


def _cast(tensor: TracedTensor, **kwargs: Any) -> TracedTensor:
    if kwargs.get("dtype") not in (None, tensor.dtype):
        raise UntracedOperation("cast")
    return tensor


_aten = torch.ops.aten
_RECORDED: dict[Any, Callable[..., Any]] = {
    _aten.split: _split,
    _aten.split_with_sizes: _split_sizes,
    _aten.unbind: _unbind,
    _aten.squeeze: _squeeze,
    _aten.unsqueeze: _unsqueeze,
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.permute: _permute,
    _aten.transpose: _transpose,
    _aten.t: lambda tensor: _transpose(tensor, 0, len(tensor.shape) - 1),
    _aten.view: _reshape,
    _aten._unsafe_view: _reshape,
    _aten.reshape: _reshape,
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.alias: _same,
    _aten._to_copy: _cast,
}
