"""Views that could not be views: a gathered copy that remembers where it came from.

`y[2:6]` of a y whose rows are sharded has to be gathered, so what is written into it would be lost. A Window is that
copy; what is written into it is put back into the tensor that it was taken from, and it is gathered again when that
tensor has changed since.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from holdfast.core.errors import Unsupported
from holdfast.spmd import torch_private as private
from holdfast.spmd.call import Call, apply, bind, replicated, whole
from holdfast.spmd.fallback import put_back


class Window(DTensor):
    """A DTensor that is a view by promise, not by memory."""

    __slots__ = ("_base_tensor", "_real_mesh", "_seen", "_views")

    _base_tensor: DTensor
    _real_mesh: DeviceMesh  # its spec may name another, by which the dispatcher's cache does not know it
    _views: tuple[Call, ...]
    _seen: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return look_through(func, args, kwargs or {})


def is_window(value: Any) -> bool:
    """Whether an argument is a window, or a list with one in it."""
    if isinstance(value, (list, tuple)):
        return any(type(item) is Window for item in value)
    return type(value) is Window


def look_through(func: Any, args: Any, kwargs: Any) -> Any:
    """A call among whose arguments are windows: on what they show, and what is written goes where it came from."""
    call = bind(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and type(call.values[0]) is Window:
        raise Unsupported(f"{func} changes the shape of a view of a sharded dim in place: use the form without _")
    plain = Call(func, tuple(tree_map(_plain, list(call.values))), call.mesh)
    result = apply(func, plain.values)
    written = call.values[0] if call.values else None
    if call.is_inplace and isinstance(written, Window):
        _put_through(written, plain.values[0])
        return written
    if isinstance(written, Window) and private.is_view(func):
        return tree_map(lambda item: _window(item, written._base_tensor, (*written._views, call)), result)
    return result


def window(result: Any, call: Call) -> Any:
    """Results of a view call that had to gather, tied to the tensor that was viewed."""
    if not private.ASKS_SUBCLASSES:
        return result
    base = call.values[0]
    if isinstance(result, (tuple, list)):
        return type(result)(_window(item, base, (call, _pick(place))) for place, item in enumerate(result))
    return _window(result, base, (call,))


def _pick(place: int) -> Any:
    return place


def _window(item: Any, base: DTensor, views: tuple[Any, ...]) -> Any:
    if not isinstance(item, DTensor):
        return item
    spec = private.spec_of(item)
    made = private.wrap_as(Window, private.local_of(item), private.apart(spec) if private.is_oldest() else spec)
    made._base_tensor, made._views, made._seen, made._real_mesh = base, views, base._version, item.device_mesh
    return made


def _plain(value: Any) -> Any:
    """The DTensor that a Window stands for, gathered again if its base has changed."""
    if not isinstance(value, Window):
        return value
    if value._base_tensor._version != value._seen:
        fresh = replicated(_look(whole(value._base_tensor), value._views), value._real_mesh)
        private.replace_contents(value, private.local_of(fresh).clone(), fresh.placements)
        value._seen = value._base_tensor._version
    return private.wrap(private.local_of(value), private.moved_to(private.spec_of(value), value._real_mesh))


def _look(everything: torch.Tensor, views: tuple[Any, ...]) -> Any:
    """Take the same views of a plain tensor."""
    for view in views:
        everything = everything[view] if isinstance(view, int) else view.run({(0,): everything})
    return everything


def _put_through(written: Window, contents: DTensor) -> None:
    """After an in-place call on a window's copy: the same into the tensor that was viewed."""
    base = written._base_tensor
    value = whole(contents)
    everything = whole(base).clone()
    _look(everything, written._views).copy_(value)
    if isinstance(base, Window):
        _put_through(base, replicated(everything, base._real_mesh))
    else:
        put_back(base, everything)
    private.replace_contents(written, private.local_of(contents), contents.placements)
    written._seen = base._version
