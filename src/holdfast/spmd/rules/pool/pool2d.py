"""max_pool2d and avg_pool2d with gradients: by batch and channels freely, by rows or columns with halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.byte_costs import accumulation_dtype
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.halo import Halo, Kernel, halo_over, own_gradient, sharded_image, with_halo
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.signature import signature_rule

LOWEST = float("-inf")


def _pair(values: list[int]) -> list[int]:
    return [values[0], values[-1]]


def _kernels(call: Call) -> list[Kernel]:
    """Return the kernel along rows and along columns."""
    sizes = _pair(call["kernel_size"])
    strides = _pair(call["stride"] or sizes)
    dilations = _pair(call["dilation"]) if "dilation" in call.names else [1, 1]
    return [Kernel(*numbers) for numbers in zip(sizes, strides, _pair(call["padding"]), dilations, strict=True)]


def _halo(call: Call, source: Any) -> Halo | None:
    sharded = sharded_image(source)
    if sharded is None or source.ndim != 4 or not source.dtype.is_floating_point:
        return None
    dim, axis = sharded
    kernel = _kernels(call)[dim - 2]
    size = kernel.results(source.shape[dim], ceil=bool(call["ceil_mode"]))
    return halo_over(source, dim, axis, size, kernel.sources)


def _changes(call: Call, halo: Halo) -> dict[str, Any]:
    padding = _pair(call["padding"])
    padding[halo.dim - 2] = 0
    return {"padding": padding}


def _shape(source: Any, halo: Halo, out: torch.Tensor) -> list[int]:
    shape = [source.shape[0], *out.shape[1:]]
    shape[halo.dim] = halo.size
    return shape


def _first_row(halo: Halo) -> int:
    """Return the row of the full image at which this rank's extended part starts; negative in the padding."""
    return halo.exchange.wants[halo.exchange.here].start - halo.before


def max_pool(call: Call, halo: Halo) -> Any:
    """Return the maximum of each window, and its position in the full image."""
    source = call["self"]
    part = with_halo(halo, local_part(source, halo.places, call.mesh), LOWEST)
    out, index = call.run({(0,): part}, **_changes(call, halo), ceil_mode=_ceil(call, halo))
    out, index = _own(out, halo), _own(index, halo)
    width = part.shape[3]
    row, column = index // width, index % width
    if halo.dim == 2:
        row = (row + _first_row(halo)).clamp(0, source.shape[2] - 1)
    else:
        column = (column + _first_row(halo)).clamp(0, source.shape[3] - 1)
    shape = _shape(source, halo, out)
    place = row * source.shape[3] + column
    return wrap(out, call.mesh, halo.places, shape), wrap(place, call.mesh, halo.places, shape)


def max_pool_backward(call: Call, halo: Halo) -> Any:
    """Send each gradient to the position of its maximum."""
    source = call["self"]
    gradient, place = (local_part(call[name], halo.places, call.mesh) for name in ("grad_output", "indices"))
    batch, channels = gradient.shape[:2]
    lengths = [*source.shape[2:]]
    want = halo.exchange.wants[halo.exchange.here]
    row, column = place // source.shape[3], place % source.shape[3]
    row, column = (row - want.start, column) if halo.dim == 2 else (row, column - want.start)
    lengths[halo.dim - 2] = want.size
    inner = gradient.new_zeros(batch, channels, lengths[0] * lengths[1])
    inner.scatter_add_(2, (row * lengths[1] + column).flatten(2), gradient.flatten(2))
    inner = halo.exchange.give_back(inner.view(batch, channels, *lengths))
    return wrap(inner, call.mesh, halo.places, source.shape)


def average_pool(call: Call, halo: Halo) -> Any:
    """Return the sum of each window, divided as one device divides."""
    source = call["self"]
    part = with_halo(halo, local_part(source, halo.places, call.mesh))
    part = part.to(accumulation_dtype(part.dtype))
    sums = call.run({(0,): part}, **_changes(call, halo), ceil_mode=_ceil(call, halo), divisor_override=1)
    sums = _own(sums, halo)
    means = (sums / _divisor(call, halo, sums)).to(source.dtype)
    return wrap(means, call.mesh, halo.places, _shape(source, halo, means))


def average_pool_backward(call: Call, halo: Halo) -> Any:
    """Return each value's share of the gradient; shares of the halo go back to their owners."""
    source = call["self"]
    part = with_halo(halo, local_part(source, halo.places, call.mesh))
    gradient = local_part(call["grad_output"], halo.places, call.mesh)
    gradient = gradient / _divisor(call, halo, gradient)
    options = {**_changes(call, halo), "ceil_mode": _ceil(call, halo), "divisor_override": 1}
    inner = call.run({(0,): gradient, (1,): part}, **options)
    return wrap(own_gradient(halo, inner), call.mesh, halo.places, source.shape)


def _ceil(call: Call, halo: Halo) -> bool:
    """Return ceil_mode; the sharded dim fits exactly, so rounding up affects only the other dim."""
    return bool(call["ceil_mode"])


def _own(out: torch.Tensor, halo: Halo) -> torch.Tensor:
    return out.narrow(halo.dim, 0, halo.results.size)


def _divisor(call: Call, halo: Halo, like: torch.Tensor) -> torch.Tensor:
    """Return the number of values that each window counts."""
    if call["divisor_override"] is not None:
        return like.new_full((), float(call["divisor_override"]))
    counts = []
    for space, kernel in enumerate(_kernels(call)):
        dim, length = space + 2, call["self"].shape[space + 2]
        first = halo.results.start if dim == halo.dim else 0
        start = (torch.arange(like.shape[dim], device=like.device) + first) * kernel.stride - kernel.padding
        stop = (start + kernel.size).clamp(max=length + kernel.padding)
        if not call["count_include_pad"]:
            start, stop = start.clamp(min=0), stop.clamp(max=length)
        counts.append((stop - start).to(like.dtype))
    return counts[0].unsqueeze(1) * counts[1]


def _rule(run: Callable[[Call, Halo], Any], otherwise: Callable[[Call], Any]) -> Callable[[Call], Any]:
    def pool(call: Call) -> Any:
        halo = _halo(call, call["self"])
        return otherwise(call) if halo is None else run(call, halo)

    return pool


def _if_empty(text: str) -> Callable[[Call], Any]:
    run = signature_rule(text)
    return lambda call: run(call) if has_empty_input(call) else USE_TORCH


WHERE = "batch, channels; one of rows and columns by halos"
WHY = "torch has no strategy, or gathers the image, or hangs when a shard is empty"
RULES = [
    Rule("pool", (name,), WHERE, WHY, _rule(run, otherwise), torch_handles_even=True)
    for name, run, otherwise in (
        ("max_pool2d_with_indices.default", max_pool, signature_rule("nc** -> nc, nc")),
        ("max_pool2d_with_indices_backward.default", max_pool_backward, signature_rule("nc**, nc**, nc** -> nc")),
        ("avg_pool2d.default", average_pool, _if_empty("nc** -> nc")),
        ("avg_pool2d_backward.default", average_pool_backward, signature_rule("nc**, nc** -> nc")),
    )
]
