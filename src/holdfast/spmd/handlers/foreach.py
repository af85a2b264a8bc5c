"""Lists of tensors at once, as optimizers have them: a Partial among them is reduced first; torch 2.13 does so."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, apply, moved, wrap
from holdfast.spmd.fallback import gather_and_run
from holdfast.spmd.parts import is_partial, reduced_places
from holdfast.spmd.registry import Rule


def settled_lists(call: Call) -> Any:
    """Reduce what is Partial and call again; where it is written, on the whole."""
    if not any(is_partial(tensor) for _, tensor in call.spots()):
        return LEAVE
    written = private.written(call.op)
    if any(spot[0] in written and is_partial(tensor) for spot, tensor in call.spots()):
        return gather_and_run(call)
    return apply(call.op, [list(map(_settled, value)) if isinstance(value, list) else value for value in call.values])


def _settled(tensor: Any) -> Any:
    if not is_partial(tensor):
        return tensor
    places = reduced_places(tensor)
    return wrap(moved(tensor, places, tensor.device_mesh), tensor.device_mesh, places, tensor.shape)


def copy_each(call: Call) -> Any:
    """Copy tensor by tensor: each pair moves no more than it must."""
    for target, source in zip(call["self"], call["src"], strict=True):
        torch.ops.aten.copy_.default(target, source, call["non_blocking"])
    return None


COPY = "_foreach_copy_.default"
PLACES = "every dim; a Partial is reduced first"
WHY = "torch computes each rank's part of a Partial by itself"
OLDER = () if private.AT_LEAST_2_13 else tuple(name for name in private.operators("_foreach_") if name != COPY)
RULES = [
    Rule("optimizer", (COPY,), "every dim", "no rule", copy_each),
    *([Rule("optimizer", OLDER, PLACES, WHY, settled_lists)] if OLDER else []),
]
