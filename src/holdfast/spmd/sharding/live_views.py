"""The live gathered views of each tensor, and the handlers that mark them stale.

torch counts the writes into a tensor, but not those of foreach and fused operators. These have a handler once a view
exists. A handled call is slower than the dispatcher's own path, so the first one without a live view removes the
handlers and takes that path.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.base.call import bind
from holdfast.spmd.base.torch_dispatch import Handler, written_positions
from holdfast.spmd.base.torch_specs import storage_id
from holdfast.spmd.sharding.plain_tensors import dispatch_again

# The live views of each tensor that was viewed.
LIVE: MutableMapping[DTensor, set[weakref.ref[Any]]] = WeakIdKeyDictionary()
STALE = -1  # the version of a view that must be gathered again
_LOCK = threading.RLock()  # one thread may make a view while another finds none and removes the handlers


@dataclass(slots=True)
class _WriteWatch:
    is_on: bool = False  # between enable() and disable()


_WRITE_WATCH = _WriteWatch()


class MarkStale:
    """The handler of an operator whose writes torch does not count; `replaced` is the handler it had before."""

    __slots__ = ("replaced",)

    def __init__(self, replaced: Handler | None) -> None:
        self.replaced = replaced

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run the call as without this handler; views of the written tensors are gathered when next read."""
        _remove_if_unused()
        try:
            if self.replaced is not None:
                return self.replaced(op, args, kwargs)
            if op not in torch_dispatch.handlers():
                return op(*args, **kwargs)
            return dispatch_again(op, args, kwargs)
        finally:
            _mark_written(op, args, kwargs)


def watch_writes() -> None:
    """From now on handle the uncounted writes while a view is alive; called by enable()."""
    with _LOCK:
        _WRITE_WATCH.is_on = True
        if any(LIVE.values()):
            _install()


def ignore_writes() -> None:
    """Remove the handlers, and install none until `watch_writes`."""
    with _LOCK:
        _WRITE_WATCH.is_on = False
        _remove()


def version_of(base: DTensor) -> int | None:
    """Return a tensor's version counter; None where a write may go uncounted: in inference mode, after disable()."""
    return base._version if _WRITE_WATCH.is_on and not base.is_inference() else None


def add_live_view(view: DTensor, base: DTensor) -> None:
    """Count a view as live until it is deleted."""
    with _LOCK:
        views = LIVE.setdefault(base, set())
        views.add(weakref.ref(view, views.discard))
        if _WRITE_WATCH.is_on:
            _install()


def live_views(base: DTensor) -> list[Any]:
    """Return the gathered views of a tensor that are still referenced."""
    return [view for reference in tuple(LIVE.get(base, ())) if (view := reference()) is not None]


def mark_all_stale() -> None:
    """Let every live view be gathered when it is next read."""
    with _LOCK:
        for base in list(LIVE):
            _mark_views(base)


def _mark_written(op: Any, args: Any, kwargs: Any) -> None:
    positions = written_positions(op)
    with _LOCK:
        if not any(LIVE.values()):
            return
        written = {storage_id(tensor) for slot, tensor in bind(op, args, kwargs).tensor_args() if slot[0] in positions}
        for base in list(LIVE):
            if storage_id(base) in written:
                _mark_views(base)


def _mark_views(base: DTensor) -> None:
    for view in live_views(base):
        view._shown_version = STALE


@functools.cache
def _uncounted() -> tuple[Any, ...]:
    """Return the foreach and fused operators that write; torch counts none of their writes into DTensors."""
    names = torch_dispatch.operators("_foreach_", "_fused_", "_amp_foreach_")
    return tuple(op for op in map(torch_dispatch.operator, names) if op is not None and written_positions(op))


def _install() -> None:
    table = torch_dispatch.handlers()
    if isinstance(table.get(_uncounted()[0]), MarkStale):
        return
    for op in _uncounted():
        if not isinstance(replaced := table.get(op), MarkStale):
            table[op] = MarkStale(replaced)


def _remove_if_unused() -> None:
    with _LOCK:
        if not any(LIVE.values()):
            _remove()


def _remove() -> None:
    """Restore the handlers that were replaced; a handler that another library has installed since stays."""
    table = torch_dispatch.handlers()
    for op, handler in list(table.items()):
        if isinstance(handler, MarkStale):
            if handler.replaced is None:
                table.pop(op, None)
            else:
                table[op] = handler.replaced
