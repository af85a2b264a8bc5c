"""Composite operators, which DTensor sees whole only in inference mode: run whole or decomposed.

torch 2.13 runs them whole on shards if the rules of their parts would allow it. But then a loss divides by the rows of
a shard, dropout draws the same numbers on every rank, and no rule of this package runs. Decomposed, they give the
results that they give outside of inference mode.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.base import torch_dispatch

ATEN = torch.ops.aten
# right without decomposition if nothing is redistributed and no Partial remains; several times faster
WHOLE = frozenset(
    (ATEN.matmul.default, ATEN.linear.default, ATEN.layer_norm.default, ATEN.softmax.int, ATEN.log_softmax.int)
)


def may_run_whole(op: Any, args: Any) -> bool:
    """Return True if torch may be asked for a decision on the composite itself."""
    return op in WHOLE or (op is ATEN.dropout.default and not args[2])


def decompose(op: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite through its decomposition."""
    if op._schema.is_mutable:  # its version counters must advance
        return op.decompose(*args, **kwargs)
    return torch_dispatch.run_decomposed(op, args, kwargs)
