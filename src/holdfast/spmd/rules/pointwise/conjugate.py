"""Conjugates: computed at once, since what sends a rank's memory knows nothing of a conjugate that is only promised."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.gathered_views import window


def conjugate(call: Call) -> Any:
    """Each rank its own part; a window, because torch promises a view."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor):
        return LEAVE
    local = private.local_of(tensor).conj().resolve_conj()
    spec = private.make_spec(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype)
    return window(private.wrap(local, spec), call)


RULES = [
    Rule(
        "pointwise",
        ("_conj.default",),
        "every dim",
        "torch marks the rank's tensor as conjugate, and what is gathered then is not, or raises on some ranks",
        conjugate,
    ),
]
