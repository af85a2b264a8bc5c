"""vector_norm and _foreach_norm of order inf, -inf or negative, which an empty shard must not affect; dist."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.partials import is_partial


def vector_norm(call: Call) -> Any:
    """Run torch.linalg.vector_norm with ord=inf or -inf; torch handles other orders, with 0 for an empty shard."""
    tensor = call.values[0]
    order = float(call["ord"])
    if float("-inf") < order < 0 and has_empty_input(call):
        return gather_and_run(call)
    if order not in (float("inf"), float("-inf")) or tensor.numel() == 0 or not _is_placed(tensor):
        return USE_TORCH
    return _extreme(tensor, order, call["dim"], call["keepdim"], call["dtype"])


def dist(call: Call) -> Any:
    """Run torch.dist as the norm of a difference: its gradient compares that difference with the result."""
    if not any(is_partial(tensor) for _, tensor in call.tensor_args()):
        return USE_TORCH
    one, other = call.values[:2]
    return torch.ops.aten.linalg_vector_norm.default(torch.ops.aten.sub.Tensor(one, other), call["p"])


def foreach_norm(call: Call) -> Any:
    """Do the same for each tensor of a list, as clip_grad_norm_ needs it."""
    tensors, order = call.values[0], float(call["ord"])
    if order < 0 and has_empty_input(call):
        return gather_and_run(call)
    if order != float("inf") or not all(isinstance(t, DTensor) and t.numel() for t in tensors):
        return USE_TORCH
    if not any(_is_placed(tensor) for tensor in tensors):
        return USE_TORCH
    return [_extreme(tensor, order, None, False, call["dtype"]) for tensor in tensors]


def _is_placed(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not all(place.is_replicate() for place in tensor.placements)


def _extreme(tensor: Any, order: float, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    magnitude = torch.ops.aten.abs.default(tensor if dtype is None else tensor.to(dtype))
    reduce = torch.ops.aten.amax.default if order > 0 else torch.ops.aten.amin.default
    return reduce(magnitude, [] if dim is None else dim, keepdim)


WHY = "torch leaves a Partial whose gradient forgets ties, and an empty shard spoils or hangs it"
NEGATIVE = "gathered for negative ones if a shard is empty"
RULES = [
    Rule(
        "reduction", ("linalg_vector_norm.default",), f"every dim, for ord=inf and -inf; {NEGATIVE}", WHY, vector_norm
    ),
    Rule("reduction", ("_foreach_norm.Scalar",), f"every dim, for ord=inf; {NEGATIVE}", WHY, foreach_norm),
    Rule(
        "reduction",
        ("dist.default",),
        "every dim, for a Partial",
        "the gradient for p=inf compares a Partial with the result, which torch rounds differently",
        dist,
    ),
]
