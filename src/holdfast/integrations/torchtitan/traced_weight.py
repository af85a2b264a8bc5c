"""`TracedWeight`: a weight without values that records how a conversion reshapes, permutes and slices it.

A state dict adapter of torchtitan is Python code over tensors. Run over traced weights, it tells how each weight of
the hub is made from the model's: the statements of a mapping, which can be reversed and applied to any shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in row-major order under another shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Permute:
    """The dims in another order."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of one dim."""

    dim: int
    start: int
    stop: int


Operation = Reshape | Permute | Slice


@dataclass(frozen=True, eq=False)
class TracedWeight:
    """The shape of a weight, the key it comes from, and the operations that made it."""

    key: str
    shape: tuple[int, ...]
    operations: tuple[Operation, ...] = field(default=())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> TracedWeight:  # noqa: N802  (torch's name)
        return self.permute(*reversed(range(self.ndim)))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: Any) -> TracedWeight:
        wanted = [int(size) for size in _flat(shape)]
        if -1 in wanted:
            known = math.prod(size for size in wanted if size != -1)
            wanted[wanted.index(-1)] = self.numel() // known if known else 0
        if math.prod(wanted) != self.numel():
            raise Unsupported(f"{self.key}: a reshape of {list(self.shape)} to {wanted} changes the number of elements")
        return self._then(Reshape(tuple(wanted)), tuple(wanted))

    view = reshape

    def permute(self, *dims: Any) -> TracedWeight:
        order = tuple(int(dim) % self.ndim for dim in _flat(dims))
        return self._then(Permute(order), tuple(self.shape[dim] for dim in order))

    def transpose(self, first: int, second: int) -> TracedWeight:
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.permute(*order)

    def t(self) -> TracedWeight:
        return self.T

    def squeeze(self, dim: int) -> TracedWeight:
        return self.reshape([size for at, size in enumerate(self.shape) if at != dim % self.ndim])

    def unsqueeze(self, dim: int) -> TracedWeight:
        shape = list(self.shape)
        shape.insert(dim % (self.ndim + 1), 1)
        return self.reshape(shape)

    def narrow(self, dim: int, start: int, length: int) -> TracedWeight:
        dim %= self.ndim
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self if shape == self.shape else self._then(Slice(dim, start, start + length), shape)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[TracedWeight, ...]:
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TracedWeight, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def unbind(self, dim: int = 0) -> tuple[TracedWeight, ...]:
        return tuple(self.narrow(dim, at, 1).squeeze(dim) for at in range(self.shape[dim]))

    def __getitem__(self, index: Any) -> TracedWeight:
        made, dim = self, 0
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, int):
                made = made.narrow(dim, part % made.shape[dim], 1).squeeze(dim)
            elif isinstance(part, slice) and part.step in (None, 1):
                start, stop, _ = part.indices(made.shape[dim])
                made, dim = made.narrow(dim, start, stop - start), dim + 1
            else:
                raise Unsupported(f"{self.key}: an adapter indexes it by {part!r}, which a mapping cannot express")
        return made

    def clone(self, *_: Any, **__: Any) -> TracedWeight:
        return self

    contiguous = detach = clone

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"{self.key}: an adapter uses {name!r} of the weight, which a mapping cannot express")

    def _then(self, operation: Operation, shape: tuple[int, ...]) -> TracedWeight:
        return TracedWeight(self.key, shape, (*self.operations, operation))


def _flat(values: tuple[Any, ...]) -> Sequence[Any]:
    """Return the arguments of a call that takes numbers one by one, or as one sequence."""
    return values[0] if len(values) == 1 and not isinstance(values[0], int) else values
