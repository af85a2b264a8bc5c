"""Transposed convolution of images whose rows or columns are sharded: halos, and rows of other ranks dropped.

A row of the result needs few rows of the input, as in a convolution. But the kernel also computes rows of other ranks,
which need their inputs too: these are computed there, and dropped here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate

from holdfast.spmd.base.call import ArgSlot, Call
from holdfast.spmd.rules.conv.sharded_image import inner_padding
from holdfast.spmd.sharding.halo import Halo, halo_over, sharded_image
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.row_exchange import Span, pad_rows


def halo_of(call: Call) -> Halo | None:
    """Return the halo of a transposed convolution; None if the input has to be gathered."""
    sharded = sharded_image(call["input"])
    if sharded is None or not call["transposed"]:
        return None
    dim, axis = sharded
    stride, padding, reach = _kernel(call, dim)
    length = call["input"].shape[dim]
    size = (length - 1) * stride - 2 * padding + reach + call["output_padding"][dim - 2]

    def sources(results: Span) -> Span:
        first = max(0, -(-(results.start + padding - reach + 1) // stride))
        return Span(first, min(length, (results.stop - 1 + padding) // stride + 1))

    halo = halo_over(call["input"], dim, axis, size, sources)
    return None if halo is None or 0 in (span.size for span in halo.exchange.wants) else halo


def _kernel(call: Call, dim: int) -> tuple[int, int, int]:
    space = dim - 2
    reach = call["dilation"][space] * (call["weight"].shape[dim] - 1) + 1
    return call["stride"][space], call["padding"][space], reach


def _first_row(call: Call, halo: Halo) -> int:
    """Return the row of the result at which this rank's kernel starts."""
    stride, padding, _ = _kernel(call, halo.dim)
    return halo.exchange.wants[halo.exchange.here].start * stride - padding


def forward(call: Call, halo: Halo) -> Any:
    """Compute every row that this rank's input contributes to, and keep its own."""
    source, bias = call["input"], call["bias"]
    everywhere = [Replicate()] * call.mesh.ndim
    tensors: dict[ArgSlot, torch.Tensor] = {
        (0,): halo.exchange.fetch(local_part(source, halo.places, call.mesh)),
        (1,): local_part(call["weight"], everywhere, call.mesh),
    }
    out = call.run(tensors, bias=None, padding=inner_padding(call, halo), output_padding=_output_padding(call, halo))
    out = _rows_at(out, halo.dim, Span(_first_row(call, halo), 0), halo.results)
    if bias is not None:
        out = out + local_part(bias, everywhere, call.mesh).view([1, -1] + [1] * (out.ndim - 2))
    shape = [source.shape[0], *out.shape[1:]]
    shape[halo.dim] = halo.size
    return wrap(out, call.mesh, halo.places, shape)


def backward(call: Call, halo: Halo) -> Any:
    """Return the gradients; rows of other ranks get zeros."""
    source, weight = call["input"], call["weight"]
    stride, _, reach = _kernel(call, halo.dim)
    own = halo.exchange.fetch(local_part(source, halo.places, call.mesh))
    gradient = local_part(call["grad_output"], halo.places, call.mesh)
    first = _first_row(call, halo)
    computed = Span(first, first + (own.shape[halo.dim] - 1) * stride + reach)
    tensors: dict[ArgSlot, torch.Tensor] = {
        (0,): _rows_at(gradient, halo.dim, halo.results, computed),
        (1,): own,
        (2,): local_part(weight, [Replicate()] * call.mesh.ndim, call.mesh),
    }
    changes = {"padding": inner_padding(call, halo), "output_padding": _output_padding(call, halo)}
    wanted = list(call["output_mask"])
    inner, of_weight, _ = call.run(tensors, **changes, output_mask=[*wanted[:2], False])
    of_bias = gradient.sum([dim for dim in range(gradient.ndim) if dim != 1]) if wanted[2] else None
    if inner is not None:
        inner = wrap(halo.exchange.give_back(inner), call.mesh, halo.places, source.shape)
    return (
        inner,
        None if of_weight is None else wrap(of_weight, call.mesh, halo.summed, weight.shape),
        None if of_bias is None else wrap(of_bias, call.mesh, halo.summed, of_bias.shape),
    )


def _output_padding(call: Call, halo: Halo) -> list[int]:
    return [0 if space == halo.dim - 2 else size for space, size in enumerate(call["output_padding"])]


def _rows_at(tensor: torch.Tensor, dim: int, present: Span, wanted: Span) -> torch.Tensor:
    """Return rows that start at `present.start`, sliced and padded with zeros to `wanted`."""
    rows = Span(present.start, present.start + tensor.shape[dim])
    kept = wanted.within(rows)
    if not kept.size:
        kept = Span(rows.start, rows.start)
        return pad_rows(tensor.narrow(dim, 0, 0), dim, 0, wanted.size, 0.0)
    part = tensor.narrow(dim, kept.start - rows.start, kept.size)
    return pad_rows(part, dim, kept.start - wanted.start, wanted.stop - kept.stop, 0.0)
