"""weight_norm: computed by its formula, since the kernel ignores the strides of a tensor that was redistributed."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule

ATEN = torch.ops.aten


def weight_norm(call: Call) -> Any:
    """Return the weight of direction v and length g, and the lengths of v, which are kept for the gradient."""
    v, g, dim = call.values
    if all(place.is_replicate() for t in (v, g) if isinstance(t, DTensor) for place in t.placements):
        return USE_TORCH
    others = [other for other in range(v.ndim) if other != dim % v.ndim]
    lengths = ATEN.linalg_vector_norm.default(v, 2, others, True)
    scale = ATEN.div.Tensor(g, lengths)
    return ATEN.mul.Tensor(v, scale), ATEN.clone.default(lengths)


RULES = [
    Rule(
        "norm",
        ("_weight_norm_interface.default",),
        "every dim",
        "torch's kernel ignores the strides of a tensor that was redistributed",
        weight_norm,
    ),
]
