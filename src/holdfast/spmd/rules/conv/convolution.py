"""Convolution by batch, by output channels, by input channels (a sum), and depthwise by channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, Spot, is_shard
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.conv import sharded_image_transposed
from holdfast.spmd.sharding import halo
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded

PER_DIM = ("stride", "padding", "dilation", "output_padding")


def _is_depthwise(call: Call) -> bool:
    channels = call["input"].shape[1]
    weight = call["weight"].shape
    return bool(call["groups"] == channels and weight[0] == channels and weight[1] == 1 and channels > 1)


def _letters(call: Call) -> tuple[str, str, str, str]:
    """Letters of the input, the weight, the bias and the result."""
    space = FIXED * (call["input"].ndim - 2)
    if _is_depthwise(call):
        return "nc" + space, "c" + FIXED + space, "c", "nc" + space
    if call["groups"] != 1:
        return "n" + FIXED + space, FIXED * 2 + space, FIXED, "n" + FIXED + space
    return "nc" + space, ("co" if call["transposed"] else "oc") + space, "o", "no" + space


def _spelt(call: Call) -> Call:
    """The same call with a stride, a padding and a dilation for each dim: torch takes one number for all of them."""
    space = call["input"].ndim - 2
    values = [
        list(value) * space if name in PER_DIM and len(value) == 1 else value
        for name, value in zip(call.names, call.values, strict=True)
    ]
    return replace(call, values=tuple(values))


def forward(call: Call) -> Any:
    """Where input channels are sharded the results are summed, and one shard adds the bias."""
    call = _spelt(call)
    if not _bias_fits(call):
        return gather_and_run(call)  # which raises on every rank, not only on those that add the bias
    for kind in (halo, sharded_image_transposed):
        if (found := kind.halo_of(call)) is not None:
            return kind.forward(call, found)
    source, weight, bias, result = _letters(call)
    inputs = (source, weight, bias) if call["bias"] is not None else (source, weight)
    signature = Signature(inputs, (result,), "".join(sorted(set(source + weight) - {FIXED})))

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> torch.Tensor:
        changes: dict[str, Any] = {"groups": tensors[0,].shape[1]} if _is_depthwise(call) else {}
        if "c" not in result and not _is_first(chosen):
            changes["bias"] = None
        return call.run(tensors, **changes)  # type: ignore[no-any-return]

    return run_sharded(call, signature, local)


def _bias_fits(call: Call) -> bool:
    """Whether the bias has a number for each output channel."""
    channels = call["weight"].shape[1] * call["groups"] if call["transposed"] else call["weight"].shape[0]
    return call["bias"] is None or tuple(call["bias"].shape) == (channels,)


def _is_first(chosen: Chosen, position: int = 0) -> bool:
    """Whether this rank has the first of the shards of the input channels."""
    coordinate = private.own_coordinate(chosen.call.mesh)
    places = enumerate(chosen.inputs[position])
    return not any(is_shard(place) and place.dim == 1 and coordinate[axis] for axis, place in places)


def backward(call: Call) -> Any:
    """Each gradient is sharded by the letters that it has, and summed over those that it lacks."""
    call = _spelt(call)
    for kind in (halo, sharded_image_transposed):
        if (found := kind.halo_of(call)) is not None:
            return kind.backward(call, found)
    source, weight, bias, result = _letters(call)
    free = "".join(sorted(set(source + weight) - {FIXED}))
    signature = Signature((result, source, weight), (source, weight, bias), free)

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> Any:
        changes: dict[str, Any] = {"groups": tensors[1,].shape[1]} if _is_depthwise(call) else {}
        if call["bias_sizes"] is not None:
            changes["bias_sizes"] = [tensors[0,].shape[1]]
        gradients = list(call.run(tensors, **changes))
        if bias == "o" and gradients[2] is not None and not _is_first(chosen, 1):
            gradients[2].zero_()  # every shard of the input channels has it whole, and it will be summed
        return gradients

    return run_sharded(call, signature, local)


WHY = "torch is right for replicated and even batch shards only"
WHERE = "batch, output channels, input channels; depthwise: batch and channels; space by its edges"
RULES = [
    Rule("conv", ("convolution.default",), WHERE, WHY, forward, spares_even=True),
    Rule("conv", ("convolution_backward.default",), WHERE, WHY, backward, spares_even=True),
]
