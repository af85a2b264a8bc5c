"""Conjugates, computed at once, because collectives send memory and ignore a lazy conjugate bit."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_specs
from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_of, make_spec
from holdfast.spmd.sharding.gathered_views import gathered_view


def conjugate(call: Call) -> Any:
    """Conjugate each rank's part; nothing is gathered, but the copy writes through, because torch promises a view."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor):
        return USE_TORCH
    spec = make_spec(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype)
    return gathered_view(torch_specs.wrap(local_of(tensor).conj_physical(), spec), call)


RULES = [
    Rule(
        "pointwise",
        ("_conj.default",),
        "every dim",
        "torch marks the rank's tensor as conjugate, and what is gathered then is not, or raises on some ranks",
        conjugate,
    ),
]
