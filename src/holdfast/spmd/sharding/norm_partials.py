"""Norms that torch leaves to be reduced later, as the root of a sum of powers: which calls may take them as they are.

torch counts them among the sums, so that `x.norm(dim=0).sum()` is the root of a sum of squares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.base.call import Call, apply
from holdfast.spmd.base.torch_dispatch import is_view, written_positions
from holdfast.spmd.base.torch_specs import local_of, replace_contents
from holdfast.spmd.base.torch_versions import NormPartial
from holdfast.spmd.sharding.local_parts import local_part
from holdfast.spmd.sharding.partials import reduce_partials

ATEN = torch.ops.aten
COPIES = frozenset({ATEN.clone.default, ATEN._to_copy.default, ATEN.detach.default, ATEN.alias.default})
JOINS = frozenset({ATEN.stack.default, ATEN.cat.default})
NORMS = frozenset({ATEN.linalg_vector_norm.default, ATEN._foreach_norm.Scalar})


def has_norm(call: Call) -> bool:
    """Return True if a norm that is not yet reduced is among the arguments."""
    return any(_orders(tensor) for _, tensor in call.tensor_args())


def keeps_norms(call: Call) -> bool:
    """Return True if torch is right to compute on each rank's part: views, joins, and norms of the same order."""
    if is_view(call.op) or call.op in COPIES:
        return True
    if call.op not in JOINS | NORMS:
        return False
    places = {tuple(tensor.placements) if isinstance(tensor, DTensor) else () for _, tensor in call.tensor_args()}
    orders = {order for _, tensor in call.tensor_args() for order in _orders(tensor)}
    return len(places) == 1 and (call.op in JOINS or orders == {float(call["ord"])})


def run_on_reduced_norms(call: Call) -> Any:
    """Reduce the norms, and call again. Norms that the call writes are reduced in their own memory."""
    written = written_positions(call.op)
    for slot, tensor in call.tensor_args():
        if slot[0] in written and isinstance(tensor, DTensor) and _orders(tensor):
            places = _without_norms(tensor)
            reduced = local_part(tensor, places, tensor.device_mesh)
            replace_contents(tensor, local_of(tensor).copy_(reduced), places)
    values = [[_reduced(item) for item in value] if _is_list(value) else _reduced(value) for value in call.values]
    return apply(call.op, values)


def _reduced(tensor: Any) -> Any:
    return reduce_partials(tensor) if _orders(tensor) else tensor


def _without_norms(tensor: DTensor) -> list[Placement]:
    return [Replicate() if isinstance(place, NormPartial) else place for place in tensor.placements]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value)


def _orders(tensor: Any) -> set[float]:
    """Return the orders of the norms that a tensor is a part of."""
    if not isinstance(tensor, DTensor):
        return set()
    return {float(place.norm_type) for place in tensor.placements if isinstance(place, NormPartial)}
