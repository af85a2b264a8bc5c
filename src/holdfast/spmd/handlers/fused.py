"""Fused optimizer steps: element by element, each parameter where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, Spot, moved, whole
from holdfast.spmd.handlers.foreach import settled_lists
from holdfast.spmd.parts import is_partial
from holdfast.spmd.registry import Rule


def fused(call: Call) -> Any:
    """Gradients come to their parameter's placement; what is written must be there already."""
    parameters = call.values[0]
    written = private.written(call.op)
    if not all(isinstance(p, DTensor) and not is_partial(p) for p in parameters):
        return LEAVE
    tensors: dict[Spot, torch.Tensor] = {}
    laid: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spot, tensor in call.spots():
        parameter = parameters[spot[1]] if len(spot) == 2 else None
        if parameter is None or tensor.shape != parameter.shape or not isinstance(tensor, DTensor):
            tensors[spot] = whole(tensor)
        elif tuple(tensor.placements) == tuple(parameter.placements):
            tensors[spot] = private.local_of(tensor)
        elif spot[0] in written and call.names[spot[0]] != "grads":
            return LEAVE
        else:
            tensors[spot] = moved(tensor, parameter.placements, call.mesh)
        if parameter is not None and tensor.shape == parameter.shape:
            own, like = tensors[spot], private.local_of(parameter)
            if own.stride() != like.stride():  # the kernels go through memory, and not by strides
                tensors[spot] = torch.empty_like(like, dtype=own.dtype).copy_(own)
                laid.append((own, tensors[spot]))
    call.run(tensors)
    for own, stepped in laid:
        own.copy_(stepped)
    return None


def fused_if_turned(call: Call) -> Any:
    """Where a parameter does not lie row by row, as channels_last weights do not; else torch does it, and remembers."""
    turned = any(isinstance(p, DTensor) and not p.is_contiguous() for p in call.values[0])
    return fused(call) if turned else LEAVE


def settled_fused(call: Call) -> Any:
    """The same where parameters may be Partial: they are reduced in place first."""
    answer = settled_lists(call)
    return fused(call) if answer is LEAVE else answer


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
if private.AT_LEAST_2_13:
    why = "torch takes gradients that lie in memory otherwise than a transposed parameter as if they lay alike"
    RULES.append(Rule("optimizer", ADAM, "every dim", why, fused_if_turned))
else:
    why = "torch computes each rank's part of a Partial by itself, or a copy of the parameter"
    RULES.append(Rule("optimizer", ADAM, "every dim; a Partial is reduced first", why, settled_fused))
