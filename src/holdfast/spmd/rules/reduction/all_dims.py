"""Reductions over an empty list of dims, by which torch means all of them."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import LEAVE, Call, apply
from holdfast.spmd.base.registry import Rule


def all_dims(call: Call) -> Any:
    """Name the dims, so that torch's own rule sees which they are."""
    tensor, dims = call.values[0], call["dim"]
    if dims is None or len(dims) or not tensor.ndim:
        return LEAVE
    values = list(call.values)
    values[call.names.index("dim")] = list(range(tensor.ndim))
    return apply(call.op, values)


RULES = [
    Rule(
        "reduction",
        ("sum.dim_IntList", "nansum.default", "count_nonzero.dim_IntList"),
        "every dim",
        "torch reduces no dim where an empty list means all, so amin's gradient is NaN and shapes are wrong",
        all_dims,
    ),
]
