"""Fused steps of Adam, AdamW, SGD and Adagrad: gradients are redistributed to their parameter's placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_dispatch import written_positions
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.rules.optimizer.foreach import on_reduced_lists
from holdfast.spmd.sharding.local_parts import full_tensor, local_part
from holdfast.spmd.sharding.partials import is_partial


def fused(call: Call) -> Any:
    """Redistribute gradients to their parameter's placements; written tensors must have these already."""
    parameters = call.values[0]
    written = written_positions(call.op)
    if not all(isinstance(p, DTensor) and not is_partial(p) for p in parameters):
        return USE_TORCH
    tensors: dict[ArgSlot, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for slot, tensor in call.tensor_args():
        parameter = parameters[slot[1]] if len(slot) == 2 else None
        if parameter is None or tensor.shape != parameter.shape or not isinstance(tensor, DTensor):
            tensors[slot] = full_tensor(tensor)
        elif tuple(tensor.placements) == tuple(parameter.placements):
            tensors[slot] = local_of(tensor)
        elif slot[0] in written and call.names[slot[0]] != "grads":
            return USE_TORCH
        else:
            tensors[slot] = local_part(tensor, parameter.placements, call.mesh)
        if parameter is not None and tensor.shape == parameter.shape:
            own, like = tensors[slot], local_of(parameter)
            if own.stride() != like.stride():  # the kernels iterate over memory and ignore strides
                tensors[slot] = torch.empty_like(like, dtype=own.dtype).copy_(own)
                copies.append((own, tensors[slot]))
    call.run(tensors)
    for own, stepped in copies:
        own.copy_(stepped)
    return None


def fused_if_strided(call: Call) -> Any:
    """Run where a kernel may meet strides that differ from its parameter's; torch handles the other steps.

    These are parameters that are not contiguous, such as channels_last weights, and gradients with other placements
    than their parameter: uneven rows that other ranks sent need not be contiguous.
    """
    parameters = call.values[0]
    strided = any(isinstance(p, DTensor) and not p.is_contiguous() for p in parameters)
    return fused(call) if strided or _is_moved(call, parameters) else USE_TORCH


def _is_moved(call: Call, parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if a tensor has other placements than the parameter that it belongs to."""
    for slot, tensor in call.tensor_args():
        parameter = parameters[slot[1]] if len(slot) == 2 else None
        if not isinstance(parameter, DTensor) or not isinstance(tensor, DTensor) or tensor.shape != parameter.shape:
            continue
        if tensor.placements != parameter.placements:
            return True
    return False


def fused_on_reduced(call: Call) -> Any:
    """Do the same for parameters that may be Partial: they are reduced in place first."""
    answer = on_reduced_lists(call)
    return fused(call) if answer is USE_TORCH else answer


RULES = [
    Rule(
        "optimizer",
        ("_fused_sgd_.default", "_fused_sgd_.tensor_lr", "_fused_adagrad_.default", "_fused_adagrad_.tensor_lr"),
        "every dim",
        "torch has no strategy",
        fused,
    ),
]
ADAM = ("_fused_adam_.default", "_fused_adam_.tensor_lr", "_fused_adamw_.default", "_fused_adamw_.tensor_lr")
if torch_versions.AT_LEAST_2_13:
    why = "torch ignores that the strides of a gradient may differ from those of its parameter: transposed, or moved"
    RULES.append(Rule("optimizer", ADAM, "every dim", why, fused_if_strided))
else:
    why = "torch computes each rank's part of a Partial by itself, or a copy of the parameter"
    RULES.append(Rule("optimizer", ADAM, "every dim; a Partial is reduced first", why, fused_on_reduced))
