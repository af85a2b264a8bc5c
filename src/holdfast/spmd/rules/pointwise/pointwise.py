"""Elementwise operators without a rule of torch (hypot, gcd, polar, gradients of activations), and shifts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.mixed_placements import torch_aligns
from holdfast.spmd.sharding.plain_tensors import with_plain_gradients
from holdfast.spmd.sharding.signature import ChosenPlacements, broadcast_signature, run_sharded


def pointwise(call: Call) -> Any:
    """Run an elementwise operator on shards."""
    if call.is_inplace or torch_aligns(call):
        return USE_TORCH
    signature = broadcast_signature(call, len(call.op._schema.returns))
    if call.op is torch.ops.aten.complex.default:  # linear in both arguments
        signature = replace(signature, sums=((0, 1), (0,)))
    return run_sharded(call, signature)


def log_sigmoid_backward(call: Call) -> Any:
    """Recompute the forward call's buffer: on GPUs it is an empty tensor, whatever its DTensor says."""
    bare = replace(call, values=(*call.values[:2], None))

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
        _, kept = torch.ops.aten.log_sigmoid_forward.default(tensors[1,])
        return bare.run({**tensors, (2,): kept})

    return run_sharded(bare, broadcast_signature(bare, 1), local)


ACTIVATIONS = (
    "hardtanh_backward.default",
    "hardswish_backward.default",
    "hardsigmoid_backward.default",
    "hardshrink_backward.default",
    "softshrink_backward.default",
    "_prelu_kernel_backward.default",
    "frexp.Tensor",
    "heaviside.default",
    "nextafter.default",
    "complex.default",
    "gcd.default",
    "lcm.default",
    "ldexp.Tensor",
    "hypot.default",
    "copysign.Tensor",
    "fmax.default",
    "fmin.default",
)

SHIFTS = ("__lshift__.Scalar", "__lshift__.Tensor", "__rshift__.Scalar", "__rshift__.Tensor")


RULES = [
    Rule(
        "pointwise",
        ACTIVATIONS,
        "every dim of every argument",
        "torch has no strategy for these operators, so calls on DTensors raise",
        pointwise,
    ),
    Rule(
        "pointwise",
        SHIFTS,
        "every dim of every argument",
        "torch mistakes these calls for writes in place, as their names end in _, and returns the input unchanged",
        pointwise,
    ),
    Rule(
        "pointwise",
        ("log_sigmoid_backward.default",),
        "every dim of every argument",
        "torch has no strategy, and takes the forward call's buffer for a shard of its shape",
        log_sigmoid_backward,
    ),
    Rule(
        "pointwise",
        ("polar.default",),
        "every dim",
        "torch has no strategy, and cannot hash the complex number in the gradient formula",
        with_plain_gradients("mul.Scalar", run=pointwise),
    ),
]
