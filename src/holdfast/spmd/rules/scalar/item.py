"""`.item()`, `float()` and `bool()` of a DTensor: always the number of the full tensor."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.local_parts import full_tensor


def item(call: Call) -> Any:
    """Run `.item()`, `float()` or `bool()`; a Partial is reduced first."""
    tensor = call.values[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return USE_TORCH
    return full_tensor(tensor).item()


RULES = [
    Rule("scalar", ("_local_scalar_dense.default",), "any", "torch gives the rank's own part of a Partial", item),
]
