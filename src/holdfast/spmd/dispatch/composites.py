"""Operators that are made of others: in inference mode DTensor meets them whole, elsewhere only their parts.

torch 2.13 runs them whole on shards where the rules of their parts would let it. But a loss then divides by the rows
of a shard, dropout draws the same numbers on every rank, and no rule of ours is asked. Taken apart they are what they
are outside of inference mode.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.base import torch_private as private

ATEN = torch.ops.aten
# as right whole as in parts where nothing moves and nothing is left to add, and several times as fast
WHOLE = frozenset(
    (ATEN.matmul.default, ATEN.linear.default, ATEN.layer_norm.default, ATEN.softmax.int, ATEN.log_softmax.int)
)


def is_whole(op: Any, args: Any) -> bool:
    """Whether torch may be asked for a composite as it is."""
    return op in WHOLE or (op is ATEN.dropout.default and not args[2])


def take_apart(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of a composite by way of its parts."""
    if op._schema.is_mutable:  # whose versions must be counted
        return op.decompose(*args, **kwargs)
    return private.take_apart(op, args, kwargs)
