"""Lists of tensors at once, as optimizers have them: a Partial among them is reduced first; torch 2.13 does so."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, apply, moved, wrap
from holdfast.spmd.registry import Rule


def settled_lists(call: Call) -> Any:
    """Reduce what is Partial, in place where it is written, and call again."""
    if not any(_is_partial(tensor) for _, tensor in call.spots()):
        return LEAVE
    values = []
    for argument, value in zip(call.op._schema.arguments, call.values, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        values.append([_settle(item, written) for item in value] if isinstance(value, (list, tuple)) else value)
    return apply(call.op, values)


def _is_partial(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements)


def _settle(tensor: Any, written: bool) -> Any:
    if not _is_partial(tensor):
        return tensor
    places = [Replicate() if isinstance(place, Partial) else place for place in tensor.placements]
    local = moved(tensor, places, tensor.device_mesh)
    if not written:
        return wrap(local, tensor.device_mesh, places, tensor.shape)
    private.replace_contents(tensor, local.clone(), places)
    return tensor


PLACES = "every dim; a Partial is reduced first"
WHY = "torch computes each rank's part of a Partial by itself"
RULES = [] if private.AT_LEAST_2_13 else [Rule("optimizer", private.operators("_foreach_"), PLACES, WHY, settled_lists)]
