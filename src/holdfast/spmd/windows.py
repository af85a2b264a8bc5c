"""Views that could not be views: a gathered copy that remembers where it came from.

`y[2:6]` of a y whose rows are sharded has to be gathered, so what is written into it would be lost. A Window is that
copy; what is written into it is put back into the tensor that it was taken from, and every live window of that tensor
is refreshed then, from what the write has gathered on every rank. What is written beside them, into the tensor itself,
is gathered when a window is next read: a rank may have kept a window that the others have dropped, so that to gather
at such a write could wait for ranks that have nothing to refresh. torch counts the writes into a tensor, except those
of foreach and fused operators: `mark_stale` sees to these once there is a window.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import Call, apply, bind, replicated, whole
from holdfast.spmd.errors import UnsupportedCall
from holdfast.spmd.every_rank import named
from holdfast.spmd.fallback import put_back
from holdfast.spmd.plain import go_on


class Window(DTensor):
    """A DTensor that is a view by promise, not by memory."""

    __slots__ = ("_base_tensor", "_seen", "_views")

    _base_tensor: DTensor
    _views: tuple[Call | int, ...]  # calls, and which of the results of a call that has several
    _seen: int | None  # the base's version that it shows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return look_through(func, args, kwargs or {})

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As DTensor's, which reads the copy without asking the dispatcher; full_tensor() comes here too."""
        _refresh(self)
        return super().redistribute(*args, **kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """As DTensor's, which reads the copy without asking the dispatcher."""
        with named("DTensor.to_local() of a view of a sharded dim, whose tensor was written since,", self):
            _refresh(self)
        return super().to_local(**kwargs)


# The live windows of each tensor that was viewed.
LIVE: MutableMapping[DTensor, list[weakref.ref[Window]]] = WeakIdKeyDictionary()
STALE = -1  # the version of a window that must be gathered again


def is_window(value: Any) -> bool:
    """Whether an argument is a window, or a list with one in it."""
    if isinstance(value, (list, tuple)):
        return any(type(item) is Window for item in value)
    return type(value) is Window


def look_through(func: Any, args: Any, kwargs: Any) -> Any:
    """A call among whose arguments are windows: on what they show, and what is written goes where it came from."""
    call = bind(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and type(call.values[0]) is Window:
        raise UnsupportedCall(f"{func} changes the shape of a view of a sharded dim in place: use the form without _")
    plain = Call(func, tuple(tree_map(_plain, list(call.values))), call.mesh)
    result = apply(func, plain.values)
    first = call.values[0] if call.values else None
    if isinstance(first, Window) and private.is_view(func):
        return _windows(result, first._base_tensor, (*first._views, call))
    written = _written(call, plain)
    targets = [target for target, _ in written if isinstance(target, Window)]
    for target, shown in written:
        if isinstance(target, Window):
            _put_through(target, shown)
    _expect_versions(func, targets)
    returns = func._schema.returns
    if not written or not returns or returns[0].alias_info is None:
        return result
    return written[0][0] if len(returns) == 1 else tuple(target for target, _ in written)


def _written(call: Call, plain: Call) -> list[tuple[Any, Any]]:
    """The tensors that a call writes into, each with what stood for it."""
    writes = [bool(argument.alias_info and argument.alias_info.is_write) for argument in call.op._schema.arguments]
    pairs: list[tuple[Any, Any]] = []
    for target, shown, is_written in zip(call.values, plain.values, writes, strict=True):
        if is_written and isinstance(target, (list, tuple)):
            pairs += zip(target, shown, strict=True)
        elif is_written:
            pairs.append((target, shown))
    return pairs


def window(result: Any, call: Call) -> Any:
    """Results of a view call that had to gather, tied to the tensor that was viewed."""
    return _windows(result, call.values[0], (call,))


def _windows(result: Any, base: DTensor, views: tuple[Any, ...]) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_window(item, base, (*views, place)) for place, item in enumerate(result))
    return _window(result, base, views)


def _window(item: Any, base: DTensor, views: tuple[Any, ...]) -> Any:
    if not isinstance(item, DTensor):
        return item
    made = private.wrap_as(Window, private.local_of(item), private.apart(private.spec_of(item)))
    made._base_tensor, made._views, made._seen = base, views, _version(base)
    _see_uncounted_writes()
    LIVE.setdefault(base, []).append(weakref.ref(made))
    return made


@functools.cache
def _uncounted() -> tuple[Any, ...]:
    """The foreach and fused operators that write: torch counts none of their writes into DTensors."""
    names = [name for prefix in ("_foreach_", "_fused_", "_amp_foreach_") for name in private.operators(prefix)]
    return tuple(op for op in map(private.operator, names) if op is not None and private.written(op))


def _see_uncounted_writes() -> None:
    """From now on let these operators mark windows; the dispatcher's own way is faster before."""
    table = private.handlers()
    if table.get(_uncounted()[0]) is not mark_stale:
        for op in _uncounted():
            table.setdefault(op, mark_stale)


def mark_stale(op: Any, args: Any, kwargs: Any) -> Any:
    """Go the common way with a write that torch does not count; windows of what was written are gathered at a read."""
    result = go_on(op, args, kwargs)
    call = bind(op, args, kwargs)
    places = private.written(op)
    memory = {private.memory_of(tensor) for spot, tensor in call.spots() if spot[0] in places}
    for base in list(LIVE):
        if private.memory_of(base) in memory:
            for value in _live(base):
                value._seen = STALE
    return result


def _live(base: DTensor) -> list[Window]:
    """The windows of a tensor that something still refers to."""
    pairs = [(reference, reference()) for reference in LIVE.get(base, ())]
    LIVE[base] = [reference for reference, found in pairs if found is not None]
    return [found for _, found in pairs if found is not None]


def _version(base: DTensor) -> int | None:
    """How often a tensor was written; None where torch does not count."""
    return None if base.is_inference() else base._version


def _refresh(value: Window) -> None:
    """Gather a window again if its base has changed, or may have."""
    base = value._base_tensor
    version = _version(base)
    if version is None or version != value._seen:
        _show(value, whole(base))
        value._seen = version


def _show(value: Window, everything: torch.Tensor) -> None:
    """Make a window hold its part of what its base holds."""
    fresh = replicated(_look(everything, value._views), value.device_mesh)
    private.replace_contents(value, private.local_of(fresh).clone(), fresh.placements)


def _plain(value: Any) -> Any:
    """The DTensor that a Window stands for."""
    if not isinstance(value, Window):
        return value
    _refresh(value)
    return private.wrap(private.local_of(value), private.common(private.spec_of(value)))


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
        _put_through(base, replicated(everything, base.device_mesh))
    else:
        put_back(base, everything)
    for other in _live(base):
        if other is not written:
            _show(other, everything)
    private.replace_contents(written, private.local_of(contents), contents.placements)


def _expect_versions(func: Any, written: list[Window]) -> None:
    """Take the windows of what was written for fresh once torch has counted these writes, as it does after the call."""
    for base in {id(target._base_tensor): target._base_tensor for target in written}.values():
        version = _version(base)
        if version is not None:
            own = (target for target in written if target._base_tensor is base)
            version += sum(private.will_count(func, target, base) for target in own)
        for value in _live(base):
            value._seen = version
