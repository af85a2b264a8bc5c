"""Norms that torch leaves to be reduced later, as the root of a sum of powers: which calls may take them as they are.

torch counts them among the sums, so that `x.norm(dim=0).sum()` is the root of a sum of squares. A write cannot keep
them so, as it keeps a Partial: a root has no sign. It reduces them in their own memory, for all their views.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.torch_dispatch import is_view, written_positions
from holdfast.spmd.base.torch_specs import local_of, replace_contents
from holdfast.spmd.base.torch_versions import NormPartial
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.partials import reduce_partials

ATEN = torch.ops.aten
COPIES = frozenset({ATEN.clone.default, ATEN._to_copy.default})
JOINS = frozenset({ATEN.stack.default, ATEN.cat.default})
NORMS = frozenset({ATEN.linalg_vector_norm.default, ATEN._foreach_norm.Scalar})


@dataclass(slots=True)
class _Viewed:
    """A norm's local tensor, whole, and the DTensors that show it or a view of it."""

    local: torch.Tensor
    shown_by: list[weakref.ref[DTensor]] = field(default_factory=list)


VIEWED: MutableMapping[DTensor, _Viewed] = WeakIdKeyDictionary()


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


def remember_views(call: Call, views: Any) -> Any:
    """Return the views of a norm, and tie them to it: a write into one of them is a write into all."""
    base = call.values[0]
    if base not in VIEWED:
        VIEWED[base] = _Viewed(local_of(base), [weakref.ref(base)])
    for view in views if isinstance(views, (list, tuple)) else [views]:
        VIEWED[base].shown_by.append(weakref.ref(view))
        VIEWED[view] = VIEWED[base]
    return views


def run_on_reduced_norms(call: Call) -> Any:
    """Reduce the norms, and call again. Norms that the call writes are reduced in their own memory."""
    written = written_positions(call.op)
    for slot, tensor in call.tensor_args():
        if slot[0] in written:
            reduce_in_place(tensor)
    return call.again(lambda value: reduce_partials(value) if _orders(value) else value)


def reduce_in_place(tensor: Any) -> None:
    """Reduce a norm and its views in the memory that they share; collective."""
    if not _orders(tensor):
        return
    viewed = VIEWED.get(tensor) or _Viewed(local_of(tensor), [weakref.ref(tensor)])
    parts = [place if isinstance(place, NormPartial) else Replicate() for place in tensor.placements]
    whole = wrap(viewed.local, tensor.device_mesh, parts, viewed.local.shape)
    viewed.local.copy_(local_part(whole, [Replicate()] * len(parts), tensor.device_mesh))
    for reference in viewed.shown_by:
        shown = reference()
        if shown is not None:
            replace_contents(shown, local_of(shown), _without_norms(shown))


def _without_norms(tensor: DTensor) -> list[Placement]:
    return [Replicate() if isinstance(place, NormPartial) else place for place in tensor.placements]


def _orders(tensor: Any) -> set[float]:
    """Return the orders of the norms that a tensor is a part of."""
    if not isinstance(tensor, DTensor):
        return set()
    return {float(place.norm_type) for place in tensor.placements if isinstance(place, NormPartial)}
