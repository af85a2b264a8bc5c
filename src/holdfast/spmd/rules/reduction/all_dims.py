"""sum, nansum and count_nonzero over an empty list of dims, which in torch means all dims."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.registry import Rule


def all_dims(call: Call) -> Any:
    """Call again with all dims listed, so that torch's own rule sees them."""
    tensor, dims = call.values[0], call["dim"]
    if dims is None or len(dims) or not tensor.ndim:
        return USE_TORCH
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
