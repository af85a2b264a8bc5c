"""Operators that work element by element: any dim may be sharded, nothing is ever sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.spmd.base.call import LEAVE, Call, Spot
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.mixed_placements import torch_joins
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def aligned(call: Call, outputs: int) -> Signature:
    """Letters for tensors that are broadcast together: dims are counted from the right, and size 1 is not sharded."""
    tensors = [tensor for _, tensor in call.spots()]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    letters = LETTERS[: len(shape)]
    inputs = []
    for tensor in tensors:
        own = letters[len(letters) - tensor.ndim :] if tensor.ndim else ""
        inputs.append(
            "".join(
                FIXED if size == 1 and shape[place - tensor.ndim] != 1 else letter
                for place, (letter, size) in enumerate(zip(own, tensor.shape, strict=True))
            )
        )
    return Signature(tuple(inputs), (letters,) * outputs, letters)


def pointwise(call: Call) -> Any:
    """Run an elementwise operator on shards."""
    if call.is_inplace or torch_joins(call):
        return LEAVE
    signature = aligned(call, len(call.op._schema.returns))
    if call.op is torch.ops.aten.complex.default:  # linear in both parts
        signature = replace(signature, sums=((0, 1), (0,)))
    return run_sharded(call, signature)


def log_sigmoid_backward(call: Call) -> Any:
    """What the forward call kept is made again: on GPUs it is an empty tensor, whatever its DTensor says."""
    bare = replace(call, values=(*call.values[:2], None))

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> Any:
        _, kept = torch.ops.aten.log_sigmoid_forward.default(tensors[1,])
        return bare.run({**tensors, (2,): kept})

    return run_sharded(bare, aligned(bare, 1), local)


ACTIVATIONS = (
    "hardtanh_backward.default",
    "hardswish_backward.default",
    "hardsigmoid_backward.default",
    "hardshrink_backward.default",
    "softshrink_backward.default",
    "_prelu_kernel_backward.default",
    "__lshift__.Scalar",
    "__lshift__.Tensor",
    "__rshift__.Scalar",
    "__rshift__.Tensor",
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
        ("log_sigmoid_backward.default",),
        "every dim of every argument",
        "torch has no strategy, and takes what the forward call kept for a shard of its shape",
        log_sigmoid_backward,
    ),
]
