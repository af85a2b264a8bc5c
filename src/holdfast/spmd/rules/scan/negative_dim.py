"""Scans whose dim is counted from the end."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import LEAVE, Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.one_dim import along
from holdfast.spmd.sharding.empty_shards import has_empty


def from_the_front(call: Call) -> Any:
    """Say the dim as torch's own rule understands it."""
    dim = call["dim"]
    if dim >= 0:
        return along(len(call.op._schema.returns))(call) if has_empty(call) else LEAVE
    values = list(call.values)
    values[call.names.index("dim")] = dim + max(call.values[0].ndim, 1)
    return apply(call.op, values)


EVERY_OTHER = "every dim but the scanned one"
RULES = [
    Rule(
        "scan",
        tuple(f"{name}.default" for name in ("logcumsumexp", "cummax", "cummin", "_logcumsumexp")),
        EVERY_OTHER,
        "torch takes a negative dim for another dim than the sharded one, and scans each shard by itself",
        from_the_front,
    ),
]
