"""Convolution and its gradients by batch, output channels, input channels (partial sums), and depthwise channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.spmd.base.call import ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import own_coordinate
from holdfast.spmd.rules.conv import sharded_image, sharded_image_transposed
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import FIXED, ChosenPlacements, Signature, run_sharded

PER_DIM = ("stride", "padding", "dilation", "output_padding")


def _is_depthwise(call: Call) -> bool:
    channels = call["input"].shape[1]
    weight = call["weight"].shape
    return bool(call["groups"] == channels and weight[0] == channels and weight[1] == 1 and channels > 1)


def _letters(call: Call) -> tuple[str, str, str, str]:
    """Return the letters of the input, the weight, the bias and the result."""
    space = FIXED * (call["input"].ndim - 2)
    if _is_depthwise(call):
        return "nc" + space, "c" + FIXED + space, "c", "nc" + space
    if call["groups"] != 1:
        return "n" + FIXED + space, FIXED * 2 + space, FIXED, "n" + FIXED + space
    return "nc" + space, ("co" if call["transposed"] else "oc") + space, "o", "no" + space


def _with_values_per_dim(call: Call) -> Call:
    """Return the call with stride, padding and dilation given per dim: torch accepts one number for all."""
    space = call["input"].ndim - 2
    values = [
        list(value) * space if name in PER_DIM and len(value) == 1 else value
        for name, value in zip(call.names, call.values, strict=True)
    ]
    return replace(call, values=tuple(values))


def forward(call: Call) -> Any:
    """Run the convolution; with sharded input channels the results are partial sums, and one shard adds the bias."""
    call = _with_values_per_dim(call)
    if not _bias_fits(call):
        return gather_and_run(call)  # raises on every rank, not only on those that add the bias
    for kind in (sharded_image, sharded_image_transposed):
        if (halo := kind.halo_of(call)) is not None:
            return kind.forward(call, halo)
    source, weight, bias, result = _letters(call)
    inputs = (source, weight, bias) if call["bias"] is not None else (source, weight)
    signature = Signature(inputs, (result,), "".join(sorted(set(source + weight) - {FIXED})))

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
        changes: dict[str, Any] = {"groups": tensors[0,].shape[1]} if _is_depthwise(call) else {}
        if "c" not in result and not _is_first(chosen):
            changes["bias"] = None
        return call.run(tensors, **changes)  # type: ignore[no-any-return]

    return run_sharded(call, signature, local)


def _bias_fits(call: Call) -> bool:
    """Return True if the bias has one value per output channel."""
    channels = call["weight"].shape[1] * call["groups"] if call["transposed"] else call["weight"].shape[0]
    return call["bias"] is None or tuple(call["bias"].shape) == (channels,)


def _is_first(chosen: ChosenPlacements, position: int = 0) -> bool:
    """Return True if this rank has the first shard of the input channels."""
    coordinate = own_coordinate(chosen.call.mesh)
    places = enumerate(chosen.inputs[position])
    return not any(is_shard(place) and place.dim == 1 and coordinate[axis] for axis, place in places)


def backward(call: Call) -> Any:
    """Shard each gradient by the letters that it has, and sum it over the letters that it lacks."""
    call = _with_values_per_dim(call)
    for kind in (sharded_image, sharded_image_transposed):
        if (halo := kind.halo_of(call)) is not None:
            return kind.backward(call, halo)
    source, weight, bias, result = _letters(call)
    free = "".join(sorted(set(source + weight) - {FIXED}))
    signature = Signature((result, source, weight), (source, weight, bias), free)

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
        changes: dict[str, Any] = {"groups": tensors[1,].shape[1]} if _is_depthwise(call) else {}
        if call["bias_sizes"] is not None:
            changes["bias_sizes"] = [tensors[0,].shape[1]]
        gradients = list(call.run(tensors, **changes))
        if bias == "o" and gradients[2] is not None and not _is_first(chosen, 1):
            gradients[2].zero_()  # every shard of the input channels computes it whole, and it is summed later
        return gradients

    return run_sharded(call, signature, local)


WHY = "torch is right for replicated and even batch shards only"
WHERE = "batch, output channels, input channels; depthwise: batch and channels; one spatial dim by halos"
RULES = [
    Rule("conv", ("convolution.default",), WHERE, WHY, forward, torch_handles_even=True),
    Rule("conv", ("convolution_backward.default",), WHERE, WHY, backward, torch_handles_even=True),
]
