"""Convolution of images whose rows or columns are sharded: ranks exchange the edges that kernels reach over.

Any stride, dilation, padding, also transposed, and shards that do not divide: each rank works out which rows of the
result are its own, which rows of the input those need, and asks the ranks that have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import Call, Spot, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.row_exchange import Exchange, Span, filled, spans_of


@dataclass(frozen=True, slots=True)
class Halo:
    """One sharded dim of an image, on its way through a kernel."""

    exchange: Exchange
    places: tuple[Placement, ...]
    size: int  # of the result along the dim, on one device
    results: Span  # this rank's rows of the result
    before: int  # rows of padding that this rank's part begins with
    after: int

    @property
    def dim(self) -> int:
        return self.exchange.dim

    @property
    def summed(self) -> list[Placement]:
        """The placements of what is summed over the shards."""
        return [Partial() if is_shard(place) else Replicate() for place in self.places]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or the window of a pool, along one dim."""

    size: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        return self.dilation * (self.size - 1) + 1

    def results(self, length: int, *, ceil: bool = False) -> int:
        """How many results an input of `length` gives."""
        room = length + 2 * self.padding - self.reach
        count = (-(-room // self.stride) if ceil else room // self.stride) + 1
        if ceil and (count - 1) * self.stride >= length + self.padding:
            count -= 1  # a window that would begin in the padding after the end
        return count

    def sources(self, results: Span) -> Span:
        """The rows, those of the padding among them, that some results are made of."""
        if not results.size:
            return Span(0, 0)
        first = results.start * self.stride - self.padding
        return Span(first, (results.stop - 1) * self.stride - self.padding + self.reach)


def sharded_image(source: Any) -> tuple[int, int] | None:
    """The one spatial dim that is sharded, and its mesh axis; batch shards may be beside it, nothing else."""
    if not isinstance(source, DTensor) or source.ndim < 3:
        return None
    axes = [axis for axis, place in enumerate(source.placements) if is_shard(place) and place.dim >= 2]
    if len(axes) != 1:
        return None
    others = [place for axis, place in enumerate(source.placements) if axis != axes[0]]
    if not all(place.is_replicate() or place == Shard(0) for place in others):
        return None
    place = source.placements[axes[0]]
    assert is_shard(place)
    return place.dim, axes[0]


def halo_over(source: DTensor, dim: int, axis: int, size: int, sources: Any) -> Halo | None:
    """The halo of a kernel that gives `size` results; None where some rank would have none."""
    mesh = source.device_mesh
    ranks = mesh.size(axis)
    if size < ranks or 0 in (span.size for span in spans_of(size, ranks)):
        return None
    length = source.shape[dim]
    results = spans_of(size, ranks)
    reached = [sources(span) for span in results]
    wants = tuple(span.within(Span(0, length)) for span in reached)
    exchange = Exchange(mesh, axis, dim, tuple(spans_of(length, ranks)), wants)
    here = exchange.here
    before = max(0, min(wants[here].start, reached[here].stop) - reached[here].start)
    after = max(0, reached[here].size - before - wants[here].size)
    return Halo(exchange, tuple(source.placements), size, results[here], before, after)


def halo_of(call: Call) -> Halo | None:
    """The halo of a convolution; None where the input has to be gathered."""
    found = sharded_image(call["input"])
    if found is None or call["transposed"]:
        return None
    dim, axis = found
    space = dim - 2
    kernel = Kernel(call["weight"].shape[dim], call["stride"][space], call["padding"][space], call["dilation"][space])
    return halo_over(call["input"], dim, axis, kernel.results(call["input"].shape[dim]), kernel.sources)


def extended(halo: Halo, local: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """This rank's rows, those that it borrows, and the padding."""
    return filled(halo.exchange.fetch(local), halo.dim, halo.before, halo.after, value)


def returned(halo: Halo, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of this rank's rows."""
    rows = gradient.shape[halo.dim] - halo.before - halo.after
    return halo.exchange.give_back(gradient.narrow(halo.dim, halo.before, rows))


def forward(call: Call, halo: Halo) -> Any:
    """Each rank convolves its rows and its neighbours' edges."""
    source = call["input"]
    tensors: dict[Spot, torch.Tensor] = {(0,): extended(halo, moved(source, halo.places, call.mesh))}
    for position in (1, 2):
        if call.values[position] is not None:
            tensors[position,] = moved(call.values[position], [Replicate()] * call.mesh.ndim, call.mesh)
    out = call.run(tensors, padding=inner_padding(call, halo))
    return wrap(out, call.mesh, halo.places, _result_shape(halo, source, out))


def backward(call: Call, halo: Halo) -> Any:
    """The gradients of the edges go back to the ranks that lent them."""
    source, weight = call["input"], call["weight"]
    tensors: dict[Spot, torch.Tensor] = {
        (0,): moved(call["grad_output"], halo.places, call.mesh),
        (1,): extended(halo, moved(source, halo.places, call.mesh)),
        (2,): moved(weight, [Replicate()] * call.mesh.ndim, call.mesh),
    }
    inner, of_weight, of_bias = call.run(tensors, padding=inner_padding(call, halo))
    return (
        None if inner is None else wrap(returned(halo, inner), call.mesh, halo.places, source.shape),
        None if of_weight is None else wrap(of_weight, call.mesh, halo.summed, weight.shape),
        None if of_bias is None else wrap(of_bias, call.mesh, halo.summed, of_bias.shape),
    )


def inner_padding(call: Call, halo: Halo) -> list[int]:
    """The padding of the dims that are whole; that of the sharded one is in the rows already."""
    return [0 if space == halo.dim - 2 else size for space, size in enumerate(call["padding"])]


def _result_shape(halo: Halo, source: DTensor, out: torch.Tensor) -> list[int]:
    shape = [source.shape[0], *out.shape[1:]]
    shape[halo.dim] = halo.size
    return shape


RULES: list[Rule] = []  # conv.py asks for a halo first
