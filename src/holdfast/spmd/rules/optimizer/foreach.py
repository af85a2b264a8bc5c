"""Rules of `torch._foreach_*`: Partials in lists are reduced first (before torch 2.13), copies run one by one."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.base import torch_dispatch, torch_versions
from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_dispatch import written_positions
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.partials import is_partial, reduced_placements


def on_reduced_lists(call: Call) -> Any:
    """Reduce Partials and call again; gather if a Partial is written."""
    if not any(is_partial(tensor) for _, tensor in call.tensor_args()):
        return USE_TORCH
    written = written_positions(call.op)
    if any(slot[0] in written and is_partial(tensor) for slot, tensor in call.tensor_args()):
        return gather_and_run(call)
    return call.again(_reduced)


def _reduced(tensor: Any) -> Any:
    if not is_partial(tensor):
        return tensor
    places = reduced_placements(tensor)
    return wrap(local_part(tensor, places, tensor.device_mesh), tensor.device_mesh, places, tensor.shape)


def copy_each(call: Call) -> Any:
    """Copy tensor by tensor: each pair moves no more than it must."""
    for target, source in zip(call["self"], call["src"], strict=True):
        torch.ops.aten.copy_.default(target, source, call["non_blocking"])
    return None


COPY = "_foreach_copy_.default"
PLACES = "every dim; a Partial is reduced first"
WHY = "torch computes each rank's part of a Partial by itself"
OLDER = (
    ()
    if torch_versions.AT_LEAST_2_13
    else tuple(name for name in torch_dispatch.operators("_foreach_") if name != COPY)
)
RULES = [
    Rule("optimizer", (COPY,), "every dim", "no rule", copy_each),
    *([Rule("optimizer", OLDER, PLACES, WHY, on_reduced_lists)] if OLDER else []),
]
