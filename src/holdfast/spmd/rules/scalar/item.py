"""A DTensor as a number: always the number of the whole tensor."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import LEAVE, Call, whole
from holdfast.spmd.base.registry import Rule


def number(call: Call) -> Any:
    """`.item()`, `float()`, `bool()`: reduced first where ranks hold parts."""
    tensor = call.values[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return LEAVE
    return whole(tensor).item()


RULES = [
    Rule("scalar", ("_local_scalar_dense.default",), "any", "torch gives the rank's own part of a Partial", number),
]
