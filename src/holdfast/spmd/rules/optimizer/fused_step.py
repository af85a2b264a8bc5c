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
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, wrap
from holdfast.spmd.sharding.partials import is_partial, overwrite, reduced_placements


def fused(call: Call) -> Any:
    """Run on every tensor as its parameter is placed; write back the states that are placed otherwise."""
    parameters = call.values[0]
    if not all(isinstance(p, DTensor) and not is_partial(p) for p in parameters):
        return USE_TORCH
    written = written_positions(call.op)
    if call["grad_scale"] is None:
        written -= {call.names.index("grads")}
    tensors: dict[ArgSlot, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    redistributed: list[tuple[DTensor, DTensor, torch.Tensor]] = []
    for slot, tensor in call.tensor_args():
        parameter = _parameter_of(parameters, slot, tensor)
        if parameter is None or not isinstance(tensor, DTensor):
            tensors[slot] = full_tensor(tensor)
        elif tuple(tensor.placements) == tuple(parameter.placements):
            tensors[slot] = local_of(tensor)
        else:
            tensors[slot] = local_part(tensor, parameter.placements, call.mesh)
            if slot[0] in written:
                tensors[slot] = tensors[slot].clone()  # part of a replica is a view of it
                redistributed.append((tensor, parameter, tensors[slot]))
        if parameter is not None:
            own, like = tensors[slot], local_of(parameter)
            if own.stride() != like.stride():  # the kernels iterate over memory and ignore strides
                tensors[slot] = torch.empty_like(like, dtype=own.dtype).copy_(own)
                copies.append((own, tensors[slot]))
    call.run(tensors)
    for own, stepped in copies:
        own.copy_(stepped)
    for tensor, parameter, stepped in redistributed:
        result = wrap(stepped, call.mesh, parameter.placements, tensor.shape)
        overwrite(tensor, local_part(result, reduced_placements(tensor), call.mesh))
    return None


def _parameter_of(parameters: Sequence[DTensor], slot: ArgSlot, tensor: torch.Tensor) -> DTensor | None:
    """Return the parameter that a gradient or state of its shape belongs to; None for steps and learning rates."""
    parameter = parameters[slot[1]] if len(slot) == 2 else None
    return parameter if parameter is not None and tensor.shape == parameter.shape else None


def fused_if_misaligned(call: Call) -> Any:
    """Run if a tensor's strides may differ from its parameter's, or its placements do; torch handles all other steps.

    Strides differ for parameters that are not contiguous, such as channels_last weights, and for gradients with other
    placements: uneven rows received from other ranks may not be contiguous.
    """
    parameters = call.values[0]
    if not all(isinstance(p, DTensor) for p in parameters):
        return USE_TORCH
    strided = not all(p.is_contiguous() for p in parameters)
    return fused(call) if strided or _has_other_placements(call, parameters) else USE_TORCH


def _has_other_placements(call: Call, parameters: Sequence[DTensor]) -> bool:
    """Return True if a gradient or state tensor is placed differently from its parameter."""
    for slot, tensor in call.tensor_args():
        parameter = _parameter_of(parameters, slot, tensor)
        if parameter is not None and isinstance(tensor, DTensor) and tensor.placements != parameter.placements:
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
    why = "torch ignores that a tensor's strides and placements may differ from its parameter's"
    RULES.append(Rule("optimizer", ADAM, "every dim", why, fused_if_misaligned))
else:
    why = "torch computes each rank's part of a Partial by itself, or a copy of the parameter"
    RULES.append(Rule("optimizer", ADAM, "every dim; a Partial is reduced first", why, fused_on_reduced))
