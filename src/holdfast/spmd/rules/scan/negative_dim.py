"""cumprod, cummax, cummin and logcumsumexp: a negative dim counted from the start, and empty shards."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import USE_TORCH, Call, call_with_positive_dim
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.one_dim import along
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.plain_tensors import PLAIN_IN_GRADIENT, with_plain_gradients


def with_positive_dim(call: Call) -> Any:
    """Scan along the dim counted from the start."""
    if call["dim"] >= 0:
        return along(len(call.op._schema.returns))(call) if has_empty_input(call) else USE_TORCH
    return call_with_positive_dim(call, call.values[0].ndim)


EVERY_OTHER = "every dim but the scanned one"
RULES = [
    Rule(
        "scan",
        tuple(f"{name}.default" for name in ("logcumsumexp", "cummax", "cummin", "_logcumsumexp")),
        EVERY_OTHER,
        "torch takes a negative dim for another dim than the sharded one, and scans each shard by itself",
        with_positive_dim,
    ),
    Rule(
        "scan",
        ("cumprod.default",),
        EVERY_OTHER,
        PLAIN_IN_GRADIENT,
        with_plain_gradients("where.self", "cat.default", run=with_positive_dim),
    ),
    Rule(
        "scan", ("cumprod_.default",), "as torch", PLAIN_IN_GRADIENT, with_plain_gradients("where.self", "cat.default")
    ),
]
