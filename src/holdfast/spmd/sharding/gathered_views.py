"""Gathered views: copies of rows of a sharded dim that write through to their tensor, refreshed after its writes.

`y[2:6]` of a row-sharded y is gathered, so a write into the copy would be lost. A GatheredView is that copy: a write
into it is written back into y, and every live view of y is refreshed from what the write gathered on every rank. A
write into y itself is gathered when a view is next read. Gathering at such a write could wait forever: one rank may
have kept a view that the others have dropped. live_views.py watches the writes that torch does not count.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from holdfast.spmd.base import torch_specs
from holdfast.spmd.base.call import Call, apply, bind
from holdfast.spmd.base.collective_errors import naming
from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.base.torch_autograd import counts_write
from holdfast.spmd.base.torch_dispatch import is_view, written_positions
from holdfast.spmd.base.torch_modes import is_tracing, out_of_graph
from holdfast.spmd.base.torch_specs import (
    cacheable_spec,
    local_of,
    replace_contents,
    spec_of,
    uncached_spec,
)
from holdfast.spmd.sharding.gather_fallback import write_back
from holdfast.spmd.sharding.live_views import add_live_view, live_views, version_of
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, replicated


class GatheredView(DTensor):
    """A DTensor that behaves as a view without sharing memory."""

    __slots__ = ("_base_tensor", "_shown_version", "_views")

    _base_tensor: DTensor
    _views: tuple[Call | int, ...]  # calls, and the index of the result for a call with several
    _shown_version: int | None  # the version of the base that the copy shows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_on_views(func, args, kwargs or {})

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Refresh, then redistribute; DTensor's method reads the copy without the dispatcher, as full_tensor() does."""
        _refresh(self)
        return super().redistribute(*args, **kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """Refresh, then return the local tensor; DTensor's method reads the copy without the dispatcher."""
        with naming("DTensor.to_local() of a view of a sharded dim, whose tensor was written since,", self):
            _refresh(self)
        return super().to_local(**kwargs)

    def __tensor_flatten__(self) -> Any:
        """Leave the graph if a compiled region would return the view: the result would no longer write through."""
        if is_tracing() and type(local_of(self)) is not torch.Tensor:
            raise out_of_graph(_view_operator(self), "a view of a sharded dim is not returned from a graph")
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    def __coerce_same_metadata_as_tangent__(self, flatten_spec: Any, expected_type: type | None = None) -> Any:
        """Give the backward of a compiled region the DTensor that it expects as a gradient."""
        if expected_type not in (None, DTensor):
            return None
        return _as_dtensor(self).__coerce_same_metadata_as_tangent__(flatten_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Copy the rows as a DTensor of their own, as a copy of a view is on one device."""
        if self.requires_grad and not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]
        copied: DTensor = copy.deepcopy(_as_dtensor(self), memo)
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows as a DTensor of their own: the tensor they were taken from is not saved with them."""
        return _as_dtensor(self).__reduce_ex__(protocol)


def is_gathered_view(value: Any) -> bool:
    """Return True for a gathered view, or a list that contains one."""
    if isinstance(value, (list, tuple)):
        return any(type(item) is GatheredView for item in value)
    return type(value) is GatheredView


def call_on_views(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call with gathered views among its arguments, and write through what it writes."""
    call = bind(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and type(call.values[0]) is GatheredView:
        raise UnsupportedCall(f"{func} changes the shape of a view of a sharded dim in place: use the form without _")
    if is_tracing() and _writes_view(call):
        raise out_of_graph(func, "a write into a view of a sharded dim is sent to other ranks")
    plain = Call(func, tuple(tree_map(_as_dtensor, list(call.values))), call.mesh)
    result = apply(func, plain.values)
    first = call.values[0] if call.values else None
    if isinstance(first, GatheredView) and is_view(func):
        return _gathered_views(result, first._base_tensor, (*first._views, call))
    written = _written(call, plain)
    targets = [target for target, _ in written if isinstance(target, GatheredView)]
    for target, stood_for in written:
        if isinstance(target, GatheredView):
            _write_through(target, stood_for)
    _expect_versions(func, targets)
    returns = func._schema.returns
    if not written or not returns or returns[0].alias_info is None:
        return result
    return written[0][0] if len(returns) == 1 else tuple(target for target, _ in written)


def _writes_view(call: Call) -> bool:
    return any(is_gathered_view(call.values[position]) for position in written_positions(call.op))


def _written(call: Call, plain: Call) -> list[tuple[Any, Any]]:
    """Return the tensors that a call writes, each with the DTensor that stood for it."""
    pairs: list[tuple[Any, Any]] = []
    for position in sorted(written_positions(call.op)):
        target, shown = call.values[position], plain.values[position]
        if isinstance(target, (list, tuple)):
            pairs += zip(target, shown, strict=True)
        else:
            pairs.append((target, shown))
    return pairs


def gathered_view(result: Any, call: Call) -> Any:
    """Tie the gathered results of a view operator to the tensor that was viewed."""
    return _gathered_views(result, call.values[0], (call,))


def _gathered_views(result: Any, base: DTensor, views: tuple[Any, ...]) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_gathered_view(item, base, (*views, place)) for place, item in enumerate(result))
    return _gathered_view(result, base, views)


def _gathered_view(item: Any, base: DTensor, views: tuple[Any, ...]) -> Any:
    if not isinstance(item, DTensor):
        return item
    made = torch_specs.wrap_as(GatheredView, local_of(item), uncached_spec(spec_of(item)))
    made._base_tensor, made._views, made._shown_version = base, views, version_of(base)
    add_live_view(made, base)
    return made


def _refresh(value: GatheredView) -> None:
    """Gather a view again if its base has changed, or may have."""
    base = value._base_tensor
    version = version_of(base)
    if version is None or version != value._shown_version:
        if is_tracing():
            raise out_of_graph(_view_operator(value), "the view has to be fetched again after a write")
        _update(value, full_tensor(base))
        value._shown_version = version


def _update(value: GatheredView, everything: torch.Tensor) -> None:
    """Update a view from the full contents of its base, under the placements it has: a caller may have read them."""
    rows: Any = everything
    for view in value._views:  # without a lazy conjugate, which no view_as_real takes
        rows = _take_views(rows, (view,))
        rows = rows.resolve_conj().resolve_neg() if isinstance(rows, torch.Tensor) else rows
    part = local_part(rows, value.placements, value.device_mesh)
    replace_contents(value, part.clone(), value.placements)


def _view_operator(value: GatheredView) -> Any:
    return next(view.op for view in value._views if isinstance(view, Call))


def _as_dtensor(value: Any) -> Any:
    """Return the DTensor that a GatheredView stands for."""
    if not isinstance(value, GatheredView):
        return value
    _refresh(value)
    return torch_specs.wrap(local_of(value), cacheable_spec(spec_of(value)))


def _take_views(everything: torch.Tensor, views: tuple[Any, ...]) -> Any:
    """Take the same views of a plain tensor."""
    for view in views:
        everything = everything[view] if isinstance(view, int) else view.run({(0,): everything})
    return everything


def _write_through(written: GatheredView, contents: DTensor) -> None:
    """Write the contents of a view into its base, and refresh the base's other views."""
    base = written._base_tensor
    value = full_tensor(contents)
    everything = full_tensor(base).clone()
    _take_views(everything, written._views).copy_(value)
    if isinstance(base, GatheredView):
        _write_through(base, replicated(everything, base.device_mesh))
    else:
        write_back(base, everything)
    for other in live_views(base):
        if other is not written:
            _update(other, everything)
    replace_contents(written, local_of(contents), contents.placements)


def _expect_versions(func: Any, written: list[GatheredView]) -> None:
    """Set the versions of live views to what torch will count after the call, so that they stay fresh."""
    for base in {id(target._base_tensor): target._base_tensor for target in written}.values():
        version = version_of(base)
        if version is not None:
            own = (target for target in written if target._base_tensor is base)
            version += sum(counts_write(func, target, base) for target in own)
        for value in live_views(base):
            value._shown_version = version
