"""Losses: shards are summed, and the mean is taken over all elements, not over each rank's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import LEAVE, Call, Spot, is_shard
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.pointwise.pointwise import aligned
from holdfast.spmd.sharding.byte_costs import HALVES
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.signature import Chosen, Signature, run_sharded

NONE, MEAN, SUM = 0, 1, 2


def elementwise(call: Call) -> Any:
    """A loss of elements that are compared one by one."""
    broadcast = aligned(call, 1)
    if call["reduction"] == NONE and has_empty(call):
        return run_sharded(call, broadcast)
    signature = Signature(broadcast.inputs, ("",), broadcast.free)
    if call["reduction"] == SUM and has_empty(call):
        return run_sharded(call, signature)
    if call["reduction"] != MEAN:
        return LEAVE

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = call.run(_widened(tensors), reduction=SUM)
        return (total / _elements(chosen)).to(call["self"].dtype)

    return run_sharded(call, signature, local)


def elementwise_backward(call: Call) -> Any:
    """The gradient of such a loss: of the sum, divided by the number of all elements."""
    if call["reduction"] != MEAN or (_is_linear(call) and not _has_shards(call)):
        return LEAVE

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> torch.Tensor:
        gradient: torch.Tensor = call.run(_widened(tensors), reduction=SUM)
        return (gradient / _elements(chosen)).to(call["self"].dtype)

    return run_sharded(call, aligned(call, 1), local)


def _widened(tensors: dict[Spot, torch.Tensor]) -> dict[Spot, torch.Tensor]:
    """A sum, unlike the mean that it is on the way to, may be more than half a word can say."""
    return {spot: tensor.float() if tensor.dtype in HALVES else tensor for spot, tensor in tensors.items()}


def _is_linear(call: Call) -> bool:
    """Whether a Partial may stay one, as torch has it: for the difference that is the gradient of mse_loss."""
    return bool(call.op._schema.name == "aten::mse_loss_backward")


def _has_shards(call: Call) -> bool:
    return any(is_shard(place) for _, t in call.spots() if isinstance(t, DTensor) for place in t.placements)


def _elements(chosen: Chosen) -> int:
    return math.prod(chosen.size(letter) for letter in chosen.signature.free)


FORWARD = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
WHY = "torch takes the mean of each shard: the gradient is times the world size, and an empty shard gives NaN"
RULES = [
    Rule(
        "loss",
        (*(f"{name}.default" for name in FORWARD), "binary_cross_entropy_with_logits.default"),
        "every dim; the mean is Partial",
        WHY,
        elementwise,
    ),
    Rule("loss", tuple(f"{name}_backward.default" for name in FORWARD), "every dim", WHY, elementwise_backward),
]
