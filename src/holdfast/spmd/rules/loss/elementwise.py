"""mse, smooth_l1, huber, binary_cross_entropy and soft_margin losses: the mean is over the elements of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import HALF_DTYPES
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.shard_sizes import sharded_dim
from holdfast.spmd.sharding.signature import ChosenPlacements, Signature, broadcast_signature, run_sharded

NONE, MEAN, SUM = 0, 1, 2


def elementwise(call: Call) -> Any:
    """Run a loss that compares elements one by one."""
    broadcast = broadcast_signature(call, 1)
    if call["reduction"] == NONE and has_empty_input(call):
        return run_sharded(call, broadcast)
    signature = Signature(broadcast.inputs, ("",), broadcast.free)
    if call["reduction"] == SUM and has_empty_input(call):
        return run_sharded(call, signature)
    if call["reduction"] != MEAN:
        return USE_TORCH

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = call.run(_widened(tensors), reduction=SUM)
        return (total / _elements(chosen)).to(call["self"].dtype)

    return run_sharded(call, signature, local)


def elementwise_backward(call: Call) -> Any:
    """Return the gradient of the sum, divided by the number of all elements."""
    if call["reduction"] != MEAN or (_is_linear(call) and not _has_shards(call)):
        return USE_TORCH

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
        gradient: torch.Tensor = call.run(_widened(tensors), reduction=SUM)
        return (gradient / _elements(chosen)).to(call["self"].dtype)

    return run_sharded(call, broadcast_signature(call, 1), local)


def _widened(tensors: dict[ArgSlot, torch.Tensor]) -> dict[ArgSlot, torch.Tensor]:
    """Return half precision tensors as float32: a sum, unlike the mean made from it, may overflow."""
    return {slot: tensor.float() if tensor.dtype in HALF_DTYPES else tensor for slot, tensor in tensors.items()}


def _is_linear(call: Call) -> bool:
    """Return True for mse_loss_backward, whose Partials may stay Partial, as in torch."""
    return bool(call.op._schema.name == "aten::mse_loss_backward")


def _has_shards(call: Call) -> bool:
    placed = [tensor for _, tensor in call.tensor_args() if isinstance(tensor, DTensor)]
    return any(sharded_dim(place) is not None for tensor in placed for place in tensor.placements)


def _elements(chosen: ChosenPlacements) -> int:
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
