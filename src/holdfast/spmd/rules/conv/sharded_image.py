"""Convolution of images whose rows or columns are sharded: ranks exchange halos, also in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast.spmd.base.call import ArgSlot, Call
from holdfast.spmd.sharding.halo import Halo, Kernel, halo_over, own_gradient, sharded_image, with_halo
from holdfast.spmd.sharding.local_parts import local_part, wrap


def halo_of(call: Call) -> Halo | None:
    """Return the halo of a convolution; None if the input has to be gathered."""
    sharded = sharded_image(call["input"])
    if sharded is None or call["transposed"]:
        return None
    dim, axis = sharded
    space = dim - 2
    kernel = Kernel(call["weight"].shape[dim], call["stride"][space], call["padding"][space], call["dilation"][space])
    return halo_over(call["input"], dim, axis, kernel.results(call["input"].shape[dim]), kernel.sources)


def forward(call: Call, halo: Halo) -> Any:
    """Convolve this rank's rows with the halo of its neighbours."""
    source = call["input"]
    tensors: dict[ArgSlot, torch.Tensor] = {(0,): with_halo(halo, local_part(source, halo.places, call.mesh))}
    for position in (1, 2):
        if call.values[position] is not None:
            tensors[position,] = local_part(call.values[position], [Replicate()] * call.mesh.ndim, call.mesh)
    out = call.run(tensors, padding=inner_padding(call, halo))
    return wrap(out, call.mesh, halo.places, _result_shape(halo, source, out))


def backward(call: Call, halo: Halo) -> Any:
    """Return the gradients; those of the halo go back to the ranks that own the rows."""
    source, weight = call["input"], call["weight"]
    tensors: dict[ArgSlot, torch.Tensor] = {
        (0,): local_part(call["grad_output"], halo.places, call.mesh),
        (1,): with_halo(halo, local_part(source, halo.places, call.mesh)),
        (2,): local_part(weight, [Replicate()] * call.mesh.ndim, call.mesh),
    }
    inner, of_weight, of_bias = call.run(tensors, padding=inner_padding(call, halo))
    return (
        None if inner is None else wrap(own_gradient(halo, inner), call.mesh, halo.places, source.shape),
        None if of_weight is None else wrap(of_weight, call.mesh, halo.summed, weight.shape),
        None if of_bias is None else wrap(of_bias, call.mesh, halo.summed, of_bias.shape),
    )


def inner_padding(call: Call, halo: Halo) -> list[int]:
    """Return the padding of the whole dims; the padding of the sharded dim is already in the rows."""
    return [0 if space == halo.dim - 2 else size for space, size in enumerate(call["padding"])]


def _result_shape(halo: Halo, source: DTensor, out: torch.Tensor) -> list[int]:
    shape = [source.shape[0], *out.shape[1:]]
    shape[halo.dim] = halo.size
    return shape
